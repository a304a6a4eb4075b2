"""Trees of several texts that were laid out on a device in common tables, at the same addresses in every step.

A recorded draft writes its trees to the same tables of the whole batch every time. Later kernels read them there: the
trees are not stacked again, the host touches no single tree, and one batch of such trees serves all steps of the same
texts.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from branchwise.core.batch import PadShape, TreeBatch
from branchwise.core.tree import DeviceShape, DraftTree


class LaidTrees(list[DraftTree]):
    """The trees of texts, and the tables that hold them; the tables have as many rows as a padded batch."""

    def __init__(self, trees: Sequence[DraftTree], tokens: Tensor, shape: DeviceShape) -> None:
        """`tokens` (batch, nodes), and `shape` (batch, nodes, …)."""
        super().__init__(trees)
        self.tokens, self.shape = tokens, shape


class LaidBatch(TreeBatch):
    """A batch that uses the tables of its trees, without a copy."""

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
    """Whether the trees of a batch, if drafted on a device, are at the same addresses in every step."""
    return len(batch) == 1 or isinstance(batch, LaidBatch)
