"""The first part of drafting ahead of the host: writing the rows of the tokens that a verdict kept, on the device."""

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
"""most cells of a text that are allocated at the start, because recordings hold the address of the cache; in a window
texts never need more than the initial number"""


class Ends(NamedTuple):
    """The ends of texts, below which trees grow: their numbers of rows, and their roots, (batch,) both."""

    lengths: Tensor
    roots: Tensor


class Expected(NamedTuple):
    """The state of a text after a verdict, for which its next tree was made on the device."""

    sequence: SequenceState
    seed: int
    """seed of its draws"""
    length: int
    """number of its tokens"""
    root: int

    @classmethod
    def of(cls, sequence: SequenceState, gained: int, root: int | None = None) -> Expected:
        """The state after `gained` more tokens, the last of which is `root`; by default the root of now."""
        length = len(sequence.tokens) + gained
        return cls(sequence, sequence.rng_seed, length, sequence.root if root is None else root)


class CatchingUp(ABC):
    """Drafts the trees of one step after the other with a head, on the device of its target, ahead of the host."""

    draws: bool
    """whether its trees are drawn, so that they must come from the complete states of their texts"""

    def __init__(self, target: TargetInfo, head: HeadOnDevice, depth: int, cells: int) -> None:
        """The deepest tree has `depth` levels, and takes `cells` cells after its text while it grows."""
        self._target, self._head, self._cache = target, head, head.cache
        config = head.head.config
        self._growing = cells + 1
        self._room = max(1 + depth + config.masks + 2 * cells, STEPS)
        """number of cells after a text that this step and the next one take"""
        self._crosses = bool(config.cross)
        if target.device.type != "cpu":  # recordings hold the address of the cache
            most = config.window + 2 * self._cache.spare + self._room
            self._cache.hold(most if config.window else min(target.context, READY))
        self._buffers: dict[int, PinnedBuffer] = {}  # by the number of texts: slots, rows and roots
        self._uploaded: dict[int, list[int]] = {}
        """the numbers that each buffer holds on the device"""
        self._sequences: tuple[SequenceState, ...] = ()
        """texts of the target's last pass, if their trees were made here"""
        self._expected: list[Expected] = []
        """states of the texts that the next trees are made for"""
        self._next: list[DraftTree] | None = None
        """the next trees, once they are made"""
        self._caught = False
        """whether the rows of the last verdict are written"""
        self._depth = 0
        """number of levels of the trees that are scored"""
        self._prompts: RecordedPrompts | None = None
        if self._records:
            own = head.head, head.cache, head.embeddings
            self._prompts = RecordedPrompts(*own, context=target.context, capture=target.execution.graphs)
        self._record()

    @property
    def _records(self) -> bool:
        """Whether recorded passes read the unread states of texts."""
        return self._target.device.type != "cpu" and reads_at_once(self._head.head.config)

    def _record(self) -> None:
        self._cells = self._cache.scratch
        self._ends: dict[int, Ends] = {}
        """number of texts -> the tensors at a fixed address for their ends"""
        capture = self._target.execution.graphs
        self._catch_up = GraphedFunction(self._caught_up, self._target.device, capture=capture)
        self._waiting = Waiting(self._head, capture=capture) if self._records else None

    def _caught_up(
        self, slots: Tensor, lengths: Tensor, tokens: Tensor, paths: Tensor, following: Tensor, *hidden: Tensor
    ) -> Ends:
        rows = self._head.catch_up(slots, lengths, tokens, paths, following, *hidden)
        return self._at_their_place(len(slots), rows, following)

    def _at_their_place(self, texts: int, lengths: Tensor, roots: Tensor) -> Ends:
        """The ends of texts, copied to a fixed address: recorded drafts read them there, whichever verdict was
        before."""
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
        """Called when a step of `batch` texts begins; returns whether nothing is to be drafted in it, nor read."""
        return False

    def stands_aside(self, sequences: Sequence[SequenceState]) -> bool:
        """Whether nothing is to be drafted for these texts, because that does not pay."""
        return False

    def read(self, unread: Mapping[SequenceState, Unread]) -> list[SequenceState]:
        """Read the unread states of texts with recorded passes; returns the texts that still have unread states."""
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
        """Called when prompts are read, and the work of this step alone begins."""

    def rest(self, sequences: Sequence[SequenceState], *, read: bool = True) -> list[DraftTree]:
        """Roots alone. `read`: the prompts of these texts are read."""
        self._drop()
        self._depth, self._sequences = 0, tuple(sequences)
        return [DraftTree.root(sequence.root) for sequence in sequences]

    def leave(self) -> None:
        """Drop what was made for this step, because the host drafts in it, or another drafter."""
        self._drop()
        self._sequences = ()

    def _drop(self) -> None:
        """Drop what was made after the last verdict."""
        self._next = None
        self._expected, self._caught = [], False

    @abstractmethod
    def draft(self, sequences: Sequence[SequenceState], budgets: Sequence[Budget]) -> list[DraftTree] | None:
        """The next trees; None if the host must grow them. The texts must have no unread rows."""

    @abstractmethod
    def draft_next(self, budgets: Sequence[Budget]) -> list[DraftTree] | None:
        """The trees after the last verdicts, if everything that a pass needs of them is known without the host."""

    @abstractmethod
    def update(self, scored: Scored, verdicts: Verdicts, hidden: Sequence[Tensor]) -> None:
        """Enqueue writing the rows of the tokens that a verdict kept, and the next trees."""

    def follow(self, sequences: Sequence[SequenceState], verdicts: Sequence[Verdict]) -> bool:
        """Called when the host has read the verdict; returns whether its rows are written already, or never will be."""
        if self._caught:
            pairs = [*zip(sequences, verdicts, strict=True)]
            for sequence, verdict in pairs:
                self._cache.lengths[sequence] += len(verdict.path)
            self._expected = [Expected.of(sequence, len(verdict.path), verdict.token) for sequence, verdict in pairs]
        return self._caught

    def forget(self) -> None:
        """Forget how much drafts gained."""

    def reasons(self, batch: int) -> list[str]:
        return []

    # Rows and numbers

    def _foresaw(self, sequences: Sequence[SequenceState]) -> bool:
        return self._expected == [Expected.of(sequence, 0) for sequence in sequences]

    def _written(self, nodes: ScoredNodes, verdicts: Verdicts, hidden: Sequence[Tensor]) -> tuple[Tensor, Ends]:
        """Write the rows of the tokens that a verdict kept; returns the slots of the texts, and their new ends."""
        self._seat(self._sequences)
        slots = self._upload(len(nodes.slots), [[self._cache.slot[sequence]] for sequence in self._sequences])[:, 0]
        paths = verdicts.paths[:, : self._depth + 1]  # a recorded verdict has columns for longer ones
        ends = self._catch_up(slots, nodes.lengths, nodes.tokens, paths, verdicts.tokens, *hidden)
        self._caught = True
        return slots, ends

    def _begun(self, sequences: Sequence[SequenceState]) -> tuple[Tensor, Ends]:
        """The slots and ends of texts, which the host knows."""
        cache = self._cache
        size = fitting(len(sequences), BATCHES)
        rows = [[cache.slot[sequence], cache.lengths[sequence], sequence.root] for sequence in sequences]
        self._hold(max(map(cache.held, sequences)) + self._growing)
        self._seat(sequences)
        slots, lengths, roots = self._upload(size, rows).unbind(1)
        return slots, self._at_their_place(size, lengths, roots)

    def _seat(self, sequences: Sequence[SequenceState]) -> None:
        """Tell a head that attends to the target's cache the slots of these texts in it."""
        if self._crosses:
            assert self._target.places is not None
            self._cache.seat(sequences, self._target.places(sequences))

    def _upload(self, size: int, rows: list[list[int]]) -> Tensor:
        """(size, 3): slots, rows and roots of texts, padded to `size` texts."""
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
            self._record()  # the cache has another address now
