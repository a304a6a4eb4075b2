"""Whether a step drafts at all: no drafter leaves a text slower than plain decoding.

A drafter that a user names drafts as it was told, whatever it costs. So whole steps are timed, those with a draft and
plain ones, batches of about one size together. Where drafted steps give fewer tokens a second than plain ones, nothing
is drafted for a while; then a short trial shows whether that has changed. The decision for a step looks at the steps
before it alone, so what a verifier promises of any tree stays true.
"""

from __future__ import annotations

import math

from branchwise.backends.base import TargetInfo
from branchwise.control.choice import Rest, Terms
from branchwise.control.costs import DEVICE_SLOPE, RECORDED, PassCostModel
from branchwise.cuda.inputs import BATCHES, fitting

TERMS = Terms(first=4.0, again=0.5, trial=48, share=0.022, fading=0.98, credit=8.0, repaid=True, forgiving=True)
"""A later trial may be as short as one step, so that it can come soon; and what a drafter has gained it may lose again,
because many gain much now and then and nothing in between."""
ACCIDENT = 3.0
"""times the usual time of a step, beyond which it says something of the machine and nothing of the drafter"""
FADING = 0.98
"""the factor of what is reported, from one drafted step to the next"""


class Guard:
    """Lets a drafter stand aside while its steps do not pay."""

    def __init__(self, target: TargetInfo | None = None) -> None:
        """On the device of a target the first passes of a size are not timed: they are recorded. On a host every tree
        counts at once, because sizes are many and some are dear."""
        self._on_host = target is None or target.device.type == "cpu"
        self._first = PassCostModel(settling=0) if self._on_host else PassCostModel(RECORDED, DEVICE_SLOPE)
        self._begun: set[int] = set()
        """sizes of batches whose first plain step is made, which on a host says little of the others"""
        self._costs: dict[int, PassCostModel] = {}
        """by the size of a batch: what whole steps take, those with a draft by the rows of their pass"""
        self._rests: dict[int, Rest] = {}
        self._gained = self._spent = 0.0
        """of drafted steps, fading"""
        self._rehearsing = 0
        """steps that are plain in any case"""

    def rests(self, batch: int) -> bool:
        """Whether nothing is to be drafted in the next step of so many texts; asked once for every step."""
        costs, rest = self._of(batch)
        self._rehearsing -= 1
        if self._rehearsing >= 0 or not costs.knows_plain:  # once in a while a plain step must be timed
            return True
        return rest.resting()

    def record(self, batch: int, rows: int, tokens: float, seconds: float, *, rested: bool, caught_up: bool) -> None:
        """A step with passes over so many rows of each text gave so many tokens a text. `rested`: nothing was to be
        drafted in it. `caught_up`: the drafter also had to read what it had missed of a text."""
        costs, rest = self._of(batch)
        if rested:
            size = fitting(batch, BATCHES)
            if not self._on_host or size in self._begun:
                costs.record(1, seconds)
            self._begun.add(size)
            return
        settled, plain = costs.settled(rows), costs.knows_plain
        usual = costs.costs([rows])[0] if costs.knows(rows) else math.inf
        if rows > 1 and not (caught_up and settled):
            costs.record(rows, seconds)
        if not settled or not plain:
            return
        passes = seconds / costs.plain_seconds
        if caught_up and usual == math.inf:  # how much of it was reading will be seen
            rest.invest(max(0.0, passes - tokens))
            return
        if caught_up and passes > usual:
            rest.invest(passes - usual)
            passes = usual
        passes = min(passes, ACCIDENT * usual)
        rest.record(tokens, passes)
        self._gained, self._spent = FADING * self._gained + tokens, FADING * self._spent + passes

    @property
    def speed(self) -> float | None:
        """That of drafted steps, in plain decoding, as far as they were timed lately."""
        return self._gained / self._spent if self._spent else None

    def forget(self) -> None:
        """Begin with a trial again: what was drafted so far says nothing of what is to come."""
        self._rests.clear()
        self._gained = self._spent = 0.0
        self._rehearsing = 0

    def rehearse(self) -> None:
        """The same, after as many plain steps as a device needs to record them."""
        self.forget()
        self._rehearsing = RECORDED + 1

    def _of(self, batch: int) -> tuple[PassCostModel, Rest]:
        size = fitting(batch, BATCHES)
        if size not in self._costs:
            near = _nearest(self._costs, size)
            self._costs[size] = (self._first if near is None else self._costs[near]).for_batch(size)
        if size not in self._rests:
            near = _nearest(self._rests, size)
            self._rests[size] = Rest(TERMS) if near is None else self._rests[near].elsewhere()
        return self._costs[size], self._rests[size]


def _nearest(known: dict[int, PassCostModel] | dict[int, Rest], size: int) -> int | None:
    return min(known, key=lambda other: abs(math.log(other / size)), default=None)
