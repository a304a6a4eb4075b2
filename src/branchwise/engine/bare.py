"""A batch of bare roots, in which nothing is drafted. Reading the trees of many texts takes the host as long as a pass
takes a device; bare roots need no reading, because their tokens are known."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray

from branchwise.core.batch import PadShape, TreeBatch
from branchwise.core.tree import DraftTree


def all_bare(trees: Sequence[DraftTree]) -> bool:
    return all(len(tree.parents) == 1 for tree in trees)


class BareBatch(TreeBatch):
    laid = None

    def __init__(
        self, trees: Sequence[DraftTree], device: torch.device | str, pad_shape: PadShape, roots: Sequence[int]
    ) -> None:
        super().__init__(trees[:1], device, pad_shape, roots)
        self.trees = tuple(trees)
        self._tokens_of_roots = roots

    @cached_property
    def host_tokens(self) -> NDArray[np.int64]:
        tokens = np.zeros((len(self.trees), self.nodes), dtype=np.int64)
        tokens[:, 0] = self._tokens_of_roots
        return tokens
