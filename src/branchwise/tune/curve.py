"""The curve t(n) while it is measured: the times of each size, where a cliff may be, and whether it is one."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from statistics import median

import numpy as np

from branchwise.tune.costs import Point

CLIFF = 0.1
"""the least rise from one size to the next, as a share of its cost, that is worth a word"""
STEEPER = 2.0
"""how much more than the sizes beside it a cliff must rise"""
ERRORS = 3.0
"""how many standard errors a rise must be away from nothing"""

Turn = Mapping[int, float]
"""nodes -> seconds"""


class Curve:
    """What was timed so far, every turn divided by its pace."""

    def __init__(self) -> None:
        self._samples: dict[int, list[float]] = {}
        self._slopes: set[tuple[int, int]] = set()

    def add(self, turns: Sequence[Turn]) -> None:
        """Add turns over the same sizes; sizes that were timed before show how the pace has changed."""
        usual = {n: self.seconds(n) for n in turns[0] if n in self._samples}
        usual = usual or {n: median(turn[n] for turn in turns) for n in turns[0]}
        for turn in turns:
            pace = median(turn[n] / seconds for n, seconds in usual.items())
            for n, seconds in turn.items():
                self._samples.setdefault(n, []).append(seconds / pace)

    def seconds(self, nodes: int) -> float:
        return median(self._samples[nodes])

    def points(self) -> tuple[Point, ...]:
        return tuple(Point(nodes, *quartiles(times)) for nodes, times in sorted(self._samples.items()))

    def suspects(self) -> list[tuple[int, int]]:
        """Sizes between which the cost rises enough to hide a cliff, the steepest first, but for proven slopes."""
        return [(a, b) for a, b in self._rises(CLIFF) if b - a > 1 and (a, b) not in self._slopes]

    def edges(self) -> list[int]:
        """Sizes that may be cliffs, the highest first: they cost more than the size before."""
        return [b for a, b in self._rises(CLIFF / 2) if b - a == 1]

    def _rises(self, share: float) -> list[tuple[int, int]]:
        """Neighbouring sizes between which the cost rises by this share and by more than noise, the steepest first."""
        found = []
        for a, b in pairwise(sorted(self._samples)):
            rise = self.seconds(b) - self.seconds(a)
            noise = math.hypot(_error(self._samples[a]), _error(self._samples[b]))
            if rise > max(share * self.seconds(a), ERRORS * noise):
                found.append((rise / self.seconds(a), a, b))
        return [(a, b) for _, a, b in sorted(found, reverse=True)]

    def judge(self, a: int, place: int, b: int) -> None:
        """Was it a slope? A cliff between a and b lifts the sizes near their middle off the line, by half its height.

        Two neighbours are asked: stairs that begin at a and at the middle have every second one on the line.
        """
        share = (place - a) / (b - a)
        if 0.25 <= share <= 0.75 and all(self._on_line(a, nodes, b) for nodes in (place, place + 1)):
            self._slopes |= {(a, place), (place + 1, b)}

    def _on_line(self, a: int, nodes: int, b: int) -> bool:
        line = self.seconds(a) + (nodes - a) / (b - a) * (self.seconds(b) - self.seconds(a))
        return abs(self.seconds(nodes) - line) < CLIFF / 4 * line


def is_cliff(edge: int, turns: Sequence[Turn]) -> bool:
    """Differences are taken within a turn, where the machine had one pace."""
    rises = [turn[edge] - turn[edge - 1] for turn in turns]
    beside = [
        median(turn[nodes] - turn[nodes - 1] for turn in turns)
        for nodes in (edge - 1, edge + 1)
        if nodes in turns[0] and nodes - 1 in turns[0]
    ]
    least = median(rises) - ERRORS * _error(rises)
    return median(rises) >= CLIFF * median(turn[edge - 1] for turn in turns) and least > STEEPER * max([0.0, *beside])


def _error(values: Sequence[float]) -> float:
    """The standard error of a median, from the median distance to it, which outliers do not move."""
    middle = median(values)
    deviation = 1.4826 * median(abs(value - middle) for value in values)
    return 1.2533 * deviation / math.sqrt(len(values))


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """The median, and the values below and above it between which half of all lie."""
    low, middle, high = np.quantile(values, (0.25, 0.5, 0.75)).tolist()
    return middle, low, high
