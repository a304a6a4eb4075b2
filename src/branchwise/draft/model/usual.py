"""The trees that a draft model drafts for `match` if the user names none.

`match` keeps what the target itself draws, so nothing is drawn here either: the most probable tokens are those that
`match` is most likely to keep, in greedy texts and in sampled ones. On a host every row of a pass takes time, and every
level a pass of the draft model, so a narrow tree ends at the level that adds too little. On a GPU nodes cost little and
levels much, and all levels are recorded as one graph. So a flat tree and a deep tree are offered. Which of them is
faster depends on how alike the two models are and how much smaller the draft model is; the engine finds out as they run
(`control.guard`).
"""

from __future__ import annotations

import torch

from branchwise.core.topology import topology
from branchwise.draft.builder import TreePolicy
from branchwise.draft.policies.template import Ranks, imbalanced, promising
from branchwise.draft.policies.topk import TopK

NODES, DEPTH, WIDTH = 8, 8, 2
"""size of the tree on a host"""
LEVELS = (4, 6, 5), (4, 6, 6, 5, 4, 3, 3)
"""number of nodes of every level, for both trees on a GPU: with their roots they fill passes over 16 and 32 rows"""
DEAR = 0.2
"""cost of a draft model from which on both trees are the flatter `DEAR_LEVELS`. Costs count bytes, and the many small
layers of a draft model take longer than their bytes: 0.59 of the target's time for 0.32 of its bytes on an H200,
where two levels gained as much as three (benchmarks/records/chains-coder-h200.jsonl)."""
DEAR_LEVELS = (4, 8), LEVELS[0]
SPEED = 2.0
"""assumed speed of a step whose tree is deep enough, relative to plain decoding. A level must add at least the tokens
that such steps give in the time that the level takes."""
LEAST_GAIN, MOST_GAIN = 0.05, 0.9
"""bounds of the expected tokens that a level must add"""
COST = 0.1
"""assumed cost of a pass of the draft model, in passes of the target, if it is not known"""


class RankedShape(Ranks):
    """A tree of ranks whose shape has no name."""

    def __init__(self, parents: tuple[int, ...]) -> None:
        self.shape = topology(parents)
        self._promising = promising(self.shape)
        self._fitting = {}


def usual_trees(device: torch.device, cost: float | None) -> list[TreePolicy]:
    """The trees for a draft model whose pass costs `cost` passes of the target."""
    if device.type == "cpu":
        gain = min(max(SPEED * (COST if cost is None else cost), LEAST_GAIN), MOST_GAIN)
        return [TopK(NODES, DEPTH, WIDTH, gain)]
    dear = cost is not None and cost >= DEAR
    return [RankedShape(imbalanced(levels)) for levels in (DEAR_LEVELS if dear else LEVELS)]
