"""Recursive speculative decoding: distinct children, drawn without replacement.

Jeon et al., "Recursive Speculative Decoding: Accelerating LLM Inference via Sampling Without Replacement" (arXiv
2402.14160): with constant branching (RSD-C), and with stochastic beam search (RSD-S), which is that of Kool, van Hoof
and Welling, "Stochastic Beams and Where to Find Them" (ICML 2019).

The papers give every path of a beam a Gumbel score and keep the highest. Here every path arrives at the time
exp(-score), and the earliest are kept: the distribution is the same, and nothing cancels. All continuations of a
node race, each with its probability as its rate. So a node arrives when the first of them does, and its first child
with it. The other children race on: the next one comes after an exponential time whose rate is the mass that they have
together. A child is admitted by its time, and only then is its token drawn: admission cannot look at the token, which
keeps the draft exact, and a level draws W tokens, however large the vocabulary is.
"""

from __future__ import annotations

import heapq
import math
import re
from dataclasses import replace
from itertools import accumulate
from operator import mul

import numpy as np

from branchwise.core.batch import PadShape
from branchwise.core.topology import branched, plant
from branchwise.core.tree import Draw
from branchwise.draft.base import Budget
from branchwise.draft.builder import TreeBuilder, TreeCoroutine, TreePolicy
from branchwise.draft.sampler import DraftSampler, SampleRequest, no_replacement_samplers
from branchwise.errors import UsageError


class Branching(TreePolicy):
    """`rsd-c:4,2,1`: four children of the root, two below each of those, one below each of these."""

    draw = Draw.WITHOUT_REPLACEMENT
    stoppable = True

    def __init__(self, *branching: int) -> None:
        if not branching or min(branching) < 1:
            raise UsageError("RSD-C needs how many children each level has, such as rsd-c:4,2,1.")
        self.branching = branching
        plant(branched(branching))

    @property
    def largest(self) -> int:
        return sum(accumulate(self.branching, mul))

    def grow(self, root: int, budget: Budget, sampler: DraftSampler) -> TreeCoroutine:
        tree, level = TreeBuilder([root]), [0]
        for depth, width in enumerate(self.branching[: max(budget.depth, 0)]):
            if len(tree) + len(level) * width > budget.nodes:
                break
            probs = yield from tree.expand(level)
            draws = [(place, (depth << 16) + place) for place in range(len(level))]
            orders = yield SampleRequest(sampler, probs, draws, [width] * len(level))
            level = [tree.add(node, token) for node, order in zip(level, orders, strict=True) for token in order]
        return tree.finish(self.draw)


class Beam(TreePolicy):
    """`rsd-s:WxL`: W nodes on each of L levels; fewer levels if the budget is smaller, never fewer nodes a level."""

    draw = Draw.WITHOUT_REPLACEMENT
    stoppable = True

    def __init__(self, shape: str) -> None:
        found = re.fullmatch(r"(\d+)x(\d+)", shape)
        if not found or not int(found[1]) or not int(found[2]):
            raise UsageError(f"RSD-S takes a width and a length, such as rsd-s:4x6, not rsd-s:{shape}.")
        self.width, self.length = int(found[1]), int(found[2])

    @property
    def pad_shape(self) -> PadShape:
        """Which nodes have children is random: a shape that holds all outcomes is the same at every step."""
        forks = min(self.width - 1, 1) + (self.length - 1) * (self.width // 2)
        return replace(PadShape.for_paths(self.width, self.length), forks=forks)

    @property
    def largest(self) -> int:
        return self.width * self.length

    def levels(self, budget: Budget) -> int:
        return max(0, min(self.length, budget.depth, (budget.nodes - 1) // self.width))

    def grow(self, root: int, budget: Budget, sampler: DraftSampler) -> TreeCoroutine:
        tree = TreeBuilder([root])
        # The logarithms of every node's probability and arrival time. Only differences between times matter, so the
        # clock starts with the first arrival.
        likelihood, time = [0.0], [-math.inf]
        level = [0]
        for _ in range(self.levels(budget)):
            probs = yield from tree.expand(level)
            remaining = yield from no_replacement_samplers(probs, level, sampler, self.width)
            whole = {node: rest.mass for node, rest in remaining.items()}
            arrivals = [(time[node], turn, node) for turn, node in enumerate(level)]
            level = []
            heapq.heapify(arrivals)
            while arrivals and len(level) < self.width:
                now, _, parent = heapq.heappop(arrivals)
                rest, before = remaining[parent], remaining[parent].mass
                token, share, _ = rest.draw(sampler, len(tree))
                child = tree.add(parent, token)
                level.append(child)
                likelihood.append(likelihood[parent] + math.log(share * before / whole[parent]))
                time.append(now)
                if rest.mass > 0 and len(level) < self.width:
                    rate = likelihood[parent] + math.log(rest.mass / whole[parent])
                    later = float(np.logaddexp(now, math.log(sampler.wait(child)) - rate))
                    heapq.heappush(arrivals, (later, child, parent))
        return tree.finish(self.draw)
