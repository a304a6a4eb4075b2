"""The most probable trees of a head, laid on the device: the policy `topk`, without the host.

Every level expands a fixed number of its most probable nodes, and in the end the best of all proposed nodes are kept,
among them those of a copy (`copies`). Only the device knows the shape of the trees (`LaidTree`).
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
"""most batches of trees that are cached"""


class BestFirstDraft(DeviceDraft):
    def __init__(self, tree: TopK, *parts: Any, copies: int = 0) -> None:
        """Up to `copies` tokens continue an earlier occurrence of the end of the text."""
        super().__init__(*parts)
        self._shape(tree, copies)

    def shaped(self, tree: TopK, copies: int) -> BestFirstDraft:
        """A draft with the same head, whose weights are shared, and trees of another shape."""
        other = copy.copy(self)
        other._shape(tree, copies)
        return other

    def _shape(self, tree: TopK, copies: int) -> None:
        width = min(tree.width, len(self._table))
        sizes = [width, *[width * width] * (tree.depth - 1)]  # nodes that each level proposes
        self.depth, self._width = max(tree.depth, copies), width
        self._grown, self._copies = tree.depth, copies
        """number of levels that the head drafts, and number of tokens of a copy"""
        self.nodes = 1 + min(tree.nodes, sum(sizes))
        self.cells = width * (tree.depth - 1)
        device = self._table.device
        self._cell_depths = torch.arange(max(1, self.cells), device=device) // width
        self._levels = torch.arange(1, tree.depth + 1, device=device).repeat_interleave(
            torch.tensor(sizes, device=device)
        )
        """(nodes that the head proposes,): the depth of each node"""
        self._standing: dict[tuple[int, int], LaidTrees] = {}
        """(address, number of texts) -> whole trees at this address"""

    def grow(self, slots: Tensor, lengths: Tensor, roots: Tensor) -> tuple[Tensor, ...]:
        """Tokens, parents and depths (batch, nodes), and ancestors as bits (batch, nodes, words)."""
        slots, lengths, roots = slots.long(), lengths.long(), roots.long()
        batch, width = len(slots), self._width
        every = torch.arange(batch, device=roots.device)[:, None]
        predict, carry = self._at_roots(slots, roots)
        values = torch.zeros(batch, 1, device=roots.device)
        expanded = torch.full_like(roots, -1)[:, None]  # (batch, rows): their indices among the proposed nodes
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
        """The trees of the best proposed nodes, each after its parent; `levels` are the depths of the proposed nodes.
        The results are those of `grow`."""
        values, tokens, parents = proposed
        chosen = values.topk(self.nodes - 1, dim=1).indices.sort(dim=1).values
        batch, count = chosen.shape
        numbers = torch.arange(1, count + 1, device=roots.device).expand(batch, -1)
        # With equal probabilities, a child may be chosen without its parent: then the child becomes padding.
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
        real = reach[..., 0]  # nodes that descend from the root
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
        if key not in self._standing:  # at the same address in every step, so the same tree objects serve all steps
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
