"""The tree size with the most tokens a second, or none if drafting would lose; and when a source stands aside."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

WORTH = 1.03
"""the expected speed, as a multiple of plain decoding, from which on a tree is drafted"""
TRIAL = 12
"""steps after which a source is judged"""
SHORTEST_TRIAL = 4
"""the least number of these steps, however many texts a batch has"""
LOSS = 4.0
"""passes that a trial may lose; it ends at once if it has lost more"""
SHARE = 0.05
"""the share of all steps that lost trials may cost; it sets how long a source stands aside after a lost trial"""
SHORTEST_WAIT = 16
"""the least number of steps for which a source stands aside"""
FADING = 0.95
"""the factor by which gains and costs fade from one step to the next"""


def best(tokens: Sequence[float], costs: Sequence[float]) -> int:
    """The index of the size with the most tokens a second, given the expected tokens and cost of each. Index 0 is plain
    decoding; another size must be faster by the factor `WORTH`."""
    speeds = [gained / cost for gained, cost in zip(tokens, costs, strict=True)]
    found = max(range(len(speeds)), key=speeds.__getitem__)
    return found if speeds[found] > WORTH * speeds[0] else 0


@dataclass(frozen=True)
class Terms:
    """How much a source may lose before it stands aside, and for how long it does."""

    first: float = LOSS
    """passes that its first trial may lose, and a trial that has already gained this many"""
    again: float = LOSS
    """passes that a trial may lose if it follows a lost trial"""
    trial: int = TRIAL
    """steps after which a trial must have lost nothing"""
    share: float = SHARE
    """the share of all steps that lost trials may cost"""
    fading: float = FADING
    credit: float = math.inf
    """the largest surplus of a source, in passes; a source can lose its surplus before a loss counts"""
    repaid: bool = False
    """whether investments in a whole text count as spent, little by little, and must be earned back"""
    forgiving: bool = False
    """whether a source that has paid and then lost is tried again soon, under the terms of a first trial"""

    def for_texts(self, texts: int) -> Terms:
        """The terms for a batch of this many texts. A step over n texts is an average over them and varies less, by the
        root of n. So a trial needs fewer steps and may lose fewer passes, and trials may cost a smaller share of all
        steps."""
        root = math.sqrt(texts)
        return replace(
            self,
            first=self.first / root,
            again=self.again / root,
            trial=max(SHORTEST_TRIAL, round(self.trial / root)),
            share=self.share / root,
        )


class Rest:
    """Decides when a source stands aside because it does not pay.

    A source is judged by whole steps: the tokens that they gave, and the time that they took. After a rest it gets
    another trial; the more that trial may lose, the longer is the rest.

    Call `advance` once before every step; `is_resting` then tells of that step.
    """

    def __init__(self, terms: Terms | None = None) -> None:
        self._terms = terms or Terms()
        self._most = self._terms.first
        """the number of passes that this trial may lose"""
        self._gained = self._spent = self._invested = 0.0
        self._steps = 0
        """the number of steps of this trial"""
        self._paid = False
        """whether this trial has gained as much as a first trial may lose"""
        self._left = 0
        """the number of steps until the next trial; negative in a trial"""

    def advance(self) -> bool:
        """Count the step that is about to begin. Returns whether the source stands aside in it."""
        self._left -= 1
        return self.is_resting

    @property
    def is_resting(self) -> bool:
        """Whether the source stands aside in the step that `advance` has counted last."""
        return self._left >= 0

    def invest(self, passes: float) -> None:
        """Count work for a whole text that took as long as this many plain passes. It says nothing of single steps, but
        it is lost if they do not pay."""
        self._invested += passes

    def record(self, tokens: float, passes: float) -> bool:
        """Count a step that gave `tokens` and took as long as this many plain `passes`. Returns whether the trial is
        lost with it, so that the source stands aside now."""
        terms = self._terms
        if self._left > 0:  # pipelined: this step was chosen before the step that lost the trial had ended
            self._left += round(max(0.0, passes - tokens) / terms.share)
            return False
        due = (1 - FADING) * self._invested
        self._invested -= due
        self._gained = terms.fading * self._gained + tokens
        self._spent = terms.fading * self._spent + passes + (due if terms.repaid else 0.0)
        self._spent = max(self._spent, self._gained - terms.credit)
        self._steps += 1
        lost = self._spent - self._gained
        if lost < -terms.first:
            self._most, self._paid = terms.first, True
        if (self._steps < terms.trial and lost < self._most) or lost <= 0:
            return False
        if self._paid and terms.forgiving:
            self._left = SHORTEST_WAIT
        else:
            # At most, the next trial loses what it is granted plus one step like this one.
            at_stake = min(lost, terms.again + passes - tokens)
            self._left = max(SHORTEST_WAIT, round((at_stake + self._invested) / terms.share))
            self._most = terms.again
        self._begin_anew()
        return True

    def _begin_anew(self) -> None:
        self._gained = self._spent = self._invested = 0.0
        self._steps, self._paid = 0, False

    @property
    def proved(self) -> bool:
        """Whether this trial is won: it has gained as much as the credit, or lasted as many steps as a trial does."""
        return self._gained - self._spent >= self._terms.credit or self._steps >= self._terms.trial

    def stand_aside(self) -> None:
        """Make way for a better source. This one gets a short trial soon, unless it has to wait longer already."""
        self._most, self._left = self._terms.again, max(self._left, SHORTEST_WAIT)
        self._begin_anew()

    def come_forward(self) -> None:
        """Begin the next trial now; it may lose as much as a first one."""
        self._most, self._left = self._terms.first, min(self._left, 0)

    def elsewhere(self) -> Rest:
        """The rest to begin with in batches of another size: the same terms, and at most a short wait."""
        other = Rest(self._terms)
        other._most, other._left = self._most, min(self._left, SHORTEST_WAIT)
        return other
