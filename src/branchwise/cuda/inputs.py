"""Inputs of a forward pass, packed for one host-to-device copy.

A CUDA graph reads fixed addresses, so packed inputs have a fixed size, and the trees of a step fill part of it. The
rest is padding: a tree without a slot writes nothing and reads nothing, a node without ancestor bits attends to the
prefix at most, and the outputs for both are ignored.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from branchwise.core.batch import TreeLayout
from branchwise.core.rows import WORD, words_for

Numbers = NDArray[np.int32]


class Size(NamedTuple):
    """The size of packed inputs."""

    batch: int
    nodes: int
    words: int  # of 32 bits, one for each cache row of a tree, rows of earlier passes included


class PinnedBuffer:
    """Numbers that are written in pinned host memory and copied to a fixed address on the device."""

    def __init__(self, count: int, device: torch.device, dtype: torch.dtype = torch.int32, fill: int = 0) -> None:
        cuda = device.type == "cuda"
        self._pinned = torch.zeros(count, dtype=dtype, pin_memory=cuda)
        self.device_copy = torch.full((count,), fill, dtype=dtype, device=device)
        self._copied = torch.cuda.Event() if cuda else None
        self._array: NDArray[Any] = self._pinned.numpy()

    @property
    def host(self) -> NDArray[Any]:
        """The numbers on the host, to be overwritten. Waits until the previous copy has arrived."""
        if self._copied is not None:
            self._copied.synchronize()  # usually long over, because its results have been read since
        return self._array

    def copy(self) -> Tensor:
        """Start the copy; returns the tensor on the device."""
        try:
            self.device_copy.copy_(self._pinned, non_blocking=True)
        finally:  # an interrupt must not let numbers be overwritten that are still being copied
            if self._copied is not None:
                self._copied.record(torch.cuda.current_stream(self.device_copy.device))
        return self.device_copy


@dataclass(eq=False)
class PassTensors:
    """The tensors that one pass reads on the device, int32 each, and how its layers write rows and attend."""

    tokens: Tensor  # (batch, nodes)
    positions: Tensor  # (batch, nodes)
    depths: Tensor  # (batch, nodes): 0 comes right after the rows of the text
    slots: Tensor  # (batch,): -1 for a tree without a sequence
    lengths: Tensor  # (batch,): rows of the text, which all nodes see
    starts: Tensor  # (batch,): the row that the first of these nodes is written to
    key_depths: Tensor  # (batch, columns): depths of the tree's rows, which follow those of the text
    ancestor_bits: Tensor  # (batch, nodes, words): which of the tree's rows each node sees

    def write(self, keys: Tensor, values: Tensor, new_keys: Tensor, new_values: Tensor) -> tuple[Tensor, Tensor]:
        from branchwise.cuda import kernels  # needs Triton

        new_keys, new_values = new_keys.to(keys.dtype), new_values.to(values.dtype)
        kernels.write_rows(keys, values, new_keys, new_values, self.slots, self.starts)
        return keys, values

    def attend(
        self, query: Tensor, keys: Tensor, values: Tensor, window: int | None, scale: float, softcap: float | None
    ) -> Tensor:
        """(batch, nodes, heads, width): computed in the dtype of the cache, returned in the dtype of the query."""
        from branchwise.cuda import kernels

        found = kernels.tree_attention(
            query.to(keys.dtype), keys, values, self.slots, self.lengths, self.depths, self.key_depths,
            self.ancestor_bits, scale=scale, softcap=softcap, window=window,
        )  # fmt: skip
        return found.to(query.dtype)


class PassInputs(PassTensors):
    """The inputs of one pass, on the host and on the device."""

    def __init__(self, size: Size, device: torch.device) -> None:
        batch, nodes, words = self.size = size
        shapes: dict[str, tuple[int, ...]] = {
            **dict.fromkeys(("tokens", "positions", "depths"), (batch, nodes)),
            **dict.fromkeys(("slots", "lengths", "starts"), (batch,)),
            "key_depths": (batch, words * WORD),
            "ancestor_bits": (batch, nodes, words),
        }
        sizes = [math.prod(shape) for shape in shapes.values()]
        self._numbers = PinnedBuffer(sum(sizes), device, fill=-1)  # inputs that were never filled name no slot
        parts = np.split(self._numbers.host, np.cumsum(sizes)[:-1])
        self.host: dict[str, Numbers] = {
            name: part.reshape(shape) for (name, shape), part in zip(shapes.items(), parts, strict=True)
        }
        self._layout: TreeLayout | None = None  # the layout that the host copy holds
        on_device = self._numbers.device_copy.split(sizes)
        views = [part.view(shape) for part, shape in zip(on_device, shapes.values(), strict=True)]
        self.tokens, self.positions, self.depths, self.slots, self.lengths, self.starts, *trees = views
        self.key_depths, self.ancestor_bits = trees
        self.drafted = torch.zeros(batch, nodes, dtype=torch.long, device=device)
        """(batch, nodes) int64: the tokens for verifiers, if they were drafted on the device"""

    def fill(
        self,
        slots: Sequence[int],
        lengths: Sequence[int],
        tokens: NDArray[np.integer] | Tensor,
        depths: NDArray[np.integer],
        ancestor_bits: Numbers,
        written: Sequence[int] | None = None,
        key_depths: NDArray[np.integer] | None = None,
        *,
        roots: Sequence[int] | None = None,
        layout: TreeLayout | None = None,
    ) -> None:
        """Pack the slots and lengths of the sequences, and their new nodes (batch, nodes), and copy them.

        `written` counts the rows of each tree that earlier passes wrote; `key_depths` then gives the depths of all
        rows. Tokens may be in device memory, without padding; then `roots` come from the host, and `advance_inputs`
        copies the rest. Depths and ancestors of the same `layout` as last time are not packed again.
        """
        _ = self._numbers.host  # waits for the previous copy
        texts, nodes = len(slots), depths.shape[1]
        host = self.host
        if layout is None or layout is not self._layout:
            self._layout = None  # an interrupt must not leave half a layout that counts as complete
            for name in ("depths", "key_depths", "ancestor_bits"):
                host[name].fill(0)
            host["depths"][: len(depths), :nodes] = depths
            rows = depths if key_depths is None else key_depths
            host["key_depths"][: len(rows), : rows.shape[1]] = rows
            host["ancestor_bits"][: len(ancestor_bits), :nodes, : ancestor_bits.shape[2]] = ancestor_bits
            host["tokens"].fill(0)
        self._layout = layout
        host["slots"].fill(-1)
        host["slots"][:texts] = slots
        host["lengths"].fill(0)
        host["lengths"][:texts] = lengths
        np.copyto(host["starts"], host["lengths"])
        if written is not None:
            host["starts"][:texts] += written
        np.add(host["depths"], host["lengths"][:, None], out=host["positions"])
        if isinstance(tokens, Tensor):
            assert roots is not None, "roots are known on the host"
            host["tokens"][:texts, 0] = roots
        else:
            host["tokens"][: len(tokens), :nodes] = tokens
        self._numbers.copy()


@lru_cache(maxsize=4096)
def size_for(batch: int, nodes: int, columns: int) -> Size:
    """The smallest bucket that holds such a pass."""
    return Size(fitting(batch, BATCHES), fitting(nodes, NODES), words_for(max(columns, fitting(nodes, NODES))))


BATCHES = (1, 2, 4, 8, 16, 32, 64)
NODES = (1, 2, 4, 8, 16, 32, 64, 96, 128)
"""powers of two, because matrix products are tiled by them, and 96, because a pass over 128 nodes takes long"""


@lru_cache(maxsize=4096)
def fitting(count: int, sizes: tuple[int, ...]) -> int:
    """The smallest of `sizes` that is at least `count`; above the largest, the next multiple of the largest."""
    largest = sizes[-1]
    return next((size for size in sizes if size >= count), -(-count // largest) * largest)
