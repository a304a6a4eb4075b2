"""The most probable trees of a head, laid on the device: `topk` of the policies, without the host.

Every level expands its most probable nodes, a fixed number of them, and in the end the best of all proposed nodes are
kept, those of a copy among them (`copies`). Their shape is known where they lie, and nowhere else (`LaidTree`).
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from branchwise.core.rows import pack_bits, words_for
from branchwise.core.tree import DeviceShape, DraftTree, LaidTree
from branchwise.cuda.laid import LaidTrees
from branchwise.draft.base import Budget
from branchwise.draft.head.trees.copies import Nodes, copied, with_copy
from branchwise.draft.head.trees.device import DeviceDraft
from branchwise.draft.policies.topk import TopK

MOST_STANDING = 256
"""batches of trees that are kept"""


class BestFirstDraft(DeviceDraft):
    def __init__(self, tree: TopK, *parts: Any, copies: int = 0) -> None:
        """`copies` is how many tokens may be copied from where the end of a text stood before."""
        super().__init__(*parts)
        self._shape(tree, copies)

    def shaped(self, tree: TopK, copies: int) -> BestFirstDraft:
        """The same head, whose weights are shared, with trees of another shape."""
        other = copy.copy(self)
        other._shape(tree, copies)
        return other

    def _shape(self, tree: TopK, copies: int) -> None:
        width = min(tree.width, len(self._table))
        sizes = [width, *[width * width] * (tree.depth - 1)]  # nodes that each level proposes
        self.depth, self._width = max(tree.depth, copies), width
        self._grown, self._copies = tree.depth, copies
        """levels that the head drafts, and tokens of a copy"""
        self.nodes = 1 + min(tree.nodes, sum(sizes))
        self.cells = width * (tree.depth - 1)
        device = self._table.device
        self._cell_depths = torch.arange(max(1, self.cells), device=device) // width
        self._levels = torch.arange(1, tree.depth + 1, device=device).repeat_interleave(
            torch.tensor(sizes, device=device)
        )
        """(nodes that the head proposes,): how deep each one is"""
        self._standing: dict[tuple[int, int], LaidTrees] = {}
        """by their place and their number: trees that nothing is cut from"""

    def grow(self, slots: Tensor, lengths: Tensor, roots: Tensor) -> tuple[Tensor, ...]:
        """Tokens, parents and depths (batch, nodes), and ancestors as bits (batch, nodes, words)."""
        slots, lengths, roots = slots.long(), lengths.long(), roots.long()
        batch, width = len(slots), self._width
        every = torch.arange(batch, device=roots.device)[:, None]
        predict, carry = self._at_roots(slots, roots)
        values = torch.zeros(batch, 1, device=roots.device)
        expanded = torch.full_like(roots, -1)[:, None]  # (batch, rows): which of the proposed nodes they are
        own = torch.zeros(batch, 1, max(1, self.cells), dtype=torch.bool, device=roots.device)
        proposed: list[tuple[Tensor, Tensor, Tensor]] = []  # values, tokens and parents of every level
        first = 0
        for depth in range(1, self._grown + 1):
            likely = self._best(predict, slots, lengths, depth, width)
            value = (values[..., None] + likely.logprobs).flatten(1)
            token, parent = likely.tokens.flatten(1), expanded.repeat_interleave(width, dim=1)
            proposed.append((value, token, parent))
            if depth == self._grown:
                break
            values, best = value.topk(width, dim=1)
            above = best // width
            expanded, tokens = first + best, token.gather(1, best)
            if self.grammars is not None:
                self.grammars.descend(above, tokens)
            first += value.shape[1]
            cell = (depth - 1) * width
            own = own[every, above]
            own[:, :, cell : cell + width] |= torch.eye(width, dtype=torch.bool, device=roots.device)
            predict, carry = self._below(slots, lengths, carry[every, above], tokens, cell, own, depth)
        value, token, parent = (torch.cat(part, dim=1) for part in zip(*proposed, strict=True))
        whole, levels = (value, token, parent), self._levels[: value.shape[1]]
        if self._copies:
            whole = with_copy(whole, copied(self.cache.tokens[slots], lengths, self._copies), self._grown)
            levels = torch.cat([levels, torch.arange(1, self._copies + 1, device=roots.device)])
        return self._lay(roots, whole, levels)

    def _lay(self, roots: Tensor, proposed: Nodes, levels: Tensor) -> tuple[Tensor, ...]:
        """The best of all proposed nodes below their roots, each behind its parent; `levels` says how deep they are."""
        values, tokens, parents = proposed
        chosen = values.topk(self.nodes - 1, dim=1).indices.sort(dim=1).values
        batch, count = chosen.shape
        numbers = torch.arange(1, count + 1, device=roots.device).expand(batch, -1)
        # Of equally probable nodes a parent may be left out while its child is in: then the child is padding.
        place = torch.full((batch, values.shape[1] + 1), -1, device=roots.device).scatter_(1, chosen, numbers)
        place[:, -1] = 0  # the root, which is none of the proposed nodes
        above = place.gather(1, parents.gather(1, chosen) % (values.shape[1] + 1))
        root = torch.zeros_like(roots)[:, None]
        above = torch.cat([root - 1, above], dim=1)
        depths = torch.cat([root, levels[chosen]], dim=1)
        reach = torch.eye(count + 1, dtype=torch.bool, device=roots.device).repeat(batch, 1, 1)
        every = torch.arange(batch, device=roots.device)[:, None]
        for _ in range(self.depth):
            reach = reach | (reach[every, above.clamp_min(0)] & (above >= 0)[..., None])
        real = reach[..., 0]  # whoever descends from the root
        found = torch.cat([roots[:, None], tokens.gather(1, chosen)], dim=1)
        return (
            torch.where(real, found, 0),
            torch.where(real, above, -1),
            torch.where(real, depths, 0),
            pack_bits(reach & real[..., None]),
        )

    def trees(self, found: tuple[Tensor, ...], budgets: Sequence[Budget]) -> list[DraftTree]:
        tokens, parents, depths, bits = found
        whole = tokens.device.type != "cpu" and all(
            budget.depth >= self.depth and budget.nodes >= tokens.shape[1] for budget in budgets
        )
        if not whole:
            return self._cut(found, budgets)
        key = tokens.data_ptr(), len(budgets)
        if key not in self._standing:  # they lie at the same place at every step, so they are the same trees
            if len(self._standing) > MOST_STANDING:
                self._standing.clear()
            shape = DeviceShape(parents, depths, bits)
            self._standing[key] = LaidTrees(self._cut(found, budgets), tokens, shape)
        return self._standing[key]

    def _cut(self, found: tuple[Tensor, ...], budgets: Sequence[Budget]) -> list[DraftTree]:
        return [self._within(budget, *rows) for budget, *rows in zip(budgets, *found, strict=False)]

    def _within(self, budget: Budget, tokens: Tensor, parents: Tensor, depths: Tensor, bits: Tensor) -> DraftTree:
        depth = min(budget.depth, self.depth)
        nodes = min(budget.nodes, len(tokens)) if depth else 1
        if depth < self.depth:  # what lies deeper becomes padding
            kept = depths <= depth
            tokens, parents = torch.where(kept, tokens, 0), torch.where(kept, parents, -1)
            depths, bits = torch.where(kept, depths, 0), torch.where(kept[:, None], bits, 0)
        shape = DeviceShape(parents[:nodes], depths[:nodes], bits[:nodes, : words_for(nodes)])
        return LaidTree.of(tokens[:nodes], shape, min(depth, nodes - 1))
