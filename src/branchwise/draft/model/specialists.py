"""A draft model by name, or a pack of specialists, one of which is chosen for each text.

A request may name its task, or the spec does (`model:PACK,task=code`). Otherwise a bandit (`control.bandit`) chooses
for every text separately, by how much of each specialist's drafts is accepted. The bandit looks at earlier steps of the
same text alone, and at no clock, so the guarantees of a verifier for any tree hold and a seed writes the same text
again.

Every specialist in use is a copy of the weights with a KV cache of its own, and runs as fast as any draft model. When a
specialist drafts for a text for the first time, or is chosen for it again, it first reads the tokens that it has not
read yet. A text that names its task does not pay for this.
"""

from __future__ import annotations

import copy
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

from branchwise.backends.base import Scored, TargetInfo
from branchwise.control.bandit import Bandit
from branchwise.core.sequence import SequenceState
from branchwise.core.tree import DraftTree
from branchwise.draft.base import Budget
from branchwise.draft.builder import NodeProbs, TreePolicy
from branchwise.draft.model.draft_model import Weights
from branchwise.draft.model.drafter import ModelDrafter
from branchwise.draft.model.pack import check_task, tasks_of
from branchwise.draft.policies.paths import Chain
from branchwise.draft.tree_drafter import ExpandRequest, TreeDrafter
from branchwise.verify import Verdict, Verdicts

MOST_OPEN = 4
"""most specialists in memory, those used last; more only while texts need them"""


class DraftModel(ModelDrafter):
    """The class behind `model:…`: it makes a drafter of one model, or of all specialists of a pack."""

    def __new__(  # type: ignore[misc]
        cls,
        model: str | Weights,
        temperature: float | None = None,
        top_k: int | None = None,
        trim: int | None = None,
        recall: float | None = None,
        task: str | None = None,
        weights: str | None = None,
        tree: TreePolicy | None = None,
    ) -> ModelDrafter | Specialists:
        options = {"temperature": temperature, "top_k": top_k, "trim": trim, "recall": recall, "weights": weights}
        tasks = tasks_of(model) if isinstance(model, str) else ()
        if task is not None:
            check_task(str(model), tasks, task)
        if task is None and tasks:
            assert isinstance(model, str)
            return Specialists(model, tasks, tree or Chain(), options)
        return ModelDrafter(model, tree=tree, task=task, **options)  # type: ignore[arg-type]


class Specialists(TreeDrafter):
    """All specialists of a pack."""

    name = ModelDrafter.name

    def __init__(self, model: str, tasks: Sequence[str], tree: TreePolicy, options: dict[str, Any]) -> None:
        super().__init__(tree)
        self.tasks = tuple(tasks)
        self._model, self._options = model, options
        self.recall = ModelDrafter(model, **options).recall  # shared by all specialists; checks the options too
        self._open: OrderedDict[str, dict[int, ModelDrafter]] = OrderedDict()
        """task -> `id` of a tree policy -> the task's specialist with this policy; the tasks used last come last"""
        self._texts: WeakKeyDictionary[SequenceState, str | Bandit] = WeakKeyDictionary()
        """text -> the task that it names, or the bandit that chooses one"""
        self._readers: dict[str, WeakSet[SequenceState]] = {task: WeakSet() for task in self.tasks}
        """task -> the texts of which its specialist has cached something"""
        self._seen = {task: [0, 0.0] for task in self.tasks}
        """task -> number of steps, and the sum of the accepted shares of the trees' depths"""
        self._rows: dict[str, list[int]] = {}
        """task -> the numbers of the texts of the current step for which its specialist drafts"""
        self._choosers: list[str | Bandit] = []
        """the task or bandit of each text of the current step"""
        self._closed: Counter[int] = Counter()
        """`id` of a tree policy -> passes of specialists that are no longer in memory"""

    def bind(self, target: TargetInfo) -> None:
        super().bind(target)
        self._open.clear()
        self.cost = self._specialist(self.tasks[0]).cost

    def with_tree(self, tree: TreePolicy) -> Specialists:
        """A drafter with the same specialists and another tree policy, made after `bind`."""
        other = copy.copy(self)
        other.tree, other.draw, other._rows = tree, tree.draw, {}
        return other

    @property
    def passes(self) -> int:  # type: ignore[override]
        own = id(self.tree)
        return self._closed[own] + sum(trees[own].passes for trees in self._open.values() if own in trees)

    def assign(self, sequence: SequenceState, task: str) -> None:
        self._texts[sequence] = task

    def reasons(self, batch: int) -> list[str]:
        return [
            f"Specialist {task} drafted in {steps} steps, and {given / steps:.0%} of its depth was accepted."
            for task, (steps, given) in self._seen.items()
            if steps
        ]

    # Texts

    def finish(self, sequence: SequenceState) -> None:
        for specialist in self._specialists():
            specialist.finish(sequence)
        self._forget(sequence)

    def inherit(self, source: SequenceState, sequence: SequenceState, rows: int, *, moved: bool) -> None:
        for task, trees in self._open.items():
            for specialist in trees.values():
                specialist.inherit(source, sequence, rows, moved=moved)
            if source in self._readers[task]:
                self._readers[task].add(sequence)

    def retire(self, sequence: SequenceState) -> None:
        for specialist in self._specialists():
            specialist.retire(sequence)
        self._texts.pop(sequence, None)

    def drop(self, sequence: SequenceState) -> None:
        for specialist in self._specialists():
            specialist.drop(sequence)
        self._forget(sequence)

    def _forget(self, sequence: SequenceState) -> None:
        self._texts.pop(sequence, None)
        for readers in self._readers.values():
            readers.discard(sequence)
        idle = [task for task in self._open if not self._readers[task]]
        for task in idle[: max(0, len(self._open) - MOST_OPEN)]:
            self._closed.update({tree: one.passes for tree, one in self._open.pop(task).items()})

    # Steps

    def draft(self, sequences: Sequence[SequenceState], budgets: Sequence[Budget]) -> list[DraftTree]:
        self._rows = self._by_task(sequences)
        trees: dict[int, DraftTree] = {}
        for task, rows in self._rows.items():
            specialist = self._specialist(task)
            specialist.kept_probs = self.kept_probs
            specialist.let_foresee(self.foresees)
            drafted = specialist.draft([sequences[row] for row in rows], [budgets[row] for row in rows])
            trees.update(zip(rows, drafted, strict=True))
            self._readers[task].update(sequences[row] for row in rows)
        self._drafted = [trees[row] for row in range(len(sequences))]
        return self._drafted

    def rest(self, sequences: Sequence[SequenceState]) -> list[DraftTree]:
        for task in self._rows:
            self._specialist(task).rest(())
        self._rows = {}
        return super().rest(sequences)

    def look(self, requests: Sequence[ExpandRequest]) -> list[NodeProbs]:
        found: dict[int, NodeProbs] = {}
        for task, rows in self._by_task([request.sequence for request in requests]).items():
            found.update(zip(rows, self._specialist(task).look([requests[row] for row in rows]), strict=True))
        return [found[row] for row in range(len(requests))]

    def update_on_device(self, scored: Scored, verdicts: Verdicts) -> None:
        if (specialist := self._only()) is not None:
            specialist.update_on_device(scored, verdicts)

    def draft_next(self, budgets: Sequence[Budget]) -> list[DraftTree] | None:
        return None if (specialist := self._only()) is None else specialist.draft_next(budgets)

    def update(self, sequences: Sequence[SequenceState], scored: Scored, verdicts: Sequence[Verdict]) -> None:
        super().update(sequences, scored, verdicts)
        if (specialist := self._only()) is not None:
            specialist.foresee(sequences, verdicts)
        for task, rows in self._rows.items():
            for row in rows:
                self._learn(task, self._choosers[row], self._drafted[row], verdicts[row])

    def _learn(self, task: str, chooser: str | Bandit, tree: DraftTree, verdict: Verdict) -> None:
        if not tree.depth:
            return
        given = (len(verdict.path) - 1) / tree.depth
        self._seen[task][0] += 1
        self._seen[task][1] += given
        if isinstance(chooser, Bandit):
            chooser.record(given)

    def _only(self) -> ModelDrafter | None:
        """The specialist of all texts of this step, if it is sure to draft for all of them in the next step too."""
        if len(self._rows) != 1 or not all(isinstance(one, str) or one.stays for one in self._choosers):
            return None
        [task] = self._rows
        return self._specialist(task)

    def _by_task(self, sequences: Sequence[SequenceState]) -> dict[str, list[int]]:
        """task -> the numbers of the texts that its specialist is chosen for."""
        rows: dict[str, list[int]] = {}
        self._choosers = [self._texts.setdefault(sequence, Bandit(len(self.tasks))) for sequence in sequences]
        for row, chooser in enumerate(self._choosers):
            task = chooser if isinstance(chooser, str) else self.tasks[chooser.arm]
            rows.setdefault(task, []).append(row)
        return rows

    # Specialists

    def _specialists(self) -> Iterable[ModelDrafter]:
        return [specialist for trees in self._open.values() for specialist in trees.values()]

    def _specialist(self, task: str) -> ModelDrafter:
        """The specialist of a task with the tree policy of this drafter, loaded if it is not in memory."""
        assert self.target is not None, "bind it first"
        trees = self._open.setdefault(task, {})
        self._open.move_to_end(task)
        own = id(self.tree)
        if own not in trees and trees:
            trees[own] = next(iter(trees.values())).with_tree(self.tree)
            trees[own].passes = 0
        elif own not in trees:
            made = ModelDrafter(self._model, tree=self.tree, task=task, **self._options)
            made.recall = self.recall
            made.bind(self.target)
            trees[own] = made
        return trees[own]
