"""A tree of ranks: of a given shape, in which the i-th child of a node is its i-th most probable token.

Luo et al., "Turning Trash into Treasure: Accelerating Inference of Large Language Models with Token Recycling" (arXiv
2408.08696), lays such a tree over its table of successors. The shape never changes, so a tree is nothing but look-ups,
one for every level, and needs no heap and no probabilities.

Nothing is drawn here: the tree depends on the text alone, so it is fixed, and `match` is exact for it.
"""

from __future__ import annotations

import sys
from math import prod

from branchwise.core.batch import PadShape
from branchwise.core.topology import Topology, topology
from branchwise.core.tree import Draw
from branchwise.draft.base import Budget
from branchwise.draft.builder import Candidates, Cursor, TreeBuilder, TreeCoroutine, TreePolicy
from branchwise.draft.policies.template import SHAPES, find_shape
from branchwise.draft.policies.topk import TopKRequest
from branchwise.draft.sampler import DraftSampler
from branchwise.errors import UnknownName
from branchwise.registry import nearest

RECYCLING = "recycling-80"
"""a name of this file; the others are those of templates"""
LEVELS = (8, 21, 25, 15, 8, 3)
"""nodes of every level below the root in the tree of Token Recycling"""


class Ranks(TreePolicy):
    """`ranks:NAME` or `ranks:FILE.json`: that shape, or as many of its most promising nodes as the budget holds."""

    draw = Draw.FIXED
    lays = True

    def __init__(self, shape: str = RECYCLING) -> None:
        self.shape = topology(find_ranked(shape))
        self._promising = promising(self.shape)
        self._fitting: dict[tuple[int, int, int], tuple[int, ...]] = {}  # budgets of an engine are few

    @property
    def pad_shape(self) -> PadShape:
        """A tree that is cut, as at the end of a sequence, is scored in the recorded pass of a whole one."""
        return PadShape(nodes=len(self.shape))

    def within(self, budget: Budget, width: int = sys.maxsize) -> Topology:
        """What is left of the shape within a budget, if no node has more than `width` children."""
        limits = min(budget.nodes, len(self.shape)), min(budget.depth, self.shape.depth), width
        if limits not in self._fitting:
            self._fitting[limits] = self._fit(*limits)
        return topology(self._fitting[limits])

    def whole(self, width: int) -> Topology:
        """All of the shape, if no node has more than `width` children."""
        return topology(self._fit(len(self.shape), self.shape.depth, width))

    def grow(self, root: int, budget: Budget, sampler: DraftSampler) -> TreeCoroutine:
        shape, tree = self.within(budget), TreeBuilder([root])
        places = {0: 0}  # node of the shape -> node of the tree
        for level in shape.levels[:-1]:
            # A distribution may carry fewer tokens than the shape has children: a missing child is missing with all
            # below it.
            nodes = [node for node in level if node in places and shape.children[node]]
            if not nodes:
                break
            found = yield tree, [places[node] for node in nodes]
            widest = max(len(shape.children[node]) for node in nodes)
            likeliest = yield TopKRequest.of(sampler, found.probs, widest)
            for node, likely in zip(nodes, likeliest, strict=True):
                for child, (token, _) in zip(shape.children[node], likely, strict=False):
                    places[child] = tree.add(places[node], token)
        return tree.finish(self.draw)

    def lay(self, root: int, cursor: Cursor, candidates: Candidates, budget: Budget) -> TreeBuilder:
        tree, places = TreeBuilder([root]), {0: (0, cursor)}
        for node, children in enumerate(self.within(budget).children):
            if children and node in places:
                parent, here = places[node]
                for child, found in zip(children, candidates(here), strict=False):
                    added = tree.add(parent, found.token)
                    places[child] = added, found.cursor
                    if found.source:
                        tree.sources[added] = found.source
        return tree

    def _fit(self, nodes: int, depth: int, width: int) -> tuple[int, ...]:
        kept = {0}
        for node in self._promising[1:]:
            parent = self.shape.parents[node]
            elder = self.shape.children[parent].index(node)
            if len(kept) < nodes and parent in kept and elder < width and self.shape.depths[node] <= depth:
                kept.add(node)
        place = {node: i for i, node in enumerate(sorted(kept))}
        return tuple(place.get(self.shape.parents[node], -1) for node in place)


def find_ranked(name: str) -> tuple[int, ...]:
    """The parents of a shape of this file, of a template, or of a file of one."""
    if name == RECYCLING:
        return imbalanced(LEVELS)
    try:
        return find_shape(name)
    except UnknownName:
        known = [RECYCLING, *SHAPES]
        raise UnknownName(
            f"Unknown shape {name!r}.{nearest(name, known)} Known: {', '.join(sorted(known))}, or a FILE.json as "
            "`branchwise tree optimise` writes it."
        ) from None


def imbalanced(levels: tuple[int, ...]) -> tuple[int, ...]:
    """The parents of a tree with so many nodes a level, of which the first-born have the most descendants.

    By Zipf's law the token of rank r (from 0) is as probable as 1 / (1 + r). So a level keeps the paths with the least
    product of 1 + r, and of equal ones those that stay with the most probable tokens first.
    """
    parents, first = [-1], 0
    level: list[tuple[int, ...]] = [()]
    for size in levels:
        paths = [(*path, rank) for path in level for rank in range(levels[0])]
        best = sorted(paths, key=lambda path: prod(1 + rank for rank in path))[:size]
        place = {path: first + i for i, path in enumerate(level)}
        first, level = len(parents), sorted(best)
        parents += [place[path[:-1]] for path in level]
    return tuple(parents)


def promising(shape: Topology) -> list[int]:
    """The nodes of a shape in falling order of promise, every one after its parent and its elder siblings.

    The first-born of a node promises half of what the node does, and its siblings promise less as in Zipf's
    distribution. Of equal nodes the first in level order comes first.
    """
    against = [1]  # one in so many
    for node, parent in enumerate(shape.parents[1:], start=1):
        against.append(against[parent] * 2 * (1 + shape.children[parent].index(node)))
    return sorted(range(len(shape)), key=lambda node: (against[node], node))


def places_in(whole: Topology, part: Topology) -> list[int]:
    """Which node of the whole each node of a part is: the child of the same rank below the same one."""
    places = [0] * len(part)
    for node, children in enumerate(part.children):
        for child, place in zip(children, whole.children[places[node]], strict=False):
            places[child] = place
    return places


def ways(shape: Topology) -> list[list[int]]:
    """For every node the ranks of the children that lead to it from the root, padded with -1."""
    found = [[-1] * shape.depth for _ in shape.parents]
    for node, children in enumerate(shape.children):
        for rank, child in enumerate(children):
            found[child] = [*found[node][: shape.depths[node]], rank, *found[child][shape.depths[child] :]]
    return found
