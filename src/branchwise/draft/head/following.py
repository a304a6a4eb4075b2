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

    def __init__(self, states: Tensor, hidden: Sequence[Tensor] = ()) -> None:
        """Behind the states come those of a prompt, (rows, width) a tap."""
        self._states, self._hidden = states, hidden
        self._steps: list[tuple[Tensor, int, int]] = []
        """states of whole batches, and where those of this text begin and end"""
        self._rows = len(states) + (len(hidden[0]) if hidden else 0)

    @classmethod
    def of_prompt(cls, hidden: Sequence[Tensor], rows: int, device: torch.device) -> Unread:
        """Untouched: many prompts start one after the other, and are read together."""
        if not hidden:
            return cls(stacked(hidden, rows, device))
        return cls(hidden[0].new_empty(0, len(hidden), hidden[0].shape[1]), hidden)

    @staticmethod
    def settle(texts: Sequence[Unread]) -> None:
        """States of texts may stay unread for long, and are parts of what passes over many prompts found: copies take
        less memory."""
        for text in texts:
            if text._hidden:
                text.first(0)

    def __len__(self) -> int:
        return self._rows

    def add(self, states: Tensor, start: int, end: int) -> None:
        """A part of (rows, taps, width)."""
        self._steps.append((states, start, end))
        self._rows += end - start

    def first(self, rows: int) -> Tensor:
        """The states of so many tokens at most."""
        parts = [self._states] if len(self._states) else []
        parts += [torch.stack(list(self._hidden), dim=1)] if self._hidden else []
        parts += [states[start:end] for states, start, end in self._steps]
        if parts:
            self._keep(parts[0] if len(parts) == 1 else torch.cat(parts))
        return self._states[:rows]

    def by_tap(self, rows: int) -> Sequence[Tensor]:
        """The same, (rows, width) a tap: those of a prompt as they are."""
        as_they_are = self._hidden and not self._steps and not len(self._states)
        return [part[:rows] for part in self._hidden] if as_they_are else self.first(rows).unbind(1)

    def drop(self, rows: int) -> None:
        """So many were read. What is left is usually nothing, and must not hold the memory of a prompt."""
        whole = rows >= self._rows
        self._keep(
            self._states.new_empty(0, *self._states.shape[1:]) if whole else self.first(self._rows)[rows:].clone()
        )

    def cut(self, rows: int) -> None:
        """Forget what is behind the first of them."""
        if rows < self._rows:
            self._keep(self.first(rows))

    def _keep(self, states: Tensor) -> None:
        self._states, self._hidden, self._steps, self._rows = states, (), [], len(states)


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
    extra: Sequence[int] = ()
    """tokens of the prompt that are not in the table and can be proposed in this text too"""
    proposed: bool = False
    """whether they are in the cache"""
    whole: bool = True
    """whether there were states of all tokens before the root in every step"""
    root: int = 0
    """the place of the row whose prediction is after the root"""
    carried: dict[int, Tensor] = field(default_factory=dict)
    """node of the growing tree -> what its row carried on, (width,)"""
    cells: dict[int, int] = field(default_factory=dict)
    """node -> its cell in the cache"""

    def propose(self) -> Sequence[int]:
        """The tokens that are not in the table, to be put into the cache."""
        self.proposed = True
        return self.extra

    def misses_nothing(self, sequence: SequenceState, lengths: dict[SequenceState, int]) -> bool:
        """Whether there are states of all tokens before the root, of which so many were read. States of a step that was
        interrupted before its tokens joined the text are forgotten; those of a step that there was no memory to learn
        from are missing for good."""
        before = len(sequence.tokens) - 1
        lengths[sequence] = min(lengths[sequence], before)
        self.unread.cut(before - lengths[sequence])
        self.whole &= lengths[sequence] + len(self.unread) == before
        return self.whole


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
