"""Drafting on a device ahead of the host: the trees that follow a verdict are laid before the host has read it.

There may be drafts of several sizes, of which a ladder chooses one for every step (`control.ladder`). It looks at steps
that are over, and chooses before the verdict of the present one is known.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from branchwise.backends.base import Scored, TargetInfo
from branchwise.control.ladder import Ladder
from branchwise.core.sequence import SequenceState
from branchwise.core.tree import DraftTree
from branchwise.cuda.graphs import GraphedFunction, have_kernels
from branchwise.cuda.inputs import BATCHES, PinnedBuffer, fitting
from branchwise.draft.base import Budget
from branchwise.draft.constrained import GrammarLevels
from branchwise.draft.head.cache import HeadCache
from branchwise.draft.head.following import Unread
from branchwise.draft.head.network import Head
from branchwise.draft.head.prompt import reads_at_once
from branchwise.draft.head.trees.best_first import BestFirstDraft
from branchwise.draft.head.trees.device import DeviceDraft
from branchwise.draft.head.trees.waiting import MOST, Waiting
from branchwise.draft.policies.topk import TopK
from branchwise.verify import Verdict, Verdicts

READY = 4096
"""cells of a text for which there is room from the first text on; in a window a text never takes more than at first"""
PATIENCE = 16
"""steps in a row in which nothing is drafted and the head still reads along; beyond them it lets its texts go"""


class Ends(NamedTuple):
    """Where trees grow: how many rows each text has, and its root, (batch,) both."""

    lengths: Tensor
    roots: Tensor


class Ahead:
    """Drafts of a head that follow each other on the device of its target."""

    def __init__(self, target: TargetInfo, *drafts: DeviceDraft) -> None:
        """Of several drafts the smallest comes first; they share one head and its cache."""
        self._drafts, self._draft = drafts, drafts[-1]
        self._ladder = Ladder([draft.nodes - 1 for draft in drafts]) if len(drafts) > 1 else None
        self._cache, self._target = drafts[0].cache, target
        deepest, cells = (max(getattr(draft, name) for draft in drafts) for name in ("depth", "cells"))
        config = drafts[0].head.config
        self._room = 1 + deepest + config.masks + 2 * cells
        """cells behind a text that this step and the one after it take"""
        self._crosses = bool(config.cross)
        if target.device.type != "cpu":  # what is recorded reads it where it lies
            most = config.window + 2 * self._cache.spare + self._room
            self._cache.hold(most if config.window else min(target.context, READY))
        self._buffers: dict[int, PinnedBuffer] = {}  # by the number of texts: slots, rows and roots
        self._uploaded: dict[int, list[int]] = {}
        """what they hold"""
        self._sequences: tuple[SequenceState, ...] = ()
        """texts of the pass that was made last"""
        self._found: tuple[Tensor, ...] | None = None
        """whole trees below the tokens of the last verdicts"""
        self._expected: list[tuple[SequenceState, int]] = []
        self._next: list[DraftTree] | None = None
        self._caught = False
        """whether the rows of the last verdict are written"""
        self._depth = 0
        """levels of the trees that are scored"""
        self._rung = self._scored_rung = len(drafts)
        """of the next trees, and of those that are scored"""
        self._rested = 0
        """steps in a row in which nothing was drafted"""
        self._last: tuple[tuple[int, int, bool], float] | None = None
        """texts and rung of the step before, whether rows were read in it, and when it was over"""
        self._record()

    def _record(self) -> None:
        capture, device = self._target.execution.graphs, self._target.device
        self._cells = self._cache.scratch
        self._ends: dict[int, Ends] = {}
        """by the number of texts: a place for where their trees grow"""
        self._catch_up = GraphedFunction(self._caught_up, device, capture=capture)
        at_once = device.type != "cpu" and reads_at_once(self._drafts[0].head.config)
        self._waiting = Waiting(self._drafts[0], capture=capture) if at_once else None
        self._grow = [GraphedFunction(self._in_place(draft), device, capture=capture) for draft in self._drafts]

    def _caught_up(
        self, slots: Tensor, lengths: Tensor, tokens: Tensor, paths: Tensor, following: Tensor, *hidden: Tensor
    ) -> Ends:
        rows = self._drafts[0].catch_up(slots, lengths, tokens, paths, following, *hidden)
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

    def _in_place(self, draft: DeviceDraft) -> Callable[..., tuple[Tensor, ...]]:
        """A function that lays trees always at the same place. What reads them is recorded for a place, and what a
        verdict writes is in turn where the next trees come from."""
        function = draft.grow
        if draft.lays_in_place or self._target.device.type == "cpu":
            return function  # on a host nothing is recorded, and trees may be as large as they like
        places: dict[int, tuple[Tensor, ...]] = {}  # by the number of texts

        def laid(slots: Tensor, *ends: Tensor) -> tuple[Tensor, ...]:
            found = function(slots, *ends)
            if len(slots) not in places:
                places[len(slots)] = tuple(map(torch.empty_like, found))
            for place, part in zip(places[len(slots)], found, strict=True):
                place.copy_(part)
            return places[len(slots)]

        return laid

    def read(self, unread: Mapping[SequenceState, Unread]) -> list[SequenceState]:
        """Read the rows that wait in texts; returns the texts of which these are too many."""
        behind = {sequence: rows for sequence, rows in unread.items() if len(rows)}
        few = {sequence: rows for sequence, rows in behind.items() if self._waiting and len(rows) <= MOST}
        if few:
            self._hold(max(map(self._cache.held, few)) + self._room)
        if few and self._waiting is not None:
            self._waiting.read(few)
        return [sequence for sequence in behind if sequence not in few]

    def rests(self, batch: int) -> bool:
        """A step of so many texts begins; whether nothing is to be drafted in it, and nothing to be read for it."""
        return self._draft.rests(batch)

    def stands_aside(self, sequences: Sequence[SequenceState]) -> bool:
        """Whether nothing is to be drafted for these texts, because that does not pay."""
        if self._ladder is not None and not self._foresaw(sequences):
            self._climb(sequences)
        return self._rung == 0

    def _foresaw(self, sequences: Sequence[SequenceState]) -> bool:
        return self._expected == [(sequence, sequence.root) for sequence in sequences]

    def _climb(self, sequences: Sequence[SequenceState]) -> None:
        """Choose the size of the next drafts."""
        if self._ladder is not None:
            self._rung = self._ladder.rung(len(sequences), sequences)
            if self._rung:
                self._draft = self._drafts[self._rung - 1]

    def begin(self) -> None:
        self._draft.begin()

    def rest(self, sequences: Sequence[SequenceState], *, read: bool = True) -> list[DraftTree]:
        """Roots alone. Texts whose prompts are not `read` are let go at once: reading takes as long as drafting."""
        self._found = self._next = None
        self._expected, self._caught = [], False
        self._depth = self._scored_rung = 0
        if self._ladder is not None:
            self._rested = self._rested + 1 if read else PATIENCE + 1
        self._sequences = tuple(sequences)
        trees = [DraftTree.root(sequence.root) for sequence in sequences]
        self._draft.drafted(trees)
        return trees

    def leave(self) -> None:
        """Somebody else drafts in this step: what was laid for it is of no use, and it says nothing of our own."""
        self._found = self._next = self._last = None
        self._expected, self._caught = [], False

    def draft(self, sequences: Sequence[SequenceState], budgets: Sequence[Budget]) -> list[DraftTree]:
        """The next trees; texts have no unread rows."""
        expected = self._foresaw(sequences)
        trees, self._next = self._next if expected else None, None
        if trees is None:
            found, self._found = self._found if expected else None, None
            trees = self._draft.trees(self._grown(sequences) if found is None else found, budgets)
        self._sequences = tuple(sequences)
        self._hold(max(map(self._cache.held, sequences)) + self._room)
        self._draft.drafted(trees)
        self._depth, self._scored_rung, self._rested = self._draft.depth, self._rung, 0
        return trees

    def draft_next(self, budgets: Sequence[Budget]) -> list[DraftTree] | None:
        if self._rung == 0:
            return [DraftTree.root(0)] * len(budgets)
        if self._found is None or min(budget.depth for budget in budgets) < self._draft.depth:
            return None
        self._next, self._found = self._draft.trees(self._found, budgets), None
        return self._next

    def update(self, scored: Scored, verdicts: Verdicts, hidden: Sequence[Tensor]) -> None:
        """Enqueue the rows of what a verdict kept, and the next trees."""
        self._found = self._next = None
        self._expected, self._caught = [], False
        nodes = scored.nodes
        if nodes is None or self._rested > PATIENCE:
            return  # a pass that was not recorded: its rows are read by the host's way; or nobody will read them
        self._seat(self._sequences)
        slots = self._upload(len(nodes.slots), [[self._cache.slot[sequence]] for sequence in self._sequences])[:, 0]
        paths = verdicts.paths[:, : self._depth + 1]  # a recorded verdict has columns for longer ones
        ends = self._catch_up(slots, nodes.lengths, nodes.tokens, paths, verdicts.tokens, *hidden)
        self._caught = True
        self._climb(self._sequences)
        if self._rung:
            self._found = self._grow[self._drafts.index(self._draft)](slots, *ends)

    def follow(self, sequences: Sequence[SequenceState], verdicts: Sequence[Verdict]) -> bool:
        """The host has read the verdict; whether its rows are written already, or will never be."""
        self._draft.scored(verdicts)
        if self._ladder is not None:
            tokens = [len(verdict.path) for verdict in verdicts]
            self._time(self._ladder, dict(zip(sequences, tokens, strict=True)))
        if self._caught:
            for sequence, verdict in zip(sequences, verdicts, strict=True):
                self._cache.lengths[sequence] += len(verdict.path)
            self._cache.let_go(sequences)
            self._expected = [(sequence, verdict.token) for sequence, verdict in zip(sequences, verdicts, strict=True)]
        return self._caught or self._rested > PATIENCE

    def _time(self, ladder: Ladder, tokens: Mapping[SequenceState, int]) -> None:
        """A step is over. How long it took is known if the one before was its like: the device works ahead. One without
        a draft is plain decoding's only when nothing is read in it for drafts to come."""
        now, reads, texts = time.perf_counter(), self._rested <= PATIENCE, len(tokens)
        step = texts, self._scored_rung, reads
        seconds = None if self._last is None or self._last[0] != step else now - self._last[1]
        seconds = seconds if self._scored_rung or not reads else None
        ladder.record(texts, self._scored_rung, sum(tokens.values()) / texts, seconds, tokens)
        self._last = step, now

    def forget(self) -> None:
        """What drafts gained."""
        if self._ladder is not None:
            self._ladder.forget()

    def reasons(self, batch: int) -> list[str]:
        return [] if self._ladder is None else self._ladder.reasons(batch)

    def _grown(self, sequences: Sequence[SequenceState]) -> tuple[Tensor, ...]:
        """Whole trees below the roots of these texts."""
        cache = self._cache
        size = fitting(len(sequences), BATCHES)
        rows = [[cache.slot[sequence], cache.lengths[sequence], sequence.root] for sequence in sequences]
        self._hold(max(map(cache.held, sequences)) + self._draft.cells + 1)
        self._seat(sequences)
        slots, lengths, roots = self._upload(size, rows).unbind(1)
        if self._target.device.type == "cpu" and isinstance(self._draft, BestFirstDraft):
            self._draft.grammars = GrammarLevels.of(sequences, size)
        return self._grow[self._drafts.index(self._draft)](slots, *self._at_their_place(size, lengths, roots))

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


def best_first(tree: TopK, head: Head, cache: HeadCache, *parts: Any, copies: int) -> BestFirstDraft:
    """How the best trees are laid on the device of a cache."""
    if have_kernels(cache.store.device):
        from branchwise.draft.head.trees.fused import FusedDraft, PickedDraft

        kind = FusedDraft if FusedDraft.fits(head.config) else PickedDraft
        return kind(tree, head, cache, *parts, copies=copies)
    return BestFirstDraft(tree, head, cache, *parts, copies=copies)
