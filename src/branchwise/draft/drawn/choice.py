"""Choosing tokens on the device of their logits: warped and drawn without the host, with the noise of the host."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from branchwise.core.rng import race, race_on
from branchwise.core.rows import BLOCK, filled_blocks
from branchwise.cuda.compiled import compiled_or_not, traced
from branchwise.draft.drawn.trees import draw_keys
from branchwise.draft.model.reading import BatchReading


class Choice(ABC):
    """Chooses tokens for a batch of texts, and returns the distributions that they were drawn from too."""

    def __init__(self, reading: BatchReading, *, greedy: bool, drawn: bool, compile: bool = False) -> None:
        """`greedy`: some texts are greedy; `drawn`: some texts draw their tokens. `compile` fuses the operations, once
        for every shape."""
        self.reading = reading
        self._greedy, self._drawn, self._compile = greedy, drawn, compile
        self._programs: dict[Any, Any] = {}

    def __call__(self, *given: Tensor, **options: int) -> tuple[Tensor, Tensor]:
        """Tokens, and distributions (batch, nodes, vocabulary). The first argument is the logits (batch, nodes,
        columns); a program is compiled for each value of `options`."""
        kind = tuple(options.values()), given[0].shape
        tokens, probs = self._run(kind, partial(self._choose, **options), given)
        return tokens, probs

    def keys(self, stream: int, draws: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
        """As `draw_keys`, which is some sixty launches if it is not fused; zeros if no text draws."""
        if not self._drawn:
            return torch.zeros(len(seeds), len(draws), dtype=torch.int64, device=seeds.device)
        kind = stream, draws.shape, seeds.shape
        found: Tensor = self._run(kind, partial(draw_keys, stream), (draws, seeds, positions))
        return found

    def _run(self, kind: Any, program: Callable[..., Any], given: Sequence[Tensor]) -> Any:
        """The result of a program, compiled once for each `kind` of its arguments."""
        if not self._compile:
            return program(*given)
        if kind not in self._programs:
            self._programs[kind] = compiled_or_not(traced(program, given), given, "The draws of a draft run")
        return self._programs[kind](*given)

    @abstractmethod
    def _choose(self, *given: Any, **options: Any) -> tuple[Tensor, Tensor]: ...


class Picks(Choice):
    """Chooses the next tokens of `count` paths of every text."""

    def __init__(self, reading: BatchReading, count: int, **how: bool) -> None:
        super().__init__(reading, **how)
        self._count = count

    def _choose(
        self, logits: Tensor, first: Tensor, keys: Tensor, greedy: Tensor, *, apart: bool
    ) -> tuple[Tensor, Tensor]:
        """Tokens (batch, paths), given logits after one node for all paths, or after one node for each path. A path
        draws, with its key (batch, paths), from the distribution of the `first` path (batch, paths) with the same
        tokens so far. `greedy` (batch,) is above 0 for a greedy text. The paths of a greedy text all take the same
        token unless they go `apart`."""
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
        """The paths of one node take its best tokens in turn, and the very best if no more tokens are left."""
        masses, tokens = largest(probs, min(self._count, probs.shape[2]))
        if self._count == 1:
            return tokens[..., 0]
        path = torch.arange(self._count, device=probs.device)
        earlier = (first[:, :, None] == first[:, None, :]) & (path < path[:, None])
        turn = earlier.sum(dim=2) if apart else torch.zeros_like(first)
        turn = torch.where(turn < tokens.shape[2], turn, 0)
        texts = torch.arange(len(probs), device=probs.device)[:, None]
        return torch.where(masses[texts, first, turn] > 0, tokens[texts, first, turn], tokens[texts, first, 0])


class Orders(Choice):
    """Chooses several different tokens after each node; -1 if a distribution has no more tokens."""

    def _choose(self, logits: Tensor, keys: Tensor, greedy: Tensor, *, width: int) -> tuple[Tensor, Tensor]:
        """Tokens (batch, nodes, width), drawn one after the other with the key of their node (batch, nodes), or for a
        greedy text the most probable ones first."""
        probs = self.reading(logits)
        if not self._greedy:
            return self._race_on(probs, keys, width), probs
        best = self._best(probs, width)
        if not self._drawn:
            return best, probs
        return torch.where(greedy[:, None, None] > 0, best, self._race_on(probs, keys, width)), probs

    def _race_on(self, probs: Tensor, keys: Tensor, width: int) -> Tensor:
        return race_on(probs.flatten(0, 1), keys.flatten(), width).view(*keys.shape, width)

    def _best(self, probs: Tensor, width: int) -> Tensor:
        masses, tokens = largest(probs, min(width, probs.shape[2]))
        return functional.pad(torch.where(masses > 0, tokens, -1), (0, width - tokens.shape[2]), value=-1)


def largest(probs: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """(…, count) twice: the largest numbers of rows (…, vocabulary) and their places. If `count` is 1, the first of
    equal numbers is taken."""
    if probs.device.type == "cpu" or probs.shape[-1] <= count * BLOCK:
        return _ordered(probs, count)
    return largest_by_blocks(probs, count)


def largest_by_blocks(probs: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """As `largest`, for a device, where one program would read a whole row: the largest numbers are in the blocks with
    the largest maxima."""
    blocks = filled_blocks(probs, -torch.inf)
    _, chosen = _ordered(blocks.amax(dim=-1), count)
    index = chosen[..., None].expand(*chosen.shape, BLOCK)
    masses, places = _ordered(blocks.gather(-2, index).flatten(-2), count)
    return masses, chosen.gather(-1, places // BLOCK) * BLOCK + places % BLOCK


def _ordered(rows: Tensor, count: int) -> tuple[Tensor, Tensor]:
    if count > 1:
        masses, places = rows.topk(count, dim=-1)
        return masses, places
    place = rows.argmax(dim=-1, keepdim=True)
    return rows.gather(-1, place), place
