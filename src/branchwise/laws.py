"""The target's laws over a forest, warped when they are asked for.

Warping a row costs more than scoring it on a small model, and a verifier reads only the rows on its walk.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence as Rows
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from branchwise.forest import Forest
from branchwise.rows import rows_at
from branchwise.sampling import Context, Warp
from branchwise.sequence import Sequence


class Laws(Protocol):
    """Row (b, i) is the law after node i of tree b."""

    @property
    def greedy(self) -> bool:
        """Whether every law is certain of one token, so that nothing needs to be drawn."""

    @property
    def lazy(self) -> bool:
        """Whether to work row by row and end early: so on the host, where rows cost and a look at a value is free.

        On a device launches cost and a look would be a sync; there a verifier works on whole levels, to the end.
        """

    @property
    def together(self) -> bool:
        """On a device, whether to work on the rows of all nodes in one go, wherever the walk will lead.

        That spares launches while the rows fit into the cache of the chip; beyond it a rule that walks down one path
        reads the rows on its way. One that comes to nearly every node asks for `all_at_once`.
        """

    def rows(self, nodes: Tensor) -> Tensor:
        """(…, vocabulary) float32 for nodes (batch,) or (batch, n): in each tree the laws after the given nodes."""

    def best(self, nodes: Tensor) -> Tensor:
        """The tokens (int64) that greedy decoding emits after the given nodes (batch,) or (batch, n)."""


def all_at_once(laws: Laws) -> Laws:
    """The same laws for a rule that reads nearly every row whatever is drawn: on a device in one go, however many."""
    return _with(laws, together=True)


def one_by_one(laws: Laws) -> Laws:
    """The same laws for a rule that reads hardly any row: on a device too, only those it asks for are made."""
    return _with(laws, together=False)


def _with(laws: Laws, *, together: bool) -> Laws:
    if not isinstance(laws, ModelLaws) or laws.together == together:
        return laws
    same = copy.copy(laws)
    same.together = together
    return same


def settled(laws: Laws, done: Tensor) -> bool:
    """Whether a walk may end early because every tree is done."""
    return laws.lazy and bool(done.all())


def where_rows(laws: Laws, condition: Tensor, one: Tensor, other: Tensor) -> Tensor:
    """Per tree, the row (batch, vocabulary) of one or of the other; nothing is copied where a look shows the answer."""
    if laws.lazy and bool(condition.all()):
        return one
    if laws.lazy and not bool(condition.any()):
        return other
    return torch.where(condition[:, None], one, other)


TOGETHER = 64
"""at most so many rows are worked on in one go for a rule that walks down one path: 39 MB of float32 in a vocabulary of
151,936, and an H200 caches 50"""


class ModelLaws:
    """The laws that a pass of the target found. Each node knows the path that leads to it."""

    def __init__(self, logits: Tensor, forest: Forest, sequences: Rows[Sequence]) -> None:
        """`logits` (batch, nodes, vocabulary) of the unwarped model; a batch may have more entries than there are
        texts, and what is found for those means nothing."""
        self.logits = logits
        self.forest = forest
        self.lazy = logits.device.type == "cpu"
        self.together = logits.shape[0] * logits.shape[1] <= TOGETHER
        self._sequences = sequences
        sampling = [sequence.sampling for sequence in sequences]
        self._warp = Warp(sampling + sampling[-1:] * (len(forest) - len(sampling)), logits.shape[-1], logits.device)

    @property
    def greedy(self) -> bool:
        return self._warp.greedy

    def rows(self, nodes: Tensor) -> Tensor:
        # Where laws depend on the text before, a device is asked for all at once: a look at `nodes` would be a sync.
        if not self.lazy and (self.together or self._warp.looks_back):
            return rows_at(self._all, nodes)
        return self._warp(rows_at(self.logits, nodes), self._contexts(nodes))

    @cached_property
    def _all(self) -> Tensor:
        """(batch, nodes, vocabulary): on a device one launch for all rows costs less than a launch for each."""
        nodes = torch.arange(self.logits.shape[1], device=self.logits.device).expand(len(self.logits), -1)
        return self._warp(self.logits, self._contexts(nodes))

    @property
    def capturable(self) -> bool:
        """Whether the laws depend on nothing but logits, in fixed shapes on a device."""
        return not self.lazy and not self._warp.adjusts

    @property
    def shape(self) -> tuple[object, ...]:
        """What two batches must agree in for the same operations to serve both."""
        return tuple((p.temperature, p.top_k, p.top_p, p.min_p) for p in self._warp.sampling)

    def bring(self) -> None:
        """Have everything that does not change on the device."""
        self._warp.bring()

    def without_texts(self) -> ModelLaws:
        """The way of warping alone, for laws that depend on nothing but logits."""
        assert self.capturable or self.lazy, "these laws depend on the texts"
        other: ModelLaws = copy.copy(self)
        for name in ("_all", "logits", "forest"):  # both are given when it is put over others
            other.__dict__.pop(name, None)
        other._sequences = ()
        return other

    def over(self, logits: Tensor, forest: Forest) -> ModelLaws:
        """The same way of warping over other logits."""
        other: ModelLaws = copy.copy(self)
        other.__dict__.pop("_all", None)
        other.logits, other.forest = logits, forest
        return other

    def best(self, nodes: Tensor) -> Tensor:
        rows = rows_at(self.logits, nodes)
        if not self._warp.adjusts and not self.lazy:
            return rows.argmax(dim=-1)  # in float32 it would be the same
        return self._warp.adjust(rows, self._contexts(nodes)).argmax(dim=-1)

    def _contexts(self, nodes: Tensor) -> list[Context] | None:
        """What stands before each row, in the order of the flattened nodes; None where no law depends on it."""
        if not self._warp.looks_back:
            return None
        contexts = []
        texts = [*self._sequences, *[self._sequences[-1]] * (len(self.forest) - len(self._sequences))]
        for sequence, tree, row in zip(texts, self.forest.trees, nodes.tolist(), strict=True):
            for node in row if nodes.ndim == 2 else [row]:
                node = min(node, len(tree) - 1)  # padding has no path, and nobody reads its law
                drafted = tree.tokens[tree.topology.path(node)[1:]].tolist()
                contexts.append(Context(sequence.tokens + drafted, sequence.prompt_length))
        return contexts
