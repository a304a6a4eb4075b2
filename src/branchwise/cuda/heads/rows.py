"""The decoder layer of a head over a few rows, as Triton kernels.

A level of a tree is a handful of rows, so as torch operations most of its time would be the gaps between kernels. Here
a layer is four products, each fused with the operations before it (norms, gathering of rows) and after it (rotary
positions, KV cache, gate of the MLP, residual). FSPAD's gate of features is three more. Matrices that read normed rows
have the weights of the norm multiplied in, and rows come with the sums of their squares (`cuda.products`). All weights
of a head fit into the L2 cache of the device. The plain `draft.head.network` is the reference. Without a CUDA device
only tests import this file.
"""

# mypy: disable-error-code="import-untyped, import-not-found, untyped-decorator, no-untyped-def"

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from branchwise.cuda.early import begin, early, fetch
from branchwise.cuda.kernels import _operand
from branchwise.cuda.products import (
    Summed,
    _gate_up,
    apart,
    asked,
    elements,
    inputs_from,
    lines,
    nothing,
    pair,
    piece_of,
    product,
    scales,
    slices_of,
    spread,
    stages_of,
    summed_up,
    turned,
)

MOST_TAPS = 4
"""the most layers of the target that `join` reads"""
COLUMNS = 8
"""the outputs of a program"""
FEWEST_STAGES = 3
"""the number of stages below which a loop would wait for memory"""
FEW = 256
"""the most rows for which a tile has sixteen rows: reading weights again is cheap, as they come from the L2 cache"""


class Embedded(NamedTuple):
    """The tokens of rows and the embeddings that the rows read."""

    table: Tensor
    """(vocabulary, width)"""
    squares: Tensor
    """(vocabulary, 1): the sums of squares of the embeddings"""
    tokens: Tensor
    """(batch, rows)"""


def join(hidden: Sequence[Tensor], weight: Tensor, nodes: Tensor, epsilon: float) -> Summed:
    """(rows, width): the features of `nodes` (batch, steps) of trees, joined from the target's hidden states (batch,
    nodes, width) of several layers."""
    width, (batch, steps) = weight.shape[0], nodes.shape
    strides = {state.stride() for state in hidden}
    assert len(strides) == 1, "hidden states must lie alike"
    assert len(hidden) <= MOST_TAPS
    out = _summed(weight, batch * steps, width)
    taps = [*hidden, *[hidden[-1]] * (MOST_TAPS - len(hidden))]
    _join[_grid(width, batch * steps)](
        *taps, weight, nodes, *out, *hidden[0].stride()[:2], nodes.stride(0), batch * steps, steps, epsilon,
        taps=len(hidden), width=width, columns=COLUMNS, parts=out.squares.shape[1],
        **_shape(weight, batch * steps, width, COLUMNS),
    )  # fmt: skip
    return out


def mix(states: Summed, chosen: Tensor, embedded: Embedded, weight: Tensor, bias: Tensor, epsilon: float) -> Summed:
    """(rows, width): the product of one matrix with the normed embeddings of rows beside states[chosen]."""
    rows, width = chosen.numel(), weight.shape[0]
    out = _summed(weight, rows, width)
    _mix[_grid(width, rows)](
        states.states, chosen, *embedded, weight, bias, *out, states.states.stride(0), embedded.table.stride(0), rows,
        epsilon,
        width=width, columns=COLUMNS, parts=out.squares.shape[1], **_shape(weight, rows, width, 2 * COLUMNS, kinds=2),
    )  # fmt: skip
    return out


def select(mixed: Summed, embedded: Embedded, weight: Tensor, epsilon: float) -> Tensor:
    """(rows, gate width): the gate of features, by which normed embeddings select from normed mixed rows (rows, width).
    In `weight` the lines that select come first, then those that are selected from."""
    (rows, width), inner = mixed.states.shape, weight.shape[0] // 2
    out = weight.new_empty(rows, inner)
    _select[_grid(inner, rows)](
        *mixed, *embedded, weight, out, embedded.table.stride(0), rows, inner, epsilon,
        width=width, columns=COLUMNS, parts=mixed.squares.shape[1], **_shape(weight, rows, width, 2 * COLUMNS, kinds=2),
    )  # fmt: skip
    return out


def read(
    rows: Summed,
    chosen: Tensor,
    embedded: Embedded | None,
    weight: Tensor,
    frequencies: Tensor,
    cache: tuple[Tensor, Tensor],
    slots: Tensor,
    lengths: Tensor,
    *,
    cell: int,
    position: int,
    advance: int,
    heads: int,
    epsilon: float,
) -> Tensor:
    """(batch, rows, heads, head width): the queries of rows; their keys and values are written to the cache.

    A row reads rows[chosen] and the embedding of its token; `chosen` is (batch, rows). Row i of a text with `length`
    committed rows goes to cell length + `cell` + i of its slot, at position length + `position` + i * `advance`.
    """
    keys, values = cache
    batch, count = chosen.shape
    kv_heads, head_width = keys.shape[1], keys.shape[3]
    width = weight.shape[1] // (2 if embedded else 1)
    query = weight.new_empty(batch, count, heads, head_width)
    table, sizes, tokens = embedded or (*rows, chosen)
    chunks = triton.cdiv(head_width // 2, COLUMNS)
    _read[((heads + 2 * kv_heads) * chunks, triton.cdiv(batch * count, _tile(batch * count)))](
        *rows, chosen, table, sizes, tokens, weight, frequencies, query, keys, values, slots, lengths,
        rows.states.stride(0), rows.squares.stride(0), table.stride(0), *keys.stride()[:3], batch * count, count,
        keys.shape[2], cell, position, advance, epsilon,
        paired=embedded is not None, width=width, heads=heads, kv_heads=kv_heads, head_width=head_width,
        chunk=COLUMNS, parts=rows.squares.shape[1], **_shape(weight, batch * count, width, 2 * COLUMNS),
    )  # fmt: skip
    return query


def project(found: Tensor, weight: Tensor, states: Tensor, chosen: Tensor) -> Summed:
    """(rows, width): states[chosen] plus the output matrix times the result of attention, `found` (rows, inputs)."""
    return _added(found, weight, states, chosen)


def gate_up(rows: Summed, weight: Tensor, epsilon: float) -> Tensor:
    """(rows, MLP width): the gated inner values of the MLP."""
    (count, width), inner = rows.states.shape, weight.shape[0] // 2
    out = weight.new_empty(count, inner)
    _gate_up[_grid(inner, count)](
        *rows, weight, out, count, inner, epsilon,
        inputs=width, columns=COLUMNS, made=False, parts=rows.squares.shape[1],
        **_shape(weight, count, width, 2 * COLUMNS),
    )  # fmt: skip
    return out


def down(inner: Tensor, weight: Tensor, states: Tensor) -> Summed:
    """(rows, outputs * width): the states plus what the MLP adds to each copy of them."""
    return _added(inner, weight, states, None)


def _added(inputs: Tensor, weight: Tensor, states: Tensor, chosen: Tensor | None) -> Summed:
    rows, width = len(inputs), states.shape[1]
    out = _summed(weight, rows, width, weight.shape[0] // width)
    _add[(out.squares.shape[1], triton.cdiv(rows, _tile(rows)))](
        inputs, weight, states, states if chosen is None else chosen, *out, states.stride(0), rows,
        inputs=inputs.shape[1], width=width, indexed=chosen is not None, columns=COLUMNS, parts=out.squares.shape[1],
        **_shape(weight, rows, inputs.shape[1], COLUMNS),
    )  # fmt: skip
    return out


def _summed(weight: Tensor, rows: int, width: int, outputs: int = 1) -> Summed:
    """Uninitialised rows of width `outputs` * `width`, with their sums of squares."""
    squares = torch.empty(rows, outputs * triton.cdiv(width, COLUMNS), device=weight.device)
    return Summed(weight.new_empty(rows, outputs * width), squares)


def _grid(outputs: int, rows: int) -> tuple[int, int]:
    return triton.cdiv(outputs, COLUMNS), triton.cdiv(rows, _tile(rows))


def _tile(rows: int) -> int:
    """The number of rows of a program."""
    return 16 if rows <= FEW else 64


def _shape(weight: Tensor, rows: int, inputs: int, outputs: int, kinds: int = 1) -> dict[str, object]:
    """How to launch a program that multiplies rows, of one kind or of two, with `outputs` lines of a matrix. Shared
    memory holds the loads in flight: if it is small there are fewer slices, so that there are enough stages."""
    tile, size = _tile(rows), weight.element_size()
    slices = slices_of(inputs) if rows <= FEW and size == 2 else 1
    while True:
        piece, most = piece_of(inputs) * (1 if slices > 1 else 2), 5 if slices > 1 else 4
        stages = stages_of(weight.device, (kinds * tile + outputs) * slices * piece * size, most)
        if stages >= FEWEST_STAGES or slices <= 2:
            break
        slices //= 2
    return {
        "tile": tile,
        "slices": slices,
        "piece": piece,
        "operand": _operand(weight.dtype),
        "num_warps": slices if slices > 1 else 4,
        "num_stages": stages,
        **early(weight.device),
    }


@triton.jit
def _norms(gram, epsilon, width: tl.constexpr, tile: tl.constexpr):
    """(tile,): the divisors of the norms of rows without sums of squares, from the products of rows with each other
    (tile, tile), which are computed beside the products with weights."""
    row, column = tl.arange(0, tile)[:, None], tl.arange(0, tile)[None, :]
    return tl.sqrt(tl.sum(tl.where(row == column, gram, 0.0), axis=1) / width + epsilon)


@triton.jit
def _write(total, out, squares, row, real, column, inside, width: tl.constexpr, parts: tl.constexpr):
    """Write a part of rows, and the sums of its squares."""
    found, mask = total.to(out.dtype.element_ty), real[:, None] & inside[None, :]
    tl.store(out + row[:, None].to(tl.int64) * width + column[None, :], found, mask=mask)
    kept = tl.where(mask, found.to(tl.float32), 0.0)
    tl.store(squares + row * parts + tl.program_id(0), tl.sum(kept * kept, axis=1), mask=real)


@triton.jit(do_not_specialize=["stride_path", "rows", "steps"])
def _join(
    first, second, third, fourth, weight, nodes, out, squares,
    stride_batch, stride_node, stride_path, rows, steps, epsilon,
    taps: tl.constexpr, width: tl.constexpr, columns: tl.constexpr, parts: tl.constexpr, tile: tl.constexpr,
    slices: tl.constexpr, piece: tl.constexpr, operand: tl.constexpr, early: tl.constexpr,
):  # fmt: skip
    column = tl.program_id(0) * columns + tl.arange(0, columns)
    row = tl.program_id(1) * tile + tl.arange(0, tile)
    real, inside = row < rows, column < width
    fetch(weight, column, width, taps * width, early)
    begin(early)
    node = tl.load(nodes + row // steps * stride_path + row % steps, mask=real, other=0)
    node = tl.maximum(node, 0).to(tl.int64)  # rows of padding are never read
    place = (row // steps).to(tl.int64) * stride_batch + node * stride_node
    total = tl.zeros((tile, columns), tl.float32)
    for tap in tl.static_range(taps):
        if tap == 0:
            states = first
        elif tap == 1:
            states = second
        elif tap == 2:
            states = third
        else:
            states = fourth
        part, gram = nothing(tile, columns, slices), nothing(tile, tile, slices)
        for start in range(0, width, slices * piece):
            at = inputs_from(start, slices, piece)
            left = elements(states, place, real, at, width, operand)
            right = lines(weight + tap * width, column, inside, at, width, taps * width, operand)
            part = tl.dot(left, right, part, input_precision="ieee")
            gram = tl.dot(left, turned(left), gram, input_precision="ieee")
        total += summed_up(part) / _norms(summed_up(gram), epsilon, width, tile)[:, None]
    _write(total, out, squares, row, real, column, inside, width, parts)


@triton.jit(do_not_specialize=["rows"])
def _mix(
    states, chosen, table, sizes, tokens, weight, bias, out, squares, stride_state, stride_token, rows, epsilon,
    width: tl.constexpr, columns: tl.constexpr, parts: tl.constexpr, tile: tl.constexpr, slices: tl.constexpr,
    piece: tl.constexpr, operand: tl.constexpr, early: tl.constexpr,
):  # fmt: skip
    column = tl.program_id(0) * columns + tl.arange(0, columns)
    row = tl.program_id(1) * tile + tl.arange(0, tile)
    real, inside = row < rows, column < width
    fetch(weight, column, width, 2 * width, early)
    begin(early)
    token = tl.load(tokens + row, mask=real, other=0).to(tl.int64)
    place = tl.load(chosen + row, mask=real, other=0).to(tl.int64) * stride_state
    summed = asked(sizes, token, real, 1)
    found, beside = apart(
        table, token * stride_token, states, place, real, weight, column, column, width, inside, width, 2 * width,
        columns, tile, slices, piece, operand,
    )  # fmt: skip
    total = found * scales(summed, epsilon, width) + beside
    total += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)[None, :]
    _write(total, out, squares, row, real, column, inside, width, parts)


@triton.jit(do_not_specialize=["rows"])
def _select(
    mixed, squares, table, sizes, tokens, weight, out, stride_token, rows, inner, epsilon,
    width: tl.constexpr, columns: tl.constexpr, parts: tl.constexpr, tile: tl.constexpr, slices: tl.constexpr,
    piece: tl.constexpr, operand: tl.constexpr, early: tl.constexpr,
):  # fmt: skip
    column = tl.program_id(0) * columns + tl.arange(0, columns)
    row = tl.program_id(1) * tile + tl.arange(0, tile)
    real, inside = row < rows, column < inner
    fetch(weight, column, 2 * inner, width, early)
    fetch(weight, column + inner, 2 * inner, width, early)
    begin(early)
    token = tl.load(tokens + row, mask=real, other=0).to(tl.int64)
    summed, theirs = asked(squares, row * parts, real, parts), asked(sizes, token, real, 1)
    gate, up = apart(
        table, token * stride_token, mixed, row.to(tl.int64) * width, real, weight, column, column + inner, 0, inside,
        width, width, columns, tile, slices, piece, operand,
    )  # fmt: skip
    gate, up = gate * scales(theirs, epsilon, width), up * scales(summed, epsilon, width)
    found = gate / (1 + tl.exp(-gate)) * up
    goal = out + row[:, None].to(tl.int64) * inner + column[None, :]
    tl.store(goal, found.to(out.dtype.element_ty), mask=real[:, None] & inside[None, :])


@triton.jit(do_not_specialize=["rows", "per_text", "cell", "position", "advance", "capacity"])
def _read(
    states, squares, chosen, table, sizes, tokens, weight, frequencies, query, keys, values, slots, lengths,
    stride_state, stride_squares, stride_token, stride_slot, stride_head, stride_row, rows, per_text, capacity, cell,
    position, advance, epsilon,
    paired: tl.constexpr, width: tl.constexpr, heads: tl.constexpr, kv_heads: tl.constexpr, head_width: tl.constexpr,
    chunk: tl.constexpr, parts: tl.constexpr, tile: tl.constexpr, slices: tl.constexpr, piece: tl.constexpr,
    operand: tl.constexpr, early: tl.constexpr,
):  # fmt: skip
    """Part of the product for one head: the matching elements of both halves, which rotary positions combine."""
    half: tl.constexpr = head_width // 2
    chunks: tl.constexpr = (half + chunk - 1) // chunk
    head = tl.program_id(0) // chunks
    row = tl.program_id(1) * tile + tl.arange(0, tile)
    real = row < rows
    element = tl.program_id(0) % chunks * chunk + tl.arange(0, chunk)
    inside, line = element < half, head * head_width + element
    inputs: tl.constexpr = 2 * width if paired else width
    every: tl.constexpr = (heads + 2 * kv_heads) * head_width
    fetch(weight, line, every, inputs, early)
    fetch(weight, line + half, every, inputs, early)
    begin(early)
    text, number = row // per_text, row % per_text
    length = tl.load(lengths + text, mask=real, other=0).to(tl.int32)
    slot = tl.load(slots + text, mask=real, other=-1).to(tl.int64)
    place = tl.load(chosen + row, mask=real, other=0).to(tl.int64)
    summed = asked(squares, place * stride_squares, real, parts)
    if paired:
        token = tl.load(tokens + row, mask=real, other=0).to(tl.int64)
        theirs = asked(sizes, token, real, 1)
    lower, upper = pair(
        states, place * stride_state, real, weight, line, line + half, inside, width, inputs, chunk, tile, slices,
        piece, operand,
    )  # fmt: skip
    scale = scales(summed, epsilon, width)
    lower, upper = lower * scale, upper * scale
    if paired:
        more_lower, more_upper = pair(
            table, token * stride_token, real, weight + width, line, line + half, inside, width, inputs, chunk, tile,
            slices, piece, operand,
        )  # fmt: skip
        scale = scales(theirs, epsilon, width)
        lower += more_lower * scale
        upper += more_upper * scale
    if head < heads + kv_heads:  # queries and keys; values have no positions
        angle = (length + position + number * advance).to(tl.float32)[:, None]
        angle = angle * tl.load(frequencies + element, mask=inside, other=0.0)[None, :]
        cos, sin = tl.cos(angle), tl.sin(angle)
        lower, upper = lower * cos - upper * sin, upper * cos + lower * sin
    mask = real[:, None] & inside[None, :]
    spread(
        lower, upper, head, row, slot, length + cell + number, mask, element, query, keys, values, stride_slot,
        stride_head, stride_row, capacity, heads, kv_heads, head_width,
    )  # fmt: skip


@triton.jit(do_not_specialize=["rows"])
def _add(
    left, weight, states, chosen, out, squares, stride_state, rows,
    inputs: tl.constexpr, width: tl.constexpr, indexed: tl.constexpr, columns: tl.constexpr, parts: tl.constexpr,
    tile: tl.constexpr, slices: tl.constexpr, piece: tl.constexpr, operand: tl.constexpr, early: tl.constexpr,
):  # fmt: skip
    """A part of one of several outputs, each as wide as the states."""
    programs: tl.constexpr = (width + columns - 1) // columns
    outputs: tl.constexpr = parts // programs
    column = tl.program_id(0) % programs * columns + tl.arange(0, columns)
    row = tl.program_id(1) * tile + tl.arange(0, tile)
    real, inside = row < rows, column < width
    line = tl.program_id(0) // programs * width + column
    fetch(weight, line, outputs * width, inputs, early)
    begin(early)
    state = row.to(tl.int64)
    if indexed:
        state = tl.load(chosen + row, mask=real, other=0).to(tl.int64)
    mask = real[:, None] & inside[None, :]
    before = tl.load(states + state[:, None] * stride_state + column[None, :], mask=mask, other=0.0)
    total = product(
        left, row.to(tl.int64) * inputs, real, weight, line, inside, inputs, inputs, columns, tile, slices, piece,
        operand,
    )  # fmt: skip
    total += before.to(tl.float32)
    found = total.to(out.dtype.element_ty)
    tl.store(out + row[:, None].to(tl.int64) * (outputs * width) + line[None, :], found, mask=mask)
    kept = tl.where(mask, found.to(tl.float32), 0.0)
    tl.store(squares + row * parts + tl.program_id(0), tl.sum(kept * kept, axis=1), mask=real)
