"""The cascade: multi-path block verification that goes on with the other paths after a stop.

If the chosen path stops at a node v, `lambda-gbv` throws the other K - 1 paths away. But given everything seen so far,
the other paths through v are still independent draws from a known distribution. The next token must follow the residual
r at v, and the tokens after it must follow p. That is the first task again, with r in place of p and fewer paths:
choose a path, verify it, go on.

After a stop, the next token of the other paths has the distribution q if the first path had been taken, because nothing
was learnt about the others. If the highest path had been taken, it is q restricted to the tokens that rank below the
token of the taken path, because a path with a higher token would have been taken instead. Identical copies of a taken
first path stay draws like all others.

The mathematics is our own; `branchwise audit verifiers` checks it by enumeration.
"""

from __future__ import annotations

import torch
from torch import Tensor

from branchwise.core.batch import TreeBatch
from branchwise.core.rng import Chance
from branchwise.core.rows import gather_rows, row_sum
from branchwise.core.target_probs import TargetProbs, all_at_once, settled, where_rows
from branchwise.core.tree import Draw
from branchwise.verify import STRIDE, Verdicts, Verifier
from branchwise.verify.block import Kept, Path
from branchwise.verify.gbv import GRID, Choice, Draws, Paths
from branchwise.verify.match import or_match
from branchwise.verify.order import Order


@or_match
class Cascade(Verifier):
    name = "cascade"
    accepts = frozenset({Draw.PATHS})
    reads = ("tokens", "parents", "paths", "forks")
    mixtures = GRID

    def __call__(self, batch: TreeBatch, probs: TargetProbs, chance: Chance) -> Verdicts:
        probs = all_at_once(probs)  # all stages together read about all rows of the tree
        paths = Paths(batch, probs)
        draws = paths.all
        anchor = torch.zeros_like(draws.depth)  # the number of a path through the node reached so far
        total = paths.nodes.shape[1]
        coins = STRIDE + 2  # numbers for one stage: the choice of a path, then its nodes
        for stage in range(total):
            if settled(probs, draws.count == 0):
                break
            choice = paths.choose(draws, chance, self.mixtures, stage * coins, most=total - stage)
            block = choice.verify(chance, stage * coins + 1)
            anchor = torch.where(draws.count > 0, choice.taken, anchor)
            draws = go_on(choice, block, last=stage == total - 1)
        path = Path.below(batch, gather_rows(paths.nodes, anchor))
        return path.verdicts(draws.depth, chance.pick(draws.p))


def go_on(choice: Choice, block: Kept, *, last: bool) -> Draws:
    """The task that is left after a stop: the residual in place of p, and the other paths as draws."""
    paths, draws = choice.paths, choice.draws
    active = draws.count > 0
    wanted = block.residual(paths.batch, paths.probs, choice.path)
    wanted = wanted / block.mass[:, None].to(wanted.dtype)
    p = where_rows(paths.probs, active, wanted, draws.p)
    depth = draws.depth + block.kept  # without draws the path was empty, and 0 tokens of it were kept
    if last:
        return Draws(depth, torch.zeros_like(draws.alive), p, draws.q)

    taken, numbers = choice.taken[:, None], torch.arange(draws.alive.shape[1], device=p.device)
    others = draws.alive & (numbers != taken) & (active & ~block.whole)[:, None]
    here, next_ = paths.at(depth), paths.at(depth, 1)
    others &= here == here.gather(1, taken)
    others &= choice.taken_first[:, None] | (next_ != next_.gather(1, taken))
    if settled(paths.probs, ~others.any(dim=1)):
        return Draws(depth, others, p, draws.q)
    return Draws(depth, others, p, probs_of_others(choice, block.kept, others))


def probs_of_others(choice: Choice, kept: Tensor, others: Tensor) -> Tensor:
    """(batch, vocabulary): the distribution of the next token of the other paths, at the node where the taken path
    stopped."""
    token = choice.path.tokens.gather(1, kept.clamp_max(choice.path.tokens.shape[1] - 1)[:, None])
    probs, row = choice.paths.probs, choice.draws.q
    for span, order in zip(choice.spans, choice.orders, strict=True):
        inside = (kept >= span.start) & (kept < span.stop) & others.any(dim=1)
        if settled(probs, ~inside):
            continue
        place = (kept - span.start).clamp(0, span.q.shape[1] - 1)
        q = gather_rows(span.q, place)
        if not choice.alone and not settled(probs, choice.taken_first):
            if span.q.shape[1] > 1:
                order = Order(gather_rows(span.p, place)[:, None], q[:, None], lazy=probs.lazy)
            lower_q = order.only_below(token)[:, 0]
            lower_q /= row_sum(lower_q)[:, None].to(q.dtype)
            q = where_rows(probs, choice.taken_first, q, lower_q)
        row = where_rows(probs, inside, q, row)
    return row
