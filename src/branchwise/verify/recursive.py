"""Recursive rejection: try the children of a node in turn, from the root downwards or from the leaves upwards.

P is the distribution that the next token must still have, at first p. Q is the distribution of the next child, at first
q. A child with the token t is accepted with the odds min(1, P(t) / Q(t)). After a rejection P becomes max(P - Q, 0),
normalised.

`mss`  Miao et al., "SpecInfer", ASPLOS 2024 (multi-step speculative sampling), and Yang et al., "Multi-Candidate
       Speculative Decoding" (arXiv 2401.06706) with replacement: the children are independent draws, repeats kept. They
       are the next tokens of the paths through a node, or a number of draws below every node. Q stays q. A repeat of a
       rejected token has P(t) = 0 and is rejected for sure, but it counts as a draw: P changes after it.
`rrs`  recursive rejection sampling, without replacement: MCSD, RSD (Jeon et al., arXiv 2402.14160), Sequoia (Chen et
       al., arXiv 2402.12374): no token is tried twice. Q is q on the tokens not tried yet, normalised.

Written out, after k rejections P is

    max(p - b_k q, 0) / c_k         b_{k+1} = b_k + c_k / z_k         b_0 = 0, c_0 = 1

where c_k normalises P, and z_k is the mass of q on the tokens not tried yet (1 with replacement), so that Q = q / z_k.
One pass over a row per child gives these numbers, and no row is rewritten. For a rejected token P is 0, and the formula
gives 0 for it too.

`traversal`  Weng et al., "Traversal Verification for Speculative Tree Decoding", NeurIPS 2025 (arXiv 2505.12398):
       block verification on a tree. A node tosses its coin after all its children, which come in draw order; the first
       success is kept with the whole path to it. a_0 denotes the odds at which its parent accepts a node (1 for the
       root), and a_k its odds after k of its children were rejected. Here a_k P takes the place of P:

    a_k P = max(a_0 p - b_k q, 0) / c_k         a_{k+1} = S / (S + 1 - a_k), with S = sum of max(a_k P - Q, 0)

       A child is accepted with min(1, a_k P(t) / Q(t)), which is its own a_0; the coin of a node with m children has
       the odds a_m. What happens below a child does not change a_k and P, so the odds of all nodes are known before any
       coin is tossed:

    verdict = the first success in post-order of independent coins, one for every node; the root always succeeds

On a chain this is block verification; on any tree it accepts at least as much as `rrs`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from branchwise.core.batch import TreeBatch
from branchwise.core.rng import Chance
from branchwise.core.rows import blank, gather_rows, row_sum
from branchwise.core.target_probs import TargetProbs, all_at_once, settled
from branchwise.core.tree import Draw
from branchwise.verify import STRIDE, Verdicts, Verifier, left_of
from branchwise.verify.match import or_match


@or_match
class RRS(Verifier):
    name = "rrs"
    accepts = frozenset({Draw.WITHOUT_REPLACEMENT, Draw.WITH_REPLACEMENT, Draw.PATHS})
    reads = ("tokens", "children")
    replace = False

    def __call__(self, batch: TreeBatch, probs: TargetProbs, chance: Chance) -> Verdicts:
        children = self.candidates(batch)

        def tries(nodes: Tensor) -> tuple[Tensor, ...]:
            below = gather_rows(children, nodes)
            p, q = probs.at(nodes), batch.q_rows(nodes)
            tried = reject(p, q, tokens_of(batch, below), below >= 0, replace=self.replace)
            return below, tried.odds, tried.share

        node, nodes, (share,) = descend(batch, probs, chance, tries)
        return Verdicts(nodes, chance.pick(left_of(probs, probs.at(node), batch.q_rows(node), share)))

    def candidates(self, batch: TreeBatch) -> Tensor:
        """(batch, nodes, most): the nodes that are tried below each node, in order, padded with -1."""
        return batch.children


class MSS(RRS):
    name = "mss"
    accepts = frozenset({Draw.WITH_REPLACEMENT, Draw.PATHS})
    reads = ("tokens", "candidates")
    replace = True

    def candidates(self, batch: TreeBatch) -> Tensor:
        return batch.candidates


def tokens_of(batch: TreeBatch, nodes: Tensor) -> Tensor:
    """The tokens of nodes (batch, …); an arbitrary token for -1."""
    return gather_rows(batch.tokens, nodes.clamp_min(0).flatten(1)).view(nodes.shape)


def descend(
    batch: TreeBatch, probs: TargetProbs, chance: Chance, tries: Callable[[Tensor], tuple[Tensor, ...]]
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Walk down from the root while children are accepted.

    `tries` takes nodes (batch, n) and returns the children to try there (batch, n, most), their odds, and any numbers
    (batch, n) that the caller needs of the last node. Returns the last node (batch,), the path to it
    (batch, depth + 1), and its numbers, which are 0 at the deepest level, where no child is tried and no row is read.
    """
    node = torch.zeros(len(batch), dtype=torch.long, device=batch.device)
    ended = torch.zeros_like(node, dtype=torch.bool)
    way = [node]
    known = None  # what `tries` returns for all nodes, if they are computed at once
    if not probs.lazy and probs.together:
        known = tries(torch.arange(batch.nodes, device=batch.device).expand(len(batch), -1))

    def at(node: Tensor) -> tuple[Tensor, ...]:
        if known is None:
            return tuple(item[:, 0] for item in tries(node[:, None]))
        return tuple(gather_rows(item, node) for item in known)

    children, odds, *numbers = at(node)
    for depth in range(batch.depth):
        turn = chance.first(torch.where(ended[:, None], 0.0, odds), depth * STRIDE)
        accepted = turn < children.shape[1]
        child = children.gather(1, turn.clamp_max(children.shape[1] - 1)[:, None])[:, 0]
        ended = ~accepted  # stays so: a tree that has ended gets odds of 0
        way.append(torch.where(accepted, child, -1))
        node = torch.where(accepted, child, node)
        if settled(probs, ended):
            break
        if depth + 1 < batch.depth:
            children, odds, *numbers = at(node)
        else:
            numbers = [torch.where(accepted, 0.0, number) for number in numbers]
    return node, torch.stack(way, dim=1), numbers


@dataclass(frozen=True, eq=False)
class Tried:
    """The numbers of some nodes if all their children are tried in turn and rejected (see the head of this file)."""

    odds: Tensor
    """(batch, n, children) float64: the odds of accepting each child after those before it were rejected"""
    acceptance: Tensor
    """(batch, n) float64: a_m, after the last of m rejections; 1 if a_0 = 1, but 0 if nothing of p is left"""
    share: Tensor
    """(batch, n) float64: b_m / a_0, so that the residual is max(p - share q, 0), not normalised"""


def reject(
    p: Tensor, q: Tensor, tokens: Tensor, valid: Tensor, *, replace: bool, acceptance: Tensor | None = None
) -> Tried:
    """Try children with these tokens (batch, n, children) in turn, given p and q (batch, n, vocabulary) of their nodes.

    `valid` marks the children that exist. `acceptance` (batch, n) is a_0 of every node, by default 1. In the code, `a`
    is a_0, `wanted` is a_k, and `b`, `c`, `z` are b_k, c_k, z_k; `left` is c_k S.
    """
    a = torch.ones(p.shape[:2], dtype=torch.float64, device=p.device) if acceptance is None else acceptance
    wanted = a
    b, c, z = torch.zeros_like(a), torch.ones_like(a), torch.ones_like(a)
    at_p, at_q = p.gather(-1, tokens).double(), q.gather(-1, tokens).double()
    untried = q if replace or tokens.shape[-1] == 1 else q.clone()
    odds = []
    for turn in range(tokens.shape[-1]):
        here, p_t, q_t = valid[..., turn], at_p[..., turn], at_q[..., turn]
        chance = (a * p_t - b * q_t).clamp_min(0) * z / (c * q_t)
        odds.append(torch.where(here, chance.clamp_max(1).nan_to_num(0.0), 0.0))
        next_b = b + c / z
        ratio = (next_b / a).to(q.dtype)[..., None]
        left = a * row_sum(torch.sub(p, q * ratio).clamp_min_(0))
        next_c = left + c * (1 - wanted)
        wanted = torch.where(here, (left / next_c).nan_to_num(0.0), wanted)
        b, c = torch.where(here, next_b, b), torch.where(here, next_c, c)
        if not replace and turn + 1 < tokens.shape[-1]:
            untried = blank(untried, tokens[..., turn])
            z = torch.where(here, row_sum(untried), z)
    return Tried(torch.stack(odds, dim=-1), wanted, (b / a).nan_to_num(0.0))


@or_match
class Traversal(Verifier):
    name = "traversal"
    accepts = frozenset({Draw.WITHOUT_REPLACEMENT, Draw.WITH_REPLACEMENT, Draw.PATHS})
    reads = ("tokens", "depths", "ancestor_bits", "children", "levels", "postorder")

    def __call__(self, batch: TreeBatch, probs: TargetProbs, chance: Chance) -> Verdicts:
        probs = all_at_once(probs)
        odds, share = odds_of_nodes(batch, probs)
        order = batch.postorder
        # Padding comes after the root, whose odds are 1.
        turn = chance.first(gather_rows(odds, order.clamp_min(0)), 0)
        node = order.gather(1, turn[:, None])[:, 0]
        left = left_of(probs, probs.at(node), batch.q_rows(node), gather_rows(share, node))
        return Verdicts(batch.paths_to(node)[:, : batch.depth + 1], chance.pick(left))


def odds_of_nodes(batch: TreeBatch, probs: TargetProbs) -> tuple[Tensor, Tensor]:
    """(batch, nodes) float64 each: the odds a_m of the coin of every node, and its share b_m / a_0 (`Tried`)."""
    odds = torch.ones(len(batch), batch.nodes + 1, dtype=torch.float64, device=batch.device)
    share = torch.zeros_like(odds)
    wanted = torch.ones_like(odds)  # a_0 of every node; the extra column takes what padding writes
    for depth, width in enumerate(batch.widths):
        for level in batch.levels[:, depth].split(1 if probs.lazy else batch.levels.shape[2], dim=1):
            if settled(probs, level < 0):
                continue
            nodes = level.clamp_min(0)
            children = gather_rows(batch.children, nodes)[..., :width]
            children = torch.where((level >= 0)[..., None], children, -1)
            p, q, start = probs.at(nodes), batch.q_rows(nodes), wanted.gather(1, nodes)
            tried = reject(p, q, tokens_of(batch, children), children >= 0, replace=False, acceptance=start)
            own = torch.where(level >= 0, level, batch.nodes)
            odds.scatter_(1, own, tried.acceptance)
            share.scatter_(1, own, tried.share)
            below = torch.where(children >= 0, children, batch.nodes).flatten(1)
            wanted.scatter_(1, below, tried.odds.flatten(1))
            odds.scatter_(1, below, tried.odds.flatten(1))  # a leaf keeps a_0
    odds[:, 0].fill_(1)
    return odds[:, :-1], share[:, :-1]
