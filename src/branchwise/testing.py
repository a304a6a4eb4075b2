"""Doubles for tests: drafters of every degree of skill, and a target that is pipelined without a GPU."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from branchwise.backends.base import Inflight, PipelinedTarget, Scored
from branchwise.backends.toy import ToyTarget
from branchwise.core.batch import TreeBatch
from branchwise.core.sequence import SequenceState
from branchwise.core.tree import DraftTree
from branchwise.draft.base import Budget, Drafter
from branchwise.verify import Verdicts, Verifier

__all__ = ["ContrarianDrafter", "PipelinedDouble", "PipelinedToy", "RandomDrafter", "ToyTarget", "TruthDrafter"]


@dataclass(eq=False)
class ToyInflight:
    """A pass of the toy that was made ahead, for these sequences as they will be after the verdict."""

    target: PipelinedToy
    sequences: tuple[SequenceState, ...]
    batch: TreeBatch
    scored: Scored
    passes: int
    committed: bool = False

    def result(self, sequences: Sequence[SequenceState], batch: TreeBatch) -> Scored | None:
        same = self.sequences == tuple(sequences) and torch.equal(self.batch.parents, batch.parents)
        same &= bool((self.batch.tokens[:, 1:] == batch.tokens[:, 1:]).all())  # roots are the verdict's
        if not (same and self.committed and self.target.passes == self.passes):
            return None
        self.target.reuse(sequences, batch)
        return self.scored


class PipelinedToy(ToyTarget, PipelinedTarget):
    """The toy as a pipelined target: it scores the next trees as soon as the verdict is there, before `commit`."""

    launched = 0
    used = 0

    @property
    def pipelined(self) -> bool:
        return True

    def capture(self, verifier: Verifier) -> Verifier:
        return verifier

    def commit_on_device(self, scored: Scored, verdicts: Verdicts) -> None:
        self._verdicts = verdicts

    def launch(self, sequences: Sequence[SequenceState], batch: TreeBatch, after: Verdicts) -> Inflight | None:
        assert after.tokens is self._verdicts.tokens, "a pass is launched behind another verdict"
        self.launched += 1
        ahead = []  # the texts as they will be after the verdict
        for sequence, path, token in zip(sequences, after.paths.tolist(), after.tokens.tolist(), strict=False):
            _, tokens = self._scored[sequence]
            cached = self._cached[sequence] + tokens[[node for node in path if node >= 0]].tolist()
            ahead.append(SequenceState([*cached, token]))
            self._cached[ahead[-1]] = cached
        roots = TreeBatch(batch.trees, pad_shape=batch.pad_shape, roots=after.tokens.tolist())
        scored = self.score(ahead, roots)
        for text in ahead:
            del self._cached[text], self._scored[text]
        return ToyInflight(self, tuple(sequences), batch, scored, self.passes)

    def reuse(self, sequences: Sequence[SequenceState], batch: TreeBatch) -> None:
        self.used += 1
        for row, (sequence, tree) in enumerate(zip(sequences, batch.trees, strict=False)):
            self._scored[sequence] = (tree, batch.tokens[row])


class PipelinedDouble(Drafter):
    """Lets another drafter's trees be known ahead: a chain of fixed tokens that depends on no text.

    Its `draft` returns the very trees that `draft_next` announced.
    """

    name = "pipelined"

    def __init__(self, vocabulary: int, *, length: int = 3) -> None:
        self.vocabulary, self.length = vocabulary, length
        self.updates = 0
        self._next: list[DraftTree] | None = None

    def draft(self, sequences: Sequence[SequenceState], budgets: Sequence[Budget]) -> list[DraftTree]:
        ahead, self._next = self._next, None
        if ahead is not None and len(ahead) == len(sequences):
            pairs = zip(sequences, ahead, strict=True)
            return [DraftTree.chain([sequence.root, *tree.tokens[1:].tolist()]) for sequence, tree in pairs]
        return [self._tree(sequence.root, budget) for sequence, budget in zip(sequences, budgets, strict=True)]

    def update_on_device(self, scored: Scored, verdicts: Verdicts) -> None:
        self.updates += 1

    def draft_next(self, budgets: Sequence[Budget]) -> list[DraftTree] | None:
        self._next = [self._tree(0, budget) for budget in budgets]
        return self._next

    def _tree(self, root: int, budget: Budget) -> DraftTree:
        length = max(min(self.length, budget.depth, budget.nodes - 1), 0)
        return DraftTree.chain([root, *(number % self.vocabulary for number in range(length))])


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
