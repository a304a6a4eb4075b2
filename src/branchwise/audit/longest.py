"""How far the lossy rule is from the target's distribution: every fork that can be drafted, every coin.

A step of the rule ends at an accepted node, and the next step begins with the distribution that the rule wants after
it. So that distribution follows the emitted tokens here, and then the target's own. With one branch the distance is 0.
"""

from __future__ import annotations

import torch
from torch import Tensor

from branchwise.audit.enumeration import Enumerator, outcomes
from branchwise.audit.instances import Drafts, ExactProbs, Instance
from branchwise.core.rows import gather_rows, row_sum
from branchwise.core.tree import Draw
from branchwise.draft.base import Budget
from branchwise.draft.builder import TreeCoroutine, TreePolicy
from branchwise.draft.policies.paths import Fork
from branchwise.draft.sampler import DraftSampler
from branchwise.verify import Verdicts
from branchwise.verify.longest import Longest, after_stop


class RootedFork(TreePolicy):
    """A fork of W branches, with the target's distribution at its root or without."""

    draw = Draw.FORK

    def __init__(self, width: int, depth: int, known: Tensor | None) -> None:
        self.fork = Fork(f"{width}x{depth}")
        self.known = known

    def grow(self, root: int, budget: Budget, sampler: DraftSampler) -> TreeCoroutine:
        return self.fork.grow(root, budget, sampler, self.known)


def lossy_distance(instance: Instance, width: int) -> float:
    """Total-variation distance of what a fork of this many branches writes from the target's distribution."""
    return emitted_by_forks(instance, width)[0]


def emitted_by_forks(instance: Instance, width: int, *, known: bool = True, lazy: bool = True) -> tuple[float, float]:
    """That distance, and the tokens per step. `known` is how every step but the first of a text begins."""
    root_probs = torch.from_numpy(instance.p[0][0]) if known else None
    drafts = Drafts.grown(RootedFork(width, instance.depth, root_probs), instance)
    vocabulary, depth, batch, p = instance.vocabulary, instance.depth, drafts.batch, drafts.p
    probs = [torch.from_numpy(table) for table in instance.p]
    begun = [torch.zeros_like(table) for table in probs]
    """by level: the mass of steps that emit exactly these tokens, coded like prefixes, and of the token after them"""

    def verify(rows: Tensor, chance: Enumerator) -> Verdicts:
        return Longest()(batch.take(rows), ExactProbs(p[rows], lazy=lazy), chance)

    efficiency = 0.0
    for found in outcomes(verify, len(drafts.trees)):
        trees = batch.take(found.rows)
        weights = drafts.weights[found.rows] * found.weights
        emitted = (found.verdicts.paths >= 0).sum(dim=1)
        last = found.verdicts.paths.gather(1, emitted[:, None] - 1)
        codes = drafts.codes[found.rows].gather(1, last)[:, 0] * vocabulary + found.verdicts.tokens
        stop, drafted = trees.children_of(last[:, 0], found.verdicts.tokens)
        tested = (trees.parents == stop[:, None]).any(dim=1)
        wanted = after_stop(gather_rows(p[found.rows], stop), trees.q_rows(stop), tested)
        wanted /= row_sum(wanted)[:, None]
        for level in range(1, depth + 1):
            here = emitted == level
            # What follows a token that was not drafted is the target's distribution: nothing was tested.
            row = torch.where(drafted[here, None], wanted[here], probs[level][codes[here]])
            begun[level].index_add_(0, codes[here], row * weights[here, None])
        efficiency += float((weights * emitted).sum())

    target, written = torch.ones(1, dtype=torch.float64), torch.zeros(1, dtype=torch.float64)
    for rows, first in zip(probs, begun, strict=True):
        target = (target[:, None] * rows).flatten()
        written = (written[:, None] * rows + first).flatten()
    return 0.5 * float((written - target).abs().sum()), efficiency
