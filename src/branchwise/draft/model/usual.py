"""What a draft model drafts for `match` where nobody says which tree.

`match` keeps what the target itself draws, so nothing is drawn here either: the most probable tokens are those that it
is most likely to keep, of greedy texts and of sampled ones. On a host every row of a pass takes time and every level a
pass of the draft model, so a narrow tree ends at the level that adds too little. On a GPU more nodes cost little and
levels much, and all levels are recorded as one graph: there are a flat tree and a deep one, and which of them is faster
depends on how alike the models are and how much smaller one is, as is seen when they run (`control.guard`).
"""

from __future__ import annotations

import torch

from branchwise.core.topology import topology
from branchwise.draft.builder import TreePolicy
from branchwise.draft.policies.template import Ranks, imbalanced, promising
from branchwise.draft.policies.topk import TopK

NODES, DEPTH, WIDTH = 8, 8, 2
"""of the tree on a host"""
LEVELS = (4, 6, 5), (4, 6, 6, 5, 4, 3, 3)
"""nodes of every level of the trees on a GPU: with their roots they fill passes over 16 and 32 rows"""
SPEED = 2.0
"""in plain decoding, of a step whose tree is deep enough: a level must add as many tokens as that gives meanwhile"""
LEAST_GAIN, MOST_GAIN = 0.05, 0.9
"""tokens that a level must add"""
COST = 0.1
"""of a pass of the draft model, in passes of the target, where it is not known"""


class RankedShape(Ranks):
    """A tree of ranks whose shape has no name."""

    def __init__(self, parents: tuple[int, ...]) -> None:
        self.shape = topology(parents)
        self._promising = promising(self.shape)
        self._fitting = {}


def usual_trees(device: torch.device, cost: float | None) -> list[TreePolicy]:
    """For a draft model whose pass costs so much of one of the target."""
    if device.type == "cpu":
        gain = min(max(SPEED * (COST if cost is None else cost), LEAST_GAIN), MOST_GAIN)
        return [TopK(NODES, DEPTH, WIDTH, gain)]
    return [RankedShape(imbalanced(levels)) for levels in LEVELS]
