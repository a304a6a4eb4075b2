"""Reading a few waiting rows of texts, such as the end of a prompt whose beginning was inherited.

A pass of the network over these rows is a hundred launches, and all texts of the batch wait for it. But reading the
rows that a verdict kept is recorded. So the same function (`HeadOnDevice.catch_up`), recorded, reads waiting rows too:
a few of every text at a time, padded to few sizes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice
from typing import NamedTuple

import torch
from torch import Tensor

from branchwise.core.sequence import SequenceState
from branchwise.cuda.graphs import GraphedFunction
from branchwise.cuda.inputs import PinnedBuffer, fitting
from branchwise.draft.head.cache import HeadCache
from branchwise.draft.head.following import Unread
from branchwise.draft.head.trees.device import HeadOnDevice

STEPS = 8
"""number of rows of a text that are read at a time"""
MOST = 8 * STEPS
"""most waiting rows of a text; more rows are read in larger passes, which are worth their launches"""
BATCHES = (1, 4, 16)
"""numbers of texts that are recorded"""


class Places(NamedTuple):
    """Input buffers for one number of texts."""

    numbers: PinnedBuffer
    """slots, rows and following tokens, a line each; then the tokens and the nodes of paths, (batch, steps) each"""
    hidden: list[Tensor]
    """hidden states (batch, steps, width) for each tap"""


class Waiting:
    def __init__(self, head: HeadOnDevice, *, capture: bool) -> None:
        self._cache: HeadCache = head.cache
        self._device = head.cache.store.device
        self._places: dict[int, Places] = {}
        self._head = head
        self._read = GraphedFunction(self._caught_up, self._device, capture=capture)

    def read(self, unread: Mapping[SequenceState, Unread]) -> None:
        """Read all waiting rows of these texts; the cache must have room for them."""
        while behind := [sequence for sequence, rows in unread.items() if len(rows)]:
            some = list(islice(behind, BATCHES[-1]))
            self._pass({sequence: unread[sequence] for sequence in some})

    def _pass(self, unread: Mapping[SequenceState, Unread]) -> None:
        size, cache = fitting(len(unread), BATCHES), self._cache
        states = [rows.by_tap(STEPS) for rows in unread.values()]
        if size not in self._places:
            self._places[size] = self._made(size, states[0])
        numbers, hidden = self._places[size]
        host, line = numbers.host, aligned(size)
        ends, steps = host[: 3 * line].reshape(3, line), host[3 * line :].reshape(2, size, STEPS)
        ends[0], ends[1:], steps[0], steps[1] = cache.padding, 0, 0, -1
        for row, (sequence, rows) in enumerate(unread.items()):
            count, start = min(STEPS, len(rows)), cache.lengths[sequence]
            tokens = sequence.tokens[start : start + count + 1]
            assert len(tokens) == count + 1, "a head must know the token after every state that it reads"
            ends[:, row] = cache.slot[sequence], start, tokens[-1]
            steps[0, row, :count], steps[1, row, :count] = tokens[:-1], range(count)
            for place, part in zip(hidden, states[row], strict=True):
                place[row, :count] = part[:count]
        numbers.copy()
        slots, lengths, following = numbers.device_copy[: 3 * line].view(3, line)[:, :size]
        tokens, paths = numbers.device_copy[3 * line :].view(2, size, STEPS)
        self._read(slots, lengths, tokens, paths, following, *hidden)
        for sequence, rows in unread.items():
            count = min(STEPS, len(rows))
            rows.drop(count)
            cache.lengths[sequence] += count

    def _made(self, size: int, states: Sequence[Tensor]) -> Places:
        hidden = [torch.zeros(size, STEPS, state.shape[1], dtype=state.dtype, device=self._device) for state in states]
        return Places(PinnedBuffer(3 * aligned(size) + 2 * size * STEPS, self._device), hidden)

    def _caught_up(
        self, slots: Tensor, lengths: Tensor, tokens: Tensor, paths: Tensor, following: Tensor, *hidden: Tensor
    ) -> None:
        self._head.catch_up(slots, lengths, tokens, paths.long(), following.long(), *hidden)  # int64, as in verdicts


def aligned(count: int) -> int:
    """`count` rounded up to a multiple of 4: kernels that were compiled for the numbers of verdicts expect this
    alignment."""
    return -(-count // 4) * 4
