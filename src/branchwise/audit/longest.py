"""How far the lossy rule is from the target's law: every fork that can be drafted, every coin.

A step of the rule ends at an accepted node, and the next one begins with the law that is wanted there. So that is what
follows the emitted tokens here, and the target's own laws follow that. With one branch the distance is 0.
"""

from __future__ import annotations

import torch
from torch import Tensor

from branchwise.audit.enumeration import Enumerator, outcomes
from branchwise.audit.instances import Drafts, ExactLaws, Instance
from branchwise.draft import Budget
from branchwise.draft.dice import Dice
from branchwise.draft.fork import Fork
from branchwise.draft.growth import Growing
from branchwise.rows import rows_at, total
from branchwise.tree import Draw
from branchwise.verify import Verdicts
from branchwise.verify.longest import Longest, after_stop


class Begun:
    """A fork of W branches, with the target's law at its root or without."""

    draw = Draw.FORK

    def __init__(self, width: int, depth: int, known: Tensor | None) -> None:
        self.fork = Fork(f"{width}x{depth}")
        self.known = known

    def grow(self, root: int, budget: Budget, dice: Dice) -> Growing:
        return self.fork.grow(root, budget, dice, self.known)


def lossy_distance(instance: Instance, width: int) -> float:
    """Total-variation distance of what a fork of this many branches writes from the target's law."""
    return emitted_by_forks(instance, width)[0]


def emitted_by_forks(instance: Instance, width: int, *, known: bool = True, lazy: bool = True) -> tuple[float, float]:
    """That distance, and the tokens per step. `known` is how every step but the first of a text begins."""
    law_at_root = torch.from_numpy(instance.p[0][0]) if known else None
    drafts = Drafts.grown(Begun(width, instance.depth, law_at_root), instance)
    vocabulary, depth, forest, p = instance.vocabulary, instance.depth, drafts.forest, drafts.p
    laws = [torch.from_numpy(table) for table in instance.p]
    begun = [torch.zeros_like(table) for table in laws]
    """by level: the mass of steps that emit exactly these tokens, coded like prefixes, and of the token after them"""

    def verify(rows: Tensor, chance: Enumerator) -> Verdicts:
        return Longest()(forest.take(rows), ExactLaws(p[rows], lazy=lazy), chance)

    efficiency = 0.0
    for found in outcomes(verify, len(drafts.trees)):
        trees = forest.take(found.rows)
        weights = drafts.weights[found.rows] * found.weights
        emitted = (found.verdicts.paths >= 0).sum(dim=1)
        last = found.verdicts.paths.gather(1, emitted[:, None] - 1)
        codes = drafts.codes[found.rows].gather(1, last)[:, 0] * vocabulary + found.verdicts.tokens
        stop, drafted = trees.children_of(last[:, 0], found.verdicts.tokens)
        tested = (trees.parents == stop[:, None]).any(dim=1)
        wanted = after_stop(rows_at(p[found.rows], stop), trees.q_rows(stop), tested)
        wanted /= total(wanted)[:, None]
        for level in range(1, depth + 1):
            here = emitted == level
            # What follows a token that was not drafted is the target's law: nothing was tested there.
            law = torch.where(drafted[here, None], wanted[here], laws[level][codes[here]])
            begun[level].index_add_(0, codes[here], law * weights[here, None])
        efficiency += float((weights * emitted).sum())

    target, written = torch.ones(1, dtype=torch.float64), torch.zeros(1, dtype=torch.float64)
    for rows, first in zip(laws, begun, strict=True):
        target = (target[:, None] * rows).flatten()
        written = (written[:, None] * rows + first).flatten()
    return 0.5 * float((written - target).abs().sum()), efficiency
