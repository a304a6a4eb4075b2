"""As large a tree as pays: the size that gives most tokens a second, judged step by step.

A node earns the probability that it is accepted and costs what the pass over it takes longer. What passes cost is
clocked while texts are written, from the end of a draft to the verdict on it: no two machines, models and batches have
the same curve, and it changes with the length of the text. Where no tree pays, nothing is drafted, and the step is that
of plain decoding. (The threshold of OPT-Tree, arXiv 2406.17276, and the timing of Sequoia, arXiv 2402.12374, online.)
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from branchwise.backends.base import Scored, Target
from branchwise.core.sequence import SequenceState
from branchwise.core.tree import DraftTree
from branchwise.draft.base import Budget
from branchwise.draft.builder import TreeBuilder
from branchwise.draft.policies.best import Look, falling
from branchwise.draft.policies.topk import TopK
from branchwise.verify import Verdict

if TYPE_CHECKING:
    from branchwise.draft.lookup.base import Cursor

SIZES = (0, 1, 2, 3, 4, 5, 7, 11, 15, 23, 31, 47, 63, 95, 127)
"""Nodes below the root that a tree may have: few sizes, so that each is clocked often. With the root they fill whole
tiles of 16 rows, which is how matrix products are cut on most machines: the row behind a full one costs a new tile."""
SLOPE = 1 / 96
"""what a row more is taken to cost, in passes over one row, before anything is known"""
DEVICE_SLOPE = 1 / 256
"""the same on a device, which waits for its memory and not for the products"""
SLOWLY = 0.05
"""the least share of a surprise by which a size is thought anew"""
FEW, OUTLIER = 3, math.log(1.5)
"""so many passes of a size weigh as much as the guess; of one seen more often, a larger surprise is no news"""
STALE = 200
"""steps after which a plain one is clocked again"""
WORTH = 1.03
"""how many times plain decoding a tree must promise to be worth drafting"""
LEAST = 1 / 512
"""what is less probable never pays"""


class PassCostModel:
    """How many times a pass over one row a pass over so many takes, from those that were seen.

    A machine is faster now and slower then. So a pass is compared with the one before it alone: where the two differ
    more or less than expected, both sizes are thought anew, each the less the better it is known. A plain step is the
    measure, and costs 1.
    """

    def __init__(self, settling: int = 1, slope: float = SLOPE) -> None:
        """The first passes of a size, `settling` of them, also pay for kernels being chosen and recorded."""
        self._settling, self._slope = settling, slope
        self._surprises = {1: 0.0}  # size -> logarithm of its cost over what was guessed
        self._seen: dict[int, int] = {}
        self._before: tuple[int, float] | None = None  # rows and logarithm of the seconds of the last pass
        self._since_plain = STALE

    def saw(self, rows: int, seconds: float) -> None:
        seen = self._seen.get(rows, 0)
        self._seen[rows] = seen + 1
        self._since_plain = 0 if rows == 1 and seen >= self._settling else self._since_plain + 1
        if seen < self._settling:
            return
        spent, before = math.log(max(seconds, 1e-9)), self._before
        self._before = rows, spent
        if before is None or before[0] == rows:
            return
        surprise = spent - before[1] - (self._cost(rows) - self._cost(before[0]))
        if min(seen, self._seen[before[0]]) > FEW:
            surprise = min(max(surprise, -OUTLIER), OUTLIER)
        for size, part in ((rows, surprise), (before[0], -surprise)):
            if size > 1:
                known = self._surprise(size)
                self._surprises[size] = known + max(1 / (self._seen[size] + FEW), SLOWLY) * part

    @property
    def knows(self) -> bool:
        """Whether a plain step was seen not long ago."""
        return self._since_plain < STALE

    def has_seen(self, rows: int) -> bool:
        """Whether passes of this size were clocked, a few of them."""
        return self._seen.get(rows, 0) >= self._settling + FEW

    def costs(self, wanted: Sequence[int]) -> list[float]:
        """What passes over so many rows cost, in rising order. More rows never cost less: what seems so is noise."""
        blocks: list[tuple[float, float, int]] = []  # (mean cost, how well it is known, sizes)
        for rows in wanted:
            mean, weight, count = math.exp(self._cost(rows)), 1.0 + self._seen.get(rows, 0), 1
            while blocks and blocks[-1][0] >= mean:  # neighbours in the wrong order are taken for one
                other, known, several = blocks.pop()
                mean = (mean * weight + other * known) / (weight + known)
                weight, count = weight + known, count + several
            blocks.append((mean, weight, count))
        return [mean for mean, _, count in blocks for _ in range(count)]

    def _cost(self, rows: int) -> float:
        return math.log((1 + rows * self._slope) / (1 + self._slope)) + self._surprise(rows)

    def _surprise(self, rows: int) -> float:
        """That of the size, or what lies between those of the sizes around it; behind the largest, as there."""
        if rows in self._surprises:
            return self._surprises[rows]
        below = max(size for size in self._surprises if size < rows)
        above = min((size for size in self._surprises if size > rows), default=below)
        share = (rows - below) / (above - below) if above > below else 0.0
        return (1 - share) * self._surprises[below] + share * self._surprises[above]


_cost_models: WeakKeyDictionary[Target, dict[int, PassCostModel]] = WeakKeyDictionary()
"""what passes of a target cost, by the size of the batch: known to all that draft for it, whatever they remember"""
RECORDED = 4
"""passes of a size on a device before its clock runs: by then all that a step does is recorded"""


def cost_model_of(target: Target | None, batch: int) -> PassCostModel:
    if target is None:
        return PassCostModel()
    clocks, (size, _) = _cost_models.setdefault(target, {}), target.room(batch, 1)
    if size not in clocks:
        clocks[size] = PassCostModel() if target.device.type == "cpu" else PassCostModel(RECORDED, DEVICE_SLOPE)
    return clocks[size]


class AdaptiveSize(TopK):
    """`paced:N,depth=D,width=W`: as many of the N best nodes over a memory as pay. Over a draft model it is `topk`."""

    def __init__(self, nodes: int = 63, depth: int = 16, width: int = 8) -> None:
        super().__init__(nodes, depth, width)
        self._batch = 1
        self._clock = PassCostModel()
        self._ended = 0.0

    def begin(self, batch: int, target: Target | None) -> None:
        self._batch = batch
        self._clock = cost_model_of(target, batch)

    def lay(self, root: int, place: Cursor, after: Look, budget: Budget) -> TreeBuilder:
        nodes, depth = min(self.nodes, budget.nodes - 1), min(self.depth, budget.depth)
        tree = TreeBuilder([root])
        if nodes > 0 and self._clock.knows:  # once in a while a plain step must be clocked
            growing = falling(tree, place, after, depth=depth, width=self.width, least=LEAST)
            tree = tree.leading(1 + self._size(growing, nodes))
        self._ended = time.perf_counter()
        return tree

    def update(
        self,
        sequences: Sequence[SequenceState],
        trees: Sequence[DraftTree],
        scored: Scored,
        verdicts: Sequence[Verdict],
    ) -> None:
        rows = max(map(len, trees))
        booked = next((1 + size for size in SIZES if 1 + size >= rows), rows)  # what is short of a size counts as it
        self._clock.saw(booked, time.perf_counter() - self._ended)

    def _size(self, growing: Iterator[float], nodes: int) -> int:
        """How many nodes below the root give most tokens a second; no more are grown than it takes to know.

        Nodes come in falling order: where two sizes more were no better, larger ones will not be.
        """
        sizes = [*(size for size in SIZES if size < nodes), nodes]
        plain, *costs = self._clock.costs([1 + size for size in sizes])
        tokens, grown, best, worse = 1.0, 0, (1 / plain, 0), 0
        for size, cost in zip(sizes[1:], costs, strict=True):
            reach = list(islice(growing, size - grown))
            tokens, grown = tokens + sum(reach), grown + len(reach)
            if not reach or worse > 1:
                break
            best, worse = ((tokens / cost, grown), 0) if tokens / cost > best[0] else (best, worse + 1)
        return best[1] if best[0] * plain > WORTH else 0
