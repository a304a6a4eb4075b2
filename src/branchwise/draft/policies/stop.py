"""Stopping early: a tree ends if the drafter itself gives its next tokens little probability.

Lu et al., "Improving Multi-candidate Speculative Decoding" (arXiv 2409.10644) end a tree after a level in which no node
scores above a threshold. Their score is that of a small network; a plain limit on confidence or entropy does as well.
At least one level comes from the drafter: if the first level of a fork comes from the target itself, which costs no
draft, a rule is asked from the second level on.

Stopping keeps a draft exact: a rule sees the distributions after nodes that are drawn already, and decides whether
anything is drawn from them; it never sees a token before the token is admitted. Several paths are an exception. They
must be independent draws of one depth, and if they decided on the depth together, they would depend on each other.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from branchwise.backends.base import TargetInfo
from branchwise.core.sequence import SequenceState
from branchwise.core.tree import Draw
from branchwise.draft.base import Budget
from branchwise.draft.builder import NodeProbs, TreeCoroutine, TreePolicy, WrappedPolicy
from branchwise.draft.sampler import DraftSampler, SampleRequest
from branchwise.draft.state import Format
from branchwise.errors import ModelError, PairingError, UsageError
from branchwise.models import cache_dir


class Stop(ABC):
    """A rule that may end a tree."""

    needs_hidden: bool = False
    """whether the rule reads hidden states of a draft model"""

    def bind(self, target: TargetInfo, draft: Callable[[], str]) -> None:
        """As `TreePolicy.bind`."""

    @abstractmethod
    def enough(self, found: NodeProbs, depth: int) -> bool:
        """Whether the nodes of this depth should have no children; `found` has the distributions after them."""

    def applied_to(self, policy: TreePolicy, name: str | None = None) -> Stopping:
        """The policy with this rule; errors call it `name`."""
        return Stopping(policy, self, name)


class Stopping(WrappedPolicy):
    """A `stoppable` policy whose trees a rule may end at every level but the root's."""

    def __init__(self, policy: TreePolicy, stop: Stop, name: str | None = None) -> None:
        if not policy.stoppable:
            raise PairingError(
                f"A tree {name or type(policy).__name__!r} may not stop early: it would no longer be drawn as its "
                "verifiers expect; use chain:L or rsd-c:4,2,1 with stop=, or leave stop= out."
            )
        super().__init__(policy)
        self.stop, self.lays = stop, False
        self.needs_hidden = policy.needs_hidden or stop.needs_hidden

    def bind(self, target: TargetInfo, draft: Callable[[], str]) -> None:
        super().bind(target, draft)
        self.stop.bind(target, draft)
        self.needs_hidden = self.policy.needs_hidden or self.stop.needs_hidden

    def grow(self, root: int, budget: Budget, sampler: DraftSampler) -> TreeCoroutine:
        return self._ended(super().grow(root, budget, sampler))

    def grow_for(self, sequence: SequenceState, budget: Budget, sampler: DraftSampler) -> TreeCoroutine:
        return self._ended(super().grow_for(sequence, budget, sampler))

    def _ended(self, growing: TreeCoroutine) -> TreeCoroutine:
        found = None
        while True:
            try:
                request = growing.send(found)
            except StopIteration as end:
                return end.value  # type: ignore[no-any-return]
            found = yield request
            if isinstance(request, SampleRequest):
                continue
            tree, nodes = request
            depth = tree.depths[nodes[0]]
            if depth > tree.trusted and self.stop.enough(found, depth):
                return tree.finish(self.draw, tuple(nodes) if self.draw is Draw.PATHS else ())


class Confidence(Stop):
    """`confidence:T`: enough if no node is followed by a token with more than this probability."""

    def __init__(self, threshold: float) -> None:
        self.threshold = _share(threshold, "Stop 'confidence' needs a probability")

    def enough(self, found: NodeProbs, depth: int) -> bool:
        return not bool((found.probs.amax(dim=-1) > self.threshold).any())


class Entropy(Stop):
    """`entropy:H`: enough if the distribution after every node has more than this entropy, in nats."""

    def __init__(self, nats: float) -> None:
        if not 0 < nats < math.inf:
            raise UsageError(f"Stop 'entropy' needs a positive number of nats, such as entropy:2, not {nats}.")
        self.nats = nats

    def enough(self, found: NodeProbs, depth: int) -> bool:
        return bool((torch.special.entr(found.probs).sum(dim=-1) > self.nats).all())


class Learned(Stop):
    """`learned:FILE`: enough if a network that `branchwise train stop` wrote scores no node above its threshold.

    `learned` alone takes the network that was trained for this draft model and this target. If none was trained, a
    limit on confidence takes its place.
    """

    def __init__(self, file: str = "", threshold: float | None = None) -> None:
        """A `threshold` replaces the threshold of the file."""
        self._given = threshold
        self.without = Confidence(UNTRAINED if threshold is None else threshold)
        self.scorer: Scorer | None = None
        self.trained_for_pair = not file
        if file:
            self._take(file)

    def bind(self, target: TargetInfo, draft: Callable[[], str]) -> None:
        if self.trained_for_pair:
            self.scorer, self.needs_hidden = None, False
            if (file := file_for(target, draft())).is_file():
                self._take(str(file))

    def _take(self, file: str) -> None:
        self.file, self.scorer = file, read_scorer(Path(file))
        given = self.scorer.threshold if self._given is None else self._given
        self.threshold = _share(given, "Stop 'learned' needs a threshold")
        self.needs_hidden = self.scorer.kind == "soft"

    def enough(self, found: NodeProbs, depth: int) -> bool:
        if self.scorer is None:
            return self.without.enough(found, depth)
        if self.needs_hidden and found.hidden is None:
            raise PairingError(
                f"The stop {self.file} looks at hidden states, and this drafter has none; "
                "use a draft model, or train a stop with --kind hard."
            )
        inputs = features(self.scorer.kind, found)
        if inputs.shape[1] != self.scorer.widths[0]:
            raise PairingError(
                f"The stop {self.file} was trained for the draft model {self.scorer.draft}, whose hidden states have "
                f"{self.scorer.widths[0]} numbers, and these have {inputs.shape[1]}; train one for this draft model."
            )
        return not bool((self.scorer.scores(inputs) > self.threshold).any())


def _share(value: float, what: str) -> float:
    if not 0 < value < 1:
        raise UsageError(f"{what} between 0 and 1, such as 0.4, not {value}.")
    return value


UNTRAINED = 0.4
"""the confidence below which an untrained stop ends a tree: the threshold of the paper"""


def file_for(target: TargetInfo, draft: str) -> Path:
    """Where the stop of a draft model, by the fingerprint of its weights, is kept for a target."""
    return cache_dir() / "stops" / f"{target.weights}-{draft}.safetensors"


# The inputs of the two networks of the paper

KINDS = ("soft", "hard")
TOP = 10


def features(kind: str, found: NodeProbs) -> Tensor:
    """(nodes, width): a hidden state for the soft network, entropy and largest probabilities for the hard one."""
    if kind == "soft":
        assert found.hidden is not None
        return found.hidden.float()
    largest = found.probs.topk(min(TOP, found.probs.shape[-1]), dim=-1).values
    largest = nn.functional.pad(largest, (0, TOP - largest.shape[-1]))
    return torch.cat([torch.special.entr(found.probs).sum(dim=-1, keepdim=True), largest], dim=1).float()


def widths_of(kind: str, hidden: int) -> tuple[int, ...]:
    """The sizes of the layers, for hidden states of this many numbers."""
    return (hidden, 512, 256, 1) if kind == "soft" else (1 + TOP, 4 * (1 + TOP), 1)


def network_of(widths: tuple[int, ...]) -> nn.Sequential:
    """Linear layers with ReLU between them; the output is the logit of the score."""
    layers: list[nn.Module] = []
    for inner, outer in pairwise(widths):
        layers += [nn.Linear(inner, outer), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


FORMAT = Format("stop", "train one with branchwise train stop", ModelError)


@dataclass(frozen=True, eq=False)
class Scorer:
    """A trained network and its description."""

    kind: str
    """soft: how often a token drawn after a node is accepted; hard: whether both models agree on the best token"""
    network: nn.Sequential
    threshold: float
    draft: str
    """the draft model that the network was trained for"""
    notes: Mapping[str, Any] = field(default_factory=dict)
    """for human readers: the target, the number of samples, the losses"""

    @property
    def widths(self) -> tuple[int, ...]:
        layers = [layer for layer in self.network if isinstance(layer, nn.Linear)]
        return (layers[0].in_features, *(layer.out_features for layer in layers))

    @torch.no_grad()
    def scores(self, inputs: Tensor) -> Tensor:
        """(nodes,): between 0 and 1, for features (nodes, width)."""
        logits: Tensor = self.network.to(inputs.device)(inputs)
        return logits[:, 0].sigmoid()


def write_scorer(scorer: Scorer, file: Path) -> None:
    """Write a scorer to a file. Its folder is created if it is in the cache, where the stops of pairs of models are."""
    known = {name: getattr(scorer, name) for name in ("kind", "widths", "threshold", "draft", "notes")}
    FORMAT.write(file, known, scorer.network.state_dict(), parents=cache_dir() in file.parents)


def read_scorer(file: Path) -> Scorer:
    if not file.is_file():
        raise ModelError(f"There is no stop {file}; write one with branchwise train stop --out {file}.")
    return FORMAT.read(file, _scorer)


def _scorer(known: dict[str, Any], tensors: dict[str, Tensor]) -> Scorer:
    kind, threshold, widths = known["kind"], float(known["threshold"]), tuple(known["widths"])
    if kind not in KINDS or widths != widths_of(kind, widths[0]) or not 0 < threshold < 1:
        raise ValueError("its sizes are not those of its kind")
    if not all(bool(tensor.isfinite().all()) for tensor in tensors.values()):
        raise ValueError("some weights are not finite")
    network = network_of(widths)
    network.load_state_dict(tensors)
    return Scorer(kind, network, threshold, str(known["draft"]), dict(known["notes"]))
