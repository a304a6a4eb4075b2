"""The KV cache: preallocated memory for the keys and values of all running sequences.

A slot holds the rows of one sequence: its committed tokens from row 0 on, and after them, during a pass, the nodes of
its tree. `slots.py` assigns slots to sequences. Shapes of keys and values can differ by layer; the cache has one tensor
per shape.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import Cache

from branchwise.backends.base import CachedRows
from branchwise.backends.transformers.attention import LONG_PREFIX, attend, attend_apart, masks_behind, tree_mask
from branchwise.backends.transformers.slots import Slots
from branchwise.core.batch import TreeBatch
from branchwise.core.rows import unpack_bits
from branchwise.core.sequence import SequenceState
from branchwise.cuda.graphs import GraphedFunction, restored
from branchwise.cuda.inputs import BATCHES, NODES, PassTensors, PinnedBuffer, fitting

Shape = tuple[int, int]  # (heads, width)


@dataclass(frozen=True)
class Layout:
    """The shape of keys and of values in every layer, in order."""

    keys: tuple[Shape, ...]
    values: tuple[Shape, ...]

    def bytes_per_row(self, dtype: torch.dtype) -> int:
        return dtype.itemsize * sum(heads * width for heads, width in self.keys + self.values)


@dataclass(frozen=True, eq=False)
class PartialTree:
    """The rows of growing trees that earlier passes have written after the committed rows."""

    rows: list[int]  # how many, for each sequence
    depths: NDArray[np.int64]  # (batch, columns): of every row of the trees, those of the coming pass included


@dataclass(frozen=True, eq=False)
class HostPass:
    """The inputs of a pass for functions in C, which take addresses: all tensors are contiguous."""

    slots: Tensor
    lengths: Tensor
    """(batch,): the lengths of the prefixes"""
    rows: Tensor
    """(batch, nodes): the rows of the cache that the nodes are written to"""
    depths: Tensor
    """(batch, nodes): the depths of the nodes"""
    column_depths: Tensor
    """(batch, columns): the depths of all rows of the trees"""
    seen: Tensor
    """(batch or 1, nodes, columns): the rows of a tree that each node sees"""
    most: int
    """the most rows that a node may see"""
    jobs: dict[Any, Any] = field(default_factory=dict)
    """the arguments that layers of one shape share in this pass"""


class Pass:
    """One forward pass: which slots it reads, where its nodes go, and what each node sees."""

    def __init__(
        self,
        slots: list[int],
        lengths: list[int],
        depths: Tensor,
        ancestors: Tensor | None,
        written: PartialTree | None = None,
    ) -> None:
        """`depths` (batch, nodes); `ancestors` (batch, nodes, rows of a tree), or None for one chain, as in prefill."""
        device, nodes = depths.device, depths.shape[1]
        before = written.rows if written else [0] * len(lengths)
        starts = [length + rows for length, rows in zip(lengths, before, strict=True)]
        self.keys = max(starts) + nodes
        self.lengths = torch.tensor(lengths, device=device)
        self._longest = max(lengths)
        self.rows = torch.tensor(starts, device=device)[:, None] + torch.arange(nodes, device=device)  # (batch, nodes)
        self.slot_column = torch.tensor(slots, device=device)[:, None]
        self.slots: slice | Tensor = side_by_side(slots) or self.slot_column[:, 0]
        self.depths = depths
        self.ancestors = ancestors
        self.written = written
        # After an empty prefix a chain is plain causal attention, which has kernels without a mask.
        self.causal = ancestors is None and max(lengths) == 0 and nodes > 1
        self._all_seen = nodes == 1 and min(lengths) == max(lengths) and not any(before)
        self._masks: dict[int | None, Tensor] = {}
        long = device.type == "cpu" and min(lengths) >= LONG_PREFIX
        self._prefixes = lengths if long else None
        self._behind: dict[int, list[Tensor]] = {}  # by heads of a group, which layers may differ in

    @cached_property
    def on_host(self) -> HostPass:
        """The inputs of this pass for functions in C."""
        seen = self._seen_behind().contiguous()
        depths = self.depths.contiguous()
        columns = torch.from_numpy(self.written.depths).contiguous() if self.written else depths
        assert columns.shape[1] == seen.shape[2], "every column of a tree has a depth"
        most = self._longest + seen.shape[2]
        return HostPass(self.slot_column, self.lengths, self.rows.contiguous(), depths, columns, seen, most)

    def mask(self, window: int | None, dtype: torch.dtype) -> tuple[Tensor | None, bool]:
        """The additive mask for layers with this window, and whether the causal flag stands in for it."""
        if window is not None and window >= self.keys:
            window = None
        if window is None and (self._all_seen or self.causal):
            return None, self.causal
        if window not in self._masks:
            key_depths = torch.from_numpy(self.written.depths).to(self.depths.device) if self.written else None
            self._masks[window] = tree_mask(
                self.lengths, self.depths, self._seen_behind(), self.keys, window, dtype, key_depths
            )
        return self._masks[window], False

    def _seen_behind(self) -> Tensor:
        """(batch or 1, nodes, rows of a tree): the rows after the prefix that each node sees."""
        if self.ancestors is not None:
            return self.ancestors
        nodes = self.depths.shape[1]
        return torch.ones(1, nodes, nodes, dtype=torch.bool, device=self.depths.device).tril_()

    def write(self, keys: Tensor, values: Tensor, new_keys: Tensor, new_values: Tensor) -> tuple[Tensor, Tensor]:
        """Write the nodes (batch, heads, nodes, width) into a layer of the cache; returns all rows that may be read."""
        # The two index tensors stand around a slice, so their axes (batch, nodes) come first.
        keys[self.slot_column, :, self.rows] = new_keys.transpose(1, 2).to(keys.dtype)
        values[self.slot_column, :, self.rows] = new_values.transpose(1, 2).to(values.dtype)
        return keys[self.slots, :, : self.keys], values[self.slots, :, : self.keys]

    def attend(
        self, query: Tensor, keys: Tensor, values: Tensor, window: int | None, scale: float, softcap: float | None
    ) -> Tensor:
        """(batch, nodes, heads, width): attention of the nodes to the rows that `write` returned."""
        whole = softcap is None and (window is None or window >= self.keys)
        if self._prefixes is not None and whole and keys.shape[3] == values.shape[3]:
            group = query.shape[1] // keys.shape[1]
            if group not in self._behind:
                self._behind[group] = masks_behind(self._prefixes, self._seen_behind(), self.keys, group, keys.dtype)
            found = attend_apart(query.to(keys.dtype), keys, values, self._prefixes, self._behind[group], scale)
            return found.transpose(1, 2).to(query.dtype).contiguous()
        mask, causal = self.mask(window, keys.dtype)
        found = attend(query.to(keys.dtype), keys, values, mask, causal=causal, scale=scale, softcap=softcap)
        return found.transpose(1, 2).to(query.dtype).contiguous()


class RowsPass(Pass):
    """A pass over tokens whose rows exist already, in layers that have not computed them yet. They may be any rows, not
    only the last."""

    def __init__(self, slots: list[int], rows: Tensor, seen: Tensor, positions: Tensor, key_positions: Tensor) -> None:
        """`rows` and `positions` (batch, nodes); `seen` (batch, nodes, keys) marks the rows that each node attends to,
        its own included; `key_positions` (batch, keys) are the positions of those rows."""
        self.keys = seen.shape[2]
        self.rows, self.depths, self._seen, self._key_positions = rows, positions, seen, key_positions
        self.slot_column = torch.tensor(slots, device=rows.device)[:, None]
        self.slots = side_by_side(slots) or self.slot_column[:, 0]
        self._masks = {}
        self._prefixes = None

    def mask(self, window: int | None, dtype: torch.dtype) -> tuple[Tensor | None, bool]:
        if window not in self._masks:
            seen = self._seen
            if window is not None:
                seen = seen & (self._key_positions[:, None] > self.depths[:, :, None] - window)
            mask = torch.zeros(seen.shape, dtype=dtype, device=seen.device)
            self._masks[window] = mask.masked_fill_(~seen, -torch.inf)[:, None]
        return self._masks[window], False


class BlankCache(Cache):
    """A cache that answers transformers' questions about lengths as if it were empty. We pass positions and make masks
    ourselves, so the answers do not matter; a model that uses them anyway fails the probe at load."""

    def __init__(self) -> None:
        super().__init__(layers=[])

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return query_length, 0


class KVCache(BlankCache, Slots):
    """Keys and values in slots. During a pass it is the `Cache` that the model writes to and reads from."""

    def __init__(
        self,
        layout: Layout,
        slots: int,
        rows: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        by_kernels: bool = False,
        record: bool = True,
    ) -> None:
        """`by_kernels`: a kernel moves the rows of all layers at once. `record`: that launch may be recorded."""
        super().__init__()
        self.by_kernels = by_kernels
        self._device = device
        self._tensors: dict[tuple[str, Shape], Tensor] = {}
        form = slots, rows, dtype
        self.layers_keys = self._allocated("keys", layout.keys, *form)
        self.layers_values = self._allocated("values", layout.values, *form)
        tensors = list(self._tensors.values())
        Slots.__init__(self, tensors, slots, rows)
        self.move = GraphedFunction(move, device, tensors, still=nowhere, capture=by_kernels and record)
        """moves the rows of accepted paths, (batch, steps) padded with -1, by kernels; `keep` counts them later"""
        self._moves: dict[tuple[int, int], PinnedBuffer] = {}  # (sequences, steps) that a buffer holds -> buffer
        self.current: Pass | PassTensors | None = None

    def _allocated(
        self, kind: str, shapes: tuple[Shape, ...], slots: int, rows: int, dtype: torch.dtype
    ) -> list[Tensor]:
        """(slots, heads, rows, width) for every layer: a view of the tensor for its shape."""
        for heads, width in dict.fromkeys(shapes):
            size = (shapes.count((heads, width)), slots, heads, rows, width)
            self._tensors[kind, (heads, width)] = zeros(size, dtype, self._device)
        return [self._tensors[kind, shape][shapes[:layer].count(shape)] for layer, shape in enumerate(shapes)]

    # Passes

    def begin(
        self,
        sequences: Sequence[SequenceState],
        depths: Tensor,
        ancestors: Tensor | None,
        written: PartialTree | None = None,
    ) -> Pass:
        """Begin a pass over these sequences; `Pass` explains the other arguments."""
        slots, lengths = self._seats(sequences)
        self.current = Pass(slots, lengths, depths, ancestors, written)
        self._touch(slots, [self.current.keys] * len(slots), self.current.keys)
        return self.current

    def revisit(
        self, sequences: Sequence[SequenceState], rows: Tensor, seen: Tensor, positions: Tensor, key_positions: Tensor
    ) -> RowsPass:
        """Begin a pass over rows of these sequences that earlier passes wrote; see `RowsPass`."""
        slots, _ = self._seats(sequences)
        self.current = found = RowsPass(slots, rows, seen, positions, key_positions)
        self._touch(slots, [found.keys] * len(slots), found.keys)
        return found

    def beside(self, count: int, width: int) -> Tensor:
        """(count, slots, rows, width): extra numbers for every row of the cache, which move with the rows. Not for a
        cache that kernels move."""
        assert not self.by_kernels, "kernels move what they were given at first"
        tensor = zeros((count, self.slots, 1, self.rows, width), self.layers_keys[0].dtype, self._device)
        self._tensors["beside", (len(self._tensors), width)] = tensor
        self._cells.append(tensor)
        return tensor[:, :, 0]

    def places(self, sequences: Sequence[SequenceState]) -> list[int]:
        """The slots of these sequences."""
        return self._seats(sequences)[0]

    def seat(
        self, sequences: Sequence[SequenceState], written: Sequence[int], nodes: int, padded: int
    ) -> tuple[list[int], list[int]]:
        """Slots and lengths of these sequences, for a pass over `nodes` nodes after the tree rows already `written`.
        The `padded` pass has more nodes and writes meaningless rows after the tree."""
        slots, lengths = self._seats(sequences)
        starts = [length + rows for length, rows in zip(lengths, written, strict=True)]
        self._touch(slots, [start + padded for start in starts], max(starts) + nodes)
        return slots, lengths

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write the nodes of this pass, (batch, heads, nodes, width), to a layer; returns all rows that it may read."""
        assert self.current is not None, "a model ran on the cache outside a pass"
        return self.current.write(self.layers_keys[layer_idx], self.layers_values[layer_idx], key_states, value_states)

    def committed(self, layer: int, sequences: Sequence[SequenceState]) -> CachedRows:
        """Keys and values of the committed tokens of these sequences in a layer."""
        slots, lengths = self._seats(sequences)
        places, end = side_by_side(slots) or slots, max(lengths, default=0)
        return CachedRows(self.layers_keys[layer][places, :, :end], self.layers_values[layer][places, :, :end])

    def keep(
        self, sequences: Sequence[SequenceState], paths: Sequence[tuple[int, ...]], *, moved: bool = False
    ) -> None:
        """Move the rows of each accepted path to the front of its tree, unless the device has `moved` them, and count
        them as committed."""
        gaps = [] if moved else [row for row, path in enumerate(paths) if path != tuple(range(len(path)))]
        if gaps:
            self._move(*self._seats([sequences[row] for row in gaps]), [paths[row] for row in gaps])
        for sequence, path in zip(sequences, paths, strict=True):
            self._lengths[sequence] += len(path)

    def _move(self, slots: list[int], lengths: list[int], paths: list[tuple[int, ...]]) -> None:
        """Row length + path[i] of each slot becomes row length + i."""
        if self.by_kernels:
            self.move(*self._packed(slots, lengths, paths))
            return
        moves = [
            (slot, length + node, length + i)
            for slot, length, path in zip(slots, lengths, paths, strict=True)
            for i, node in enumerate(path)
            if node != i
        ]
        places, sources, goals = torch.tensor(moves, device=self._device).unbind(1)
        for tensor in self._tensors.values():
            tensor[:, places, :, goals] = tensor[:, places, :, sources]

    def _packed(
        self, slots: list[int], lengths: list[int], paths: list[tuple[int, ...]]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Slots, lengths and paths on the device, by one copy to a fixed address: (batch,), (batch,), (batch,
        steps)."""
        batch, steps = size = fitting(len(paths), BATCHES), fitting(max(map(len, paths)), NODES)
        if size not in self._moves:
            self._moves[size] = PinnedBuffer(batch * (2 + steps), self._device, fill=-1)
        numbers = self._moves[size].host
        numbers.fill(-1)
        numbers[: len(slots)] = slots
        numbers[batch : batch + len(lengths)] = lengths
        for row, path in enumerate(paths):
            start = 2 * batch + row * steps
            numbers[start : start + len(path)] = path
        copied = self._moves[size].copy()
        return copied[:batch], copied[batch : 2 * batch], copied[2 * batch :].view(size)

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return self.rows


def side_by_side(slots: list[int]) -> slice | None:
    """Adjacent slots in order as a slice, which reads without a copy; None for other slots."""
    if not slots or slots != list(range(slots[0], slots[0] + len(slots))):
        return None
    return slice(slots[0], slots[0] + len(slots))


def move(*inputs: Tensor) -> None:
    """Move rows in all tensors of a cache, with one launch for all layers of a tensor. The last three inputs are slots,
    lengths and paths."""
    from branchwise.cuda import kernels

    *tensors, slots, lengths, paths = inputs
    steps = paths.int().contiguous()
    for tensor in tensors:
        kernels.keep_rows(tensor, slots, lengths, steps)


@contextmanager
def nowhere(slots: Tensor, lengths: Tensor, paths: Tensor) -> Iterator[None]:
    """Set all slots to -1 meanwhile, because a recording runs its function several times and rows must not move
    twice."""
    with restored(slots):
        slots.fill_(-1)
        yield


def batch_ancestors(batch: TreeBatch, device: torch.device) -> Tensor:
    """(batch, nodes, nodes) bool; padding nodes see only themselves besides the prefix."""
    if batch.laid is not None:
        own = torch.eye(batch.nodes, dtype=torch.bool, device=device)
        return unpack_bits(batch.laid.ancestor_bits, batch.nodes) | own
    bits = np.unpackbits(batch.layout.ancestor_bits.view(np.uint8), axis=2, count=batch.nodes, bitorder="little")
    masks = bits.astype(bool) | np.eye(batch.nodes, dtype=bool)
    return torch.from_numpy(masks).to(device, non_blocking=True)


def zeros(size: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros that cost no memory on the CPU until they are written: most rows of a cache are never used. Rows must not
    start as garbage: attention multiplies masked values by zero, and NaN times zero is NaN."""
    if device.type != "cpu":
        return torch.zeros(size, dtype=dtype, device=device)
    flat = np.zeros(int(np.prod(size)) * dtype.itemsize, dtype=np.uint8)
    return torch.from_numpy(flat).view(dtype).view(size)
