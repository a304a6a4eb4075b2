"""K independent paths, merged where they agree: what block verifiers of several paths are exact for."""

from __future__ import annotations

import re

from branchwise.draft import Budget
from branchwise.draft.dice import Dice
from branchwise.draft.growth import Growing, Sapling, drawable
from branchwise.errors import UsageError
from branchwise.tree import Draw


class Paths:
    """`paths:KxL`: K paths of L tokens, shorter where the budget is; nothing of that depends on what was drawn."""

    draw = Draw.PATHS

    def __init__(self, shape: str) -> None:
        found = re.fullmatch(r"(\d+)x(\d+)", shape)
        if not found or not int(found[1]) or not int(found[2]):
            raise UsageError(f"Paths are given as paths:KxL, such as paths:4x6, not paths:{shape}.")
        self.count, self.length = int(found[1]), int(found[2])

    def grow(self, root: int, budget: Budget, dice: Dice) -> Growing:
        length = min(self.length, budget.depth, (budget.nodes - 1) // self.count)
        tree = Sapling([root])
        ends = [0] * self.count
        for level in range(length):
            nodes = sorted(set(ends))
            found = yield tree, nodes
            for node, law in zip(nodes, drawable(found.laws), strict=True):
                tree.laws[node] = law
                through = [path for path, end in enumerate(ends) if end == node]
                children: dict[int, int] = {}
                tokens = dice.picks(law, [level * self.count + path for path in through])
                for path, token in zip(through, tokens, strict=True):
                    if token not in children:
                        children[token] = tree.add(node, token)
                    ends[path] = children[token]
        return tree.finish(self.draw, tuple(ends))
