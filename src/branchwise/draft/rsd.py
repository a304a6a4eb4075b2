"""Recursive speculative decoding with constant branching (RSD-C): distinct children, drawn without replacement.

Jeon et al., "Recursive Speculative Decoding: Accelerating LLM Inference via Sampling Without Replacement" (arXiv
2402.14160).
"""

from __future__ import annotations

import torch

from branchwise.chance import Chance
from branchwise.draft import Budget
from branchwise.draft.growth import Growing, Sapling, drawable
from branchwise.errors import UsageError
from branchwise.tree import DraftTree, Draw


class Branching:
    """`rsd-c:4,2,1`: four children of the root, two of each of those, one below each of those."""

    draw = Draw.WITHOUT_REPLACEMENT

    def __init__(self, *branching: int) -> None:
        if not branching or min(branching) < 1:
            raise UsageError("RSD-C needs how many children each level has, such as rsd-c:4,2,1.")
        self.branching = branching

    def grow(self, root: int, budget: Budget, chance: Chance) -> Growing:
        tree, level = Sapling([root]), [0]
        for depth, width in enumerate(self.branching[: max(budget.depth, 0)]):
            if len(tree) + len(level) * width > budget.nodes:
                break
            laws = drawable((yield tree, level))
            tree.laws += laws.unbind()
            below = []
            for place, node in enumerate(level):
                drawn = chance.order(laws[place, None], width, (depth << 16) + place)[0].tolist()
                below += [tree.add(node, token) for token in drawn if token >= 0]
            level = below
        return tree.finish(self.draw) if tree.laws else DraftTree(torch.tensor([root]), (-1,), self.draw)
