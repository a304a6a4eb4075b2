"""Where every random decision comes from.

A verifier never touches a random generator; it asks a `Chance`, which answers for the whole batch. In production the
answers come from a counter-based generator keyed by (seed, position, purpose): a draw depends on nothing else, so
batch, budget and device do not change it. An audit can put an enumerator in its place and follow every outcome of
the same code.
"""

from __future__ import annotations

import zlib
from typing import Protocol

import torch
from torch import Tensor


class Chance(Protocol):
    """The random decisions of one step for a batch of sequences.

    `draw` tells apart the decisions of one kind within a step: each (kind, draw) pair is used at most once.
    """

    def token(self, law: Tensor, depth: int) -> Tensor:
        """One token per law (batch, vocabulary) for the position `depth` + 1 behind the root.

        Keyed by the position itself and not by the step, so whichever step reaches a position draws the same token
        from the same law. That is what makes `match` equal plain decoding seed for seed; it is exact because a
        position's noise is used once: when the walk leaves the tree, the token it drew is emitted.
        """
        ...

    def accept(self, probability: Tensor, draw: int) -> Tensor:
        """(batch,) bool, each true with its probability."""
        ...

    def pick(self, law: Tensor, draw: int) -> Tensor:
        """(batch,) int64: one token from each law (batch, vocabulary), which need not be normalised."""
        ...

    def order(self, law: Tensor, k: int, draw: int) -> Tensor:
        """(batch, k) int64: k tokens drawn from each law without replacement, in draw order.

        Where a law carries fewer than k tokens, the rest of its row is -1.
        """
        ...


class SeededChance:
    """Counter-based chance: a draw is a hash of its key, the same on every device and in every batch."""

    def __init__(self, seeds: Tensor, roots: Tensor) -> None:
        """`seeds` (batch,) int64, and `roots` (batch,) int64, the position of each root in its sequence.

        Every step emits at least one token, so no two steps of a sequence have the same root position: it is the
        step's own key.
        """
        self.seeds = seeds
        self.roots = roots

    def token(self, law: Tensor, depth: int) -> Tensor:
        return inverse_cdf(law, self._uniform("token", self.roots + (depth + 1), 0))

    def accept(self, probability: Tensor, draw: int) -> Tensor:
        return self._uniform("accept", self.roots, draw) < probability

    def pick(self, law: Tensor, draw: int) -> Tensor:
        return inverse_cdf(law, self._uniform("pick", self.roots, draw))

    def order(self, law: Tensor, k: int, draw: int) -> Tensor:
        # Gumbel-top-k: perturbing log q and keeping the k largest is drawing k times without replacement.
        tokens = torch.arange(law.shape[-1], device=law.device)
        keys = self._keys("order", self.roots, draw)[:, None]
        noise = -torch.log(-torch.log(to_uniform(mix(keys + tokens * GAMMA)).clamp_min(1e-300)))
        scores, chosen = (law.double().log() + noise).topk(min(k, law.shape[-1]), dim=-1)
        chosen = torch.where(scores == -torch.inf, -1, chosen)
        return torch.nn.functional.pad(chosen, (0, k - chosen.shape[-1]), value=-1)

    def _keys(self, purpose: str, positions: Tensor, draw: int) -> Tensor:
        # The seed is mixed before anything joins it: users count seeds up from 0 just as verifiers count draws.
        stream = zlib.crc32(purpose.encode()) << 31 | draw
        return mix(mix(mix(self.seeds) + stream) + positions * GAMMA)

    def _uniform(self, purpose: str, positions: Tensor, draw: int) -> Tensor:
        """(batch,) float64 in [0, 1)."""
        return to_uniform(self._keys(purpose, positions, draw))


def inverse_cdf(law: Tensor, uniform: Tensor) -> Tensor:
    """(batch,) int64: the token where the running sum of each law passes uniform * total.

    The sum runs in float64: over 150,000 float32 terms the rounding would otherwise be as large as rare tokens.
    """
    cumulative = law.cumsum(dim=-1, dtype=torch.float64)
    total = cumulative[:, -1:].contiguous()  # or searchsorted warns
    # `right` skips tokens of mass zero: their cumulative value equals the one before them.
    found = torch.searchsorted(cumulative, uniform[:, None] * total, right=True)[:, 0]
    # A law without mass, in a row that nobody reads, must not point past the end of the vocabulary.
    last = torch.searchsorted(cumulative, total, right=False)[:, 0]
    return torch.minimum(found, last)


# SplitMix64 (Steele, Lea, Flood 2014): a counter stepped by an odd constant and a bijective mixer behind it. int64
# multiplication wraps like uint64; only the right shift needs its sign bits masked away.


def signed(value: int) -> int:
    """A 64-bit pattern as the int64 that carries it."""
    return (value + (1 << 63)) % (1 << 64) - (1 << 63)


GAMMA = signed(0x9E3779B97F4A7C15)


def mix(x: Tensor) -> Tensor:
    """A bijection on int64 after which every output bit depends on every input bit."""
    x = (x ^ _shift(x, 30)) * signed(0xBF58476D1CE4E5B9)
    x = (x ^ _shift(x, 27)) * signed(0x94D049BB133111EB)
    return x ^ _shift(x, 31)


def to_uniform(x: Tensor) -> Tensor:
    """The upper 53 bits as float64 in [0, 1)."""
    return _shift(x, 11).double() * 2.0**-53


def _shift(x: Tensor, bits: int) -> Tensor:
    return (x >> bits) & ((1 << (64 - bits)) - 1)
