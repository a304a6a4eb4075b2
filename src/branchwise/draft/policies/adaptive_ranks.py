"""As much of a tree of ranks as pays, without the probabilities of its tokens.

A tree of ranks is laid without a look at probabilities: on a device the host never reads them. What is known is how
often each node of the shape was accepted so far. That and the timed costs of passes decide how many of the most
promising nodes are worth their rows; if none is, nothing is drafted. Sizes are few, and each is tried at the beginning,
so that a device records its graphs once and early. A batch has one size, because its trees are padded to the largest.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from branchwise.backends.base import Scored, TargetInfo
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
"""the weight, in tries, of the acceptance that is assumed of a node before anything was counted"""
FADING = 0.995
"""the factor of counts from one step to the next"""
EVERY = 8
"""steps after which the size is chosen again"""
MOST_TREES = 256


class AdaptiveRanks(Ranks):
    """`paced-ranks:NAME` or `paced-ranks:FILE.json`: as many of the most promising nodes of that shape as pay.

    Over a draft model it is `ranks`.
    """

    def __init__(self, shape: str = RECYCLING) -> None:
        super().__init__(shape)
        self._order = np.array(self._promising[1:])
        self._assumed = self._assumed_acceptance()
        self._tries, self._hits = np.zeros(len(self.shape)), np.zeros(len(self.shape))
        self._places: dict[Topology, NDArray[np.int64]] = {}
        self._sizes: list[int] = []
        self._wanted, self._turn = len(self.shape) - 1, 0
        self._most = len(self.shape)
        """nodes that the last budget allowed"""
        self._costs: PassCostModel | None = None
        self._rows: Callable[[int], int] = int
        """rows of a pass over a tree of so many nodes"""
        self._laid_at, self._laid_rows = 0.0, 1
        """when the trees of the last step were laid, and how many rows their pass has"""

    def _assumed_acceptance(self) -> NDArray[np.float64]:
        """How often every node is assumed to be accepted before anything was counted: Zipf's law below each."""
        rates = np.ones(len(self.shape))
        for node, children in enumerate(self.shape.children):
            shares = 1 / np.arange(1, len(children) + 1)
            rates[list(children)] = 0.6 * rates[node] * shares / max(shares.sum(), 1)
        return rates

    def begin_batch(self, size: int, target: TargetInfo | None) -> None:
        self._costs = costs = cost_model_of(target, size)
        self._rows = int if target is None else lambda nodes: target.bucket(size, nodes)[1]
        largest = min(len(self.shape), self._most) - 1
        self._sizes = [*(nodes for nodes in SIZES if nodes < largest), largest]
        untried = [nodes for nodes in self._sizes if not costs.knows(self._rows(1 + nodes))]
        if untried or not costs.knows_plain:  # once in a while a plain step must be timed
            self._wanted, self._turn = untried[0] if untried else 0, 0
            return
        if self._turn % EVERY == 0:
            self._wanted = self._size(costs)
        self._turn += 1

    @property
    def pad_shape(self) -> PadShape:
        return PadShape(nodes=1 + self._wanted)

    def within(self, budget: Budget, width: int = sys.maxsize) -> Topology:
        self._most = budget.nodes
        return super().within(Budget(min(budget.nodes, 1 + self._wanted), budget.depth), width)

    def drafted(self) -> None:
        """The step is timed from here on."""
        self._laid_at, self._laid_rows = time.perf_counter(), self._rows(1 + self._wanted)

    def update(
        self,
        sequences: Sequence[SequenceState],
        trees: Sequence[DraftTree],
        scored: Scored,
        verdicts: Sequence[Verdict],
    ) -> None:
        if self._costs is not None:
            # A smaller tree counts as the size that was wanted: on a device it is scored in the same pass.
            self._costs.record(self._laid_rows, time.perf_counter() - self._laid_at)
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

    def _size(self, model: PassCostModel) -> int:
        """How many nodes below the root give most tokens a second."""
        accepted = (PRIOR * self._assumed + self._hits) / (PRIOR + self._tries)
        tokens = 1 + np.cumsum(accepted[self._order])  # by how many nodes there are below the root, from 1
        plain, *costs = model.costs([self._rows(1 + size) for size in self._sizes])
        gains = [tokens[size - 1] * plain / cost for size, cost in zip(self._sizes[1:], costs, strict=True)]
        if not gains:
            return 0
        best = int(np.argmax(gains))
        return self._sizes[1 + best] if gains[best] > WORTH else 0
