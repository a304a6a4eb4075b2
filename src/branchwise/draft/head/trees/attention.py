"""What rows attend to that a device writes behind their texts: the text, some of each other, and the target's cache.

Which slots, how many rows, who sees whom: all of it is in tensors, so that a recorded graph is right for every step.
Kernels read the caches where they lie; operation by operation is the truth.
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
    """Rows that are written behind their texts."""

    first: int
    """the cell that the first of them is written to, counted from behind the text"""
    own: Tensor
    """(batch, rows, cells): the cells behind the text that each one sees, its own among them"""
    depths: Tensor
    """(batch, rows): how far behind the text their places are, 0 for the next one"""
    cell_depths: Tensor
    """(batch, cells): the same of what stands in the cells"""


def attention(cache: HeadCache, slots: Tensor, lengths: Tensor, behind: Behind, *, kernels: bool) -> Attend:
    """The attention of rows behind texts of so many rows, which it writes to the cache first."""
    ends = cache.ends(slots, lengths, behind.own.shape[2])
    return (_by_kernels if kernels else _in_torch)(cache, slots, ends, behind)


def cross_attention(cached: CachedRows, seats: Tensor, lengths: Tensor, own: Tensor, *, kernels: bool) -> Look:
    """Attention to the keys and values (slots, heads, rows, width) of a target. Rows see the first `lengths` (batch,)
    in the slot of their text, and of those behind them their `own` (batch, rows, some)."""
    keys, values = cached
    if kernels:
        seats, lengths = seats.int(), lengths.int()
        return lambda query: _kernel(query, keys, values, seats, lengths, own)
    on_host = own.device.type == "cpu"  # where nothing is recorded, and a view may be as long as it takes
    end = min(int(lengths.max()) + own.shape[2], keys.shape[2]) if on_host else keys.shape[2]
    seen = visible(torch.arange(end, device=own.device), lengths, own)
    seen[..., 0] = True  # a text without a row stays finite
    places = slice(int(seats), int(seats) + 1) if on_host and len(seats) == 1 else seats

    def look(query: Tensor) -> Tensor:
        key, value = (part[places, :, :end].to(query.dtype) for part in (keys, values))
        return functional.scaled_dot_product_attention(query, key, value, seen[:, None], enable_gqa=True)

    return look


def visible(columns: Tensor, ends: Tensor, own: Tensor) -> Tensor:
    """(batch, rows, columns): what is before the ends (batch,) of texts, and of what is behind them what rows see as
    their `own` (batch, rows, some)."""
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
    """(batch, heads, rows, width). In a window, its size, the depths of rows and those of the cells that are `own`."""
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
