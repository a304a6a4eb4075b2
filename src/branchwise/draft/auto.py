"""`auto`, the drafter of the method `default`: the head that comes with the package for a target, or else memories."""

from __future__ import annotations

from branchwise.backends.base import TargetInfo
from branchwise.draft.base import Drafter
from branchwise.draft.head.drafter import HeadDrafter
from branchwise.draft.head.file import TrainedHead
from branchwise.draft.head.shipped import shipped_head
from branchwise.draft.lookup.fusion import DefaultDrafter


class AutoDrafter(DefaultDrafter):
    name = "auto"

    def alone_on(self, target: TargetInfo) -> Drafter | None:
        file = shipped_head(target)
        if file is None:
            return super().alone_on(target)
        return HeadDrafter(TrainedHead.load(file), tree=self.tree if self.tree_given else None)
