"""What a pass on a device is told: one sheet of numbers that one copy brings over.

A captured pass reads from fixed places, so a sheet has a size and a text fills part of it. What is left over is
padding: an entry without a slot writes nothing and reads nothing, a node without bits sees the text at most, and
nobody looks at what is found for either.
"""

from __future__ import annotations

from collections.abc import Sequence as Rows
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from branchwise.tree import WORD, words_for

Numbers = NDArray[np.int32]


class Size(NamedTuple):
    """The room of a sheet."""

    batch: int
    nodes: int
    words: int
    """of 32 rows of the trees, those included that earlier passes wrote"""


class Sheet:
    """The inputs of one pass, on the host and on the device. It writes to and reads from one layer after the other."""

    def __init__(self, size: Size, device: torch.device) -> None:
        batch, nodes, words = self.size = size
        shapes = {
            "tokens": (batch, nodes),
            "positions": (batch, nodes),
            "depths": (batch, nodes),
            "slots": (batch,),
            "lengths": (batch,),
            "starts": (batch,),
            "key_depths": (batch, words * WORD),
            "seen": (batch, nodes, words),
        }
        sizes = [int(np.prod(shape)) for shape in shapes.values()]
        cuda = device.type == "cuda"
        self._from = torch.zeros(sum(sizes), dtype=torch.int32, pin_memory=cuda)
        # A sheet that tells nothing names no slot.
        self._to = torch.full((sum(sizes),), -1, dtype=torch.int32, device=device)
        self._brought = torch.cuda.Event() if cuda else None
        ends = np.cumsum(sizes)
        told = self._from.numpy()
        self.told: dict[str, Numbers] = {
            name: told[end - count : end].reshape(shape)
            for (name, shape), count, end in zip(shapes.items(), sizes, ends, strict=True)
        }
        """on the host, as it will be brought over"""
        parts = dict(zip(shapes, self._to.split(sizes), strict=True))
        self.tokens, self.positions, self.depths = (
            parts[name].view(batch, nodes) for name in ("tokens", "positions", "depths")
        )
        self.slots, self.lengths, self.starts = parts["slots"], parts["lengths"], parts["starts"]
        self.key_depths, self.seen = parts["key_depths"].view(batch, -1), parts["seen"].view(batch, nodes, words)

    def fill(
        self,
        slots: Rows[int],
        lengths: Rows[int],
        tokens: NDArray[np.integer] | Tensor,
        depths: NDArray[np.integer],
        seen: Numbers,
        written: Rows[int] | None = None,
        key_depths: NDArray[np.integer] | None = None,
    ) -> None:
        """Tell the pass where the texts lie, (batch,), and what their new nodes are, (batch, nodes); `seen` (batch,
        nodes, words) are their ancestors. Trees of which rows are `written` already, so many to a text, give the depths
        of all their rows. Tokens may lie on the device."""
        if self._brought is not None:
            self._brought.synchronize()  # the last copy from here is long over, unless somebody never looked
        batch, nodes = depths.shape
        told = self.told
        self._from.zero_()
        told["slots"].fill(-1)
        told["slots"][:batch] = slots
        told["lengths"][:batch] = told["starts"][:batch] = lengths
        if written is not None:
            told["starts"][:batch] += np.asarray(written, dtype=np.int32)
        told["depths"][:batch, :nodes] = depths
        told["positions"][:batch, :nodes] = depths
        told["positions"][:batch] += told["lengths"][:batch, None]
        rows = depths if key_depths is None else key_depths
        told["key_depths"][:batch, : rows.shape[1]] = rows
        told["seen"][:batch, :nodes, : seen.shape[2]] = seen
        if not isinstance(tokens, Tensor):
            told["tokens"][:batch, :nodes] = tokens
        self._to.copy_(self._from, non_blocking=True)
        if self._brought is not None:
            self._brought.record()
        if isinstance(tokens, Tensor):
            self.tokens[:batch, :nodes] = tokens

    # What the store and the attention ask of a pass

    def write(self, keys: Tensor, values: Tensor, new_keys: Tensor, new_values: Tensor) -> tuple[Tensor, Tensor]:
        from branchwise.target import kernels

        kernels.write_rows(keys, values, new_keys, new_values, self.slots, self.starts)
        return keys, values

    def attend(
        self, query: Tensor, keys: Tensor, values: Tensor, window: int | None, scale: float, softcap: float | None
    ) -> Tensor:
        """(batch, nodes, heads, width)"""
        from branchwise.target import kernels

        return kernels.tree_attention(
            query, keys, values, self.slots, self.lengths, self.depths, self.key_depths, self.seen,
            scale=scale, softcap=softcap, window=window,
        )  # fmt: skip


def size_for(batch: int, nodes: int, columns: int) -> Size:
    """The smallest room for a pass among the sizes that are kept ready."""
    return Size(fitting(batch, BATCHES), fitting(nodes, NODES), words_for(max(columns, fitting(nodes, NODES))))


BATCHES = (1, 2, 4, 8, 16, 32, 64)
NODES = (1, 2, 4, 8, 16, 32, 64, 96, 128)
"""Powers of two, by which matrix products are tiled, and one between the largest, where a step is long."""


def fitting(count: int, sizes: tuple[int, ...]) -> int:
    """The smallest of the sizes that is enough; above the largest, a multiple of it."""
    largest = sizes[-1]
    return next((size for size in sizes if size >= count), -(-count // largest) * largest)
