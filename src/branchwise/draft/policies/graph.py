"""A graph of hypotheses: if two of them run into the same phrase, its continuation is drafted once.

Gong et al., "Graph-Structured Speculative Decoding" (arXiv 2407.16207). Most drafted tokens recur in other branches. A
node that repeats the last words of one in another branch is a copy of it: it is linked to that node and not expanded.
The target cannot share nodes, since what it makes of a token depends on all tokens before. So in the end the graph is
unrolled to a tree, best paths first, and a copy gets the children of its original with their probabilities there.

Nothing is drawn here: the tree depends on the text alone, so it is fixed, and `match` is exact for it. That the
distributions below a copy are those of another prefix costs acceptance, never exactness.
"""

from __future__ import annotations

import heapq
import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count, islice

from branchwise.core.tree import Draw
from branchwise.draft.base import Budget
from branchwise.draft.builder import TreeBuilder, TreeCoroutine, TreePolicy
from branchwise.draft.policies.topk import PathNode, TopKRequest, tree_of
from branchwise.draft.sampler import DraftSampler
from branchwise.errors import UsageError


class Graph(TreePolicy):
    """`graph:N,width=4,depth=6,repeat=1,sibling=0.2,leaf=0.05`: N nodes below the root after unrolling.

    Every node proposes its `width` most probable children, but none below `sibling` times the best of them. Nodes are
    the same if they and the `repeat` tokens before them are; with -1 no two are. A node with less than `leaf` of its
    parent's distribution is not expanded. One pass a level, over the originals alone.
    """

    draw = Draw.FIXED

    def __init__(
        self, nodes: int, width: int = 4, depth: int = 6, repeat: int = 1, sibling: float = 0.2, leaf: float = 0.05
    ) -> None:
        if min(nodes, width, depth) < 1 or repeat < -1 or not 0 <= sibling <= 1 or not 0 <= leaf <= 1:
            raise UsageError(
                "A graph takes nodes, width and depth of at least 1, repeat of at least -1, and sibling and leaf "
                "from 0 to 1, as in graph:24,width=4,depth=6."
            )
        self.nodes, self.width, self.depth, self.repeat = nodes, width, depth, repeat
        self.sibling, self.leaf = sibling, leaf

    def grow(self, root: int, budget: Budget, sampler: DraftSampler) -> TreeCoroutine:
        most, depth = min(self.nodes + 1, budget.nodes), min(self.depth, budget.depth)
        start = Vertex(root, None, 0.0, 0.0)
        originals: dict[tuple[int, ...], list[Vertex]] = defaultdict(list)  # by their last tokens
        tree, places = TreeBuilder([root]), {start: 0}  # of expanded nodes: copies and leaves cost no pass
        best, level = [start], [start] if most > 1 else []
        for _ in range(depth):
            if not level:
                break
            for vertex in level:
                if vertex.parent is not None:
                    places[vertex] = tree.add(places[vertex.parent], vertex.token)
            found = yield tree, [places[vertex] for vertex in level]
            likeliest = yield TopKRequest.of(sampler, found.probs, self.width)
            for vertex, likely in zip(level, likeliest, strict=True):
                vertex.children = [
                    Vertex(token, vertex, value, vertex.total + value)
                    for token, value in likely
                    if math.exp(value - likely[0][1]) >= self.sibling
                ]
            below = [child for vertex in level for child in vertex.children]
            best = heapq.nsmallest(most, [*best, *below], key=lambda vertex: -vertex.total)
            fresh, least = set(below), best[-1].total if len(best) == most else -math.inf
            level = []
            for vertex in best:  # of two equal nodes in one level the more probable is the original
                if vertex not in fresh:
                    continue
                ending = tuple(ancestor.token for ancestor in vertex.path[: self.repeat + 1])
                vertex.original = self._found(vertex, originals[ending])
                # As in `topk`: if the tree is full, only a node better than its worst is worth a pass.
                if vertex.original is None and vertex.total > least and math.exp(vertex.value) >= self.leaf:
                    originals[ending].append(vertex)
                    level.append(vertex)
        return tree_of(list(islice(unrolled(start, depth), most))).finish(self.draw)

    def _found(self, vertex: Vertex, alike: list[Vertex]) -> Vertex | None:
        """The node that this one is a copy of; never its own ancestor, since a repetition has distributions of its
        own."""
        if self.repeat < 0:
            return None
        path = vertex.path
        return next((other for other in alike if other not in path), None)


@dataclass(eq=False)
class Vertex:
    """A node of the graph: expanded, or linked to its original, or a leaf."""

    token: int
    parent: Vertex | None
    value: float
    """log-probability after its parent"""
    total: float
    """log-probability of its path"""
    children: list[Vertex] = field(default_factory=list)
    original: Vertex | None = None

    @property
    def path(self) -> list[Vertex]:
        """The nodes from this one up to the root."""
        path, vertex = [self], self.parent
        while vertex is not None:
            path.append(vertex)
            vertex = vertex.parent
        return path


def unrolled(start: Vertex, depth: int) -> Iterator[PathNode]:
    """The nodes of the tree that a graph stands for, the most probable path first, at most so deep.

    Links may lead in a circle, so without a depth there is no end.
    """
    number = count()  # of equal ones the first comes first
    waiting = [(0.0, next(number), start, PathNode(0.0, None, start.token), 0)]
    while waiting:
        _, _, vertex, path_node, level = heapq.heappop(waiting)
        yield path_node
        for child in (vertex.original or vertex).children if level < depth else ():
            below = PathNode(path_node.value + child.value, path_node, child.token)
            heapq.heappush(waiting, (-below.value, next(number), child, below, level + 1))
