"""Where every random decision comes from.

A verifier never touches a random generator; it asks a `Chance`, which answers for the whole batch. In production the
answers come from a counter-based generator keyed by (seed, position, purpose): a draw depends on nothing else, so
batch, budget and device do not change it. An audit can put an enumerator in its place and follow every outcome of
the same code.
"""

from __future__ import annotations

import math
import zlib
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor


class Chance(Protocol):
    """The random decisions of one step for a batch of sequences.

    `draw` tells apart the decisions of one kind within a step: each (kind, draw) pair is used at most once.
    """

    def token(self, probs: Tensor, depth: int) -> Tensor:
        """One token per distribution (batch, vocabulary) for the position `depth` + 1 behind the root.

        Keyed by the position itself and not by the step, so whichever step reaches a position draws the same token
        from the same distribution. That is what makes `match` equal plain decoding seed for seed; it is exact because a
        position's noise is used once: when the walk leaves the tree, the token it drew is emitted.
        """
        ...

    def first(self, odds: Tensor, draw: int) -> Tensor:
        """(batch,) int64: toss n coins with these odds (batch, n) in order and say which is the first success.

        n where all fail. The coins are numbered draw, draw + 1, …: tossing them in several calls changes nothing.
        """
        ...

    def hopes(self, bounds: Tensor, draw: int) -> Tensor:
        """(batch, n) bool: which of n coins could succeed at odds up to these bounds.

        Asked before `first` about the same coins, it spares working out the odds of those that fail in any case.
        """
        ...

    def pick(self, probs: Tensor, draw: int = 0) -> Tensor:
        """(batch,) int64: one token from each distribution (batch, vocabulary), which need not be normalised."""
        ...


class SeededChance:
    """Counter-based chance: a draw is a hash of its key, the same on every device and in every batch."""

    def __init__(self, seeds: Tensor, roots: Tensor, role: str = "verify", device: torch.device | None = None) -> None:
        """`seeds` (batch,) int64, and `roots` (batch,) int64, the position of each root in its sequence.

        Every step emits at least one token, so no two steps of a sequence have the same root position: it is the
        step's own key. `role` keeps a drafter's noise apart from a verifier's: a draft made with the noise that judges
        it would be no draw at all. Both are brought to the `device` when they are first needed there.
        """
        self.host = seeds, roots
        self.role = role
        self._device = device or seeds.device
        self._coins: dict[int, Tensor] = {}

    @cached_property
    def seeds(self) -> Tensor:
        return self.host[0].to(self._device)

    @cached_property
    def roots(self) -> Tensor:
        return self.host[1].to(self._device)

    def token(self, probs: Tensor, depth: int) -> Tensor:
        return race(probs, self._keys("token", self.roots + (depth + 1), 0))

    def tokens(self, probs: Tensor, depths: Tensor) -> Tensor:
        """(batch, n) int64: `token` for many nodes (batch, n, vocabulary) at their depths (batch, n) at once.

        Nodes of one depth share their noise: of all of them, a walk comes to one.
        """
        keys = self._keys("token", self.roots[:, None] + (depths + 1), 0)
        return race(probs.flatten(0, 1), keys.flatten()).view(depths.shape)

    def first(self, odds: Tensor, draw: int) -> Tensor:
        count = odds.shape[1]
        places = torch.arange(count, device=odds.device)
        # A least place and no running product: a device takes a scan by itself and a minimum along with the rest.
        found = torch.where(self.hopes(odds, draw), places, count)
        return torch.nn.functional.pad(found, (0, 1), value=count).amin(dim=1)

    def hopes(self, bounds: Tensor, draw: int) -> Tensor:
        return self._tossed(draw, bounds.shape[1]) < bounds

    def pick(self, probs: Tensor, draw: int = 0) -> Tensor:
        return race(probs, self._keys("pick", self.roots, draw))

    def _tossed(self, start: int, count: int) -> Tensor:
        """(batch, count) float64: coins start, start + 1, …; tossed many at once, since tossing one costs as much."""
        first, last = start // COINS, (start + count - 1) // COINS
        for chunk in range(first, last + 1):
            if chunk not in self._coins:
                names = torch.arange(chunk * COINS, (chunk + 1) * COINS, device=self.seeds.device)
                self._coins[chunk] = to_uniform(mix(self._keys("coin", self.roots, 0)[:, None] + spaced(names)))
        coins = torch.cat([self._coins[chunk] for chunk in range(first, last + 1)], dim=1)
        return coins[:, start - first * COINS : start - first * COINS + count]

    def _keys(self, purpose: str, positions: Tensor, draw: int) -> Tensor:
        # The seed is mixed before anything joins it: users count seeds up from 0 just as verifiers count draws.
        stream = stream_of(self.role, purpose, draw)
        seeds = self.seeds if positions.ndim == 1 else self.seeds[:, None]
        return mix(mix(mix(seeds) + stream) + positions * GAMMA)


def stream_of(role: str, purpose: str, draw: int) -> int:
    """What tells draws of one seed and one position apart."""
    return zlib.crc32(f"{role} {purpose}".encode()) << 31 | draw


COINS = 64
BLOCK = 256


def race(probs: Tensor, keys: Tensor, rows: Tensor | None = None) -> Tensor:
    """(batch,) int64: one token from each distribution (batch, vocabulary), decided by noise that belongs to the
    tokens.

    Every token arrives after an exponential time divided by its mass, and the first one wins: token i with probability
    distribution[i] / total. A last digit more or less in the distribution can only change the winner of a photo finish.
    (One uniform against the running sum of the distribution would be cheaper to explain, but there a rare token is as
    narrow as the rounding of all tokens before it, so a pass over a tree would draw other rare tokens than a pass over
    one node.)

    To spare noise for the whole vocabulary, blocks of tokens race first, each with the mass of its tokens, and then the
    tokens of the winning block.

    Where several draws share a distribution, `rows` (draws,) says which distribution (distributions, vocabulary) each
    of the keys (draws,) is for.
    """
    batch, vocabulary = probs.shape
    if vocabulary <= BLOCK:
        return _first(probs if rows is None else probs[rows], keys, torch.arange(vocabulary, device=probs.device))
    probs = torch.nn.functional.pad(probs, (0, -vocabulary % BLOCK))
    blocks = probs.view(batch, -1, BLOCK)
    sums = blocks.sum(dim=-1)
    winner = _first(sums if rows is None else sums[rows], mix(keys), torch.arange(blocks.shape[1], device=probs.device))
    tokens = winner[:, None] * BLOCK + torch.arange(BLOCK, device=probs.device)  # (draws, BLOCK)
    inside = _first(probs.gather(1, tokens) if rows is None else blocks[rows, winner], keys, tokens)
    return tokens.gather(1, inside[:, None])[:, 0]


def race_among(tokens: Tensor, masses: Tensor, keys: Tensor) -> Tensor:
    """(draws,) int64: what `race` draws from distributions that are a few tokens (draws, few) with masses (draws, few)
    float64.

    A token without a mass stands for nothing.
    """
    blocks = tokens // BLOCK
    shared = blocks[:, :, None] == blocks[:, None, :]
    sums = torch.where(masses > 0, (shared * masses[:, None, :]).sum(dim=2), 0.0)
    winner = blocks.gather(1, _first(sums, mix(keys), blocks)[:, None])
    inside = _first(torch.where(blocks == winner, masses, 0.0), keys, tokens)
    return tokens.gather(1, inside[:, None])[:, 0]


def race_on(probs: Tensor, keys: Tensor, k: int) -> Tensor:
    """(batch, k) int64: the first k tokens of each distribution (batch, vocabulary), each a race of those that are
    left.

    Where a distribution carries fewer, the rest of its row is -1.
    """
    left = probs.clone()
    drawn = []
    for turn in range(k):
        token = race(left, mix(keys + turn))[:, None]
        drawn.append(torch.where(left.gather(1, token) > 0, token, -1))
        left.scatter_(1, token, 0.0)
    return torch.cat(drawn, dim=1)


def _first(mass: Tensor, keys: Tensor, names: Tensor) -> Tensor:
    """(batch,) int64: which of the runners (batch, count) arrives first; `names` tell their noise apart."""
    bits = _shift(mix(keys[:, None] + spaced(names)), 12)
    uniform = (bits.double() + 0.5) * 2.0**-52  # strictly between 0 and 1, so that no time is 0 and 0 / 0 never met
    return torch.where(mass > 0, -torch.log(uniform) / mass, torch.inf).argmin(dim=-1)


# SplitMix64 (Steele, Lea, Flood 2014): a counter stepped by an odd constant and a bijective mixer behind it. int64
# multiplication wraps like uint64; only the right shift needs its sign bits masked away.


def signed(value: int) -> int:
    """A 64-bit pattern as the int64 that carries it."""
    return (value + (1 << 63)) % (1 << 64) - (1 << 63)


GAMMA = signed(0x9E3779B97F4A7C15)
FACTORS = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
"""of splitmix64"""


def spaced(names: Tensor) -> Tensor:
    """Counters a long way apart. The idle xor keeps a compiler from taking a product of indices for 32 bits wide."""
    return (names ^ 0) * GAMMA


def mix(x: Tensor) -> Tensor:
    """A bijection on int64 after which every output bit depends on every input bit."""
    x = (x ^ _shift(x, 30)) * signed(FACTORS[0])
    x = (x ^ _shift(x, 27)) * signed(FACTORS[1])
    return x ^ _shift(x, 31)


def to_uniform(x: Tensor) -> Tensor:
    """The upper 53 bits as float64 in [0, 1)."""
    return _shift(x, 11).double() * 2.0**-53


def _shift(x: Tensor, bits: int) -> Tensor:
    return (x >> bits) & ((1 << (64 - bits)) - 1)


# The same for one draw on the host, in whole numbers from 0 to below 2**64: a tensor of one number costs far more.


def key_of(role: str, purpose: str, seed: int, position: int, draw: int) -> int:
    """What one draw is made from: the key of `SeededChance`."""
    return mix_one(mix_one(mix_one(seed) + stream_of(role, purpose, draw)) + position * GAMMA)


def mix_one(x: int) -> int:
    x &= ALL
    x = (x ^ x >> 30) * FACTORS[0] & ALL
    x = (x ^ x >> 27) * FACTORS[1] & ALL
    return x ^ x >> 31


def wait_of(key: int) -> float:
    """A standard exponential time, never 0."""
    return -math.log(((mix_one(key) >> 12) + 0.5) * 2.0**-52)


ALL = (1 << 64) - 1
