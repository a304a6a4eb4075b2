"""The decoder layer of a model over a few rows, as Triton kernels.

Between the products of a layer there are norms, rotary positions, the KV cache, a gate and two residuals. Here each of
them is fused into the product before or after it, so that a layer is four kernels besides its attention. A norm is
split in two: the kernel that writes rows multiplies them with the weights of the norm that reads them, and sums their
squares in parts; the product after the norm divides its result by the root of these sums. A kernel loads whatever it
needs at its end before its product. Products with large matrices, or of many rows, are left to the library, and a
kernel does the rest after them. Without a CUDA device only tests import this file.
"""

# mypy: disable-error-code="import-untyped, import-not-found, untyped-decorator, no-untyped-def"

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from branchwise.cuda.early import begin, early, fetch
from branchwise.cuda.kernels import _operand
from branchwise.cuda.products import (
    _gate_up,
    asked,
    made_part,
    pair,
    piece_of,
    product,
    scales,
    slices_of,
    spread,
    stages_of,
)

MOST_EARLY = 256
"""the most rows of kernels that start before the previous kernel is over; over more rows, each one fills the device"""
FEW_ROWS = 128
LARGE, MANY = 24 << 20, 512
"""the bytes of a matrix, and the number of rows, from which on a library multiplies: on an H200 cuBLAS takes 32
microseconds for eight rows and the last matrix of a layer of Llama 3 8B, and our kernel 52 (docs/log.md)"""


@dataclass(frozen=True)
class Tiling:
    """How a product is divided into programs. The choice changes the result only by rounding."""

    tile: int
    """the rows of a program"""
    columns: int
    """the outputs of a program"""
    piece: int
    """the inputs of a slice that are read at a time"""
    warps: int = 4
    stages: int = 4
    slices: int = 1
    """the number of slices into which the inputs are divided, one for each warp"""


def tiling(rows: int, inputs: int, outputs: int, size: int, *, pair: bool = False) -> Tiling:
    """The tiling of a product whose elements have `size` bytes; with `pair` a program computes two outputs for each
    column. Measured on an H200 with the layers of three small models, one product after the other: products of few rows
    are bound by the bytes in flight and by the number of programs that load them, those of more rows by repeated
    reads."""
    wide, piece = outputs > inputs, piece_of(inputs)
    if size > 2:
        return Tiling(max(16, min(64, triton.next_power_of_2(rows))), 16, min(piece, 32), stages=2)
    if rows <= 16 or (rows <= 32 and not wide):
        slices = slices_of(inputs, most=8 if rows <= 16 else 4)
        tile = 32 if rows > 16 and pair and slices > 2 else 16
        return Tiling(tile, 8 if pair or outputs <= 1024 else 16, piece, warps=slices, stages=5, slices=slices)
    if rows <= 32:
        return Tiling(32, 16, piece, warps=2, stages=6)
    if rows <= 64 and outputs < 768:  # the programs of larger tiles would be too few
        return Tiling(32, 16, piece, warps=2 if pair else 4, stages=6)
    if rows <= FEW_ROWS:
        long = inputs >= 1536 and not wide
        return Tiling(64, 16, 2 * piece if long else piece, stages=4 if long else 6)
    return Tiling(64, 32, piece if wide or pair else 2 * piece)


BEHIND = Tiling(16, 64, 16, stages=1)
"""the tiling of a kernel that follows a product of the library"""


class Rows(NamedTuple):
    """Rows (rows, width) as a layer reads them."""

    states: Tensor
    weighted: Tensor
    """the rows times the weights of the norm that reads them"""
    squares: Tensor
    """(rows, parts): the squares of the elements of each row, summed in parts"""

    @classmethod
    def of(cls, states: Tensor, norm: Tensor) -> Rows:
        """The form for rows that no kernel of ours has written."""
        rows, width = states.shape
        squares = states.float().square().view(rows, parts_of(rows, width, states.element_size()), -1)
        return cls(states, states * norm, squares.sum(dim=-1))


def parts_of(rows: int, width: int, size: int) -> int:
    """The number of parts in which the squares of rows that no kernel of ours has written are summed: as many as `add`
    makes, so that one kernel reads both."""
    columns = tiling(rows, width, width, size).columns if rows <= MANY else BEHIND.columns
    return width // columns if width % columns == 0 else 1


class Turn(NamedTuple):
    """Cosines and sines of positions, (batch or 1, nodes, head width) each."""

    cos: Tensor
    sin: Tensor


Norm = tuple[Tensor, float]
"""the weights of a norm and its epsilon"""


class Goal(NamedTuple):
    """Where the keys and values of a pass are written: a layer of the cache, (slots, heads, rows, width) each, and for
    every text its slot, -1 for none, and the row of its first node."""

    keys: Tensor
    values: Tensor
    slots: Tensor
    starts: Tensor


def read(
    rows: Rows,
    epsilon: float,
    weight: Tensor,
    bias: Tensor | None,
    turn: Turn | None,
    goal: Goal,
    *,
    nodes: int,
    head_norms: tuple[Norm, Norm] | None = None,
) -> Tensor:
    """(batch, nodes, heads, head width): the queries of normed rows; their keys and values are written to the cache.
    Queries and keys may be normed head by head, and are rotated only if a `Turn` is given."""
    (_, weighted, squares), (keys, values, slots, starts) = rows, goal
    cos, sin = turn or (weighted.view(1, *weighted.shape),) * 2
    count, width = weighted.shape
    kv_heads, head_width = keys.shape[1], keys.shape[3]
    heads, half = weight.shape[0] // head_width - 2 * kv_heads, head_width // 2
    assert keys.shape == values.shape, "keys and values do not lie alike"
    assert keys.stride() == values.stride(), "keys and values do not lie alike"
    assert cos.stride() == sin.stride(), "cosines and sines do not lie alike"
    assert cos.stride(2) == 1, "cosines do not lie side by side"
    assert turn is None or cos.shape[2] == keys.shape[3], "only part of a head is turned"
    product = _by_library(weighted, weight)
    alone = tiling(count, width, weight.shape[0] // 2, weighted.element_size(), pair=True)
    tiles = alone if product is None else BEHIND
    whole = triton.next_power_of_2(half)
    chunk = max(8, whole if head_norms else min(tiles.columns, whole))
    (query_norm, head_epsilon), (key_norm, _) = head_norms or ((weight, 0.0), (weight, 0.0))
    query = weighted.new_empty(count // nodes, nodes, heads, head_width)
    _read[((heads + 2 * kv_heads) * triton.cdiv(half, chunk), triton.cdiv(count, tiles.tile))](
        weighted, squares, weight if product is None else product, weight if bias is None else bias, query_norm,
        key_norm, cos, sin, query, keys, values, slots, starts, cos.stride(0) if len(cos) > 1 else 0, cos.stride(1),
        *keys.stride()[:3], count, nodes, keys.shape[2], epsilon, head_epsilon,
        inputs=width, heads=heads, kv_heads=kv_heads, head_width=head_width, chunk=chunk, biased=bias is not None,
        normed=head_norms is not None, turned=turn is not None, made=product is not None, parts=squares.shape[1],
        **_shape(tiles, weighted, 2 * chunk),
    )  # fmt: skip
    return query


def gate_up(rows: Rows, epsilon: float, weight: Tensor) -> Tensor:
    """(rows, MLP width): the gated inner values of the MLP. In `weight` the lines of the gate come first."""
    count, inner = len(rows.states), weight.shape[0] // 2
    out, product = rows.states.new_empty(count, inner), _by_library(rows.weighted, weight)
    alone = tiling(count, weight.shape[1], inner, out.element_size(), pair=True)
    tiles = alone if product is None else BEHIND
    _gate_up[(triton.cdiv(inner, tiles.columns), triton.cdiv(count, tiles.tile))](
        rows.weighted, rows.squares, weight if product is None else product, out, count, inner, epsilon,
        inputs=weight.shape[1], columns=tiles.columns, made=product is not None, parts=rows.squares.shape[1],
        **_shape(tiles, rows.weighted, 2 * tiles.columns),
    )  # fmt: skip
    return out


def add(inputs: Tensor, weight: Tensor, bias: Tensor | None, states: Tensor, norm: Tensor) -> Rows:
    """The states (rows, width) plus the product of the inputs (rows, some) with a matrix, in the form that a norm with
    these weights reads."""
    (count, width), product = states.shape, _by_library(inputs, weight)
    tiles = tiling(count, weight.shape[1], width, states.element_size()) if product is None else BEHIND
    parts = triton.cdiv(width, tiles.columns)
    out, weighted = torch.empty_like(states), torch.empty_like(states)
    squares = torch.empty(count, parts, device=states.device)
    _add[(parts, triton.cdiv(count, tiles.tile))](
        inputs, weight if product is None else product, weight if bias is None else bias, norm, states, out, weighted,
        squares, count, width,
        inputs=weight.shape[1], columns=tiles.columns, biased=bias is not None, made=product is not None, parts=parts,
        **_shape(tiles, states, tiles.columns),
    )  # fmt: skip
    return Rows(out, weighted, squares)


def _by_library(rows: Tensor, weight: Tensor) -> Tensor | None:
    """The product of rows with a matrix by the library, if that is faster than the kernel; else None."""
    large = weight.numel() * weight.element_size() >= LARGE or len(rows) > MANY
    return functional.linear(rows, weight) if large else None


def _shape(tiles: Tiling, rows: Tensor, outputs: int) -> dict[str, object]:
    """The launch options of a program with this many outputs. Loads in flight must fit into shared memory."""
    stage = (tiles.tile + outputs) * tiles.slices * tiles.piece * rows.element_size()
    return {
        "tile": tiles.tile,
        "slices": tiles.slices,
        "piece": tiles.piece,
        "operand": _operand(rows.dtype),
        "num_warps": tiles.warps,
        "num_stages": stages_of(rows.device, stage, tiles.stages),
        **(early(rows.device) if len(rows) <= MOST_EARLY else {"early": False}),
    }


@triton.jit(do_not_specialize=["rows", "nodes", "capacity"])
def _read(
    weighted, squares, factor, bias, query_norm, key_norm, cos, sin, query, keys, values, slots, starts,
    stride_text, stride_node, stride_slot, stride_head, stride_row, rows, nodes, capacity, epsilon, head_epsilon,
    inputs: tl.constexpr, heads: tl.constexpr, kv_heads: tl.constexpr, head_width: tl.constexpr, chunk: tl.constexpr,
    biased: tl.constexpr, normed: tl.constexpr, turned: tl.constexpr, made: tl.constexpr, parts: tl.constexpr,
    tile: tl.constexpr, slices: tl.constexpr, piece: tl.constexpr, operand: tl.constexpr, early: tl.constexpr,
):  # fmt: skip
    """Part of the product for one head: the matching elements of both halves, which rotary positions combine. `factor`
    is the matrix, or, if `made`, the finished product."""
    half: tl.constexpr = head_width // 2
    chunks: tl.constexpr = (half + chunk - 1) // chunk
    every: tl.constexpr = (heads + 2 * kv_heads) * head_width
    head = tl.program_id(0) // chunks
    row = tl.program_id(1) * tile + tl.arange(0, tile)
    real = row < rows
    element = tl.program_id(0) % chunks * chunk + tl.arange(0, chunk)
    inside, line = element < half, head * head_width + element
    if not made:
        fetch(factor, line, every, inputs, early)
        fetch(factor, line + half, every, inputs, early)
    begin(early)
    text, node, mask = row // nodes, row % nodes, real[:, None] & inside[None, :]
    summed = asked(squares, row * parts, real, parts)
    if turned:
        at = (text * stride_text + node * stride_node)[:, None] + element[None, :]
        first, second = tl.load(cos + at, mask=mask, other=0.0), tl.load(cos + at + half, mask=mask, other=0.0)
        third, fourth = tl.load(sin + at, mask=mask, other=0.0), tl.load(sin + at + half, mask=mask, other=0.0)
    slot = tl.load(slots + text, mask=real, other=-1).to(tl.int64)
    cell = tl.load(starts + text, mask=real, other=0).to(tl.int64) + node
    if made:
        lower = made_part(factor, row, real, line, inside, every)
        upper = made_part(factor, row, real, line + half, inside, every)
    else:
        lower, upper = pair(
            weighted, row.to(tl.int64) * inputs, real, factor, line, line + half, inside, inputs, inputs, chunk, tile,
            slices, piece, operand,
        )  # fmt: skip
    scale = scales(summed, epsilon, inputs)
    lower, upper = lower * scale, upper * scale
    if biased:
        lower += tl.load(bias + line, mask=inside, other=0.0).to(tl.float32)[None, :]
        upper += tl.load(bias + line + half, mask=inside, other=0.0).to(tl.float32)[None, :]
    if head < heads + kv_heads:  # queries and keys; values have no positions
        if normed:
            whole = tl.sum(tl.where(inside[None, :], lower * lower + upper * upper, 0.0), axis=1)
            scale = (1.0 / tl.sqrt(whole / head_width + head_epsilon))[:, None]
            if head < heads:
                first_norm = tl.load(query_norm + element, mask=inside, other=0.0)
                second_norm = tl.load(query_norm + element + half, mask=inside, other=0.0)
            else:
                first_norm = tl.load(key_norm + element, mask=inside, other=0.0)
                second_norm = tl.load(key_norm + element + half, mask=inside, other=0.0)
            lower, upper = lower * scale * first_norm.to(tl.float32), upper * scale * second_norm.to(tl.float32)
        if turned:
            lower, upper = (
                lower * first.to(tl.float32) - upper * third.to(tl.float32),
                upper * second.to(tl.float32) + lower * fourth.to(tl.float32),
            )
    spread(
        lower, upper, head, row, slot, cell, mask, element, query, keys, values, stride_slot, stride_head, stride_row,
        capacity, heads, kv_heads, head_width,
    )  # fmt: skip


@triton.jit(do_not_specialize=["rows"])
def _add(
    left, factor, bias, norm, states, out, weighted, squares, rows, width,
    inputs: tl.constexpr, columns: tl.constexpr, biased: tl.constexpr, made: tl.constexpr, parts: tl.constexpr,
    tile: tl.constexpr, slices: tl.constexpr, piece: tl.constexpr, operand: tl.constexpr, early: tl.constexpr,
):  # fmt: skip
    column = tl.program_id(0) * columns + tl.arange(0, columns)
    row = tl.program_id(1) * tile + tl.arange(0, tile)
    real, inside = row < rows, column < width
    if not made:
        fetch(factor, column, width, inputs, early)
    begin(early)
    place, mask = row[:, None].to(tl.int64) * width + column[None, :], real[:, None] & inside[None, :]
    before = tl.load(states + place, mask=mask, other=0.0)
    if made:
        total = made_part(factor, row, real, column, inside, width)
    else:
        total = product(
            left, row.to(tl.int64) * inputs, real, factor, column, inside, inputs, inputs, columns, tile, slices, piece,
            operand,
        )  # fmt: skip
    if biased:
        total += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)[None, :]
    found = (total + before.to(tl.float32)).to(out.dtype.element_ty)
    tl.store(out + place, found, mask=mask)
    kept = tl.where(mask, found.to(tl.float32), 0.0)
    weights = tl.load(norm + column, mask=inside, other=0.0).to(tl.float32)[None, :]
    tl.store(weighted + place, (kept * weights).to(out.dtype.element_ty), mask=mask)
    tl.store(squares + row * parts + tl.program_id(0), tl.sum(kept * kept, axis=1), mask=real)
