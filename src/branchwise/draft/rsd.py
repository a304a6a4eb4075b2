"""Recursive speculative decoding with constant branching (RSD-C): distinct children, drawn without replacement.

Jeon et al., "Recursive Speculative Decoding: Accelerating LLM Inference via Sampling Without Replacement" (arXiv
2402.14160).
"""

from __future__ import annotations

from branchwise.draft import Budget
from branchwise.draft.dice import Dice, Throw
from branchwise.draft.growth import Growing, Sapling
from branchwise.errors import UsageError
from branchwise.topology import branched, plant
from branchwise.tree import Draw


class Branching:
    """`rsd-c:4,2,1`: four children of the root, two of each of those, one below each of those."""

    draw = Draw.WITHOUT_REPLACEMENT
    stoppable = True

    def __init__(self, *branching: int) -> None:
        if not branching or min(branching) < 1:
            raise UsageError("RSD-C needs how many children each level has, such as rsd-c:4,2,1.")
        self.branching = branching
        plant(branched(branching))

    def grow(self, root: int, budget: Budget, dice: Dice) -> Growing:
        tree, level = Sapling([root]), [0]
        for depth, width in enumerate(self.branching[: max(budget.depth, 0)]):
            if len(tree) + len(level) * width > budget.nodes:
                break
            found = yield tree, level
            laws = found.drawable
            tree.laws.update(zip(level, laws, strict=True))
            draws = [(place, (depth << 16) + place) for place in range(len(level))]
            orders = yield Throw(dice, laws, draws, [width] * len(level))
            level = [tree.add(node, token) for node, order in zip(level, orders, strict=True) for token in order]
        return tree.finish(self.draw)
