"""A tree by simulation: memories are walked many times, and the prefixes that were visited most are drafted.

Liu et al., "Adaptive Draft-Verification for LLM Decoding" (ADED, arXiv 2407.12021) draft by Monte-Carlo tree search. A
walk goes down from the root by the PUCT rule of AlphaZero, which weighs what walks through a child have earned against
how probable the child is and how seldom it was visited. At the first child that was never visited a rollout begins,
which draws its tokens. What the walk earns is the sum of the masses along it, and counts for every node on it.
(In the code that came with the paper it is nearly always 1.)

The heap of `topk` takes the most probable prefixes in one go. Walks come close to them and pay for it with look-ups
and arithmetic; in return they reserve visits for every child of a node they go through, so that siblings near the root
are tried more broadly than their masses alone would have it.

The numbers behind a rollout are a stream of its own that begins with the token of the root. So nothing is left to
chance: the tree depends on the text alone and on what was remembered, it is fixed, and `match` is exact for it.
"""

from __future__ import annotations

import heapq
from math import exp, log, sqrt
from random import Random
from typing import TYPE_CHECKING

from branchwise.core.tree import Draw
from branchwise.draft.base import Budget
from branchwise.draft.builder import TreeBuilder, TreeCoroutine
from branchwise.draft.policies.best import Look
from branchwise.draft.policies.topk import Likeliest
from branchwise.draft.sampler import DraftSampler
from branchwise.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from branchwise.draft.lookup.base import Candidate, Cursor

C1, C2 = 32.0, 8.0
"""how much masses count beside what was earned, and after how many visits they begin to count more; the paper's"""
WIDTH = 12
"""tokens of a distribution that a walk may take"""


class Puct:
    """`puct:N,simulations=150,length=4`: the N prefixes visited most in so many walks of so many tokens.

    Fewer where walks found fewer. It is made for memories, where a look costs nothing. A source of distributions is
    asked for them one by one, so a model that drafts is better off with `topk`.
    """

    draw = Draw.FIXED

    def __init__(self, nodes: int, simulations: int = 150, length: int = 4) -> None:
        if min(nodes, simulations, length) < 1:
            raise UsageError(
                "PUCT takes nodes, simulations and length of at least 1, as in puct:24,simulations=150,length=4."
            )
        self.nodes, self.simulations, self.length = nodes, simulations, length

    def lay(self, root: int, place: Cursor, after: Look, budget: Budget) -> TreeBuilder:
        nodes, depth = min(self.nodes, budget.nodes - 1), min(self.length, budget.depth)
        start = Visited(None, place)
        chance = Random(root).random
        if nodes > 0 and depth > 0 and after(place):
            for _ in range(self.simulations):
                walk(start, after, depth, chance)
        return most_visited(root, start, nodes)

    def grow(self, root: int, budget: Budget, sampler: DraftSampler) -> TreeCoroutine:
        """The same over distributions. A search that meets one that is not known yet begins again as soon as it is."""
        from branchwise.draft.lookup.base import Candidate

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
            [likely] = yield Likeliest.of(sampler, found.probs, WIDTH)
            known[path] = [Candidate(token, exp(value), (*path, token)) for token, value in likely]


class Visited:
    """A prefix that walks have gone through."""

    __slots__ = ("bonus", "children", "earned", "found", "mass", "mean", "next", "place", "visits")

    def __init__(self, found: Candidate | None, place: Cursor) -> None:
        self.found = found
        """what it is; nothing for the root"""
        self.mass = 0.0 if found is None else found.mass
        self.place = place
        self.next: Sequence[Candidate] | None = None
        """what may come next, once it was looked up"""
        self.children: list[Visited] = []
        """those of them that were visited, in their order"""
        self.visits = 0
        self.earned = self.mean = self.bonus = 0.0

    def visit(self, reward: float) -> None:
        self.visits += 1
        self.earned += reward
        self.mean = self.earned / self.visits
        self.bonus = self.mass / (1 + self.visits)


def walk(start: Visited, after: Look, length: int, chance: Callable[[], float]) -> None:
    """Go down from the root until something new is found, roll out from there, and credit all on the way."""
    node, path, reward = start, [start], 0.0
    while len(path) <= length:
        if node.next is None:
            node.next = after(node.place)
        if len(node.children) < len(node.next):  # none comes second before all were first
            found = node.next[len(node.children)]
            child = Visited(found, found.place)
            node.children.append(child)
            path.append(child)
            reward += child.mass + rolled_out(child, after, length - len(path) + 1, chance)
            break
        if not node.children:
            break  # the memory knows of nothing that could follow
        node = chosen(node)
        path.append(node)
        reward += node.mass
    for node in path:
        node.visit(reward)


def chosen(node: Visited) -> Visited:
    """The child that has earned and promises most; of equals the more probable."""
    best = node.children[0]
    if len(node.children) == 1:
        return best
    weight = (C1 + log((node.visits + C2 + 1) / C2)) * sqrt(node.visits)
    most = best.mean + weight * best.bonus
    for child in node.children:
        value = child.mean + weight * child.bonus
        if value > most:
            best, most = child, value
    return best


def rolled_out(node: Visited, after: Look, length: int, chance: Callable[[], float]) -> float:
    """The masses along a path of up to so many tokens, each drawn from what may come next.

    It ends early where the draw falls on what the memory does not know.
    """
    if length == 0:
        return 0.0
    reward, following = 0.0, after(node.place)
    node.next = following
    while True:
        left = chance()
        for found in following:
            left -= found.mass
            if left < 0:
                break
        else:
            return reward
        reward += found.mass
        length -= 1
        if length == 0:
            return reward
        following = after(found.place)


def most_visited(root: int, start: Visited, nodes: int) -> TreeBuilder:
    """The tree of the prefixes with the most visits. None has more than the one it continues, so a heap finds them."""
    tree, order = TreeBuilder([root]), 0
    slots: list[tuple[int, int, int, Visited]] = []  # (-visits, tie-breaker, parent, prefix)
    parent, node = 0, start
    while len(tree) <= nodes:
        for child in node.children:
            heapq.heappush(slots, (-child.visits, order, parent, child))
            order += 1
        if not slots:
            break
        _, _, above, node = heapq.heappop(slots)
        assert node.found is not None
        parent = tree.add(above, node.found.token)
        if node.found.source:
            tree.sources[parent] = node.found.source
    return tree
