"""Nothing drafted: plain decoding through the same loop, the baseline of every comparison."""

from __future__ import annotations

from collections.abc import Sequence

from branchwise.core.sequence import SequenceState
from branchwise.core.tree import DraftTree
from branchwise.draft.base import Budget, Drafter


class NoDrafter(Drafter):
    name = "none"

    def draft(self, sequences: Sequence[SequenceState], budgets: Sequence[Budget]) -> list[DraftTree]:
        return [DraftTree.root(sequence.root) for sequence in sequences]

    def draft_next(self, budgets: Sequence[Budget]) -> list[DraftTree]:
        return [DraftTree.root(0)] * len(budgets)
