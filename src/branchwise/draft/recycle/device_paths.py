"""Paths drawn on a device, from an adjacency table on that device.

A kernel (`paths_kernel.py`) draws all paths of all texts, with one wait for the device: one copy uploads the roots and
seeds, one copy downloads what was drawn, and the kernel writes q. With the same table and the same seed these are the
tokens, the nodes and the distributions of the host, `Paths.grow` over `SparseProbs`, number for number.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from branchwise.backends.base import TargetInfo
from branchwise.core.batch import PadShape
from branchwise.core.sequence import SequenceState
from branchwise.core.tree import DraftTree, Draw
from branchwise.cuda.graphs import GraphedFunction
from branchwise.cuda.inputs import BATCHES, PinnedBuffer, fitting
from branchwise.draft.base import Budget
from branchwise.draft.policies.paths import Paths

FIELDS = 4
"""numbers of a text: its root, its seed, the position of the root, and whether it is greedy"""
MOST_PATHS = 64
"""that one program of the kernel holds"""


class DevicePaths:
    """The paths of a policy over a table, whose tokens and masses (vocabulary, width) are on a device."""

    def __init__(
        self, policy: Paths, tokens: Tensor, masses: Tensor, target: TargetInfo, draw: Callable[..., Tensor]
    ) -> None:
        """`draw` is `draw_paths` of the kernels."""
        self.policy = policy
        # No longer than the nodes that a pass may score.
        length = max(policy.within(Budget(target.max_nodes, policy.length)), 1)
        rows = PadShape.for_paths(policy.count, length).inner
        self._q = torch.zeros(0, rows, len(tokens), device=tokens.device)
        self._inputs: dict[int, PinnedBuffer] = {}  # by the number of texts
        shape = {"count": policy.count, "length": length, "common": policy.common}
        self._draw = GraphedFunction(draw, tokens.device, (tokens, masses), capture=target.execution.graphs, **shape)

    def __call__(self, sequences: Sequence[SequenceState], budgets: Sequence[Budget]) -> list[DraftTree]:
        """A tree for every text. The next call overwrites its q."""
        drawn = self._drawn(sequences).tolist()  # the only synchronisation
        return [
            self._tree(sequence.root, min(self.policy.within(budget), len(paths[0])), paths, q)
            for sequence, budget, paths, q in zip(sequences, budgets, drawn, self._q, strict=False)
        ]

    def _drawn(self, sequences: Sequence[SequenceState]) -> Tensor:
        """(texts, paths, levels, 2): tokens and nodes on the device; the kernel also writes q."""
        size = fitting(len(sequences), BATCHES)  # few sizes, each of which is recorded
        if size not in self._inputs:
            self._inputs[size] = PinnedBuffer(size * FIELDS, self._q.device, torch.int64)
        if len(self._q) < size:
            self._q = self._q.new_zeros(size, *self._q.shape[1:])
        inputs = self._inputs[size]
        inputs.host.reshape(size, FIELDS)[: len(sequences)] = [
            (sequence.root, sequence.rng_seed, len(sequence.tokens) - 1, sequence.sampling.temperature == 0)
            for sequence in sequences
        ]
        return self._draw(inputs.copy().view(size, FIELDS), self._q[:size])

    def _tree(self, root: int, length: int, paths: list[list[list[int]]], q: Tensor) -> DraftTree:
        """The first levels of drawn paths, each a list of (token, node)."""
        if paths[0][0][0] < 0:
            return DraftTree.root(root)  # the row of the root is empty
        nodes, ends = {0: (-1, root)}, [0] * len(paths)
        for level in range(length):
            for path, steps in enumerate(paths):
                token, node = steps[level]
                nodes[node] = ends[path], token
                ends[path] = node
        parents, tokens = zip(*(nodes[node] for node in range(len(nodes))), strict=True)
        draw = self.policy.draw
        leaves = tuple(ends) if draw is Draw.PATHS else ()
        return DraftTree(torch.tensor(tokens), parents, draw, q[: max(parents) + 1] if length else None, leaves)
