"""A law that tokens are drawn from one at a time, none of them twice."""

from __future__ import annotations

from typing import NamedTuple

import torch
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
        self.mass = float(total(law)) if isinstance(law, Tensor) else law.mass
        """of all tokens that are left: a sum over them, since 1 minus the others would be mostly rounding"""

    def draw(self, dice: Dice, number: int) -> Drawn:
        """Take a token out; `number` tells this draw from the others of the tree."""
        [token] = dice.picks(self._left, [number])
        before = self.mass
        taken, self.mass = self._take(token)
        return Drawn(token, taken / before, self.mass / before)

    def _take(self, token: int) -> tuple[float, float]:
        """The mass of a token that is taken out, and that of all others that are left."""
        if not isinstance(self._left, Tensor):
            taken, self._left = self._left[token], self._left.without(token)
            return taken, self._left.mass
        if not self._own:
            self._left, self._own = self._left.clone(), True
        mass = self._left[token].to(torch.float64, copy=True)
        self._left[token] = 0.0
        one, others = torch.stack([mass, total(self._left)]).tolist()  # one look at a device
        return one, others
