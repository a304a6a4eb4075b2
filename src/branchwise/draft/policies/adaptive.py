"""Tree sizes that pay: every step drafts the size with the most tokens a second, as far as that can be foretold.

A node gains the probability that it is accepted and costs the time by which it makes the pass longer. Passes are timed
during generation, from the end of a draft to the verdict on it. If no tree pays, nothing is drafted, and the step is
one of plain decoding. (The threshold of OPT-Tree, arXiv 2406.17276, and the timing of Sequoia, arXiv 2402.12374.)

A tree of ranks is laid without reading probabilities, because on a device they never reach the host. The gain
of a node is how often that node of the shape was accepted so far. The sizes are few, and each is tried at the
beginning, so that a device records its CUDA graphs once and early.

A batch has one size, because its trees are padded to the largest: one more node in one tree costs as much as one more
node in every tree.
"""

from __future__ import annotations

import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from branchwise.backends.base import TargetInfo
from branchwise.control.choice import best
from branchwise.control.costs import PassCostModel, cost_model_of
from branchwise.control.trust import Kept, Trust, what_came
from branchwise.core.batch import PadShape
from branchwise.core.topology import Topology
from branchwise.draft.base import Budget
from branchwise.draft.builder import Candidates, Cursor, Judged, TreeBuilder
from branchwise.draft.policies.template import RECYCLING, Ranks, places_in
from branchwise.draft.policies.topk import TopK, grow_best_first
from branchwise.verify import Verdict

SIZES = (0, 1, 2, 3, 4, 5, 7, 11, 15, 23, 31, 47, 63, 95, 127)
"""The sizes of a tree, in nodes below the root: few, so that each is timed often. With the root, most of the larger
sizes fill whole tiles of 16 rows, into which most machines cut matrix products: one row more costs a new tile."""
LEAST = 1 / 512
"""the least probability of a path: nodes with a less probable path never pay"""
RANK_SIZES = (0, 7, 31)
"""the sizes of a tree of ranks, besides the whole shape; with the root they fill the buckets of passes"""
PRIOR = 8.0
"""the weight, in tries, of the acceptance that is assumed of a node before any verdict"""
FADING = 0.995
"""the factor by which counts fade from one step to the next"""
EVERY = 8
"""steps after which the size of a tree of ranks is chosen again"""
MOST_TREES = 256


class Growth:
    """A tree that grows best node first, with the promised probability of every node, also of nodes that are not
    drafted in the end: the text shows whether their promises, too, came true."""

    def __init__(self, tree: TreeBuilder, nodes: Iterator[float], most: int, trust: Mapping[str, Trust]) -> None:
        """Every item that is taken from `nodes` adds a node to the tree and is the probability of its path; these
        fall."""
        self.tree, self.most = tree, most
        self._nodes, self._trust = nodes, trust
        self.masses: list[float] = []
        """the promised probability of each node below the root, after its parent"""
        self.reach, self.worth = [1.0], [1.0]
        """the probability of the path of each node, root included: as promised, and corrected by trust"""
        self.drafted = tree
        """the first nodes of the tree, which are drafted"""

    def grow(self, size: int) -> None:
        """Grow the tree to `size` nodes below the root, or as many as it can have."""
        for reach in islice(self._nodes, max(0, min(size, self.most) - len(self.masses))):
            node, parent = len(self.reach), self.tree.parents[len(self.reach)]
            self.masses.append(reach / self.reach[parent])
            self.reach.append(reach)
            trust = self._trust[self.tree.sources.get(node, "")]
            self.worth.append(self.worth[parent] * trust.worth(self.masses[-1]))

    def bound(self, size: int) -> float:
        """An upper bound of the expected tokens of `size` nodes."""
        further = max(self.reach[-1], self.worth[-1]) * max(0, size - len(self.masses))
        return max(sum(self.reach), sum(self.worth)) + further

    def cut(self, size: int) -> TreeBuilder:
        self.drafted = self.tree.leading(1 + min(size, len(self.masses)))
        return self.drafted

    def kept(self, verdict: Verdict) -> dict[str, list[Kept]]:
        """What a verdict says of the nodes, for each source."""
        order = list(self.drafted.places)  # the nodes in level order, in which they were scored
        path = [order[node] for node in verdict.path]
        found: dict[str, list[Kept]] = {}
        for node, came in what_came(self.tree.tokens, self.tree.parents, path, verdict.token).items():
            found.setdefault(self.tree.sources.get(node, ""), []).append(Kept(self.masses[node - 1], came))
        return found


class AdaptiveSize(TopK):
    """`paced:N,depth=D,width=W`: as many of the N best candidates as pay. Over a draft model it is `topk`."""

    def __init__(self, nodes: int = 63, depth: int = 16, width: int = 8) -> None:
        super().__init__(nodes, depth, width)
        self._costs = PassCostModel()
        self._laid_at = 0.0
        self._trust: defaultdict[str, Trust] = defaultdict(Trust)
        """the trust in each source"""
        self._grown: list[Growth] = []
        """the trees of the current step"""

    def begin_batch(self, size: int, target: TargetInfo | None) -> None:
        self._costs = cost_model_of(target, size)

    def lay(self, root: int, cursor: Cursor, candidates: Candidates, budget: Budget) -> TreeBuilder:
        [tree] = self.lay_all([root], [cursor], candidates, [budget])
        return tree

    def lay_all(
        self, roots: Sequence[int], cursors: Sequence[Cursor], candidates: Candidates, budgets: Sequence[Budget]
    ) -> list[TreeBuilder]:
        self._grown = []
        for root, cursor, budget in zip(roots, cursors, budgets, strict=True):
            tree, depth = TreeBuilder([root]), min(self.depth, budget.depth)
            nodes = grow_best_first(tree, cursor, candidates, depth=depth, width=self.width, least=LEAST)
            self._grown.append(Growth(tree, nodes, min(self.nodes, budget.nodes - 1), self._trust))
        size = self._size(self._grown) if self._costs.knows_plain else 0  # at times a plain step must be timed
        trees = [growth.cut(size) for growth in self._grown]
        self._laid_at = time.perf_counter()
        return trees

    def update(self, judged: Sequence[Judged]) -> None:
        rows = max(len(one.tree) for one in judged)
        rounded = next((1 + size for size in SIZES if 1 + size >= rows), rows)
        self._costs.record(rounded, time.perf_counter() - self._laid_at)
        for one, growth in zip(judged, self._grown, strict=False):
            for source, kept in growth.kept(one.verdict).items():
                self._trust[source].record(kept)

    def forget(self) -> None:
        self._trust.clear()

    def _size(self, growing: Sequence[Growth]) -> int:
        """The number of nodes for each text that gives the most tokens a second. Nodes come in falling order of
        probability, so growing ends as soon as no larger size can be better."""
        most, texts = max(growth.most for growth in growing), len(growing)
        sizes = [*(size for size in SIZES if size < most), most]
        costs = self._costs.costs([1 + size for size in sizes], hoped=True)
        promised, tokens = [1.0], [1.0]  # expected tokens of a text, by size
        grown = 0
        for place, size in enumerate(sizes[1:], start=1):
            for growth in growing:
                growth.grow(size)
            before, grown = grown, sum(len(growth.masses) for growth in growing)
            if grown == before:
                break  # nothing is left to draft
            promised.append(sum(sum(growth.reach) for growth in growing) / texts)
            tokens.append(sum(sum(growth.worth) for growth in growing) / texts)
            fastest = max(gained / cost for gained, cost in zip(promised, costs, strict=False))
            later = zip(sizes[place + 1 :], costs[place + 1 :], strict=True)
            if all(sum(growth.bound(more) for growth in growing) / texts <= fastest * cost for more, cost in later):
                break
        found = best(tokens, costs[: len(tokens)])
        if self._costs.unclear(1 + sizes[found], tokens[found] / costs[found]):
            return 0
        return sizes[found]


class AdaptiveRanks(Ranks):
    """`paced-ranks:NAME` or `paced-ranks:FILE.json`: as many nodes of `ranks` as pay, or over a draft model all."""

    def __init__(self, shape: str = RECYCLING) -> None:
        super().__init__(shape)
        self._order = np.array(self._promising[1:])
        self._assumed = np.ones(len(self.shape))  # acceptance before any verdict, by Zipf's law below each node
        for node, children in enumerate(self.shape.children):
            shares = 1 / np.arange(1, len(children) + 1)
            self._assumed[list(children)] = 0.6 * self._assumed[node] * shares / max(shares.sum(), 1)
        self._tries, self._hits = np.zeros(len(self.shape)), np.zeros(len(self.shape))
        self._places: dict[Topology, NDArray[np.int64]] = {}
        self._sizes: list[int] = []
        self._wanted, self._turn = len(self.shape) - 1, 0
        self._most = len(self.shape)
        """the nodes that the last budget allowed"""
        self._costs: PassCostModel | None = None
        self._rows: Callable[[int], int] = int
        """from the nodes of a tree to the rows of a pass over it"""
        self._laid_at, self._laid_rows = 0.0, 1
        """when the trees of the last step were laid, and the rows of their pass"""

    def begin_batch(self, size: int, target: TargetInfo | None) -> None:
        self._costs = costs = cost_model_of(target, size)
        self._rows = int if target is None else lambda nodes: target.bucket(size, nodes)[1]
        largest = min(len(self.shape), self._most) - 1
        self._sizes = [*(nodes for nodes in RANK_SIZES if nodes < largest), largest]
        untried = [nodes for nodes in self._sizes if not costs.knows(self._rows(1 + nodes))]
        if untried or not costs.knows_plain:  # at times a plain step must be timed
            self._wanted, self._turn = untried[0] if untried else 0, 0
            return
        if self._turn % EVERY == 0:
            self._wanted = self._size(costs)
        self._turn += 1

    @property
    def pad_shape(self) -> PadShape:
        return PadShape(nodes=1 + self._wanted)

    def within(self, budget: Budget, width: int = sys.maxsize) -> Topology:
        self._most = budget.nodes
        return super().within(Budget(min(budget.nodes, 1 + self._wanted), budget.depth), width)

    def drafted(self) -> None:
        """The step is timed from here on."""
        self._laid_at, self._laid_rows = time.perf_counter(), self._rows(1 + self._wanted)

    def update(self, judged: Sequence[Judged]) -> None:
        if self._costs is not None:
            # A smaller tree counts as the size that was wanted: on a device it is scored in the same pass.
            self._costs.record(self._laid_rows, time.perf_counter() - self._laid_at)
        self._tries *= FADING
        self._hits *= FADING
        for _, tree, _, verdict in judged:
            if (places := self._places.get(tree.topology)) is None:
                if len(self._places) > MOST_TREES:
                    self._places.clear()
                places = self._places[tree.topology] = np.array(places_in(self.shape, tree.topology))
            self._tries[places] += 1
            self._hits[places[list(verdict.path)]] += 1

    def forget(self) -> None:
        self._tries[:], self._hits[:], self._turn = 0, 0, 0

    def _size(self, model: PassCostModel) -> int:
        """The number of nodes below the root that gives the most tokens a second."""
        accepted = (PRIOR * self._assumed + self._hits) / (PRIOR + self._tries)
        gained = np.cumsum(accepted[self._order])  # by the first 1, 2, … nodes below the root
        tokens = [1.0, *(1 + float(gained[size - 1]) for size in self._sizes[1:])]
        return self._sizes[best(tokens, model.costs([self._rows(1 + size) for size in self._sizes]))]
