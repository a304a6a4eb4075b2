"""Choose the verifier that accepts most, among those that are exact for the way the trees were drawn."""

from __future__ import annotations

from branchwise.core.batch import TreeBatch
from branchwise.core.rng import Chance
from branchwise.core.target_probs import TargetProbs
from branchwise.core.tree import Draw
from branchwise.verify import VERIFIERS, Verdicts, Verifier


class Auto(Verifier):
    """Fixed trees: match. One drawn path: block. Several paths: cascade. Siblings drawn one by one: traversal."""

    name = "auto"
    accepts = frozenset(Draw) - {Draw.FORK}

    def __call__(self, batch: TreeBatch, probs: TargetProbs, chance: Chance) -> Verdicts:
        return choose(batch)(batch, probs, chance)


def choose(batch: TreeBatch) -> Verifier:
    drawn = {tree.draw for tree in batch.trees}
    if drawn & {Draw.WITHOUT_REPLACEMENT, Draw.WITH_REPLACEMENT}:
        name = "traversal"
    elif Draw.PATHS in drawn:
        name = "cascade" if any(len(tree.leaves) > 1 for tree in batch.trees) else "block"
    else:
        name = "match"
    verifier: Verifier = VERIFIERS.build(name)
    return verifier
