"""The target's laws over a forest, warped when they are asked for.

Warping a row costs more than scoring it on a small model, and a verifier reads only the rows on its walk.
"""

from __future__ import annotations

from collections.abc import Sequence as Rows

import torch
from torch import Tensor

from branchwise.sampling import Context, adjust, warp
from branchwise.sequence import Sequence
from branchwise.tree import Forest


class Laws:
    """Row (b, i) is the law after node i of tree b, which knows the path that leads to it."""

    def __init__(self, logits: Tensor, forest: Forest, sequences: Rows[Sequence]) -> None:
        """`logits` (batch, nodes, vocabulary) of the unwarped model."""
        self.logits = logits
        self.forest = forest
        self._sequences = sequences
        self._sampling = [sequence.sampling for sequence in sequences]

    @property
    def greedy(self) -> bool:
        """Whether every law is certain of one token, so that nothing needs to be drawn."""
        return all(params.greedy for params in self._sampling)

    def rows(self, nodes: Tensor) -> Tensor:
        """(batch, vocabulary) float32: in each tree the law after the given node, nodes (batch,)."""
        return warp(self._logits_at(nodes), self._sampling, self._contexts(nodes))

    def best(self, nodes: Tensor) -> Tensor:
        """(batch,) int64: the tokens that greedy decoding emits after the given nodes."""
        return adjust(self._logits_at(nodes), self._sampling, self._contexts(nodes)).argmax(dim=-1)

    def settled(self, done: Tensor) -> bool:
        """Whether a walk may end early because every tree is done.

        Asking costs nothing on the host and would be a sync on a device, where the answer is therefore always no.
        """
        return done.device.type == "cpu" and bool(done.all())

    def _logits_at(self, nodes: Tensor) -> Tensor:
        return self.logits[torch.arange(len(nodes), device=nodes.device), nodes]

    def _contexts(self, nodes: Tensor) -> list[Context]:
        if not any(params.looks_back for params in self._sampling):
            return [NOTHING] * len(nodes)
        contexts = []
        for sequence, tree, node in zip(self._sequences, self.forest.trees, nodes.tolist(), strict=True):
            path = tree.topology.path(node)[1:]
            drafted = tree.tokens[path].tolist()
            contexts.append(Context(sequence.tokens + drafted, sequence.prompt_length))
        return contexts


NOTHING = Context((), 0)
