"""K-sequential selection: accept each of K independent candidates with p / (rho q).

Sun et al., "SpecTr: Fast Speculative Decoding via Optimal Transport", NeurIPS 2023 (arXiv 2310.15141). With m
candidates at a node, rho is the root of

    1 - (1 - beta)^m = rho beta,        beta(rho) = sum of min(p / rho, q),        1 <= rho <= m

and after a rejection of all candidates the token follows max(p - rho q, 0). The probability of acceptance is at least
1 - 1/e of the optimum.
"""

from __future__ import annotations

import torch
from torch import Tensor

from branchwise.core.batch import TreeBatch
from branchwise.core.rng import Chance
from branchwise.core.rows import gather_rows, row_sum
from branchwise.core.target_probs import TargetProbs, settled
from branchwise.core.tree import Draw
from branchwise.verify import Verdicts, Verifier, left_of
from branchwise.verify.match import or_match
from branchwise.verify.recursive import descend, tokens_of

ITERATIONS = 8


@or_match
class KSeq(Verifier):
    name = "k-seq"
    accepts = frozenset({Draw.WITH_REPLACEMENT, Draw.PATHS})
    reads = ("tokens", "candidates")

    def __call__(self, batch: TreeBatch, probs: TargetProbs, chance: Chance) -> Verdicts:
        def tries(nodes: Tensor) -> tuple[Tensor, ...]:
            children = gather_rows(batch.candidates, nodes)
            p, q, tokens = probs.at(nodes), batch.q_rows(nodes), tokens_of(batch, children)
            count = (children >= 0).sum(dim=-1)
            rho, beta = solve(p, q, count, children.shape[-1], probs)
            odds = p.gather(-1, tokens).double() / (rho[..., None] * q.gather(-1, tokens))
            # Exact for every rho at or above the root: the residual is p minus what is accepted of each token.
            missed, _ = powers((1 - beta).clamp_min(0), count, children.shape[-1])
            taken = torch.where((beta > 0) & (count > 0), (1 - missed) / beta, 0.0)
            return children, torch.where(children >= 0, odds.clamp_max(1).nan_to_num(0.0), 0.0), rho, taken

        node, nodes, (rho, taken) = descend(batch, probs, chance, tries)
        p, q = probs.at(node), batch.q_rows(node)
        served = torch.minimum(p / rho.clamp_min(1)[:, None].to(p.dtype), q)
        return Verdicts(nodes, chance.pick(left_of(probs, p, served, taken)))


def powers(base: Tensor, count: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """base^count and base^(count - 1), for counts of at most `most`."""
    power, before = torch.ones_like(base), torch.ones_like(base)
    for turn in range(most):
        before = torch.where(turn < count, power, before)
        power = torch.where(turn < count, power * base, power)
    return power, before


def solve(p: Tensor, q: Tensor, count: Tensor, most: int, probs: TargetProbs) -> tuple[Tensor, Tensor]:
    """rho and beta (batch, n) float64 for distributions (batch, n, vocabulary), with rho at or a hair above the root,
    where the residual is nonnegative. A node has `count` (batch, n) candidates, at most `most`.

    Newton's method inside a bracket. Each step goes a hair too far, so that the bracket closes from both sides.
    """
    hair = 1e-13 if p.dtype == torch.float64 else 1e-6
    drawn = count.double()
    low, high = torch.ones_like(drawn), drawn.clamp_min(1)
    rho, best = high, None
    for _ in range(ITERATIONS if p.dtype == torch.float32 else 4 * ITERATIONS):
        scaled = q * rho[..., None].to(q.dtype)
        slope = row_sum(torch.where(p >= scaled, q, 0.0))
        beta = row_sum(scaled.clamp_(max=p)) / rho
        missed, missed_before = powers((1 - beta).clamp_min(0), count, most)
        excess = rho * beta - 1 + missed
        enough = excess >= 0
        high, low = torch.where(enough, rho, high), torch.where(enough, low, rho)
        best = beta if best is None else torch.where(enough, beta, best)
        if settled(probs, high - low <= 4 * hair * high):
            break
        steepness = slope + drawn * missed_before * (beta - slope) / rho
        step = rho - excess / steepness
        step = torch.where(enough, step - hair * rho, step + hair * rho)
        rho = torch.where((step > low) & (step < high), step, (low + high) / 2)
    assert best is not None
    return high, best
