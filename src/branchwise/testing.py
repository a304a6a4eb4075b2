"""Doubles for tests: a target whose distributions are known exactly, and drafters of every degree of skill."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch
from torch import Tensor

from branchwise.backends.base import Scored
from branchwise.core.batch import TreeBatch
from branchwise.core.sequence import SequenceState
from branchwise.core.tree import DraftTree, Draw
from branchwise.draft.base import Budget
from branchwise.verify import Verdict


class ToyTarget:
    """A model of a few tokens whose logits are a fixed random function of all tokens before.

    It keeps the books of a cache and checks that every commit is what a real cache would hold.
    """

    def __init__(
        self,
        vocabulary: int = 8,
        *,
        context: int = 512,
        max_nodes: int = 64,
        slots: int = 4,
        seed: int = 0,
        padded: bool = False,
    ) -> None:
        """`padded` makes passes for more trees and nodes than are wanted, as captured ones are."""
        self.padded = padded
        self.device = torch.device("cpu")
        self.vocabulary = vocabulary
        self.context = context
        self.max_nodes = max_nodes
        self.slots = slots
        self.seed = seed
        self.passes = 0
        self._cached: dict[SequenceState, list[int]] = {}
        self._batch: dict[SequenceState, tuple[DraftTree, Tensor]] = {}

    @property
    def free_slots(self) -> int:
        return self.slots - len(self._cached)

    def room(self, batch: int, nodes: int) -> tuple[int, int]:
        return (batch + 2, min(nodes + 3, self.max_nodes)) if self.padded else (batch, nodes)

    def logits(self, tokens: Sequence[int]) -> Tensor:
        """(vocabulary,): what follows these tokens."""
        generator = torch.Generator().manual_seed(hash((self.seed, *tokens)) % (1 << 62))
        return 2 * torch.randn(self.vocabulary, generator=generator)

    def open(self, sequence: SequenceState, tell: int = 0) -> Tensor:
        assert self.free_slots > 0
        self._cached[sequence] = sequence.tokens[:-1]
        ends = range(max(len(sequence.tokens) - tell, 1), len(sequence.tokens))
        found = [self.logits(sequence.tokens[:end]) for end in ends]
        return torch.stack(found) if found else torch.zeros(0, self.vocabulary)

    def fork(self, source: SequenceState, sequence: SequenceState) -> None:
        assert self.free_slots > 0
        assert sequence.tokens == source.tokens, "a fork has other tokens than its source"
        self._cached[sequence] = list(self._cached[source])

    def score(self, sequences: Sequence[SequenceState], batch: TreeBatch, taps: Sequence[str] = ()) -> Scored:
        self.passes += 1
        logits = torch.zeros(len(batch), batch.nodes, self.vocabulary)
        for row, (sequence, tree) in enumerate(zip(sequences, batch.trees, strict=False)):
            assert self._cached[sequence] == sequence.tokens[:-1], "the cache is out of step with its sequence"
            tokens = batch.tokens[row]
            assert int(tokens[0]) == sequence.root, "a tree does not start at the root"
            self._batch[sequence] = (tree, tokens)
            for node in range(len(tree)):
                path = tokens[tree.topology.path(node)].tolist()
                logits[row, node] = self.logits(self._cached[sequence] + path)
        return Scored(logits)

    def commit(self, sequences: Sequence[SequenceState], verdicts: Sequence[Verdict]) -> None:
        for sequence, verdict in zip(sequences, verdicts, strict=True):
            tree, tokens = self._batch.pop(sequence)
            assert tuple(tree.topology.path(verdict.path[-1])) == verdict.path, "an accepted path has a gap"
            self._cached[sequence] += tokens[list(verdict.path)].tolist()

    def close(self, sequence: SequenceState) -> None:
        del self._cached[sequence]


class RandomDrafter:
    """No skill at all: random tokens on random trees."""

    name = "random"
    draw = Draw.FIXED

    def __init__(self, vocabulary: int, *, nodes: int = 12, seed: int = 0) -> None:
        self.vocabulary = vocabulary
        self.nodes = nodes
        self._random = random.Random(seed)

    def draft(self, sequences: Sequence[SequenceState], budgets: Sequence[Budget]) -> list[DraftTree]:
        return [self._draft(sequence, budget) for sequence, budget in zip(sequences, budgets, strict=True)]

    def update(self, sequences: Sequence[SequenceState], scored: Scored, verdicts: Sequence[Verdict]) -> None:
        pass

    def _draft(self, sequence: SequenceState, budget: Budget) -> DraftTree:
        parents = [-1]
        for node in range(1, min(self.nodes, budget.nodes)):
            # Parents that never go back keep the nodes in level order.
            parents.append(self._random.randint(max(parents[-1], 0), node - 1))
        tokens = [sequence.root] + [self._random.randrange(self.vocabulary) for _ in parents[1:]]
        return DraftTree(torch.tensor(tokens), tuple(parents)).cut(nodes=budget.nodes, depth=budget.depth)


class TruthDrafter:
    """Knows what will be written and drafts it, with `decoys` wrong siblings before every true token.

    `truth` maps the tokens of a prompt to the continuation that plain decoding writes.
    """

    name = "truth"
    draw = Draw.FIXED

    def __init__(
        self, truth: dict[tuple[int, ...], list[int]], vocabulary: int, *, length: int = 5, decoys: int = 0
    ) -> None:
        self.truth = truth
        self.vocabulary = vocabulary
        self.length = length
        self.decoys = decoys

    def draft(self, sequences: Sequence[SequenceState], budgets: Sequence[Budget]) -> list[DraftTree]:
        return [self._draft(sequence, budget) for sequence, budget in zip(sequences, budgets, strict=True)]

    def update(self, sequences: Sequence[SequenceState], scored: Scored, verdicts: Sequence[Verdict]) -> None:
        pass

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
