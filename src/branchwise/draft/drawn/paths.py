"""Paths, drawn on the device; one path is a chain.

Every path has cache rows of its own even while several paths have the same tokens, so that shapes never depend on what
was drawn. Paths that agree so far still share a node: they draw from the distribution of the first of them, which is
the q of the node. The shape of the merged tree depends on the drawn tokens, so the host reads these, unless there is
only one path.
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
    """The paths of a policy, each of `length` tokens."""

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
        """Draw all paths. `place.tokens` gets the first path as a chain; if there are several paths, `place.told` gets
        the tokens of all of them and their nodes in the tree."""
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
        """The trees, cut to budgets. This is exact: the draws of a level do not depend on how many levels follow."""
        lengths = [self._policy.within(budget) for budget in budgets]
        if self.resident:
            return [chain(*one) for one in zip(found.tokens, found.q, lengths, strict=False)]
        drawn = found.told.tolist()  # the only synchronisation
        return [
            tree_of_paths(sequence.root, *one, self._policy.draw)
            for sequence, one in zip(sequences, zip(drawn, found.q, lengths, strict=False), strict=True)
        ]


def chain(tokens: Tensor, q: Tensor, length: int) -> DraftTree:
    """The first `length` levels of a drawn chain."""
    parents = chain_topology(length + 1).parents
    return DraftTree(tokens[: length + 1], parents, Draw.PATHS, q[:length] if length else None, (length,))


def numbered(node: Tensor, token: Tensor, size: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The next nodes of paths (batch, paths), given their nodes so far and their next tokens. New nodes are numbered
    from `size` (batch, 1) on, children of one node one after the other, in the order in which paths first reach them.
    Also returns for each path the first path at the same node, and the new size of the tree."""
    count = node.shape[1]
    path = torch.arange(count, device=node.device)
    same = (node[:, :, None] == node[:, None, :]) & (token[:, :, None] == token[:, None, :])
    first = torch.where(same, path, count).amin(dim=2)
    order, leads = node * count + first, first == path
    before = leads[:, None, :] & (order[:, None, :] < order[:, :, None])
    return size + before.sum(dim=2), first, size + leads.sum(dim=1, keepdim=True)
