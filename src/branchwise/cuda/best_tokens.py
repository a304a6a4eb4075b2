"""The best tokens of a table after rows of states, as Triton kernels: logits are never in memory.

A program norms the rows of a tile, multiplies them with a block of output rows, keeps the best few of its logits and
the sum of their exponentials, and a second kernel merges what the blocks found. A table of 16,384 rows is 19 MB for a
model of width 576, which an H200 reads in 5 microseconds; softmax and top-k over logits in memory take ten times as
long. The plain way of `draft.head.trees.device` is the truth. Without a CUDA device only tests import this file.
"""

# mypy: disable-error-code="import-untyped, import-not-found, untyped-decorator, no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from branchwise.cuda.head_rows import _norms, _row_piece, _weights
from branchwise.cuda.kernels import _operand

NOTHING = tl.constexpr(-1.0e30)
"""the logit of no token; it is finite, so that differences are numbers"""
BLOCK = 64
"""output rows of a program"""


def best_tokens(
    rows: Tensor, chosen: Tensor, epsilon: float, table: Tensor, extra: Tensor, known: Tensor, slots: Tensor, count: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The best logits after rows[chosen], where they stand, and the logarithm of all exponentials.

    `chosen` is (batch, rows), and of every row the first elements count, as many as the table has. Rows are normed; the
    weights of the norm are in the table. Places below len(table) are rows of the table (tokens, width); behind them
    come the `extra` rows (slots, some, width) of the slot of each text, if `known` (slots, some) says >= 0 for them.
    Returns (batch, rows, count) twice and (batch, rows).
    """
    (batch, per_text), width = chosen.shape, table.shape[1]
    whole = batch * per_text
    blocks, more = triton.cdiv(len(table), BLOCK), triton.cdiv(extra.shape[1], BLOCK)
    every = blocks + more
    values = torch.empty(whole, every, count, device=rows.device)
    places = torch.empty(whole, every, count, device=rows.device, dtype=torch.int32)
    sums = torch.empty(2, whole, every, device=rows.device)
    found = torch.empty_like(values[:, 0]), torch.empty_like(places[:, 0]), torch.empty_like(sums[0, :, 0])
    tile, fill = max(16, min(64, triton.next_power_of_2(whole))), max(16, triton.next_power_of_2(per_text))
    _blocks[(every, max(triton.cdiv(whole, tile), batch))](
        rows, chosen, table, extra, known, slots, values, places, sums[0], sums[1],
        rows.stride(0), whole, per_text, len(table), extra.shape[1], batch, epsilon,
        width=width, every=every, blocks=blocks, count=count, block=BLOCK, tile=tile, fill=fill,
        operand=_operand(table.dtype), num_warps=4, num_stages=4,
    )  # fmt: skip
    candidates = triton.next_power_of_2(every * count)
    _merge[(whole,)](
        values, places, sums[0], sums[1], *found, every, count, candidates, triton.next_power_of_2(every), num_warps=4
    )
    best, where, total = found
    return best.view(batch, per_text, count), where.view(batch, per_text, count), total.view(batch, per_text)


@triton.jit
def _product(
    rows, place, real, epsilon, weights, column, inside, width: tl.constexpr, tile: tl.constexpr, block: tl.constexpr,
    operand: tl.constexpr,
):  # fmt: skip
    """(tile, block): logits of normed rows with output rows; both are read in pieces."""
    piece: tl.constexpr = 64 if width >= 64 else 16
    found, gram = tl.zeros((tile, block), tl.float32), tl.zeros((tile, tile), tl.float32)
    for start in range(0, width, piece):
        at = start + tl.arange(0, piece)
        left = _row_piece(rows, place, real, at, at < width, operand)
        right = _weights(weights, column, inside, at, at < width, width, operand)
        found = tl.dot(left, right, found, input_precision="ieee")
        gram = tl.dot(left, tl.trans(left), gram, input_precision="ieee")
    return tl.where(inside[None, :], found / _norms(gram, epsilon, width, tile)[:, None], NOTHING)


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


@triton.jit(do_not_specialize=["whole", "per_text", "texts"])
def _blocks(
    rows, chosen, table, extra, known, slots, values, places, highest, totals,
    stride_row, whole, per_text, tokens, some, texts, epsilon,
    width: tl.constexpr, every: tl.constexpr, blocks: tl.constexpr, count: tl.constexpr, block: tl.constexpr,
    tile: tl.constexpr, fill: tl.constexpr, operand: tl.constexpr,
):  # fmt: skip
    """A block of the table for a tile of rows, or a block of the tokens of a prompt for the rows of its text."""
    part, group = tl.program_id(0), tl.program_id(1)
    column = tl.arange(0, block)
    if part < blocks:
        row = group * tile + tl.arange(0, tile)
        real = row < whole
        if group * tile < whole:
            column += part * block
            place = tl.load(chosen + row, mask=real, other=0).to(tl.int64) * stride_row
            logits = _product(rows, place, real, epsilon, table, column, column < tokens, width, tile, block, operand)
            _keep(logits, row, real, part * block, part, values, places, highest, totals, every, count, block)
    elif group < texts:
        inner = tl.arange(0, fill)
        row, real = group * per_text + inner, inner < per_text
        column += (part - blocks) * block
        slot = tl.load(slots + group).to(tl.int64)
        token = tl.load(known + slot * some + column, mask=column < some, other=-1)
        place = tl.load(chosen + row, mask=real, other=0).to(tl.int64) * stride_row
        logits = _product(
            rows, place, real, epsilon, extra + slot * some * width, column, token >= 0, width, fill, block, operand
        )
        first = tokens + (part - blocks) * block
        _keep(logits, row, real, first, part, values, places, highest, totals, every, count, block)


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
