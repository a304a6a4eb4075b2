"""The most probable tree: nodes are expanded by the probability of their path, and the best of all are kept.

Li et al., "EAGLE-2: Faster Inference of Language Models with Dynamic Draft Trees" (arXiv 2406.16858), expands so many
nodes of a level and ranks all nodes again at the end. Wang et al., "OPT-Tree: Speculative Decoding with Adaptive Draft
Tree Structure" (arXiv 2406.17276), shows that the sum of path probabilities is the expected number of accepted tokens,
if the draft is right about itself, and stops where one more level would add too little to it.

Nothing is drawn here: the tree depends on the text alone, so it is fixed, and `match` is exact for it.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from branchwise.core.tree import Draw
from branchwise.draft.base import Budget
from branchwise.draft.builder import TreeBuilder, TreeCoroutine
from branchwise.draft.policies.best import Look, best_first
from branchwise.draft.sampler import DraftSampler, SampleRequest
from branchwise.errors import UsageError

if TYPE_CHECKING:
    from branchwise.draft.lookup.base import Cursor


class TopK:
    """`topk:N,depth=D,width=W,gain=g`: the N best nodes below the root, at most D deep.

    Of every level only the W best nodes are expanded, each into its W most probable children: one pass a level, over W
    nodes. With a gain the tree ends where a level adds less than that to the expected tokens: between what a pass of
    the draft costs in passes of the target, and 1.
    """

    draw = Draw.FIXED

    def __init__(self, nodes: int, depth: int = 6, width: int = 8, gain: float = 0.0) -> None:
        if nodes < 1 or depth < 1 or width < 1 or not 0 <= gain < 1:
            raise UsageError(
                "Top-k takes nodes, depth and width of at least 1 and a gain from 0 to below 1, "
                "as in topk:24,depth=6,width=8."
            )
        self.nodes, self.depth, self.width, self.gain = nodes, depth, width, gain

    def grow(self, root: int, budget: Budget, sampler: DraftSampler) -> TreeCoroutine:
        most = min(self.nodes + 1, budget.nodes)
        start = Shoot(0.0, None, root)
        tree, places = (
            TreeBuilder([root]),
            {start: 0},
        )  # of what is expanded: a node that is only proposed costs no pass
        best, level = [start], [start] if most > 1 else []
        for _ in range(min(self.depth, budget.depth)):
            # The children of a level are together at most as probable as the level.
            if not level or sum(shoot.probability for shoot in level) < self.gain:
                break
            for shoot in level:
                if shoot.parent is not None:
                    places[shoot] = tree.add(places[shoot.parent], shoot.token)
            found = yield tree, [places[shoot] for shoot in level]
            likeliest = yield Likeliest.of(sampler, found.probs, self.width)
            below = [
                Shoot(parent.value + value, parent, token)
                for parent, likely in zip(level, likeliest, strict=True)
                for token, value in likely
            ]
            expected = sum(shoot.probability for shoot in best)
            best = heapq.nsmallest(most, [*best, *below], key=lambda shoot: -shoot.value)  # of equal ones the first
            if sum(shoot.probability for shoot in best) - expected < self.gain:
                break
            # Where the tree is full, only children of what is better than its worst node can find a place in it.
            fresh, least = set(below), best[-1].value if len(best) == most else -math.inf
            level = [shoot for shoot in best if shoot in fresh and shoot.value > least][: self.width]
        return joined(best).finish(self.draw)

    def lay(self, root: int, place: Cursor, after: Look, budget: Budget) -> TreeBuilder:
        """The same over a memory, where a look costs nothing: the very best nodes, with at most W children each."""
        nodes, depth = min(self.nodes, budget.nodes - 1), min(self.depth, budget.depth)
        return best_first(root, place, after, nodes=nodes, depth=depth, width=self.width)[0]


@dataclass(frozen=True, eq=False)
class Shoot:
    """A node that may join a tree."""

    value: float
    """log-probability of its path"""
    parent: Shoot | None
    token: int

    @property
    def probability(self) -> float:
        return math.exp(self.value)


def joined(shoots: Sequence[Shoot]) -> TreeBuilder:
    """The tree of these, the root first and parents before their children."""
    tree, places = TreeBuilder([shoots[0].token]), {shoots[0]: 0}
    for shoot in shoots[1:]:
        assert shoot.parent is not None
        places[shoot] = tree.add(places[shoot.parent], shoot.token)
    return tree


class Likeliest(SampleRequest):
    """For each distribution its most probable tokens, as many as `sizes` says, and the logarithms of their masses, best
    first.

    Nothing of it is left to chance, but a device is asked for it as for draws: once for all texts of a batch.
    """

    @classmethod
    def of(cls, sampler: DraftSampler, probs: Tensor, width: int) -> Likeliest:
        return cls(sampler, probs, [(row, row) for row in range(len(probs))], [width] * len(probs))

    @property
    def kind(self) -> tuple[Any, ...]:
        return (Likeliest,)

    def alone(self) -> list[list[tuple[int, float]]]:
        """Of equal ones that are found the smallest token comes first."""
        assert isinstance(self.probs, Tensor), "most probable tokens are found in rows"
        assert self.sizes is not None, "nobody said how many"
        rows = self.sampler.best(self.probs, max(self.sizes))
        # Rounding may leave a mass above 1; a child must not seem more probable than its parent for it.
        return [
            [
                (int(token), min(math.log(mass), 0.0))
                for token, mass in sorted(row[:size], key=lambda pair: (-pair[1], pair[0]))
                if mass > 0
            ]
            for row, size in zip(rows, self.sizes, strict=True)
        ]
