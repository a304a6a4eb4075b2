"""A drafter under a guard, which decides before every step whether the drafter drafts, or which of its sources does.

To the step it is a drafter like any other. While nothing is drafted, trees are bare roots and the step is one of plain
decoding: on a device the pass over them is enqueued ahead and not padded.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import replace

from branchwise.backends.base import Needs, Prefill, Scored
from branchwise.control.guard import PLAIN, Guard
from branchwise.core.sequence import SequenceState
from branchwise.core.tree import DraftTree, Draw
from branchwise.draft.base import Budget, Drafter, reusable_by_all
from branchwise.verify import Verdict, Verdicts


def may_rest(drafter: Drafter) -> bool:
    """Whether a guard is of use for a drafter that is bound. It is not if trees are forks: their rule takes the token
    after a root from the fork itself, so a bare root would be no step of plain decoding."""
    return not drafter.paces and drafter.draw is not Draw.FORK


class GuardedDrafter(Drafter):
    def __init__(self, drafter: Drafter, guard: Guard, *, same_text: bool) -> None:
        """`same_text` says that the text does not depend on the draft. If it does, a text with a seed would depend on
        how long steps take, so the first source drafts every step of such a text."""
        self._guard, self._same_text = guard, same_text
        self._sources = drafter.sources or (drafter,)
        assert len(self._sources) == len(guard.sources), "a guard chooses among as many sources as there are"
        assert all(source.draw is drafter.draw for source in self._sources), "all sources draw like their drafter"
        self.name, self.draw = drafter.name, drafter.draw
        self._needs = drafter.needs
        self._logits = [source.needs.prefill_logits for source in self._sources]
        self._current = 0
        """the source of the current step, or of the last one between two steps"""
        self._next: int | None = None
        """the source of the step after that, if its pass is enqueued ahead"""
        self._asked = 0
        """the source that was last asked for trees, whose `pad_shape` is in force"""
        self._seeded = False
        """whether the first source must draft, for the sake of a text with a seed"""
        self._followed: tuple[int, frozenset[SequenceState]] = PLAIN, frozenset()
        """the source that drafted last, and the texts for which it missed nothing"""
        self._caught_up = False
        """whether the source of this step had to read what it had missed of a text"""
        self._began = 0.0
        """when the current step began"""
        self._ended = -math.inf
        """when the last step ended, if nothing came between it and the current one"""

    @property
    def rested(self) -> bool:
        """Whether the guard let nothing be drafted in the current step, or in the last one between two steps."""
        return self._current == PLAIN

    @property
    def drafting(self) -> str:
        """The name of the source that drafted in that step."""
        return self.name if self.rested else self._sources[self._current].source

    @property
    def needs(self) -> Needs:
        """Only sources that draft now get the logits of prompts: computing them for the others would cost time that
        these pay for."""
        pad_shape = None if self._asked == PLAIN else self._sources[self._asked].needs.pad_shape
        drafting = self._guard.drafting(len(self._followed[1]) or 1)
        logits = max((self._logits[number] for number in drafting), default=0)
        return replace(self._needs, pad_shape=pad_shape, prefill_logits=logits)

    def start(self, sequence: SequenceState, prefill: Prefill) -> None:
        self.disturbed()
        for source in self._sources:
            source.start(sequence, prefill.part_for(source.needs))

    def finish(self, sequence: SequenceState) -> None:
        self.disturbed()
        for source in self._sources:
            source.finish(sequence)

    def reusable(self, source: SequenceState, sequence: SequenceState, rows: int) -> int:
        return reusable_by_all(self._sources, source, sequence, rows)

    def inherit(self, source: SequenceState, sequence: SequenceState, rows: int, *, moved: bool) -> None:
        self.disturbed()
        for one in self._sources:
            one.inherit(source, sequence, rows, moved=moved)

    def retire(self, sequence: SequenceState) -> None:
        self.disturbed()
        for source in self._sources:
            source.retire(sequence)

    def drop(self, sequence: SequenceState) -> None:
        self.disturbed()
        for source in self._sources:
            source.drop(sequence)

    def disturbed(self) -> None:
        """Time that passes between these two steps belongs to neither of them."""
        self._ended = -math.inf

    def draft(self, sequences: Sequence[SequenceState], budgets: Sequence[Budget]) -> list[DraftTree]:
        self._began = time.perf_counter()
        self._seeded = not self._same_text and any(
            sequence.sampling.seed is not None and not sequence.sampling.greedy for sequence in sequences
        )
        self._current = self._choose(len(sequences)) if self._next is None else self._next
        self._asked, self._next = self._current, None
        if self.rested:
            self._followed = PLAIN, frozenset()
            return self._rest(sequences)
        source, (number, followed) = self._sources[self._current], self._followed
        behind = number != self._current or not followed.issuperset(sequences)
        self._caught_up = source.cost is not None and behind  # a lookup drafter catches up for free
        self._followed = self._current, frozenset(sequences)
        return source.draft(sequences, budgets)

    def _rest(self, sequences: Sequence[SequenceState]) -> list[DraftTree]:
        if len(self._sources) == 1:
            return self._sources[0].rest(sequences)
        return [DraftTree.root(sequence.root) for sequence in sequences]

    def update_on_device(self, scored: Scored, verdicts: Verdicts) -> None:
        for number, source in enumerate(self._sources):
            if self._takes_part(number):
                source.update_on_device(scored, verdicts)
            else:
                source.follow_on_device(scored, verdicts)

    def draft_next(self, budgets: Sequence[Budget]) -> list[DraftTree] | None:
        """Draft ahead only if the source of this step drafts the next one as well: any other source must first catch up
        on the host."""
        self._next = self._asked = self._choose(len(budgets))
        if self._next == PLAIN:
            return [DraftTree.root(0)] * len(budgets)
        return self._sources[self._next].draft_next(budgets) if self._next == self._current else None

    def _choose(self, batch: int) -> int:
        return 0 if self._seeded else self._guard.choose(batch)

    def _takes_part(self, number: int) -> bool:
        """Whether this source updates after the current step, and not merely follows; a single source always does."""
        return number == self._current or len(self._sources) == 1

    def update(self, sequences: Sequence[SequenceState], scored: Scored, verdicts: Sequence[Verdict]) -> None:
        for number, source in enumerate(self._sources):
            if self._takes_part(number):
                source.update(sequences, scored, verdicts)
            else:
                source.follow(sequences, scored, verdicts)
        now = time.perf_counter()
        start = self._began if self._ended < 0 else self._ended  # emitting tokens between two steps counts as well
        tokens = sum(len(verdict.path) for verdict in verdicts) / len(verdicts)
        rows = scored.logits.shape[1]
        self._guard.record(len(sequences), self._current, rows, tokens, now - start, caught_up=self._caught_up)
        self._ended = now
