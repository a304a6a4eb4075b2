"""From the logits of a draft model to the distributions that it draws from, over the target's vocabulary."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from branchwise.core.sampling import SamplingParams, Warp
from branchwise.cuda.graphs import PaddedGraphedFunction
from branchwise.draft.builder import drawable
from branchwise.draft.model.vocabulary import Vocabulary

MOST_READINGS = 8
"""most sampling parameters for which a reading is cached, the most recently used"""


class Reading:
    """Turns logits of a draft model into distributions over the target's vocabulary, for one kind of sampling."""

    def __init__(self, sampling: SamplingParams, vocabulary: Vocabulary, *, trimmed: bool) -> None:
        """`trimmed`: the head has columns for the tokens that can be proposed, and no others."""
        device = vocabulary.tokens.device
        self._vocabulary = vocabulary
        self._columns = columns_of(vocabulary, trimmed=trimmed)
        self._warp = Warp([sampling], len(vocabulary.tokens), device)
        self._warp.bring()
        self._replayed = PaddedGraphedFunction(self._probs, device) if not sampling.logit_bias else None

    def __call__(self, logits: Tensor) -> Tensor:
        """(nodes, the target's vocabulary), given logits (nodes, columns of the head)."""
        if self._replayed is None:
            return self._probs(logits)
        probs = self._replayed(logits)[: len(logits)]
        return probs.clone() if self._replayed.fixed else probs

    def _probs(self, logits: Tensor) -> Tensor:
        return read(self._warp, logits[None], self._vocabulary, self._columns)[0]


class Readings:
    """The readings of the last few kinds of sampling parameters."""

    def __init__(self, make: Callable[[SamplingParams], Reading]) -> None:
        self._make = make
        self._made: OrderedDict[object, Reading] = OrderedDict()

    def of(self, sampling: SamplingParams) -> Reading:
        bias = tuple(sampling.logit_bias.items())
        way = sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p, bias
        if way not in self._made:
            self._made[way] = self._make(sampling)
            if len(self._made) > MOST_READINGS:
                self._made.popitem(last=False)
        self._made.move_to_end(way)
        return self._made[way]


class BatchReading:
    """As `Reading`, for a batch of texts on a device, each with sampling parameters of its own: row b of logits is text
    b's.

    A recording with this reading is valid for all batches of the same `structure`, whose parameters it takes over with
    `assign`.
    """

    def __init__(self, samplings: Sequence[SamplingParams], vocabulary: Vocabulary, *, trimmed: bool) -> None:
        self._vocabulary = vocabulary
        self._columns = columns_of(vocabulary, trimmed=trimmed)
        self._warp = Warp(samplings, len(vocabulary.tokens), vocabulary.tokens.device)

    @property
    def structure(self) -> tuple[object, ...]:
        return self._warp.structure

    def bring(self) -> None:
        """Bring all parameters to the device, before operations are recorded."""
        self._warp.bring()

    def assign(self, other: BatchReading) -> None:
        self._warp.assign(other._warp)

    def __call__(self, logits: Tensor) -> Tensor:
        """(batch, nodes, the target's vocabulary): distributions to draw from, given logits (batch, nodes, columns of
        the head)."""
        return drawable(read(self._warp, logits, self._vocabulary, self._columns))


def columns_of(vocabulary: Vocabulary, *, trimmed: bool) -> Tensor | None:
    """The columns of the head that are read; None for all of them."""
    return None if trimmed or vocabulary.whole else vocabulary.columns


def read(warp: Warp, logits: Tensor, vocabulary: Vocabulary, columns: Tensor | None) -> Tensor:
    """(batch, nodes, the target's vocabulary): distributions, given logits (batch, nodes, columns of the head)."""
    if columns is not None:
        logits = logits[..., columns]
    probs = sound(warp(logits))
    return vocabulary.spread(probs.flatten(0, 1)).view(*probs.shape[:2], -1)


def sound(probs: Tensor) -> Tensor:
    """Distributions (…, tokens) in which a row that overflowed or has no mass becomes uniform: a verifier must divide
    by the probability of a drawn token."""
    masses = probs.sum(dim=-1, keepdim=True)
    good = masses.isfinite() & (masses > 0)
    if probs.device.type == "cpu" and bool(good.all()):
        return probs
    return torch.where(good, probs, 1 / probs.shape[-1])
