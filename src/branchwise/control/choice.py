"""The number of nodes that gives most tokens a second, or none where drafting would lose; and when to stand aside."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

WORTH = 1.03
"""the expected speed of a tree, in plain decoding, from which on it is drafted"""
TRIAL = 12
"""steps after which a source that takes time itself is judged"""
SHORTEST_TRIAL = 4
"""the same, however many texts take part"""
LOSS = 4.0
"""passes that a trial may lose; then it is over at once"""
SHARE = 0.05
"""of all steps, that trials may cost: a source stands aside for so long after one that was lost"""
SHORTEST_WAIT = 16
FADING = 0.95
"""the factor of what was gained and spent from one step to the next"""


def best(tokens: Sequence[float], costs: Sequence[float]) -> int:
    """Which of several sizes gives most tokens a second, given what each is expected to give and to cost; the first one
    is that of plain decoding, and is left only for one that is clearly better."""
    speeds = [gained / cost for gained, cost in zip(tokens, costs, strict=True)]
    found = max(range(len(speeds)), key=speeds.__getitem__)
    return found if speeds[found] > WORTH * speeds[0] else 0


@dataclass(frozen=True)
class Terms:
    """What a source may lose before it stands aside, and for how long it does."""

    first: float = LOSS
    """passes that its first trial may lose, and one that has gained as many"""
    again: float = LOSS
    """passes that a trial may lose which follows a lost one"""
    trial: int = TRIAL
    """steps after which it must have lost nothing"""
    share: float = SHARE
    fading: float = FADING
    credit: float = math.inf
    """passes that it may have gained in its favour; it can lose them again before it has lost anything"""
    repaid: bool = False
    """whether what was invested in a whole text counts as spent, little by little, and must be earned back"""
    forgiving: bool = False
    """whether one that has paid and then lost is tried again soon, like the first time"""

    def for_texts(self, texts: int) -> Terms:
        """Steps of several texts say more of a source than as many of one, by the root of their number, and differ less
        from those before them. So fewer steps and fewer passes lost are enough for a trial, and trials may cost a
        smaller share of all steps."""
        root = math.sqrt(texts)
        return replace(
            self,
            first=self.first / root,
            again=self.again / root,
            trial=max(SHORTEST_TRIAL, round(self.trial / root)),
            share=self.share / root,
        )


class Rest:
    """Lets a source stand aside that takes time whether or not its candidates are drafted, while it does not pay.

    It is judged by whole steps: tokens that they gave, and time that they took. After a while it gets another trial,
    the later the more that one may lose.
    """

    def __init__(self, terms: Terms | None = None) -> None:
        self._terms = terms or Terms()
        self._most = self._terms.first
        """passes that this trial may lose"""
        self._gained = self._spent = self._invested = 0.0
        self._steps = 0
        """of this trial"""
        self._paid = False
        """whether this trial has gained as much as a first one may lose"""
        self._left = 0
        """steps until the next one"""

    def resting(self) -> bool:
        """Whether it stands aside in the next step."""
        self._left -= 1
        return self._left >= 0

    def invest(self, passes: float) -> None:
        """What was done for a whole text took as long as so many plain passes. It says nothing of the steps, but is
        lost where these do not pay."""
        self._invested += passes

    def record(self, tokens: float, passes: float) -> bool:
        """A step with it gave so many tokens and took as long as so many plain passes; whether it stands aside now."""
        terms = self._terms
        if self._left > 0:  # the step was decided before the one was over with which the trial was lost
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
            # The next trial may lose what is granted to it and the step with which it is over.
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
        """Whether this trial is over, and not lost: it has gained as much as counts, or taken as long as one may."""
        return self._gained - self._spent >= self._terms.credit or self._steps >= self._terms.trial

    def stand_aside(self) -> None:
        """Another source is better: this one gets a short trial, soon if it was not to wait longer anyhow."""
        self._most, self._left = self._terms.again, max(self._left, SHORTEST_WAIT)
        self._begin_anew()

    def come_forward(self) -> None:
        """Its next trial begins now, and may lose as much as the first."""
        self._most, self._left = self._terms.first, min(self._left, 0)

    def elsewhere(self) -> Rest:
        """What is known of it, for circumstances that are not the same: it tries soon whether it pays there."""
        other = Rest(self._terms)
        other._most, other._left = self._most, min(self._left, SHORTEST_WAIT)
        return other
