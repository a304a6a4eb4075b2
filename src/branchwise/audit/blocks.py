"""Sampled blocks against their exact probabilities: the statistics behind the audits of models and servers.

    block        the first tokens of a text, at most `length` of them
    cell         a set of blocks; the cells of a `Partition` cover every block once, with known probabilities
    distance     total variation between two distributions over the cells: the mass that would have to move
    false alarm  a correct decoder found NOT LOSSLESS; its rate holds for all tests of an audit together

The partition depends on the exact distribution and on the number of samples, never on the samples, so that the counts
of its cells are multinomial with the stated probabilities if, and only if, the decoder keeps the distribution over
those cells.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from heapq import heappop, heappush
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import stats  # type: ignore[import-untyped]

Token = int | str
Block = tuple[Token, ...]
Floats = NDArray[np.float64]
Counts = NDArray[np.int64]
NextProbs = Callable[[Block], Floats | Mapping[str, float] | None]
"""The distribution of the token after a prefix: an array over the vocabulary, or the known tokens with their
probabilities, where the rest of the mass belongs to all other tokens. None if nothing follows or if it is not known."""

EXPECTED = 5.0
"""the least expected count of a cell with which the statistic is nearly chi-square distributed"""
SAMPLES_PER_CELL = 40
"""the samples for each cell: more cells would find finer differences, but large differences less surely"""
FEWEST_CELLS = 8
POWER = 0.9


class Partition:
    """Cells for blocks of `length` tokens, as fine as `samples` blocks allow.

    Every cell belongs to a prefix and holds the blocks that start with it, but with no longer prefix of the partition.
    Prefixes join in falling order of probability, whatever their length.
    """

    IMPOSSIBLE = 0
    """the cell of blocks with a token that cannot follow; its probability is 0"""

    def __init__(self, probs: NextProbs, *, length: int, samples: int) -> None:
        assert length > 0, "a block has at least one token"
        assert samples > 0, "a partition of no samples"
        self.length = length
        self.prefixes: list[Block] = []
        """the prefix of cell i + 1"""
        self._cells: dict[Block, int] = {}
        self._possible: dict[Block, NDArray[np.bool_]] = {}
        least = EXPECTED / samples
        most = max(FEWEST_CELLS, samples // SAMPLES_PER_CELL)
        masses = [0.0]
        queue: list[tuple[float, Block]] = [(-1.0, ())]
        while queue and len(self.prefixes) < most:
            negative, prefix = heappop(queue)
            mass = -negative
            self.prefixes.append(prefix)
            self._cells[prefix] = len(self.prefixes)
            masses.append(mass)
            # A prefix with less mass cannot be split into two cells.
            following = probs(prefix) if len(prefix) < length and mass >= 2 * least else None
            if following is None:
                continue
            heavy, rest, possible = _split(following, least / mass)
            if possible is not None:
                self._possible[prefix] = possible
            masses[-1] = mass * rest
            for token, share in heavy:
                heappush(queue, (-mass * share, (*prefix, token)))
        for negative, (*start, _) in queue:  # prefixes without a cell stay in the cell of what they continue
            masses[self._cells[tuple(start)]] -= negative
        self.probabilities: Floats = np.array(masses)

    def __len__(self) -> int:
        return len(self.probabilities)

    def cell_of(self, block: Block) -> int:
        """The cell of a block. A text that ended within a prefix counts as that prefix with any other token."""
        for depth, token in enumerate(block[: self.length]):
            prefix = block[:depth]
            possible = self._possible.get(prefix)
            if possible is not None and not possible[int(token)]:
                return self.IMPOSSIBLE
            if (*prefix, token) not in self._cells:
                return self._cells[prefix]
        return self._cells[block[: self.length]]

    def count(self, blocks: Iterable[Block]) -> Counts:
        """(cells,): how many of the blocks lie in each cell."""
        return np.bincount(np.array([self.cell_of(block) for block in blocks], dtype=np.int64), minlength=len(self))

    def test(self, blocks: Iterable[Block], context: str) -> BlockTest:
        return g_test(self.count(blocks), self.probabilities, context)


LEAST_REST = 1e-6
"""the least mass of all unnamed tokens: stated probabilities are rounded, so they never show that it is 0"""


def _split(
    following: Floats | Mapping[str, float], least: float
) -> tuple[list[tuple[Token, float]], float, NDArray[np.bool_] | None]:
    """The tokens of at least the probability `least`, the mass of all others, and a mask of the possible tokens, or
    None if all are possible."""
    if isinstance(following, np.ndarray):
        probs = following.astype(np.float64)
        probs = probs / probs.sum()
        chosen = probs >= least
        heavy: list[tuple[Token, float]] = [(int(token), float(probs[token])) for token in np.flatnonzero(chosen)]
        return heavy, float(probs[~chosen].sum()), None if probs.all() else probs > 0
    total = max(sum(following.values()), 0.0)
    scale = min(1.0, (1 - LEAST_REST) / total) if total else 1.0
    known = {token: share * scale for token, share in following.items()}
    heavy = [(token, share) for token, share in known.items() if share >= least]
    return heavy, 1 - sum(share for _, share in heavy), None


@dataclass(frozen=True)
class BlockTest:
    """A G test of counts against the probabilities of their cells."""

    context: str
    samples: int
    cells: int
    """the number of cells, after pooling those that expect fewer than 5 counts"""
    statistic: float
    """G with Williams' correction, chi-square distributed with `freedom` degrees of freedom if the distribution is
    kept"""
    freedom: int
    impossible: int
    """the number of blocks in cells of probability 0; a single such block is proof"""
    distance: float
    """the total variation between frequencies and probabilities of the cells"""
    expected_distance: float
    """the distance that chance alone explains"""

    @property
    def p_value(self) -> float:
        """The probability that the test of a correct decoder turns out as badly."""
        if self.impossible:
            return 0.0
        return float(stats.chi2.sf(self.statistic, self.freedom)) if self.freedom else 1.0

    @property
    def says_something(self) -> bool:
        return self.freedom > 0 or self.impossible > 0

    def detectable(self, level: float) -> float:
        """The distance that a test at this level finds with probability 0.9, whichever cells differ.

        If the counts follow another distribution, G is noncentral chi-square distributed, and the noncentrality is the
        number of samples times the chi-square distance of that distribution. Of all distributions at a total-variation
        distance d, the hardest to find raises one half of the mass in proportion and lowers the other half. Its
        chi-square distance is 4 d², and no other distribution has a smaller one.
        """
        if not self.freedom:
            return 1.0
        bar = stats.chi2.isf(level, self.freedom)
        low, high = 0.0, 1.0
        while stats.ncx2.sf(bar, self.freedom, high) < POWER:
            low, high = high, 2 * high
        while high - low > 1e-3 * high:
            middle = (low + high) / 2
            low, high = (middle, high) if stats.ncx2.sf(bar, self.freedom, middle) < POWER else (low, middle)
        return min(1.0, math.sqrt(high / (4 * self.samples)))


def g_test(counts: Counts, probabilities: Floats, context: str = "") -> BlockTest:
    """Compare the counts of cells with their probabilities.

    Cells that expect fewer than 5 counts are pooled, by their probabilities alone. Sokal and Rohlf, "Biometry" (1981)
    for the test; Williams, "Improved likelihood ratio tests for complete contingency tables" (1976) for the correction,
    without which a sum of many tests would drift away from its chi-square distribution.
    """
    samples = int(counts.sum())
    possible = probabilities > 0
    impossible = int(counts[~possible].sum())
    observed, probs = _pool(counts[possible].astype(np.float64), probabilities[possible], samples)
    freedom = max(len(probs) - 1, 0)
    if not freedom:
        return BlockTest(context, samples, len(probs), 0.0, 0, impossible, impossible / max(samples, 1), 0.0)
    expected = probs * samples
    seen = observed > 0
    g = 2 * float((observed[seen] * np.log(observed[seen] / expected[seen])).sum())
    correction = 1 + (float((1 / probs).sum()) - 1) / (6 * samples * freedom)
    return BlockTest(
        context=context,
        samples=samples,
        cells=len(probs),
        statistic=max(g, 0.0) / correction,
        freedom=freedom,
        impossible=impossible,
        distance=(float(np.abs(observed / samples - probs).sum()) + impossible / samples) / 2,
        expected_distance=float(np.sqrt(probs * (1 - probs) / (2 * math.pi * samples)).sum()),
    )


def _pool(observed: Floats, probs: Floats, samples: int) -> tuple[Floats, Floats]:
    """Merge the least probable cells into one cell until every cell expects enough counts."""
    order = np.argsort(probs, kind="stable")
    observed, probs = observed[order], probs[order]
    total = np.cumsum(probs)
    few = int((probs * samples < EXPECTED).sum())
    few = min(max(few, int((total * samples < EXPECTED).sum()) + 1), len(probs)) if few else 1
    return np.append(observed[:few].sum(), observed[few:]), np.append(total[few - 1], probs[few:])


@dataclass(frozen=True)
class BlockTests:
    """The tests of all contexts, judged as one family by Holm's procedure.

    With several contexts a further test joins them all: it finds a bias that is too small to be found in each.
    """

    contexts: tuple[BlockTest, ...]
    false_alarm: float = 1e-3
    """the false-alarm rate of the whole family"""

    @cached_property
    def family(self) -> tuple[BlockTest, ...]:
        """The tests that say something; the test of all contexts together is the last."""
        telling = tuple(test for test in self.contexts if test.says_something)
        return (*telling, self._together(telling)) if len(telling) > 1 else telling

    @property
    def samples(self) -> int:
        return sum(test.samples for test in self.contexts)

    @property
    def level(self) -> float:
        """The level of the test with the smallest p-value, which is the strictest level of Holm's procedure."""
        return self.false_alarm / max(len(self.family), 1)

    @cached_property
    def adjusted(self) -> tuple[float, ...]:
        """For each test of the family its p-value after Holm: the false-alarm rate at which it would just be
        rejected."""
        values = [test.p_value for test in self.family]
        found, highest = [0.0] * len(values), 0.0
        for turn, index in enumerate(sorted(range(len(values)), key=values.__getitem__)):
            highest = max(highest, min(1.0, (len(values) - turn) * values[index]))
            found[index] = highest
        return tuple(found)

    @cached_property
    def detectable(self) -> float:
        """The distance that would have been found with probability 0.9 if every context had it."""
        return self.family[-1].detectable(self.level) if self.family else 1.0

    @staticmethod
    def _together(tests: Sequence[BlockTest]) -> BlockTest:
        tested = [test for test in tests if test.freedom]
        samples = sum(test.samples for test in tested)
        return BlockTest(
            context="all contexts together",
            samples=samples,
            cells=sum(test.cells for test in tested),
            statistic=sum(test.statistic for test in tested),
            freedom=sum(test.freedom for test in tested),
            impossible=sum(test.impossible for test in tests),
            distance=sum(test.distance * test.samples for test in tested) / max(samples, 1),
            expected_distance=sum(test.expected_distance * test.samples for test in tested) / max(samples, 1),
        )

    def as_dict(self) -> dict[str, Any]:
        return {
            "false_alarm": self.false_alarm,
            "samples": self.samples,
            "detectable_distance": self.detectable,
            "tests": [
                {
                    **asdict(test),
                    "p_value": test.p_value,
                    "adjusted_p_value": adjusted,
                    "detectable_distance": test.detectable(self.level),
                }
                for test, adjusted in zip(self.family, self.adjusted, strict=True)
            ],
            "contexts_without_a_test": [test.context for test in self.contexts if not test.says_something],
        }
