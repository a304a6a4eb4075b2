"""How often what a source promises comes true, learned from verdicts.

A source says of each candidate how probable it is behind the one before it. What it says may be wrong: counts of a
memory know nothing of the next text, and a head that was taught distributions is judged by single tokens. So promises
are kept in bins by their size, each bin counts what was promised and what came, and a promise is worth what promises of
its bin were worth. Counts fade slowly, so that they are steady, and at once where the last verdicts contradict them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

BINS = 10
"""by powers of two: promises above 1/2, above 1/4, ..."""
PRIOR = 2.0
"""promised tokens that are taken to have come in each bin, before anything was seen"""
LONG, SHORT = 120.0, 10.0
"""promised tokens after which a count has faded to a third: the steady one, and that of the last verdicts"""
FAR = 3.0
"""standard deviations by which the last verdicts contradict what is believed"""
FORGIVING = 0.01
"""the share of a count that gives way to the prior with every verdict that says nothing of its bin"""


class Kept(NamedTuple):
    """What a verdict says of one candidate, whose parent it kept."""

    promise: float
    came: bool


def what_came(tokens: Sequence[int], parents: Sequence[int], path: Sequence[int], last: int) -> dict[int, bool]:
    """The candidates of which a verdict says something, whether or not they were drafted: those whose parent it kept;
    and whether they came. `path` are the kept ones from the root on, and the token behind them is `last`."""
    follows = dict(zip(path, [*(tokens[node] for node in path[1:]), last], strict=True))
    return {node: tokens[node] == follows[above] for node, above in enumerate(parents) if above in follows}


class Bin:
    """Promises of about one size."""

    def __init__(self) -> None:
        self.promised = self.came = PRIOR
        self._lately_promised = self._lately_came = self._variance = 0.0
        """of the last verdicts; the variance is that of what came of them, if what is believed is true"""

    def worth(self, promise: float) -> float:
        return min(1.0, promise * self.came / self.promised)

    def record(self, seen: Sequence[Kept]) -> None:
        promised, came = sum(one.promise for one in seen), sum(one.came for one in seen)
        variance = sum(worth * (1 - worth) for one in seen for worth in [self.worth(one.promise)])
        slow, fast = math.exp(-promised / LONG), math.exp(-promised / SHORT)
        self.promised, self.came = slow * self.promised + promised, slow * self.came + came
        self._lately_promised = fast * self._lately_promised + promised
        self._lately_came = fast * self._lately_came + came
        self._variance = fast * self._variance + variance
        surprise = abs(self._lately_came - self._lately_promised * self.came / self.promised)
        if surprise > 1 + FAR * math.sqrt(self._variance):
            self.promised, self.came = self._lately_promised, self._lately_came

    def forgive(self) -> None:
        self.promised += FORGIVING * (PRIOR - self.promised)
        self.came += FORGIVING * (PRIOR - self.came)


class Trust:
    """In the promises of one source."""

    def __init__(self) -> None:
        self._bins = [Bin() for _ in range(BINS)]

    def worth(self, promise: float) -> float:
        """How probable a candidate is whose source says that it is so probable."""
        return self._bins[_bin(promise)].worth(promise)

    def record(self, verdict: Sequence[Kept]) -> None:
        for place, known in enumerate(self._bins):
            own = [one for one in verdict if _bin(one.promise) == place]
            if own:
                known.record(own)
            else:
                known.forgive()


def _bin(promise: float) -> int:
    return min(BINS - 1, max(0, -math.frexp(promise)[1])) if promise > 0 else BINS - 1
