"""Doubles for the pipelined step on a host: a target and a drafter that work ahead without a GPU."""

from __future__ import annotations

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
        same = same and torch.equal(self.batch.tokens[:, 1:], batch.tokens[:, 1:])  # roots are the verdict's
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
        try:
            scored = self.score(ahead, roots)
        finally:
            for text in ahead:
                del self._cached[text]
                self._scored.pop(text, None)
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
