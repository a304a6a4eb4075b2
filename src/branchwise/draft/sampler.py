"""The draws of one text while its tree grows.

A tree policy asks a sampler for tokens and arrival times and never touches a random generator. In production the draws
depend on the seed of the text. For a greedy text the sampler returns the most probable tokens, because the target takes
its most probable token whatever was drafted. The audit passes an enumerator instead.

A policy numbers its draws; each (kind, number) is used at most once for one tree. An order that is drawn turn by turn
(`next_of`) has the number of the node whose children are drawn. A policy should request all draws of a level together,
as a `SampleRequest`: a device then draws once for all texts of a batch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from functools import wraps
from itertools import accumulate, chain, islice, repeat
from typing import Any, NamedTuple

import torch
from torch import Tensor

from branchwise.core.rng import key_of, mix, mix_int, race, race_on, signed, stream_of, wait_of
from branchwise.core.rows import row_sum
from branchwise.core.sequence import SequenceState
from branchwise.cuda.graphs import PaddedGraphedFunction
from branchwise.draft.sparse import Probs, ProbsBatch, alone

PICKS = stream_of("draft", "pick", 0)
"""the random stream of the independent draws of `SeededSampler`, for code that makes the same draws on a device"""
FIRST_TURNS = 4
"""number of children of a node that are drawn in advance if the policy does not know how many it will need"""


class DeviceSampler:
    """Draws from rows over the vocabulary, on the device of the rows.

    The draws of a level are one upload of their keys, one replay of a graph and one download of the tokens.
    """

    def __init__(self, device: torch.device | None = None, *, capture: bool = True) -> None:
        self._device, self._capture = device or torch.device("cpu"), capture
        self._recorded: dict[Any, PaddedGraphedFunction] = {}

    def picks(self, probs: Tensor, keys: Sequence[int], rows: Sequence[int]) -> list[int]:
        """A token for each key, from row rows[i] of the distributions (distributions, vocabulary)."""
        return self._run(_picks, probs, torch.tensor([(signed(key), row) for key, row in zip(keys, rows, strict=True)]))

    def orders(self, probs: Tensor, keys: Sequence[int], k: int) -> list[list[int]]:
        """k tokens from each distribution without replacement; fewer if it has fewer."""
        found = self._run(race_on, probs, torch.tensor([signed(key) for key in keys]), count=k)
        return [[token for token in order if token >= 0] for order in found]

    def openings(self, probs: Tensor, keys: Sequence[int] | None, turns: int) -> list[list[float]]:
        """`DraftSampler.openings`; without keys the most probable token comes first."""
        if keys is None:
            return self._run(_surely_opened, probs, count=turns)
        return self._run(_opened, probs, torch.tensor([signed(key) for key in keys]), count=turns)

    def best(self, probs: Tensor, k: int) -> list[list[tuple[float, float]]]:
        """`DraftSampler.best`."""
        return self._run(_best, probs, count=min(k, probs.shape[1]))

    def _run(self, function: Callable[..., Tensor], *rows: Tensor, count: int | None = None) -> list[Any]:
        """The results of a function for each row of the last argument; a graph is recorded for each `count`."""
        if (function, count) not in self._recorded:
            counted = wraps(function)(lambda *rows: function(*rows, count)) if count is not None else function
            self._recorded[function, count] = PaddedGraphedFunction(counted, self._device, capture=self._capture)
        found: list[Any] = self._recorded[function, count](*rows).tolist()
        return found[: len(rows[-1])]


def _picks(probs: Tensor, draws: Tensor) -> Tensor:
    """(draws,) tokens, given draws (draws, 2): their keys and the rows of their distributions."""
    return race(probs, draws[:, 0], draws[:, 1])


def _opened(probs: Tensor, keys: Tensor | None, turns: int) -> Tensor:
    """(distributions, 1 + 3 turns) float64, which represents tokens exactly: one copy downloads all of it."""
    left = probs.clone()
    found = [row_sum(left)]
    for turn in range(turns):
        token = (left.argmax(dim=1) if keys is None else race(left, mix(keys + turn)))[:, None]
        found += [token[:, 0].double(), left.gather(1, token)[:, 0].double()]
        left.scatter_(1, token, 0.0)
        found.append(row_sum(left))
    return torch.stack(found, dim=1)


def _surely_opened(probs: Tensor, turns: int) -> Tensor:
    return _opened(probs, None, turns)


def _best(probs: Tensor, k: int) -> Tensor:
    """(distributions, k, 2) float64: tokens and masses."""
    masses, tokens = probs.topk(k)
    return torch.stack([tokens.double(), masses.double()], dim=-1)


class DraftSampler(ABC):
    device_sampler = DeviceSampler()

    @abstractmethod
    def picks_from(self, probs: ProbsBatch, draws: Sequence[tuple[int, int]]) -> list[int]:
        """Independent tokens, one for each (index of its distribution, number of the draw)."""

    @abstractmethod
    def orders(self, probs: ProbsBatch, sizes: Sequence[int], draws: Sequence[int]) -> list[list[int]]:
        """Tokens of each distribution without replacement, in draw order: the number that `sizes` has for it, or fewer
        if it has fewer."""

    @abstractmethod
    def wait(self, draw: int) -> float:
        """A standard exponential time."""

    def next_of(self, left: Probs, node: int, turn: int, number: int) -> int:
        """The child that a node gets in this turn, if its children are drawn one by one without replacement.

        `left` is the distribution without the tokens of earlier turns; `number` is unique among the draws of the tree.
        """
        [token] = self.picks(left, [number])
        return token

    def openings(self, probs: Tensor, turns: int, nodes: Sequence[int]) -> list[list[float]]:
        """The first turns of draws without replacement below these nodes, from distributions on a device: for each
        distribution its mass, then for each turn the token, its mass, and the mass that is left."""
        raise NotImplementedError("draws that are not made on a device are made one by one")

    def best(self, probs: Tensor, k: int) -> list[list[tuple[float, float]]]:
        """The k most probable tokens of each distribution, best first, and their masses; fewer if it has fewer."""
        return self.device_sampler.best(probs, k)

    def picks(self, probs: Probs, draws: Sequence[int]) -> list[int]:
        """Independent tokens from one distribution, one for each number in `draws`."""
        return self.picks_from(alone(probs), [(0, draw) for draw in draws])

    def order(self, probs: Probs, k: int, draw: int) -> list[int]:
        """k tokens from one distribution without replacement."""
        [found] = self.orders(alone(probs), [k], [draw])
        return found


@dataclass(frozen=True, eq=False)
class SampleRequest:
    """Draws that a policy requests for one text: independent tokens, or, given sizes, orders."""

    sampler: DraftSampler
    probs: ProbsBatch
    draws: Sequence[tuple[int, int]]
    """(index of its distribution, number of the draw) of each draw"""
    sizes: Sequence[int] | None = None
    """number of tokens of each order; None for independent tokens"""

    @property
    def kind(self) -> tuple[Any, ...]:
        """A key that is equal for requests that can be answered together."""
        return type(self), type(self.sampler), self.sizes is None

    @property
    def numbers(self) -> list[int]:
        return [number for _, number in self.draws]

    def alone(self) -> list[Any]:
        """The answer to this request by itself: tokens, or orders of tokens."""
        if self.sizes is None:
            return self.sampler.picks_from(self.probs, self.draws)
        return self.sampler.orders(self.probs, self.sizes, self.numbers)


def sample_batch(requests: Sequence[SampleRequest]) -> list[list[Any]]:
    """The answers to requests of several texts: on a device all requests of one kind are one draw."""
    groups: dict[Any, list[int]] = {}
    for place, request in enumerate(requests):
        joins = isinstance(request.probs, Tensor) and not lies_on_host(request.probs)
        groups.setdefault(request.kind if joins else place, []).append(place)
    found: dict[int, list[Any]] = {}
    for places in groups.values():
        found.update(zip(places, _together([requests[place] for place in places]), strict=True))
    return [found[place] for place in range(len(requests))]


def _together(requests: list[SampleRequest]) -> list[list[Any]]:
    """The answers to requests of one kind, drawn at once."""
    first = requests[0]
    if len(requests) == 1:
        return [first.alone()]
    probs = [request.probs for request in requests if isinstance(request.probs, Tensor)]
    starts = accumulate(map(len, probs), initial=0)
    draws = [
        (start + row, number) for start, request in zip(starts, requests, strict=False) for row, number in request.draws
    ]
    sizes = None if first.sizes is None else [size for request in requests for size in request.sizes or ()]
    seeded = [
        request.sampler for request in requests for _ in request.draws if isinstance(request.sampler, SeededSampler)
    ]
    sampler = JointSampler(seeded) if seeded else first.sampler
    found = iter(type(first)(sampler, torch.cat(probs), draws, sizes).alone())
    return [list(islice(found, len(request.draws))) for request in requests]


def lies_on_host(probs: Tensor) -> bool:
    """Whether rows are on the host, where copying rows over a vocabulary into one batch costs more than another
    call."""
    return probs.device.type == "cpu"


class SeededSampler(DraftSampler):
    """Draws that depend only on the seed of a text and the position of its root."""

    def __init__(self, seed: int, root: int, device_sampler: DeviceSampler | None = None) -> None:
        self._seed, self._root = seed, root
        self.device_sampler = device_sampler or DeviceSampler()

    def picks_from(self, probs: ProbsBatch, draws: Sequence[tuple[int, int]]) -> list[int]:
        keys = self._keys("pick", [draw for _, draw in draws])
        if isinstance(probs, Tensor):
            return self.device_sampler.picks(probs, keys, [row for row, _ in draws])
        return [probs[row].race(key) for (row, _), key in zip(draws, keys, strict=True)]

    def orders(self, probs: ProbsBatch, sizes: Sequence[int], draws: Sequence[int]) -> list[list[int]]:
        keys = self._keys("order", draws)
        if isinstance(probs, Tensor):
            found = self.device_sampler.orders(probs, keys, max(sizes))
            return [order[:size] for order, size in zip(found, sizes, strict=True)]
        return [row.race_on(key, size) for row, key, size in zip(probs, keys, sizes, strict=True)]

    def next_of(self, left: Probs, node: int, turn: int, number: int) -> int:
        [key] = self._keys("order", [node])
        key = mix_int(key + turn)  # as in an order that is drawn at once
        return self.device_sampler.picks(left[None], [key], [0])[0] if isinstance(left, Tensor) else left.race(key)

    def openings(self, probs: Tensor, turns: int, nodes: Sequence[int]) -> list[list[float]]:
        return self.device_sampler.openings(probs, self._keys("order", nodes), turns)

    def wait(self, draw: int) -> float:
        [key] = self._keys("wait", [draw])
        return wait_of(key)

    def _keys(self, purpose: str, draws: Sequence[int]) -> list[int]:
        return [self._key(purpose, draw) for draw in draws]

    def _key(self, purpose: str, draw: int) -> int:
        # The role keeps these draws apart from the verifier's: a draft made with the noise that judges it is no draw.
        return key_of("draft", purpose, self._seed, self._root, draw)


class JointSampler(SeededSampler):
    """The samplers of several texts as one sampler; its n-th draw is made by the n-th of them."""

    def __init__(self, sampler: Sequence[SeededSampler]) -> None:
        self._samplers, self.device_sampler = sampler, sampler[0].device_sampler

    def _keys(self, purpose: str, draws: Sequence[int]) -> list[int]:
        return [sampler._key(purpose, draw) for sampler, draw in zip(self._samplers, draws, strict=True)]


class GreedySampler(DraftSampler):
    """Returns the most probable tokens first, and for every wait its mean."""

    def __init__(self, device_sampler: DeviceSampler | None = None) -> None:
        self.device_sampler = device_sampler or DeviceSampler()

    def picks_from(self, probs: ProbsBatch, draws: Sequence[tuple[int, int]]) -> list[int]:
        counts = Counter(row for row, _ in draws)
        best = self._best(probs, [counts[row] for row in range(len(probs))])
        turns = {row: chain(best[row], repeat(best[row][0])) for row in counts}
        return [next(turns[row]) for row, _ in draws]

    def orders(self, probs: ProbsBatch, sizes: Sequence[int], draws: Sequence[int]) -> list[list[int]]:
        return self._best(probs, sizes)

    def openings(self, probs: Tensor, turns: int, nodes: Sequence[int]) -> list[list[float]]:
        return self.device_sampler.openings(probs, None, turns)

    def wait(self, draw: int) -> float:
        return 1.0

    def _best(self, probs: ProbsBatch, sizes: Sequence[int]) -> list[list[int]]:
        """The most probable tokens of each distribution, best first: the number that `sizes` has for it, or fewer."""
        if not isinstance(probs, Tensor):
            return [p.best(size) for p, size in zip(probs, sizes, strict=True)]
        rows = self.best(probs, max(sizes))
        return [[int(token) for token, mass in row[:size] if mass > 0] for row, size in zip(rows, sizes, strict=True)]


def sampler_for(sequence: SequenceState, device_sampler: DeviceSampler | None = None) -> DraftSampler:
    if sequence.sampling.temperature == 0:
        return GreedySampler(device_sampler)
    return SeededSampler(sequence.rng_seed, len(sequence.tokens) - 1, device_sampler)


# Without replacement, one at a time


class Drawn(NamedTuple):
    token: int
    share: float
    """the probability of the token among those that were left"""
    rest: float
    """the share of all other tokens that were left; 0 after the last"""


class NoReplacementSampler:
    """Draws without replacement from one distribution, one token at a time. It keeps what is left of the distribution
    apart, and does not change the distribution itself, which a verifier needs as q."""

    def __init__(self, probs: Probs, node: int, opening: list[float] | None = None) -> None:
        """`probs` is the distribution of the children of a node, and `opening` its row of `DraftSampler.openings`."""
        self._left = probs
        self._node = node
        self._turn = 0
        self._own = False
        self._opening = [] if opening is None else opening[1:]
        self._out: list[int] = []  # tokens of the opening that are not removed from `_left` yet
        self.mass = opening[0] if opening else float(row_sum(probs)) if isinstance(probs, Tensor) else probs.mass
        """mass of all tokens that are left: a sum, because 1 minus the others would be mostly rounding error"""

    def draw(self, sampler: DraftSampler, number: int) -> Drawn:
        """Draw and remove a token; `number` is unique among the draws of the tree."""
        before = self.mass
        if self._opening:
            first, taken, self.mass, *self._opening = self._opening
            token = int(first)
            self._out.append(token)
        else:
            self._take_out()
            token = sampler.next_of(self._left, self._node, self._turn, number)
            taken, self.mass = self._take(token)
        self._turn += 1
        return Drawn(token, taken / before, self.mass / before)

    def _take_out(self) -> None:
        """Remove the tokens of the opening when it is used up: later draws are made from the rest."""
        if self._out:
            assert isinstance(self._left, Tensor), "only distributions on a device are drawn from in advance"
            self._left, self._own = self._left.clone(), True
            self._left[self._out] = 0.0
            self._out = []

    def _take(self, token: int) -> tuple[float, float]:
        """Remove a token; returns its mass, and the mass of all tokens that are left."""
        if not isinstance(self._left, Tensor):
            taken, self._left = self._left[token], self._left.without(token)
            return taken, self._left.mass
        if not self._own:
            self._left, self._own = self._left.clone(), True
        mass = self._left[token].to(torch.float64, copy=True)
        self._left[token] = 0.0
        one, others = torch.stack([mass, row_sum(self._left)]).tolist()  # one synchronisation
        return one, others


class Opening(SampleRequest):
    """A request for the first turns of draws without replacement. The number of a draw is its node; `sizes` are the
    numbers of turns."""

    def alone(self) -> list[Any]:
        assert isinstance(self.probs, Tensor), "sparse distributions are drawn from on the host"
        return self.sampler.openings(self.probs, max(self.sizes or (0,)), self.numbers)


def no_replacement_samplers(
    probs: ProbsBatch, nodes: Sequence[int], sampler: DraftSampler, turns: int
) -> Generator[SampleRequest, Any, dict[int, NoReplacementSampler]]:
    """Samplers of the distributions after these nodes. On a device the first turns are drawn at once, for all texts of
    a batch; no token is used before its turn."""
    if not isinstance(probs, Tensor) or lies_on_host(probs):
        return {node: NoReplacementSampler(row, node) for node, row in zip(nodes, probs, strict=True)}
    openings = yield Opening(sampler, probs, list(enumerate(nodes)), [turns] * len(nodes))
    return {node: NoReplacementSampler(row, node, own) for node, row, own in zip(nodes, probs, openings, strict=True)}
