"""What a head knows of a text that it follows."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from branchwise.core.sampling import SamplingParams


class Unread:
    """Hidden states of tokens whose rows are not in the cache of the head yet, (rows, taps, width), in their order.

    A head that stands aside leaves those of a whole prompt here, and those of every step since, so they are joined when
    they are read and not before.
    """

    def __init__(self, states: Tensor) -> None:
        self._parts = [states]
        self._rows = len(states)

    def __len__(self) -> int:
        return self._rows

    def add(self, states: Tensor) -> None:
        self._parts.append(states)
        self._rows += len(states)

    def first(self, rows: int) -> Tensor:
        """The states of so many tokens at most."""
        self._parts = [torch.cat(self._parts)] if len(self._parts) > 1 else self._parts
        return self._parts[0][:rows]

    def drop(self, rows: int) -> None:
        """So many were read. What is left is usually nothing, and must not hold the memory of a prompt."""
        self._keep(self.first(self._rows)[rows:].clone())

    def cut(self, rows: int) -> None:
        """Forget what is behind the first of them."""
        if rows < self._rows:
            self._keep(self.first(rows))

    def _keep(self, states: Tensor) -> None:
        self._parts, self._rows = [states], len(states)


@dataclass(eq=False)
class Following:
    """The state of one text."""

    unread: Unread
    extra: int
    """how many tokens of the prompt are not in the table and can be proposed in this text too"""
    root: int = 0
    """the place of the row whose prediction is after the root"""
    carried: dict[int, Tensor] = field(default_factory=dict)
    """node of the growing tree -> what its row carried on, (width,)"""
    cells: dict[int, int] = field(default_factory=dict)
    """node -> its cell in the cache"""
    ahead: Tensor | None = None
    """(depths, width): what a parallel head predicted for the levels below the root"""


def draft_params(sampling: SamplingParams, temperature: float | None) -> SamplingParams:
    """How tokens are drafted for a text, by default as it chooses its own; for a greedy text no token is cut."""
    greedy = sampling.temperature == 0
    return SamplingParams(
        temperature=temperature or sampling.temperature or 1.0,
        top_k=0 if greedy else sampling.top_k,
        top_p=1.0 if greedy else sampling.top_p,
        min_p=0.0 if greedy else sampling.min_p,
        logit_bias=sampling.logit_bias,
    )
