"""K independent paths, merged where they agree, for block verifiers of several paths; one path is the plain chain.

Near the root a drafter is most often right, so the first tokens of paths mostly agree. Delayed branching draws them
once for all paths. Paths with a common beginning are not independent, so such a tree is one of siblings drawn without
replacement: of draws that repeat, the first counts, and it comes from what was left of the distribution.
"""

from __future__ import annotations

import re

from branchwise.core.batch import PadShape
from branchwise.core.topology import branched, plant
from branchwise.core.tree import Draw
from branchwise.draft.base import Budget
from branchwise.draft.builder import TreeBuilder, TreeCoroutine, TreePolicy
from branchwise.draft.sampler import DraftSampler, SampleRequest
from branchwise.errors import UsageError


class Paths(TreePolicy):
    """`paths:KxL`: K paths of L tokens, shorter if the budget is small; their length never depends on what was drawn.

    `paths:KxL@d`: the first d tokens are common to all.
    """

    def __init__(self, shape: str) -> None:
        found = re.fullmatch(r"(\d+)x(\d+)(?:@(\d+))?", shape)
        if not found or not int(found[1]) or not int(found[2]):
            raise UsageError(f"Paths are given as paths:KxL, such as paths:4x6, not paths:{shape}.")
        self.count, self.length, self.common = int(found[1]), int(found[2]), int(found[3] or 0)
        if self.common >= self.length:
            raise UsageError(f"Of {self.length} tokens at most {self.length - 1} can be common, not {self.common}.")
        independent = self.common == 0 or self.count == 1
        self.draw = Draw.PATHS if independent else Draw.WITHOUT_REPLACEMENT
        # A depth that several independent paths decide together makes them depend on each other.
        self.stoppable = self.count == 1 or not independent

    @property
    def pad_shape(self) -> PadShape:
        """Where paths merge is chance: a shape for all outcomes is the same at every step."""
        return PadShape.for_paths(self.count, self.length)

    def within(self, budget: Budget) -> int:
        """The length of the paths within a budget."""
        nodes = budget.nodes - 1
        fits = nodes if nodes <= self.common else self.common + (nodes - self.common) // self.count
        return max(min(self.length, budget.depth, fits), 0)

    def grow(self, root: int, budget: Budget, sampler: DraftSampler) -> TreeCoroutine:
        tree = TreeBuilder([root])
        ends = [0] * self.count
        for level in range(self.within(budget)):
            nodes = sorted(set(ends))
            probs = yield from tree.expand(nodes)
            paths = sorted(range(self.count), key=ends.__getitem__)
            drawing = paths if level >= self.common else paths[:1]
            draws = [(nodes.index(ends[path]), level * self.count + path) for path in drawing]
            drawn = yield SampleRequest(sampler, probs, draws)
            tokens = drawn * (self.count // len(drawing))
            children: dict[tuple[int, int], int] = {}
            for path, token in zip(paths, tokens, strict=True):
                step = ends[path], token
                if step not in children:
                    children[step] = tree.add(*step)
                ends[path] = children[step]
        return tree.finish(self.draw, tuple(ends) if self.draw is Draw.PATHS else ())


class Chain(Paths):
    """`chain:L`: at most L tokens, one after the other. For `ngram`, which draws nothing, it is the length to copy."""

    def __init__(self, length: int = 8) -> None:
        if length < 1:
            raise UsageError(f"A chain has at least 1 token, not {length}.")
        super().__init__(f"1x{length}")
        plant(branched([1] * length))
