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
from branchwise.verify import Verdicts
from branchwise.verify.match import or_match
from branchwise.verify.recursive import Walk

ITERATIONS = 40


class KSeq:
    name = "k-seq"
    accepts = frozenset({Draw.PATHS})

    @or_match
    def __call__(self, forest: Forest, laws: Laws, chance: Chance) -> Verdicts:
        walk = Walk(forest, laws)
        paths = forest.paths
        for depth in range(forest.depth):
            through = paths[:, :, depth] == walk.node[:, None]
            children = torch.where(through, paths[:, :, depth + 1], -1)
            p, q = walk.law, forest.q_rows(walk.node)
            tokens = rows_at(forest.tokens, children.clamp_min(0))
            count = (children >= 0).sum(dim=1)
            rho, beta = solve(p, q, count, laws)
            odds = (p.gather(1, tokens).double() / (rho[:, None] * q.gather(1, tokens))).clamp_max(1).nan_to_num(0.0)
            turn = chance.first(torch.where((children >= 0) & ~walk.done[:, None], odds, 0.0), depth * paths.shape[1])
            # Exact for every rho from the root upwards: each token's share of what is accepted is taken off.
            taken = torch.where(beta > 0, (1 - (1 - beta) ** count) / beta, 0.0)[:, None].to(p.dtype)
            left = (p - taken * torch.minimum(p / rho[:, None].to(p.dtype), q)).clamp_min_(0)
            walk.descend(children, turn, left)
            if settled(laws, walk.done):
                break
        return walk.verdicts(chance)


def solve(p: Tensor, q: Tensor, count: Tensor, laws: Laws) -> tuple[Tensor, Tensor]:
    """rho and beta (batch,) float64. Newton's method inside a bracket, which always ends on the side of the root where
    the residual is nonnegative."""
    low, high = torch.ones_like(count, dtype=torch.float64), count.clamp_min(1).double()
    rho = high
    for _ in range(ITERATIONS):
        beta, slope = overlap(p, q, rho)
        excess = rho * beta - 1 + (1 - beta) ** count
        enough = excess >= 0
        high, low = torch.where(enough, rho, high), torch.where(enough, low, rho)
        steepness = slope + count * (1 - beta) ** (count - 1).clamp_min(0) * (beta - slope) / rho
        step = rho - excess / steepness
        inside = (step > low) & (step < high)
        rho = torch.where(inside, step, (low + high) / 2)
        if settled(laws, high - low <= 1e-15 * high):
            break
    beta, _ = overlap(p, q, high)
    return high, beta


def overlap(p: Tensor, q: Tensor, rho: Tensor) -> tuple[Tensor, Tensor]:
    """(batch,) float64 each: beta(rho), and the mass of q where q is the smaller one."""
    column = rho[:, None].to(p.dtype)
    smaller = torch.minimum(p / column, q)
    return total(smaller), total(q * (p >= column * q))
