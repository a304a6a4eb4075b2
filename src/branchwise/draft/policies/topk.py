"""The most probable tree: nodes are expanded by the probability of their path, and the best of all are kept.

Li et al., "EAGLE-2: Faster Inference of Language Models with Dynamic Draft Trees" (arXiv 2406.16858), expands a fixed
number of nodes of a level and ranks all nodes again at the end. Wang et al., "OPT-Tree: Speculative Decoding with
Adaptive Draft Tree Structure" (arXiv 2406.17276), shows that the sum of path probabilities is the expected number of
accepted tokens, if the draft is right about itself, and stops at a level that would add too little to it.

Over candidates that are looked up, which costs next to nothing, the same tree needs no levels and no passes: a heap
gives the most probable node that may come next. Probabilities only fall along a path, so whatever its size, the tree
is the best of that size.

Nothing is drawn here: the trees depend on the text alone, so they are fixed, and `match` is exact for them.
"""

from __future__ import annotations

import heapq
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count, islice
from typing import Any

from torch import Tensor

from branchwise.core.tree import Draw
from branchwise.draft.base import Budget
from branchwise.draft.builder import Candidate, Candidates, Cursor, TreeBuilder, TreeCoroutine, TreePolicy
from branchwise.draft.sampler import DraftSampler, SampleRequest
from branchwise.errors import UsageError


class TopK(TreePolicy):
    """`topk:N,depth=D,width=W,gain=g`: the N best nodes below the root, at most D deep.

    Of every level only the W best nodes are expanded, each into its W most probable children: one pass a level, over W
    nodes. With a gain the tree ends if a level adds less than that to the expected tokens.
    """

    draw = Draw.FIXED
    lays = True

    def __init__(self, nodes: int, depth: int = 6, width: int = 8, gain: float = 0.0) -> None:
        if nodes < 1 or depth < 1 or width < 1 or not 0 <= gain < 1:
            raise UsageError(
                "Top-k takes nodes, depth and width of at least 1 and a gain from 0 to below 1, "
                "as in topk:24,depth=6,width=8."
            )
        self.nodes, self.depth, self.width, self.gain = nodes, depth, width, gain

    @property
    def largest(self) -> int:
        return self.nodes

    def grow(self, root: int, budget: Budget, sampler: DraftSampler) -> TreeCoroutine:
        most = min(self.nodes + 1, budget.nodes)
        start = PathNode(0.0, None, root)
        # Only nodes that are expanded are in this tree: a node that is only proposed costs no pass.
        tree, places = TreeBuilder([root]), {start: 0}
        best, level = [start], [start] if most > 1 else []
        for _ in range(min(self.depth, budget.depth)):
            # The children of a level are together at most as probable as the level.
            if not level or sum(node.probability for node in level) < self.gain:
                break
            for node in level:
                if node.parent is not None:
                    places[node] = tree.add(places[node.parent], node.token)
            found = yield tree, [places[node] for node in level]
            likeliest = yield TopKRequest.of(sampler, found.probs, self.width)
            below = [
                PathNode(parent.value + value, parent, token)
                for parent, likely in zip(level, likeliest, strict=True)
                for token, value in likely
            ]
            expected = sum(node.probability for node in best)
            best = heapq.nsmallest(most, [*best, *below], key=lambda node: -node.value)  # of equal ones the first
            if sum(node.probability for node in best) - expected < self.gain:
                break
            # If the tree is full, only children of a node better than its worst can find a place in it.
            fresh, least = set(below), best[-1].value if len(best) == most else -math.inf
            level = [node for node in best if node in fresh and node.value > least][: self.width]
        return tree_of(best).finish(self.draw)

    def lay(self, root: int, cursor: Cursor, candidates: Candidates, budget: Budget) -> TreeBuilder:
        """The best nodes of all, with at most W children each."""
        nodes, tree = min(self.nodes, budget.nodes - 1), TreeBuilder([root])
        depth = min(self.depth, budget.depth)
        for _ in islice(grow_best_first(tree, cursor, candidates, depth=depth, width=self.width), max(nodes, 0)):
            pass
        return tree


@dataclass(frozen=True, eq=False)
class PathNode:
    """A node that may join a tree."""

    value: float
    """the log-probability of its path"""
    parent: PathNode | None
    token: int
    source: str = ""
    """how the node was found, if nodes are found in several ways"""

    @property
    def probability(self) -> float:
        return math.exp(self.value)


def tree_of(nodes: Sequence[PathNode]) -> TreeBuilder:
    """The tree of these nodes, the root first and parents before their children."""
    tree, places = TreeBuilder([nodes[0].token]), {nodes[0]: 0}
    for node in nodes[1:]:
        assert node.parent is not None
        places[node] = tree.add(places[node.parent], node.token, node.source)
    return tree


class TopKRequest(SampleRequest):
    """For each distribution its most probable tokens, as many as `sizes` says, with the logarithms of their masses.

    Nothing is drawn, but it is a request as for draws, so that a device serves all sequences of a batch at once.
    """

    @classmethod
    def of(cls, sampler: DraftSampler, probs: Tensor, width: int) -> TopKRequest:
        return cls(sampler, probs, [(row, row) for row in range(len(probs))], [width] * len(probs))

    @property
    def kind(self) -> tuple[Any, ...]:
        return (TopKRequest,)

    def alone(self) -> list[list[tuple[int, float]]]:
        """Of equally probable tokens among those found, the smallest token id comes first."""
        assert isinstance(self.probs, Tensor), "most probable tokens are found in rows"
        assert self.sizes is not None, "nobody said how many"
        rows = self.sampler.best(self.probs, max(self.sizes))
        few = (row[:size] for row, size in zip(rows, self.sizes, strict=True))
        best = [sorted(row, key=lambda pair: (-pair[1], pair[0])) for row in few]
        # Rounding may leave a mass above 1, and a child must not seem more probable than its parent.
        return [[(int(token), min(math.log(mass), 0.0)) for token, mass in row if mass > 0] for row in best]


def grow_best_first(
    tree: TreeBuilder, cursor: Cursor, candidates: Candidates, *, depth: int, width: int = 64, least: float = 0.0
) -> Iterator[float]:
    """Add the best remaining node to a tree and yield the probability of its path, until no node remains.

    The `width` best children of every node are considered, and none whose path is less probable than `least`. Of
    siblings only the best that has not joined waits in the heap: the others cannot come before it. Of equally probable
    paths, the path below the older parent comes first.
    """
    # (-probability of the path, parent, rank, the node, all siblings)
    heap: list[tuple[float, int, int, Candidate, Sequence[Candidate]]] = []
    reach = [1.0]

    def offer(parent: int, rank: int, siblings: Sequence[Candidate]) -> None:
        if rank < width and rank < len(siblings):
            best = siblings[rank]
            value = reach[parent] * min(best.mass, 1.0)
            if value >= least:
                heapq.heappush(heap, (-value, parent, rank, best, siblings))

    newest = 0
    while True:
        if tree.depths[newest] < depth:
            offer(newest, 0, candidates(cursor))
        if not heap:
            return
        value, parent, rank, (token, _, cursor, source), siblings = heapq.heappop(heap)
        offer(parent, rank + 1, siblings)
        newest = tree.add(parent, token, source)
        reach.append(-value)
        yield -value


OWN, MERGED = "graph", "merged"
"""sources of a node in a graph: drafted at its own place, or taken over from a node with the same last tokens"""


class Graph(TreePolicy):
    """`graph:N,width=4,depth=6,repeat=1,sibling=0.2,leaf=0.05`: N nodes below the root after unrolling.

    Gong et al., "Graph-Structured Speculative Decoding" (arXiv 2407.16207). Most drafted tokens recur in other
    branches. A node with the same last tokens as a node in another branch is a copy of it: it is linked to that node
    and not expanded. The target cannot share nodes, because its output for a token depends on all tokens before it. So
    in the end the graph is unrolled to a tree, best paths first, and a copy gets the children of its original with
    their probabilities there, which costs acceptance, never exactness.

    Every node proposes its `width` most probable children, but none below `sibling` times the best of them. Nodes are
    the same if they and the `repeat` tokens before them are; with -1 no two are. A node with less than `leaf` of its
    parent's distribution is not expanded. One pass a level, over the originals alone. Nodes that were taken over from
    an original have the source "merged": so statistics say how many of them were drafted and accepted.
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

    @property
    def largest(self) -> int:
        return self.nodes

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
                path = vertex.path
                ending = tuple(ancestor.token for ancestor in path[: self.repeat + 1])
                if self.repeat >= 0:  # never a copy of its own ancestor: a repetition has distributions of its own
                    vertex.original = next((other for other in originals[ending] if other not in path), None)
                # As in `topk`: if the tree is full, only a node better than its worst is worth a pass.
                if vertex.original is None and vertex.total > least and math.exp(vertex.value) >= self.leaf:
                    originals[ending].append(vertex)
                    level.append(vertex)
        return tree_of(list(islice(unrolled(start, depth), most))).finish(self.draw)


@dataclass(eq=False)
class Vertex:
    """A node of the graph: expanded, or linked to its original, or a leaf."""

    token: int
    parent: Vertex | None
    value: float
    """the log-probability of the token after its parent"""
    total: float
    """the log-probability of its path"""
    children: list[Vertex] = field(default_factory=list)
    original: Vertex | None = None

    @property
    def path(self) -> list[Vertex]:
        """The nodes from this node up to the root."""
        path, vertex = [self], self.parent
        while vertex is not None:
            path.append(vertex)
            vertex = vertex.parent
        return path


def unrolled(start: Vertex, depth: int) -> Iterator[PathNode]:
    """The nodes of the tree that a graph stands for, the most probable path first; `depth` ends cycles of links."""
    number = count()  # of equal ones the first comes first
    waiting = [(0.0, next(number), start, PathNode(0.0, None, start.token), 0)]
    while waiting:
        _, _, vertex, path_node, level = heapq.heappop(waiting)
        yield path_node
        for child in (vertex.original or vertex).children if level < depth else ():
            source = MERGED if vertex.original or path_node.source == MERGED else OWN
            below = PathNode(path_node.value + child.value, path_node, child.token, source)
            heapq.heappush(waiting, (-below.value, next(number), child, below, level + 1))
