"""Greedy multi-path block verification: block verification of the best of K drafted paths.

Thomas and Pal, "Greedy Multi-Path Block Verification" (arXiv 2602.16961). Paths rank by the first token in which they
differ, and tokens by p/q. `gbv` takes the highest of K independent paths and verifies it as a block against the
distribution of the highest of K, in place of q. That can be worse than verifying one path, because this distribution is
further from q: if q is close to p, that is a loss. So `lambda-gbv` takes the first path with a probability lambda,
which p and q at the root decide, and otherwise the highest. It verifies either path against the mixture of both
distributions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from branchwise.core.batch import TreeBatch
from branchwise.core.rng import Chance
from branchwise.core.rows import gather_rows, row_sum
from branchwise.core.target_probs import TargetProbs
from branchwise.core.tree import Draw
from branchwise.verify import Verdicts, Verifier
from branchwise.verify.block import (
    Kept,
    Path,
    Span,
    at_tokens,
    clipped_products,
    own_probs,
    read,
    verify_block,
    with_first,
)
from branchwise.verify.match import or_match
from branchwise.verify.order import Order, boost, sort_keys

GRID = (0.0, 0.25, 0.5, 0.75, 1.0)


@or_match
class GBV(Verifier):
    name = "gbv"
    accepts = frozenset({Draw.PATHS})
    reads = ("tokens", "parents", "paths", "forks")
    mixtures: tuple[float, ...] = (0.0,)

    def __call__(self, batch: TreeBatch, probs: TargetProbs, chance: Chance) -> Verdicts:
        paths = Paths(batch, probs)
        choice = paths.choose(paths.all, chance, self.mixtures, coin=0)
        block = choice.verify(chance, coin=1)
        return choice.path.verdicts(block.kept, chance.pick(block.residual(batch, probs, choice.path)))


class LambdaGBV(GBV):
    name = "lambda-gbv"
    mixtures = GRID


@dataclass(frozen=True, eq=False)
class Draws:
    """The paths through one node of each tree, with the distributions p and q of their next token."""

    depth: Tensor
    """(batch,): the depth of the node"""
    alive: Tensor
    """(batch, paths) bool: the paths through the node that are still independent draws from q, given everything
    known"""
    p: Tensor
    """(batch, vocabulary): the distribution that the next token must have; the tokens after it must follow the target's
    p"""
    q: Tensor
    """(batch, vocabulary): the distribution of the next token of these paths; the tokens after it follow the drafter's
    q"""
    below: Tensor | None = None
    """(batch, vocabulary): the mass of q that ranks below each token, if it is known already"""

    @property
    def count(self) -> Tensor:
        return self.alive.sum(dim=1)


class Paths:
    """The drafted paths of a batch, and how they rank."""

    def __init__(self, batch: TreeBatch, probs: TargetProbs) -> None:
        self.batch = batch
        self.probs = probs
        self.nodes = batch.paths
        """(batch, paths, depth + 1), padded with -1"""
        self.ranks = ranks(batch, probs) if self.nodes.shape[1] > 1 else torch.zeros_like(self.nodes[..., 0])
        self._below: Tensor | None = None
        """(batch, rows, vocabulary): the mass of q that ranks below each token, at every node; None if not computed at
        once"""
        if not probs.lazy and probs.together and self.nodes.shape[1] > 1 and batch.q is not None:
            every = torch.arange(batch.q.shape[1], device=batch.q.device).expand(len(batch), -1)
            self._below = Order(probs.at(every), batch.q, lazy=False).below()

    @property
    def all(self) -> Draws:
        root = torch.zeros(len(self.batch), dtype=torch.long, device=self.nodes.device)
        alive = self.nodes[:, :, 0] >= 0
        below = None if self._below is None else self._below[:, 0]
        return Draws(root, alive, self.probs.at(root), self.batch.q_rows(root), below)

    def order(self, span: Span, nodes: Tensor, first: Order) -> Order:
        """The order of tokens at the nodes (batch, n) of a span; `first` is the order at the first node of the path."""
        if self.probs.lazy:
            return Order(span.p, span.q, lazy=True) if span.start else first
        if self._below is None:
            below = Order(span.p[:, 1:], span.q[:, 1:], lazy=False).below()
        else:
            below = gather_rows(self._below, nodes[:, 1:].clamp_max(self._below.shape[1] - 1))
        return Order(span.p, span.q, lazy=False, below=with_first(first.below()[:, 0], below))

    def at(self, depth: Tensor, beyond: int = 0) -> Tensor:
        """(batch, paths): the node of each path at `depth` (batch,) + `beyond`, -1 after the end of the path."""
        last = self.nodes.shape[2]
        place = (depth + beyond)[:, None, None].expand(-1, self.nodes.shape[1], 1)
        return torch.where(place < last, self.nodes.gather(2, place.clamp_max(last - 1)), -1)[..., 0]

    def choose(
        self, draws: Draws, chance: Chance, mixtures: tuple[float, ...], coin: int, most: int | None = None
    ) -> Choice:
        """Take the first path with a probability lambda out of `mixtures`, otherwise the highest path.

        `most` bounds the number of paths that are alive, if a bound is known without reading it from the device.
        """
        most = most or self.nodes.shape[1]
        below = None if draws.below is None else draws.below[:, None]
        order = Order(draws.p[:, None], draws.q[:, None], lazy=self.probs.lazy, below=below)
        first = draws.alive.int().argmax(dim=1)
        alone = most == 1 or (self.probs.lazy and bool((draws.count <= 1).all()))
        if alone:
            share, taken_first, taken = torch.ones_like(draws.depth, dtype=torch.float64), draws.count >= 0, first
        else:
            share = best_mixture(draws, order, mixtures, most, lazy=self.probs.lazy)
            taken_first = chance.first(share[:, None], coin) == 0
            taken = torch.where(taken_first, first, self._highest(draws))
        steps = torch.arange(self.nodes.shape[2], device=self.nodes.device)
        own = gather_rows(self.nodes, taken)
        places = draws.depth[:, None] + steps
        nodes = torch.where(places < len(steps), own.gather(1, places.clamp_max(len(steps) - 1)), -1)
        nodes = torch.where((draws.count > 0)[:, None] | (steps == 0), nodes, -1)
        return Choice(self, draws, order, share, taken_first, taken, Path.below(self.batch, nodes), most, alone)

    def _highest(self, draws: Draws) -> Tensor:
        """(batch,): the number of the path that ranks highest among those alive."""
        tokens = gather_rows(self.batch.tokens, self.at(draws.depth, 1).clamp_min(0))
        keys = sort_keys(draws.p.gather(1, tokens), draws.q.gather(1, tokens), draws.p.shape[-1])
        # Paths with the same next token part further down, where p and q are those of `ranks`.
        wins = _beats((keys, tokens, self.ranks)).sum(dim=2)
        return torch.where(draws.alive, wins, -1).argmax(dim=1)


def ranks(batch: TreeBatch, probs: TargetProbs) -> Tensor:
    """(batch, paths): how many paths each path beats. The order is total, so this ranks the paths of any subset too.

    Paths compare by the first token in which they differ, so only the distributions at forks are read.
    """
    nodes = batch.paths
    assert batch.q is not None
    keys = batch.q.new_zeros(len(batch), batch.nodes)  # by which siblings compare
    for forks in batch.forks.split(1 if probs.lazy else max(batch.forks.shape[1], 1), dim=1):
        p, q = probs.at(forks.clamp_min(0)), batch.q_rows(forks)
        parents = (forks[:, :, None] == batch.parents[:, None, :]) & (forks >= 0)[:, :, None]  # (batch, forks, nodes)
        tokens = batch.tokens[:, None, :].expand(-1, forks.shape[1], -1)
        found = sort_keys(p.gather(2, tokens), q.gather(2, tokens), p.shape[-1])
        keys += torch.where(parents, found, 0.0).sum(dim=1)
    steps = nodes[:, :, 1:].clamp_min(0)
    found, tokens = (gather_rows(table, steps.flatten(1)).view(steps.shape) for table in (keys, batch.tokens))
    contest = [table for pair in zip(found.unbind(dim=2), tokens.unbind(dim=2), strict=True) for table in pair]
    return _beats(contest).sum(dim=2)


def _beats(contest: Sequence[Tensor]) -> Tensor:
    """(batch, paths, paths): entry (i, j) says whether path i beats path j: by the first tensor (batch, paths) of
    `contest` in which they differ."""
    beats = torch.zeros_like(contest[0][:, :, None] > contest[0][:, None, :])
    for values in reversed(contest):
        mine, theirs = values[:, :, None], values[:, None, :]
        beats = (mine > theirs) | ((mine == theirs) & beats)
    return beats


def best_mixture(draws: Draws, order: Order, mixtures: tuple[float, ...], most: int, *, lazy: bool) -> Tensor:
    """(batch,) float64: the lambda out of `mixtures` with the highest probability that the first token is accepted.

    That probability is the overlap, the sum of min(p, mixture); of equal ones (up to rounding) the smallest lambda is
    taken, and 1 if only one path is alive. The choice depends on p, q and the number of paths, never on drafted tokens:
    that keeps it exact.
    """
    alone = draws.count <= 1
    if len(mixtures) == 1:
        return torch.where(alone, 1.0, torch.full_like(draws.depth, mixtures[0], dtype=torch.float64))
    p, q = order.p[:, 0], order.q[:, 0]
    gain = boost(order.below(), order.q, torch.ones_like(order.q[..., :1]), draws.count[:, None, None], most, lazy=lazy)
    highest = gain[:, 0].mul_(q)
    overlaps = torch.stack([row_sum(torch.lerp(highest, q, share).clamp_(max=p)) for share in mixtures], dim=1)
    noise = 1e-12 if p.dtype == torch.float64 else 1e-6
    good = overlaps >= overlaps.amax(dim=1, keepdim=True) - noise
    share = torch.ones_like(overlaps[:, 0])
    for number, mixture in reversed(list(enumerate(mixtures))):
        share = torch.where(good[:, number], mixture, share)
    return torch.where(alone, 1.0, share)


@dataclass(eq=False)
class Choice:
    """The path that was taken, with everything on which its distribution depends."""

    paths: Paths
    draws: Draws
    order: Order
    """the order of the tokens after the first node"""
    share: Tensor
    """(batch,): lambda, the probability with which the first path was to be taken"""
    taken_first: Tensor
    """(batch,) bool: whether the first path was taken; otherwise the highest was"""
    taken: Tensor
    """(batch,): the number of the taken path"""
    path: Path
    """the part of the taken path below the node of the draws"""
    most: int
    alone: bool
    """whether there was no choice: one path, whose distribution is q"""

    def verify(self, chance: Chance, coin: int) -> Kept:
        """Block verification against the mixture distribution, whichever path was taken."""
        probs = self.paths.probs
        self.spans = list(read(self.paths.batch, probs, self.path, self.draws.p, self.draws.q))
        p, q = at_tokens(self.spans, self.path.tokens)
        if self.alone:
            self.orders = [self.order] * len(self.spans)  # not read
            return verify_block(probs, chance, self.path, self.spans, clipped_products(p / q), own_probs, coin)
        places = [slice(span.start, span.stop) for span in self.spans]
        nodes = [self.path.nodes[:, place] for place in places]
        self.orders = [self.paths.order(*pair, self.order) for pair in zip(self.spans, nodes, strict=True)]
        tokens = [self.path.tokens[:, place] for place in places]
        below = torch.cat([o.below_at(t) for o, t in zip(self.orders, tokens, strict=True)], dim=1).double()
        share = shares(q, below)
        count = self.draws.count[:, None]
        gain = boost(below, q, share, count, self.most, lazy=probs.lazy)
        first = odds_of_first(self.share, gain)
        weights = clipped_products(p / (q * (first + (1 - first) * gain)))

        def drawn_from(span: Span, place: Tensor | None) -> Tensor:
            below, q = self.orders[self.spans.index(span)].below(), span.q
            shares_, one = (numbers[:, span.start : span.stop, None].to(q.dtype) for numbers in (share, first))
            if place is not None:
                below, q, shares_, one = (gather_rows(table, place)[:, None] for table in (below, q, shares_, one))
            gain = boost(below, q, shares_, count[..., None], self.most, lazy=probs.lazy)
            return gain.mul_(1 - one).add_(one).mul_(q)

        return verify_block(probs, chance, self.path, self.spans, weights, drawn_from, coin)


def shares(q: Tensor, below: Tensor) -> Tensor:
    """(batch, n): X / (A + X) at the nodes of a path whose tokens have the mass q (batch, n), with the mass `below`
    (batch, n) ranked below them.

    X is the mass of the paths through a node, and A the mass of the paths that rank below it. Unlike A and X, the ratio
    cannot underflow.
    """
    found = [torch.ones_like(q[:, 0])]
    for mass, lower in zip(q.unbind(dim=1)[:-1], below.unbind(dim=1)[:-1], strict=True):
        found.append(found[-1] * mass / (1 - found[-1] + found[-1] * (lower + mass)))
    return torch.stack(found, dim=1)


def odds_of_first(start: Tensor, gain: Tensor) -> Tensor:
    """(batch, n): at each node of a path, given the tokens before it, the probability that the path was taken as the
    first and not as the highest.

    `start` (batch,) is lambda, the probability at the first node. `gain` (batch, n) = G/q says how much likelier the
    highest path is to take each token than the first path is.
    """
    found = [start]
    for more in gain.unbind(dim=1)[:-1]:
        found.append(found[-1] / (found[-1] + (1 - found[-1]) * more))
    return torch.stack(found, dim=1)
