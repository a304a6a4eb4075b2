"""A verifier with a mistake, for the audits to find: after a rejection it draws from p, not from what is left of p.

branchwise --plugin docs/examples/careless.py audit verifiers --verify token,careless
"""

from branchwise.verify import VERIFIERS
from branchwise.verify.token import Token


class Careless(Token):
    name = "careless"

    def residual(self, probs, p, q):
        return p


VERIFIERS.register("careless", Careless)
