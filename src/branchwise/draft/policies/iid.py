"""Independent children: a given number of draws below every node of a level, with replacement.

Yang et al., "Multi-Candidate Speculative Decoding" (arXiv 2401.06706), with replacement, and the expansion vectors of
Miao et al., "SpecInfer" (ASPLOS 2024), <1,1,3,1,1> for one child, one below it, and then three. Draws that agree are
one node, which is drafted and scored once; `mss` and `k-seq` still count each of them.

How many draws a node gets depends on its level alone. What was drawn elsewhere, and how much of it was merged, says
nothing about them, so they are independent draws from q whatever else is in the tree.
"""

from __future__ import annotations

from itertools import accumulate
from operator import mul

from branchwise.core.batch import PadShape
from branchwise.core.topology import branched, topology
from branchwise.core.tree import Draw
from branchwise.draft.base import Budget
from branchwise.draft.builder import TreeBuilder, TreeCoroutine, TreePolicy
from branchwise.draft.sampler import DraftSampler, SampleRequest
from branchwise.errors import UsageError


class Independent(TreePolicy):
    """`iid:4,2,1`: four draws below the root, two below each node that they came to, one below each of those."""

    draw = Draw.WITH_REPLACEMENT
    stoppable = True

    def __init__(self, *draws: int) -> None:
        if not draws or min(draws) < 1:
            raise UsageError("Independent children need how many draws each level has, such as iid:4,2,1.")
        self.draws = draws

    @property
    def largest(self) -> int:
        return sum(accumulate(self.draws, mul))

    @property
    def pad_shape(self) -> PadShape:
        """Which draws merge is random: a shape that holds all outcomes is the same at every step."""
        whole = topology(branched(self.draws))
        inner = max(whole.parents) + 1
        return PadShape(len(whole), inner, max(self.draws), len(whole.levels[-1]), len(whole.forks))

    def grow(self, root: int, budget: Budget, sampler: DraftSampler) -> TreeCoroutine:
        tree, level = TreeBuilder([root]), [0]
        for depth, count in enumerate(self.draws[: max(budget.depth, 0)]):
            # Decided before anything is drawn, so that no draw decides about itself, and as if no draws of the level
            # merged.
            if len(tree) + len(level) * count > budget.nodes:
                break
            probs = yield from tree.expand(level)
            draws = [
                (place, (depth << 20) + place * count + turn) for place in range(len(level)) for turn in range(count)
            ]
            tokens = yield SampleRequest(sampler, probs, draws)
            children: dict[tuple[int, int], int] = {}
            for (place, _), token in zip(draws, tokens, strict=True):
                step = level[place], token
                if step not in children:
                    children[step] = tree.add(*step)
                tree.draws.append(children[step])
            level = list(children.values())
        return tree.finish(self.draw)
