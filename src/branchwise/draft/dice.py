"""Dice: the chance of one text while its tree grows.

A growth policy asks for tokens and arrival times and never touches a random generator. In production the answers come
from the text's seed. A greedy text leaves nothing to chance: there the most probable tokens are "drawn", because the
target will take its most probable token whatever was drafted. An audit puts an enumerator in their place.

The numbers that tell draws apart are the policy's own; each (kind, draw) is used at most once for one tree.
"""

from __future__ import annotations

from collections.abc import Sequence as Rows
from typing import Protocol

import torch
from torch import Tensor

from branchwise.chance import SeededChance, race
from branchwise.sequence import Sequence


class Dice(Protocol):
    def picks(self, law: Tensor, draws: Rows[int]) -> list[int]:
        """Independent tokens from one law (vocabulary,), one for each number in `draws`."""

    def order(self, law: Tensor, k: int, draw: int) -> list[int]:
        """k tokens from a law (vocabulary,) without replacement, in draw order; fewer where it carries fewer."""

    def wait(self, draw: int) -> float:
        """A standard exponential time."""


class SeededDice:
    """Draws that depend on the seed of a text and on where its root stands, and on nothing else."""

    def __init__(self, seed: int, root: int, device: torch.device | str = "cpu") -> None:
        # The role keeps these draws apart from the verifier's: a draft made with the noise that judges it is no draw.
        self._chance = SeededChance(
            torch.tensor([seed], device=device), torch.tensor([root], device=device), role="draft"
        )

    def picks(self, law: Tensor, draws: Rows[int]) -> list[int]:
        keys = torch.cat([self._chance.keys("pick", draw) for draw in draws])
        found: list[int] = race(law.expand(len(draws), -1), keys).tolist()
        return found

    def order(self, law: Tensor, k: int, draw: int) -> list[int]:
        return [token for token in self._chance.order(law[None], k, draw)[0].tolist() if token >= 0]

    def wait(self, draw: int) -> float:
        return float(self._chance.waits(draw))


class SureDice:
    """What is most probable comes first, and every wait is as long as waits are in the mean."""

    def picks(self, law: Tensor, draws: Rows[int]) -> list[int]:
        found = self.order(law, len(draws), 0)
        return found + found[:1] * (len(draws) - len(found))

    def order(self, law: Tensor, k: int, draw: int) -> list[int]:
        masses, tokens = law.topk(min(k, len(law)))
        return [token for token, mass in zip(tokens.tolist(), masses.tolist(), strict=True) if mass > 0]

    def wait(self, draw: int) -> float:
        return 1.0


def dice_of(sequence: Sequence, device: torch.device | str = "cpu") -> Dice:
    if sequence.sampling.temperature == 0:
        return SureDice()
    return SeededDice(sequence.noise, len(sequence.tokens) - 1, device)
