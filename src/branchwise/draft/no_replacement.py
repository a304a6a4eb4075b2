"""A distribution that tokens are drawn from one at a time, none of them twice."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from branchwise.core.rows import row_sum
from branchwise.draft.sampler import DraftSampler, SampleRequest, lies_on_host
from branchwise.draft.sparse import Probs, ProbsBatch

FIRST_TURNS = 4
"""tokens below a node that are drawn beforehand where nobody knows how many it will have"""


class Drawn(NamedTuple):
    token: int
    share: float
    """how probable it was among the tokens that were left"""
    rest: float
    """the share of all others; 0 after the last"""


class NoReplacementSampler:
    """What is left of a distribution. The distribution itself stays as it is: it is the q that a verifier asks for."""

    def __init__(self, probs: Probs, node: int, told: list[float] | None = None) -> None:
        """The distribution below a node; `told` is what `Sampler.openings` says of it."""
        self._left = probs
        self._node = node
        self._turn = 0
        self._own = False
        self._told = [] if told is None else told[1:]
        self._out: list[int] = []  # tokens that are still to be taken out of what is left
        self.mass = told[0] if told else float(row_sum(probs)) if isinstance(probs, Tensor) else probs.mass
        """of all tokens that are left: a sum over them, since 1 minus the others would be mostly rounding"""

    def draw(self, sampler: DraftSampler, number: int) -> Drawn:
        """Take a token out; `number` tells this draw from the others of the tree."""
        before = self.mass
        if self._told:
            first, taken, self.mass, *self._told = self._told
            token = int(first)
            self._out.append(token)
        else:
            self._take_out()
            token = sampler.next_of(self._left, self._node, self._turn, number)
            taken, self.mass = self._take(token)
        self._turn += 1
        return Drawn(token, taken / before, self.mass / before)

    def _take_out(self) -> None:
        """What was told beforehand is over: from here on draws are made from what it left."""
        if self._out:
            assert isinstance(self._left, Tensor), "only distributions on a device are drawn from beforehand"
            self._left, self._own = self._left.clone(), True
            self._left[self._out] = 0.0
            self._out = []

    def _take(self, token: int) -> tuple[float, float]:
        """The mass of a token that is taken out, and that of all others that are left."""
        if not isinstance(self._left, Tensor):
            taken, self._left = self._left[token], self._left.without(token)
            return taken, self._left.mass
        if not self._own:
            self._left, self._own = self._left.clone(), True
        mass = self._left[token].to(torch.float64, copy=True)
        self._left[token] = 0.0
        one, others = torch.stack([mass, row_sum(self._left)]).tolist()  # one look at a device
        return one, others


class Opening(SampleRequest):
    """The first turns of urns, as many as `sizes` says, below the nodes that the draws are numbered by."""

    def alone(self) -> list[Any]:
        assert isinstance(self.probs, Tensor), "distributions of few tokens are drawn from where they are"
        return self.sampler.openings(self.probs, max(self.sizes or (0,)), self.numbers)


def no_replacement_samplers(
    probs: ProbsBatch, nodes: Sequence[int], sampler: DraftSampler, turns: int
) -> Generator[SampleRequest, Any, dict[int, NoReplacementSampler]]:
    """Urns with the distributions below these nodes. On a device the first turns of all are drawn in one go, for all
    texts of a batch; nobody looks at a token before its turn has come."""
    if not isinstance(probs, Tensor) or lies_on_host(probs):
        return {node: NoReplacementSampler(row, node) for node, row in zip(nodes, probs, strict=True)}
    told = yield Opening(sampler, probs, list(enumerate(nodes)), [turns] * len(nodes))
    return {node: NoReplacementSampler(row, node, opened) for node, row, opened in zip(nodes, probs, told, strict=True)}
