"""Lenient acceptance, a rule that changes texts: a drafted token is kept with min(1, p / (eps q)).

Leviathan et al., arXiv 2211.17192, A.5, and Zhou et al., DistillSpec, arXiv 2310.08461. No token comes up more than
1/eps times as often as the target would let it. Greedy texts stay as they are.

branchwise --plugin docs/examples/lenient.py generate "Why is the sky blue?" -t 1 --draft model:ID --tree chain:6 \
    --verify lossy-lenient:0.5
"""

from branchwise.errors import UsageError
from branchwise.methods import DISTANCES
from branchwise.verify import VERIFIERS
from branchwise.verify.token import Token


class Lent:
    """A batch of trees whose q is a share of what it is."""

    def __init__(self, batch, share):
        self._batch, self._share = batch, share

    def __getattr__(self, name):
        return getattr(self._batch, name)

    def __len__(self):
        return len(self._batch)

    def q_rows(self, nodes):
        return self._batch.q_rows(nodes) * self._share


class Lenient(Token):
    name = "lossy-lenient"
    lossless = False

    def __init__(self, eps: float = 0.5) -> None:
        if not 0 < eps <= 1:
            raise UsageError(f"Leniency is a share of q above 0 and at most 1, such as lossy-lenient:0.5, not {eps}.")
        self.eps = eps

    def __call__(self, batch, probs, chance):
        return super().__call__(Lent(batch, self.eps), probs, chance)


VERIFIERS.register("lossy-lenient", Lenient)
DISTANCES["lossy-lenient"] = 0.320, "chains of 3 over 3 tokens with eps 0.5, every outcome of 6 small distributions"
