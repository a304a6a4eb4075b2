"""Recursive rejection: try the children of a node one after the other, from the root downwards or the leaves upwards.

`mss`  Miao et al., "SpecInfer", ASPLOS 2024 (multi-step speculative sampling), and Yang et al., "Multi-Candidate
       Speculative Decoding" (arXiv 2401.06706) with replacement: the children are independent draws, repeats kept. They
       are the next tokens of the paths through a node, or so many draws below every node. A repeat of a rejected token
       has nothing left and is rejected for sure, but what is wanted after it changes: it counts as a draw.
`rrs`  recursive rejection sampling, without replacement: MCSD, RSD (Jeon et al., arXiv 2402.14160), Sequoia (Chen et
       al., arXiv 2402.12374): no token is tried twice, and a rejected one leaves the distribution of the next.

After a rejection the target still wants max(P - Q, 0), normalised. Written out, after k rejections it wants

    max(a p - b_k q, 0) / c_k       b_{k+1} = b_k + c_k / z_k       a = 1 at the start

with z_k the mass of q on untried tokens (1 with replacement) and c_k what normalises. One pass over a row per child
gives them, and no row is rewritten. A rejected token has nothing left, so the formula holds for it too.

`traversal`  Weng et al., "Traversal Verification for Speculative Tree Decoding", NeurIPS 2025 (arXiv 2505.12398):
       block verification on a tree. A node is asked after all its children, in draw order; the first success is kept
       with the whole way to it. A node that its parent wants with the mass a is asked, after m children were rejected,
       with the odds a_m of `reject`. What happens below a node does not change what its parent wants next, so the odds
       of all nodes are known before any coin is tossed:

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
        """(batch, nodes, most): what is tried at each node, in order; -1 where there is nothing."""
        return batch.children


class MSS(RRS):
    name = "mss"
    accepts = frozenset({Draw.WITH_REPLACEMENT, Draw.PATHS})
    reads = ("tokens", "candidates")
    replace = True

    def candidates(self, batch: TreeBatch) -> Tensor:
        return batch.candidates


def tokens_of(batch: TreeBatch, nodes: Tensor) -> Tensor:
    """The tokens of nodes (batch, …); any token where there is none."""
    return gather_rows(batch.tokens, nodes.clamp_min(0).flatten(1)).view(nodes.shape)


def descend(
    batch: TreeBatch, probs: TargetProbs, chance: Chance, tries: Callable[[Tensor], tuple[Tensor, ...]]
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Walk down from the root while children are accepted.

    `tries` says of nodes (batch, n) which children are tried there (batch, n, most), at which odds, and whatever
    numbers (batch, n) the caller wants to know of the last node. Returns that node (batch,), the way to it
    (batch, depth + 1), and the numbers: 0 at the bottom, where no child is tried and no row read.
    """
    node = torch.zeros(len(batch), dtype=torch.long, device=batch.device)
    ended = torch.zeros_like(node, dtype=torch.bool)
    way = [node]
    known = None  # what is said of all nodes, where it does not wait for the walk to come to them
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
        ended = ~accepted  # for good: a tree that has ended accepts nothing at odds of 0
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
    """All children of some nodes tried and, in thought, rejected."""

    odds: Tensor
    """(batch, n, children) float64: of accepting each, once those before it were rejected"""
    acceptance: Tensor
    """(batch, n) float64: the mass that is still wanted after the last rejection; 1 where it was 1 at the start"""
    share: Tensor
    """(batch, n) float64: b / a; max(p - share q, 0) is what is still wanted, not normalised"""


def reject(
    p: Tensor, q: Tensor, tokens: Tensor, valid: Tensor, *, replace: bool, acceptance: Tensor | None = None
) -> Tried:
    """Try children with these tokens (batch, n, children) in turn, given p and q (batch, n, vocabulary) of their nodes.

    `valid` marks the children that exist. `acceptance` (batch, n) is the mass of p that is wanted from the node at the
    start; by default all of it.
    """
    a = torch.ones(p.shape[:2], dtype=torch.float64, device=p.device) if acceptance is None else acceptance
    wanted = a  # a_k, the mass still wanted
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
        turn = chance.first(
            gather_rows(odds, order.clamp_min(0)), 0
        )  # padding stands behind the root, whose odds are 1
        node = order.gather(1, turn[:, None])[:, 0]
        left = left_of(probs, probs.at(node), batch.q_rows(node), gather_rows(share, node))
        return Verdicts(batch.paths_to(node)[:, : batch.depth + 1], chance.pick(left))


def odds_of_nodes(batch: TreeBatch, probs: TargetProbs) -> tuple[Tensor, Tensor]:
    """(batch, nodes) float64 each: the odds of every node's coin, and the share b / a of q that it has lost by then."""
    odds = torch.ones(len(batch), batch.nodes + 1, dtype=torch.float64, device=batch.device)
    share = torch.zeros_like(odds)
    # One more column takes what padding writes.
    wanted = torch.ones_like(odds)
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
            odds.scatter_(1, below, tried.odds.flatten(1))  # what a leaf is asked with
    odds[:, 0].fill_(1)
    return odds[:, :-1], share[:, :-1]
