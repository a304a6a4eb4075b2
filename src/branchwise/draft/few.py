"""Laws with few tokens, and tables of laws.

What a memory believes of a place is a few tokens of the vocabulary. Such a law stays on the host as it is: it is drawn
from there, whatever device the target is on, and becomes a row over the vocabulary when a verifier has to see it as q.
Of a whole tree only the tokens and their masses travel to the device.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping
from collections.abc import Sequence as Rows
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from branchwise.chance import BLOCK, GAMMA, mix_one, wait_of

TINY = torch.finfo(torch.float32).tiny
"""a verifier could not divide by less"""


@dataclass(eq=False, slots=True)
class Few:
    """A law with nothing on all but a few tokens."""

    masses: dict[int, float]
    """token -> its mass, rounded to float32: the number that is drawn with is the one in q"""
    vocabulary: int
    device: torch.device
    """where its target is"""

    @classmethod
    def of(cls, weights: Mapping[int, float], vocabulary: int, device: torch.device) -> Few:
        """The law that these weights are in proportion to."""
        assert max(weights) < vocabulary, "the target has no such token"
        whole = math.fsum(weights.values())
        rounded = array("f", [weight / whole for weight in weights.values()])
        masses = {token: mass for token, mass in zip(weights, rounded, strict=True) if mass >= TINY}
        return cls(masses, vocabulary, device)

    def __getitem__(self, token: int) -> float:
        return self.masses[token]

    @property
    def mass(self) -> float:
        return math.fsum(self.masses.values())

    def without(self, token: int) -> Few:
        """What is left when a token is taken out."""
        return Few({other: mass for other, mass in self.masses.items() if other != token}, self.vocabulary, self.device)

    def best(self, k: int) -> list[int]:
        """The k most probable tokens, best first; fewer where there are fewer."""
        return sorted(self.masses, key=self.masses.__getitem__, reverse=True)[:k]

    def race(self, key: int) -> int:
        """The token that `chance.race` draws from the same law as a row: whoever has no mass need not be asked."""
        blocks: dict[int, float] = {}
        for token, mass in self.masses.items():
            blocks[token // BLOCK] = blocks.get(token // BLOCK, 0.0) + mass
        winner = _first(blocks, mix_one(key))
        return _first({token: mass for token, mass in self.masses.items() if token // BLOCK == winner}, key)

    def race_on(self, key: int, k: int) -> list[int]:
        """The first k tokens, each by a race of those that are left."""
        left, drawn = self, list[int]()
        for turn in range(min(k, len(self.masses))):
            drawn.append(left.race(mix_one(key + turn)))
            left = left.without(drawn[-1])
        return drawn


def _first(runners: dict[int, float], key: int) -> int:
    """Which of the runners, given with their masses, arrives first."""
    if len(runners) == 1:
        return next(iter(runners))
    times = [wait_of(key + name * GAMMA) / mass for name, mass in runners.items()]
    return min(zip(times, runners, strict=True))[1]


Law = Tensor | Few
"""what the children of a node are drawn from: a row (vocabulary,), or a few tokens"""
Level = Tensor | Rows[Few]
"""the laws of several nodes: rows (nodes, vocabulary), or a few tokens for each"""


def alone(law: Law) -> Level:
    """The level of one node."""
    return law[None] if isinstance(law, Tensor) else [law]


def table(laws: Rows[Law | None]) -> Tensor:
    """(laws, vocabulary) float32, on the device of the target: every law as a row, and None as a row of zeros."""
    few = next((law for law in laws if isinstance(law, Few)), None)
    if few is None:
        rows = [law for law in laws if isinstance(law, Tensor)]
        nothing = torch.zeros_like(rows[0]) if len(rows) < len(laws) else rows[0]
        return torch.stack([law if isinstance(law, Tensor) else nothing for law in laws])
    spread = _spread(laws, few.vocabulary, few.device)
    for row, law in enumerate(laws):
        if isinstance(law, Tensor):
            spread[row] = law
    return spread


def _spread(laws: Rows[Law | None], vocabulary: int, device: torch.device) -> Tensor:
    """(laws, vocabulary): those with few tokens; the rows of all others are empty."""
    few = [(row * vocabulary, law.masses) for row, law in enumerate(laws) if isinstance(law, Few)]
    places = np.array([start + token for start, masses in few for token in masses], dtype=np.int64)
    values = np.array([mass for _, masses in few for mass in masses.values()])
    size = len(laws), vocabulary
    if device.type == "cpu":  # numpy asks the system for zeros where torch writes them, and hardly any of them is read
        rows = np.zeros(size, dtype=np.float32)
        rows.reshape(-1)[places] = values
        return torch.from_numpy(rows)
    told = torch.from_numpy(np.stack([places, values.view(np.int64)]))
    return scattered(told.to(device, non_blocking=True), size)


def scattered(told: Tensor, size: tuple[int, int]) -> Tensor:
    """Rows of this size, given in one tensor (2, n) int64 the places of masses and the bits of those masses."""
    flat = torch.zeros(size[0] * size[1], device=told.device)
    return flat.scatter_(0, told[0], told[1].view(torch.float64).float()).view(size)
