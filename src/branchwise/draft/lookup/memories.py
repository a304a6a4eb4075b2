"""The memories that draft if the user names no drafter: all of them fused on a host, one of them alone on a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from branchwise.backends.base import Needs, Prefill, Scored, TargetInfo
from branchwise.core.sequence import SequenceState
from branchwise.core.tree import DraftTree
from branchwise.draft.base import Budget, Drafter
from branchwise.draft.builder import TreePolicy
from branchwise.draft.lookup.base import LookupDrafter
from branchwise.draft.lookup.fusion import Fusion
from branchwise.draft.policies.adaptive import AdaptiveRanks
from branchwise.draft.recycle.drafter import Recycle
from branchwise.verify import Verdict, Verdicts

MEMBERS = "recycle+stand(max=3)+suffix(min=1)"


class DefaultDrafter(Fusion):
    """`memories`: a fusion of recycle, stand and suffix on a host; on a GPU recycle alone, unless a tree is given.

    On a host a pass is long and every row of it takes time, so several drafters share a small tree. On a GPU a pass
    over a hundred nodes costs little more than a pass over one, and less than the host would take to lay that many: so
    the adjacency table alone drafts a wide tree of ranks that is looked up on the device, and the step never waits for
    the host. A state that is saved on a host can be restored on a GPU, and the other way round.
    """

    name = "memories"

    def __init__(self, tree: TreePolicy | None = None) -> None:
        super().__init__(MEMBERS, tree)
        self.tree_given = tree is not None
        self._alone: Drafter | None = None
        recycle = self.members[0]
        assert isinstance(recycle, Recycle)
        self._recycle = recycle
        self._trees = recycle.tree, AdaptiveRanks()
        """tree policies of the adjacency table, on a host and on a GPU"""

    @property
    def _speaker(self) -> Any:
        """The drafter that answers: the fusion itself (`super()`), or the one that drafts alone."""
        return super() if self._alone is None else self._alone

    @property
    def needs(self) -> Needs:
        return self._speaker.needs  # type: ignore[no-any-return]

    def alone_on(self, target: TargetInfo) -> Drafter | None:
        """The drafter that drafts alone for a target; None if the fusion drafts."""
        return None if target.device.type == "cpu" or self.tree_given else self._recycle

    def bind(self, target: TargetInfo) -> None:
        self._alone = self.alone_on(target)
        self._recycle.tree = self._trees[self._alone is self._recycle]
        if self._alone is None:
            super().bind(target)
            return
        LookupDrafter.bind(self, target)
        for member in self.members:
            member.bind(target)  # members that do not draft keep what they know, so that it can be saved and restored
        self._alone.bind(target)
        self.cost, self.paces = self._alone.cost, self._alone.paces

    def start(self, sequence: SequenceState, prefill: Prefill) -> None:
        self._speaker.start(sequence, prefill)

    def finish(self, sequence: SequenceState) -> None:
        self._speaker.finish(sequence)

    def reusable(self, source: SequenceState, sequence: SequenceState, rows: int) -> int:
        return self._speaker.reusable(source, sequence, rows)  # type: ignore[no-any-return]

    def inherit(self, source: SequenceState, sequence: SequenceState, rows: int, *, moved: bool) -> None:
        self._speaker.inherit(source, sequence, rows, moved=moved)

    def retire(self, sequence: SequenceState) -> None:
        self._speaker.retire(sequence)

    def drop(self, sequence: SequenceState) -> None:
        self._speaker.drop(sequence)

    def forget(self) -> None:
        self._speaker.forget()

    def reasons(self, batch: int) -> list[str]:
        return self._speaker.reasons(batch)  # type: ignore[no-any-return]

    def rest(self, sequences: Sequence[SequenceState]) -> list[DraftTree]:
        return self._speaker.rest(sequences)  # type: ignore[no-any-return]

    def draft(self, sequences: Sequence[SequenceState], budgets: Sequence[Budget]) -> list[DraftTree]:
        trees = self._speaker.draft(sequences, budgets)
        if self._alone is not None:
            self.passes = self._alone.passes
        return trees  # type: ignore[no-any-return]

    def update_on_device(self, scored: Scored, verdicts: Verdicts) -> None:
        self._speaker.update_on_device(scored, verdicts)

    def draft_next(self, budgets: Sequence[Budget]) -> list[DraftTree] | None:
        return self._speaker.draft_next(budgets)  # type: ignore[no-any-return]

    def update(self, sequences: Sequence[SequenceState], scored: Scored, verdicts: Sequence[Verdict]) -> None:
        self._speaker.update(sequences, scored, verdicts)
