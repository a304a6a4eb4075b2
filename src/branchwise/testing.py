"""Doubles for tests: a toy target, drafters of every degree of skill, and worlds whose best tree size is known."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from unittest import mock

import torch

from branchwise.backends.toy import ToyTarget
from branchwise.core.sequence import SequenceState
from branchwise.core.tree import DraftTree, Draw
from branchwise.draft.base import Budget, Drafter
from branchwise.draft.builder import Candidate, Judged, TreeBuilder
from branchwise.draft.policies.adaptive import SIZES, AdaptiveSize
from branchwise.draft.policies.topk import grow_best_first
from branchwise.verify import Verdict

__all__ = ["COSTS", "SOURCES", "ContrarianDrafter", "RandomDrafter", "ToyTarget", "TruthDrafter", "World"]


class RandomDrafter(Drafter):
    """Drafts without skill: random tokens on random trees."""

    name = "random"

    def __init__(self, vocabulary: int, *, nodes: int = 12, seed: int = 0) -> None:
        self.vocabulary = vocabulary
        self.nodes = nodes
        self._random = random.Random(seed)

    def draft(self, sequences: Sequence[SequenceState], budgets: Sequence[Budget]) -> list[DraftTree]:
        return [self._draft(sequence, budget) for sequence, budget in zip(sequences, budgets, strict=True)]

    def _draft(self, sequence: SequenceState, budget: Budget) -> DraftTree:
        parents = [-1]
        for node in range(1, min(self.nodes, budget.nodes)):
            # Parents that never go back keep the nodes in level order.
            parents.append(self._random.randint(max(parents[-1], 0), node - 1))
        tokens = [sequence.root] + [self._random.randrange(self.vocabulary) for _ in parents[1:]]
        return DraftTree(torch.tensor(tokens), tuple(parents)).cut(nodes=budget.nodes, depth=budget.depth)


@dataclass(eq=False)
class TruthDrafter(Drafter):
    """Knows the text that will be written and drafts it, with `decoys` wrong siblings before every true token.

    `truth` maps the tokens of a prompt to the continuation that plain decoding writes.
    """

    truth: dict[tuple[int, ...], list[int]]
    vocabulary: int
    length: int = 5
    decoys: int = 0
    name = "truth"

    def draft(self, sequences: Sequence[SequenceState], budgets: Sequence[Budget]) -> list[DraftTree]:
        return [self._draft(sequence, budget) for sequence, budget in zip(sequences, budgets, strict=True)]

    def _draft(self, sequence: SequenceState, budget: Budget) -> DraftTree:
        written = len(sequence.output)
        ahead = self.truth[tuple(sequence.tokens[: sequence.prompt_length])][written : written + self.length]
        tokens, parents, parent = [sequence.root], [-1], 0
        for token in ahead:
            decoys = [(token + 1 + i) % self.vocabulary for i in range(self.decoys)]
            tokens += [*decoys, self._pretend(token)]
            parents += [parent] * (self.decoys + 1)
            parent = len(tokens) - 1
        return DraftTree(torch.tensor(tokens), tuple(parents)).cut(nodes=budget.nodes, depth=budget.depth)

    def _pretend(self, token: int) -> int:
        return token


class ContrarianDrafter(TruthDrafter):
    """Adversarial: knows the text that will be written and drafts anything else."""

    name = "contrarian"

    def _pretend(self, token: int) -> int:
        return (token + 1 + self.decoys) % self.vocabulary


# A machine and a text whose every property is known

ROOM = Budget(128, 16)
OTHER = 99
"""a token that no source promises"""
Cost = Callable[[int], float]
"""seconds of a pass over this many rows, those of all texts together"""

COSTS: dict[str, Cost] = {
    "flat": lambda rows: 1 + rows / 200,
    "steep": lambda rows: 1 + rows / 6,
    "cliff": lambda rows: 1.0 if rows <= 8 else 2.5 + rows / 100,
    "second row": lambda rows: 1.0 if rows == 1 else 1.9 + rows / 40,
}
"""machines: rows cost little, cost much, cost nothing up to a cliff, or cost most of a pass from the second row on"""
SOURCES: dict[str, tuple[Sequence[float], Sequence[float]]] = {
    "sure": ((0.8, 0.1), (0.8, 0.1)),
    "torn": ((0.4, 0.3, 0.1), (0.4, 0.3, 0.1)),
    "poor": ((0.1, 0.05, 0.05), (0.1, 0.05, 0.05)),
    "liar": ((0.9, 0.08), (0.0, 0.0)),
    "boaster": ((0.9, 0.08), (0.05, 0.05)),
    "optimist": ((0.9, 0.08), (0.3, 0.1)),
    "pessimist": ((0.6, 0.05), (0.8, 0.05)),
}
"""sources of candidates: the promised probabilities, and the true ones; the first three are honest"""


@dataclass
class World:
    """A text and a machine: what a source promises of its candidates, what is true, and what passes cost."""

    promised: Sequence[float]
    """promised probabilities of the candidates at every place, the best first; their tokens are 0, 1, 2, ..."""
    true: Sequence[float]
    cost: Cost
    noise: float = 0.05
    batch: int = 1
    """how many texts, all alike, are written together"""
    rng: random.Random = field(default_factory=lambda: random.Random(0))
    now: float = 0.0

    def candidates(self, cursor: object) -> list[Candidate]:
        return [Candidate(token, mass, (), "") for token, mass in enumerate(self.promised)]

    def speed(self, policy: AdaptiveSize, steps: int) -> float:
        """Tokens a second over `steps` steps, by the clock of this world."""
        start = self.now
        with mock.patch.object(time, "perf_counter", self.clock):
            came = sum(self.step(policy) for _ in range(steps))
        return came / (self.now - start)

    def clock(self) -> float:
        return self.now

    def step(self, policy: AdaptiveSize) -> int:
        """Take one step; returns how many tokens came."""
        texts = range(self.batch)
        laid = policy.lay_all([0 for _ in texts], [() for _ in texts], self.candidates, [ROOM for _ in texts])
        trees = [tree.finish(Draw.FIXED) for tree in laid]
        verdicts = [self.verdict(tree) for tree in trees]
        rows = self.batch * max(map(len, trees))
        self.now += self.cost(rows) * self.rng.lognormvariate(-(self.noise**2) / 2, self.noise)
        pairs = zip(trees, verdicts, strict=True)
        policy.update([Judged(SequenceState([0]), tree, torch.zeros(len(tree), 1), verdict) for tree, verdict in pairs])
        return sum(len(verdict.path) for verdict in verdicts)

    def verdict(self, tree: DraftTree) -> Verdict:
        path = [0]
        while True:
            ranks = [*range(len(self.true)), None]
            token = self.rng.choices(ranks, [*self.true, max(0.0, 1 - sum(self.true))])[0]
            below = [n for n in range(1, len(tree)) if tree.parents[n] == path[-1] and int(tree.tokens[n]) == token]
            if token is None or not below:
                return Verdict(tuple(path), OTHER if token is None else token)
            path.append(below[0])

    def fixed(self, size: int) -> float:
        """Tokens a second, in the long run, of trees that always have `size` nodes."""
        tree = TreeBuilder([0])
        grown = len(list(islice(grow_best_first(tree, (), self.candidates, depth=ROOM.depth, width=8), size)))
        came = [1.0]
        for node in range(1, 1 + grown):
            came.append(came[tree.parents[node]] * self.true[tree.tokens[node]])
        return self.batch * sum(came) / self.cost(self.batch * (1 + grown))

    @property
    def plain(self) -> float:
        return self.fixed(0)

    @property
    def hindsight(self) -> float:
        """The highest speed of all fixed sizes."""
        return max(self.fixed(size) for size in SIZES if size <= 63)
