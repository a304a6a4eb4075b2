"""The most probable tree of a head on a host, as large as pays.

On a host every level takes time, and every row makes the pass of the target longer, the second one most of all. So no
level is grown that hardly anything reaches, and of all nodes as many are kept as give most tokens a second, by passes
that are timed during generation and by how often what the head says came true (`control`). Where no node pays, nothing
is drafted.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from branchwise.backends.base import TargetInfo
from branchwise.control.choice import Rest, Terms, best
from branchwise.control.costs import PassCostModel, cost_model_of
from branchwise.control.trust import Kept, Trust, what_came
from branchwise.core.tree import DraftTree
from branchwise.cuda.inputs import BATCHES, fitting
from branchwise.draft.head.trees.best_first import BestFirstDraft
from branchwise.draft.head.trees.copies import NOTHING, Nodes
from branchwise.draft.policies.topk import TopK
from branchwise.verify import Verdict

UNLIKELY = 0.3
"""no level is grown below nodes less probable than this"""


class Said(NamedTuple):
    """What was said of the proposed nodes of one text."""

    masses: list[float]
    """behind their parents"""
    tokens: list[int]
    parents: list[int]
    chosen: list[int]
    """numbers of the nodes that were drafted"""

    def kept(self, verdict: Verdict) -> dict[int, bool]:
        """The nodes of which a verdict says something, whether or not they were drafted; and what it says."""
        path = [-1, *(self.chosen[node - 1] for node in verdict.path[1:])]
        found = what_came(self.tokens, self.parents, path, verdict.token)
        return {node: came for node, came in found.items() if self.masses[node]}


class PacedDraft(BestFirstDraft):
    def __init__(self, target: TargetInfo, level_cost: float, tree: TopK, *parts: Any, copies: int = 0) -> None:
        """`level_cost` is that of a level, in passes of the target."""
        super().__init__(tree, *parts, copies=copies)
        self._target = target
        self._costs = PassCostModel()
        self._texts = 0
        """of a batch, whose rows come before those of padding"""
        self._made = 0
        """levels of the trees that grow"""
        self._laid: tuple[int, float] | None = None
        """rows of a pass that is being made, and when it began"""
        self._level_cost = level_cost
        self._rests: dict[int, Rest] = {}
        """by the size of a batch: what pays for one text may be dear for many"""
        self._rest, self._resting = Rest(), False
        self._begun = 0.0
        """when the step began"""
        self._trust, self._trust_in_copies = Trust(), Trust()
        self._said: list[Said] = []
        """of the trees that were grown last"""
        self._asked: list[Said] = []
        """of those that are scored"""

    def grow(self, slots: Tensor, lengths: Tensor, roots: Tensor) -> tuple[Tensor, ...]:
        self._texts = int((slots != self.cache.padding).sum())
        return super().grow(slots, lengths, roots)

    def _ends(self, depth: int, values: Tensor) -> bool:
        self._made = depth
        return super()._ends(depth, values) or not self._costs.knows_plain or float(values.max().exp()) < UNLIKELY

    def _chosen(self, proposed: Nodes) -> Tensor:
        values, tokens, parents = proposed
        above = torch.where(parents < 0, 0.0, values.gather(1, parents.clamp_min(0)))
        masses = torch.where(values > NOTHING, values - above, -torch.inf).exp().clamp_max(1.0).tolist()
        worth = [self._worth(*row) for row in zip(masses, parents.tolist(), strict=True)]
        chosen = self._best_of(values, self._size(values, torch.tensor(worth)))
        self._said = [
            Said(*row) for row in zip(masses, tokens.tolist(), parents.tolist(), chosen.tolist(), strict=True)
        ]
        return chosen

    def _worth(self, masses: list[float], parents: list[int]) -> list[float]:
        """How probable the paths of nodes are, by what such promises were worth."""
        found: list[float] = []
        for node, (mass, parent) in enumerate(zip(masses, parents, strict=True)):
            found.append((found[parent] if parent >= 0 else 1.0) * self._trusted(node, len(masses)).worth(mass))
        return found

    def _trusted(self, node: int, nodes: int) -> Trust:
        return self._trust_in_copies if node >= nodes - self._copies else self._trust

    def _size(self, values: Tensor, worth: Tensor) -> int:
        """How many nodes give most tokens a second, of all texts together."""
        if not self._costs.knows_plain:
            return 0  # once in a while a plain step must be timed
        most = min(self.nodes - 1, values.shape[1])
        reached = worth.gather(1, values.topk(most, dim=1).indices)[: self._texts].mean(dim=0).cumsum(dim=0).tolist()
        tokens = [1.0, *(1 + more for more in reached)]
        spent = self._made * self._level_cost
        costs = [spent + cost for cost in self._costs.costs(range(1, most + 2), hoped=True)]
        size = best(tokens, costs)
        return 0 if self._costs.unclear(1 + size, tokens[size] / costs[size] * costs[0]) else size

    def rests(self, batch: int) -> bool:
        size = fitting(batch, BATCHES)
        self._costs = cost_model_of(self._target, batch)
        self._rest = self._rests.setdefault(size, Rest(Terms().for_texts(size)))
        self._begun, self._resting = time.perf_counter(), self._rest.resting()
        if self._resting:
            self._said = []
        return self._resting

    def begin(self) -> None:
        asked, self._begun = self._begun, time.perf_counter()
        if self._costs.knows_plain:
            self._rest.invest((self._begun - asked) / self._costs.plain_seconds)

    def drafted(self, trees: Sequence[DraftTree]) -> None:
        self._laid = max(map(len, trees)), time.perf_counter()
        self._asked = self._said

    def scored(self, verdicts: Sequence[Verdict]) -> None:
        if self._laid is None:
            return
        rows, start = self._laid
        self._laid = None
        now = time.perf_counter()
        self._costs.record(rows, now - start)
        if not self._resting and self._costs.knows_plain:
            tokens = sum(len(verdict.path) for verdict in verdicts) / len(verdicts)
            self._rest.record(tokens, (now - self._begun) / self._costs.plain_seconds)
        for said, verdict in zip(self._asked, verdicts, strict=False):
            seen: dict[Trust, list[Kept]] = {}
            for node, came in said.kept(verdict).items():
                seen.setdefault(self._trusted(node, len(said.masses)), []).append(Kept(said.masses[node], came))
            for trust, kept in seen.items():
                trust.record(kept)

    def forget(self) -> None:
        self._trust, self._trust_in_copies = Trust(), Trust()
        self._rests.clear()
