"""Every tree that a tree policy can grow, each with its exact probability.

The policy is the code that serves users. It runs with a sampler that follows a script. After the end of the script the
sampler takes one outcome of each draw and notes the others, and the policy runs again for each of these, until none is
left.

Arrival times have too many outcomes. Only stochastic beam search draws them, and only their order matters to it. The
distribution of that order can be computed (`arrivals`), and for each order the policy runs with waits that produce it.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from branchwise.core.tree import DraftTree
from branchwise.draft.base import Budget
from branchwise.draft.builder import NodeProbs, TreeBuilder, TreePolicy, grow_with
from branchwise.draft.policies.rsd import Beam
from branchwise.draft.policies.stop import Stopping
from branchwise.draft.sampler import DraftSampler
from branchwise.draft.sparse import Probs, ProbsBatch

Prefix = tuple[int, ...]
Rule = Callable[[Prefix], Tensor]
"""from the tokens below the root to the distribution (vocabulary,) float64 after them"""


class Weighed(NamedTuple):
    weight: float
    tree: DraftTree


def grown_trees(policy: TreePolicy, rule: Rule, budget: Budget) -> list[Weighed]:
    """All trees of a policy over these distributions; their weights sum to 1.

    Every run starts from the policy as given: what it learns from a tree is forgotten before the next run.
    """
    found: dict[tuple[object, ...], Weighed] = {}
    for weight, tree in _weighed(policy, rule, budget):
        ends = tree.leaves, tree.draws
        same = (*tree.tokens.tolist(), tree.parents, *ends, None if tree.q is None else tree.q.numpy().tobytes())
        before = found[same].weight if same in found else 0.0
        found[same] = Weighed(before + weight, tree)
    return list(found.values())


def _weighed(policy: TreePolicy, rule: Rule, budget: Budget) -> Iterator[Weighed]:
    beam = policy
    while isinstance(beam, Stopping):
        beam = beam.policy
    if isinstance(beam, Beam):
        for weight, order in arrivals(rule, beam.width, beam.levels(budget)):
            yield Weighed(weight, grow(copy.deepcopy(policy), rule, budget, ArrangedSampler(order, rule)))
        return
    scripts: list[list[int]] = [[]]
    while scripts:
        sampler = ScriptedSampler(scripts.pop())
        tree = grow(copy.deepcopy(policy), rule, budget, sampler)
        scripts += sampler.others
        yield Weighed(sampler.weight, tree)


def grow(policy: TreePolicy, rule: Rule, budget: Budget, sampler: DraftSampler) -> DraftTree:
    """One tree over these distributions, which also stand for the hidden states that a policy may need."""

    def look(tree: TreeBuilder, nodes: list[int]) -> NodeProbs:
        probs = torch.stack([rule(tuple(tree.path(node))) for node in nodes])
        return NodeProbs(probs, probs if policy.needs_hidden else None)

    return grow_with(policy.grow(0, budget, sampler), look)


@dataclass
class ScriptedSampler(DraftSampler):
    """Draws as the script says, then always the smallest possible token."""

    script: list[int]
    weight: float = 1.0
    """the probability of all draws so far"""
    others: list[list[int]] = field(default_factory=list)
    """the scripts of the outcomes not taken"""
    _made: list[int] = field(default_factory=list)
    _asked: set[tuple[str, int]] = field(default_factory=set)

    def picks_from(self, probs: ProbsBatch, draws: Sequence[tuple[int, int]]) -> list[int]:
        masses = [masses_of(p) for p in probs]
        for _, draw in draws:
            self._ask("pick", draw)
        return [self._draw(masses[row]) for row, _ in draws]

    def orders(self, probs: ProbsBatch, sizes: Sequence[int], draws: Sequence[int]) -> list[list[int]]:
        for draw in draws:
            self._ask("order", draw)
        return [self._order(masses_of(row), size) for row, size in zip(probs, sizes, strict=True)]

    def next_of(self, left: Probs, node: int, turn: int, number: int) -> int:
        self._ask(f"turn below {node}", turn)
        assert ("order", node) not in self._asked, f"the policy drew an order below {node} twice"
        return super().next_of(left, node, turn, number)

    def wait(self, draw: int) -> float:
        raise NotImplementedError("a wait has too many outcomes to follow; arrange the waits as for `Beam`")

    def _ask(self, kind: str, draw: int) -> None:
        assert (kind, draw) not in self._asked, f"the policy asked twice for {kind} {draw}"
        self._asked.add((kind, draw))

    def _order(self, masses: dict[int, float], k: int) -> list[int]:
        tokens: list[int] = []
        for _ in range(min(k, len(masses))):
            tokens.append(self._draw(masses))
            del masses[tokens[-1]]
        return tokens

    def _draw(self, masses: dict[int, float]) -> int:
        """One token of `masses`, which need not sum to 1."""
        ways = sorted(masses)
        turn = len(self._made)
        if turn < len(self.script):
            token = self.script[turn]
        else:
            token = ways[0]
            self.others += [[*self._made, other] for other in ways[1:]]
        self.weight *= masses[token] / math.fsum(masses.values())
        self._made.append(token)
        return token


def masses_of(probs: Probs) -> dict[int, float]:
    """The tokens of a distribution that can be drawn, and their masses."""
    if isinstance(probs, Tensor):
        return {token: mass for token, mass in enumerate(probs.double().tolist()) if mass > 0}
    return dict(probs.masses)


# Stochastic beam search


def arrivals(rule: Rule, width: int, levels: int) -> Iterator[tuple[float, list[Prefix]]]:
    """The orders in which the first prefixes of each length can arrive, with their probabilities.

    Continuations of full length race, each with its probability as its rate: they arrive in the order of draws without
    replacement. A prefix is met with the first of its continuations. A level of the beam holds the first `width`
    prefixes of its length that are met. An order has the first `width` prefixes of full length, and after them the
    shorter prefixes that are not met with those.
    """

    def meet(length: int, met: list[Prefix]) -> Iterator[tuple[float, list[Prefix]]]:
        known = {prefix[:length] for prefix in met}
        others = {prefix: mass for prefix, mass in masses[length].items() if prefix not in known}
        if length == 0:
            yield 1.0, met
        elif len(known) == width or not others:
            yield from meet(length - 1, met)
        else:  # whatever longer prefixes come in between, the next new one is drawn from those not met yet
            whole = math.fsum(others.values())
            for prefix, mass in others.items():
                for weight, order in meet(length, [*met, prefix]):
                    yield mass / whole * weight, order

    masses: list[dict[Prefix, float]] = [{(): 1.0}]
    for _ in range(levels):
        following = {
            (*prefix, token): mass * share
            for prefix, mass in masses[-1].items()
            for token, share in enumerate(rule(prefix).tolist())
            if share > 0
        }
        masses.append(following)
    return meet(levels, [])


class ArrangedSampler(DraftSampler):
    """Lets a beam search meet prefixes in a given order: prefix number n arrives at time n."""

    def __init__(self, order: Sequence[Prefix], rule: Rule) -> None:
        self._rule = rule
        self._times: dict[Prefix, int] = {}
        for time, prefix in enumerate(order):
            for length in range(len(prefix) + 1):
                self._times.setdefault(prefix[:length], time)
        self._nodes = sorted(self._times, key=lambda prefix: (len(prefix), self._times[prefix]))
        """the prefixes in the order in which they join the tree"""

    def picks_from(self, probs: ProbsBatch, draws: Sequence[tuple[int, int]]) -> list[int]:
        return [self._nodes[draw][-1] for _, draw in draws]

    def orders(self, probs: ProbsBatch, sizes: Sequence[int], draws: Sequence[int]) -> list[list[int]]:
        raise NotImplementedError("a beam draws one token at a time")

    def wait(self, draw: int) -> float:
        """The time until the next sibling of a node arrives, times the rate by which the policy divides it."""
        prefix = self._nodes[draw]
        parent, now = prefix[:-1], self._times[prefix]
        siblings = {other[-1]: time for other, time in self._times.items() if other and other[:-1] == parent}
        later = [time for time in siblings.values() if time > now]
        if not later:
            return math.inf
        rate = math.prod(float(self._rule(parent[:length])[token]) for length, token in enumerate(parent))
        come = {token for token, time in siblings.items() if time <= now}
        rate *= math.fsum(mass for token, mass in enumerate(self._rule(parent).tolist()) if token not in come)
        return (min(later) - now) * rate
