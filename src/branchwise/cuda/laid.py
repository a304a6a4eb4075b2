"""Trees of several texts that were laid on a device side by side, and stay where they are from step to step.

A draft that is recorded lays its trees at the same place every time, in tables of the whole batch. What comes after it
reads them there: nothing is stacked anew, the host looks at no single tree, and a batch of such trees serves for all
steps of the same texts.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from branchwise.core.batch import PadShape, TreeBatch
from branchwise.core.tree import DeviceShape, DraftTree


class LaidTrees(list[DraftTree]):
    """The trees of texts, and the tables in which they stand; these have as many rows as a padded batch."""

    def __init__(self, trees: Sequence[DraftTree], tokens: Tensor, shape: DeviceShape) -> None:
        """`tokens` (batch, nodes), and `shape` (batch, nodes, …)."""
        super().__init__(trees)
        self.tokens, self.shape = tokens, shape


class LaidBatch(TreeBatch):
    """A batch whose tables are those of the trees themselves."""

    host_tokens = None

    def __init__(self, trees: LaidTrees, device: torch.device | str) -> None:
        size, nodes = trees.tokens.shape
        padded = [*trees, *[DraftTree.root(0)] * (size - len(trees))]
        super().__init__(padded, device, PadShape(nodes=nodes))
        self.laid = trees.shape
        self._drafted = trees.tokens

    @property
    def drafted(self) -> Tensor:
        return self._drafted


def lie_still(batch: TreeBatch) -> bool:
    """Whether the trees of a batch that were drafted on a device lie at the same place at every step."""
    return len(batch) == 1 or isinstance(batch, LaidBatch)
