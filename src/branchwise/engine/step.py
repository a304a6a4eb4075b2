"""The step: draft, score, verify, update, commit; for every running sequence at once.

There is no special first step (prefill leaves out the last prompt token, which is the first root), no greedy mode and
no batch of one. Plain decoding is this step with a drafter that proposes nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice, repeat
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from branchwise.backends.base import Scored, Target
from branchwise.core.batch import PadShape, TreeBatch
from branchwise.core.rng import SeededChance
from branchwise.core.sequence import SequenceState
from branchwise.core.target_probs import WarpedProbs
from branchwise.core.tree import DraftTree
from branchwise.draft.base import Budget, Drafter
from branchwise.engine.bare import BareBatch, all_bare
from branchwise.engine.request import Generation, Top
from branchwise.engine.stats import Stopwatch
from branchwise.engine.trace import PHASE, Seen, TraceRow, read, see
from branchwise.errors import UsageError
from branchwise.verify import Verdict, Verdicts, Verifier

log = logging.getLogger(__name__)


class Outcome(NamedTuple):
    """What a step found for one generation."""

    tree: DraftTree
    verdict: Verdict
    logprobs: list[float] | None
    """log-probabilities of the emitted tokens under the unwarped model, if a request asks for them"""
    tops: list[Top] | None
    """for each emitted token the most probable tokens in its place, as many as any request asks for"""
    seen: TraceRow | None
    """what the target thinks of the tree, if a request asks for it"""

    @property
    def tokens(self) -> list[int]:
        """The accepted tokens, and the target's own after them."""
        return [*self.verdict.kept_of(self.tree), self.verdict.token]


class Reported(NamedTuple):
    """Log-probabilities of the tokens of verdicts under the unwarped model, on their way to the host."""

    logprobs: Tensor
    """(batch, depth + 1)"""
    top_tokens: Tensor
    """(batch, depth + 1, tokens), the most probable first"""
    top_logprobs: Tensor


class Step:
    """One round on a target, with a drafter and a verifier."""

    def __init__(self, target: Target, drafter: Drafter, verifier: Verifier, most: Budget) -> None:
        self.target = target
        self.drafter = drafter
        self.verifier = verifier
        self.most = most
        """the bound of every tree"""
        self.clock = Stopwatch(target.info.device)
        self.interrupted = False
        """whether a drafter may have learned from a step that was never committed"""

    @property
    def works_ahead(self) -> bool:
        """Whether the next pass is enqueued already; it is valid only if the rows of ended texts stay in the batch."""
        return False

    def __call__(self, generations: Sequence[Generation], *, joining: bool = False) -> list[Outcome]:
        """Advance every generation; the caller emits its tokens. `joining`: other texts join before the next step."""
        sequences = [generation.sequence for generation in generations]
        budgets = [generation.budget(self.most, self.target.info.context) for generation in generations]

        batch = self.batch(self.drafter.draft(sequences, budgets), sequences, budgets)
        self.clock.lap("draft")
        scored = self.target.score(sequences, batch)
        self.check(scored, batch)
        self.clock.lap("score")
        probs = WarpedProbs(scored.logits, batch, sequences)
        found = self.verifier(batch, probs, self.chance(sequences, len(batch)))
        logprobs = self.logprobs(generations, batch, scored, found)
        seen = self.look(generations, batch, scored, found)
        verdicts = found.read()[: len(sequences)]
        self.clock.lap("verify")
        self.interrupted = True
        self.update(sequences, scored, verdicts)
        self.target.commit(sequences, verdicts)
        self.interrupted = False
        self.clock.lap("commit")
        return self.outcomes(batch, verdicts, logprobs, seen)

    def batch(
        self, trees: Sequence[DraftTree], sequences: Sequence[SequenceState], budgets: Sequence[Budget]
    ) -> TreeBatch:
        """The drafted trees as one batch. A drafter's mistake is refused here, before it reaches a text."""
        if len(trees) != len(sequences):
            raise UsageError(f"Drafter {self.drafter.name!r} gave {len(trees)} trees for {len(sequences)} sequences.")
        shape, bare = self.drafter.needs.pad_shape or PadShape(), all_bare(trees)
        for tree, budget in () if bare else zip(trees, budgets, strict=True):
            if tree.draw is not self.drafter.draw and len(tree) > 1:
                raise UsageError(
                    f"Drafter {self.drafter.name!r} says that it draws {self.drafter.draw.value} and gave a tree drawn "
                    f"{tree.draw.value}."
                )
            if len(tree) > budget.nodes or tree.depth > budget.depth:
                raise UsageError(
                    f"Drafter {self.drafter.name!r} gave a tree beyond its budget: {len(tree)} nodes, "
                    f"{tree.depth} deep, where {budget.nodes} and {budget.depth} are allowed."
                )
        largest = 1 if bare else max(map(len, trees))
        size, nodes = self.target.bucket(len(trees), max(min(shape.nodes, self.most.nodes), largest))
        roots = [sequence.root for sequence in sequences] + [0] * (size - len(trees))
        padded = [*trees, *[DraftTree.root(0)] * (size - len(trees))]
        kind = BareBatch if bare else TreeBatch
        return kind(padded, self.target.info.device, replace(shape, nodes=nodes), roots)

    def check(self, scored: Scored, batch: TreeBatch) -> None:
        """Refuse what breaks the target's protocol here: later errors would not name the target."""
        info, wanted = self.target.info, (len(batch), batch.nodes, self.target.info.vocabulary)
        if not isinstance(scored.logits, Tensor) or scored.logits.shape != wanted:
            shape = tuple(scored.logits.shape) if isinstance(scored.logits, Tensor) else type(scored.logits).__name__
            raise UsageError(f"Target {info.name!r} must score logits as a tensor of shape {wanted}, not {shape}.")
        if missing := set(self.drafter.needs.hidden_layers) - set(scored.hidden):
            raise UsageError(
                f"Target {info.name!r} accepted the layer {sorted(missing)[0]!r} and reported no states of it."
            )

    def chance(self, sequences: Sequence[SequenceState], size: int) -> SeededChance:
        """The randomness of this step: keyed by the seed of each text and the position of its root."""
        keys = np.zeros((2, size), dtype=np.int64)
        keys[0, : len(sequences)] = [sequence.rng_seed for sequence in sequences]
        keys[1, : len(sequences)] = [len(sequence.tokens) - 1 for sequence in sequences]
        both = torch.from_numpy(keys)
        return SeededChance(both[0], both[1], device=self.target.info.device)

    def logprobs(
        self, generations: Sequence[Generation], batch: TreeBatch, scored: Scored, found: Verdicts
    ) -> Reported | None:
        """The log-probability of every token of the verdicts under the unwarped model, and the most probable tokens in
        its place; None if no request asks for it. Computed on the device, before the next pass overwrites the logits.
        """
        requests = [generation.request for generation in generations]
        most = min(max(request.top_logprobs for request in requests), scored.logits.shape[-1])
        if not most and not any(request.logprobs for request in requests):
            return None
        nodes = found.paths.clamp_min(0)
        last = torch.nn.functional.pad(found.paths[:, 1:] < 0, (0, 1), value=True)  # the node that ends its path
        below = torch.nn.functional.pad(batch.tokens.gather(1, nodes[:, 1:]), (0, 1))
        tokens = torch.where(last, found.tokens[:, None], below)
        rows = torch.arange(len(nodes), device=nodes.device)[:, None]
        picked = scored.logits[rows, nodes].float().log_softmax(dim=-1)
        own = picked.gather(2, tokens[..., None])[..., 0]
        best, likely = picked.topk(most, dim=-1) if most else (picked[..., :0], nodes[..., None][..., :0])
        return Reported(*(part.to("cpu", non_blocking=True) for part in (own, likely, best)))  # there with the verdicts

    def look(self, generations: Sequence[Generation], batch: TreeBatch, scored: Scored, found: Verdicts) -> Seen | None:
        """What the target thinks of the trees, if a request asks for it."""
        if not any(generation.request.trace for generation in generations):
            return None
        self.clock.lap("verify")
        seen = see(batch, scored.logits, found)
        self.clock.lap(PHASE)
        return seen

    def update(self, sequences: Sequence[SequenceState], scored: Scored, verdicts: Sequence[Verdict]) -> None:
        with self.sparing_memory():
            self.drafter.update(sequences, scored, verdicts)

    def outcomes(
        self, batch: TreeBatch, verdicts: Sequence[Verdict], reported: Reported | None, seen: Seen | None = None
    ) -> list[Outcome]:
        looked = repeat(None) if seen is None else read(seen)
        pairs = list(zip(batch.trees, verdicts, looked, strict=False))
        if reported is None:
            return [Outcome(tree, verdict, None, None, row) for tree, verdict, row in pairs]
        rows = zip(pairs, *(part.tolist() for part in reported), strict=False)
        return [
            Outcome(
                tree,
                verdict,
                logprobs[: len(verdict.path)],
                [list(zip(*one, strict=True)) for one in islice(zip(tokens, values, strict=True), len(verdict.path))],
                row,
            )
            for (tree, verdict, row), logprobs, tokens, values in rows
        ]

    @contextmanager
    def sparing_memory(self) -> Iterator[None]:
        """Texts go on if the device has no memory for what a drafter wants to learn."""
        try:
            yield
        except torch.OutOfMemoryError:
            log.warning("The device has no memory left for drafter %r to learn from a step.", self.drafter.name)
