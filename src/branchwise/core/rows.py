"""Rows over a vocabulary: taken from a table and summed, the same in a batch as alone.

A row of 150,000 numbers is worth not copying and not converting; these two do neither where they can.
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 256


def gather_rows(table: Tensor, nodes: Tensor) -> Tensor:
    """The entries of a table (batch, nodes, …) at nodes (batch,) or (batch, n). May be a view: do not write to it."""
    size = table.shape[1]
    if table.device.type == "cpu" and len(table) == 1 and nodes.numel() == 1:
        return table[0, int(nodes)].expand(*nodes.shape, *table.shape[2:])
    trees = torch.arange(len(nodes), device=nodes.device) * size
    places = nodes + (trees if nodes.ndim == 1 else trees[:, None])
    found = table.reshape(-1, *table.shape[2:]).index_select(0, places.flatten())
    return found.view(*nodes.shape, *table.shape[2:])


def row_sum(rows: Tensor) -> Tensor:
    """(…,) float64: the sum of each row (…, vocabulary).

    Blocks are added up in the rows' own type and then in float64: as exact as it needs to be, at a tenth of the cost of
    converting every number. A block is small enough that no threads share it, so a row alone and a row of a batch give
    the same sum.
    """
    if rows.dtype == torch.float64 or rows.shape[-1] <= BLOCK:
        return rows.sum(dim=-1, dtype=torch.float64)
    if rows.device.type != "cpu":  # a launch less, and the padding is never written
        return filled_blocks(rows).sum(dim=-1).sum(dim=-1, dtype=torch.float64)
    whole = rows.shape[-1] // BLOCK * BLOCK
    blocks: Tensor = rows[..., :whole].unflatten(-1, (-1, BLOCK)).sum(dim=-1)
    return blocks.sum(dim=-1, dtype=torch.float64) + rows[..., whole:].sum(dim=-1, dtype=torch.float64)


def filled_blocks(rows: Tensor, value: float = 0.0) -> Tensor:
    """(…, blocks, BLOCK): rows (…, vocabulary) in blocks, the last one filled up with a value."""
    filled = torch.nn.functional.pad(rows, (0, -rows.shape[-1] % BLOCK), value=value)
    blocks: Tensor = filled.unflatten(-1, (-1, BLOCK))
    return blocks


def in_memory(numbers: Tensor) -> Tensor:
    """The same numbers, as values that a compiler may not work out again wherever they are used.

    It would carry their formula into the loop that uses them. What is looked at by its strides has to lie somewhere.
    """
    return numbers.as_strided(numbers.shape, numbers.stride())


def blank(rows: Tensor, tokens: Tensor) -> Tensor:
    """Rows (…, vocabulary) with nothing on one token each (…,), written over the given ones where that is cheaper.

    On a device a comparison is part of whatever reads the rows next, and writing to them would be a pass of its own.
    """
    if rows.device.type == "cpu":
        return rows.scatter_(-1, tokens[..., None], 0.0)
    return rows.where(torch.arange(rows.shape[-1], device=rows.device) != tokens[..., None], 0.0)


def pack_bits(marks: Tensor) -> Tensor:
    """(…, words) int32 from bool (…, columns): bit j % 32 of word j // 32 is column j."""
    bits: Tensor = torch.nn.functional.pad(marks.int(), (0, -marks.shape[-1] % 32)).unflatten(-1, (-1, 32))
    # Distinct powers add up without a carry; the last is the sign.
    return (bits << torch.arange(32, dtype=torch.int32, device=bits.device)).sum(dim=-1, dtype=torch.int32)


def unpack_bits(words: Tensor, columns: int) -> Tensor:
    """(…, columns) bool from int32 (…, words)."""
    places = torch.arange(columns, dtype=torch.int32, device=words.device)
    return (words[..., (places // 32).long()] >> (places % 32)) & 1 != 0
