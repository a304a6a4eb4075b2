"""`auto`, the drafter of the method `default`: the head that comes with the package for a target, or else memories."""

from __future__ import annotations

from branchwise.backends.base import TargetInfo
from branchwise.draft.base import Drafter
from branchwise.draft.head.drafter import HeadDrafter
from branchwise.draft.head.file import TrainedHead
from branchwise.draft.head.shipped import shipped_head
from branchwise.draft.lookup.fusion import DefaultDrafter
from branchwise.draft.policies.topk import TopK

HOST_TABLE, DEVICE_TABLE = 8192, 16_384
"""tokens that a head may propose besides those of the prompt: half of a level's time goes to their rows"""
HOST_TREE, DEVICE_TREE = TopK(8, depth=5, width=2), TopK(63, depth=6, width=8)
"""On a host every row makes a pass longer, and so does every level of a draft. On a GPU a wide tree costs little."""
HOST_COPIES, DEVICE_COPIES = 0, 15
"""tokens of that tree that may be copies of what stood before: on a host they cost more than they save"""


class AutoDrafter(DefaultDrafter):
    name = "auto"

    def alone_on(self, target: TargetInfo) -> Drafter | None:
        file = shipped_head(target)
        if file is None:
            return super().alone_on(target)
        host = target.device.type == "cpu"
        tree = self.tree if self.tree_given else HOST_TREE if host else DEVICE_TREE
        table, copies = (HOST_TABLE, HOST_COPIES) if host else (DEVICE_TABLE, DEVICE_COPIES)
        return HeadDrafter(TrainedHead.load(file), table, tree=tree, copies=copies, paced=not self.tree_given)
