"""The recommended drafter without a draft model: all lookup drafters that pay, in the way that suits the machine.

On a host a pass is long and every row of it costs, so several drafters share a small tree, each trusted as far as its
record goes. On a GPU a pass over a hundred nodes costs little more than over one, and less than the host would take to
lay so many: there the adjacency table drafts alone, a wide tree of ranks that is looked up on the device, and the step
never waits for the host. What was learned on one of them is saved and restored on the other.
"""

from __future__ import annotations

from collections.abc import Sequence

from branchwise.backends.base import Needs, Prefill, Scored, TargetInfo
from branchwise.core.sequence import SequenceState
from branchwise.core.tree import DraftTree
from branchwise.draft.base import Budget
from branchwise.draft.builder import TreePolicy
from branchwise.draft.lookup.base import LookupDrafter
from branchwise.draft.lookup.fusion import Fusion
from branchwise.draft.policies.adaptive_ranks import AdaptiveRanks
from branchwise.draft.recycle.drafter import Recycle
from branchwise.verify import Verdict, Verdicts

MEMBERS = "recycle+stand(max=3)+suffix(min=1)"


class DefaultDrafter(Fusion):
    """`memories`: a fusion of recycle, stand and suffix on a host; on a GPU recycle alone, unless a tree is given."""

    name = "memories"

    def __init__(self, tree: TreePolicy | None = None) -> None:
        super().__init__(MEMBERS, tree)
        self._tree_given = tree is not None
        self._alone: Recycle | None = None
        self._trees = self.members[0].tree, AdaptiveRanks()
        """of the adjacency table, on a host and on a GPU"""

    @property
    def needs(self) -> Needs:
        return super().needs if self._alone is None else self._alone.needs

    def bind(self, target: TargetInfo) -> None:
        recycle = self.members[0]
        assert isinstance(recycle, Recycle)
        alone = target.device.type != "cpu" and not self._tree_given
        recycle.tree = self._trees[alone]
        self._alone = recycle if alone else None
        if not alone:
            super().bind(target)
            return
        for one in (self, *self.members):
            LookupDrafter.bind(one, target)  # the other members keep what they know and take no part
        recycle.bind(target)

    def start(self, sequence: SequenceState, prefill: Prefill) -> None:
        if self._alone is None:
            super().start(sequence, prefill)
        else:
            self._alone.start(sequence, prefill)

    def draft(self, sequences: Sequence[SequenceState], budgets: Sequence[Budget]) -> list[DraftTree]:
        return super().draft(sequences, budgets) if self._alone is None else self._alone.draft(sequences, budgets)

    def update_on_device(self, scored: Scored, verdicts: Verdicts) -> None:
        if self._alone is not None:
            self._alone.update_on_device(scored, verdicts)

    def draft_next(self, budgets: Sequence[Budget]) -> list[DraftTree] | None:
        return None if self._alone is None else self._alone.draft_next(budgets)

    def update(self, sequences: Sequence[SequenceState], scored: Scored, verdicts: Sequence[Verdict]) -> None:
        if self._alone is None:
            super().update(sequences, scored, verdicts)
        else:
            self._alone.update(sequences, scored, verdicts)
