"""Reading prompts with a head on a device, recorded: as single operations it takes the host as long as several steps.

The number of texts has a few values, and their rows are powers of two, so that few recordings suffice. A warm-up makes
all of them. Hidden states are copied to a buffer that all sizes share.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import sdpa_kernel

from branchwise.core.sequence import SequenceState
from branchwise.cuda.graphs import GraphedFunction, at_first_sight
from branchwise.cuda.inputs import PinnedBuffer, fitting
from branchwise.draft.head.cache import KERNELS, HeadCache
from branchwise.draft.head.following import Unread
from branchwise.draft.head.network import Head
from branchwise.draft.head.prompt import LEAST, MOST, MOST_ROWS

TEXTS = (1, 4, 16)
"""numbers of texts that are recorded"""


class Size(NamedTuple):
    texts: int
    rows: int
    """number of rows of each text"""


def size_of(texts: int, rows: int) -> Size:
    """The recorded size that texts with at most `rows` rows are padded to."""
    return Size(fitting(texts, TEXTS), max(LEAST, 1 << (rows - 1).bit_length()))


class RecordedPrompts:
    """Reads the first rows of texts of which nothing was read yet."""

    def __init__(self, head: Head, cache: HeadCache, embeddings: Tensor, *, context: int, capture: bool) -> None:
        """`context` is the most tokens of a text."""
        self._head, self._cache, self._embeddings, self._capture = head, cache, embeddings, capture
        self._most = min(MOST, context)
        self._numbers: dict[Size, PinnedBuffer] = {}
        """slots and last rows, (texts,) each, and the tokens after the rows, (texts, rows)"""
        self._hidden: list[Tensor] = []
        """buffers of the hidden states, (rows, width) for each tap"""
        self._record()

    def _record(self) -> None:
        self._cells = self._cache.scratch
        self._read = GraphedFunction(self._rows, self._embeddings.device, capture=self._capture)
        self._prepared = False

    def read(self, unread: Mapping[SequenceState, Unread]) -> None:
        for group in together({sequence: min(self._most, len(rows)) for sequence, rows in unread.items()}):
            self._pass({sequence: unread[sequence] for sequence in group})

    def _pass(self, unread: Mapping[SequenceState, Unread]) -> None:
        counts = [min(self._most, len(rows)) for rows in unread.values()]
        size = size_of(len(counts), max(counts))
        self._hold(max(counts))
        if not self._hidden:
            some = next(iter(unread.values())).by_tap(1)
            self._hidden = [state.new_zeros(MOST_ROWS, state.shape[1]) for state in some]
        if at_first_sight() and not self._prepared:
            self._prepared = True
            for other in self._sizes():
                self._read(*self._filled(other, []))
        hidden = self._places(size)
        for row, (rows, count) in enumerate(zip(unread.values(), counts, strict=True)):
            for place, part in zip(hidden, rows.by_tap(count), strict=True):
                place[row, :count] = part
        self._read(*self._filled(size, [*zip(unread, counts, strict=True)]))
        for (sequence, rows), count in zip(unread.items(), counts, strict=True):
            rows.drop(count)
            self._cache.lengths[sequence] = count

    def _hold(self, cells: int) -> None:
        self._cache.hold(cells)
        if self._cells != self._cache.scratch:
            self._record()  # the cache has another address now

    def _sizes(self) -> Iterator[Size]:
        """All sizes that can occur."""
        largest = size_of(1, self._most).rows
        for texts in TEXTS:
            rows = LEAST
            while rows <= min(largest, MOST_ROWS // texts):
                yield Size(texts, rows)
                rows *= 2

    def _filled(self, size: Size, texts: Sequence[tuple[SequenceState, int]]) -> list[Tensor]:
        """The inputs of a pass of this size over texts, each with the number of its rows; missing texts are padded in a
        slot that no text has."""
        if size not in self._numbers:
            self._numbers[size] = PinnedBuffer(size.texts * (2 + size.rows), self._embeddings.device)
        numbers = self._numbers[size]
        host = numbers.host
        ends, tokens = host[: 2 * size.texts].reshape(2, size.texts), host[2 * size.texts :].reshape(size)
        ends[0], ends[1], tokens[:] = self._cache.padding, 0, 0
        for row, (sequence, count) in enumerate(texts):
            ends[:, row] = self._cache.slot[sequence], count - 1
            tokens[row, :count] = sequence.tokens[1 : count + 1]
        slots, last = numbers.copy()[: 2 * size.texts].view(2, size.texts)
        return [slots, last, numbers.device_copy[2 * size.texts :].view(size), *self._places(size)]

    def _places(self, size: Size) -> list[Tensor]:
        """The parts of the buffers that hold the hidden states (texts, rows, width) of every tap."""
        return [place[: size.texts * size.rows].view(*size, -1) for place in self._hidden]

    def _rows(self, slots: Tensor, last: Tensor, after: Tensor, *hidden: Tensor) -> None:
        """Write the first rows of texts in these `slots`, given the index of the `last` row of each, the tokens `after`
        the rows (texts, rows), and the hidden states (texts, rows, width) of each tap. A text is padded after its rows:
        these do not attend to the padding, and later rows overwrite it."""
        cache, (slots, last, after) = self._cache, (part.long() for part in (slots, last, after))
        texts, rows = after.shape
        positions, cells = torch.arange(rows, device=after.device), min(rows, cache.scratch)  # further rows are padding
        cache.tokens[slots, :cells] = after[:, :cells]
        own = (positions <= last[:, None])[:, None, None]

        def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            for kept, new in zip(cache.store[:, layer], (key, value), strict=True):
                kept[slots, :, :cells] = new[:, :, :cells]
            if query.shape[2] == rows:
                return functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
            return functional.scaled_dot_product_attention(query, key, value, own, enable_gqa=True)

        features, every = self._head.features(hidden), positions.expand(texts, -1)
        with sdpa_kernel(KERNELS):
            predict, carry = self._head(features, self._embeddings[after], every, attend, wanted=last)
        cache.predicted[slots], cache.carried[slots] = predict[:, 0], carry[:, 0]


def together(rows: Mapping[SequenceState, int]) -> list[list[SequenceState]]:
    """Groups of texts that are read in one pass: in their order, as many as fit."""
    groups: list[list[SequenceState]] = [[]]
    for sequence, count in rows.items():
        group = groups[-1]
        size = size_of(len(group) + 1, max([count, *map(rows.__getitem__, group)]))
        if group and (len(group) == TEXTS[-1] or size.texts * size.rows > MOST_ROWS):
            groups.append([sequence])
        else:
            group.append(sequence)
    return groups
