"""Draws from a distribution without replacement, one at a time."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from branchwise.core.rows import row_sum
from branchwise.draft.sampler import DraftSampler, SampleRequest, lies_on_host
from branchwise.draft.sparse import Probs, ProbsBatch

FIRST_TURNS = 4
"""tokens of a node that are drawn in advance if the policy does not know how many it will need"""


class Drawn(NamedTuple):
    token: int
    share: float
    """its probability among the tokens that were left"""
    rest: float
    """the share of all others; 0 after the last"""


class NoReplacementSampler:
    """What is left of a distribution. The distribution itself is not changed: a verifier needs it as q."""

    def __init__(self, probs: Probs, node: int, opening: list[float] | None = None) -> None:
        """The distribution of the children of a node; `opening` is its row of `DraftSampler.openings`."""
        self._left = probs
        self._node = node
        self._turn = 0
        self._own = False
        self._opening = [] if opening is None else opening[1:]
        self._out: list[int] = []  # tokens of the opening that are not removed from what is left yet
        self.mass = opening[0] if opening else float(row_sum(probs)) if isinstance(probs, Tensor) else probs.mass
        """of all tokens that are left: a sum, because 1 minus the others would be mostly rounding"""

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
        """Remove the tokens of the opening, which is used up: later draws are made from the rest."""
        if self._out:
            assert isinstance(self._left, Tensor), "only distributions on a device are drawn from in advance"
            self._left, self._own = self._left.clone(), True
            self._left[self._out] = 0.0
            self._out = []

    def _take(self, token: int) -> tuple[float, float]:
        """Remove a token; its mass, and the mass of all others that are left."""
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
    """The first turns of draws without replacement; the draws are numbered by their nodes, `sizes` are the turns."""

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
