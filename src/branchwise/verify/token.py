"""Token verification: speculative sampling as it was first published.

Leviathan et al., "Fast Inference from Transformers via Speculative Decoding", ICML 2023; Chen et al., "Accelerating
Large Language Model Decoding with Speculative Sampling", 2023 (arXiv 2302.01318). Along one path each token is accepted
with min(1, p/q); the first that fails is replaced by a draw from max(p - q, 0).
"""

from __future__ import annotations

import torch
from torch import Tensor

from branchwise.core.batch import TreeBatch
from branchwise.core.rng import Chance
from branchwise.core.target_probs import TargetProbs, settled, where_rows
from branchwise.core.tree import Draw
from branchwise.verify import Verdicts, Verifier, left_of
from branchwise.verify.block import Path
from branchwise.verify.match import or_match


@or_match
class Token(Verifier):
    name = "token"
    accepts = frozenset({Draw.PATHS})
    reads = ("tokens", "paths")

    def __call__(self, batch: TreeBatch, probs: TargetProbs, chance: Chance) -> Verdicts:
        """Verify the first path."""
        path = Path.below(batch, batch.paths[:, 0])
        kept = torch.zeros_like(path.length)
        row = probs.at(path.nodes[:, 0])
        for step in range(path.tokens.shape[1]):
            q, token = batch.q_rows(path.nodes[:, step]), path.tokens[:, step, None]
            here = (kept == step) & (path.length > step)
            odds = row.gather(1, token) / q.gather(1, token)
            accepted = here & (chance.first(torch.where(here[:, None], odds.clamp_max(1), 0.0), step) == 0)
            if not settled(probs, accepted | ~here):
                row = where_rows(probs, here & ~accepted, self.residual(probs, row, q), row)
            kept += accepted
            if settled(probs, ~accepted):
                break
            row = where_rows(probs, accepted, probs.at(path.nodes[:, step + 1]), row)
        return path.verdicts(kept, chance.pick(row))

    def residual(self, probs: TargetProbs, p: Tensor, q: Tensor) -> Tensor:
        """(batch, vocabulary): the distribution of the token after a rejection, not normalised."""
        return left_of(probs, p, q)
