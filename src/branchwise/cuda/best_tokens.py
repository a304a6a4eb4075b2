"""The best tokens of a table after rows of states, as Triton kernels: logits are never in memory.

A program multiplies a block of output rows with all states of a tile, keeps the best few of its logits and the sum of
their exponentials, and a second kernel merges what the blocks found. A table of 16,384 rows is 19 MB for a model of
width 576, which an H200 reads in 5 microseconds; softmax and top-k over logits in memory take ten times as long. The
plain way of `draft.head.device` is the truth. Without a CUDA device only tests import this file.
"""

# mypy: disable-error-code="import-untyped, import-not-found, untyped-decorator, no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

NOTHING = tl.constexpr(-1.0e30)
"""the logit of no token; it is finite, so that differences are numbers"""
BLOCK = 64
"""output rows of a program"""


def best_tokens(
    states: Tensor, table: Tensor, extra: Tensor, known: Tensor, slots: Tensor, count: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The best logits of every state (batch, rows, width), where they stand, and the logarithm of all exponentials.

    Places below len(table) are rows of the table; behind them come the `extra` rows (slots, some, width) of the slot of
    each text, those of them that are `known` >= 0 (slots, some). Returns (batch, rows, count) twice and (batch, rows).
    """
    batch, rows, width = states.shape
    tiles, fill = -(-batch * rows // 16), max(16, triton.next_power_of_2(rows))
    blocks, more = triton.cdiv(len(table), BLOCK), triton.cdiv(extra.shape[1], BLOCK)
    every = blocks + more
    values = torch.empty(batch * rows, every, count, device=states.device)
    places = torch.empty(batch * rows, every, count, device=states.device, dtype=torch.int32)
    sums = torch.empty(2, batch * rows, every, device=states.device)
    found = torch.empty_like(values[:, 0]), torch.empty_like(places[:, 0]), torch.empty_like(sums[0, :, 0])
    tile = min(64, 16 * triton.next_power_of_2(tiles))
    shapes = {"width": width, "every": every, "count": count, "block": BLOCK}
    states = states.contiguous()
    _table[(blocks, triton.cdiv(batch * rows, tile))](
        states, table, values, places, sums[0], sums[1], batch * rows, len(table), **shapes, tile=tile, num_warps=4
    )
    _extra[(more, batch)](
        states, extra, known, slots, values, places, sums[0], sums[1], rows, extra.shape[1], len(table), blocks,
        **shapes, tile=fill, num_warps=4,
    )  # fmt: skip
    candidates = triton.next_power_of_2(every * count)
    _merge[(batch * rows,)](
        values, places, sums[0], sums[1], *found, every, count, candidates, triton.next_power_of_2(every), num_warps=4
    )
    best, where, total = found
    return best.view(batch, rows, count), where.view(batch, rows, count).long(), total.view(batch, rows)


@triton.jit
def _product(states, row, real, weights, column, inside, width: tl.constexpr, tile: tl.constexpr, block: tl.constexpr):
    """(tile, block): logits of states with output rows; both are read in pieces."""
    piece: tl.constexpr = 64 if width % 64 == 0 else 16
    found = tl.zeros((tile, block), tl.float32)
    for start in range(0, width, piece):
        at = start + tl.arange(0, piece)
        some = at < width
        left = tl.load(states + row[:, None] * width + at[None, :], mask=real[:, None] & some[None, :], other=0.0)
        right = tl.load(
            weights + column[:, None] * width + at[None, :], mask=inside[:, None] & some[None, :], other=0.0
        )
        found += tl.dot(left, tl.trans(right), input_precision="ieee")
    return tl.where(inside[None, :], found, NOTHING)


@triton.jit
def _keep(
    logits, row, real, first, part, values, places, highest, totals, every, count: tl.constexpr, block: tl.constexpr
):
    """Write the best logits of a block, where they stand, and the sum of its exponentials."""
    high = tl.max(logits, axis=1)
    tl.store(highest + row * every + part, high, mask=real)
    tl.store(totals + row * every + part, tl.sum(tl.exp(logits - high[:, None]), axis=1), mask=real)
    columns = tl.arange(0, block)
    for rank in range(count):
        best = tl.max(logits, axis=1)
        place = tl.min(tl.where(logits == best[:, None], columns[None, :], block), axis=1)
        at = (row * every + part) * count + rank
        tl.store(values + at, best, mask=real)
        tl.store(places + at, first + place, mask=real)
        logits = tl.where(columns[None, :] == place[:, None], NOTHING, logits)


@triton.jit(do_not_specialize=["rows"])
def _table(
    states, table, values, places, highest, totals, rows, tokens,
    width: tl.constexpr, every: tl.constexpr, count: tl.constexpr, block: tl.constexpr, tile: tl.constexpr,
):  # fmt: skip
    part = tl.program_id(0)
    row = tl.program_id(1) * tile + tl.arange(0, tile)
    column = part * block + tl.arange(0, block)
    logits = _product(states, row, row < rows, table, column, column < tokens, width, tile, block)
    _keep(logits, row, row < rows, part * block, part, values, places, highest, totals, every, count, block)


@triton.jit(do_not_specialize=["rows"])
def _extra(
    states, extra, known, slots, values, places, highest, totals, rows, some, tokens, blocks,
    width: tl.constexpr, every: tl.constexpr, count: tl.constexpr, block: tl.constexpr, tile: tl.constexpr,
):  # fmt: skip
    part, text = tl.program_id(0), tl.program_id(1)
    slot = tl.load(slots + text)
    inner = tl.arange(0, tile)
    row = text * rows + inner
    column = part * block + tl.arange(0, block)
    token = tl.load(known + slot * some + column, mask=column < some, other=-1)
    logits = _product(states, row, inner < rows, extra + slot * some * width, column, token >= 0, width, tile, block)
    first = tokens + part * block
    _keep(logits, row, inner < rows, first, blocks + part, values, places, highest, totals, every, count, block)


@triton.jit
def _merge(
    values, places, highest, totals, best, where, total,
    every: tl.constexpr, count: tl.constexpr, candidates: tl.constexpr, parts: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    part = tl.arange(0, parts)
    high = tl.load(highest + row * every + part, mask=part < every, other=NOTHING)
    sums = tl.load(totals + row * every + part, mask=part < every, other=0.0)
    top = tl.max(high, axis=0)
    tl.store(total + row, top + tl.log(tl.sum(sums * tl.exp(high - top), axis=0)))
    at = tl.arange(0, candidates)
    inside = at < every * count
    value = tl.load(values + row * every * count + at, mask=inside, other=NOTHING)
    place = tl.load(places + row * every * count + at, mask=inside, other=0)
    for rank in range(count):
        most = tl.max(value, axis=0)
        chosen = tl.min(tl.where(value == most, at, candidates), axis=0)
        tl.store(best + row * count + rank, most)
        tl.store(where + row * count + rank, tl.sum(tl.where(at == chosen, place, 0), axis=0))
        value = tl.where(at == chosen, NOTHING, value)
