"""Drafting on a device ahead of the host: the trees that follow a verdict are laid before the host has read it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from branchwise.backends.base import Scored, TargetInfo
from branchwise.core.sequence import SequenceState
from branchwise.core.tree import DraftTree
from branchwise.cuda.graphs import GraphedFunction
from branchwise.cuda.inputs import BATCHES, PinnedBuffer, fitting
from branchwise.draft.base import Budget
from branchwise.draft.head.trees.device import DeviceDraft
from branchwise.verify import Verdict, Verdicts


class Ahead:
    """Drafts of a head that follow each other on the device of its target."""

    def __init__(self, draft: DeviceDraft, target: TargetInfo) -> None:
        self._draft, self._cache, self._target = draft, draft.cache, target
        self._buffers: dict[int, PinnedBuffer] = {}  # by the number of texts: slots, rows and roots
        self._uploaded: dict[int, list[int]] = {}
        """what they hold"""
        self._laid: dict[int, tuple[Tensor, ...]] = {}
        """by the number of texts: their trees, as the draft lays them"""
        self._sequences: tuple[SequenceState, ...] = ()
        """texts of the pass that was made last"""
        self._found: tuple[Tensor, ...] | None = None
        """whole trees below the tokens of the last verdicts"""
        self._expected: list[tuple[SequenceState, int]] = []
        self._next: list[DraftTree] | None = None
        self._caught = False
        """whether the rows of the last verdict are written"""
        self._record()

    def _record(self) -> None:
        capture, device = self._target.execution.graphs, self._target.device
        self._cells = self._cache.scratch
        self._grow = GraphedFunction(self._in_place(self._draft.grow), device, capture=capture)
        self._go_on = GraphedFunction(self._in_place(self._draft.go_on), device, capture=capture)

    def _in_place(self, function: Callable[..., tuple[Tensor, ...]]) -> Callable[..., tuple[Tensor, ...]]:
        """A function that lays trees always at the same place. What reads them is recorded for a place, and what a
        verdict writes is in turn where the next trees come from."""

        if self._target.device.type == "cpu":
            return function  # where nothing is recorded, and trees may be as large as they like

        def laid(slots: Tensor, *places: Tensor) -> tuple[Tensor, ...]:
            found = function(slots, *places)
            if len(slots) not in self._laid:
                self._laid[len(slots)] = tuple(map(torch.empty_like, found))
            for place, part in zip(self._laid[len(slots)], found, strict=True):
                place.copy_(part)
            return self._laid[len(slots)]

        return laid

    def draft(self, sequences: Sequence[SequenceState], budgets: Sequence[Budget]) -> list[DraftTree]:
        """The next trees; texts have no unread rows."""
        wanted = [(sequence, sequence.root) for sequence in sequences]
        expected = wanted == self._expected
        trees, self._next = self._next if expected else None, None
        if trees is None:
            found, self._found = self._found if expected else None, None
            trees = self._draft.trees(self._grown(sequences) if found is None else found, budgets)
        self._sequences = tuple(sequences)
        longest = max(self._cache.lengths[sequence] for sequence in sequences)
        self._hold(longest + 1 + self._draft.depth + 2 * self._draft.cells)  # of this step and of the one after it
        self._draft.drafted(trees)
        return trees

    def rests(self, batch: int) -> bool:
        """A step of so many texts begins; whether nothing is to be drafted in it."""
        return self._draft.rests(batch)

    def begin(self) -> None:
        self._draft.begin()

    def rest(self, sequences: Sequence[SequenceState]) -> list[DraftTree]:
        """Roots alone."""
        self._expected = []
        trees = [DraftTree.root(sequence.root) for sequence in sequences]
        self._draft.drafted(trees)
        return trees

    def draft_next(self, budgets: Sequence[Budget]) -> list[DraftTree] | None:
        if self._found is None or min(budget.depth for budget in budgets) < self._draft.depth:
            return None
        self._next, self._found = self._draft.trees(self._found, budgets), None
        return self._next

    def update(self, scored: Scored, verdicts: Verdicts, hidden: Sequence[Tensor]) -> None:
        """Enqueue the rows of what a verdict kept, and the next trees."""
        self._found = self._next = None
        self._expected, self._caught = [], False
        nodes = scored.nodes
        if nodes is None:
            return  # a pass that was not recorded: its rows are read by the host's way
        slots = self._upload(len(nodes.slots), [[self._cache.slot[sequence]] for sequence in self._sequences])[:, 0]
        paths = verdicts.paths[:, : self._draft.depth + 1]  # a recorded verdict has columns for longer ones
        self._found = self._go_on(slots, nodes.lengths, nodes.tokens, paths, verdicts.tokens, *hidden)
        self._caught = True

    def follow(self, sequences: Sequence[SequenceState], verdicts: Sequence[Verdict]) -> bool:
        """The host has read the verdict; whether its rows are written already."""
        self._draft.scored(verdicts)
        if self._caught:
            for sequence, verdict in zip(sequences, verdicts, strict=True):
                self._cache.lengths[sequence] += len(verdict.path)
            self._expected = [(sequence, verdict.token) for sequence, verdict in zip(sequences, verdicts, strict=True)]
        return self._caught

    def _grown(self, sequences: Sequence[SequenceState]) -> tuple[Tensor, ...]:
        """Whole trees below the roots of these texts."""
        cache = self._cache
        size = fitting(len(sequences), BATCHES)
        rows = [[cache.slot[sequence], cache.lengths[sequence], sequence.root] for sequence in sequences]
        self._hold(max(row[1] for row in rows) + self._draft.cells + 1)
        return self._grow(*self._upload(size, rows).unbind(1))

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
