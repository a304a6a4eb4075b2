"""K-sequential selection: accept each of K independent candidates with p / (rho q).

Sun et al., "SpecTr: Fast Speculative Decoding via Optimal Transport", NeurIPS 2023 (arXiv 2310.15141). With m candidates at
a node, rho is the root of

    1 - (1 - beta)^m = rho beta,        beta(rho) = sum of min(p / rho, q),        1 <= rho <= m

and what no candidate was accepted for follows max(p - rho q, 0). It accepts at least 1 - 1/e of the optimum.
"""

from __future__ import annotations

import torch
from torch import Tensor

from branchwise.chance import Chance
from branchwise.laws import Laws, settled
from branchwise.rows import rows_at, total
from branchwise.tree import Draw, Forest
from branchwise.verify import Verdicts, left_of
from branchwise.verify.match import or_match
from branchwise.verify.recursive import descend, next_on_paths, tokens_of

ITERATIONS = 16


class KSeq:
    name = "k-seq"
    accepts = frozenset({Draw.PATHS})

    @or_match
    def __call__(self, forest: Forest, laws: Laws, chance: Chance) -> Verdicts:
        candidates = next_on_paths(forest)

        def tries(nodes: Tensor) -> tuple[Tensor, ...]:
            children = rows_at(candidates, nodes)
            p, q, tokens = laws.rows(nodes), forest.q_rows(nodes), tokens_of(forest, children)
            count = (children >= 0).sum(dim=-1)
            rho, beta = solve(p, q, count, laws)
            odds = p.gather(-1, tokens).double() / (rho[..., None] * q.gather(-1, tokens))
            # Exact for every rho from the root upwards: each token's share of what is accepted is taken off.
            taken = torch.where((beta > 0) & (count > 0), (1 - (1 - beta) ** count) / beta, 0.0)
            return children, torch.where(children >= 0, odds.clamp_max(1).nan_to_num(0.0), 0.0), rho, taken

        node, nodes, (_, _, rho, taken) = descend(forest, laws, chance, tries)
        p, q = laws.rows(node), forest.q_rows(node)
        served = torch.minimum(p / rho[:, None].to(p.dtype), q)
        return Verdicts(nodes, chance.pick(left_of(laws, p, served, taken)))


def solve(p: Tensor, q: Tensor, count: Tensor, laws: Laws) -> tuple[Tensor, Tensor]:
    """rho and beta (batch, n) float64 for laws (batch, n, vocabulary), with rho at or a hair above the root, where the residual is nonnegative.

    The secant method inside a bracket (Illinois). Each guess is moved by the tolerance towards the side that lies
    further away, so that the bracket closes from both sides.
    """
    tolerance = 1e-13 if p.dtype == torch.float64 else 1e-6
    low, high = torch.ones_like(count, dtype=torch.float64), count.clamp_min(1).double()

    def excess(rho: Tensor) -> tuple[Tensor, Tensor]:
        beta = total(torch.div(p, rho[..., None].to(p.dtype)).clamp_(max=q))
        return rho * beta - 1 + (1 - beta) ** count, beta

    (at_low, _), (at_high, beta) = excess(low), excess(high)
    for _ in range(ITERATIONS if p.dtype == torch.float32 else 4 * ITERATIONS):
        if settled(laws, (high - low <= 4 * tolerance * high) | (at_high <= 0)):
            break
        guess = high - at_high * (high - low) / (at_high - at_low)
        guess = torch.where(guess - low < high - guess, guess + tolerance * high, guess - tolerance * high)
        inside = (guess > low) & (guess < high)
        guess = torch.where(inside, guess, (low + high) / 2)
        value, found = excess(guess)
        enough = value >= 0
        # The end that stays has its value halved, or the secant would creep from one side.
        at_low, at_high = torch.where(enough, at_low / 2, value), torch.where(enough, value, at_high / 2)
        low, high = torch.where(enough, low, guess), torch.where(enough, guess, high)
        beta = torch.where(enough, found, beta)
    return high, beta
