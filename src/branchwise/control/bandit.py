"""A bandit without training: it tries all arms, prefers the best, and forgets old rewards.

Discounted UCB (Garivier and Moulines, "On Upper-Confidence Bound Policies for Switching Bandit Problems", 2011): the
value of an arm is its recent mean reward plus a bonus that grows the less the arm was chosen. Rewards fade with every
step, so the bandit tries a worse arm again and notices an arm that has become better. It uses no random numbers: the
same rewards choose the same arms.
"""

from __future__ import annotations

import math

STINT = 4
"""steps for which an arm stays chosen: a change costs time, and one step says little"""
FADING = 0.98
"""the factor by which rewards fade from one step to the next"""
CURIOSITY = 0.2
"""the weight of the bonus for arms that were rarely chosen; the reward of a step is between 0 and 1"""


class Bandit:
    def __init__(self, arms: int) -> None:
        self.arm = 0
        """the chosen arm"""
        self._given, self._steps = [0.0] * arms, [0.0] * arms
        self._left = STINT

    @property
    def stays(self) -> bool:
        """Whether the arm stays chosen after the next `record`, whatever the reward."""
        return len(self._steps) == 1 or self._left > 1

    def worth(self, arm: int) -> float | None:
        """The mean reward of an arm in recent steps; None if it was never chosen."""
        return self._given[arm] / self._steps[arm] if self._steps[arm] else None

    def record(self, given: float) -> None:
        """Count a step of the chosen arm with the reward `given`, from 0 to 1."""
        for arm in range(len(self._steps)):
            self._given[arm] *= FADING
            self._steps[arm] *= FADING
        self._given[self.arm] += given
        self._steps[self.arm] += 1
        self._left -= 1
        if not self._left:
            self.arm, self._left = self._best(), STINT

    def _best(self) -> int:
        """An arm that was never chosen, else the arm of the highest value; on a tie the present arm."""
        if 0.0 in self._steps:
            return self._steps.index(0.0)
        seen = math.log(max(sum(self._steps), math.e))
        promise = [
            given / steps + CURIOSITY * math.sqrt(seen / steps)
            for given, steps in zip(self._given, self._steps, strict=True)
        ]
        best = max(range(len(promise)), key=promise.__getitem__)
        return best if promise[best] > promise[self.arm] else self.arm
