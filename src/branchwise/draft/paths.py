"""K independent paths, merged where they agree: what block verifiers of several paths are exact for."""

from __future__ import annotations

import re

import torch

from branchwise.chance import Chance
from branchwise.draft import Budget
from branchwise.draft.growth import Growing, Sapling, drawable
from branchwise.errors import UsageError
from branchwise.tree import DraftTree, Draw


class Paths:
    """`paths:KxL`: K paths of L tokens, shorter where the budget is; nothing of that depends on what was drawn."""

    draw = Draw.PATHS

    def __init__(self, shape: str) -> None:
        found = re.fullmatch(r"(\d+)x(\d+)", shape)
        if not found or not int(found[1]) or not int(found[2]):
            raise UsageError(f"Paths are given as paths:KxL, such as paths:4x6, not paths:{shape}.")
        self.count, self.length = int(found[1]), int(found[2])

    def grow(self, root: int, budget: Budget, chance: Chance) -> Growing:
        length = min(self.length, budget.depth, (budget.nodes - 1) // self.count)
        tree = Sapling([root])
        if length < 1:
            return DraftTree(torch.tensor([root]), (-1,), self.draw, leaves=(0,) * self.count)
        ends = [0] * self.count
        for level in range(length):
            nodes = sorted(set(ends))
            laws = drawable((yield tree, nodes))
            tree.laws += laws.unbind()
            children: dict[tuple[int, int], int] = {}
            drawn = [
                int(chance.pick(laws[nodes.index(end), None], level * self.count + path))
                for path, end in enumerate(ends)
            ]
            # By parent, so that the nodes of a level stand in the order of their parents.
            for place in sorted(range(self.count), key=ends.__getitem__):
                step = (ends[place], drawn[place])
                if step not in children:
                    children[step] = tree.add(*step)
                ends[place] = children[step]
        return tree.finish(self.draw, tuple(ends))
