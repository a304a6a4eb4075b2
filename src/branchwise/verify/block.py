"""Block verification: accept or reject the tokens of a path together, as a block.

Sun et al., "Block Verification Accelerates Speculative Decoding", ICLR 2025 (arXiv 2403.10444). Token verification
ends at the first token that fails. Block verification clips the running product of p/q instead of each factor, tosses a
coin at every node, and keeps the path up to the last success. No verifier of one path accepts more.

    w_0 = 1, w_{i+1} = min(1, w_i p/q)       S_i = sum of max(w_i p - q, 0)
    h_i = S_i / (S_i + 1 - w_i)              h_L = w_L, h_0 = 1

Node i is the node after i tokens of the path, and L is their number. In w_{i+1}, p/q is the ratio for the next token of
the path; S_i is a sum over the vocabulary. The path is kept up to the last i whose coin, of odds h_i <= w_i, succeeds.
The token after it is drawn from max(w_i p - q, 0), and from p if the whole path was kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from branchwise.core.batch import TreeBatch
from branchwise.core.rng import Chance
from branchwise.core.rows import gather_rows, row_sum
from branchwise.core.target_probs import TargetProbs, settled, where_rows
from branchwise.core.tree import Draw
from branchwise.verify import STRIDE, Verdicts, Verifier
from branchwise.verify.match import or_match


@or_match
class Block(Verifier):
    name = "block"
    accepts = frozenset({Draw.PATHS})
    reads = ("tokens", "paths")

    def __call__(self, batch: TreeBatch, probs: TargetProbs, chance: Chance) -> Verdicts:
        """Verify the first path."""
        path = Path.below(batch, batch.paths[:, 0])
        root = torch.zeros_like(path.length)
        spans = list(read(batch, probs, path, probs.at(root), batch.q_rows(root)))
        p, q = at_tokens(spans, path.tokens)
        block = verify_block(probs, chance, path, spans, clipped_products(p / q), own_probs)
        return path.verdicts(block.kept, chance.pick(block.residual(batch, probs, path)))


@dataclass(frozen=True, eq=False)
class Path:
    """One path of every tree, from some node downwards."""

    nodes: Tensor
    """(batch, n + 1): column 0 is where the path starts; columns after `length` have no meaning"""
    tokens: Tensor
    """(batch, n): column i has the token that leads from node i to node i + 1"""
    length: Tensor
    """(batch,): the number of its tokens"""

    @classmethod
    def below(cls, batch: TreeBatch, nodes: Tensor) -> Path:
        """The path through nodes (batch, n + 1) that are padded with -1."""
        length = (nodes >= 0).sum(dim=1) - 1
        nodes = nodes.clamp_min(0)
        return cls(nodes, gather_rows(batch.tokens, nodes[:, 1:]), length)

    def verdicts(self, kept: Tensor, tokens: Tensor) -> Verdicts:
        """Keep the first `kept` tokens of a path that starts at the root."""
        steps = torch.arange(self.nodes.shape[1], device=kept.device)
        return Verdicts(torch.where(steps <= kept[:, None], self.nodes, -1), tokens)


@dataclass(frozen=True, eq=False)
class Span:
    """The distributions at consecutive nodes of a path: at one node on the host, at all nodes on a device."""

    start: int
    p: Tensor
    """(batch, n, vocabulary): row i after node start + i"""
    q: Tensor

    @property
    def stop(self) -> int:
        return self.start + self.p.shape[1]


def read(batch: TreeBatch, probs: TargetProbs, path: Path, p: Tensor, q: Tensor) -> Iterator[Span]:
    """The distributions at all nodes of a path but the last; `p` and `q` (batch, vocabulary) are those of the first."""
    last = path.tokens.shape[1]
    if not probs.lazy:
        nodes = path.nodes[:, 1:last]
        yield Span(0, with_first(p, probs.at(nodes)), with_first(q, batch.q_rows(nodes)))
        return
    yield Span(0, p[:, None], q[:, None])
    for start in range(1, last):
        if settled(probs, path.length <= start):
            return
        nodes = path.nodes[:, start : start + 1]
        yield Span(start, probs.at(nodes), batch.q_rows(nodes))


def with_first(row: Tensor, rows: Tensor) -> Tensor:
    """(batch, 1 + n, vocabulary): a row (batch, vocabulary) before rows (batch, n, vocabulary)."""
    return torch.cat([row[:, None], rows], dim=1)


def at_tokens(spans: list[Span], tokens: Tensor) -> tuple[Tensor, Tensor]:
    """p and q (batch, n) float64 of the tokens along the path, as far as it was read."""
    pairs = [(span.p, span.q, tokens[:, span.start : span.stop, None]) for span in spans if span.start < span.stop]
    p = torch.cat([p[:, : t.shape[1]].gather(-1, t)[..., 0] for p, _, t in pairs], dim=1)
    q = torch.cat([q[:, : t.shape[1]].gather(-1, t)[..., 0] for _, q, t in pairs], dim=1)
    return p.double(), q.double()


def clipped_products(ratios: Tensor) -> Tensor:
    """(batch, n + 1): the running product of ratios (batch, n), clipped to 1 after every factor; it starts with 1."""
    found = [ratios.new_ones(len(ratios))]
    for ratio in ratios.unbind(dim=1):
        found.append((found[-1] * ratio).clamp_max(1))
    return torch.stack(found, dim=1)


DrawnFrom = Callable[[Span, Tensor | None], Tensor]
"""gives (batch, n, vocabulary): the distributions that the tokens of a path were drawn from after the nodes of a span,
or only (n = 1) after the node at a place (batch,) of the span"""


def own_probs(span: Span, place: Tensor | None) -> Tensor:
    """The `DrawnFrom` of a path that was not chosen among several: q itself."""
    return span.q if place is None else gather_rows(span.q, place)[:, None]


@dataclass(frozen=True, eq=False)
class Kept:
    """How far a path was kept, and the residual there."""

    kept: Tensor
    """(batch,): the number of tokens that were kept"""
    whole: Tensor
    """(batch,) bool: whether all tokens were kept"""
    left: Tensor
    """(batch, vocabulary): the distribution of the next token if not all were kept, unnormalised"""
    mass: Tensor
    """(batch,) float64: the sum of `residual`"""

    def residual(self, batch: TreeBatch, probs: TargetProbs, path: Path) -> Tensor:
        """(batch, vocabulary): the distribution of the next token, unnormalised; p after a whole path."""
        if settled(probs, ~self.whole):
            return self.left
        end = probs.at(gather_rows(path.nodes, path.length))
        return where_rows(probs, self.whole, end, self.left)


def verify_block(
    probs: TargetProbs,
    chance: Chance,
    path: Path,
    spans: list[Span],
    weights: Tensor,
    drawn_from: DrawnFrom,
    first_coin: int = 1,
) -> Kept:
    """Keep a path up to the last success; `weights` (batch, n + 1) are the w_i.

    The last success is the first one if the deepest node tosses first. So coin numbers fall with depth: the coin of the
    node at depth d (counted from the start of the path) is first_coin + STRIDE - d, however long the other paths of the
    batch are. A toss over several nodes begins with the deepest.
    """
    last = path.tokens.shape[1]
    # h_L = w_L: at the end of the path. The depths are last, …, 0, so the first coin belongs to depth `last`.
    nodes = torch.arange(last, -1, -1, device=weights.device)
    known = torch.nn.functional.pad(weights, (0, last + 1 - weights.shape[1]))
    at_end = torch.where(nodes == path.length[:, None], known.flip(1), 0.0)
    whole = chance.first(at_end, first_coin + STRIDE - last) <= last
    kept = torch.where(whole, path.length, -1)
    left, left_mass = spans[0].p[:, 0], torch.ones_like(weights[:, 0])
    for span in reversed(spans):
        if settled(probs, kept >= 0):
            break
        steps = torch.arange(span.start, span.stop, device=weights.device)
        w = weights[:, span.start : span.stop]
        coin = first_coin + STRIDE - span.stop + 1  # of the deepest node, span.stop - 1
        if probs.lazy and span.start > 0:
            # h_i <= w_i: a coin that fails at odds of w_i fails at h_i, which then need not be computed.
            open_ = (kept < 0) & (path.length > span.start)
            if not chance.hopes(torch.where(open_[:, None], w, 0.0), coin).any():
                continue
        rows = wanted(span.p, w, drawn_from(span, None))
        mass = row_sum(rows)
        odds = torch.where((w == 1) | (steps == 0), 1.0, mass / (mass + 1 - w))
        odds = torch.where((steps < path.length[:, None]) & (kept < 0)[:, None], odds, 0.0)
        turn = chance.first(odds.flip(1), coin)
        found = turn < len(steps)
        here = (len(steps) - 1 - turn).clamp_min(0)
        # If w = 1 and p = q, nothing is left of p. Then the child has w = 1 too, so its coin, which is tossed first,
        # has odds of 1: only rounding can stop here, and the next token is drawn from p.
        here_mass = gather_rows(mass, here)
        empty = found & (here_mass == 0)
        p = gather_rows(span.p, here)
        if probs.lazy:
            row = gather_rows(rows, here)
        else:  # computing one row again costs less than writing all rows
            row = wanted(p[:, None], w.gather(1, here[:, None]), drawn_from(span, here))[:, 0]
        row = where_rows(probs, empty, p, row)
        left = where_rows(probs, found, row, left)
        left_mass = torch.where(found & ~empty, here_mass, left_mass)
        kept = torch.where(found, here + span.start, kept)
    return Kept(kept, whole, left, torch.where(whole, 1.0, left_mass))


def wanted(p: Tensor, w: Tensor, drawn: Tensor) -> Tensor:
    """(batch, n, vocabulary): max(w p - q, 0), with w (batch, n) and q = `drawn`, which the tokens were drawn from."""
    return (p * w[..., None].to(p.dtype)).sub_(drawn).clamp_min_(0)
