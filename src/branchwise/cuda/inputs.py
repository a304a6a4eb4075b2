"""What a pass on a device is told: one sheet of numbers that one copy brings over.

A captured pass reads from fixed places, so a sheet has a size and a text fills part of it. What is left over is
padding: an entry without a slot writes nothing and reads nothing, a node without bits sees the text at most, and
nobody looks at what is found for either.
"""

from __future__ import annotations

from collections.abc import Sequence
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
    """The room of a sheet."""

    batch: int
    nodes: int
    words: int
    """of 32 rows of the trees, those included that earlier passes wrote"""


class PinnedBuffer:
    """Numbers that are written on the host and brought to the same place of a device with one copy."""

    def __init__(self, count: int, device: torch.device, dtype: torch.dtype = torch.int32, fill: int = 0) -> None:
        cuda = device.type == "cuda"
        self._from = torch.zeros(count, dtype=dtype, pin_memory=cuda)
        self.there = torch.full((count,), fill, dtype=dtype, device=device)
        self._over = torch.cuda.Event() if cuda else None
        self._here: NDArray[Any] = self._from.numpy()

    @property
    def here(self) -> NDArray[Any]:
        """The numbers on the host, to be written anew; those brought before have arrived."""
        if self._over is not None:
            self._over.synchronize()  # long over, unless nobody looked at what came of them
        return self._here

    def bring(self) -> Tensor:
        try:
            self.there.copy_(self._from, non_blocking=True)
        finally:  # whoever interrupts this must not have numbers overwritten that are still on their way
            if self._over is not None:
                self._over.record(torch.cuda.current_stream(self.there.device))
        return self.there


class PassInputs:
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
        self._numbers = PinnedBuffer(sum(sizes), device, fill=-1)  # a sheet that tells nothing names no slot
        ends = np.cumsum(sizes)
        self.host: dict[str, Numbers] = {
            name: self._numbers.here[end - count : end].reshape(shape)
            for (name, shape), count, end in zip(shapes.items(), sizes, ends, strict=True)
        }
        """on the host, as it will be brought over"""
        self._layout: TreeLayout | None = None  # what of it was told last
        parts = dict(zip(shapes, self._numbers.there.split(sizes), strict=True))
        self.tokens, self.positions, self.depths = (
            parts[name].view(batch, nodes) for name in ("tokens", "positions", "depths")
        )
        self.slots, self.lengths, self.starts = parts["slots"], parts["lengths"], parts["starts"]
        self.key_depths, self.seen = parts["key_depths"].view(batch, -1), parts["seen"].view(batch, nodes, words)

    def fill(
        self,
        slots: Sequence[int],
        lengths: Sequence[int],
        tokens: NDArray[np.integer] | Tensor,
        depths: NDArray[np.integer],
        seen: Numbers,
        written: Sequence[int] | None = None,
        key_depths: NDArray[np.integer] | None = None,
        *,
        roots: Sequence[int] | None = None,
        layout: TreeLayout | None = None,
    ) -> None:
        """Tell the pass where the texts lie, (texts,), and what their new nodes are, (batch, nodes); `seen` (batch,
        nodes, words) are their ancestors. Trees of which rows are `written` already, so many to a text, give the depths
        of all their rows. Tokens may lie on the device, without padding; then `roots` are told from here. Depths and
        ancestors that were `laid` out for the trees are not told a second time."""
        _ = self._numbers.here
        texts, nodes = len(slots), depths.shape[1]
        host = self.host
        if layout is None or layout is not self._layout:
            self._layout = None  # whoever interrupts this finds nothing told
            for name in ("depths", "key_depths", "seen"):
                host[name].fill(0)
            host["depths"][: len(depths), :nodes] = depths
            rows = depths if key_depths is None else key_depths
            host["key_depths"][: len(rows), : rows.shape[1]] = rows
            host["seen"][: len(seen), :nodes, : seen.shape[2]] = seen
            host["tokens"].fill(0)
        self._layout = layout
        host["slots"].fill(-1)
        host["slots"][:texts] = slots
        host["lengths"].fill(0)
        host["lengths"][:texts] = lengths
        np.add(host["lengths"], 0 if written is None else _widened(written, host["lengths"]), out=host["starts"])
        np.add(host["depths"], host["lengths"][:, None], out=host["positions"])
        if isinstance(tokens, Tensor):
            assert roots is not None, "roots are known on the host"
            host["tokens"][:texts, 0] = roots
        else:
            host["tokens"][: len(tokens), :nodes] = tokens
        self._numbers.bring()
        if isinstance(tokens, Tensor) and tokens.shape[1] > 1:
            self.tokens[: len(tokens), 1 : tokens.shape[1]] = tokens[:, 1:]

    # What the store and the attention ask of a pass

    def write(self, keys: Tensor, values: Tensor, new_keys: Tensor, new_values: Tensor) -> tuple[Tensor, Tensor]:
        from branchwise.cuda import kernels

        kernels.write_rows(keys, values, new_keys, new_values, self.slots, self.starts)
        return keys, values

    def attend(
        self, query: Tensor, keys: Tensor, values: Tensor, window: int | None, scale: float, softcap: float | None
    ) -> Tensor:
        """(batch, nodes, heads, width)"""
        from branchwise.cuda import kernels

        return kernels.tree_attention(
            query, keys, values, self.slots, self.lengths, self.depths, self.key_depths, self.seen,
            scale=scale, softcap=softcap, window=window,
        )  # fmt: skip


@lru_cache(maxsize=4096)
def size_for(batch: int, nodes: int, columns: int) -> Size:
    """The smallest room for a pass among the sizes that are kept ready."""
    return Size(fitting(batch, BATCHES), fitting(nodes, NODES), words_for(max(columns, fitting(nodes, NODES))))


BATCHES = (1, 2, 4, 8, 16, 32, 64)
NODES = (1, 2, 4, 8, 16, 32, 64, 96, 128)
"""Powers of two, by which matrix products are tiled, and one between the largest, where a step is long."""


@lru_cache(maxsize=4096)
def fitting(count: int, sizes: tuple[int, ...]) -> int:
    """The smallest of the sizes that is enough; above the largest, a multiple of it."""
    largest = sizes[-1]
    return next((size for size in sizes if size >= count), -(-count // largest) * largest)


def _widened(rows: Sequence[int], like: Numbers) -> Numbers:
    wide = np.zeros_like(like)
    wide[: len(rows)] = rows
    return wide
