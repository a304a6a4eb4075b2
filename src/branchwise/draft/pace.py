"""As large a tree as pays: the size that gives most tokens a second, judged step by step.

A node earns the probability that it is accepted and costs what the pass over it takes longer. What passes cost is
clocked while texts are written, from the end of a draft to the verdict on it: no two machines, models and batches have
the same curve, and it changes with the length of the text. Where no tree pays, nothing is drafted, and the step is that
of plain decoding. (The threshold of OPT-Tree, arXiv 2406.17276, and the timing of Sequoia, arXiv 2402.12374, online.)
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence as Rows
from itertools import accumulate
from statistics import median
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from branchwise.draft import Budget
from branchwise.draft.best import Look, best_first
from branchwise.draft.growth import Sapling
from branchwise.draft.topk import TopK
from branchwise.sequence import Sequence
from branchwise.target import Scored, Target
from branchwise.tree import DraftTree
from branchwise.verify import Verdict

if TYPE_CHECKING:
    from branchwise.draft.memory import Place

SIZES = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
"""nodes below the root that a tree may have: few sizes, so that each is clocked often"""
RECENT = 7
"""passes of one size that are looked at"""
STALE = 400
"""steps after which a time is forgotten: the text has grown, or the machine has other work"""
SLOPE = 1 / 48
"""what a row more is taken to cost, in passes over one row, where nothing is known yet"""
WORTH = 1.03
"""how many times plain decoding a tree must promise to be worth drafting"""


class Clock:
    """What passes over so many rows take, from those that were seen."""

    def __init__(self) -> None:
        self._seen: dict[int, deque[tuple[int, float]]] = {}
        self._steps = 0

    def saw(self, rows: int, seconds: float) -> None:
        self._steps += 1
        if rows not in self._seen:  # the first of its size also pays for kernels being chosen
            self._seen[rows] = deque(maxlen=RECENT)
        else:
            self._seen[rows].append((self._steps, seconds))

    def knows(self, rows: int) -> bool:
        return bool(self._fresh(rows))

    def seconds(self, wanted: Rows[int]) -> list[float]:
        """What passes over so many rows take, in rising order; between two sizes that were seen, in proportion.

        More rows never take less: where it seems so, it is noise.
        """
        known = [(rows, median(times)) for rows in sorted(self._seen) if (times := self._fresh(rows))]
        if not known:
            return [1 + rows * SLOPE for rows in wanted]
        points = list(zip((rows for rows, _ in known), accumulate((t for _, t in known), max), strict=True))
        return [_between(points, rows) for rows in wanted]

    def _fresh(self, rows: int) -> list[float]:
        return [seconds for step, seconds in self._seen.get(rows, ()) if step > self._steps - STALE]


def _between(points: list[tuple[int, float]], rows: int) -> float:
    """On the line through the points; before the first as there, behind the last as steep as ever, or as guessed."""
    first, last = points[0], points[-1]
    if rows <= first[0]:
        return first[1]
    if rows >= last[0]:
        mean = (last[1] - first[1]) / (last[0] - first[0]) if last[0] > first[0] else first[1] * SLOPE / (1 + SLOPE)
        return last[1] + (rows - last[0]) * mean
    after = next(n for n, point in enumerate(points) if point[0] >= rows)
    (low, least), (high, most) = points[after - 1], points[after]
    return least + (rows - low) / (high - low) * (most - least)


_clocks: WeakKeyDictionary[Target, dict[int, Clock]] = WeakKeyDictionary()
"""what passes of a target cost, by the size of the batch: known to all that draft for it, whatever they remember"""


class Paced(TopK):
    """`paced:N,depth=D,width=W`: as many of the N best nodes over a memory as pay. Over a draft model it is `topk`."""

    def __init__(self, nodes: int = 64, depth: int = 16, width: int = 8) -> None:
        super().__init__(nodes, depth, width)
        self._batch = 1
        self._clock = Clock()
        self._started = self._ended = 0.0

    def begin(self, batch: int, target: Target | None) -> None:
        self._batch = batch
        clocks = {} if target is None else _clocks.setdefault(target, {})
        self._clock = clocks.setdefault(batch, Clock())

    def lay(self, root: int, place: Place, after: Look, budget: Budget) -> Sapling:
        nodes, depth = min(self.nodes, budget.nodes - 1), min(self.depth, budget.depth)
        tree, reach = Sapling([root]), [1.0]
        if nodes > 0 and self._clock.knows(1):  # once in a while a plain step must be clocked
            least = 1 / 512  # what is less probable never pays
            tree, reach = best_first(root, place, after, nodes=nodes, depth=depth, width=self.width, least=least)
        kept = tree.leading(1 + self._size(reach))
        self._ended = time.perf_counter()
        return kept

    def observe(
        self, sequences: Rows[Sequence], trees: Rows[DraftTree], scored: Scored, verdicts: Rows[Verdict]
    ) -> None:
        self._clock.saw(max(map(len, trees)), time.perf_counter() - self._ended)

    def _size(self, reach: list[float]) -> int:
        """How many nodes below the root give most tokens a second."""
        sizes = [size for size in SIZES if size < len(reach)]
        if sizes[-1] < len(reach) - 1:
            sizes.append(len(reach) - 1)
        tokens = list(accumulate(reach))
        rates = [tokens[size] / t for size, t in zip(sizes, self._clock.seconds([1 + s for s in sizes]), strict=True)]
        best = max(range(len(sizes)), key=rates.__getitem__)
        return sizes[best] if rates[best] > WORTH * rates[0] else 0
