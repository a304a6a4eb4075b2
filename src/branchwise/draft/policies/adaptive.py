"""As large a tree as pays: the size that gives most tokens a second, judged step by step.

A node earns the probability that it is accepted and costs the time by which it makes the pass longer. Passes are timed
during generation, from the end of a draft to the verdict on it. If no tree pays, nothing is drafted, and the step is
that of plain decoding. (The threshold of OPT-Tree, arXiv 2406.17276, and the timing of Sequoia, arXiv 2402.12374.)

A tree of ranks is laid without a look at probabilities: on a device the host never reads them. What its nodes earn is
how often each node of the shape was accepted so far. Its sizes are few, and each is tried at the beginning, so that a
device records its graphs once and early. A batch has one size, because its trees are padded to the largest.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from branchwise.backends.base import TargetInfo
from branchwise.core.batch import PadShape
from branchwise.core.topology import Topology
from branchwise.draft.base import Budget
from branchwise.draft.builder import Candidates, Cursor, Judged, TreeBuilder
from branchwise.draft.policies.template import RECYCLING, Ranks, places_in
from branchwise.draft.policies.topk import TopK, grow_best_first

SIZES = (0, 1, 2, 3, 4, 5, 7, 11, 15, 23, 31, 47, 63, 95, 127)
"""Nodes below the root that a tree may have: few sizes, so that each is timed often. With the root they fill whole
tiles of 16 rows, which is how matrix products are cut on most machines: one row more costs a new tile."""
SLOPE = 1 / 96
"""the assumed cost of one more row, in passes over one row, before any pass was timed"""
DEVICE_SLOPE = 1 / 256
"""the same on a device, where memory bandwidth limits a pass and not arithmetic"""
SLOWLY = 0.05
"""the least share of an error by which the estimate of a size is corrected"""
FEW, OUTLIER = 3, math.log(1.5)
"""so many passes of a size weigh as much as the first estimate; errors of sizes timed more often are clipped to this"""
STALE = 200
"""steps after which a plain step is timed again"""
WORTH = 1.03
"""the expected speed of a tree, in plain decoding, from which on it is drafted"""
LEAST = 1 / 512
"""nodes with a less probable path never pay"""
RANK_SIZES = (0, 7, 31)
"""the same of a tree of ranks, besides all of its nodes: with the root they fill the sizes of passes"""
PRIOR = 8.0
"""the weight, in tries, of the acceptance that is assumed of a node before anything was counted"""
FADING = 0.995
"""the factor of counts from one step to the next"""
EVERY = 8
"""steps after which the size of a tree of ranks is chosen again"""
MOST_TREES = 256
RECORDED = 4
"""passes of a size on a device before they are timed: by then all that a step does is recorded"""


class PassCostModel:
    """The cost of a pass over so many rows, in passes over one row, estimated from passes that were timed.

    The speed of a machine varies. So a pass is compared with the pass before it alone: if the two differ more or less
    than expected, the estimates of both sizes are corrected, each the less the better it is known.
    """

    def __init__(self, settling: int = 1, slope: float = SLOPE) -> None:
        """The first passes of a size, `settling` of them, also pay for the choice and the recording of kernels."""
        self._settling, self._slope = settling, slope
        self._corrections = {1: 0.0}  # size -> logarithm of its cost over the first estimate
        self._counts: dict[int, int] = {}
        self._last: tuple[int, float] | None = None  # rows and logarithm of the seconds of the last pass
        self._since_plain = STALE

    def record(self, rows: int, seconds: float) -> None:
        """A pass over so many rows took this long."""
        count = self._counts.get(rows, 0)
        self._counts[rows] = count + 1
        self._since_plain = 0 if rows == 1 and count >= self._settling else self._since_plain + 1
        if count < self._settling:
            return
        spent, last = math.log(max(seconds, 1e-9)), self._last
        self._last = rows, spent
        if last is None or last[0] == rows:
            return
        error = spent - last[1] - (self._cost(rows) - self._cost(last[0]))
        if min(count, self._counts[last[0]]) > FEW:
            error = min(max(error, -OUTLIER), OUTLIER)
        for size, part in ((rows, error), (last[0], -error)):
            if size > 1:
                known = self._correction(size)
                self._corrections[size] = known + max(1 / (self._counts[size] + FEW), SLOWLY) * part

    @property
    def knows_plain(self) -> bool:
        """Whether a plain step was timed not long ago."""
        return self._since_plain < STALE

    def knows(self, rows: int) -> bool:
        """Whether a few passes of this size were timed."""
        return self._counts.get(rows, 0) >= self._settling + FEW

    def costs(self, wanted: Sequence[int]) -> list[float]:
        """The costs of passes over so many rows, rising: that more rows cost less is noise."""
        blocks: list[tuple[float, float, int]] = []  # (mean cost, how well it is known, sizes)
        for rows in wanted:
            mean, weight, count = math.exp(self._cost(rows)), 1.0 + self._counts.get(rows, 0), 1
            while blocks and blocks[-1][0] >= mean:  # neighbours in the wrong order are pooled
                other, known, several = blocks.pop()
                mean = (mean * weight + other * known) / (weight + known)
                weight, count = weight + known, count + several
            blocks.append((mean, weight, count))
        return [mean for mean, _, count in blocks for _ in range(count)]

    def _cost(self, rows: int) -> float:
        return math.log((1 + rows * self._slope) / (1 + self._slope)) + self._correction(rows)

    def _correction(self, rows: int) -> float:
        """Of a size, interpolated between the known sizes around it; beyond the largest, that of the largest."""
        known = self._corrections
        if rows not in known:
            return float(np.interp(rows, sorted(known), [known[size] for size in sorted(known)]))
        return known[rows]


_cost_models: WeakKeyDictionary[TargetInfo, dict[int, PassCostModel]] = WeakKeyDictionary()
"""target -> size of a batch -> costs of its passes, shared by all drafters of the target"""


def cost_model_of(target: TargetInfo | None, batch: int) -> PassCostModel:
    if target is None:
        return PassCostModel()
    models, (size, _) = _cost_models.setdefault(target, {}), target.bucket(batch, 1)
    if size not in models:
        models[size] = PassCostModel() if target.device.type == "cpu" else PassCostModel(RECORDED, DEVICE_SLOPE)
    return models[size]


class AdaptiveSize(TopK):
    """`paced:N,depth=D,width=W`: as many of the N best candidates as pay. Over a draft model it is `topk`."""

    def __init__(self, nodes: int = 63, depth: int = 16, width: int = 8) -> None:
        super().__init__(nodes, depth, width)
        self._costs = PassCostModel()
        self._laid_at = 0.0

    def begin_batch(self, size: int, target: TargetInfo | None) -> None:
        self._costs = cost_model_of(target, size)

    def lay(self, root: int, cursor: Cursor, candidates: Candidates, budget: Budget) -> TreeBuilder:
        nodes, depth = min(self.nodes, budget.nodes - 1), min(self.depth, budget.depth)
        tree = TreeBuilder([root])
        if nodes > 0 and self._costs.knows_plain:  # once in a while a plain step must be timed
            growing = grow_best_first(tree, cursor, candidates, depth=depth, width=self.width, least=LEAST)
            tree = tree.leading(1 + self._size(growing, nodes))
        self._laid_at = time.perf_counter()
        return tree

    def update(self, judged: Sequence[Judged]) -> None:
        rows = max(len(one.tree) for one in judged)
        rounded = next((1 + size for size in SIZES if 1 + size >= rows), rows)
        self._costs.record(rounded, time.perf_counter() - self._laid_at)

    def _size(self, growing: Iterator[float], nodes: int) -> int:
        """How many nodes below the root give most tokens a second. Nodes come in falling order: if two sizes more were
        no better, larger ones will not be, and no more are grown."""
        sizes = [*(size for size in SIZES if size < nodes), nodes]
        plain, *costs = self._costs.costs([1 + size for size in sizes])
        tokens, grown, best, worse = 1.0, 0, (1 / plain, 0), 0
        for size, cost in zip(sizes[1:], costs, strict=True):
            reach = list(islice(growing, size - grown))
            tokens, grown = tokens + sum(reach), grown + len(reach)
            if not reach or worse > 1:
                break
            best, worse = ((tokens / cost, grown), 0) if tokens / cost > best[0] else (best, worse + 1)
        return best[1] if best[0] * plain > WORTH else 0


class AdaptiveRanks(Ranks):
    """`paced-ranks:NAME` or `paced-ranks:FILE.json`: as many nodes of `ranks` as pay, or over a draft model all."""

    def __init__(self, shape: str = RECYCLING) -> None:
        super().__init__(shape)
        self._order = np.array(self._promising[1:])
        self._assumed = np.ones(len(self.shape))  # acceptance before anything was counted: Zipf's law below each node
        for node, children in enumerate(self.shape.children):
            shares = 1 / np.arange(1, len(children) + 1)
            self._assumed[list(children)] = 0.6 * self._assumed[node] * shares / max(shares.sum(), 1)
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

    def begin_batch(self, size: int, target: TargetInfo | None) -> None:
        self._costs = costs = cost_model_of(target, size)
        self._rows = int if target is None else lambda nodes: target.bucket(size, nodes)[1]
        largest = min(len(self.shape), self._most) - 1
        self._sizes = [*(nodes for nodes in RANK_SIZES if nodes < largest), largest]
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

    def update(self, judged: Sequence[Judged]) -> None:
        if self._costs is not None:
            # A smaller tree counts as the size that was wanted: on a device it is scored in the same pass.
            self._costs.record(self._laid_rows, time.perf_counter() - self._laid_at)
        self._tries *= FADING
        self._hits *= FADING
        for _, tree, _, verdict in judged:
            if (places := self._places.get(tree.topology)) is None:
                if len(self._places) > MOST_TREES:
                    self._places.clear()
                places = self._places[tree.topology] = np.array(places_in(self.shape, tree.topology))
            self._tries[places] += 1
            self._hits[places[list(verdict.path)]] += 1

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
