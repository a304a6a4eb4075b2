"""A law that tokens are drawn from one at a time, none of them twice."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from branchwise.draft.dice import Dice
from branchwise.draft.few import Law
from branchwise.rows import total


class Drawn(NamedTuple):
    token: int
    share: float
    """how probable it was among the tokens that were left"""
    rest: float
    """the share of all others; 0 after the last"""


class Urn:
    """What is left of a law. The law itself stays as it is: it is the q that a verifier asks for."""

    def __init__(self, law: Law) -> None:
        self._left = law
        self._own = False
        self.mass = _mass(law)
        """of all tokens that are left: a sum over them, since 1 minus the others would be mostly rounding"""

    def draw(self, dice: Dice, number: int) -> Drawn:
        """Take a token out; `number` tells this draw from the others of the tree."""
        [token] = dice.picks(self._left, [number])
        before, share = self.mass, float(self._left[token]) / self.mass
        self._left = self._without(token)
        self.mass = _mass(self._left)
        return Drawn(token, share, self.mass / before)

    def _without(self, token: int) -> Law:
        if not isinstance(self._left, Tensor):
            return self._left.without(token)
        left, self._own = self._left if self._own else self._left.clone(), True
        left[token] = 0.0
        return left


def _mass(law: Law) -> float:
    return float(total(law)) if isinstance(law, Tensor) else law.mass
