"""`auto`, the drafter of the method `default`: it chooses the best of all available sources in every step.

A trained head is a source if the package ships one for the target, or if the user names one. A draft model is a source
if the user names it: `auto:model(ID)+head(FILE)`. Memories are a source too, except if a head is the only other source:
a head copies earlier text by itself. If there are several sources, the engine lets the one draft that is fastest for
its texts (`control.guard`). Each may also draft nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from torch import Tensor

from branchwise.backends.base import Needs, Prefill, Scored, TargetInfo
from branchwise.core.sequence import SequenceState
from branchwise.core.tree import DraftTree
from branchwise.draft import DRAFTERS
from branchwise.draft.base import Budget, Drafter, LearningDrafter, reusable_by_all
from branchwise.draft.builder import NodeProbs, TreePolicy
from branchwise.draft.head.drafter import HeadDrafter
from branchwise.draft.head.file import TrainedHead
from branchwise.draft.head.shipped import shipped_head
from branchwise.draft.lookup.base import own_seed
from branchwise.draft.lookup.fusion import split_members
from branchwise.draft.lookup.memories import DefaultDrafter
from branchwise.draft.model.drafter import ModelDrafter
from branchwise.draft.model.specialists import Specialists
from branchwise.draft.model.usual import usual_trees
from branchwise.draft.policies.topk import TopK
from branchwise.draft.tree_drafter import ExpandRequest, TreeDrafter
from branchwise.errors import UsageError
from branchwise.registry import split_spec
from branchwise.verify import Verdict, Verdicts

BESIDES = "model", "head"
"""drafters that the user may name"""


class AutoDrafter(TreeDrafter, LearningDrafter):
    """A method that does not mention several sources delegates to the first of them. Without an engine, which chooses
    among them, the first source drafts alone."""

    name = "auto"

    def __init__(self, named: str | None = None, tree: TreePolicy | None = None) -> None:
        """`named` are the sources that the user names: `model(ID)`, `head(FILE)`, or both with a + between them, each
        with the options of that drafter. If a `tree` is given, every source uses it."""
        self.memories = DefaultDrafter(tree)
        super().__init__(self.memories.tree)
        self.members = self.memories.members
        self._given = tree
        specs = specs_of(named) if named else {}
        self._head: HeadDrafter | None = None
        self._model: ModelDrafter | Specialists | None = None
        if "head" in specs:
            self._head = DRAFTERS.build(specs["head"], tree=tree)
        if "model" in specs:
            self._model = DRAFTERS.build(specs["model"], tree=tree or TopK(1))  # the tree for now: `bind` chooses it
        self._first: Drafter = self.memories
        self.tasks = self._model.tasks if self._model is not None else ()

    def assign(self, sequence: SequenceState, task: str) -> None:
        assert self._model is not None
        self._model.assign(sequence, task)

    def bind(self, target: TargetInfo) -> None:
        super().bind(target)
        heads, models = self._heads(target), self._models(target)
        # A head copies earlier text into its own trees: as the only other source, memories would cost more in trials
        # than they gain.
        found = [*heads, *models] if heads and not models else [*heads, self.memories, *models]
        self.memories.bind(target)
        self._first, self.sources = found[0], found if len(found) > 1 else ()
        self.paces = bool(self.sources) or self._first.paces
        self.cost = max((source.cost for source in found if source.cost is not None), default=None)

    def let_foresee(self, allowed: bool) -> None:
        for source in self.sources or (self._first,):
            source.let_foresee(allowed)

    def _heads(self, target: TargetInfo) -> list[Drafter]:
        head, file = self._head, shipped_head(target)
        if head is None and file is not None:
            head = HeadDrafter(TrainedHead.load(file), tree=self._given)
        if head is None:
            return []
        head.bind(target)
        return [head]

    def _models(self, target: TargetInfo) -> list[Drafter]:
        """The draft model once with each of its trees."""
        if self._model is None:
            return []
        self._model.bind(target)
        if self._given is not None:
            return [self._model]
        return [self._model.with_tree(tree) for tree in usual_trees(target.device, self._model.cost)]

    @property
    def source(self) -> str:
        return self.name if self.sources else self._first.source

    @property
    def passes(self) -> int:  # type: ignore[override]
        return sum(source.passes for source in self.sources or (self._first,))

    @property
    def needs(self) -> Needs:
        return self._first.needs if not self.sources else Needs.joined(source.needs for source in self.sources)

    def derive_seed(self, sequence: SequenceState) -> int:
        return own_seed(self, sequence)

    def save(self) -> dict[str, Tensor]:
        return self.memories.save()

    def restore(self, tensors: dict[str, Tensor]) -> None:
        self.memories.restore(tensors)

    def forget(self) -> None:
        for source in self.sources or (self._first,):
            source.forget()

    def reasons(self, batch: int) -> list[str]:
        return [reason for source in self.sources or (self._first,) for reason in source.reasons(batch)]

    # Texts that begin alike: a source that does not follow texts has nothing to keep

    def reusable(self, source: SequenceState, sequence: SequenceState, rows: int) -> int:
        return reusable_by_all(self.sources or (self._first,), source, sequence, rows)

    def inherit(self, source: SequenceState, sequence: SequenceState, rows: int, *, moved: bool) -> None:
        for one in self.sources or (self._first,):
            one.inherit(source, sequence, rows, moved=moved)

    def retire(self, sequence: SequenceState) -> None:
        for source in self.sources or (self._first,):
            source.retire(sequence)

    def drop(self, sequence: SequenceState) -> None:
        for source in self.sources or (self._first,):
            source.drop(sequence)

    # The first source

    def start(self, sequence: SequenceState, prefill: Prefill) -> None:
        self._first.start(sequence, prefill.part_for(self._first.needs))

    def draft(self, sequences: Sequence[SequenceState], budgets: Sequence[Budget]) -> list[DraftTree]:
        return self._first.draft(sequences, budgets)

    def look(self, requests: Sequence[ExpandRequest]) -> list[NodeProbs]:
        return self.memories.look(requests)

    def rest(self, sequences: Sequence[SequenceState]) -> list[DraftTree]:
        return self._first.rest(sequences)

    def update(self, sequences: Sequence[SequenceState], scored: Scored, verdicts: Sequence[Verdict]) -> None:
        self._first.update(sequences, scored, verdicts)

    def follow(self, sequences: Sequence[SequenceState], scored: Scored, verdicts: Sequence[Verdict]) -> None:
        self._first.follow(sequences, scored, verdicts)

    def finish(self, sequence: SequenceState) -> None:
        self._first.finish(sequence)

    def update_on_device(self, scored: Scored, verdicts: Verdicts) -> None:
        self._first.update_on_device(scored, verdicts)

    def follow_on_device(self, scored: Scored, verdicts: Verdicts) -> None:
        self._first.follow_on_device(scored, verdicts)

    def draft_next(self, budgets: Sequence[Budget]) -> list[DraftTree] | None:
        return self._first.draft_next(budgets)


def specs_of(named: str) -> dict[str, str]:
    """`model(ID)+head(FILE)` as the specs of these drafters, by name."""
    with suppress(UsageError):
        members = split_members(named)
        specs = {split_spec(spec)[0]: spec for spec in members}
        if len(specs) == len(members) and all(split_spec(spec)[1] for spec in members) and specs.keys() <= {*BESIDES}:
            return specs
    raise UsageError(f"Drafter 'auto' takes model(ID), head(FILE), or both with a + between them, not {named!r}.")
