"""Drafters that grow their trees: a source of distributions, and a tree policy that asks it.

A source is a subclass with a method `look`, which answers the requests of all sequences at once: one pass of a model
serves a whole level of a whole batch. It may mix earlier distributions of the target into its own.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from branchwise.backends.base import Needs, Scored, TargetInfo
from branchwise.core.sequence import SequenceState
from branchwise.core.tree import DraftTree, Draw
from branchwise.draft.base import NO_NEEDS, Budget, Drafter
from branchwise.draft.builder import Judged, NodeProbs, TreeBuilder, TreeCoroutine, TreePolicy
from branchwise.draft.constrained import allowed_probs, place_of
from branchwise.draft.foresight import foreseen_probs, keys_behind, temperature_of
from branchwise.draft.sampler import DeviceSampler, SampleRequest, sample_batch, sampler_for
from branchwise.errors import UsageError
from branchwise.verify import Verdict

KEPT = 32
"""tokens of a distribution that are kept, the most probable ones"""
ROWS = 16
"""distributions that are kept of one tree, those of its accepted path first: each is a search through a vocabulary"""
PAIRS = 4096
"""pairs of tokens that are kept of one text; the oldest are dropped"""

Pair = tuple[int, int]
Remembered = tuple[Tensor, Tensor]
"""what followed two tokens: tokens (kept,) and logits (kept,) float32, whose softmax is the distribution"""


class TargetProbsMixer:
    """q' = (1 - share) q + share p, where p is the target's last distribution after the same two tokens.

    Improved MCSD (Lu et al., arXiv 2409.10644) starts trees with tokens of known distributions of the target, which
    changes what is written. Mixed into q, the same knowledge is lossless. Each text has its own memory: texts of one
    seed share their noise, so the tokens of one text would predict those of another.
    """

    def __init__(self, share: float) -> None:
        if not 0 < share < 1:
            raise UsageError(f"Recall needs a share between 0 and 1, such as recall=0.3, not {share}.")
        self.share = share
        self._memories: WeakKeyDictionary[SequenceState, dict[Pair, Remembered]] = WeakKeyDictionary()

    def learn(self, judged: Sequence[Judged]) -> None:
        """Keep distributions that a pass found; called before the tokens of a step are appended to the sequences."""
        for sequence, tree, rows, verdict in judged:
            nodes = worth_reading(tree, verdict)
            tokens = tree.tokens.tolist()
            logits, found = rows[nodes].topk(min(KEPT, rows.shape[-1]), dim=-1)
            memory = self._memories.setdefault(sequence, {})
            # In reverse, so that accepted nodes are the newest.
            for node, best, scores in reversed(list(zip(nodes, found, logits.float(), strict=True))):
                if (pair := last_two(sequence, tokens, tree.parents, node)) is not None:
                    memory.pop(pair, None)
                    memory[pair] = best, scores
            while len(memory) > PAIRS:
                del memory[next(iter(memory))]

    def mix(self, sequence: SequenceState, tree: TreeBuilder, nodes: Sequence[int], probs: Tensor) -> Tensor:
        """Distributions (nodes, vocabulary) to draw from after these nodes, given those of the draft."""
        memory = self._memories.get(sequence, {})
        pairs = [last_two(sequence, tree.tokens, tree.parents, node) for node in nodes]
        known = [(row, memory[pair]) for row, pair in enumerate(pairs) if pair in memory]
        if not known:
            return probs
        left = torch.ones(len(nodes), 1, dtype=probs.dtype)
        left[[row for row, _ in known]] -= self.share
        mixed = probs * left.to(probs.device)
        temperature = sequence.sampling.temperature or 1.0
        for row, (tokens, logits) in known:
            remembered = (logits.to(probs.dtype) / temperature).softmax(dim=-1)
            mixed[row].index_add_(0, tokens, self.share * remembered)
        return mixed


def worth_reading(tree: DraftTree, verdict: Verdict) -> list[int]:
    """The accepted nodes, then the rejected children of accepted nodes."""
    below = [child for node in verdict.path for child in tree.topology.children[node] if child not in verdict.path]
    return [*verdict.path, *below][:ROWS]


def last_two(sequence: SequenceState, tokens: Sequence[int], parents: Sequence[int], node: int) -> Pair | None:
    """The last two tokens of the text up to a node; None if there is only one."""
    if node > 0:
        return tokens[parents[node]], tokens[node]
    return None if len(sequence.tokens) < 2 else (sequence.tokens[-2], sequence.tokens[-1])


@dataclass(frozen=True, eq=False)
class ExpandRequest:
    """Nodes of the tree of one sequence whose distributions a policy asks for."""

    sequence: SequenceState
    tree: TreeBuilder
    nodes: list[int]
    """at least one, all different; the distributions of their ancestors were asked for before"""


class TreeDrafter(Drafter):
    """A drafter that grows the trees of a policy."""

    recall: TargetProbsMixer | None = None
    """remembers distributions of the target for a source that mixes them into its own"""
    kept_probs: dict[SequenceState, dict[tuple[int, ...], Tensor]] | None = None
    """if it is set, the distributions that trees were grown from, by the path from the root"""

    def __init__(self, tree: TreePolicy) -> None:
        self.tree = tree
        self.draw = tree.draw
        self.learns = self.learns or tree.learns
        self.target: TargetInfo | None = None
        self._device_sampler = DeviceSampler()
        self._drafted: list[DraftTree] = []

    @property
    def largest(self) -> int:  # type: ignore[override]
        """Of the tree that is drafted: a drafter may choose another one for its target."""
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
            # All draws come first, so that the trees of a batch ask for a level together.
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
        """Chances in place of probabilities, where tokens are drawn and distributions are whole; of all texts at
        once, so that a device is asked once."""
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
            return  # nobody asks, and the rows of many texts take long to tell apart
        judged = [Judged(*one) for one in zip(sequences, self._drafted, scored.logits, verdicts, strict=False)]
        if self.recall is not None:
            self.recall.learn(judged)
        self.tree.update(judged)

    def forget(self) -> None:
        self.tree.forget()

    def _mixed(self, request: ExpandRequest, probs: Tensor) -> Tensor:
        """Distributions (nodes, vocabulary) of a source, with what is remembered of the target's."""
        return probs if self.recall is None else self.recall.mix(request.sequence, request.tree, request.nodes, probs)

    def _grow(self, sequence: SequenceState, budget: Budget) -> TreeCoroutine:
        return self.tree.grow_for(sequence, budget, sampler_for(sequence, self._device_sampler))
