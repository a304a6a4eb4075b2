"""Drafters that grow trees: a source of distributions, and a tree policy that asks it.

A source is a subclass with a method `look`, which answers the requests of all sequences at once: one pass of a model
serves a whole level of a whole batch. A source may mix earlier distributions of the target into its own (`recall.py`).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from branchwise.backends.base import Needs, Scored, TargetInfo
from branchwise.core.sequence import SequenceState
from branchwise.core.tree import DraftTree, Draw
from branchwise.draft.base import NO_NEEDS, Budget, Drafter
from branchwise.draft.builder import Judged, NodeProbs, TreeBuilder, TreeCoroutine, TreePolicy
from branchwise.draft.constrained import allowed_probs, place_of
from branchwise.draft.foresight import foreseen_probs, keys_behind, temperature_of
from branchwise.draft.recall import TargetProbsMixer
from branchwise.draft.sampler import DeviceSampler, SampleRequest, sample_batch, sampler_for
from branchwise.verify import Verdict


@dataclass(frozen=True, eq=False)
class ExpandRequest:
    """Nodes of the tree of one sequence whose distributions a policy asks for."""

    sequence: SequenceState
    tree: TreeBuilder
    nodes: list[int]
    """numbers of at least one node, all different; the distributions of their ancestors were asked for before"""


class TreeDrafter(Drafter):
    """A drafter that grows the trees of a policy."""

    recall: TargetProbsMixer | None = None
    """memory of the target's distributions, for a source that mixes them into its own"""
    kept_probs: dict[SequenceState, dict[tuple[int, ...], Tensor]] | None = None
    """if set, the distributions that trees were grown from, by the path from the root"""

    def __init__(self, tree: TreePolicy) -> None:
        self.tree = tree
        self.draw = tree.draw
        self.learns = self.learns or tree.learns
        self.target: TargetInfo | None = None
        self._device_sampler = DeviceSampler()
        self._drafted: list[DraftTree] = []

    @property
    def largest(self) -> int:  # type: ignore[override]
        """As in `Drafter`, read from the policy at every call: a drafter may choose another policy for its target."""
        return self.tree.largest

    @property
    def needs(self) -> Needs:
        if self.target is None or self.target.device.type == "cpu":
            return NO_NEEDS
        return Needs(pad_shape=self.tree.pad_shape)

    def bind(self, target: TargetInfo) -> None:
        if self.target is None or self.target.device != target.device:
            self._device_sampler = DeviceSampler(target.device, capture=target.execution.graphs)
        self.target = target

    @abstractmethod
    def look(self, requests: Sequence[ExpandRequest]) -> list[NodeProbs]:
        """The distributions after the nodes of every request, in one pass."""

    def draft(self, sequences: Sequence[SequenceState], budgets: Sequence[Budget]) -> list[DraftTree]:
        growing = [self._grow(sequence, budget) for sequence, budget in zip(sequences, budgets, strict=True)]
        trees: dict[int, DraftTree] = {}
        expand_requests: dict[int, ExpandRequest] = {}
        sample_requests: dict[int, SampleRequest] = {}
        answers: dict[int, Any] = dict.fromkeys(range(len(growing)))
        while answers:
            for row, answer in answers.items():
                try:
                    request = growing[row].send(answer)
                except StopIteration as end:
                    trees[row] = end.value
                    continue
                if isinstance(request, SampleRequest):
                    sample_requests[row] = request
                else:
                    expand_requests[row] = ExpandRequest(sequences[row], *request)
            # Answer all draws first, so that the trees of a batch then ask for a level together.
            if sample_requests:
                answers = dict(zip(sample_requests, sample_batch(list(sample_requests.values())), strict=True))
                sample_requests.clear()
            else:
                answers = dict(zip(expand_requests, self._look_and_keep(list(expand_requests.values())), strict=True))
                expand_requests.clear()
        self._drafted = [trees[row] for row in range(len(growing))]
        return self._drafted

    def rest(self, sequences: Sequence[SequenceState]) -> list[DraftTree]:
        self._drafted = [DraftTree.root(sequence.root) for sequence in sequences]
        return self._drafted

    def _look_and_keep(self, requests: list[ExpandRequest]) -> list[NodeProbs]:
        answers = self.look(requests) if requests else []
        answers = [
            found
            if (here := place_of(request.sequence)) is None
            else allowed_probs(here, request.tree, request.nodes, found)
            for request, found in zip(requests, answers, strict=True)
        ]
        if self.kept_probs is not None:
            for request, found in zip(requests, answers, strict=True):
                paths = [tuple(request.tree.path(node)) for node in request.nodes]
                self.kept_probs.setdefault(request.sequence, {}).update(zip(paths, found.probs, strict=True))
        if self.foresees and self.draw is Draw.FIXED:
            self._foresee(requests, answers)
        return answers

    @staticmethod
    def _foresee(requests: Sequence[ExpandRequest], answers: list[NodeProbs]) -> None:
        """Replace probabilities by chances (`foresight`) if tokens are drawn and distributions are whole. All texts are
        computed together, so that a device is called once."""
        rows = {
            row: found.found
            for row, (request, found) in enumerate(zip(requests, answers, strict=True))
            if isinstance(found.found, Tensor) and temperature_of(request.sequence)
        }
        if not rows:
            return
        asked = [requests[row] for row in rows]
        keys = [keys_behind(one.sequence, [one.tree.depths[node] for node in one.nodes]) for one in asked]
        chances = foreseen_probs(torch.cat([*rows.values()]), torch.cat(keys)).split([len(some) for some in keys])
        for row, own in zip(rows, chances, strict=True):
            answers[row] = NodeProbs(own, answers[row].hidden)

    def update(self, sequences: Sequence[SequenceState], scored: Scored, verdicts: Sequence[Verdict]) -> None:
        if self.recall is None and not self.tree.watches:
            return  # nothing reads the logits, and splitting the rows of many texts takes long
        judged = [Judged(*one) for one in zip(sequences, self._drafted, scored.logits, verdicts, strict=False)]
        if self.recall is not None:
            self.recall.learn(judged)
        self.tree.update(judged)

    def forget(self) -> None:
        self.tree.forget()

    def _mixed(self, request: ExpandRequest, probs: Tensor) -> Tensor:
        """Distributions (nodes, vocabulary) of a source, mixed with the remembered ones of the target."""
        return probs if self.recall is None else self.recall.mix(request.sequence, request.tree, request.nodes, probs)

    def _grow(self, sequence: SequenceState, budget: Budget) -> TreeCoroutine:
        return self.tree.grow_for(sequence, budget, sampler_for(sequence, self._device_sampler))
