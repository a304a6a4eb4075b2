"""The number of nodes that gives most tokens a second, or none where drafting would lose; and when to stand aside."""

from __future__ import annotations

from collections.abc import Sequence

WORTH = 1.03
"""the expected speed of a tree, in plain decoding, from which on it is drafted"""
TRIAL = 12
"""steps after which a source that takes time itself is judged"""
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


class Rest:
    """Lets a source stand aside that takes time whether or not its candidates are drafted, while it does not pay.

    It is judged by whole steps: tokens that they gave, and time that they took. After a while it gets another trial,
    the later the more the last one has lost.
    """

    def __init__(self) -> None:
        self._gained = self._spent = self._invested = 0.0
        self._steps = 0
        """of this trial"""
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

    def record(self, tokens: float, passes: float) -> None:
        """A step with it gave so many tokens and took as long as so many plain passes."""
        self._gained, self._spent = FADING * self._gained + tokens, FADING * self._spent + passes
        self._invested *= FADING
        self._steps += 1
        lost = self._spent - self._gained
        if (self._steps < TRIAL and lost < LOSS) or lost <= 0:
            return
        self._left = max(SHORTEST_WAIT, round((lost + self._invested) / SHARE))
        self._gained = self._spent = self._invested = 0.0
        self._steps = 0
