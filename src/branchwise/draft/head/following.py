"""What a head knows about a text that it drafts for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from branchwise.core.sampling import SamplingParams
from branchwise.core.sequence import SequenceState


class Unread:
    """Hidden states (rows, taps, width) of the tokens whose rows are not in the cache of the head yet, in their order.

    While a head does not draft, the states of a whole prompt and of every step since collect here. So they are
    extracted from their batches and joined only when they are read.
    """

    def __init__(self, states: Tensor, hidden: Sequence[Tensor] = ()) -> None:
        """`states`, and after them those of a prompt, `hidden`, (rows, width) for each tap."""
        self._states, self._hidden = states, hidden
        self._steps: list[tuple[Tensor, int, int]] = []
        """states of whole batches, each with the start and end of this text's rows"""
        self._rows = len(states) + (len(hidden[0]) if hidden else 0)

    @classmethod
    def of_prompt(cls, hidden: Sequence[Tensor], rows: int, device: torch.device) -> Unread:
        """The unread states of a prompt, which are not copied: many prompts start one after the other, and are read
        together."""
        if not hidden:
            return cls(stacked(hidden, rows, device))
        return cls(hidden[0].new_empty(0, len(hidden), hidden[0].shape[1]), hidden)

    @staticmethod
    def settle(texts: Sequence[Unread]) -> None:
        """Copy states that may stay unread for long: they are views of the results of passes over many prompts, which
        take more memory."""
        for text in texts:
            if text._hidden:
                text.first(0)

    def __len__(self) -> int:
        return self._rows

    def add(self, states: Tensor, start: int, end: int) -> None:
        """Add the rows from `start` to before `end` of states (rows, taps, width)."""
        self._steps.append((states, start, end))
        self._rows += end - start

    def first(self, rows: int) -> Tensor:
        """The first states, at most `rows`."""
        parts = [self._states] if len(self._states) else []
        parts += [torch.stack(list(self._hidden), dim=1)] if self._hidden else []
        parts += [states[start:end] for states, start, end in self._steps]
        if parts:
            self._keep(parts[0] if len(parts) == 1 else torch.cat(parts))
        return self._states[:rows]

    def by_tap(self, rows: int) -> Sequence[Tensor]:
        """The first states for each tap, at most (rows, width); those of a prompt without a copy."""
        as_they_are = self._hidden and not self._steps and not len(self._states)
        return [part[:rows] for part in self._hidden] if as_they_are else self.first(rows).unbind(1)

    def drop(self, rows: int) -> None:
        """Drop the first `rows` states, which were read. Usually none are left; the rest is copied, so that it does not
        keep the memory of a whole prompt."""
        whole = rows >= self._rows
        self._keep(
            self._states.new_empty(0, *self._states.shape[1:]) if whole else self.first(self._rows)[rows:].clone()
        )

    def cut(self, rows: int) -> None:
        """Keep the first `rows` states only."""
        if rows < self._rows:
            self._keep(self.first(rows))

    def _keep(self, states: Tensor) -> None:
        self._states, self._hidden, self._steps, self._rows = states, (), [], len(states)


def stacked(hidden: Sequence[Tensor], rows: int, device: torch.device) -> Tensor:
    """(rows, taps, width): the states (rows, width) of all taps; (rows, 0, 0) for a head that taps none."""
    return torch.stack(list(hidden), dim=1) if hidden else torch.zeros(rows, 0, 0, device=device)


def along(paths: Tensor, states: Tensor) -> Tensor:
    """(batch, steps, width): the states (batch, nodes, width) of the nodes on `paths` (batch, steps), which are padded
    with -1."""
    return states.gather(1, paths.clamp_min(0)[..., None].expand(-1, -1, states.shape[-1]))


def packed(hidden: Sequence[Tensor], paths: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """(rows, taps, width): the states on the paths of all texts, one text after the other, if the host knows the
    paths."""
    places = [(row, node) for row, path in enumerate(paths) for node in path]
    rows, nodes = torch.tensor(places).to(device, non_blocking=True).unbind(1)
    return stacked([states[rows, nodes] for states in hidden], len(places), device)


@dataclass(eq=False)
class Following:
    """What a drafter with a head knows about one text."""

    unread: Unread
    extra: Sequence[int] = ()
    """tokens of the prompt that are not in the table, and can be proposed in this text too"""
    proposed: bool = False
    """whether the extra tokens are in the cache"""
    whole: bool = True
    """whether in every step the states of all tokens before the root were available"""
    root: int = 0
    """the position of the row that predicts the tokens after the root"""
    carried: dict[int, Tensor] = field(default_factory=dict)
    """node of the growing tree -> what its row carried on, (width,)"""
    cells: dict[int, int] = field(default_factory=dict)
    """node of the growing tree -> its cell in the cache"""

    def propose(self) -> Sequence[int]:
        """The extra tokens, which the caller puts into the cache."""
        self.proposed = True
        return self.extra

    def misses_nothing(self, sequence: SequenceState, lengths: dict[SequenceState, int]) -> bool:
        """Whether the states of all tokens before the root were read or can be read; `lengths` are the rows that were
        read. States of a step that was interrupted before its tokens joined the text are forgotten here. If memory did
        not suffice to keep the states of a step, they are missing for good."""
        before = len(sequence.tokens) - 1
        lengths[sequence] = min(lengths[sequence], before)
        self.unread.cut(before - lengths[sequence])
        self.whole &= lengths[sequence] + len(self.unread) == before
        return self.whole


def draft_params(sampling: SamplingParams, temperature: float | None) -> SamplingParams:
    """The sampling parameters of the draft, by default those of the text without penalties; for a greedy text, no token
    is cut."""
    greedy = sampling.temperature == 0
    return SamplingParams(
        temperature=temperature or sampling.temperature or 1.0,
        top_k=0 if greedy else sampling.top_k,
        top_p=1.0 if greedy else sampling.top_p,
        min_p=0.0 if greedy else sampling.min_p,
        logit_bias=sampling.logit_bias,
    )
