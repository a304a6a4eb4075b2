"""As much of a tree of ranks as pays, where no probabilities are at hand to tell.

A tree of ranks is laid without a look at what is believed of its tokens: on a device nobody reads that back. What is
known is how often each place of the shape was accepted so far. That, and what passes are seen to cost, say how many of
the most promising places are worth their rows; where none is, nothing is drafted. Sizes are few, and each is tried at
the beginning: what a device records for it is recorded once and early. A batch has one size, because its trees are
padded to the largest.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from branchwise.backends.base import Scored, Target
from branchwise.core.batch import PadShape
from branchwise.core.sequence import SequenceState
from branchwise.core.topology import Topology
from branchwise.core.tree import DraftTree
from branchwise.draft.base import Budget
from branchwise.draft.policies.adaptive_size import WORTH, PassCostModel, cost_model_of
from branchwise.draft.policies.ranks import RECYCLING, Ranks, places_in
from branchwise.verify import Verdict

SIZES = (0, 7, 31)
"""nodes below the root that a tree may have, besides all of them: with the root they fill the sizes of passes"""
PRIOR = 8.0
"""how many tries the promise of a place counts for, before it has a record"""
FADING = 0.995
"""of what was seen is left a step later"""
EVERY = 8
"""steps after which the size is thought anew"""
MOST_TREES = 256


class AdaptiveRanks(Ranks):
    """`paced-ranks:NAME` or `paced-ranks:FILE.json`: as many of the most promising nodes of that shape as pay.

    Over a draft model it is `ranks`.
    """

    def __init__(self, shape: str = RECYCLING) -> None:
        super().__init__(shape)
        self._order = np.array(self._promising[1:])
        self._promise = self._chances()
        self._tries, self._hits = np.zeros(len(self.shape)), np.zeros(len(self.shape))
        self._places: dict[Topology, NDArray[np.int64]] = {}
        self._sizes: list[int] = []
        self._wanted, self._turn = len(self.shape) - 1, 0
        self._most = len(self.shape)
        """nodes that budgets allowed lately"""
        self._clock: PassCostModel | None = None
        self._rows: Callable[[int], int] = int
        """how many rows a pass has for a tree of so many nodes"""
        self._ended, self._booked = 0.0, 1
        """when the trees of the last step were laid, and with how many rows they count"""

    def _chances(self) -> NDArray[np.float64]:
        """What is taken to be accepted of every node before anything was seen: Zipf's law below each."""
        chances = np.ones(len(self.shape))
        for node, children in enumerate(self.shape.children):
            shares = 1 / np.arange(1, len(children) + 1)
            chances[list(children)] = 0.6 * chances[node] * shares / max(shares.sum(), 1)
        return chances

    def begin(self, batch: int, target: Target | None) -> None:
        self._clock = clock = cost_model_of(target, batch)
        self._rows = int if target is None else lambda nodes: target.room(batch, nodes)[1]
        largest = min(len(self.shape), self._most) - 1
        self._sizes = [*(size for size in SIZES if size < largest), largest]
        untried = [size for size in self._sizes if not clock.has_seen(self._rows(1 + size))]
        if untried or not clock.knows:  # once in a while a plain step must be clocked
            self._wanted, self._turn = untried[0] if untried else 0, 0
            return
        if self._turn % EVERY == 0:
            self._wanted = self._size(clock)
        self._turn += 1

    @property
    def room(self) -> PadShape:
        return PadShape(nodes=1 + self._wanted)

    def within(self, budget: Budget, width: int = sys.maxsize) -> Topology:
        self._most = budget.nodes
        return super().within(Budget(min(budget.nodes, 1 + self._wanted), budget.depth), width)

    def drafted(self) -> None:
        """The trees of a step are laid, or taken up that were foreseen: from here on the step is clocked."""
        self._ended, self._booked = time.perf_counter(), self._rows(1 + self._wanted)

    def update(
        self,
        sequences: Sequence[SequenceState],
        trees: Sequence[DraftTree],
        scored: Scored,
        verdicts: Sequence[Verdict],
    ) -> None:
        if self._clock is not None:
            # What is short of a size counts as it: on a device such a tree is scored in the same pass.
            self._clock.saw(self._booked, time.perf_counter() - self._ended)
        self._tries *= FADING
        self._hits *= FADING
        for tree, verdict in zip(trees, verdicts, strict=True):
            places = self._places_of(tree.topology)
            self._tries[places] += 1
            self._hits[places[list(verdict.path)]] += 1

    def _places_of(self, tree: Topology) -> NDArray[np.int64]:
        if tree not in self._places:
            if len(self._places) > MOST_TREES:
                self._places.clear()
            self._places[tree] = np.array(places_in(self.shape, tree))
        return self._places[tree]

    def _size(self, clock: PassCostModel) -> int:
        """How many nodes below the root give most tokens a second."""
        accepted = (PRIOR * self._promise + self._hits) / (PRIOR + self._tries)
        tokens = 1 + np.cumsum(accepted[self._order])  # by how many nodes there are below the root, from 1
        plain, *costs = clock.costs([self._rows(1 + size) for size in self._sizes])
        gains = [tokens[size - 1] * plain / cost for size, cost in zip(self._sizes[1:], costs, strict=True)]
        if not gains:
            return 0
        best = int(np.argmax(gains))
        return self._sizes[1 + best] if gains[best] > WORTH else 0
