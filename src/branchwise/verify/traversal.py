"""Traversal verification: block verification on a tree, from the leaves upwards.

Weng et al., "Traversal Verification for Speculative Tree Decoding", NeurIPS 2025 (arXiv 2505.12398). A node is asked
after all its children, in draw order; the first success is kept with the whole way to it. A node that its parent
wants with the mass a is asked, after m children were rejected, with the odds a_m of `recursive.reject`. What happens
below a node does not change what its parent wants next, so the odds of all nodes are known before any coin is tossed:

    verdict = the first success in post-order of independent coins, one for every node; the root always succeeds

On a chain this is block verification; on any tree it accepts at least as much as `rrs`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from branchwise.core.batch import TreeBatch
from branchwise.core.rng import Chance
from branchwise.core.rows import gather_rows
from branchwise.core.target_probs import TargetProbs, all_at_once, settled
from branchwise.core.tree import Draw
from branchwise.verify import Verdicts, Verifier, left_of
from branchwise.verify.match import or_match
from branchwise.verify.recursive import reject


@or_match
class Traversal(Verifier):
    name = "traversal"
    accepts = frozenset({Draw.WITHOUT_REPLACEMENT, Draw.PATHS})
    reads = ("tokens", "parents", "depths", "children", "levels", "postorder")

    def __call__(self, batch: TreeBatch, probs: TargetProbs, chance: Chance) -> Verdicts:
        probs = all_at_once(probs)
        odds, share = odds_of_nodes(batch, probs)
        order = batch.postorder
        turn = chance.first(torch.where(order >= 0, gather_rows(odds, order.clamp_min(0)), 0.0), 0)
        node = order.gather(1, turn[:, None])[:, 0]
        p, q = probs.at(node), batch.q_rows(node)
        return Verdicts(way_to(batch, node), chance.pick(left_of(probs, p, q, share.gather(1, node[:, None])[:, 0])))


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
            tokens = gather_rows(batch.tokens, children.clamp_min(0).flatten(1)).view(children.shape)
            p, q, start = probs.at(nodes), batch.q_rows(nodes), wanted.gather(1, nodes)
            tried = reject(p, q, tokens, children >= 0, replace=False, acceptance=start)
            own = torch.where(level >= 0, level, batch.nodes)
            odds.scatter_(1, own, tried.acceptance)
            share.scatter_(1, own, tried.share)
            below = torch.where(children >= 0, children, batch.nodes).flatten(1)
            wanted.scatter_(1, below, tried.odds.flatten(1))
            odds.scatter_(1, below, tried.odds.flatten(1))  # what a leaf is asked with
    odds[:, 0].fill_(1)
    return odds[:, :-1], share[:, :-1]


def way_to(batch: TreeBatch, node: Tensor) -> Tensor:
    """(batch, depth + 1): the nodes from the root to the given ones, padded with -1."""
    depth = batch.depths.gather(1, node[:, None])[:, 0]
    nodes = torch.full((len(batch), batch.depth + 1), -1, device=node.device)
    for _ in range(batch.depth + 1):
        place = depth.clamp_min(0)[:, None]
        nodes = nodes.scatter(1, place, torch.where(depth >= 0, node, nodes[:, 0])[:, None])
        node = batch.parents.gather(1, node.clamp_min(0)[:, None])[:, 0]
        depth = depth - 1
    return nodes
