"""Passes of a draft model as functions of tensors: from the tokens that a text has gained to the nodes below its end.

Nothing here asks the host, so all levels of a tree can be recorded as one CUDA graph behind the verdict. One pass
writes the rows of the accepted tokens and of the new root, whatever was written of them before; then every level is one
pass over its nodes that have children. Where rows lie never depends on what was drawn.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from branchwise.core.rng import GAMMA, mix
from branchwise.core.rows import WORD, pack_bits, words_for
from branchwise.core.sequence import SequenceState
from branchwise.core.tree import DraftTree
from branchwise.cuda.inputs import PassTensors
from branchwise.draft.base import Budget
from branchwise.draft.model.reading import BatchReading

Choose = Callable[..., tuple[Tensor, Tensor]]
"""tokens and distributions of logits (batch, nodes, columns); what else it is given is between it and its trees"""
Run = Callable[[PassTensors], Tensor]
"""a pass of the draft model: logits (batch, nodes, columns of its head)"""


class Texts(NamedTuple):
    """Texts in the slots of a draft model, and what their draws depend on; (batch,) each."""

    slots: Tensor
    """-1 for a text that is padding"""
    seeds: Tensor
    greedy: Tensor
    """1 for a text that takes the most probable tokens"""


class Drawn(NamedTuple):
    """Trees below the roots of texts."""

    tokens: Tensor
    """(batch, nodes) int64: what passes and verifiers read, root first"""
    told: Tensor
    """(batch, …) int64: what the host has to know of them"""
    q: Tensor
    """(batch, nodes with children, vocabulary) float32; nothing where nothing is drawn"""


class Level(NamedTuple):
    """Where nodes of a pass stand behind the rows of their text."""

    first: int
    """the row of the first of them"""
    depths: Tensor
    """(nodes,): 0 comes right after the text"""
    columns: Tensor
    """(rows,): the depths of all rows behind the text, theirs included"""
    seen: Tensor
    """(nodes, rows): which of these each of them attends to"""


class TreeDraft(ABC):
    """Trees of a policy, drawn where the logits are."""

    depth: int
    """levels"""
    below: int
    """rows behind a text and its root that are written"""
    resident: bool
    """whether the host knows the shape of its trees before it knows what was drawn"""
    tells: bool = False
    """whether trees may fail, which the host has to be told"""

    def __init__(self, levels: Sequence[Level], own: int, device: torch.device) -> None:
        """Levels that are passed over; `own` is the size of the draft model's vocabulary, which reads no other tokens
        of the target."""
        line = torch.arange(self.steps)
        self._levels = [Level(0, line, line, line[:, None] >= line), *levels]  # what a text has gained is a chain
        self._own, self.device = own, device
        self._laid: dict[tuple[int, int], tuple[Tensor, Tensor, Tensor]] = {}

    @property
    def steps(self) -> int:
        """Tokens that a text gains at most from one verdict."""
        return self.depth + 1

    @property
    def rows(self) -> int:
        """Rows behind what is written of a text that are about to be written."""
        return self.steps + self.below

    @abstractmethod
    def serves(self, budgets: Sequence[Budget]) -> bool:
        """Whether its trees are as large as these budgets allow."""

    @abstractmethod
    def whole(self, budgets: Sequence[Budget]) -> bool:
        """Whether trees within these budgets need not be cut."""

    @abstractmethod
    def place(self, size: int, vocabulary: int) -> Drawn:
        """Where the trees of so many texts are written."""

    @abstractmethod
    def choice(self, reading: BatchReading, *, greedy: bool, drawn: bool, compile: bool) -> Choose:
        """How tokens are chosen."""

    @abstractmethod
    def grow(self, run: Run, choose: Choose, place: Drawn, texts: Texts, gained: Tensor) -> Drawn:
        """Draw trees below the ends of texts, given what these have `gained` (see `gain`), and write them to their
        `place`."""

    @abstractmethod
    def trees(self, found: Drawn, sequences: Sequence[SequenceState], budgets: Sequence[Budget]) -> list[DraftTree]:
        """What was drawn, within budgets; there may be fewer budgets than rows."""

    def fails(self, told: Sequence[int], budgets: Sequence[Budget]) -> bool:
        """Whether the host has to grow trees within these budgets."""
        return False

    # Passes

    def _catch_up(self, run: Run, texts: Texts, gained: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The rows of texts with what they have gained, their roots (batch,), and what follows these (batch, 1,
        columns)."""
        written, counts, ahead = gained[0].int(), gained[1].int(), gained[2:].T
        last = (counts - 1).clamp_min(0)
        # What pads these tokens is written behind them, where nobody reads it, at positions that there are.
        line = torch.arange(self.steps, dtype=torch.int32, device=ahead.device)
        positions = written[:, None] + torch.minimum(line, last[:, None])
        logits = self._pass(run, texts, written, ahead, 0, positions)
        every, place = torch.arange(len(ahead), device=ahead.device), last.long()
        return written + counts, ahead[every, place], logits[every, place][:, None]

    def _pass(
        self, run: Run, texts: Texts, lengths: Tensor, tokens: Tensor, number: int, positions: Tensor | None = None
    ) -> Tensor:
        """What follows tokens (batch, nodes) of a level, of texts with so many rows (batch,) int32."""
        depths, key_depths, bits = self._on_device(len(tokens), number)
        starts = lengths + self._levels[number].first if self._levels[number].first else lengths
        positions = lengths[:, None] + depths if positions is None else positions
        known = torch.where(tokens < self._own, tokens.clamp_min(0), 0).int().contiguous()
        return run(PassTensors(known, positions, depths, texts.slots.int(), lengths, starts, key_depths, bits))

    def _on_device(self, batch: int, number: int) -> tuple[Tensor, Tensor, Tensor]:
        """A level for so many texts. A recorded pass reads it, so it stays."""
        if (batch, number) not in self._laid:
            _, depths, columns, seen = self._levels[number]
            padded = functional.pad(columns, (0, WORD * words_for(len(columns)) - len(columns)))
            first, second, third = (
                part.int().expand(batch, *part.shape).contiguous().to(self.device)
                for part in (depths, padded, pack_bits(seen))
            )
            self._laid[batch, number] = first, second, third
        return self._laid[batch, number]


def draw_keys(stream: int, draws: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    """(batch, draws): the keys of numbered draws (draws,) for texts with these seeds and positions of the root, as
    `SeededSampler` makes them."""
    return mix(mix(mix(seeds)[:, None] + (stream + draws)) + (positions * GAMMA)[:, None])


def gain(gained: Tensor, lengths: Tensor, tokens: Tensor, paths: Tensor, following: Tensor) -> None:
    """Write what texts gain by verdicts, (2 + steps, batch): how many rows of each a draft model has written, how many
    tokens it has gained, and these tokens.

    The texts had so many tokens (batch,) before the roots of their trees, whose nodes have these tokens (batch, nodes);
    the paths (batch, steps or less), padded with -1, were accepted, and one more token (batch,) follows each."""
    steps = len(gained) - 2
    paths = functional.pad(paths, (0, steps - paths.shape[1]), value=-1)  # those of trees that were cut
    last = functional.pad(paths[:, 1:] < 0, (0, 1), value=True)
    below = functional.pad(tokens.long().gather(1, paths.clamp_min(0)[:, 1:]), (0, 1))
    gained[0] = lengths + 1  # and the root
    gained[1] = (paths >= 0).sum(dim=1)
    gained[2:] = torch.where(last, following[:, None], below).T
