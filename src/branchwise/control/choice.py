"""The number of nodes that gives most tokens a second, or none where drafting would lose; and when to stand aside."""

from __future__ import annotations

from collections.abc import Sequence

WORTH = 1.03
"""the expected speed of a tree, in plain decoding, from which on it is drafted"""
TRIAL = 12
"""steps after which a source that takes time itself is judged"""
FIRST_WAIT, LONGEST_WAIT = 16, 256
"""steps that it stands aside where it did not pay, at first and at most"""
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

    It is judged by whole steps: tokens that they gave, and time that they took. After a while it gets another trial;
    every trial that fails doubles the wait for the next one.
    """

    def __init__(self) -> None:
        self._gained = self._spent = 0.0
        self._steps = 0
        """of this trial"""
        self._wait, self._left = FIRST_WAIT, 0

    def resting(self) -> bool:
        """Whether it stands aside in the next step."""
        self._left -= 1
        return self._left >= 0

    def record(self, tokens: float, passes: float) -> None:
        """A step with it gave so many tokens and took as long as so many plain passes."""
        self._gained, self._spent = FADING * self._gained + tokens, FADING * self._spent + passes
        self._steps += 1
        if self._steps < TRIAL:
            return
        if self._gained >= self._spent:
            self._wait = FIRST_WAIT
        else:
            self._left, self._wait = self._wait, min(2 * self._wait, LONGEST_WAIT)
            self._gained, self._spent, self._steps = 0.0, 0.0, 0
