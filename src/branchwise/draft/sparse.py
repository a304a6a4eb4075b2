"""Sparse distributions, and tables of distributions.

A lookup drafter proposes a few tokens after a node. Their distribution stays on the host, which draws from it. It
becomes a row over the vocabulary if a verifier needs it as q; only tokens and masses are copied to a device.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from branchwise.core.rng import mix_int, race_sparse

TINY = torch.finfo(torch.float32).tiny
"""the least mass that a verifier can divide by"""


@dataclass(eq=False, slots=True)
class SparseProbs:
    """A distribution over a few tokens; all others have mass 0."""

    masses: dict[int, float]
    """token -> its mass, rounded to float32: draws use the very numbers that q has"""
    vocabulary: int
    device: torch.device
    """the device of the target"""

    @classmethod
    def of(cls, weights: Mapping[int, float], vocabulary: int, device: torch.device) -> SparseProbs:
        """The distribution in proportion to these weights."""
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

    def without(self, token: int) -> SparseProbs:
        """The same masses without that of one token."""
        others = {other: mass for other, mass in self.masses.items() if other != token}
        return SparseProbs(others, self.vocabulary, self.device)

    def best(self, k: int) -> list[int]:
        """The k most probable tokens, best first; fewer if the distribution has fewer."""
        return sorted(self.masses, key=self.masses.__getitem__, reverse=True)[:k]

    def race(self, key: int) -> int:
        """One token, drawn with `key`: the same token that `rng.race` draws from the distribution as a row."""
        return race_sparse(self.masses, key)

    def race_on(self, key: int, k: int) -> list[int]:
        """k tokens without replacement, as `rng.race_on` draws them."""
        left, drawn = self, list[int]()
        for turn in range(min(k, len(self.masses))):
            drawn.append(left.race(mix_int(key + turn)))
            left = left.without(drawn[-1])
        return drawn


Probs = Tensor | SparseProbs
"""the distribution of the children of a node: a row (vocabulary,), or sparse"""
ProbsBatch = Tensor | Sequence[SparseProbs]
"""the distributions of several nodes: rows (nodes, vocabulary), or sparse"""


def alone(probs: Probs) -> ProbsBatch:
    """One distribution as a batch."""
    return probs[None] if isinstance(probs, Tensor) else [probs]


def table(probs: Sequence[Probs | None]) -> Tensor:
    """(distributions, vocabulary) float32, on the device of the target: the distributions as rows, zeros for None."""
    few = next((p for p in probs if isinstance(p, SparseProbs)), None)
    if few is None:
        rows = [p for p in probs if isinstance(p, Tensor)]
        nothing = torch.zeros_like(rows[0]) if len(rows) < len(probs) else rows[0]
        return torch.stack([p if isinstance(p, Tensor) else nothing for p in probs])
    spread = _spread(probs, few.vocabulary, few.device)
    for row, p in enumerate(probs):
        if isinstance(p, Tensor):
            spread[row] = p
    return spread


def flaw_of(tokens: Tensor, masses: Tensor, vocabulary: int) -> str | None:
    """Why rows (n, k) of tokens and masses cannot be sparse distributions with the best tokens first; None if they
    can."""
    if bool(((tokens < 0) | (tokens >= vocabulary)).any()):
        return "a token is outside the vocabulary"
    if not bool(((masses >= 0).all(dim=1) & (masses.double().sum(dim=1) <= 1 + 1e-5)).all()):
        return "its masses are not probabilities"
    if bool((masses[:, 1:] > masses[:, :-1]).any()):
        return "its tokens are not in order"
    lines = torch.where(masses > 0, tokens, -1 - torch.arange(tokens.shape[1])).sort(dim=1).values
    if bool((lines[:, 1:] == lines[:, :-1]).any()):
        return "a token comes twice in a row"
    return None


def _spread(probs: Sequence[Probs | None], vocabulary: int, device: torch.device) -> Tensor:
    """(distributions, vocabulary): the sparse distributions as rows; all other rows are 0."""
    few = [(row * vocabulary, p.masses) for row, p in enumerate(probs) if isinstance(p, SparseProbs)]
    places = np.array([start + token for start, masses in few for token in masses], dtype=np.int64)
    values = np.array([mass for _, masses in few for mass in masses.values()])
    size = len(probs), vocabulary
    if device.type == "cpu":  # numpy gets zeroed pages from the system, torch would write zeros; few are ever read
        rows = np.zeros(size, dtype=np.float32)
        rows.reshape(-1)[places] = values
        return torch.from_numpy(rows)
    packed = torch.from_numpy(np.stack([places, values.view(np.int64)]))
    return scattered(packed.to(device, non_blocking=True), size)


def scattered(packed: Tensor, size: tuple[int, int]) -> Tensor:
    """Rows of this size from one tensor (2, n) int64, packed for one copy: flat indices, and the bits of masses."""
    flat = torch.zeros(size[0] * size[1], device=packed.device)
    return flat.scatter_(0, packed[0], packed[1].view(torch.float64).float()).view(size)
