"""The adjacency table that `recycle` learns, with the most probable successors of every token, and paths drawn from it.

On a device a kernel (`paths_kernel.py`) draws all paths of all texts, and the host waits only once: one copy uploads
the roots and seeds, one copy downloads what was drawn, and the kernel writes q. With the same table and the same seed
tokens, nodes and distributions equal, number for number, those of the host (`Paths.grow` over `SparseProbs`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from branchwise.backends.base import TargetInfo
from branchwise.core.batch import PadShape
from branchwise.core.sequence import SequenceState
from branchwise.core.tree import DraftTree
from branchwise.cuda.graphs import GraphedFunction
from branchwise.cuda.inputs import BATCHES, PinnedBuffer, fitting
from branchwise.draft.base import Budget, not_a_state
from branchwise.draft.builder import Candidate, new, tree_of_paths
from branchwise.draft.policies.paths import Paths
from branchwise.draft.recycle.topk import HostTopTokens, Ints, ReportedTopTokens
from branchwise.draft.sparse import flaw_of

Halves = NDArray[np.float16]
PADDING, REJECTED, ACCEPTED = range(3)
"""marks of nodes that the table may learn from: padding, or whether the verifier accepted the node"""
HALF_DOWN = 1 - 2.0**-11
"""a factor: a mass times this never grows if it is rounded to float16, so that a row never sums to more than 1"""
MOST_READ = 1024
"""most rows that are cached as lists of candidates"""
FIELDS = 4
"""number of integers that describe a text: its root, its seed, the position of the root, and whether it is greedy"""
MOST_PATHS = 64
"""most paths that one program of the kernel holds"""


class AdjacencyTable:
    """For every token of a vocabulary its successors, best first, and their average probabilities.

    8 successors of 49,152 tokens are 1.6 MB of tokens (int32), and the probabilities (float16) add 0.8 MB. An entry
    with probability 0 is empty.
    """

    def __init__(self, vocabulary: int, width: int, device: torch.device | str = "cpu") -> None:
        self.tokens = torch.zeros(vocabulary, width, dtype=torch.int32, device=device)
        self.masses = torch.zeros(vocabulary, width, dtype=torch.float16, device=device)
        # Views of the same memory: reading a row of an array costs less than reading a row of a tensor.
        self._arrays = (self.tokens.numpy(), self.masses.numpy()) if self.tokens.device.type == "cpu" else None
        self._read: dict[int, list[Candidate]] = {}
        """token -> its row as candidates, until the row is written again: trees of one text visit the same tokens"""

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def width(self) -> int:
        return self.tokens.shape[1]

    def row(self, token: int) -> list[Candidate]:
        """The successors of a token."""
        if (row := self._read.get(token)) is None:
            tokens, masses = self._arrays or (self.tokens, self.masses)
            stored = zip(tokens[token].tolist(), masses[token].tolist(), strict=True)
            row = [new(Candidate, (found, mass, found, "")) for found, mass in stored if mass > 0]
            if len(self._read) >= MOST_READ:
                self._read.clear()
            self._read[token] = row
        return row

    def mix(self, probs: dict[int, int], found: HostTopTokens | ReportedTopTokens, rate: float) -> None:
        """Average new distributions into the rows of tokens; `probs` maps a token to its row in `found`."""
        assert self._arrays is not None, "this table is on a device"
        tokens, masses = self._arrays
        keys = list(probs)
        tokens[keys], masses[keys] = averaged(tokens[keys], masses[keys], found, list(probs.values()), rate)
        for key in keys:
            self._read.pop(key, None)

    def forget_read(self) -> None:
        """Drop the cached rows: the device has changed some, and does not report which."""
        self._read.clear()

    def put(self, tensors: dict[str, Tensor]) -> None:
        """Replace the table by a stored one."""
        if {name: tensor.dtype for name, tensor in tensors.items()} != {"tokens": torch.int32, "masses": torch.float16}:
            raise not_a_state("recycle", "it should hold tokens and masses")
        tokens, masses = tensors["tokens"], tensors["masses"]
        if not tokens.shape == masses.shape == self.tokens.shape:
            wanted = tuple(self.tokens.shape)
            raise not_a_state("recycle", f"it has {tuple(tokens.shape)} successors where {wanted} are expected")
        if flaw := flaw_of(tokens, masses, len(self)):
            raise not_a_state("recycle", flaw)
        self.tokens.copy_(tokens)
        self.masses.copy_(masses)
        self._read.clear()


def averaged(
    tokens: Ints, masses: Halves, found: HostTopTokens | ReportedTopTokens, rows: list[int], rate: float
) -> tuple[Ints, Halves]:
    """Rows of a table, with row rows[i] of `found` averaged into row i.

    For all tokens that a row holds, their exact probability in the new distribution is averaged in. A token that is new
    to the row counts as if its probability had been 0 so far. The best tokens stay.
    """
    old, before = tokens.astype(np.int64), masses.astype(np.float32)
    held = before > 0
    share = np.where(held.any(axis=1, keepdims=True), np.float32(rate), np.float32(1))
    stay = np.where(held, (1 - share) * before + share * found.of(rows, old), 0)
    new = found.tokens[rows]
    known = ((new[:, :, None] == old[:, None, :]) & held[:, None, :]).any(axis=2)
    join = np.where(known, 0, share * found.masses[rows])
    best, places = torch.from_numpy(np.concatenate([stay, join], axis=1)).topk(tokens.shape[1])
    halves = (best.numpy() * np.float32(HALF_DOWN)).astype(np.float16)
    both = torch.from_numpy(np.concatenate([old, new], axis=1))
    return both.gather(1, places).numpy() * (halves > 0), halves


class DevicePaths:
    """Draws the paths of a policy from a table whose tokens and masses (vocabulary, width) are on a device."""

    def __init__(
        self, policy: Paths, tokens: Tensor, masses: Tensor, target: TargetInfo, draw: Callable[..., Tensor]
    ) -> None:
        """`draw` is `draw_paths` of the kernels."""
        self.policy = policy
        # A path is no longer than a pass has nodes to score.
        length = max(policy.within(Budget(target.max_nodes, policy.length)), 1)
        rows = PadShape.for_paths(policy.count, length).inner
        self._q = torch.zeros(0, rows, len(tokens), device=tokens.device)
        self._inputs: dict[int, PinnedBuffer] = {}  # by the number of texts
        shape: dict[str, Any] = {"count": policy.count, "length": length, "common": policy.common}
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
        size = fitting(len(sequences), BATCHES)  # one of a few sizes, each of which is recorded
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
        if paths[0][0][0] < 0:
            return DraftTree.root(root)  # the row of the root is empty
        return tree_of_paths(root, paths, q, length, self.policy.draw)
