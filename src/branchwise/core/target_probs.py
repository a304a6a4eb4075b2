"""The target's distributions over a batch of trees, warped when they are asked for.

Warping a row costs more than scoring it on a small model, and a verifier reads only the rows on its walk.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import cached_property
from typing import Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from branchwise.core.batch import TreeBatch
from branchwise.core.rows import gather_rows, unpack_bits
from branchwise.core.sampling import Context, History, Warp
from branchwise.core.sequence import SequenceState


class TargetProbs(Protocol):
    """Row (b, i) is the distribution after node i of tree b."""

    greedy: bool
    """whether every distribution is certain of one token, so that nothing needs to be drawn"""
    lazy: bool
    """whether to work row by row and end early: so on the host, where rows cost and a look at a value is free. On a
    device launches cost and a look would be a sync, so a verifier works on whole levels, to the end."""
    together: bool
    """on a device, whether to work on the rows of all nodes in one go, wherever the walk will lead. That saves launches
    while the rows fit into the cache of the chip; beyond it a rule that walks down one path reads the rows on its way,
    and a rule that comes to nearly every node asks for `all_at_once`."""

    def at(self, nodes: Tensor) -> Tensor:
        """(…, vocabulary) float32: in each tree the distributions after the given nodes (batch,) or (batch, n)."""

    def best(self, nodes: Tensor) -> Tensor:
        """The tokens (int64) that greedy decoding emits after the given nodes (batch,) or (batch, n)."""


def all_at_once(probs: TargetProbs) -> TargetProbs:
    """The same for a rule that reads nearly every row whatever is drawn: on a device in one go, however many."""
    return _with(probs, together=True)


def one_by_one(probs: TargetProbs) -> TargetProbs:
    """The same for a rule that reads hardly any row: on a device too, only those it asks for are made."""
    return _with(probs, together=False)


def _with(probs: TargetProbs, *, together: bool) -> TargetProbs:
    if not isinstance(probs, WarpedProbs) or probs.together == together:
        return probs
    same = copy.copy(probs)
    same.together = together
    return same


def settled(probs: TargetProbs, done: Tensor) -> bool:
    """Whether a walk may end early because every tree is done."""
    return probs.lazy and bool(done.all())


def where_rows(probs: TargetProbs, condition: Tensor, one: Tensor, other: Tensor) -> Tensor:
    """Per tree, the row (batch, vocabulary) of one or of the other; nothing is copied where a look shows the answer."""
    if probs.lazy and bool(condition.all()):
        return one
    if probs.lazy and not bool(condition.any()):
        return other
    return torch.where(condition[:, None], one, other)


TOGETHER = 64
"""rows that a rule which walks down one path works on in one go: 39 MB of float32 in a vocabulary of 151,936, and an
H200 caches 50"""


class WarpedProbs:
    """The distributions that a pass of the target found. Each node knows the path that leads to it."""

    def __init__(self, logits: Tensor, batch: TreeBatch, sequences: Sequence[SequenceState]) -> None:
        """`logits` (batch, nodes, vocabulary) of the unwarped model; a batch may be padded beyond the sequences."""
        self.logits = logits
        self.batch = batch
        self.lazy = logits.device.type == "cpu"
        self.together = logits.shape[0] * logits.shape[1] <= TOGETHER
        self._sequences = [*sequences, *[sequences[-1]] * (len(batch) - len(sequences))]
        self._warp = Warp([text.sampling for text in self._sequences], logits.shape[-1], logits.device)
        self.greedy = self._warp.greedy

    def at(self, nodes: Tensor) -> Tensor:
        # If probabilities depend on the text before, a device computes those of all nodes: a look at `nodes` would make
        # the host wait.
        if not self.lazy and (self.together or self._warp.looks_back):
            return gather_rows(self._all, nodes)
        return self._warp(gather_rows(self.logits, nodes), self._contexts(nodes))

    @cached_property
    def _all(self) -> Tensor:
        """(batch, nodes, vocabulary): on a device one launch for all rows costs less than a launch for each."""
        return self._warp(self.logits, self._contexts(self._every_node), self._history)

    @property
    def _every_node(self) -> Tensor:
        return torch.arange(self.logits.shape[1], device=self.logits.device).expand(len(self.logits), -1)

    @property
    def capturable(self) -> bool:
        """Whether the probabilities depend on nothing but logits, in fixed shapes on a device."""
        return not self.lazy and not self._warp.looks_back

    @property
    def structure(self) -> tuple[object, ...]:
        """What two batches must agree in for the same operations to serve both."""
        return self._warp.structure

    def assign(self, other: WarpedProbs) -> None:
        """Take the sampling parameters of other probabilities of the same structure, in place."""
        self._warp.assign(other._warp)

    def bring(self) -> None:
        """Have everything that does not change on the device."""
        self._warp.bring()

    def without_texts(self) -> WarpedProbs:
        """The way of warping alone, for distributions that depend on nothing but logits."""
        assert self.capturable or self.lazy, "these distributions depend on the texts"
        other = self.over(self.logits, self.batch)
        del other.logits, other.batch  # given when it is put over others
        other._sequences = []
        return other

    def over(self, logits: Tensor, batch: TreeBatch) -> WarpedProbs:
        """The same way of warping over other logits."""
        other: WarpedProbs = copy.copy(self)
        for name in ("_all", "_history"):
            other.__dict__.pop(name, None)
        other.logits, other.batch = logits, batch
        return other

    def best(self, nodes: Tensor) -> Tensor:
        if not self.lazy and self._warp.looks_back:
            adjusted = self._warp.adjust(self.logits, self._contexts(self._every_node), self._history)
            return gather_rows(adjusted.argmax(dim=-1), nodes)
        rows = gather_rows(self.logits, nodes)
        if not self._warp.adjusts and not self.lazy:
            return rows.argmax(dim=-1)  # in float32 it would be the same
        return self._warp.adjust(rows, self._contexts(nodes)).argmax(dim=-1)

    @cached_property
    def _history(self) -> History | None:
        """What comes before every node, on the device and without the host; None if no penalty asks for it."""
        if self.lazy or not self._warp.looks_back or self._warp.processes:
            return None
        known = [_count_tokens(text, self.logits.shape[-1], self.logits.device) for text in self._sequences]
        below = unpack_bits(self.batch.ancestor_bits, self.batch.nodes).float()
        below[:, :, 0] = 0  # the root is in the text
        places = self.batch.tokens[:, None, :].expand(below.shape)
        path = torch.zeros(self.logits.shape, device=self.logits.device).scatter_add_(2, places, below)
        seen, counts = (torch.stack(rows)[:, None] for rows in zip(*known, strict=True))
        return History(seen | (path > 0), counts + path)

    def _contexts(self, nodes: Tensor) -> list[Context] | None:
        """What stands before each row, in the order of the flattened nodes; None if no distribution depends on it."""
        if not self._warp.looks_back or (not self.lazy and not self._warp.processes):
            return None
        contexts = []
        for sequence, tree, row in zip(self._sequences, self.batch.trees, nodes.tolist(), strict=True):
            for node in row if nodes.ndim == 2 else [row]:
                node = min(node, len(tree) - 1)  # padding has no path, and its distribution is not read
                drafted = tree.tokens[tree.path(node)[1:]].tolist()
                contexts.append(Context(sequence.tokens + drafted, sequence.prompt_length))
        return contexts


_counts: WeakKeyDictionary[SequenceState, tuple[Tensor, Tensor, int]] = WeakKeyDictionary()
"""by text: its tokens as marks (vocabulary,), the counts of its output (vocabulary,), how many tokens are counted"""


def _count_tokens(text: SequenceState, vocabulary: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Marks and counts of a text in device memory; only its new tokens are counted."""
    seen, output, counted = _counts.get(text, (None, None, 0))
    if seen is None or output is None or output.device != device:
        seen, output = torch.zeros(vocabulary, dtype=torch.bool, device=device), torch.zeros(vocabulary, device=device)
        counted = 0
    new = torch.tensor(text.tokens[counted:], dtype=torch.long).to(device, non_blocking=True)
    written = new[max(text.prompt_length - counted, 0) :]
    seen.index_fill_(0, new, True)
    output.index_add_(0, written, torch.ones(len(written), device=device))
    _counts[text] = seen, output, len(text.tokens)
    return seen, output
