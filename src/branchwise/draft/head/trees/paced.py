"""The most probable tree of a head on a host, as large as pays.

On a host every level takes time, and every row makes the pass of the target longer, the second one most of all. So no
level is grown that hardly anything reaches, and of all nodes as many are kept as give most tokens a second, by passes
that are timed during generation (`policies.adaptive`). Where no node pays, nothing is drafted.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from branchwise.backends.base import TargetInfo
from branchwise.core.tree import DraftTree
from branchwise.draft.head.trees.best_first import BestFirstDraft
from branchwise.draft.policies.adaptive import PassCostModel, cost_model_of
from branchwise.draft.policies.topk import TopK

UNLIKELY = 0.3
"""no level is grown below nodes less probable than this"""


class PacedDraft(BestFirstDraft):
    def __init__(self, target: TargetInfo, level_cost: float, tree: TopK, *parts: Any, copies: int = 0) -> None:
        """`level_cost` is that of a level, in passes of the target."""
        super().__init__(tree, *parts, copies=copies)
        self._target = target
        self._costs = PassCostModel()
        self._made = 0
        """levels of the trees that grow"""
        self._laid: tuple[int, float] | None = None
        """rows of a pass that is being made, and when it began"""
        self._level_cost = level_cost

    def grow(self, slots: Tensor, lengths: Tensor, roots: Tensor) -> tuple[Tensor, ...]:
        self._costs = cost_model_of(self._target, len(roots))
        return super().grow(slots, lengths, roots)

    def _ends(self, depth: int, values: Tensor) -> bool:
        self._made = depth
        return super()._ends(depth, values) or not self._costs.knows_plain or float(values.max().exp()) < UNLIKELY

    def _worth(self, values: Tensor) -> int:
        """How many nodes give most tokens a second, of all texts together."""
        if not self._costs.knows_plain:
            return 0  # once in a while a plain step must be timed
        most = min(super()._worth(values), values.shape[1])
        reached = values.topk(most, dim=1).values.exp().mean(dim=0).cumsum(dim=0).tolist()
        tokens = [1.0, *(1 + more for more in reached)]
        costs = self._costs.costs(range(1, most + 2))
        spent = self._made * self._level_cost
        speeds = [gained / (cost + spent) for gained, cost in zip(tokens, costs, strict=True)]
        return speeds.index(max(speeds))

    def drafted(self, trees: Sequence[DraftTree]) -> None:
        self._laid = max(map(len, trees)), time.perf_counter()

    def scored(self) -> None:
        if self._laid is not None:
            rows, start = self._laid
            self._costs.record(rows, time.perf_counter() - start)
            self._laid = None
