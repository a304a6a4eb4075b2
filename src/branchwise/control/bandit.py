"""One of several arms for a while, and then the best: a bandit that needs no training, and forgets.

Discounted UCB (Garivier and Moulines, "On Upper-Confidence Bound Policies for Switching Bandit Problems", 2011): an arm
is worth what it gave lately, and more the less was seen of it. What was seen fades with every step, so an arm that was
worse is tried again, and one that has become better is found. It draws nothing: the same steps choose the same arms.
"""

from __future__ import annotations

import math

STINT = 4
"""steps for which an arm is chosen: to change costs something, and one step says little"""
FADING = 0.98
"""the factor of what an arm gave, from one step to the next"""
CURIOSITY = 0.2
"""the worth of what is not known of an arm; what it gives in a step is between 0 and 1"""


class Bandit:
    def __init__(self, arms: int) -> None:
        self.arm = 0
        """which is chosen"""
        self._given, self._steps = [0.0] * arms, [0.0] * arms
        self._left = STINT

    @property
    def stays(self) -> bool:
        """Whether the arm is chosen for the step after the next `record` as well, whatever that says."""
        return len(self._steps) == 1 or self._left > 1

    def worth(self, arm: int) -> float | None:
        """What it gave in a step lately, if it was ever chosen."""
        return self._given[arm] / self._steps[arm] if self._steps[arm] else None

    def record(self, given: float) -> None:
        """A step of the chosen arm gave so much, from 0 to 1."""
        for arm in range(len(self._steps)):
            self._given[arm] *= FADING
            self._steps[arm] *= FADING
        self._given[self.arm] += given
        self._steps[self.arm] += 1
        self._left -= 1
        if not self._left:
            self.arm, self._left = self._best(), STINT

    def _best(self) -> int:
        """One that was never chosen, or the one of the greatest promise; the same one if others promise as much."""
        if 0.0 in self._steps:
            return self._steps.index(0.0)
        seen = math.log(max(sum(self._steps), math.e))
        promise = [
            given / steps + CURIOSITY * math.sqrt(seen / steps)
            for given, steps in zip(self._given, self._steps, strict=True)
        ]
        best = max(range(len(promise)), key=promise.__getitem__)
        return best if promise[best] > promise[self.arm] else self.arm
