"""What products of a few rows with a matrix are made of, in the kernels of layers and of heads.

A norm is no pass of its own. The product behind it takes rows as they are and divides by their size when it is done, by
sums of squares that the kernel which wrote the rows has left, in parts, one for each of its programs.
"""

# mypy: disable-error-code="import-untyped, import-not-found, untyped-decorator, no-untyped-def"

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor


class Summed(NamedTuple):
    """Rows whose sizes are known."""

    states: Tensor
    """(rows, width), which may be part of longer rows"""
    squares: Tensor
    """(rows, parts): of each row the squares of its elements, summed in parts"""

    @classmethod
    def of(cls, states: Tensor) -> Summed:
        """Of rows that come from elsewhere."""
        return cls(states, torch.linalg.vector_norm(states, dim=-1, keepdim=True, dtype=torch.float32).square())

    def part(self, number: int, of: int) -> Summed:
        """Of rows that lie side by side, so many of them, those with this number."""
        return Summed(self.states.chunk(of, dim=1)[number], self.squares.chunk(of, dim=1)[number])


@triton.jit
def asked(squares, place, real, parts: tl.constexpr):
    """(tile, parts): squares of rows that begin at these places; to be asked for before a product, summed behind it."""
    part = tl.arange(0, triton.next_power_of_2(parts))
    return tl.load(squares + place[:, None] + part[None, :], mask=real[:, None] & (part < parts)[None, :], other=0.0)


@triton.jit
def scales(squares, epsilon, width: tl.constexpr):
    """(tile, 1): what rows are multiplied with to be normed."""
    return (1.0 / tl.sqrt(tl.sum(squares, axis=1) / width + epsilon))[:, None]


@triton.jit
def elements(rows, place, real, at, width: tl.constexpr, operand: tl.constexpr):
    """(tile, piece): of rows that begin at these places."""
    places = rows + place[:, None] + at[None, :]
    return tl.load(places, mask=real[:, None] & (at < width)[None, :], other=0.0).to(operand)


@triton.jit
def lines(weight, line, inside, at, width: tl.constexpr, stride: tl.constexpr, operand: tl.constexpr):
    """(piece, lines): part of some lines of a matrix, as a product takes them."""
    places = weight + line[:, None].to(tl.int64) * stride + at[None, :]
    return tl.trans(tl.load(places, mask=inside[:, None] & (at < width)[None, :], other=0.0).to(operand))


@triton.jit
def pair(
    rows, place, real, weight, first, second, inside,
    width: tl.constexpr, stride: tl.constexpr, columns: tl.constexpr, tile: tl.constexpr, piece: tl.constexpr,
    operand: tl.constexpr,
):  # fmt: skip
    """(tile, columns) twice: rows times some lines of a matrix, and times as many others."""
    lower, upper = tl.zeros((tile, columns), tl.float32), tl.zeros((tile, columns), tl.float32)
    for start in range(0, width, piece):
        at = start + tl.arange(0, piece)
        left = elements(rows, place, real, at, width, operand)
        lower = tl.dot(left, lines(weight, first, inside, at, width, stride, operand), lower, input_precision="ieee")
        upper = tl.dot(left, lines(weight, second, inside, at, width, stride, operand), upper, input_precision="ieee")
    return lower, upper


@triton.jit
def apart(
    first, first_place, second, second_place, real, weight, line, other, shift, inside,
    width: tl.constexpr, stride: tl.constexpr, columns: tl.constexpr, tile: tl.constexpr, piece: tl.constexpr,
    operand: tl.constexpr,
):  # fmt: skip
    """(tile, columns) twice: rows times some lines of a matrix, and other rows times other lines, whose first elements
    are left out."""
    found, beside = tl.zeros((tile, columns), tl.float32), tl.zeros((tile, columns), tl.float32)
    for start in range(0, width, piece):
        at = start + tl.arange(0, piece)
        left = elements(first, first_place, real, at, width, operand)
        found = tl.dot(left, lines(weight, line, inside, at, width, stride, operand), found, input_precision="ieee")
        right = elements(second, second_place, real, at, width, operand)
        theirs = lines(weight + shift, other, inside, at, width, stride, operand)
        beside = tl.dot(right, theirs, beside, input_precision="ieee")
    return found, beside
