"""Recursive speculative decoding with constant branching (RSD-C): distinct children, drawn without replacement.

Jeon et al., "Recursive Speculative Decoding: Accelerating LLM Inference via Sampling Without Replacement" (arXiv
2402.14160).
"""

from __future__ import annotations

from branchwise.core.topology import branched, plant
from branchwise.core.tree import Draw
from branchwise.draft.base import Budget
from branchwise.draft.builder import TreeBuilder, TreeCoroutine, TreePolicy
from branchwise.draft.sampler import DraftSampler, SampleRequest
from branchwise.errors import UsageError


class Branching(TreePolicy):
    """`rsd-c:4,2,1`: four children of the root, two of each of those, one below each of those."""

    draw = Draw.WITHOUT_REPLACEMENT
    stoppable = True

    def __init__(self, *branching: int) -> None:
        if not branching or min(branching) < 1:
            raise UsageError("RSD-C needs how many children each level has, such as rsd-c:4,2,1.")
        self.branching = branching
        plant(branched(branching))

    def grow(self, root: int, budget: Budget, sampler: DraftSampler) -> TreeCoroutine:
        tree, level = TreeBuilder([root]), [0]
        for depth, width in enumerate(self.branching[: max(budget.depth, 0)]):
            if len(tree) + len(level) * width > budget.nodes:
                break
            found = yield tree, level
            probs = found.drawable
            tree.probs.update(zip(level, probs, strict=True))
            draws = [(place, (depth << 16) + place) for place in range(len(level))]
            orders = yield SampleRequest(sampler, probs, draws, [width] * len(level))
            level = [tree.add(node, token) for node, order in zip(level, orders, strict=True) for token in order]
        return tree.finish(self.draw)
