"""Drafting on a device ahead of the host begins with the rows of what a verdict kept, before the host has read it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from branchwise.backends.base import Scored, ScoredNodes, TargetInfo
from branchwise.core.sequence import SequenceState
from branchwise.core.tree import DraftTree
from branchwise.cuda.graphs import GraphedFunction
from branchwise.cuda.inputs import BATCHES, PinnedBuffer, fitting
from branchwise.draft.base import Budget
from branchwise.draft.head.following import Unread
from branchwise.draft.head.prompt import reads_at_once
from branchwise.draft.head.prompt_graphs import RecordedPrompts
from branchwise.draft.head.trees.device import HeadOnDevice
from branchwise.draft.head.trees.waiting import MOST, STEPS, Waiting
from branchwise.verify import Verdict, Verdicts

READY = 4096
"""cells of a text for which there is room from the first text on; in a window a text never takes more than at first"""


class Ends(NamedTuple):
    """Where trees grow: how many rows each text has, and its root, (batch,) both."""

    lengths: Tensor
    roots: Tensor


class Expected(NamedTuple):
    """A text as it is after the verdict behind which its next tree was made."""

    sequence: SequenceState
    seed: int
    """what its draws come from"""
    length: int
    root: int

    @classmethod
    def of(cls, sequence: SequenceState, gained: int, root: int | None = None) -> Expected:
        """After so many more tokens."""
        length = len(sequence.tokens) + gained
        return cls(sequence, sequence.rng_seed, length, sequence.root if root is None else root)


class CatchingUp(ABC):
    """Drafts of a head that follow each other on the device of its target."""

    draws: bool
    """whether its trees are drawn, and so must come from the states of their own texts"""

    def __init__(self, target: TargetInfo, head: HeadOnDevice, depth: int, cells: int) -> None:
        """The deepest tree has so many levels, and while it grows takes so many cells behind its text."""
        self._target, self._head, self._cache = target, head, head.cache
        config = head.head.config
        self._growing = cells + 1
        self._room = max(1 + depth + config.masks + 2 * cells, STEPS)
        """cells behind a text that this step and the one after it take"""
        self._crosses = bool(config.cross)
        if target.device.type != "cpu":  # what is recorded reads it where it lies
            most = config.window + 2 * self._cache.spare + self._room
            self._cache.hold(most if config.window else min(target.context, READY))
        self._buffers: dict[int, PinnedBuffer] = {}  # by the number of texts: slots, rows and roots
        self._uploaded: dict[int, list[int]] = {}
        """what they hold"""
        self._sequences: tuple[SequenceState, ...] = ()
        """texts of the pass that was made last, if their trees were made here"""
        self._expected: list[Expected] = []
        self._next: list[DraftTree] | None = None
        self._caught = False
        """whether the rows of the last verdict are written"""
        self._depth = 0
        """levels of the trees that are scored"""
        self._prompts: RecordedPrompts | None = None
        if self._records:
            own = head.head, head.cache, head.embeddings
            self._prompts = RecordedPrompts(*own, context=target.context, capture=target.execution.graphs)
        self._record()

    @property
    def _records(self) -> bool:
        """Whether what texts have unread is read by what is recorded."""
        return self._target.device.type != "cpu" and reads_at_once(self._head.head.config)

    def _record(self) -> None:
        self._cells = self._cache.scratch
        self._ends: dict[int, Ends] = {}
        """by the number of texts: a place for where their trees grow"""
        capture = self._target.execution.graphs
        self._catch_up = GraphedFunction(self._caught_up, self._target.device, capture=capture)
        self._waiting = Waiting(self._head, capture=capture) if self._records else None

    def _caught_up(
        self, slots: Tensor, lengths: Tensor, tokens: Tensor, paths: Tensor, following: Tensor, *hidden: Tensor
    ) -> Ends:
        rows = self._head.catch_up(slots, lengths, tokens, paths, following, *hidden)
        return self._at_their_place(len(slots), rows, following)

    def _at_their_place(self, texts: int, lengths: Tensor, roots: Tensor) -> Ends:
        """Where trees grow, always at the same place: drafts are recorded for it, whichever verdict came before."""
        if self._target.device.type == "cpu":
            return Ends(lengths, roots)
        if texts not in self._ends:
            kinds = torch.int32, torch.int64
            self._ends[texts] = Ends(*(torch.zeros(texts, dtype=kind, device=lengths.device) for kind in kinds))
        self._ends[texts].lengths.copy_(lengths)
        self._ends[texts].roots.copy_(roots)
        return self._ends[texts]

    # What a drafter asks

    def rests(self, batch: int) -> bool:
        """A step of so many texts begins; whether nothing is to be drafted in it, and nothing to be read for it."""
        return False

    def stands_aside(self, sequences: Sequence[SequenceState]) -> bool:
        """Whether nothing is to be drafted for these texts, because that does not pay."""
        return False

    def read(self, unread: Mapping[SequenceState, Unread]) -> list[SequenceState]:
        """Read what waits in texts where that is recorded; returns the texts of which there is more."""
        behind = {sequence: rows for sequence, rows in unread.items() if len(rows)}
        fresh = {sequence: rows for sequence, rows in behind.items() if not self._cache.lengths[sequence]}
        if fresh and self._prompts is not None:
            self._prompts.read(fresh)
        few = {sequence: rows for sequence, rows in behind.items() if self._waiting and 0 < len(rows) <= MOST}
        if few:
            self._hold(max(map(self._cache.held, few)) + self._room)
        if few and self._waiting is not None:
            self._waiting.read(few)
        return [sequence for sequence, rows in behind.items() if len(rows)]

    def begin(self) -> None:
        """Prompts are read, and what belongs to this step alone begins."""

    def rest(self, sequences: Sequence[SequenceState], *, read: bool = True) -> list[DraftTree]:
        """Roots alone; whether the prompts of these texts are `read`."""
        self._drop()
        self._depth, self._sequences = 0, tuple(sequences)
        return [DraftTree.root(sequence.root) for sequence in sequences]

    def leave(self) -> None:
        """The host drafts in this step, or somebody else: what was made for it is of no use."""
        self._drop()
        self._sequences = ()

    def _drop(self) -> None:
        """What was made behind the last verdict is of no use."""
        self._next = None
        self._expected, self._caught = [], False

    @abstractmethod
    def draft(self, sequences: Sequence[SequenceState], budgets: Sequence[Budget]) -> list[DraftTree] | None:
        """The next trees; texts have no unread rows. None if the host has to grow them."""

    @abstractmethod
    def draft_next(self, budgets: Sequence[Budget]) -> list[DraftTree] | None:
        """The trees that follow the last verdicts, if all is known of them that a pass needs."""

    @abstractmethod
    def update(self, scored: Scored, verdicts: Verdicts, hidden: Sequence[Tensor]) -> None:
        """Enqueue the rows of what a verdict kept, and the next trees."""

    def follow(self, sequences: Sequence[SequenceState], verdicts: Sequence[Verdict]) -> bool:
        """The host has read the verdict; whether its rows are written already, or will never be."""
        if self._caught:
            pairs = [*zip(sequences, verdicts, strict=True)]
            for sequence, verdict in pairs:
                self._cache.lengths[sequence] += len(verdict.path)
            self._expected = [Expected.of(sequence, len(verdict.path), verdict.token) for sequence, verdict in pairs]
        return self._caught

    def forget(self) -> None:
        """What drafts gained."""

    def reasons(self, batch: int) -> list[str]:
        return []

    # Rows and numbers

    def _foresaw(self, sequences: Sequence[SequenceState]) -> bool:
        return self._expected == [Expected.of(sequence, 0) for sequence in sequences]

    def _written(self, nodes: ScoredNodes, verdicts: Verdicts, hidden: Sequence[Tensor]) -> tuple[Tensor, Ends]:
        """Write the rows of what a verdict kept; slots of the texts, and where their next trees grow."""
        self._seat(self._sequences)
        slots = self._upload(len(nodes.slots), [[self._cache.slot[sequence]] for sequence in self._sequences])[:, 0]
        paths = verdicts.paths[:, : self._depth + 1]  # a recorded verdict has columns for longer ones
        ends = self._catch_up(slots, nodes.lengths, nodes.tokens, paths, verdicts.tokens, *hidden)
        self._caught = True
        return slots, ends

    def _begun(self, sequences: Sequence[SequenceState]) -> tuple[Tensor, Ends]:
        """The same of texts of which the host knows where their trees grow."""
        cache = self._cache
        size = fitting(len(sequences), BATCHES)
        rows = [[cache.slot[sequence], cache.lengths[sequence], sequence.root] for sequence in sequences]
        self._hold(max(map(cache.held, sequences)) + self._growing)
        self._seat(sequences)
        slots, lengths, roots = self._upload(size, rows).unbind(1)
        return slots, self._at_their_place(size, lengths, roots)

    def _seat(self, sequences: Sequence[SequenceState]) -> None:
        """Let a head that attends to the target's cache find these texts there."""
        if self._crosses:
            assert self._target.places is not None
            self._cache.seat(sequences, self._target.places(sequences))

    def _upload(self, size: int, rows: list[list[int]]) -> Tensor:
        """(size, 3): slots, rows and roots of so many texts, padded."""
        if size not in self._buffers:
            self._buffers[size] = PinnedBuffer(3 * size, self._target.device)
        buffer = self._buffers[size]
        padding = [[self._cache.padding, 0, 0]] * (size - len(rows))
        filled = [[*row, 0, 0][:3] for row in rows] + padding
        numbers = [number for row in zip(*filled, strict=True) for number in row]
        if self._uploaded.get(size) != numbers:
            self._uploaded.pop(size, None)  # after an interrupt nothing counts as uploaded
            buffer.host[: 3 * size] = numbers
            buffer.copy()
            self._uploaded[size] = numbers
        return buffer.device_copy[: 3 * size].view(3, size).T

    def _hold(self, cells: int) -> None:
        self._cache.hold(cells)
        if self._cells != self._cache.scratch:
            self._record()  # the cache lies elsewhere now
