"""Counter-based random numbers: every draw is a hash of its key and depends on nothing else.

A verifier asks a `Chance` for every random decision and gets the answers for the whole batch. In production, that is
`SeededChance`, the key is (seed, position, purpose): batch size, budget and device do not change a draw. The audit
passes an enumerator instead.

A token is drawn from a distribution by an exponential race, which is the Gumbel-max trick in terms of arrival times.
`race` is the race over tensors, on any device. `race_sparse` is the same race over a few tokens in Python integers, and
`draft/recycle/paths_kernel.py` has it in Triton.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from branchwise.core.rows import BLOCK, filled_blocks


class Chance(Protocol):
    """The random decisions of one step for a batch of sequences.

    `draw` numbers the decisions of one kind within a step: each (kind, draw) pair is used at most once.
    """

    def token(self, probs: Tensor, depth: int) -> Tensor:
        """(batch,) int64: one token from each distribution (batch, vocabulary), for the position `depth` + 1 after the
        root.

        The key is the position and not the step, so every step that reaches a position draws the same token from the
        same distribution. Therefore `match` equals plain decoding seed for seed. It is exact because the noise of a
        position is used once: if the walk leaves the tree, the token that it drew last is emitted.
        """

    def first(self, odds: Tensor, draw: int) -> Tensor:
        """(batch,) int64: toss n coins, which succeed with the probabilities `odds` (batch, n), in order; the index of
        the first success, or n if all fail.

        The coins have the numbers draw, draw + 1, …, so tossing them in several calls changes nothing.
        """

    def hopes(self, bounds: Tensor, draw: int) -> Tensor:
        """(batch, n) bool: which of n coins succeed if their odds are as high as these bounds. Asked before `first`, it
        saves computing the odds of coins that fail in any case."""

    def pick(self, probs: Tensor, draw: int = 0) -> Tensor:
        """(batch,) int64: one token from each distribution (batch, vocabulary), which need not be normalised."""


class SeededChance:
    """Counter-based chance: a draw is a hash of its key, the same on every device and in every batch."""

    def __init__(self, seeds: Tensor, roots: Tensor, role: str = "verify", device: torch.device | None = None) -> None:
        """`seeds` (batch,) int64, and `roots` (batch,) int64, the position of each root in its sequence.

        Every step emits at least one token, so the position of the root identifies the step. `role` separates the noise
        of a drafter from that of a verifier, because a draft must be independent of the coins that judge it. Both
        tensors are copied to the `device` when they are first used there.
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

        Nodes of one depth share their noise, because a walk visits at most one of them.
        """
        keys = self._keys("token", self.roots[:, None] + (depths + 1), 0)
        return race(probs.flatten(0, 1), keys.flatten()).view(depths.shape)

    def first(self, odds: Tensor, draw: int) -> Tensor:
        count = odds.shape[1]
        places = torch.arange(count, device=odds.device)
        # A minimum, not a running product: the compiler fuses a minimum, but a scan is a kernel of its own.
        found = torch.where(self.hopes(odds, draw), places, count)
        return torch.nn.functional.pad(found, (0, 1), value=count).amin(dim=1)

    def hopes(self, bounds: Tensor, draw: int) -> Tensor:
        return self._tossed(draw, bounds.shape[1]) < bounds

    def pick(self, probs: Tensor, draw: int = 0) -> Tensor:
        return race(probs, self._keys("pick", self.roots, draw))

    def _tossed(self, start: int, count: int) -> Tensor:
        """(batch, count) float64 in [0, 1): the noise of coins start, start + 1, …. It is made in chunks, because a
        chunk costs as much as one coin."""
        first, last = start // COINS, (start + count - 1) // COINS
        for chunk in range(first, last + 1):
            if chunk not in self._coins:
                names = torch.arange(chunk * COINS, (chunk + 1) * COINS, device=self.seeds.device)
                self._coins[chunk] = to_uniform(mix(self._keys("coin", self.roots, 0)[:, None] + spaced(names)))
        coins = torch.cat([self._coins[chunk] for chunk in range(first, last + 1)], dim=1)
        return coins[:, start - first * COINS : start - first * COINS + count]

    def _keys(self, purpose: str, positions: Tensor, draw: int) -> Tensor:
        # The seed is mixed before anything is added: users count seeds up from 0 as verifiers count draws, so sums of
        # unmixed numbers would often be equal.
        stream = stream_of(self.role, purpose, draw)
        seeds = self.seeds if positions.ndim == 1 else self.seeds[:, None]
        return mix(mix(mix(seeds) + stream) + positions * GAMMA)


def stream_of(role: str, purpose: str, draw: int) -> int:
    """The part of a key that separates draws of one seed and one position."""
    return zlib.crc32(f"{role} {purpose}".encode()) << 31 | draw


COINS = 64
"""the number of coins whose noise is made at once"""


def race(probs: Tensor, keys: Tensor, rows: Tensor | None = None) -> Tensor:
    """(batch,) int64: one token from each distribution (batch, vocabulary), by an exponential race.

    Every token arrives after an exponential time divided by its mass, and the first to arrive wins: token i with
    probability probs[i] / total. Every token has noise of its own, so rounding in the distribution changes the winner
    only if two tokens arrive at nearly the same time. (Comparing one uniform number with the running sum would be
    cheaper, but the interval of a rare token can be as narrow as the rounding of the sum before it.) To save noise,
    blocks of tokens race first, then the tokens of the winning block.

    If several draws share a distribution, `rows` (draws,) is the index of the distribution for each key (draws,).
    """
    vocabulary = probs.shape[1]
    if vocabulary <= BLOCK:
        return _first(probs if rows is None else probs[rows], keys, torch.arange(vocabulary, device=probs.device))
    blocks = filled_blocks(probs)
    sums = blocks.sum(dim=-1)
    winner = _first(sums if rows is None else sums[rows], mix(keys), torch.arange(blocks.shape[1], device=probs.device))
    tokens = winner[:, None] * BLOCK + torch.arange(BLOCK, device=probs.device)  # (draws, BLOCK)
    inside = _first(blocks.flatten(1).gather(1, tokens) if rows is None else blocks[rows, winner], keys, tokens)
    return tokens.gather(1, inside[:, None])[:, 0]


def race_on(probs: Tensor, keys: Tensor, k: int) -> Tensor:
    """(batch, k) int64: k tokens of each distribution (batch, vocabulary) without replacement, each by a race of the
    tokens that are left; -1 if none is left."""
    left = probs.clone()
    drawn = []
    for turn in range(k):
        token = race(left, mix(keys + turn))[:, None]
        drawn.append(torch.where(left.gather(1, token) > 0, token, -1))
        left.scatter_(1, token, 0.0)
    return torch.cat(drawn, dim=1)


def _first(mass: Tensor, keys: Tensor, names: Tensor) -> Tensor:
    """(batch,) int64: the index of the runner that arrives first, given the `mass` of each (batch, count); `names` are
    part of the keys of their noise."""
    bits = _shift(mix(keys[:, None] + spaced(names)), 12)
    uniform = (bits.double() + 0.5) * 2.0**-52  # strictly between 0 and 1, so that no time is 0 and 0 / 0 cannot occur
    return torch.where(mass > 0, -torch.log(uniform) / mass, torch.inf).argmin(dim=-1)


# SplitMix64 (Steele, Lea, Flood 2014): a counter stepped by an odd constant, then a bijective mixer. int64
# multiplication wraps like uint64; only the right shift needs its sign bits masked away.


def signed(value: int) -> int:
    """The int64 with the bit pattern of an unsigned 64-bit integer."""
    return (value + (1 << 63)) % (1 << 64) - (1 << 63)


GAMMA = signed(0x9E3779B97F4A7C15)
FACTORS = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
"""the multipliers of the mixer of SplitMix64"""


def spaced(names: Tensor) -> Tensor:
    """Counters spaced far apart. The xor with 0 keeps the compiler from treating a product of indices as 32 bits
    wide."""
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


# The same functions in Python integers from 0 to below 2**64, for single draws on the host: a tensor of one number
# costs far more.


def key_of(role: str, purpose: str, seed: int, position: int, draw: int) -> int:
    """The key that `SeededChance` makes for a draw."""
    return mix_int(mix_int(mix_int(seed) + stream_of(role, purpose, draw)) + position * GAMMA)


def race_sparse(masses: Mapping[int, float], key: int) -> int:
    """The token that `race` draws from this distribution as a row: tokens without mass cannot win."""
    blocks: dict[int, float] = {}
    for token, mass in masses.items():
        blocks[token // BLOCK] = blocks.get(token // BLOCK, 0.0) + mass
    winner = _first_int(blocks, mix_int(key))
    return _first_int({token: mass for token, mass in masses.items() if token // BLOCK == winner}, key)


def _first_int(runners: dict[int, float], key: int) -> int:
    if len(runners) == 1:
        return next(iter(runners))
    times = [wait_of(key + name * GAMMA) / mass for name, mass in runners.items()]
    return min(zip(times, runners, strict=True))[1]


def mix_int(x: int) -> int:
    x &= ALL
    x = (x ^ x >> 30) * FACTORS[0] & ALL
    x = (x ^ x >> 27) * FACTORS[1] & ALL
    return x ^ x >> 31


def wait_of(key: int) -> float:
    """A standard exponential time, never 0."""
    return -math.log(((mix_int(key) >> 12) + 0.5) * 2.0**-52)


ALL = (1 << 64) - 1
