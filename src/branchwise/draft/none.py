"""Nothing drafted: plain decoding through the same loop, the baseline of every comparison."""

from __future__ import annotations

from collections.abc import Sequence as Rows

from branchwise.draft import Budget
from branchwise.sequence import Sequence
from branchwise.target import Scored
from branchwise.tree import DraftTree, Draw
from branchwise.verify import Verdict


class Nothing:
    name = "none"
    draw = Draw.FIXED

    def draft(self, sequences: Rows[Sequence], budgets: Rows[Budget]) -> list[DraftTree]:
        return [DraftTree.root(sequence.root) for sequence in sequences]

    def foresee(self, budgets: Rows[Budget]) -> list[DraftTree]:
        return [DraftTree.root(0)] * len(budgets)

    def observe(self, sequences: Rows[Sequence], scored: Scored, verdicts: Rows[Verdict]) -> None:
        pass
