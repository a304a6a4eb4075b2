"""What a head knows of a text that it follows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from branchwise.core.sampling import SamplingParams
from branchwise.core.sequence import SequenceState


class Unread:
    """Hidden states of tokens whose rows are not in the cache of the head yet, (rows, taps, width), in their order.

    A head that stands aside leaves those of a whole prompt here, and those of every step since, so they are taken out
    of their steps and joined when they are read, and not before.
    """

    def __init__(self, states: Tensor) -> None:
        self._states = states
        self._steps: list[tuple[Tensor, int, int]] = []
        """states of whole batches, and where those of this text begin and end"""
        self._rows = len(states)

    def __len__(self) -> int:
        return self._rows

    def add(self, states: Tensor, start: int, end: int) -> None:
        """A part of (rows, taps, width)."""
        self._steps.append((states, start, end))
        self._rows += end - start

    def first(self, rows: int) -> Tensor:
        """The states of so many tokens at most."""
        if self._steps:
            self._states = torch.cat([self._states, *(states[start:end] for states, start, end in self._steps)])
            self._steps = []
        return self._states[:rows]

    def drop(self, rows: int) -> None:
        """So many were read. What is left is usually nothing, and must not hold the memory of a prompt."""
        self._keep(self.first(self._rows)[rows:].clone())

    def cut(self, rows: int) -> None:
        """Forget what is behind the first of them."""
        if rows < self._rows:
            self._keep(self.first(rows))

    def _keep(self, states: Tensor) -> None:
        self._states, self._steps, self._rows = states, [], len(states)


def stacked(hidden: Sequence[Tensor], rows: int, device: torch.device) -> Tensor:
    """(rows, taps, width) of states (rows, width) a tap; (rows, 0, 0) in a head that taps none."""
    return torch.stack(list(hidden), dim=1) if hidden else torch.zeros(rows, 0, 0, device=device)


def along(paths: Tensor, states: Tensor) -> Tensor:
    """(batch, steps, width): of states (batch, nodes, width) those on paths (batch, steps), which are padded with
    -1."""
    return states.gather(1, paths.clamp_min(0)[..., None].expand(-1, -1, states.shape[-1]))


def packed(hidden: Sequence[Tensor], paths: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """(rows, taps, width): the same of all texts one behind the other, where the host knows their paths."""
    places = [(row, node) for row, path in enumerate(paths) for node in path]
    rows, nodes = torch.tensor(places).to(device, non_blocking=True).unbind(1)
    return stacked([states[rows, nodes] for states in hidden], len(places), device)


@dataclass(eq=False)
class Following:
    """The state of one text."""

    unread: Unread
    extra: int = 0
    """how many tokens of the prompt are not in the table and can be proposed in this text too"""
    whole: bool = True
    """whether there were states of all tokens before the root in every step"""
    root: int = 0
    """the place of the row whose prediction is after the root"""
    carried: dict[int, Tensor] = field(default_factory=dict)
    """node of the growing tree -> what its row carried on, (width,)"""
    cells: dict[int, int] = field(default_factory=dict)
    """node -> its cell in the cache"""
    ahead: Tensor | None = None
    """(depths, width): what a parallel head predicted for the levels below the root"""

    def misses_nothing(self, sequence: SequenceState, lengths: dict[SequenceState, int]) -> bool:
        """Whether there are states of all tokens before the root, of which so many were read. States of a step that was
        interrupted before its tokens joined the text are forgotten; those of a step that there was no memory to learn
        from are missing for good."""
        before = len(sequence.tokens) - 1
        lengths[sequence] = min(lengths[sequence], before)
        self.unread.cut(before - lengths[sequence])
        self.whole &= lengths[sequence] + len(self.unread) == before
        return self.whole

    def foreseen(self, depths: Sequence[int]) -> Tensor:
        """(nodes, width): what a parallel head predicted for nodes at these depths."""
        assert self.ahead is not None
        return self.ahead[[min(depth, len(self.ahead)) - 1 for depth in depths]]


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
