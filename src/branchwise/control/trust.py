"""How often the promises of a source come true, learned from verdicts.

A source says of each candidate how probable it is after its parent: that is its promise. A promise may be wrong: the
counts of a memory know nothing of the next text, and a head that learned distributions is judged by single tokens. So
promises are grouped into bins by their size. Each bin counts the tokens that were promised and those that came, and a
promise is corrected by the ratio in its bin. Counts fade slowly, so that they are steady, but they are replaced at once
if the last verdicts contradict them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

BINS = 10
"""the number of bins, by powers of two: promises above 1/2, above 1/4, ..."""
PRIOR = 2.0
"""the weight of the prior in each bin, in tokens: before any verdict, this many were promised and came"""
LONG, SHORT = 120.0, 10.0
"""promised tokens after which a count has faded to a third: the steady count, and the count of the last verdicts"""
FAR = 3.0
"""standard deviations from which on the last verdicts contradict the steady count"""
FORGIVING = 0.01
"""the share of a count that the prior replaces with every verdict that has no promise in its bin"""


class Kept(NamedTuple):
    """What a verdict says of one candidate whose parent is on the accepted path."""

    promise: float
    came: bool


def what_came(tokens: Sequence[int], parents: Sequence[int], path: Sequence[int], last: int) -> dict[int, bool]:
    """For every candidate whose parent is on the accepted path, drafted or not: whether its token came. `path` is the
    accepted path from the root on, and `last` the token after it."""
    follows = dict(zip(path, [*(tokens[node] for node in path[1:]), last], strict=True))
    return {node: tokens[node] == follows[above] for node, above in enumerate(parents) if above in follows}


class Bin:
    """The counts for promises of about one size."""

    def __init__(self) -> None:
        self.promised = self.came = PRIOR
        self._lately_promised = self._lately_came = self._variance = 0.0
        """the same counts for the last verdicts, and the variance of what came if the steady count is right"""

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
    """Corrects the promises of one source."""

    def __init__(self) -> None:
        self._bins = [Bin() for _ in range(BINS)]

    def worth(self, promise: float) -> float:
        """How probable a candidate is, given the probability that its source promises."""
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
