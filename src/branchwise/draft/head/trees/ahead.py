"""Drafting on a device ahead of the host: the trees after a verdict are laid before the host has read the verdict.

With drafts of several sizes, a ladder chooses one of them for every step (`control.ladder`). It looks at past steps,
and chooses before the verdict of the current step is known.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from branchwise.backends.base import Scored, TargetInfo
from branchwise.control.ladder import Ladder
from branchwise.core.sequence import SequenceState
from branchwise.core.tree import DraftTree
from branchwise.cuda.graphs import GraphedFunction, have_kernels
from branchwise.draft.base import Budget
from branchwise.draft.builder import TreePolicy
from branchwise.draft.constrained import GrammarLevels
from branchwise.draft.drawn.drawing import tree_draft_of
from branchwise.draft.head.cache import HeadCache
from branchwise.draft.head.network import Head
from branchwise.draft.head.trees.best_first import BestFirstDraft
from branchwise.draft.head.trees.catching_up import CatchingUp, Ends
from branchwise.draft.head.trees.device import DeviceDraft, HeadParts
from branchwise.draft.head.trees.drawn import DrawnAhead, DrawnHead, Reading
from branchwise.draft.head.trees.paced import PacedDraft
from branchwise.draft.head.trees.ranks import RankedDraft
from branchwise.draft.policies.template import Ranks
from branchwise.draft.policies.topk import TopK
from branchwise.verify import Verdict, Verdicts

PATIENCE = 16
"""most steps in a row without a draft in which the head still reads the new tokens; after them it stops reading"""


class Ahead(CatchingUp):
    """Trees of the most probable tokens."""

    draws = False

    def __init__(self, target: TargetInfo, *drafts: DeviceDraft) -> None:
        """`drafts` are in the order of their size, the smallest first; they share one head and its cache."""
        self._drafts, self._draft = drafts, drafts[-1]
        self._ladder = Ladder([draft.nodes - 1 for draft in drafts]) if len(drafts) > 1 else None
        self._behind: tuple[Tensor, Ends] | None = None
        """slots of the texts, and the ends that trees grow from after the last verdicts"""
        self._rung = self._scored_rung = len(drafts)
        """rung of the next trees, and rung of those that are scored"""
        self._rested = 0
        """number of steps in a row in which nothing was drafted"""
        self._last: tuple[tuple[int, int, bool], float] | None = None
        """number of texts and rung of the step before, whether rows were read in it, and when it was over"""
        deepest, cells = (max(getattr(draft, name) for draft in drafts) for name in ("depth", "cells"))
        super().__init__(target, drafts[0], deepest, cells)

    def _record(self) -> None:
        super()._record()
        capture, device = self._target.execution.graphs, self._target.device
        self._grow = [GraphedFunction(self._in_place(draft), device, capture=capture) for draft in self._drafts]

    def _in_place(self, draft: DeviceDraft) -> Callable[..., tuple[Tensor, ...]]:
        """A function that grows trees and always writes them to the same tensors: passes that read the trees are
        recorded with their addresses."""
        function = draft.grow
        if draft.lays_in_place or self._target.device.type == "cpu":
            return function  # on a host nothing is recorded, and the sizes of trees may change
        places: dict[int, tuple[Tensor, ...]] = {}  # by the number of texts

        def laid(slots: Tensor, *ends: Tensor) -> tuple[Tensor, ...]:
            found = function(slots, *ends)
            if len(slots) not in places:
                places[len(slots)] = tuple(map(torch.empty_like, found))
            for place, part in zip(places[len(slots)], found, strict=True):
                place.copy_(part)
            return places[len(slots)]

        return laid

    def rests(self, batch: int) -> bool:
        return self._draft.rests(batch)

    def stands_aside(self, sequences: Sequence[SequenceState]) -> bool:
        if self._ladder is not None and not self._foresaw(sequences):
            self._climb(sequences)
        return self._rung == 0

    def _climb(self, sequences: Sequence[SequenceState]) -> None:
        """Choose the size of the next drafts."""
        if self._ladder is not None:
            self._ladder.drawn = 2 * sum(one.sampling.temperature > 0 for one in sequences) > len(sequences)
            self._rung = self._ladder.rung(len(sequences), sequences)
            if self._rung:
                self._draft = self._drafts[self._rung - 1]

    def begin(self) -> None:
        self._draft.begin()

    def rest(self, sequences: Sequence[SequenceState], *, read: bool = True) -> list[DraftTree]:
        """Roots alone. If prompts are not `read`, the head stops reading these texts at once: reading a prompt takes as
        long as drafting."""
        trees = super().rest(sequences)
        self._scored_rung = 0
        if self._ladder is not None:
            self._rested = self._rested + 1 if read else PATIENCE + 1
        self._draft.drafted(trees)
        return trees

    def leave(self) -> None:
        super().leave()
        self._last = None  # the time of this step says nothing about our drafts

    def _drop(self) -> None:
        super()._drop()
        self._behind = None

    def draft(self, sequences: Sequence[SequenceState], budgets: Sequence[Budget]) -> list[DraftTree]:
        """The next trees. The texts must have no unread rows."""
        expected = self._foresaw(sequences)
        trees, self._next = self._next if expected else None, None
        if trees is None:
            grows = expected and self._behind is not None
            trees = self._draft.trees(self._grown_behind() if grows else self._grown(sequences), budgets)
            self._behind = None
        self._sequences = tuple(sequences)
        self._hold(max(map(self._cache.held, sequences)) + self._room)
        self._draft.drafted(trees)
        self._depth, self._scored_rung, self._rested = self._draft.depth, self._rung, 0
        return trees

    def draft_next(self, budgets: Sequence[Budget]) -> list[DraftTree] | None:
        if self._rung == 0:
            return [DraftTree.root(0)] * len(budgets)
        if self._behind is None or min(budget.depth for budget in budgets) < self._draft.depth:
            return None
        self._next = self._draft.trees(self._grown_behind(), budgets)
        return self._next

    def update(self, scored: Scored, verdicts: Verdicts, hidden: Sequence[Tensor]) -> None:
        self._drop()
        if scored.nodes is None or not self._sequences or self._rested > PATIENCE:
            return  # an unrecorded pass, whose rows the host reads; or rows that are not to be read any more
        self._behind = self._written(scored.nodes, verdicts, hidden)
        self._climb(self._sequences)

    def follow(self, sequences: Sequence[SequenceState], verdicts: Sequence[Verdict]) -> bool:
        self._draft.scored(verdicts)
        if self._ladder is not None:
            tokens = [len(verdict.path) for verdict in verdicts]
            self._time(self._ladder, dict(zip(sequences, tokens, strict=True)))
        if super().follow(sequences, verdicts):
            self._cache.let_go(sequences)
        return self._caught or self._rested > PATIENCE

    def _time(self, ladder: Ladder, tokens: Mapping[SequenceState, int]) -> None:
        """Record a step that is over. Its time counts only if the step before was of the same kind, because the device
        works ahead. A step without a draft counts as plain decoding only if the head read nothing in it."""
        now, reads, texts = time.perf_counter(), self._rested <= PATIENCE, len(tokens)
        step = texts, self._scored_rung, reads
        seconds = None if self._last is None or self._last[0] != step else now - self._last[1]
        seconds = seconds if self._scored_rung or not reads else None
        ladder.record(texts, self._scored_rung, sum(tokens.values()) / texts, seconds, tokens)
        self._last = step, now

    def forget(self) -> None:
        if self._ladder is not None:
            self._ladder.forget()
        for draft in self._drafts:
            draft.forget()

    def reasons(self, batch: int) -> list[str]:
        return [] if self._ladder is None else self._ladder.reasons(batch)

    def _grown(self, sequences: Sequence[SequenceState]) -> tuple[Tensor, ...]:
        """Whole trees below the roots of these texts."""
        slots, ends = self._begun(sequences)
        if self._target.device.type == "cpu" and isinstance(self._draft, BestFirstDraft):
            self._draft.grammars = GrammarLevels.of(sequences, len(slots))
        return self._grow[self._drafts.index(self._draft)](slots, *ends)

    def _grown_behind(self) -> tuple[Tensor, ...]:
        """Whole trees after the last verdicts. They are grown only when they are needed, because they are not if other
        texts come next."""
        assert self._behind is not None, "a verdict was followed"
        (slots, ends), self._behind = self._behind, None
        self._seat(self._sequences)  # the target may have moved the texts since
        return self._grow[self._drafts.index(self._draft)](slots, *ends)


def ahead_of(
    tree: TreePolicy,
    target: TargetInfo,
    reading: Reading,
    parts: HeadParts,
    copies: int,
    smaller: Sequence[TopK],
    level_cost: float | None,
) -> CatchingUp | None:
    """Drafting of the trees of a policy on the device of a target; None if only the host can grow such trees.

    `reading` makes the reading of the head's logits. The other arguments are for `topk`: up to `copies` tokens of a
    tree may be copied; on a GPU `smaller` trees are tried too; on a host, where `level_cost` is the cost of a level in
    passes of the target, trees are as large as pays. `level_cost` is None if trees are not paced."""
    if isinstance(tree, Ranks):
        return Ahead(target, RankedDraft(tree, *parts))
    if type(tree) is not TopK or tree.gain:
        return drawn_ahead(tree, target, reading, parts)
    make = best_first if level_cost is None else partial(PacedDraft, target, level_cost)
    whole = make(tree, *parts, copies=copies)
    sizes = [whole.shaped(small, min(copies, small.nodes // 2)) for small in smaller]
    return Ahead(target, *sizes, whole)


def drawn_ahead(tree: TreePolicy, target: TargetInfo, reading: Reading, parts: HeadParts) -> DrawnAhead | None:
    """Drawing of trees on the device of a target, as large as a pass of the target can score. None if only the host can
    draw them, or if nothing is recorded, so that the host is as fast."""
    make = tree_draft_of(tree, target.vocabulary, target.device)
    if make is None or not target.execution.kernels:
        return None
    draft = make([Budget(target.max_nodes, target.context)])
    if not draft.depth:
        return None
    kind: type[DrawnHead] = DrawnHead
    if have_kernels(parts.cache.store.device):
        from branchwise.draft.head.trees.fused import FusedDrawnHead

        kind = FusedDrawnHead if FusedDrawnHead.fits(parts.head.config) else DrawnHead
    return DrawnAhead(target, draft, kind(draft, target.vocabulary, *parts), reading)


def best_first(tree: TopK, head: Head, cache: HeadCache, *parts: Any, copies: int) -> BestFirstDraft:
    """The fastest draft of the best trees on the device of the cache; the arguments after `tree` are `HeadParts`."""
    if have_kernels(cache.store.device):
        from branchwise.draft.head.trees.fused import FusedDraft, PickedDraft

        kind = FusedDraft if FusedDraft.fits(head.config) else PickedDraft
        return kind(tree, head, cache, *parts, copies=copies)
    return BestFirstDraft(tree, head, cache, *parts, copies=copies)
