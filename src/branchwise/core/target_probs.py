"""The target's distributions over a batch of trees, warped when they are read.

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
    """The target's distributions p over a batch of trees; row (b, i) is the distribution after node i of tree b."""

    greedy: bool
    """whether every distribution has all its mass on one token, so that nothing needs to be drawn"""
    lazy: bool
    """whether to compute row by row and end early. True on the host, where rows take time and reading a value is free.
    False on a device, where launches take time and reading a value is a sync: there a verifier computes whole levels,
    to the end."""
    together: bool
    """on a device, whether to compute the rows of all nodes in one go, before it is known where the walk leads. That
    saves launches as long as the rows fit into the cache of the chip. If they do not, a rule that walks down one path
    reads the rows on its way, and a rule that reads nearly every row asks for `all_at_once`."""

    def at(self, nodes: Tensor) -> Tensor:
        """(…, vocabulary) float32: the distributions after the given nodes (batch,) or (batch, n) of each tree."""

    def best(self, nodes: Tensor) -> Tensor:
        """The tokens (int64) that greedy decoding emits after the given nodes (batch,) or (batch, n)."""


def all_at_once(probs: TargetProbs) -> TargetProbs:
    """The same, for a rule that reads nearly every row whatever is drawn: a device computes all rows in one go, however
    many they are."""
    return _with(probs, together=True)


def one_by_one(probs: TargetProbs) -> TargetProbs:
    """The same, for a rule that reads hardly any row: a device, too, computes only the rows that the rule reads."""
    return _with(probs, together=False)


def _with(probs: TargetProbs, *, together: bool) -> TargetProbs:
    if not isinstance(probs, WarpedProbs) or probs.together == together:
        return probs
    same = copy.copy(probs)
    same.together = together
    return same


def settled(probs: TargetProbs, done: Tensor) -> bool:
    """Whether a walk ends early because every tree is done; never on a device, which would have to wait for the
    answer."""
    return probs.lazy and bool(done.all())


def where_rows(probs: TargetProbs, condition: Tensor, one: Tensor, other: Tensor) -> Tensor:
    """For each tree the row (batch, vocabulary) of `one` if the condition (batch,) holds, otherwise of `other`. On the
    host nothing is copied if all trees agree."""
    if probs.lazy and bool(condition.all()):
        return one
    if probs.lazy and not bool(condition.any()):
        return other
    return torch.where(condition[:, None], one, other)


TOGETHER = 64
"""the most rows that are computed in one go for a rule that walks down one path: 39 MB of float32 with a vocabulary of
151,936; the cache of an H200 holds 50 MB"""


class WarpedProbs:
    """The distributions of a forward pass of the target. Penalties and processors see the path that leads to each
    node."""

    def __init__(self, logits: Tensor, batch: TreeBatch, sequences: Sequence[SequenceState]) -> None:
        """`logits` (batch, nodes, vocabulary) are not warped yet; a batch may have more rows than sequences, as
        padding."""
        self.logits = logits
        self.batch = batch
        self.lazy = logits.device.type == "cpu"
        self.together = logits.shape[0] * logits.shape[1] <= TOGETHER
        self._sequences = [*sequences, *[sequences[-1]] * (len(batch) - len(sequences))]
        self._warp = Warp([text.sampling for text in self._sequences], logits.shape[-1], logits.device)
        self.greedy = self._warp.greedy

    def at(self, nodes: Tensor) -> Tensor:
        # If distributions depend on the text before them, a device computes those of all nodes, because reading `nodes`
        # would make the host wait.
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
        """Whether the distributions depend on nothing but logits, in fixed shapes on a device, so that a CUDA graph can
        compute them."""
        return not self.lazy and not self._warp.looks_back

    @property
    def structure(self) -> tuple[object, ...]:
        """The properties in which two batches must agree if the same operations are to serve both
        (`Warp.structure`)."""
        return self._warp.structure

    def assign(self, other: WarpedProbs) -> None:
        """Take over the sampling parameters of `other`, which has the same structure, in place."""
        self._warp.assign(other._warp)

    def bring(self) -> None:
        """Copy everything that does not change to the device."""
        self._warp.bring()

    def without_texts(self) -> WarpedProbs:
        """The warp alone, without logits and texts, for distributions that depend on nothing but logits."""
        assert self.capturable or self.lazy, "these distributions depend on the texts"
        other = self.over(self.logits, self.batch)
        del other.logits, other.batch  # `over` sets them
        other._sequences = []
        return other

    def over(self, logits: Tensor, batch: TreeBatch) -> WarpedProbs:
        """The same warp over other logits."""
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
            return rows.argmax(dim=-1)  # float32 would have the same argmax
        return self._warp.adjust(rows, self._contexts(nodes)).argmax(dim=-1)

    @cached_property
    def _history(self) -> History | None:
        """The tokens before every node, counted on the device without waiting for the host. None if no penalty needs
        them, or if `_contexts` has them."""
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
        """The text before each row, in the order of the flattened nodes. None if no distribution depends on it, or if
        `_history` has it."""
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
"""for each text: marks of its tokens (vocabulary,), counts of its output (vocabulary,), how many tokens these cover"""


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
