"""What is recommended without a draft model: all that can be remembered, in the way that suits the machine.

On a host a pass is long and its rows cost, so several memories share a small tree, each believed as far as it has
earned. On a GPU a pass over a hundred nodes costs little more than over one, and less than the host would take to lay
so many: there the table of successors drafts alone, a wide tree of ranks that is looked up on the device, and the step
waits for nobody. What was learned in one place is saved and taken up in the other.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from branchwise.backends.base import Scored, Target
from branchwise.core.batch import PadShape
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
        self._chosen = tree is not None  # a tree that somebody asks for is laid everywhere
        self._alone: Recycle | None = None
        self._trees = self.members[0].tree, AdaptiveRanks()
        """of the table of successors, on a host and on a GPU"""

    def bind(self, target: Target) -> None:
        recycle = self.members[0]
        assert isinstance(recycle, Recycle)
        alone = target.device.type != "cpu" and not self._chosen
        recycle.tree = self._trees[alone]
        if not alone:
            self._alone = None
            super().bind(target)
            self.wants_prefill = max(member.wants_prefill for member in self.members)
            return
        self._alone, self.wants_prefill = recycle, recycle.wants_prefill
        for one in (self, *self.members):
            LookupDrafter.bind(one, target)  # those that only keep what they know ask for nothing
        recycle.bind(target)

    @property
    def room(self) -> PadShape | None:
        return super().room if self._alone is None else self._alone.room

    def begin(self, sequence: SequenceState, logits: Tensor) -> None:
        if self._alone is None:
            super().begin(sequence, logits)
        else:
            self._alone.begin(sequence, logits)

    def draft(self, sequences: Sequence[SequenceState], budgets: Sequence[Budget]) -> list[DraftTree]:
        return super().draft(sequences, budgets) if self._alone is None else self._alone.draft(sequences, budgets)

    def update_on_device(self, scored: Scored, found: Verdicts) -> None:
        if self._alone is not None:
            self._alone.update_on_device(scored, found)

    def draft_next(self, budgets: Sequence[Budget]) -> list[DraftTree] | None:
        return None if self._alone is None else self._alone.draft_next(budgets)

    def update(self, sequences: Sequence[SequenceState], scored: Scored, verdicts: Sequence[Verdict]) -> None:
        if self._alone is None:
            super().update(sequences, scored, verdicts)
        else:
            self._alone.update(sequences, scored, verdicts)
