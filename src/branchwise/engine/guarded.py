"""A drafter under a guard: before every step the guard says whether it drafts or rests, or which of its sources drafts.

To the step it is a drafter like any other. While nothing is drafted, trees are bare roots, and a step is that of plain
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
    """Whether a guard is of use, given a drafter that is bound. Forks are drawn for a rule that takes the token after a
    root from the fork itself, where its distribution is known: there a bare root is no plain step."""
    return not drafter.paces and drafter.draw is not Draw.FORK


class GuardedDrafter(Drafter):
    def __init__(self, drafter: Drafter, guard: Guard, *, same_text: bool) -> None:
        """`same_text`: what is written does not depend on what is drafted. Otherwise a text that was given a seed would
        depend on the time that steps take, so the first source always drafts for it."""
        self._guard, self._same_text = guard, same_text
        self._sources = drafter.sources or (drafter,)
        assert len(self._sources) == len(guard.sources), "a guard chooses among as many sources as there are"
        assert all(source.draw is drafter.draw for source in self._sources), "all sources draw like their drafter"
        self.name, self.draw = drafter.name, drafter.draw
        self._needs = drafter.needs
        self._logits = [source.needs.prefill_logits for source in self._sources]
        self._chosen = 0
        """the source of the step that is made, or was made last"""
        self._decided: int | None = None
        """the source of the step after that, where its pass is enqueued ahead"""
        self._laid = 0
        """the source of the trees that were asked for last"""
        self._seeded = False
        """whether there is a text that must not depend on time"""
        self._followed: tuple[int, frozenset[SequenceState]] = PLAIN, frozenset()
        """a source, and the texts of which it has read all that there is"""
        self._caught_up = False
        self._began = 0.0
        self._ended = -math.inf
        """when the last step did, if nothing but this step came after it"""

    @property
    def rested(self) -> bool:
        """Whether nothing was to be drafted in the step that is made, or was made last."""
        return self._chosen == PLAIN

    @property
    def drafting(self) -> str:
        """The name of the source that drafted then."""
        return self.name if self.rested else self._sources[self._chosen].source

    @property
    def needs(self) -> Needs:
        """Logits of prompts are asked for by those that draft now: others would learn from them at the expense of
        these."""
        pad_shape = None if self._laid == PLAIN else self._sources[self._laid].needs.pad_shape
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
        """What takes time between these two steps belongs to neither."""
        self._ended = -math.inf

    def draft(self, sequences: Sequence[SequenceState], budgets: Sequence[Budget]) -> list[DraftTree]:
        self._began = time.perf_counter()
        self._seeded = not self._same_text and any(
            sequence.sampling.seed is not None and not sequence.sampling.greedy for sequence in sequences
        )
        self._chosen = self._choose(len(sequences)) if self._decided is None else self._decided
        self._laid, self._decided = self._chosen, None
        if self.rested:
            self._followed = PLAIN, frozenset()
            return self._rest(sequences)
        source, (number, followed) = self._sources[self._chosen], self._followed
        # One that looks tokens up reads next to nothing.
        behind = number != self._chosen or not followed.issuperset(sequences)
        self._caught_up = source.cost is not None and behind
        self._followed = self._chosen, frozenset(sequences)
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
        """A source that has not drafted in this step drafts in the next one as if texts were new to it."""
        self._decided = self._laid = self._choose(len(budgets))
        if self._decided == PLAIN:
            return [DraftTree.root(0)] * len(budgets)
        return self._sources[self._decided].draft_next(budgets) if self._decided == self._chosen else None

    def _choose(self, batch: int) -> int:
        return 0 if self._seeded else self._guard.choose(batch)

    def _takes_part(self, number: int) -> bool:
        """Whether it is the step of this source; one that is alone has no others to follow."""
        return number == self._chosen or len(self._sources) == 1

    def update(self, sequences: Sequence[SequenceState], scored: Scored, verdicts: Sequence[Verdict]) -> None:
        for number, source in enumerate(self._sources):
            if self._takes_part(number):
                source.update(sequences, scored, verdicts)
            else:
                source.follow(sequences, scored, verdicts)
        now = time.perf_counter()
        start = self._began if self._ended < 0 else self._ended  # texts are handed out between two steps
        tokens = sum(len(verdict.path) for verdict in verdicts) / len(verdicts)
        rows = scored.logits.shape[1]
        self._guard.record(len(sequences), self._chosen, rows, tokens, now - start, caught_up=self._caught_up)
        self._ended = now
