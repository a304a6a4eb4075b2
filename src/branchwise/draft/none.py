"""Nothing drafted: plain decoding through the same loop, the baseline of every comparison."""

from __future__ import annotations

from collections.abc import Sequence

from branchwise.backends.base import Scored
from branchwise.core.sequence import SequenceState
from branchwise.core.tree import DraftTree, Draw
from branchwise.draft.base import Budget
from branchwise.verify import Verdict


class Nothing:
    name = "none"
    draw = Draw.FIXED

    def draft(self, sequences: Sequence[SequenceState], budgets: Sequence[Budget]) -> list[DraftTree]:
        return [DraftTree.root(sequence.root) for sequence in sequences]

    def draft_next(self, budgets: Sequence[Budget]) -> list[DraftTree]:
        return [DraftTree.root(0)] * len(budgets)

    def update(self, sequences: Sequence[SequenceState], scored: Scored, verdicts: Sequence[Verdict]) -> None:
        pass
