"""Doubles for tests: a toy target, and drafters of every degree of skill."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from branchwise.backends.toy import ToyTarget
from branchwise.core.sequence import SequenceState
from branchwise.core.tree import DraftTree
from branchwise.draft.base import Budget, Drafter

__all__ = ["ContrarianDrafter", "RandomDrafter", "ToyTarget", "TruthDrafter"]


class RandomDrafter(Drafter):
    """No skill at all: random tokens on random trees."""

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
    """Knows what will be written and drafts it, with `decoys` wrong siblings before every true token.

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
    """Adversarial: knows what will be written and drafts anything else."""

    name = "contrarian"

    def _pretend(self, token: int) -> int:
        return (token + 1 + self.decoys) % self.vocabulary
