"""A tree by simulation: candidates are searched many times, and the prefixes that were visited most are drafted.

Liu et al., "Adaptive Draft-Verification for LLM Decoding" (ADED, arXiv 2407.12021) draft by Monte-Carlo tree search. A
simulation goes down from the root by the PUCT rule of AlphaZero, which weighs the rewards of simulations through a
child against how probable the child is and how seldom it was visited. At the first child that was never visited a
rollout begins, which draws its tokens. The reward of a simulation is the sum of the masses along it, and counts for
every node on it. Compared with the heap of `topk`, which takes the most probable prefixes in one go, siblings near the
root are tried more broadly than by their masses alone.

The random numbers of rollouts are a stream of their own, with the root token as its seed. So the tree depends only on
the text and on what was learned before: it is fixed, and `match` is exact for it.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from math import exp, inf, log, sqrt
from random import Random

from branchwise.core.tree import Draw
from branchwise.draft.base import Budget
from branchwise.draft.builder import Candidate, Candidates, Cursor, TreeBuilder, TreeCoroutine, TreePolicy
from branchwise.draft.policies.topk import TopKRequest
from branchwise.draft.sampler import DraftSampler
from branchwise.errors import UsageError

C1, C2 = 32.0, 8.0
"""the constants of the PUCT rule, as in the paper: the weight of masses beside rewards, and the number of visits after
which it begins to grow"""
WIDTH = 12
"""the number of tokens of a distribution that a simulation may take"""


class Puct(TreePolicy):
    """`puct:N,simulations=150,length=4,c1=32,c2=8`: the N prefixes that were visited most in this many
    simulations of at most `length` tokens.

    It is made for candidates that cost next to nothing to look up; for a draft model `topk` is the better choice.
    """

    draw = Draw.FIXED
    lays = True

    def __init__(self, nodes: int, simulations: int = 150, length: int = 4, c1: float = C1, c2: float = C2) -> None:
        """`c1` and `c2` are the constants of the PUCT rule."""
        if min(nodes, simulations, length) < 1:
            raise UsageError("PUCT takes nodes, simulations and length of at least 1, as in puct:24,simulations=150.")
        if not (0 <= c1 < inf and 0 < c2 < inf):
            raise UsageError(
                f"PUCT takes c1 of at least 0 and c2 above 0, as in puct:24,c1=32,c2=8, not {c1:g}, {c2:g}."
            )
        self.nodes, self.simulations, self.length = nodes, simulations, length
        self.c1, self.c2 = c1, c2

    @property
    def largest(self) -> int:
        return self.nodes

    def lay(self, root: int, cursor: Cursor, candidates: Candidates, budget: Budget) -> TreeBuilder:
        nodes, depth = min(self.nodes, budget.nodes - 1), min(self.length, budget.depth)
        start = SearchNode(Candidate(root, 0.0, cursor))
        uniform = Random(root).random
        if nodes > 0 and depth > 0 and candidates(cursor):
            for _ in range(self.simulations):
                simulate(start, candidates, depth, uniform, self.c1, self.c2)
        return most_visited(start, nodes)

    def grow(self, root: int, budget: Budget, sampler: DraftSampler) -> TreeCoroutine:
        """The search begins again after every distribution that it needed and did not have."""
        tree, places = TreeBuilder([root]), {(): 0}
        known: dict[tuple[int, ...], list[Candidate]] = {}
        while True:
            try:
                return self.lay(root, (), known.__getitem__, budget).finish(self.draw)
            except KeyError as unknown:
                [path] = unknown.args
            if path:
                places[path] = tree.add(places[path[:-1]], path[-1])
            found = yield tree, [places[path]]
            [likely] = yield TopKRequest.of(sampler, found.probs, WIDTH)
            known[path] = [Candidate(token, exp(value), (*path, token)) for token, value in likely]


class SearchNode:
    """A prefix that simulations have visited."""

    __slots__ = ("bonus", "candidate", "candidates", "children", "mass", "mean", "reward", "visits")

    def __init__(self, candidate: Candidate) -> None:
        self.candidate, self.mass = candidate, candidate.mass
        self.candidates: Sequence[Candidate] | None = None
        """the tokens that may come next; None until they are looked up"""
        self.children: list[SearchNode] = []
        """the candidates that were visited, in their order"""
        self.visits = 0
        self.reward = self.mean = self.bonus = 0.0

    def visit(self, reward: float) -> None:
        self.visits += 1
        self.reward += reward
        self.mean = self.reward / self.visits
        self.bonus = self.mass / (1 + self.visits)


def simulate(
    start: SearchNode, candidates: Candidates, length: int, uniform: Callable[[], float], c1: float, c2: float
) -> None:
    """Go down from the root to the first child that was never visited, roll out from it, and credit all nodes on the
    way."""
    node, path, reward = start, [start], 0.0
    while len(path) <= length:
        if node.candidates is None:
            node.candidates = candidates(node.candidate.cursor)
        if len(node.children) < len(node.candidates):  # every child is visited once before any is visited twice
            child = SearchNode(node.candidates[len(node.children)])
            node.children.append(child)
            path.append(child)
            reward += child.mass + rollout(child, candidates, length - len(path) + 1, uniform)
            break
        if not node.children:
            break  # no candidates follow
        node = select(node, c1, c2)
        path.append(node)
        reward += node.mass
    for node in path:
        node.visit(reward)


def select(node: SearchNode, c1: float = C1, c2: float = C2) -> SearchNode:
    """The child with the greatest PUCT value; of equal ones the more probable."""
    best = node.children[0]
    if len(node.children) == 1:
        return best
    weight = (c1 + log((node.visits + c2 + 1) / c2)) * sqrt(node.visits)
    most = best.mean + weight * best.bonus
    for child in node.children:
        value = child.mean + weight * child.bonus
        if value > most:
            best, most = child, value
    return best


def rollout(node: SearchNode, candidates: Candidates, length: int, uniform: Callable[[], float]) -> float:
    """The masses along a path of tokens drawn from candidates, until a draw falls on the mass that none of them has."""
    if length == 0:
        return 0.0
    reward, following = 0.0, candidates(node.candidate.cursor)
    node.candidates = following
    while True:
        left = uniform()
        for candidate in following:
            left -= candidate.mass
            if left < 0:
                break
        else:
            return reward
        reward += candidate.mass
        length -= 1
        if length == 0:
            return reward
        following = candidates(candidate.cursor)


def most_visited(start: SearchNode, nodes: int) -> TreeBuilder:
    """The tree of the prefixes with the most visits. No prefix has more visits than its parent, so a heap finds
    them in order."""
    tree, order = TreeBuilder([start.candidate.token]), 0
    heap: list[tuple[int, int, int, SearchNode]] = []  # (-visits, tie-breaker, parent, prefix)
    parent, node = 0, start
    while len(tree) <= nodes:
        for child in node.children:
            heapq.heappush(heap, (-child.visits, order, parent, child))
            order += 1
        if not heap:
            break
        _, _, above, node = heapq.heappop(heap)
        parent = tree.add(above, node.candidate.token, node.candidate.source)
    return tree
