"""The step on a device: the next pass is enqueued behind the verdict, before the host has read it.

It is the same step. Only the order in which the device gets its work differs: as soon as the verdict is in device
memory, cache rows move, the drafter learns and drafts, and the next forward pass starts. Meanwhile the host waits for
its copy of the verdict, emits tokens and detokenizes.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import is_

import torch

from branchwise.backends.base import Inflight, PipelinedTarget
from branchwise.core.batch import TreeBatch
from branchwise.core.sequence import SequenceState
from branchwise.core.target_probs import WarpedProbs
from branchwise.core.tree import DraftTree, Draw
from branchwise.cuda.laid import LaidBatch, LaidTrees
from branchwise.draft.base import Budget, Drafter
from branchwise.engine.request import Generation
from branchwise.engine.step import Outcome, Step
from branchwise.verify import Verdicts, Verifier


class PipelinedStep(Step):
    target: PipelinedTarget

    def __init__(self, target: PipelinedTarget, drafter: Drafter, verifier: Verifier, most: Budget) -> None:
        super().__init__(target, drafter, verifier, most)
        self._verify = target.capture(verifier)
        self._inflight: Inflight | None = None
        self._batched: tuple[Sequence[DraftTree], TreeBatch] | None = None
        """the last trees, and the batch made of them"""
        # Only `match` lets the rows of ended texts linger: with sampled trees, a drafter could learn from draws in such
        # a row that come again.
        self._rows_may_linger = verifier.name == "match"

    @property
    def works_ahead(self) -> bool:
        return self._rows_may_linger and self._inflight is not None

    def batch(
        self, trees: Sequence[DraftTree], sequences: Sequence[SequenceState], budgets: Sequence[Budget]
    ) -> TreeBatch:
        """Reuse the last batch if the trees are the same objects and only the device knows their tokens; other trees
        have new roots after a verdict."""
        if self._batched is not None:
            before, batch = self._batched
            alike = before is trees or (len(before) == len(trees) and all(map(is_, before, trees)))
            if alike and batch.host_tokens is None:
                return batch
        batch = super().batch(trees, sequences, budgets)
        if isinstance(trees, LaidTrees) and trees.tokens.shape == (len(batch), batch.nodes):
            batch = LaidBatch(trees, batch.device)
        self._batched = trees, batch
        return batch

    def __call__(self, generations: Sequence[Generation], *, joining: bool = False) -> list[Outcome]:
        sequences = [generation.sequence for generation in generations]
        budgets = self._budgets(generations)

        inflight, self._inflight = self._inflight, None
        batch = self.batch(self.drafter.draft(sequences, budgets), sequences, budgets)
        self.clock.lap("draft")
        scored = None if inflight is None else inflight.result(sequences, batch)
        if scored is None:
            scored = self.target.score(sequences, batch)
            self.clock.lap("score")
        probs = WarpedProbs(scored.logits, batch, sequences)
        found = self._verify(batch, probs, self.chance(sequences, len(batch)))
        if batch.host_tokens is None:  # a tree drafted on the device may be overwritten before the host reads it
            found = found.with_tokens(batch.tokens)
        logprobs = self.logprobs(generations, batch, scored, found)
        seen = self.look(generations, batch, scored, found)
        self.clock.lap("verify")

        found.fetch()  # the copy to the host starts; what is enqueued from here on does not delay it
        self.interrupted = True
        self.target.commit_on_device(scored, found)
        self.clock.lap("commit")
        with self.sparing_memory():
            self.drafter.update_on_device(scored, found)
        self.clock.lap("draft")
        self._inflight = None if joining else self._launch(generations, batch.depth, found)
        for generation in generations:
            generation.detokenize()  # tokens of the step before, while the device works
        verdicts = found.read()[: len(sequences)]

        self.update(sequences, scored, verdicts)
        self.target.commit(sequences, verdicts)
        self.interrupted = False
        if self._inflight is not None:
            self._inflight.committed = True
        else:
            self.clock.lap("commit")
        return self.outcomes(batch, verdicts, logprobs, seen)

    def _budgets(self, generations: Sequence[Generation], further: int = 0) -> list[Budget]:
        """Fixed trees may reach beyond the wanted length: a recorded draft has one size, and a deep tree is seldom
        accepted whole. A sampled tree may not, because a deeper tree would draw other tokens."""
        beyond, context = self.drafter.draw is Draw.FIXED, self.target.info.context
        return [generation.budget(self.most, context, further, beyond=beyond) for generation in generations]

    def _changes(self, generations: Sequence[Generation]) -> bool:
        """Whether the batch is likely to change after this step: because texts that end leave at once, or because so
        many of them end that a smaller pass serves the others."""
        ending = [one for one in generations if one.finished or one.ends_soon]
        if not all(self._rows_may_linger and one.may_linger for one in ending):
            return True
        texts, rows = len(generations) - len(ending), len(generations)
        return not texts or self.target.bucket(texts, 1) != self.target.bucket(rows, 1)

    def _launch(self, generations: Sequence[Generation], depth: int, found: Verdicts) -> Inflight | None:
        """Enqueue the next pass, if the drafter knows its trees. A pass for a batch that changes is wasted, so none is
        enqueued if that is likely."""
        least = self._budgets(generations, depth + 1)
        if min(budget.depth for budget in least) < 0 or self._changes(generations):
            return None
        try:
            trees = self.drafter.draft_next(least)
            self.clock.lap("draft")
            if trees is None:
                return None
            sequences = [generation.sequence for generation in generations]
            batch = self.batch(trees, sequences, least)
            # A recorded verdict has columns for paths deeper than any tree of this step.
            return self.target.launch(sequences, batch, Verdicts(found.paths[:, : depth + 1], found.tokens))
        except torch.OutOfMemoryError:
            return None  # the next step meets the same error, and handles it
        finally:
            self.clock.lap("score")
