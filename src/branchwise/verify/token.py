"""Token verification: speculative sampling as it was first published.

Leviathan et al., "Fast Inference from Transformers via Speculative Decoding", ICML 2023; Chen et al., "Accelerating
Large Language Model Decoding with Speculative Sampling", 2023 (arXiv 2302.01318). Along one path each token is accepted
with min(1, p/q); the first that fails is replaced by a draw from max(p - q, 0).
"""

from __future__ import annotations

import torch
from torch import Tensor

from branchwise.chance import Chance
from branchwise.forest import Forest
from branchwise.laws import Laws, settled, where_rows
from branchwise.tree import Draw
from branchwise.verify import Verdicts, left_of
from branchwise.verify.block import Path
from branchwise.verify.match import or_match


class Token:
    name = "token"
    accepts = frozenset({Draw.PATHS})
    reads = ("tokens", "paths")

    @or_match
    def __call__(self, forest: Forest, laws: Laws, chance: Chance) -> Verdicts:
        """Verify the first path."""
        path = Path.below(forest, forest.paths[:, 0])
        kept = torch.zeros_like(path.length)
        law = laws.rows(path.nodes[:, 0])
        for step in range(path.tokens.shape[1]):
            q, token = forest.q_rows(path.nodes[:, step]), path.tokens[:, step, None]
            here = (kept == step) & (path.length > step)
            odds = law.gather(1, token) / q.gather(1, token)
            accepted = here & (chance.first(torch.where(here[:, None], odds.clamp_max(1), 0.0), step) == 0)
            if not settled(laws, accepted | ~here):
                law = where_rows(laws, here & ~accepted, self.residual(laws, law, q), law)
            kept += accepted
            if settled(laws, ~accepted):
                break
            law = where_rows(laws, accepted, laws.rows(path.nodes[:, step + 1]), law)
        return path.verdicts(kept, chance.pick(law))

    def residual(self, laws: Laws, p: Tensor, q: Tensor) -> Tensor:
        """(batch, vocabulary): what the token after a rejection follows, not normalised."""
        return left_of(laws, p, q)
