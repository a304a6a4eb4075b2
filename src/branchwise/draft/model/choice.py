"""Choosing the next tokens of paths where their logits are: warped, drawn and recorded as q without the host."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from branchwise.core.rng import race
from branchwise.cuda.compiled import compiled_or_not, traced
from branchwise.draft.model.reading import BatchReading


class Choice:
    """The next tokens of `count` paths of every text, and the distributions that they come from."""

    def __init__(self, reading: BatchReading, count: int, *, greedy: bool, drawn: bool, compile: bool = False) -> None:
        """Whether there are `greedy` texts, and whether tokens of others are `drawn`. `compile` fuses it, once for
        every shape."""
        self.reading = reading
        self._count, self._greedy, self._drawn, self._compile = count, greedy, drawn, compile
        self._programs: dict[tuple[bool, torch.Size], Any] = {}

    def __call__(
        self, logits: Tensor, first: Tensor, keys: Tensor, greedy: Tensor, *, apart: bool
    ) -> tuple[Tensor, Tensor]:
        """Tokens (batch, paths), and distributions (batch, nodes, vocabulary) of logits (batch, nodes, columns): one
        node for all paths, or a node for each. A path draws, by its key (batch, paths), from the distribution of the
        `first` path (batch, paths) that has come the same way; which texts are `greedy` (batch,) is a number. All paths
        take the same token unless they go `apart`."""
        given = logits, first, keys, greedy
        if not self._compile:
            return self._choose(*given, apart=apart)
        shape = apart, logits.shape
        if shape not in self._programs:
            program = partial(self._choose, apart=apart)
            self._programs[shape] = compiled_or_not(traced(program, given), given, "The draws of a draft model run")
        tokens, probs = self._programs[shape](*given)
        return tokens, probs

    def _choose(
        self, logits: Tensor, first: Tensor, keys: Tensor, greedy: Tensor, *, apart: bool
    ) -> tuple[Tensor, Tensor]:
        probs = self.reading(logits)
        if not self._greedy:
            return self._race(probs, first, keys), probs
        best = self._best(probs, first, apart=apart)
        return torch.where(greedy[:, None] > 0, best, self._race(probs, first, keys)) if self._drawn else best, probs

    def _race(self, probs: Tensor, first: Tensor, keys: Tensor) -> Tensor:
        if self._count == 1:
            return race(probs[:, 0], keys[:, 0])[:, None]
        rows = torch.arange(len(probs), device=probs.device)[:, None] * probs.shape[1] + first
        return race(probs.flatten(0, 1), keys.flatten(), rows.flatten()).view_as(first)

    def _best(self, probs: Tensor, first: Tensor, *, apart: bool) -> Tensor:
        """The paths of a node take its best tokens in turn, and the best if there are no more."""
        if self._count == 1:
            return probs.argmax(dim=-1)
        masses, tokens = probs.topk(min(self._count, probs.shape[2]), dim=-1)
        path = torch.arange(self._count, device=probs.device)
        earlier = (first[:, :, None] == first[:, None, :]) & (path < path[:, None])
        turn = earlier.sum(dim=2) if apart else torch.zeros_like(first)
        turn = torch.where(turn < tokens.shape[2], turn, 0)
        texts = torch.arange(len(probs), device=probs.device)[:, None]
        return torch.where(masses[texts, first, turn] > 0, tokens[texts, first, turn], tokens[texts, first, 0])
