"""Dice: the chance of one text while its tree grows.

A growth policy asks for tokens and arrival times and never touches a random generator. In production the answers come
from the text's seed. A greedy text leaves nothing to chance: there the most probable tokens are "drawn", because the
target will take its most probable token whatever was drafted. An audit puts an enumerator in their place.

The numbers that tell draws apart are the policy's own; each (kind, draw) is used at most once for one tree. All draws
of a level are best asked for together, as a `Throw`: a device is then asked once for all texts of a batch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as Rows
from dataclasses import dataclass
from itertools import accumulate, chain, islice, repeat
from typing import Any

import torch
from torch import Tensor

from branchwise.chance import key_of, race, race_on, signed, wait_of
from branchwise.draft.few import Law, Level, alone
from branchwise.draft.replayed import Replayed
from branchwise.sequence import Sequence


class Dice(ABC):
    @abstractmethod
    def picks_from(self, laws: Level, draws: Rows[tuple[int, int]]) -> list[int]:
        """Independent tokens, one for each (which of the laws, number of the draw)."""

    @abstractmethod
    def orders(self, laws: Level, sizes: Rows[int], draws: Rows[int]) -> list[list[int]]:
        """From each law so many tokens without replacement, in draw order; fewer where it carries fewer."""

    @abstractmethod
    def wait(self, draw: int) -> float:
        """A standard exponential time."""

    def picks(self, law: Law, draws: Rows[int]) -> list[int]:
        """Independent tokens from one law, one for each number in `draws`."""
        return self.picks_from(alone(law), [(0, draw) for draw in draws])

    def order(self, law: Law, k: int, draw: int) -> list[int]:
        """k tokens from one law without replacement."""
        [found] = self.orders(alone(law), [k], [draw])
        return found


@dataclass(frozen=True, eq=False)
class Throw:
    """Draws of one text that a policy wants: independent ones, or, given sizes, an order from each of the laws."""

    dice: Dice
    laws: Level
    draws: Rows[tuple[int, int]]
    """(which of the laws, number of the draw)"""
    sizes: Rows[int] | None = None

    @property
    def numbers(self) -> list[int]:
        return [number for _, number in self.draws]

    def alone(self) -> list[Any]:
        """What is drawn: tokens, or orders of them."""
        if self.sizes is None:
            return self.dice.picks_from(self.laws, self.draws)
        return self.dice.orders(self.laws, self.sizes, self.numbers)


def thrown(throws: Rows[Throw]) -> list[list[Any]]:
    """What is drawn for several texts: on a device in one go, where all draw in the same way."""
    laws = [throw.laws for throw in throws if isinstance(throw.laws, Tensor) and not lies_on_host(throw.laws)]
    kinds = {(type(throw.dice), throw.sizes is None) for throw in throws}
    if len(throws) == 1 or len(laws) < len(throws) or len(kinds) > 1:
        return [throw.alone() for throw in throws]
    starts = accumulate(map(len, laws), initial=0)
    draws = [(start + row, number) for start, throw in zip(starts, throws, strict=False) for row, number in throw.draws]
    sizes = None if throws[0].sizes is None else [size for throw in throws for size in throw.sizes or ()]
    seeded = [throw.dice for throw in throws for _ in throw.draws if isinstance(throw.dice, SeededDice)]
    dice = Jointly(seeded) if seeded else throws[0].dice
    found = iter(Throw(dice, torch.cat(laws), draws, sizes).alone())
    return [list(islice(found, len(throw.draws))) for throw in throws]


def lies_on_host(laws: Tensor) -> bool:
    """There a copy of rows over a vocabulary costs more than another call."""
    return laws.device.type == "cpu"


class SeededDice(Dice):
    """Draws that depend on the seed of a text and on where its root stands, and on nothing else."""

    def __init__(self, seed: int, root: int, races: Races | None = None) -> None:
        self._seed, self._root = seed, root
        self._races = races or Races()

    def picks_from(self, laws: Level, draws: Rows[tuple[int, int]]) -> list[int]:
        keys = self._keys("pick", [draw for _, draw in draws])
        if isinstance(laws, Tensor):
            return self._races.picks(laws, keys, [row for row, _ in draws])
        return [laws[row].race(key) for (row, _), key in zip(draws, keys, strict=True)]

    def orders(self, laws: Level, sizes: Rows[int], draws: Rows[int]) -> list[list[int]]:
        keys = self._keys("order", draws)
        if isinstance(laws, Tensor):
            found = self._races.orders(laws, keys, max(sizes))
            return [order[:size] for order, size in zip(found, sizes, strict=True)]
        return [law.race_on(key, size) for law, key, size in zip(laws, keys, sizes, strict=True)]

    def wait(self, draw: int) -> float:
        [key] = self._keys("wait", [draw])
        return wait_of(key)

    def _keys(self, purpose: str, draws: Rows[int]) -> list[int]:
        return [self._key(purpose, draw) for draw in draws]

    def _key(self, purpose: str, draw: int) -> int:
        # The role keeps these draws apart from the verifier's: a draft made with the noise that judges it is no draw.
        return key_of("draft", purpose, self._seed, self._root, draw)


class Jointly(SeededDice):
    """The dice of several texts as one; the n-th draw is made with the n-th of them."""

    def __init__(self, dice: Rows[SeededDice]) -> None:
        self._dice, self._races = dice, dice[0]._races

    def _keys(self, purpose: str, draws: Rows[int]) -> list[int]:
        return [dice._key(purpose, draw) for dice, draw in zip(self._dice, draws, strict=True)]


class SureDice(Dice):
    """What is most probable comes first, and every wait is as long as waits are in the mean."""

    def picks_from(self, laws: Level, draws: Rows[tuple[int, int]]) -> list[int]:
        counts = Counter(row for row, _ in draws)
        best = _best(laws, [counts[row] for row in range(len(laws))])
        turns = {row: chain(best[row], repeat(best[row][0])) for row in counts}
        return [next(turns[row]) for row, _ in draws]

    def orders(self, laws: Level, sizes: Rows[int], draws: Rows[int]) -> list[list[int]]:
        return _best(laws, sizes)

    def wait(self, draw: int) -> float:
        return 1.0


def _best(laws: Level, sizes: Rows[int]) -> list[list[int]]:
    """Of each law so many most probable tokens, best first; fewer where it carries fewer."""
    if not isinstance(laws, Tensor):
        return [law.best(size) for law, size in zip(laws, sizes, strict=True)]
    masses, tokens = laws.topk(min(max(sizes), laws.shape[1]))
    # Both in one copy, as float64, which holds tokens exactly.
    rows = torch.stack([tokens.double(), masses.double()], dim=-1).tolist()
    return [[int(token) for token, mass in row[:size] if mass > 0] for row, size in zip(rows, sizes, strict=True)]


class Races:
    """Draws from rows over the vocabulary, where those are.

    On a device the draws of a level are one upload of their keys, one replay and one look at what was drawn.
    """

    def __init__(self, device: torch.device | None = None, *, capture: bool = True) -> None:
        self._device, self._capture = device or torch.device("cpu"), capture
        self._picks = Replayed(_picks, self._device, capture=capture)
        self._orders: dict[int, Replayed] = {}

    def picks(self, laws: Tensor, keys: Rows[int], rows: Rows[int]) -> list[int]:
        """A token for each key, from the law (laws, vocabulary) that `rows` says."""
        told = torch.tensor([(signed(key), row) for key, row in zip(keys, rows, strict=True)])
        found: list[int] = self._picks(laws, told).tolist()
        return found[: len(keys)]

    def orders(self, laws: Tensor, keys: Rows[int], k: int) -> list[list[int]]:
        """k tokens from each law without replacement; fewer where it carries fewer."""
        if k not in self._orders:
            self._orders[k] = Replayed(_orders_of(k), self._device, capture=self._capture)
        found: list[list[int]] = self._orders[k](laws, torch.tensor([signed(key) for key in keys])).tolist()
        return [[token for token in order if token >= 0] for order in found[: len(keys)]]


def _picks(laws: Tensor, told: Tensor) -> Tensor:
    """(draws,): told (draws, 2) are their keys, and the rows of their laws."""
    return race(laws, told[:, 0], told[:, 1])


def _orders_of(k: int) -> Callable[[Tensor, Tensor], Tensor]:
    def orders(laws: Tensor, keys: Tensor) -> Tensor:
        return race_on(laws, keys, k)

    return orders


def dice_of(sequence: Sequence, races: Races | None = None) -> Dice:
    if sequence.sampling.temperature == 0:
        return SureDice()
    return SeededDice(sequence.noise, len(sequence.tokens) - 1, races)
