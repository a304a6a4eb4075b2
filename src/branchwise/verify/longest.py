"""The longest run wins. This rule is lossy: with more than one branch it changes the target's distribution.

Lu et al., "Improving Multi-candidate Speculative Decoding" (arXiv 2409.10644). After a step the target's distribution
at the last accepted node is known. W tokens drawn from it begin the next tree, so they need no test, and the draft
model continues each by a chain, whose tokens are accepted with min(1, p/q). Of all branches the branch with the longest
accepted run is kept (the first of several). That is the bias: a first token is preferred because the draft goes on well
after it. With one branch it is speculative sampling, and lossless.

A step ends without a token of its own: the last accepted node is the next root, and the distribution after it, which
this pass has scored, begins the next tree (`Fork` in `draft/policies/paths.py`). If no distribution was known, the
first level is drawn from the draft model and tested like the others; if nothing is accepted there, one token follows
from max(p - q, 0).
"""

from __future__ import annotations

import torch
from torch import Tensor

from branchwise.core.batch import TreeBatch
from branchwise.core.rng import Chance
from branchwise.core.target_probs import TargetProbs, settled
from branchwise.core.tree import Draw
from branchwise.verify import STRIDE, Verdicts, Verifier
from branchwise.verify.block import Path


class Longest(Verifier):
    name = "lossy-longest"
    accepts = frozenset({Draw.FORK})
    lossless = False

    def __call__(self, batch: TreeBatch, probs: TargetProbs, chance: Chance) -> Verdicts:
        branches = batch.levels.transpose(1, 2)  # (batch, width, depth + 1)
        runs = torch.stack([run(batch, probs, chance, *pair) for pair in enumerate(branches.unbind(dim=1))], dim=1)
        winner = runs.argmax(dim=1, keepdim=True)  # the first of the longest
        kept = runs.gather(1, winner)[:, 0]
        nodes = branches.gather(1, winner[..., None].expand(-1, -1, branches.shape[2]))[:, 0]
        path = Path.below(batch, torch.cat([torch.zeros_like(winner), nodes[:, 1:]], dim=1))
        token = batch.tokens.gather(1, path.nodes.gather(1, kept[:, None]))[:, 0]
        if not settled(probs, kept > 0):
            token = torch.where(kept > 0, token, chance.pick(opening(batch, probs)))
        return path.verdicts((kept - 1).clamp_min(0), token)


def run(batch: TreeBatch, probs: TargetProbs, chance: Chance, number: int, branch: Tensor) -> Tensor:
    """(batch,): how many tokens of a branch (batch, depth + 1), padded with -1, are accepted before one is rejected."""
    length = torch.zeros(len(batch), dtype=torch.long, device=batch.device)
    node = torch.zeros_like(length)
    for depth in range(1, batch.depth + 1):
        child = branch[:, depth]
        here = (length == depth - 1) & (child >= 0)
        if settled(probs, ~here):
            break
        child = child.clamp_min(0)
        certain = here & (batch.trusted > 0) if depth == 1 else torch.zeros_like(here)
        odds = certain.double()[:, None]
        if not settled(probs, certain | ~here):
            token = batch.tokens.gather(1, child[:, None])
            ratio = probs.at(node).gather(1, token) / batch.q_rows(node).gather(1, token)
            odds = torch.where((here & ~certain)[:, None], ratio.double().clamp_max(1), odds)
        length += chance.first(odds, depth * STRIDE + number) == 0
        node = child
    return length


def opening(batch: TreeBatch, probs: TargetProbs) -> Tensor:
    """(batch, vocabulary): the distribution of the token that a step emits if nothing was accepted, not normalised."""
    root = torch.zeros(len(batch), dtype=torch.long, device=batch.device)
    p = probs.at(root)
    if batch.q is None:
        return p
    q = batch.q_rows(root)
    return torch.where(batch.trusted[:, None] > 0, q.to(p.dtype), after_stop(p, q, batch.lengths > 0))


def after_stop(p: Tensor, q: Tensor, tested: Tensor) -> Tensor:
    """(…, vocabulary): the residual at the node where a run stopped, not normalised.

    It is max(p - q, 0) if a token drawn from q was tested and rejected (`tested`), and p if none was drafted.
    """
    left = torch.where(tested[..., None], (p - q).clamp_min(0), p)
    return torch.where(left.amax(dim=-1, keepdim=True) > 0, left, p)
