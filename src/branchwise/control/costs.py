"""What passes cost, in passes over one row, learned from the passes of generation itself.

The speed of a machine varies, from minute to minute and for all sizes alike, and no size is timed often. So two things
are followed together: the pace of the machine, which changes quickly, and by how much each size is dearer than a line
would have it, which hardly changes. A pass tells their sum, and a Kalman filter how much it says of either. That sizes
close to each other cost about the same is in the covariance the filter begins with: that of a random walk over the
logarithm of the number of rows. So one pass over 32 rows also says something of 24 and of 64.

Rows are those of all texts together. A batch that was not seen before begins with what is known of the nearest one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from branchwise.backends.base import TargetInfo
from branchwise.cuda.inputs import BATCHES, fitting

GRID = (1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 2048, 4096, 8192)
"""rows whose costs are followed; others lie between two of them"""
SLOPE = 1 / 96
"""the assumed cost of one more row, in passes over one row, before any pass was timed"""
DEVICE_SLOPE = 1 / 256
"""the same on a device, where memory bandwidth limits a pass and not arithmetic"""
BEND = 0.6
"""the variance of how far costs are off that line, for a number of rows that is e times as large"""
NOISE, LEAST_NOISE, MOST_NOISE = 0.1**2, 0.03**2, 0.5**2
"""of the logarithm of a time, at first, at least and at most; these and what follows are variances"""
SLOWLY = 0.05
"""the share of the last error in how much noise is expected"""
DRIFT = 0.02**2
"""by which the pace changes from pass to pass"""
WEAR = 1e-4
"""by which costs change, as a share of what was assumed at first"""
ALARM = 0.1
"""the same where passes keep taking much longer or shorter than expected, and what the pace may have changed by then"""
OTHER_BATCH = 1.0
"""of the pace in a batch of another size, or in another process, where nothing was timed yet"""
OTHER_DAY = 0.01
"""of costs in another process"""
ABSURD = 50.0
"""no logarithm of a cost and no variance of one is so large"""
FAR = 3.0
"""standard deviations from which on a pass is an outlier, and two of them in a row an alarm"""
DOUBT = 0.2
"""the standard deviation of the cost of a size from which on a plain pass is wanted for comparison"""
UNTRIED = 0.25
"""that of a size which was hardly ever timed, at least"""
SURE, HOPE = 0.1, 1.5
"""a standard deviation that is as good as none; costs are hoped to be lower by so many times what is beyond it"""
MOST_HOPE = math.log(3)
"""by which they are hoped to be lower at most: in a large batch one trial of a large size may take many passes"""
STALE = 200
"""steps after which a plain step is timed again in any case"""
FEW = 3
"""timed passes of a size that are enough to compare it with others"""
RECORDED = 4
"""passes of a size on a device before they are timed: by then all that a step does is recorded"""

_LOGS = np.log(GRID)
_WALK = np.minimum.outer(_LOGS, _LOGS)


class PassCostModel:
    """The cost of a pass over so many rows of each text of a batch, in passes over one row of each, estimated from
    passes that were timed."""

    def __init__(self, settling: int = 1, slope: float = SLOPE, batch: int = 1) -> None:
        """The first passes of a size, `settling` of them, also pay for the choice and the recording of kernels."""
        self._settling, self._slope, self._batch = settling, slope, batch
        self._known = np.zeros(1 + len(GRID))
        """the logarithms of the seconds of a plain pass, and of what sizes cost over the first guess"""
        self._spread = np.zeros((1 + len(GRID),) * 2)
        self._spread[1:, 1:] = BEND * _WALK
        self._counts: dict[int, int] = {}
        self._since_plain = STALE
        self._drafted = 0
        """rows of the last pass over more than one, if none over one came after it"""
        self._noise = NOISE
        self._outliers = 0
        """in a row, all of them too long or all too short"""

    def for_batch(self, batch: int) -> PassCostModel:
        """What is known of this batch, for another one: rows cost about the same there, the rest of a step may not."""
        other = PassCostModel(self._settling, self._slope, batch)
        other._known, other._spread, other._noise = self._known.copy(), self._spread.copy(), self._noise
        if self._spread[0, 0]:
            other._spread[0, 0] += OTHER_BATCH
            other._spread[1:, 1:] += ALARM * _WALK
        return other

    def state(self) -> dict[str, object]:
        """What is known, for a file."""
        return {"known": self._known.tolist(), "spread": self._spread.tolist(), "noise": self._noise}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Begin with what another process knew: costs are about the same, the pace may be any."""
        known, spread = (np.array(state[name], dtype=np.float64) for name in ("known", "spread"))
        noise = min(MOST_NOISE, max(LEAST_NOISE, float(state["noise"])))
        fits = known.shape == self._known.shape and spread.shape == self._spread.shape
        if not (fits and (np.abs(known) < ABSURD).all() and (np.abs(spread) < ABSURD).all() and spread[0, 0] > 0):
            raise ValueError("these are no costs of passes")
        self._known, self._spread, self._noise = known, spread, noise
        self._spread[0, 0] += OTHER_BATCH
        self._spread[1:, 1:] += OTHER_DAY * _WALK

    def tell(self, rows: int, seconds: float) -> None:
        """A pass over so many rows of each text takes this long, as was measured with care."""
        for _ in range(self._settling + FEW - self._counts.get(rows, 0)):
            self.record(rows, seconds)
        self.record(rows, seconds)

    def record(self, rows: int, seconds: float) -> None:
        """A pass over so many rows of each text took this long."""
        count = self._counts.get(rows, 0)
        self._counts[rows] = count + 1
        self._since_plain = 0 if rows == 1 and count >= self._settling else self._since_plain + 1
        if count < self._settling:
            return
        spent = math.log(max(seconds, 1e-9)) - self._guess(rows)
        self._drafted = rows if rows > 1 else 0
        seen = _seen(self._batch * rows)
        if not self._spread[0, 0]:  # the first pass of all says what its seconds mean
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
            if abs(self._outliers) == 1:  # an accident
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
        """Whether a plain step was timed not long ago, and the sizes that are drafted can be compared with it."""
        if self._since_plain >= STALE:
            return False
        return not self._drafted or self._spread_of(_compared(self._batch, (self._drafted,))[0]) < DOUBT**2

    @property
    def plain_seconds(self) -> float:
        """How long a pass over one row of each text takes at the present pace."""
        return math.exp(self._guess(1) + float(_seen(self._batch) @ self._known))

    def keep_pace(self, other: PassCostModel) -> None:
        """Another model has followed the same machine since: its pace is the present one."""
        if self._spread[0, 0] and other._spread[0, 0]:
            self._known[0] += math.log(other.plain_seconds / self.plain_seconds)

    def settled(self, rows: int) -> bool:
        """Whether passes of this size are timed, beyond the first ones."""
        return self._counts.get(rows, 0) >= self._settling

    def knows(self, rows: int) -> bool:
        """Whether a few passes of this size were timed."""
        return self._counts.get(rows, 0) >= self._settling + FEW

    def costs(self, wanted: Sequence[int], *, hoped: bool = False) -> list[float]:
        """The costs of passes over so many rows of each text, rising: that more rows cost less is noise. `hoped`: as
        low as they may well be, so that a size is tried of which little is known."""
        seen = _compared(self._batch, tuple(wanted))
        found = seen @ self._known
        if hoped:
            doubts = np.sqrt(np.maximum(0.0, ((seen @ self._spread) * seen).sum(axis=1)))
            found = found - np.clip(HOPE * (doubts - SURE), 0.0, MOST_HOPE)
        blocks: list[tuple[float, float, int]] = []  # (mean cost, how well it is known, sizes)
        for rows, over in zip(wanted, found.tolist(), strict=True):
            over += self._guess(rows) - self._guess(1)
            mean = math.exp(max(0.0, over))  # no pass costs less than one over a row
            weight, count = 1.0 + self._counts.get(rows, 0), 1
            while blocks and blocks[-1][0] >= mean:  # neighbours in the wrong order are pooled
                other, known, several = blocks.pop()
                mean = (mean * weight + other * known) / (weight + known)
                weight, count = weight + known, count + several
            blocks.append((mean, weight, count))
        return [mean for mean, _, count in blocks for _ in range(count)]

    def unclear(self, rows: int, speed: float) -> bool:
        """Whether a size that seems so many times as fast as plain decoding may well be slower. Then plain passes take
        turns with it, until it is clear; while hardly anything is known of the size, it is tried first."""
        doubt = math.sqrt(self._spread_of(_compared(self._batch, (rows,))[0]))
        return self._since_plain > 0 and math.log(speed) < doubt < UNTRIED

    def _guess(self, rows: int) -> float:
        return math.log((1 + self._batch * rows * self._slope) / (1 + self._slope))

    def _spread_of(self, seen: NDArray[np.float64]) -> float:
        return max(0.0, float(seen @ self._spread @ seen))


@cache
def _seen(rows: int) -> NDArray[np.float64]:
    """What a pass over so many rows tells: the pace, and the costs of the sizes around it."""
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
    """(sizes, …): what tells the costs of passes over so many rows of each text from that of one over one row of each;
    they have the same pace."""
    return np.stack([_seen(batch * rows) for rows in wanted]) - _seen(batch)


_cost_models: WeakKeyDictionary[TargetInfo, dict[int, PassCostModel]] = WeakKeyDictionary()
"""target -> size of a batch -> costs of its passes, shared by all drafters of the target"""


def cost_models(target: TargetInfo) -> dict[int, PassCostModel]:
    """By the size of a batch."""
    return _cost_models.setdefault(target, {})


def plain_seconds_of(target: TargetInfo, batch: int) -> float | None:
    """How long a plain pass over so many texts takes at the present pace, if one was timed not long ago."""
    model = cost_models(target).get(fitting(batch, BATCHES))
    return model.plain_seconds if model is not None and model.knows_plain else None


def cost_model_of(target: TargetInfo | None, batch: int) -> PassCostModel:
    """Batches of about the same size share what is learned of them."""
    if target is None:
        return PassCostModel(batch=batch)
    models, size = cost_models(target), fitting(batch, BATCHES)
    if size not in models:
        nearest = min(models, key=lambda other: abs(math.log(other / size)), default=None)
        first = PassCostModel() if target.device.type == "cpu" else PassCostModel(RECORDED, DEVICE_SLOPE)
        models[size] = (first if nearest is None else models[nearest]).for_batch(size)
    return models[size]
