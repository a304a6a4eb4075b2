"""The verifier that accepts most of what is exact for how the trees were drawn."""

from __future__ import annotations

from branchwise.chance import Chance
from branchwise.forest import Forest
from branchwise.laws import Laws
from branchwise.tree import Draw
from branchwise.verify import VERIFIERS, Verdicts, Verifier


class Auto:
    """Fixed trees: match. One drawn path: block. Several: cascade. Drawn without replacement: traversal."""

    name = "auto"
    accepts = frozenset(Draw) - {Draw.FORK}

    def __call__(self, forest: Forest, laws: Laws, chance: Chance) -> Verdicts:
        return choose(forest)(forest, laws, chance)


def choose(forest: Forest) -> Verifier:
    drawn = {tree.draw for tree in forest.trees}
    if Draw.WITHOUT_REPLACEMENT in drawn:
        name = "traversal"
    elif Draw.PATHS in drawn:
        name = "cascade" if any(len(tree.leaves) > 1 for tree in forest.trees) else "block"
    else:
        name = "match"
    verifier: Verifier = VERIFIERS.build(name)
    return verifier
