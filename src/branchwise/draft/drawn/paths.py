"""Paths, drawn on the device; one path is a chain.

The rows of a path lie apart from those of the others even where both have the same tokens, so that shapes never depend
on what was drawn. Paths that agree still are one path: they draw from the distribution of the first of them, which is
the q of their node. The shape of the merged tree is what was drawn, so the host reads that, unless there is one path.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from branchwise.core.sequence import SequenceState
from branchwise.core.topology import chain_topology
from branchwise.core.tree import DraftTree, Draw
from branchwise.draft.base import Budget
from branchwise.draft.builder import tree_of_paths
from branchwise.draft.drawn.choice import Picks
from branchwise.draft.drawn.trees import Choose, Drawn, Level, Passes, Texts, TreeDraft
from branchwise.draft.model.reading import BatchReading
from branchwise.draft.policies.paths import Paths
from branchwise.draft.sampler import PICKS


class PathDraft(TreeDraft):
    """The paths of a policy, of this length."""

    def __init__(self, policy: Paths, length: int, device: torch.device) -> None:
        self._policy, self._count = policy, policy.count
        self.depth, self.below, self.resident = length, policy.count * (length - 1), policy.count == 1
        level, path = torch.arange(length)[:, None], torch.arange(policy.count)
        self._draws = (level * policy.count + torch.where(level >= policy.common, path, 0)).to(device)
        super().__init__([self._level(number) for number in range(length - 1)], device)

    def _level(self, number: int) -> Level:
        """Each node sees the rows of its own path."""
        rows = torch.arange((number + 1) * self._count)
        path = torch.arange(self._count)
        own, above = rows % self._count == path[:, None], path if number else torch.zeros_like(path)
        return Level(number * self._count, torch.full((self._count,), number), rows // self._count, own, above)

    def serves(self, budgets: Sequence[Budget]) -> bool:
        return max(map(self._policy.within, budgets)) <= self.depth

    def whole(self, budgets: Sequence[Budget]) -> bool:
        return min(map(self._policy.within, budgets)) >= self.depth

    def place(self, size: int, vocabulary: int) -> Drawn:
        tokens = torch.zeros(size, self.steps, dtype=torch.long, device=self.device)
        told = torch.zeros(size, self._count, self.depth, 2, dtype=torch.long, device=self.device)
        return Drawn(tokens, told, torch.zeros(size, self.below + 1, vocabulary, device=self.device))

    def choice(self, reading: BatchReading, *, greedy: bool, drawn: bool, compile: bool) -> Choose:
        return Picks(reading, self._count, greedy=greedy, drawn=drawn, compile=compile)

    def grow(self, passes: Passes, choose: Choose, place: Drawn, texts: Texts) -> Drawn:
        """The first path is written as a chain; of all paths the tokens, and which nodes of the tree these are."""
        positions, roots, logits = passes.roots
        place.tokens[:, 0] = roots
        keys = choose.keys(PICKS, self._draws.flatten(), texts.seeds, positions).view(-1, *self._draws.shape)
        every = torch.arange(len(roots), device=roots.device)[:, None]
        node = first = torch.zeros(len(roots), self._count, dtype=torch.long, device=roots.device)
        size = torch.ones(len(roots), 1, dtype=torch.long, device=roots.device)
        for level in range(self.depth):
            # Distributions (batch, nodes, vocabulary): one at the root, then one for every path.
            apart = level >= self._policy.common
            token, probs = choose(logits, first, keys[:, level], texts.greedy, apart=apart)
            place.tokens[:, level + 1] = token[:, 0]
            if self._count == 1:
                place.q[:, level] = probs[:, 0]
            else:
                place.q[every, node] = probs[every, first]  # all paths of a node write the same
                node, first, size = numbered(node, token, size)
                place.told[:, :, level, 0], place.told[:, :, level, 1] = token, node
            if level + 1 < self.depth:
                logits = passes.below(token, level + 1)
        return place

    def trees(self, found: Drawn, sequences: Sequence[SequenceState], budgets: Sequence[Budget]) -> list[DraftTree]:
        """A draw belongs to its level: fewer levels are drawn as the first of more are."""
        lengths = [self._policy.within(budget) for budget in budgets]
        if self.resident:
            return [chain(*one) for one in zip(found.tokens, found.q, lengths, strict=False)]
        drawn = found.told.tolist()  # the only synchronisation
        return [
            tree_of_paths(sequence.root, *one, self._policy.draw)
            for sequence, one in zip(sequences, zip(drawn, found.q, lengths, strict=False), strict=True)
        ]


def chain(tokens: Tensor, q: Tensor, length: int) -> DraftTree:
    """The first levels of a drawn chain."""
    parents = chain_topology(length + 1).parents
    return DraftTree(tokens[: length + 1], parents, Draw.PATHS, q[:length] if length else None, (length,))


def numbered(node: Tensor, token: Tensor, size: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The nodes that paths (batch, paths) come to from these nodes with these tokens, numbered from `size` (batch, 1)
    on; for each the first path that comes to it, and the nodes of the tree then. Children of one node stand together,
    in the order in which paths first reach them."""
    count = node.shape[1]
    path = torch.arange(count, device=node.device)
    same = (node[:, :, None] == node[:, None, :]) & (token[:, :, None] == token[:, None, :])
    first = torch.where(same, path, count).amin(dim=2)
    order, leads = node * count + first, first == path
    before = leads[:, None, :] & (order[:, None, :] < order[:, :, None])
    return size + before.sum(dim=2), first, size + leads.sum(dim=1, keepdim=True)
