"""`auto`, the drafter of the method `default`: a head that comes with the package, and memories.

On a host both propose in one tree. A pass is long there and every row of it costs, so the head drafts few levels. On a
GPU the head drafts alone, a wide tree that is grown and laid on the device. For a target without a head it is
`memories`.
"""

from __future__ import annotations

from branchwise.backends.base import TargetInfo
from branchwise.draft.base import Drafter
from branchwise.draft.builder import TreePolicy
from branchwise.draft.head.drafter import HeadDrafter
from branchwise.draft.head.file import TrainedHead
from branchwise.draft.head.shipped import shipped_head
from branchwise.draft.lookup.drafted import DraftedMember
from branchwise.draft.lookup.fusion import Calibration, DefaultDrafter
from branchwise.draft.policies.topk import TopK

TABLE = {"cpu": 8192, "cuda": 16_384}
"""tokens that a head may propose besides those of the prompt: half of a level's time goes to their rows"""
HOST_TREE = TopK(8, depth=3, width=3)
DEVICE_TREE = TopK(63, depth=6, width=8)


class AutoDrafter(DefaultDrafter):
    name = "auto"

    def __init__(self, tree: TreePolicy | None = None) -> None:
        super().__init__(tree)
        self._lookups = self.members
        self._trained: TrainedHead | None = None

    def bind(self, target: TargetInfo) -> None:
        file = shipped_head(target)
        self._trained = None if file is None else TrainedHead.load(file)
        self.members = list(self._lookups)
        self.records = self.records[-len(self.members) :]
        self.drafting = None
        if self._trained is not None and target.device.type == "cpu":
            self.drafting = DraftedMember(HeadDrafter(self._trained, TABLE["cpu"], tree=HOST_TREE))
            self.members.insert(0, self.drafting)
            self.records = [Calibration(), *self.records]
        super().bind(target)

    def on_device(self, target: TargetInfo) -> Drafter | None:
        if self._trained is None:
            return super().on_device(target)
        return HeadDrafter(self._trained, TABLE["cuda"], tree=self.tree if self.tree_given else DEVICE_TREE)
