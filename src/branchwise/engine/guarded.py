"""A drafter under a guard: before every step the guard says whether it drafts or rests.

To the step it is a drafter like any other. While it rests, trees are bare roots, and a step is that of plain decoding:
on a device the pass over them is enqueued ahead and not padded.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import replace

from branchwise.backends.base import Needs, Prefill, Scored
from branchwise.control.guard import Guard
from branchwise.core.sequence import SequenceState
from branchwise.core.tree import DraftTree, Draw
from branchwise.draft.base import Budget, Drafter
from branchwise.verify import Verdict, Verdicts


def may_rest(drafter: Drafter) -> bool:
    """Whether a guard is of use, given a drafter that is bound. Forks are drawn for a rule that takes the token after a
    root from the fork itself, where its distribution is known: there a bare root is no plain step."""
    return not drafter.paces and drafter.draw is not Draw.FORK


class GuardedDrafter(Drafter):
    def __init__(self, drafter: Drafter, guard: Guard, *, same_text: bool) -> None:
        """`same_text`: what is written does not depend on what is drafted. Otherwise a text that was given a seed would
        depend on the time that steps take, so it never rests."""
        self._drafter, self._guard, self._same_text = drafter, guard, same_text
        self.name, self.draw = drafter.name, drafter.draw
        self.rested = False
        """whether nothing was to be drafted in the step that is made, or was made last"""
        self._seeded = False
        """whether there is a text that must not rest"""
        self._decided: bool | None = None
        """whether it rests in the step after that, where its pass is enqueued ahead"""
        self._bare = False
        """whether the trees that were asked for last are bare roots by the word of the guard"""
        self._followed: frozenset[SequenceState] = frozenset()
        """texts of which the drafter has read all that there is"""
        self._caught_up = False
        self._began = 0.0
        self._ended = -math.inf
        """when the last step did, if nothing but this step came after it"""

    @property
    def needs(self) -> Needs:
        return replace(self._drafter.needs, pad_shape=None) if self._bare else self._drafter.needs

    def start(self, sequence: SequenceState, prefill: Prefill) -> None:
        self.disturbed()
        self._drafter.start(sequence, prefill)

    def finish(self, sequence: SequenceState) -> None:
        self.disturbed()
        self._drafter.finish(sequence)

    def disturbed(self) -> None:
        """What takes time between these two steps belongs to neither."""
        self._ended = -math.inf

    def draft(self, sequences: Sequence[SequenceState], budgets: Sequence[Budget]) -> list[DraftTree]:
        self._began = time.perf_counter()
        self._seeded = not self._same_text and any(
            sequence.sampling.seed is not None and not sequence.sampling.greedy for sequence in sequences
        )
        self.rested = self._rests(len(sequences)) if self._decided is None else self._decided
        self._bare, self._decided = self.rested, None
        if self.rested:
            self._followed = frozenset()
            return self._drafter.rest(sequences)
        # One that looks tokens up reads next to nothing.
        self._caught_up = self._drafter.cost is not None and not self._followed.issuperset(sequences)
        self._followed = frozenset(sequences)
        return self._drafter.draft(sequences, budgets)

    def update_on_device(self, scored: Scored, verdicts: Verdicts) -> None:
        self._drafter.update_on_device(scored, verdicts)

    def draft_next(self, budgets: Sequence[Budget]) -> list[DraftTree] | None:
        self._bare = self._decided = self._rests(len(budgets))
        return [DraftTree.root(0)] * len(budgets) if self._bare else self._drafter.draft_next(budgets)

    def _rests(self, batch: int) -> bool:
        return not self._seeded and self._guard.rests(batch)

    def update(self, sequences: Sequence[SequenceState], scored: Scored, verdicts: Sequence[Verdict]) -> None:
        self._drafter.update(sequences, scored, verdicts)
        now = time.perf_counter()
        start = self._began if self._ended < 0 else self._ended  # texts are handed out between two steps
        tokens = sum(len(verdict.path) for verdict in verdicts) / len(verdicts)
        self._guard.record(
            len(sequences), scored.logits.shape[1], tokens, now - start, rested=self.rested, caught_up=self._caught_up
        )
        self._ended = now
