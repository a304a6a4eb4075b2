"""What passes cost, in passes over one row, learned from the passes of generation itself.

The model of a pass over a number of rows:

    log seconds = pace + log line(rows) + deviation(rows) + noise

The pace is that of the machine: it changes from minute to minute, for all sizes alike. The line is a fixed guess, one
plus a small cost for every further row. The deviation from it hardly changes, but no size is timed often. A Kalman
filter estimates pace and deviations together, from their sums. Its initial covariance is that of a random walk over the
logarithm of the number of rows, because sizes close to each other cost about the same: so one pass over 32 rows also
says something of 24 and of 64.

Optimistic cost, so that a size of which little is known is tried: log cost - HOPE * (sd - SURE), the reduction clipped
to 0 ... MOST_HOPE, where sd is the standard deviation of the log cost.

Rows are those of all texts together. A batch size that was not seen before begins with what is known of the nearest.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from branchwise.backends.base import TargetInfo
from branchwise.cuda.inputs import BATCHES, fitting

GRID = (1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 2048, 4096, 8192)
"""numbers of rows whose deviations are estimated; others are interpolated"""
SLOPE = 1 / 96
"""the assumed cost of one more row, in passes over one row, before any pass was timed"""
DEVICE_SLOPE = 1 / 256
"""the assumed cost of one more row on a device, where memory bandwidth limits a pass and not arithmetic"""
BEND = 0.6
"""the variance that the deviation from that line gains when the number of rows grows by the factor e"""
NOISE, LEAST_NOISE, MOST_NOISE = 0.1**2, 0.03**2, 0.5**2
"""the noise of the logarithm of a time, at first, at least and at most; these and DRIFT to OTHER_DAY are variances"""
SLOWLY = 0.05
"""the share of the last error in the estimate of the noise"""
DRIFT = 0.02**2
"""the change of the pace from pass to pass"""
WEAR = 1e-4
"""the change of the deviations from pass to pass, as a share of their first variance"""
ALARM = 0.1
"""the change of pace and deviations that is assumed if two passes in a row are outliers of the same sign"""
OTHER_BATCH = 1.0
"""how unsure the pace is in a batch of another size, or in a new process, before anything was timed"""
OTHER_DAY = 0.01
"""how much the deviations may have changed since another process"""
ABSURD = 50.0
"""a bound that no logarithm of a cost and no variance of it reaches"""
FAR = 3.0
"""standard deviations from which on a pass is an outlier; two outliers of the same sign in a row are an alarm"""
DOUBT = 0.2
"""the standard deviation of the log cost of a size from which on a plain pass is needed for comparison"""
UNTRIED = 0.25
"""the least standard deviation of a size that was hardly ever timed"""
SURE, HOPE = 0.1, 1.5
"""the standard deviation that counts as none, and the factor of what is beyond it in an optimistic cost"""
MOST_HOPE = math.log(3)
"""the largest reduction of an optimistic log cost: in a large batch one trial of a large size may take many passes"""
STALE = 200
"""steps after which a plain step must be timed again"""
FEW = 3
"""timed passes of a size that are enough to compare it with others"""
RECORDED = 4
"""passes, or steps, of a size on a device before any is timed: by then everything that a step does is recorded"""

_LOGS = np.log(GRID)
_WALK = np.minimum.outer(_LOGS, _LOGS)


def batch_size_class(batch: int) -> int:
    """The bucket of a batch size; batches of one bucket share what is learned of them."""
    return fitting(batch, BATCHES)


def nearest_size(known: Iterable[int], size: int) -> int | None:
    """The known batch size that is nearest to `size` by ratio, if there is any."""
    return min(known, key=lambda other: abs(math.log(other / size)), default=None)


class PassCostModel:
    """The cost of a pass over a number of rows of each text of a batch, in passes over one row of each, estimated from
    timed passes."""

    def __init__(self, settling: int = 1, slope: float = SLOPE, batch: int = 1) -> None:
        """The first `settling` passes of a size are not timed: they also choose and record kernels."""
        self._settling, self._slope, self._batch = settling, slope, batch
        self._known = np.zeros(1 + len(GRID))
        """the pace, which is the log seconds of a pass over one row, and the deviation at every size of `GRID`"""
        self._spread = np.zeros((1 + len(GRID),) * 2)
        """the covariance of `_known`; [0, 0] is 0 before the first timed pass"""
        self._spread[1:, 1:] = BEND * _WALK
        self._counts: dict[int, int] = {}
        self._since_plain = STALE
        self._drafted = 0
        """the rows of the last timed pass, if they were more than one; else 0"""
        self._noise = NOISE
        self._outliers = 0
        """the number of outliers in a row of the same sign; negative if the passes were shorter than expected"""

    def for_batch(self, batch: int) -> PassCostModel:
        """The model to begin with at another batch size: rows cost about the same there, but the pace may differ."""
        other = PassCostModel(self._settling, self._slope, batch)
        other._known, other._spread, other._noise = self._known.copy(), self._spread.copy(), self._noise
        if self._spread[0, 0]:
            other._spread[0, 0] += OTHER_BATCH
            other._spread[1:, 1:] += ALARM * _WALK
        return other

    def state(self) -> dict[str, object]:
        """The estimates, for a file."""
        return {"known": self._known.tolist(), "spread": self._spread.tolist(), "noise": self._noise}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Begin with the estimates of another process: deviations are about the same, but the pace may differ."""
        known, spread = (np.array(state[name], dtype=np.float64) for name in ("known", "spread"))
        noise = min(MOST_NOISE, max(LEAST_NOISE, float(state["noise"])))
        fits = known.shape == self._known.shape and spread.shape == self._spread.shape
        if not (fits and (np.abs(known) < ABSURD).all() and (np.abs(spread) < ABSURD).all() and spread[0, 0] > 0):
            raise ValueError("these are no costs of passes")
        self._known, self._spread, self._noise = known, spread, noise
        self._spread[0, 0] += OTHER_BATCH
        self._spread[1:, 1:] += OTHER_DAY * _WALK

    def tell(self, rows: int, seconds: float) -> None:
        """Take over a careful measurement of a pass over this many rows of each text."""
        for _ in range(self._settling + FEW - self._counts.get(rows, 0)):
            self.record(rows, seconds)
        self.record(rows, seconds)

    def record(self, rows: int, seconds: float) -> None:
        """Learn from one pass over this many rows of each text."""
        count = self._counts.get(rows, 0)
        self._counts[rows] = count + 1
        self._since_plain = 0 if rows == 1 and count >= self._settling else self._since_plain + 1
        if count < self._settling:
            return
        spent = math.log(max(seconds, 1e-9)) - self._guess(rows)
        self._drafted = rows if rows > 1 else 0
        seen = _seen(self._batch * rows)
        if not self._spread[0, 0]:  # the first timed pass sets the pace
            self._known[0], self._spread[0, 0] = spent, self._spread_of(seen) + self._noise
            return
        self._spread[0, 0] += DRIFT
        self._spread[1:, 1:] += WEAR * BEND * _WALK
        self._learn(seen, spent - float(seen @ self._known))

    def _learn(self, seen: NDArray[np.float64], error: float) -> None:
        expected = self._spread_of(seen) + self._noise
        far = FAR * math.sqrt(expected)
        noise = self._noise + SLOWLY * (min(abs(error), far) ** 2 - expected)
        self._noise = min(MOST_NOISE, max(LEAST_NOISE, noise))
        if abs(error) <= far:
            self._outliers = 0
        else:
            same = self._outliers * error > 0
            self._outliers = (self._outliers if same else 0) + (1 if error > 0 else -1)
            if abs(self._outliers) == 1:  # one alone is taken for an accident and counts as one standard deviation
                error = math.copysign(far / FAR, error)
            else:
                self._spread[0, 0] += ALARM
                self._spread[1:, 1:] += ALARM * _WALK
        towards = self._spread @ seen
        whole = float(seen @ towards) + self._noise
        self._known += towards * (error / whole)
        self._spread -= np.outer(towards, towards) / whole

    @property
    def knows_plain(self) -> bool:
        """Whether a plain step was timed within the last `STALE` steps, and the last drafted size can be compared with
        it."""
        if self._since_plain >= STALE:
            return False
        return not self._drafted or self._spread_of(_compared(self._batch, (self._drafted,))[0]) < DOUBT**2

    @property
    def plain_seconds(self) -> float:
        """How long a pass over one row of each text takes at the present pace."""
        return math.exp(self._guess(1) + float(_seen(self._batch) @ self._known))

    def keep_pace(self, other: PassCostModel) -> None:
        """Take over the pace of another model, which has timed the same machine more recently."""
        if self._spread[0, 0] and other._spread[0, 0]:
            self._known[0] += math.log(other.plain_seconds / self.plain_seconds)

    def settled(self, rows: int) -> bool:
        """Whether passes of this size are timed by now: the first ones are not."""
        return self._counts.get(rows, 0) >= self._settling

    def knows(self, rows: int) -> bool:
        """Whether a few passes of this size were timed."""
        return self._counts.get(rows, 0) >= self._settling + FEW

    def costs(self, wanted: Sequence[int], *, hoped: bool = False) -> list[float]:
        """The costs of passes over these numbers of rows of each text, in rising order. They do not fall: if more rows
        seem to cost less, that is noise. `hoped` asks for optimistic costs, so that a size of which little is known is
        tried."""
        seen = _compared(self._batch, tuple(wanted))
        found = seen @ self._known
        if hoped:
            doubts = np.sqrt(np.maximum(0.0, ((seen @ self._spread) * seen).sum(axis=1)))
            found = found - np.clip(HOPE * (doubts - SURE), 0.0, MOST_HOPE)
        deviations = zip(wanted, found.tolist(), strict=True)
        logs = [deviation + (self._guess(rows) - self._guess(1)) for rows, deviation in deviations]
        costs = [math.exp(max(0.0, log)) for log in logs]  # no pass costs less than a pass over one row
        return _pooled(costs, [1.0 + self._counts.get(rows, 0) for rows in wanted])

    def unclear(self, rows: int, speed: float) -> bool:
        """Whether a size that seems `speed` times as fast as plain decoding may well be slower. Then plain passes take
        turns with it until that is clear. A size of which hardly anything is known is tried first: False."""
        doubt = math.sqrt(self._spread_of(_compared(self._batch, (rows,))[0]))
        return self._since_plain > 0 and math.log(speed) < doubt < UNTRIED

    def _guess(self, rows: int) -> float:
        """The log of the line, which is 1 at one row of a single text."""
        return math.log((1 + self._batch * rows * self._slope) / (1 + self._slope))

    def _spread_of(self, seen: NDArray[np.float64]) -> float:
        """The variance of a weighted sum of `_known`."""
        return max(0.0, float(seen @ self._spread @ seen))


def _pooled(costs: Sequence[float], weights: Sequence[float]) -> list[float]:
    """The costs as the nearest sequence that does not fall (isotonic regression): neighbours in the wrong order share
    their weighted mean."""
    blocks: list[tuple[float, float, int]] = []  # (mean cost, weight, sizes)
    for mean, weight in zip(costs, weights, strict=True):
        count = 1
        while blocks and blocks[-1][0] >= mean:
            other, known, several = blocks.pop()
            mean = (mean * weight + other * known) / (weight + known)
            weight, count = weight + known, count + several
        blocks.append((mean, weight, count))
    return [mean for mean, _, count in blocks for _ in range(count)]


@cache
def _seen(rows: int) -> NDArray[np.float64]:
    """The weights of `_known` in the time of a pass over this many rows: the pace, and the deviations around it."""
    seen = np.zeros(1 + len(GRID))
    seen[0] = 1.0
    place = min(int(np.searchsorted(GRID, rows)), len(GRID) - 1)
    if GRID[place] <= rows:
        seen[1 + place] = 1.0
    else:
        share = (math.log(rows) - _LOGS[place - 1]) / (_LOGS[place] - _LOGS[place - 1])
        seen[place], seen[1 + place] = 1 - share, share
    return seen


@cache
def _compared(batch: int, wanted: tuple[int, ...]) -> NDArray[np.float64]:
    """(sizes, …): the weights of `_known` in the cost of passes over these numbers of rows of each text, compared with
    a pass over one row of each. The pace cancels out."""
    return np.stack([_seen(batch * rows) for rows in wanted]) - _seen(batch)


_cost_models: WeakKeyDictionary[TargetInfo, dict[int, PassCostModel]] = WeakKeyDictionary()
"""target -> bucket of the batch size -> costs of its passes, shared by all drafters of the target"""


def cost_models(target: TargetInfo) -> dict[int, PassCostModel]:
    """The models of a target, by the bucket of the batch size."""
    return _cost_models.setdefault(target, {})


def plain_seconds_of(target: TargetInfo, batch: int) -> float | None:
    """How long a plain pass over this many texts takes at the present pace; None if none was timed lately."""
    model = cost_models(target).get(batch_size_class(batch))
    return model.plain_seconds if model is not None and model.knows_plain else None


def cost_model_of(target: TargetInfo | None, batch: int) -> PassCostModel:
    """The model for batches of this size; without a target, a new one."""
    if target is None:
        return PassCostModel(batch=batch)
    models, size = cost_models(target), batch_size_class(batch)
    if size not in models:
        nearest = nearest_size(models, size)
        first = PassCostModel() if target.device.type == "cpu" else PassCostModel(RECORDED, DEVICE_SLOPE)
        models[size] = (first if nearest is None else models[nearest]).for_batch(size)
    return models[size]
