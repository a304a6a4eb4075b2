"""Trains a stop rule: after which nodes does the target accept the next drafted token?

Lu et al. (arXiv 2409.10644): draft ten nodes below the root, note the drafter's features at each, and learn from them
whether the target accepts the token that is drawn after the node. Two labels:

    soft   clamp(p / q, 0, 1) of the drawn token. We take its mean over all tokens, sum of min(p, q): learning from many
           drawn tokens would find the same, with more noise.
    hard   whether both models have the same most probable token.

A sample is a node below the root, as when the rule is used. Held-out texts decide which epoch is kept, since nodes of
one text are too similar to test each other.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from math import ceil

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from branchwise.backends.base import Target
from branchwise.core.batch import TreeBatch
from branchwise.core.rng import Chance
from branchwise.core.sampling import SamplingParams
from branchwise.core.target_probs import TargetProbs
from branchwise.core.tree import Draw
from branchwise.draft.base import Budget, Drafter
from branchwise.draft.builder import NodeProbs, TreeBuilder, TreeCoroutine, TreePolicy
from branchwise.draft.policies.stop import features, network_of, widths_of
from branchwise.draft.sampler import DraftSampler
from branchwise.engine import Engine, Request
from branchwise.errors import PairingError, UsageError
from branchwise.progress import Progress, silent
from branchwise.verify import Verdicts
from branchwise.verify.match import Match

WIDTH = 10
LEAST = 50
"""the fewest samples; fewer teach nothing"""


@dataclass(frozen=True, eq=False)
class Samples:
    features: Tensor
    """(samples, width) float32"""
    labels: Tensor
    """(samples,) float32, between 0 and 1"""
    texts: Tensor
    """(samples,) int64: the number of the prompt that each belongs to"""

    def __len__(self) -> int:
        return len(self.labels)

    def where(self, chosen: Tensor) -> Samples:
        return Samples(self.features[chosen], self.labels[chosen], self.texts[chosen])


# Collecting


class Fan(TreePolicy):
    """A policy of one level that also asks for the distributions after it, and keeps them to learn from."""

    draw = Draw.WITHOUT_REPLACEMENT

    def __init__(self, kind: str, width: int = WIDTH) -> None:
        self.kind, self.width = kind, width
        self.needs_hidden = kind == "soft"
        self.found: dict[int, NodeProbs] = {}
        """the found nodes, by the number of the tree since the last `take`"""
        self._trees = count()

    def grow(self, root: int, budget: Budget, sampler: DraftSampler) -> TreeCoroutine:
        return self._grow(next(self._trees), root, budget, sampler)

    def _grow(self, number: int, root: int, budget: Budget, sampler: DraftSampler) -> TreeCoroutine:
        tree, width = TreeBuilder([root]), min(self.width, budget.nodes - 1)
        if budget.depth > 0 and width > 0:
            probs = (yield tree, [0]).drawable[0]
            tree.probs[0] = probs
            self.found[number] = yield tree, [tree.add(0, token) for token in sampler.order(probs, width, 0)]
        return tree.finish(self.draw)

    def take(self) -> dict[int, NodeProbs]:
        """The nodes found in the trees since the last call."""
        found, self.found, self._trees = self.found, {}, count()
        return found


class Judge(Match):
    """`match`, which also compares the distributions of a fan with those of the target, warped as the text asks."""

    def __init__(self, fan: Fan) -> None:
        super().__init__()
        self.fan = fan
        self.samples: dict[int, tuple[Tensor, Tensor]] = {}
        """features and labels of the last step, by row of the batch"""

    def __call__(self, batch: TreeBatch, probs: TargetProbs, chance: Chance) -> Verdicts:
        found = self.fan.take()
        nodes = torch.arange(1, max(batch.nodes, 2), device=batch.device).clamp_max(batch.nodes - 1)
        p = probs.at(nodes.expand(len(batch), -1))
        if self.fan.needs_hidden and any(nodes.hidden is None for nodes in found.values()):
            raise PairingError("This drafter has no hidden states to learn from; use a draft model, or --kind hard.")
        kind = self.fan.kind
        self.samples = {
            row: (features(kind, nodes).cpu(), labels(kind, p[row, : len(nodes.probs)], nodes.probs).cpu())
            for row, nodes in found.items()
        }
        return super().__call__(batch, probs, chance)


def labels(kind: str, p: Tensor, q: Tensor) -> Tensor:
    """(nodes,): the right score of each node, given the distributions (nodes, vocabulary) p and q."""
    if kind == "hard":
        return (p.argmax(dim=-1) == q.argmax(dim=-1)).float()
    return torch.minimum(p, q).sum(dim=-1).clamp(0, 1).float()


def collect(
    target: Target,
    drafter: Drafter,
    fan: Fan,
    prompts: Sequence[tuple[int, ...]],
    *,
    samples: int,
    length: int = 200,
    temperature: float = 1.0,
    seed: int = 0,
    stop_tokens: frozenset[int] = frozenset(),
    progress: Progress = silent,
) -> Samples:
    """Let the target write, with a drafter that grows `fan`, until every prompt has given its part of the samples."""
    judge = Judge(fan)
    engine = Engine(target, drafter, judge, Budget(1 + fan.width, 1))
    part = ceil(samples / len(prompts))
    brought = [0] * len(prompts)
    seen: list[Samples] = []
    for turn in count():  # a text that ends too early is written again with another seed
        before = len(seen)
        texts = {}
        for number, prompt in enumerate(prompts):
            if brought[number] < part:
                sampling = SamplingParams(temperature=temperature, seed=seed + turn * len(prompts) + number)
                texts[engine.submit(Request(prompt, sampling, length, stop_tokens))] = number
        try:
            while engine.busy:
                moved = engine.step()
                for row, (x, y) in judge.samples.items():
                    number = texts[moved[row]]
                    brought[number] += len(y)
                    seen.append(Samples(x, y, torch.full((len(y),), number)))
                for text in [text for text, number in texts.items() if brought[number] >= part]:
                    engine.cancel(text)
                progress("drafted nodes", min(sum(min(part, n) for n in brought), samples), samples)
        finally:
            for text in texts:
                engine.cancel(text)
        for text in texts:
            text.check()
        if min(brought) >= part or len(seen) == before:
            break
    if sum(brought) < LEAST:
        raise UsageError(f"The texts brought fewer than {LEAST} drafted nodes, too few to learn from; ask for more.")
    return Samples(
        torch.cat([piece.features for piece in seen]),
        torch.cat([piece.labels for piece in seen]),
        torch.cat([piece.texts for piece in seen]),
    )


# Learning


@dataclass(frozen=True)
class Lesson:
    """How the training went, on texts that were held out."""

    samples: int
    held_out: int
    loss: float
    blind_loss: float
    """the loss of the best constant guess"""
    epoch: int
    """the epoch that was kept, counted from 1"""
    stopped: float
    """the share of nodes whose score is at most the threshold"""
    label_stopped: float | None
    """the mean label of these nodes, or of the others; None if no such nodes exist"""
    label_kept: float | None


def hold_out(samples: Samples) -> tuple[Samples, Samples]:
    """Samples to learn from and samples to test with: those of every fifth text, or of the last one."""
    texts = int(samples.texts.max()) + 1
    if texts < 2:
        raise UsageError("One prompt cannot be learned from and tested with; give at least two.")
    held = samples.texts % 5 == 4 if texts >= 5 else samples.texts == texts - 1
    learn, test = samples.where(~held), samples.where(held)
    if not len(learn) or not len(test):
        raise UsageError("Too few prompts brought drafted nodes to learn from and to test with; give longer ones.")
    return learn, test


def fit(
    kind: str,
    samples: Samples,
    *,
    threshold: float = 0.4,
    epochs: int = 10,
    batch: int = 64,
    seed: int = 0,
    progress: Progress = silent,
) -> tuple[nn.Sequential, Lesson]:
    """The network with the lowest loss on held-out texts, over all epochs."""
    learn, test = hold_out(samples)
    if kind == "hard" and len(set(learn.labels.tolist())) < 2:
        always = "always" if bool(learn.labels[0]) else "never"
        raise UsageError(f"Drafter and target {always} agree on these texts, so there is nothing to learn for a stop.")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network, best = _descend(kind, learn, test, epochs, batch, progress)
    return network, _summary(kind, network, learn, test, threshold, best)


def _descend(
    kind: str, learn: Samples, test: Samples, epochs: int, batch: int, progress: Progress
) -> tuple[nn.Sequential, int]:
    network = network_of(widths_of(kind, learn.features.shape[1]))
    mean, spread = learn.features.mean(dim=0), learn.features.std(dim=0, correction=0).clamp_min(1e-6)
    x, weights = (learn.features - mean) / spread, _weights(kind, learn.labels, learn.labels)
    optimiser = torch.optim.Adam(network.parameters(), lr=1e-3)
    halving = torch.optim.lr_scheduler.ExponentialLR(optimiser, gamma=0.5)
    best, lowest, kept = 0, float("inf"), network
    steps = ceil(len(learn) / batch)
    for epoch in range(1, epochs + 1):
        for step, rows in enumerate(torch.randperm(len(learn)).split(batch), start=1):
            optimiser.zero_grad()
            binary_cross_entropy_with_logits(network(x[rows])[:, 0], learn.labels[rows], weights[rows]).backward()
            optimiser.step()
            progress(f"epoch {epoch}", (epoch - 1) * steps + step, epochs * steps)
        halving.step()
        folded = _folded(network, mean, spread)
        loss = _loss(kind, folded, learn, test)
        if loss < lowest:
            best, lowest, kept = epoch, loss, folded
    return kept, best


def _weights(kind: str, labels: Tensor, learned: Tensor) -> Tensor:
    """(samples,): hard labels yes and no weigh the same in sum, as counted in `learned`; soft labels count alike."""
    if kind == "soft":
        return torch.ones_like(labels)
    yes = learned.mean()
    return torch.where(labels > 0.5, 0.5 / yes, 0.5 / (1 - yes))


def _folded(network: nn.Sequential, mean: Tensor, spread: Tensor) -> nn.Sequential:
    """The network for features as they are; it was trained on features scaled to mean 0 and spread 1."""
    folded = copy.deepcopy(network)
    first = folded[0]
    assert isinstance(first, nn.Linear)
    with torch.no_grad():
        first.weight.div_(spread)
        first.bias.sub_(first.weight @ mean)
    return folded


@torch.no_grad()
def _loss(kind: str, network: nn.Sequential, learn: Samples, test: Samples) -> float:
    weights = _weights(kind, test.labels, learn.labels)
    return float(binary_cross_entropy_with_logits(network(test.features)[:, 0], test.labels, weights))


@torch.no_grad()
def _summary(kind: str, network: nn.Sequential, learn: Samples, test: Samples, threshold: float, epoch: int) -> Lesson:
    weights = _weights(kind, test.labels, learn.labels)
    guess = ((weights * test.labels).sum() / weights.sum()).logit().expand(len(test))
    stopped = network(test.features)[:, 0].sigmoid() <= threshold
    return Lesson(
        samples=len(learn),
        held_out=len(test),
        loss=_loss(kind, network, learn, test),
        blind_loss=float(binary_cross_entropy_with_logits(guess.clamp(-20, 20), test.labels, weights)),
        epoch=epoch,
        stopped=float(stopped.float().mean()),
        label_stopped=float(test.labels[stopped].mean()) if bool(stopped.any()) else None,
        label_kept=float(test.labels[~stopped].mean()) if not bool(stopped.all()) else None,
    )
