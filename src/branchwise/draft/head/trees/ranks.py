"""Trees of ranks that a head lays on the device.

The shape is known in advance, so the parent of every row, and the cells that it attends to, are constants.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from branchwise.core.topology import Topology
from branchwise.core.tree import DraftTree, Draw
from branchwise.draft.base import Budget
from branchwise.draft.head.trees.device import DeviceDraft
from branchwise.draft.policies.template import Ranks, places_in


class Level(NamedTuple):
    """The nodes of one level that have children, as constants on the device."""

    depth: int
    nodes: Tensor
    """(rows,): the places of these nodes in the tree"""
    above: Tensor
    """(rows,): the rows of their parents in the level before"""
    own: Tensor
    """(1, rows, cells): the cells after the text that they attend to"""
    first: int
    """the cell of the first of these nodes, counted from the end of the text"""
    children: Tensor
    """(children,): the places of their children in the tree"""
    elder: Tensor
    """(children,): the row of each child's parent times `width`, plus the rank of the child"""
    width: int
    """the most children of one node"""


class RankedDraft(DeviceDraft):
    def __init__(self, tree: Ranks, *parts: Any) -> None:
        super().__init__(*parts)
        self._tree = tree
        self.shape = tree.whole(len(self._table))
        self.cells = self.nodes = len(self.shape)
        self.depth = self.shape.depth
        self._levels = self._plan(self.shape, self._table.device)
        inner = [level.depth - 1 for level in self._levels if level.depth for _ in range(len(level.nodes))]
        self._cell_depths = torch.tensor(inner + [0] * (self.cells - len(inner)), device=self._table.device)
        self._parts: dict[Topology, Tensor] = {}

    @staticmethod
    def _plan(shape: Topology, device: torch.device) -> list[Level]:
        levels: list[Level] = []
        cell: dict[int, int] = {}
        before = [0]
        for depth, level in enumerate(shape.levels):
            inner = [node for node in level if shape.children[node]]
            if not inner:
                break
            first = len(cell)
            if depth:
                cell |= {node: first + place for place, node in enumerate(inner)}
            width = max(len(shape.children[node]) for node in inner)
            pairs = [
                (child, row * width + rank)
                for row, node in enumerate(inner)
                for rank, child in enumerate(shape.children[node])
            ]
            seen = [[cell[above] for above in shape.path(node) if above] for node in inner]
            levels.append(
                Level(
                    depth,
                    torch.tensor(inner, device=device),
                    torch.tensor([before.index(shape.parents[node]) if depth else 0 for node in inner], device=device),
                    torch.tensor([[[c in own for c in range(len(shape))] for own in seen]], device=device),
                    first,
                    torch.tensor([child for child, _ in pairs], device=device),
                    torch.tensor([elder for _, elder in pairs], device=device),
                    width,
                )
            )
            before = inner
        return levels

    def grow(self, slots: Tensor, lengths: Tensor, roots: Tensor) -> tuple[Tensor, ...]:
        slots, lengths, roots = slots.long(), lengths.long(), roots.long()
        batch = len(slots)
        found = roots.new_zeros(batch, len(self.shape))
        found[:, 0] = roots
        predict, carry = self._at_roots(slots, roots)
        for level in self._levels:
            if level.depth:
                own, tokens = level.own.expand(batch, -1, -1), found[:, level.nodes]
                predict, carry = self._below(
                    slots, lengths, carry[:, level.above], tokens, level.first, own, level.depth
                )
            best = self._best(predict, slots, lengths, level.depth + 1, level.width).tokens
            found[:, level.children] = best.flatten(1)[:, level.elder]
        return (found,)

    def trees(self, found: tuple[Tensor, ...], budgets: Sequence[Budget]) -> list[DraftTree]:
        (tokens,) = found
        shapes = [self._tree.within(budget, len(self._table)) for budget in budgets]
        return [
            DraftTree(self._part(row, shape), shape.parents, Draw.FIXED)
            for row, shape in zip(tokens, shapes, strict=False)
        ]

    def _part(self, whole: Tensor, shape: Topology) -> Tensor:
        if shape is self.shape:
            return whole
        if shape not in self._parts:
            self._parts[shape] = torch.tensor(places_in(self.shape, shape)).to(whole.device, non_blocking=True)
        return whole.index_select(0, self._parts[shape])
