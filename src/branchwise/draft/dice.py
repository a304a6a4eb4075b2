"""Dice: the chance of one text while its tree grows.

A growth policy asks for tokens and arrival times and never touches a random generator. In production the answers come
from the text's seed. A greedy text leaves nothing to chance: there the most probable tokens are "drawn", because the
target will take its most probable token whatever was drafted. An audit puts an enumerator in their place.

The numbers that tell draws apart are the policy's own; each (kind, draw) is used at most once for one tree. An order
that is drawn turn by turn (`next_of`) has the number of the node that it is drawn below. All draws of a level are best
asked for together, as a `Throw`: a device is then asked once for all texts of a batch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as Rows
from dataclasses import dataclass
from functools import wraps
from itertools import accumulate, chain, islice, repeat
from typing import Any

import torch
from torch import Tensor

from branchwise.chance import key_of, mix, mix_one, race, race_on, signed, wait_of
from branchwise.draft.few import Law, Level, alone
from branchwise.draft.replayed import Replayed
from branchwise.rows import total
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

    def next_of(self, left: Law, node: int, turn: int, number: int) -> int:
        """Of the tokens that are drawn below a node without replacement, one by one, the one of this turn.

        `left` is what the turns before left of its law; `number` tells this draw from all others of the tree.
        """
        [token] = self.picks(left, [number])
        return token

    def openings(self, laws: Tensor, turns: int, nodes: Rows[int]) -> list[list[float]]:
        """Of laws on a device that tokens are drawn from one by one, below these nodes, all that the first turns come
        to: the mass of a law, then for each turn the token, its mass, and the mass that is left."""
        raise NotImplementedError("draws that are not made on a device are made one by one")

    def best(self, laws: Tensor, k: int) -> list[list[tuple[float, float]]]:
        """The k most probable tokens of each law, best first, and their masses; all of them where there are fewer."""
        found: list[list[tuple[float, float]]] = _best(laws, min(k, laws.shape[1])).tolist()
        return found

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
    def kind(self) -> tuple[Any, ...]:
        """Throws of one kind can be made together."""
        return type(self), type(self.dice), self.sizes is None

    @property
    def numbers(self) -> list[int]:
        return [number for _, number in self.draws]

    def alone(self) -> list[Any]:
        """What is drawn: tokens, or orders of them."""
        if self.sizes is None:
            return self.dice.picks_from(self.laws, self.draws)
        return self.dice.orders(self.laws, self.sizes, self.numbers)


def thrown(throws: Rows[Throw]) -> list[list[Any]]:
    """What is drawn for several texts: on a device in one go for all that draw in the same way."""
    groups: dict[Any, list[int]] = {}
    for place, throw in enumerate(throws):
        joins = isinstance(throw.laws, Tensor) and not lies_on_host(throw.laws)
        groups.setdefault(throw.kind if joins else place, []).append(place)
    found: dict[int, list[Any]] = {}
    for places in groups.values():
        found.update(zip(places, _together([throws[place] for place in places]), strict=True))
    return [found[place] for place in range(len(throws))]


def _together(throws: list[Throw]) -> list[list[Any]]:
    """What is drawn in one go for texts that draw in the same way."""
    first = throws[0]
    if len(throws) == 1:
        return [first.alone()]
    laws = [throw.laws for throw in throws if isinstance(throw.laws, Tensor)]
    starts = accumulate(map(len, laws), initial=0)
    draws = [(start + row, number) for start, throw in zip(starts, throws, strict=False) for row, number in throw.draws]
    sizes = None if first.sizes is None else [size for throw in throws for size in throw.sizes or ()]
    seeded = [throw.dice for throw in throws for _ in throw.draws if isinstance(throw.dice, SeededDice)]
    dice = Jointly(seeded) if seeded else first.dice
    found = iter(type(first)(dice, torch.cat(laws), draws, sizes).alone())
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

    def next_of(self, left: Law, node: int, turn: int, number: int) -> int:
        [key] = self._keys("order", [node])
        key = mix_one(key + turn)  # as in an order that is drawn at once
        return self._races.picks(left[None], [key], [0])[0] if isinstance(left, Tensor) else left.race(key)

    def openings(self, laws: Tensor, turns: int, nodes: Rows[int]) -> list[list[float]]:
        return self._races.openings(laws, self._keys("order", nodes), turns)

    def best(self, laws: Tensor, k: int) -> list[list[tuple[float, float]]]:
        return self._races.best(laws, k)

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

    def __init__(self, races: Races | None = None) -> None:
        self._races = races or Races()

    def picks_from(self, laws: Level, draws: Rows[tuple[int, int]]) -> list[int]:
        counts = Counter(row for row, _ in draws)
        best = self._best(laws, [counts[row] for row in range(len(laws))])
        turns = {row: chain(best[row], repeat(best[row][0])) for row in counts}
        return [next(turns[row]) for row, _ in draws]

    def orders(self, laws: Level, sizes: Rows[int], draws: Rows[int]) -> list[list[int]]:
        return self._best(laws, sizes)

    def openings(self, laws: Tensor, turns: int, nodes: Rows[int]) -> list[list[float]]:
        return self._races.openings(laws, None, turns)

    def best(self, laws: Tensor, k: int) -> list[list[tuple[float, float]]]:
        return self._races.best(laws, k)

    def wait(self, draw: int) -> float:
        return 1.0

    def _best(self, laws: Level, sizes: Rows[int]) -> list[list[int]]:
        """Of each law so many most probable tokens, best first; fewer where it carries fewer."""
        if not isinstance(laws, Tensor):
            return [law.best(size) for law, size in zip(laws, sizes, strict=True)]
        rows = self.best(laws, max(sizes))
        return [[int(token) for token, mass in row[:size] if mass > 0] for row, size in zip(rows, sizes, strict=True)]


class Races:
    """Draws from rows over the vocabulary, where those are.

    On a device the draws of a level are one upload of their keys, one replay and one look at what was drawn.
    """

    def __init__(self, device: torch.device | None = None, *, capture: bool = True) -> None:
        self._device, self._capture = device or torch.device("cpu"), capture
        self._picks = Replayed(_picks, self._device, capture=capture)
        self._several: dict[Any, Replayed] = {}

    def picks(self, laws: Tensor, keys: Rows[int], rows: Rows[int]) -> list[int]:
        """A token for each key, from the law (laws, vocabulary) that `rows` says."""
        told = torch.tensor([(signed(key), row) for key, row in zip(keys, rows, strict=True)])
        found: list[int] = self._picks(laws, told).tolist()
        return found[: len(keys)]

    def orders(self, laws: Tensor, keys: Rows[int], k: int) -> list[list[int]]:
        """k tokens from each law without replacement; fewer where it carries fewer."""
        found: list[list[int]] = self._of(race_on, k)(laws, torch.tensor([signed(key) for key in keys])).tolist()
        return [[token for token in order if token >= 0] for order in found[: len(keys)]]

    def openings(self, laws: Tensor, keys: Rows[int] | None, turns: int) -> list[list[float]]:
        """What `Dice.openings` says; without keys the most probable token comes first."""
        if keys is None:
            found: list[list[float]] = self._of(_surely_opened, turns)(laws).tolist()
        else:
            found = self._of(_opened, turns)(laws, torch.tensor([signed(key) for key in keys])).tolist()
        return found[: len(laws)]

    def best(self, laws: Tensor, k: int) -> list[list[tuple[float, float]]]:
        """What `Dice.best` says."""
        found: list[list[tuple[float, float]]] = self._of(_best, min(k, laws.shape[1]))(laws).tolist()
        return found[: len(laws)]

    def _of(self, function: Callable[..., Tensor], count: int) -> Replayed:
        """A function of rows and of a count, for this count."""
        if (function, count) not in self._several:
            counted = wraps(function)(lambda *rows: function(*rows, count))
            self._several[function, count] = Replayed(counted, self._device, capture=self._capture)
        return self._several[function, count]


def _picks(laws: Tensor, told: Tensor) -> Tensor:
    """(draws,): told (draws, 2) are their keys, and the rows of their laws."""
    return race(laws, told[:, 0], told[:, 1])


def _opened(laws: Tensor, keys: Tensor, turns: int) -> Tensor:
    """(laws, 1 + 3 turns) float64, which holds tokens exactly: one copy brings all of it."""
    return _one_by_one(laws, turns, lambda left, turn: race(left, mix(keys + turn)))


def _surely_opened(laws: Tensor, turns: int) -> Tensor:
    return _one_by_one(laws, turns, lambda left, turn: left.argmax(dim=1))


def _one_by_one(laws: Tensor, turns: int, draw: Callable[[Tensor, int], Tensor]) -> Tensor:
    left = laws.clone()
    found = [total(left)]
    for turn in range(turns):
        token = draw(left, turn)[:, None]
        found += [token[:, 0].double(), left.gather(1, token)[:, 0].double()]
        left.scatter_(1, token, 0.0)
        found.append(total(left))
    return torch.stack(found, dim=1)


def _best(laws: Tensor, k: int) -> Tensor:
    """(laws, k, 2) float64: tokens and masses."""
    masses, tokens = laws.topk(k)
    return torch.stack([tokens.double(), masses.double()], dim=-1)


def dice_of(sequence: Sequence, races: Races | None = None) -> Dice:
    if sequence.sampling.temperature == 0:
        return SureDice(races)
    return SeededDice(sequence.noise, len(sequence.tokens) - 1, races)
