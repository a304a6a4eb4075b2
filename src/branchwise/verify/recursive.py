"""Recursive rejection: try the children of a node one after the other, descend to the first that is accepted.

`mss`  Miao et al., "SpecInfer", ASPLOS 2024 (multi-step speculative sampling), and Yang et al., "Multi-Candidate
       Speculative Decoding" (arXiv 2401.06706) with replacement: the children are independent draws, repeats kept.
`rrs`  recursive rejection sampling, without replacement: MCSD, RSD (Jeon et al., arXiv 2402.14160), Sequoia (Chen et
       al., arXiv 2402.12374): no token is tried twice, and a rejected one leaves the law of the next.

After a rejection the target still wants max(P - Q, 0), normalised. Written out, after k rejections it wants

    max(a p - b_k q, 0) / c_k       b_{k+1} = b_k + c_k / z_k       a = 1 at the start

with z_k the mass of q on untried tokens (1 with replacement) and c_k what normalises. One pass over a row per child
gives them, and no row is rewritten. A rejected token has nothing left, so the formula holds for it too.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from branchwise.chance import Chance
from branchwise.laws import Laws, settled
from branchwise.rows import rows_at, total
from branchwise.tree import Draw, Forest
from branchwise.verify import Verdicts
from branchwise.verify.match import or_match


class RRS:
    name = "rrs"
    accepts = frozenset({Draw.WITHOUT_REPLACEMENT, Draw.PATHS})

    @or_match
    def __call__(self, forest: Forest, laws: Laws, chance: Chance) -> Verdicts:
        walk = Walk(forest, laws)
        coin = 0
        for width in forest.widths:
            children = rows_at(forest.children, walk.node)[:, :width]
            p, q = walk.law, forest.q_rows(walk.node)
            tokens = rows_at(forest.tokens, children.clamp_min(0))
            tried = reject(p[:, None], q[:, None], tokens[:, None], (children >= 0)[:, None], replace=False)
            turn = chance.first(torch.where(walk.done[:, None], 0.0, tried.odds[:, 0]), coin)
            coin += width
            walk.descend(children, turn, tried.left(p[:, None], q[:, None])[:, 0])
            if settled(laws, walk.done):
                break
        return walk.verdicts(chance)


class MSS:
    name = "mss"
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
            tried = reject(p[:, None], q[:, None], tokens[:, None], (children >= 0)[:, None], replace=True)
            turn = chance.first(torch.where(walk.done[:, None], 0.0, tried.odds[:, 0]), depth * paths.shape[1])
            walk.descend(children, turn, tried.left(p[:, None], q[:, None])[:, 0])
            if settled(laws, walk.done):
                break
        return walk.verdicts(chance)


class Walk:
    """A way from the root downwards, for every tree of a batch."""

    def __init__(self, forest: Forest, laws: Laws) -> None:
        self._laws = laws
        self.node = torch.zeros(len(forest), dtype=torch.long, device=forest.device)
        self.done = torch.zeros_like(self.node, dtype=torch.bool)
        self.law = laws.rows(self.node)
        """(batch, vocabulary): the target's law at the node, or, where the walk is done, that of the last token"""
        self._nodes = [self.node]

    def descend(self, children: Tensor, turn: Tensor, left: Tensor) -> None:
        """Go to the child (batch, n) whose turn it is; where it is nobody's, end with what is `left` of the law."""
        accepted = turn < children.shape[1]
        child = children.gather(1, turn.clamp_max(children.shape[1] - 1)[:, None])[:, 0]
        ended = ~accepted & ~self.done
        self.law = torch.where(ended[:, None], left, self.law)
        self.done = self.done | ~accepted
        self.node = torch.where(accepted, child, self.node)
        self._nodes.append(torch.where(accepted, child, -1))
        if not settled(self._laws, self.done):
            self.law = torch.where(self.done[:, None], self.law, self._laws.rows(self.node))

    def verdicts(self, chance: Chance) -> Verdicts:
        return Verdicts(torch.stack(self._nodes, dim=1), chance.pick(self.law))


@dataclass(frozen=True, eq=False)
class Tried:
    """All children of some nodes tried and, in thought, rejected."""

    odds: Tensor
    """(batch, n, children) float64: of accepting each, once those before it were rejected"""
    acceptance: Tensor
    """(batch, n) float64: the mass that is still wanted after the last rejection; 1 where it was 1 at the start"""
    share: Tensor
    """(batch, n) float64: b / a"""

    def left(self, p: Tensor, q: Tensor) -> Tensor:
        """(batch, n, vocabulary): what is still wanted, unnormalised."""
        return torch.sub(p, q * self.share[..., None].to(q.dtype)).clamp_min_(0)


def reject(
    p: Tensor, q: Tensor, tokens: Tensor, valid: Tensor, *, replace: bool, acceptance: Tensor | None = None
) -> Tried:
    """Try children with these tokens (batch, n, children) in turn at nodes with laws p, q (batch, n, vocabulary).

    `valid` marks the children that exist. `acceptance` (batch, n) is the mass of the target's law that is wanted from the
    node at the start; by default all of it.
    """
    a = torch.ones(p.shape[:2], dtype=torch.float64, device=p.device) if acceptance is None else acceptance
    wanted = a  # a_k, the mass still wanted
    b, c, z = torch.zeros_like(a), torch.ones_like(a), torch.ones_like(a)
    at_p, at_q = p.gather(-1, tokens).double(), q.gather(-1, tokens).double()
    untried = q if replace else q.clone()
    odds = []
    for turn in range(tokens.shape[-1]):
        here, p_t, q_t = valid[..., turn], at_p[..., turn], at_q[..., turn]
        chance = (a * p_t - b * q_t).clamp_min(0) * z / (c * q_t)
        odds.append(torch.where(here, chance.clamp_max(1).nan_to_num(0.0), 0.0))
        next_b = b + c / z
        ratio = (next_b / a).to(q.dtype)[..., None]
        left = a * total(torch.sub(p, q * ratio).clamp_min_(0))
        next_c = left + c * (1 - wanted)
        wanted = torch.where(here, (left / next_c).nan_to_num(0.0), wanted)
        b, c = torch.where(here, next_b, b), torch.where(here, next_c, c)
        if not replace and turn + 1 < tokens.shape[-1]:
            untried.scatter_(-1, tokens[..., turn, None], 0.0)
            z = torch.where(here, total(untried), z)
    return Tried(torch.stack(odds, dim=-1), wanted, (b / a).nan_to_num(0.0))
