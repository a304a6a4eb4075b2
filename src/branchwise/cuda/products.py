"""Building blocks for products of a few rows with a matrix, in the kernels of layers and of heads.

A norm is not a separate kernel. The product after it takes rows that are not normed yet and scales its result at the
end, by sums of squares that the kernel which wrote the rows has left, in parts, one for each of its programs.
"""

# mypy: disable-error-code="import-untyped, import-not-found, untyped-decorator, no-untyped-def"

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from branchwise.cuda.early import begin, fetch
from branchwise.cuda.kernels import shared_memory


class Summed(NamedTuple):
    """Rows with the sums of their squares."""

    states: Tensor
    """(rows, width), which may be part of longer rows"""
    squares: Tensor
    """(rows, parts): the squares of the elements of each row, summed in parts"""

    @classmethod
    def of(cls, states: Tensor) -> Summed:
        """The sums for rows that no kernel of ours has written."""
        return cls(states, torch.linalg.vector_norm(states, dim=-1, keepdim=True, dtype=torch.float32).square())

    def part(self, number: int, of: int) -> Summed:
        """Part `number` of the `of` rows that each line holds side by side."""
        return Summed(self.states.chunk(of, dim=1)[number], self.squares.chunk(of, dim=1)[number])


MOST_SLICES = 8


def slices_of(inputs: int, most: int = MOST_SLICES) -> int:
    """The number of slices of this many inputs, in a product of few rows. Each warp has its own; few warps start
    sooner."""
    return min(most, max(2, int(triton.next_power_of_2(inputs)) // 512))


def piece_of(inputs: int) -> int:
    """The number of inputs of a slice that are read at a time."""
    return min(64, max(16, int(triton.next_power_of_2(inputs))))


SPARE = 4096
"""bytes of shared memory for sums of rows"""


def stages_of(device: torch.device, stage: int, most: int) -> int:
    """How many stages of a loop, each of `stage` bytes, are on their way at a time: as many as shared memory holds."""
    return max(1, min(most, (shared_memory(device) - SPARE) // stage))


@triton.jit
def asked(squares, place, real, parts: tl.constexpr):
    """(tile, parts): the squares of rows that begin at these places. They are loaded before a product and summed after
    it."""
    part = tl.arange(0, triton.next_power_of_2(parts))
    return tl.load(squares + place[:, None] + part[None, :], mask=real[:, None] & (part < parts)[None, :], other=0.0)


@triton.jit
def scales(squares, epsilon, width: tl.constexpr):
    """(tile, 1): the factors that norm rows."""
    return (1.0 / tl.sqrt(tl.sum(squares, axis=1) / width + epsilon))[:, None]


@triton.jit
def inputs_from(start, slices: tl.constexpr, piece: tl.constexpr):
    """(piece,), or (slices, piece): the indices of inputs that are read at a time. Each warp of a program multiplies a
    slice of its own, because a product of few rows waits for memory and for its own running sums, never for
    arithmetic."""
    at = start + tl.arange(0, piece)
    if slices > 1:
        at = start + tl.arange(0, slices)[:, None] * piece + tl.arange(0, piece)[None, :]
    return at


@triton.jit
def elements(rows, place, real, at, width: tl.constexpr, operand: tl.constexpr):
    """(tile, piece), or (slices, tile, piece): elements of rows that begin at these places."""
    if len(at.shape) == 1:
        places, mask = place[:, None] + at[None, :], real[:, None] & (at < width)[None, :]
    else:
        places, mask = place[None, :, None] + at[:, None, :], real[None, :, None] & (at < width)[:, None, :]
    return tl.load(rows + places, mask=mask, other=0.0).to(operand)


@triton.jit
def lines(weight, line, inside, at, width: tl.constexpr, stride: tl.constexpr, operand: tl.constexpr):
    """(piece, lines), or (slices, piece, lines): part of some lines of a matrix, as a product takes them."""
    first = line.to(tl.int64) * stride
    if len(at.shape) == 1:
        places, mask = first[:, None] + at[None, :], inside[:, None] & (at < width)[None, :]
    else:
        places, mask = first[None, :, None] + at[:, None, :], inside[None, :, None] & (at < width)[:, None, :]
    return turned(tl.load(weight + places, mask=mask, other=0.0).to(operand))


@triton.jit
def turned(part):
    """The transposed part, slice by slice."""
    return tl.trans(part) if len(part.shape) == 2 else tl.permute(part, (0, 2, 1))


@triton.jit
def nothing(tile: tl.constexpr, columns: tl.constexpr, slices: tl.constexpr):
    """Sums of zero."""
    total = tl.zeros((tile, columns), tl.float32)
    if slices > 1:
        total = tl.zeros((slices, tile, columns), tl.float32)
    return total


@triton.jit
def summed_up(total):
    """(tile, columns): the sum over the slices."""
    if len(total.shape) == 3:
        total = tl.sum(total, axis=0)
    return total


@triton.jit
def product(
    rows, place, real, weight, line, inside,
    width: tl.constexpr, stride: tl.constexpr, columns: tl.constexpr, tile: tl.constexpr, slices: tl.constexpr,
    piece: tl.constexpr, operand: tl.constexpr,
):  # fmt: skip
    """(tile, columns): rows times some lines of a matrix."""
    total = nothing(tile, columns, slices)
    for start in range(0, width, slices * piece):
        at = inputs_from(start, slices, piece)
        left = elements(rows, place, real, at, width, operand)
        total = tl.dot(left, lines(weight, line, inside, at, width, stride, operand), total, input_precision="ieee")
    return summed_up(total)


@triton.jit
def pair(
    rows, place, real, weight, first, second, inside,
    width: tl.constexpr, stride: tl.constexpr, columns: tl.constexpr, tile: tl.constexpr, slices: tl.constexpr,
    piece: tl.constexpr, operand: tl.constexpr,
):  # fmt: skip
    """(tile, columns) twice: rows times some lines of a matrix, and times as many others."""
    lower, upper = nothing(tile, columns, slices), nothing(tile, columns, slices)
    for start in range(0, width, slices * piece):
        at = inputs_from(start, slices, piece)
        left = elements(rows, place, real, at, width, operand)
        lower = tl.dot(left, lines(weight, first, inside, at, width, stride, operand), lower, input_precision="ieee")
        upper = tl.dot(left, lines(weight, second, inside, at, width, stride, operand), upper, input_precision="ieee")
    return summed_up(lower), summed_up(upper)


@triton.jit
def apart(
    first, first_place, second, second_place, real, weight, line, other, shift, inside,
    width: tl.constexpr, stride: tl.constexpr, columns: tl.constexpr, tile: tl.constexpr, slices: tl.constexpr,
    piece: tl.constexpr, operand: tl.constexpr,
):  # fmt: skip
    """(tile, columns) twice: rows times some lines of a matrix, and other rows times other lines, whose first elements
    are left out."""
    found, beside = nothing(tile, columns, slices), nothing(tile, columns, slices)
    for start in range(0, width, slices * piece):
        at = inputs_from(start, slices, piece)
        left = elements(first, first_place, real, at, width, operand)
        found = tl.dot(left, lines(weight, line, inside, at, width, stride, operand), found, input_precision="ieee")
        right = elements(second, second_place, real, at, width, operand)
        theirs = lines(weight + shift, other, inside, at, width, stride, operand)
        beside = tl.dot(right, theirs, beside, input_precision="ieee")
    return summed_up(found), summed_up(beside)


@triton.jit
def made_part(product, row, real, column, inside, outputs: tl.constexpr):
    """(tile, columns): part of a finished product."""
    places = product + row[:, None].to(tl.int64) * outputs + column[None, :]
    return tl.load(places, mask=real[:, None] & inside[None, :], other=0.0).to(tl.float32)


@triton.jit
def spread(
    lower, upper, head, row, slot, cell, mask, element, query, keys, values, stride_slot, stride_head, stride_row,
    capacity, heads: tl.constexpr, kv_heads: tl.constexpr, head_width: tl.constexpr,
):  # fmt: skip
    """Write both halves of a head (tile, elements): queries to consecutive rows, keys and values to these cells of the
    cache. Heads are numbered queries first, then keys, then values."""
    half: tl.constexpr = head_width // 2
    if head < heads:
        goal = (row[:, None].to(tl.int64) * heads + head) * head_width + element[None, :]
        tl.store(query + goal, lower.to(query.dtype.element_ty), mask=mask)
        tl.store(query + goal + half, upper.to(query.dtype.element_ty), mask=mask)
    else:
        mask &= ((slot >= 0) & (cell < capacity))[:, None]
        kind, kept = (head - heads) // kv_heads, (head - heads) % kv_heads
        place = slot * stride_slot + kept * stride_head + cell.to(tl.int64) * stride_row
        goal = place[:, None] + element[None, :]
        if kind == 0:
            tl.store(keys + goal, lower.to(keys.dtype.element_ty), mask=mask)
            tl.store(keys + goal + half, upper.to(keys.dtype.element_ty), mask=mask)
        else:
            tl.store(values + goal, lower.to(values.dtype.element_ty), mask=mask)
            tl.store(values + goal + half, upper.to(values.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["rows"])
def _gate_up(
    weighted, squares, factor, out, rows, inner, epsilon,
    inputs: tl.constexpr, columns: tl.constexpr, made: tl.constexpr, parts: tl.constexpr, tile: tl.constexpr,
    slices: tl.constexpr, piece: tl.constexpr, operand: tl.constexpr, early: tl.constexpr,
):  # fmt: skip
    """The gated inner values of an MLP. `factor` is the matrix, or, if `made`, the finished product with it."""
    column = tl.program_id(0) * columns + tl.arange(0, columns)
    row = tl.program_id(1) * tile + tl.arange(0, tile)
    real, inside = row < rows, column < inner
    if not made:
        fetch(factor, column, 2 * inner, inputs, early)
        fetch(factor, column + inner, 2 * inner, inputs, early)
    begin(early)
    summed, place = asked(squares, row * parts, real, parts), row.to(tl.int64) * inputs
    if made:
        gate = made_part(factor, row, real, column, inside, 2 * inner)
        up = made_part(factor, row, real, column + inner, inside, 2 * inner)
    else:
        gate, up = pair(
            weighted, place, real, factor, column, column + inner, inside, inputs, inputs, columns, tile, slices, piece,
            operand,
        )  # fmt: skip
    scale = scales(summed, epsilon, inputs)
    gate, up = gate * scale, up * scale
    found = gate / (1 + tl.exp(-gate)) * up
    goal = out + row[:, None].to(tl.int64) * inner + column[None, :]
    tl.store(goal, found.to(out.dtype.element_ty), mask=real[:, None] & inside[None, :])
