"""Trees of a given shape, whose tokens are drawn (`template`) or the most probable ones (`ranks`).

Chen et al., "Sequoia: Scalable, Robust, and Hardware-aware Speculative Decoding" (arXiv 2402.12374). If the i-th
child of a node is accepted about as often at every node, the best shape can be worked out beforehand: `branchwise tree
optimise` does it for a pair of models on this machine. Siblings are drawn without replacement, and the first drawn has
the largest part of the shape below it. The shape looks at the order of the draws and never at the tokens.

Luo et al., "Turning Trash into Treasure: Accelerating Inference of Large Language Models with Token Recycling" (arXiv
2408.08696), lays a tree in which the i-th child of a node is its i-th most probable token. Nothing is drawn: the tree
depends on the text alone, so it is fixed, and `match` is exact for it.

The nodes of a shape are numbered level by level, and in a level by their parents. So a tree that stops early is the
beginning of the whole, and so is its mask: the sliced mask of improved MCSD (Lu et al. 2024, arXiv 2409.10644).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any

from branchwise.core.batch import PadShape
from branchwise.core.topology import Topology, branched, plant, topology
from branchwise.core.tree import Draw
from branchwise.draft.base import Budget
from branchwise.draft.builder import Candidates, Cursor, TreeBuilder, TreeCoroutine, TreePolicy
from branchwise.draft.policies.topk import TopKRequest
from branchwise.draft.sampler import DraftSampler, SampleRequest
from branchwise.errors import UsageError
from branchwise.registry import check_known

SHAPES: dict[str, tuple[int, ...]] = {
    "mcsd": branched([4, 2, 2]),
    "fork": branched([4, 1, 1, 1, 1, 1]),
    "sequoia-24": (-1, 0, 0, 0, 1, 1, 2, 4, 4, 5, 6, 7, 7, 8, 9, 10, 11, 11, 12, 13, 14, 15, 16, 22, 23),
}
"""Parents by name.

    mcsd          4, then 2, then 2 children, 28 nodes (Yang et al. 2024, arXiv 2401.06706)
    fork          the four chains of improved MCSD, 24 nodes
    sequoia-24    Sequoia's dynamic programme for 24 nodes, at most 8 deep, and the rates of acceptance in `TYPICAL`
"""

TYPICAL = (0.8, 0.4, 0.3, 0.2, 0.2, 0.1, 0.1, 0.1)
"""how often a child is accepted after its elder siblings were rejected: round numbers of a good draft model"""
MOST_NODES = 1024


class Template(TreePolicy):
    """`template:NAME` or `template:FILE.json`: that shape, or as many whole levels of it as the budget holds."""

    draw = Draw.WITHOUT_REPLACEMENT
    stoppable = True

    def __init__(self, shape: str) -> None:
        self.shape = plant(find_shape(shape))

    @property
    def largest(self) -> int:
        return len(self.shape) - 1

    def grow(self, root: int, budget: Budget, sampler: DraftSampler) -> TreeCoroutine:
        tree = TreeBuilder([root])
        places = {0: 0}  # node of the shape -> node of the tree
        for level, below in pairwise(self.shape.levels[: max(budget.depth, 0) + 1]):
            if below[-1] >= budget.nodes:
                break
            # A distribution may carry fewer tokens than the shape has children: missing children are left out with all
            # nodes below them.
            nodes = [node for node in level if node in places and self.shape.children[node]]
            if not nodes:
                break
            probs = yield from tree.expand([places[node] for node in nodes])
            sizes = [len(self.shape.children[node]) for node in nodes]
            orders = yield SampleRequest(sampler, probs, list(enumerate(nodes)), sizes)
            for node, order in zip(nodes, orders, strict=True):
                for child, token in zip(self.shape.children[node], order, strict=False):
                    places[child] = tree.add(places[node], token)
        return tree.finish(self.draw)


def find_shape(name: str, known: Mapping[str, tuple[int, ...]] = SHAPES) -> tuple[int, ...]:
    """The parents of a shape, by its name or from a file."""
    if name.endswith(".json") or "/" in name:
        return read_template(Path(name).expanduser())
    check_known("template", name, sorted(known), ", or a FILE.json as `branchwise tree optimise` writes it")
    return known[name]


def read_template(file: Path) -> tuple[int, ...]:
    """The parents in a template file."""

    def refuse(why: str) -> UsageError:
        return UsageError(f"The template {file} {why}; write a new one with `branchwise tree optimise --out {file}`.")

    try:
        stored: Any = json.loads(file.read_bytes())
    except OSError as error:
        raise refuse(f"cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError):
        raise refuse("is not JSON") from None
    if not isinstance(stored, dict) or stored.get("branchwise") != "template":
        raise refuse("is JSON of another kind")
    if stored.get("version") != 1:
        raise refuse(f"has the version {stored.get('version')!r}, and this Branchwise reads 1")
    parents = stored.get("parents")
    if not isinstance(parents, list) or any(type(parent) is not int for parent in parents) or len(parents) < 2:
        raise refuse("has no list of parents with at least one node below the root")
    if parents[0] != -1 or any(not 0 <= parent < node for node, parent in enumerate(parents) if node):
        raise refuse("must begin with -1 for the root, and every other node needs an earlier one as its parent")
    if len(parents) > MOST_NODES:
        raise refuse(f"has {len(parents)} nodes, more than the {MOST_NODES} that a pass could score")
    if any(parent > after for parent, after in pairwise(parents)):
        raise refuse("is not in level order, in which parents never go back")
    return tuple(parents)


def write_template(file: Path, parents: tuple[int, ...], note: str) -> None:
    try:
        file.write_text(as_json(parents, note) + "\n", encoding="utf-8")
    except OSError as error:
        raise UsageError(f"The template {file} cannot be written: {error.strerror}.") from None


def as_json(parents: tuple[int, ...], note: str) -> str:
    """What a template file holds."""
    return json.dumps({"branchwise": "template", "version": 1, "parents": parents, "note": note}, ensure_ascii=False)


# Ranks

LEVELS = (8, 21, 25, 15, 8, 3)
"""the number of nodes in every level below the root, in the tree of Token Recycling"""


def imbalanced(levels: tuple[int, ...]) -> tuple[int, ...]:
    """The parents of a tree with these sizes of levels, in which first children have the most descendants.

    By Zipf's law the token of rank r (from 0) is as probable as 1 / (1 + r). So a level keeps the paths with the least
    product of 1 + r, and of equal products those whose first ranks are the lowest.
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


RECYCLING = "recycling-80"
RANKED = SHAPES | {RECYCLING: imbalanced(LEVELS)}


class Ranks(TreePolicy):
    """`ranks:NAME` or `ranks:FILE.json`: that shape, or as many of its most promising nodes as the budget holds."""

    draw = Draw.FIXED
    lays = True

    def __init__(self, shape: str = RECYCLING) -> None:
        self.shape = topology(find_shape(shape, RANKED))
        self._promising = promising(self.shape)
        self._fitting: dict[tuple[int, int, int], tuple[int, ...]] = {}  # an engine has few budgets

    @property
    def largest(self) -> int:
        return len(self.shape) - 1

    @property
    def pad_shape(self) -> PadShape:
        """A tree that is cut, as at the end of a sequence, is scored in the recorded pass of a whole tree."""
        return PadShape(nodes=len(self.shape))

    def within(self, budget: Budget, width: int = sys.maxsize) -> Topology:
        """The part of the shape that a budget holds, if no node has more than `width` children."""
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
            # A distribution may carry fewer tokens than the shape has children: missing children are left out with all
            # nodes below them.
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
                    places[child] = tree.add(parent, found.token, found.source), found.cursor
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


def promising(shape: Topology) -> list[int]:
    """The nodes of a shape in falling order of promise, every one after its parent and its elder siblings.

    The first child of a node promises half as much as the node, and its siblings less, by Zipf's law.
    """
    against = [1]  # a node promises 1 / against[node]
    for node, parent in enumerate(shape.parents[1:], start=1):
        against.append(against[parent] * 2 * (1 + shape.children[parent].index(node)))
    return sorted(range(len(shape)), key=lambda node: (against[node], node))


def places_in(whole: Topology, part: Topology) -> list[int]:
    """For each node of a part, the same node of the whole: the child of the same rank below the same parent."""
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
