"""Drafters that grow their trees: a source of distributions, and a tree policy that asks it.

A source is a subclass with a method `look`. It answers the wishes of all sequences at once, so that one pass of a model
serves a whole level of a whole batch.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from branchwise.backends.base import Scored, Target
from branchwise.core.batch import PadShape
from branchwise.core.sequence import SequenceState
from branchwise.core.tree import DraftTree
from branchwise.draft.base import Budget
from branchwise.draft.builder import NodeProbs, TreeBuilder, TreeCoroutine, TreePolicy
from branchwise.draft.model.mixing import TargetProbsMixer
from branchwise.draft.sampler import DeviceSampler, SampleRequest, sample_batch, sampler_for
from branchwise.verify import Verdict


@dataclass(frozen=True, eq=False)
class ExpandRequest:
    """What a policy wants to know about the tree of one sequence."""

    sequence: SequenceState
    tree: TreeBuilder
    nodes: list[int]
    """at least one, all different; the distributions of their ancestors were asked for before"""


class TreeDrafter:
    """What every drafter of this kind has in common."""

    name: str
    recall: TargetProbsMixer | None = None
    """remembers distributions of the target for a source that mixes them into its own"""

    def __init__(self, tree: TreePolicy) -> None:
        self.tree = tree
        self.draw = tree.draw
        self.learns = bool(getattr(tree, "learns", False))
        self.passes = 0
        self.target: Target | None = None
        self._device_sampler = DeviceSampler()
        self._drafted: list[DraftTree] = []

    def bind(self, target: Target) -> None:
        if self.target is None or self.target.device != target.device:
            self._device_sampler = DeviceSampler(target.device, capture=getattr(target, "graphs", True))
        self.target = target

    @property
    def room(self) -> PadShape | None:
        """What every tree has room for on a device, where a policy says so: recorded verdicts want one shape."""
        on_host = self.target is None or self.target.device.type == "cpu"
        return None if on_host else getattr(self.tree, "room", None)

    @abstractmethod
    def look(self, requests: Sequence[ExpandRequest]) -> list[NodeProbs]:
        """What could follow the nodes of every wish, in one pass."""

    def draft(self, sequences: Sequence[SequenceState], budgets: Sequence[Budget]) -> list[DraftTree]:
        growing = [self._plant(sequence, budget) for sequence, budget in zip(sequences, budgets, strict=True)]
        trees: dict[int, DraftTree] = {}
        expand_requests: dict[int, ExpandRequest] = {}
        sample_requests: dict[int, SampleRequest] = {}

        def advance(row: int, answer: Any) -> None:
            """Let a tree grow to its next wish or throw, or to its end."""
            try:
                asked = growing[row].send(answer)
            except StopIteration as end:
                trees[row] = end.value
                return
            if isinstance(asked, SampleRequest):
                sample_requests[row] = asked
            else:
                expand_requests[row] = ExpandRequest(sequences[row], *asked)

        for row in range(len(growing)):
            advance(row, None)
        while (
            expand_requests or sample_requests
        ):  # all throws first: then the trees of a batch ask for a level together
            waiting = dict(sample_requests or expand_requests)
            answers = (
                sample_batch(list(sample_requests.values()))
                if sample_requests
                else self.look(list(expand_requests.values()))
            )
            (sample_requests or expand_requests).clear()
            for row, answer in zip(waiting, answers, strict=True):
                advance(row, answer)
        self._drafted = [trees[row] for row in range(len(growing))]
        return self._drafted

    def update(self, sequences: Sequence[SequenceState], scored: Scored, verdicts: Sequence[Verdict]) -> None:
        if self.recall is not None:
            self.recall.learn(sequences, self._drafted, scored, verdicts)
        if hasattr(self.tree, "update"):
            self.tree.update(sequences, self._drafted, scored, verdicts)

    def _plant(self, sequence: SequenceState, budget: Budget) -> TreeCoroutine:
        sampler = sampler_for(sequence, self._device_sampler)
        if hasattr(self.tree, "plant"):
            growing: TreeCoroutine = self.tree.plant(sequence, budget, sampler)
            return growing
        return self.tree.grow(sequence.root, budget, sampler)
