"""Attention of rows that are written after their texts: to the text, to some of each other, and to the target's cache.

Slots, numbers of rows, and which row attends to which are all in tensors, so that a recorded graph is valid for every
step. Kernels read the caches in place; the version in torch, operation by operation, is the reference.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from branchwise.backends.base import CachedRows
from branchwise.core.rows import WORD, pack_bits
from branchwise.draft.head.cache import HeadCache
from branchwise.draft.head.network import Attend, Look


class Behind(NamedTuple):
    """Rows that are written after their texts."""

    first: int
    """the cell of the first row, counted from the end of the text"""
    own: Tensor
    """(batch, rows, cells): the cells after the text that each row attends to, its own included"""
    depths: Tensor
    """(batch, rows): the positions of the rows, counted from the end of the text"""
    cell_depths: Tensor
    """(batch, cells): the positions of the rows in the cells after the text, counted in the same way"""


def attention(cache: HeadCache, slots: Tensor, lengths: Tensor, behind: Behind, *, kernels: bool) -> Attend:
    """The attention of rows after texts of `lengths` rows; it first writes their keys and values to the cache."""
    ends = cache.ends(slots, lengths, behind.own.shape[2])
    return (_by_kernels if kernels else _in_torch)(cache, slots, ends, behind)


def cross_attention(cached: CachedRows, seats: Tensor, lengths: Tensor, own: Tensor, *, kernels: bool) -> Look:
    """Attention to the keys and values (slots, heads, rows, width) of a target. In the slot (`seats`) of their text,
    rows attend to the first `lengths` (batch,) rows, and to their `own` (batch, rows, some) of the rows after these."""
    keys, values = cached
    if kernels:
        seats, lengths = seats.int(), lengths.int()
        return lambda query: _kernel(query, keys, values, seats, lengths, own)
    on_host = own.device.type == "cpu"  # nothing is recorded on a host, so that views may have any length
    end = min(int(lengths.max()) + own.shape[2], keys.shape[2]) if on_host else keys.shape[2]
    seen = visible(torch.arange(end, device=own.device), lengths, own)
    seen[..., 0] = True  # a text without a row stays finite
    places = slice(int(seats), int(seats) + 1) if on_host and len(seats) == 1 else seats

    def look(query: Tensor) -> Tensor:
        key, value = (part[places, :, :end].to(query.dtype) for part in (keys, values))
        return functional.scaled_dot_product_attention(query, key, value, seen[:, None], enable_gqa=True)

    return look


def visible(columns: Tensor, ends: Tensor, own: Tensor) -> Tensor:
    """(batch, rows, columns): whether a row attends to each column: to all before the end of its text, `ends` (batch,),
    and after it to its `own` (batch, rows, some)."""
    relative = columns - ends[:, None]
    _, rows, count = own.shape
    inside = ((relative >= 0) & (relative < count))[:, None]
    places = relative.clamp(0, count - 1)[:, None].expand(-1, rows, -1)
    return (relative < 0)[:, None] | (own.gather(2, places) & inside)


def _in_torch(cache: HeadCache, slots: Tensor, ends: Tensor, behind: Behind) -> Attend:
    first, own, depths, cell_depths = behind
    cells = ends[:, None] + first + torch.arange(own.shape[1], device=own.device)
    seen = visible(cache.columns, ends, own)
    if cache.window:
        relative = cache.columns - ends[:, None]
        behind_text = cell_depths.gather(1, relative.clamp(0, own.shape[2] - 1))
        places = torch.where(relative < 0, relative, behind_text)
        seen = seen & (depths[..., None] - places[:, None] < cache.window)

    def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        keys, values = cache.store[0, layer], cache.store[1, layer]
        keys[slots[:, None], :, cells] = key.transpose(1, 2)
        values[slots[:, None], :, cells] = value.transpose(1, 2)
        end = seen.shape[-1]
        return functional.scaled_dot_product_attention(
            query, keys[slots, :, :end], values[slots, :, :end], seen[:, None], enable_gqa=True
        )

    return attend


def _by_kernels(cache: HeadCache, slots: Tensor, ends: Tensor, behind: Behind) -> Attend:
    from branchwise.cuda import kernels

    first, own, depths, cell_depths = behind
    slots, ends = slots.int(), ends.int()
    starts = ends + first
    windowed = (cache.window, depths, cell_depths) if cache.window else None

    def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        keys, values = cache.store[0, layer], cache.store[1, layer]
        kernels.write_rows(keys, values, key, value, slots, starts)
        return _kernel(query, keys, values, slots, ends, own, windowed)

    return attend


def _kernel(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    slots: Tensor,
    lengths: Tensor,
    own: Tensor,
    windowed: tuple[int, Tensor, Tensor] | None = None,
) -> Tensor:
    """(batch, heads, rows, width). `windowed` is for a window: its size, the depths of rows, and those of the cells."""
    from branchwise.cuda import kernels

    bits = pack_bits(own)
    columns = WORD * bits.shape[2]
    if windowed is None:
        window, depths = None, torch.zeros(own.shape[:2], dtype=torch.int32, device=own.device)
        cell_depths = torch.zeros(len(own), columns, dtype=torch.int32, device=own.device)
    else:
        window, depths, cell_depths = windowed
        depths = depths.int().contiguous()
        cell_depths = functional.pad(cell_depths.int(), (0, columns - own.shape[2])).contiguous()
    scale = query.shape[-1] ** -0.5
    found = kernels.tree_attention(
        query, keys, values, slots, lengths, depths, cell_depths, bits, scale=scale, window=window
    )
    return found.transpose(1, 2)
