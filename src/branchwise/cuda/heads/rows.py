"""The decoder layer of a head over a few rows, as Triton kernels.

A level of a tree is a handful of rows, and as single operations most of its time is the gaps between them. Here a layer
is four products with whatever stands before and behind each of them in the same kernel: norms and the gathering of rows
before, rotary positions, the KV cache, the gate of the MLP and the residual behind. FSPAD's gate of features is three
more. Matrices that read normed rows come with the weights of the norm in them. All weights of a head fit into the cache
of the device. The plain `draft.head.network` is the truth. Without a CUDA device only tests import this file.
"""

# mypy: disable-error-code="import-untyped, import-not-found, untyped-decorator, no-untyped-def"

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from branchwise.cuda.kernels import _operand

MOST_TAPS = 4
"""layers of the target that `join` reads"""
PIECE = 128
"""inputs of a product that are read at a time"""
COLUMNS = 16
"""outputs of a program"""


def join(hidden: Sequence[Tensor], weight: Tensor, nodes: Tensor, epsilon: float) -> Tensor:
    """(rows, width): features of nodes (batch, steps) of trees whose hidden states (batch, nodes, width) are these."""
    width, (batch, steps) = weight.shape[0], nodes.shape
    strides = {state.stride() for state in hidden}
    assert len(strides) == 1, "hidden states must lie alike"
    assert len(hidden) <= MOST_TAPS
    out = weight.new_empty(batch * steps, width)
    taps = [*hidden, *[hidden[-1]] * (MOST_TAPS - len(hidden))]
    _join[(triton.cdiv(width, COLUMNS), triton.cdiv(batch * steps, _tile(batch * steps)))](
        *taps, weight, nodes, out, *hidden[0].stride()[:2], nodes.stride(0), batch * steps, steps, epsilon,
        taps=len(hidden), width=width, columns=COLUMNS, **_shape(weight, batch * steps),
    )  # fmt: skip
    return out


Embedded = tuple[Tensor, Tensor]
"""a table (tokens, width), and of rows the tokens (batch, rows) whose embeddings they read"""


def mix(states: Tensor, chosen: Tensor, embeddings: Embedded, weight: Tensor, bias: Tensor, epsilon: float) -> Tensor:
    """(rows, width): the normed embeddings of rows and states[chosen] as they are, through one matrix."""
    (table, tokens), rows, width = embeddings, chosen.numel(), weight.shape[0]
    out = weight.new_empty(rows, width)
    _mix[(triton.cdiv(width, COLUMNS), triton.cdiv(rows, _tile(rows)))](
        states, chosen, table, tokens, weight, bias, out, states.stride(0), table.stride(0), rows, epsilon,
        width=width, columns=COLUMNS, **_shape(weight, rows),
    )  # fmt: skip
    return out


def select(mixed: Tensor, embeddings: Embedded, weight: Tensor, epsilon: float) -> Tensor:
    """(rows, gate width): what normed embeddings select of normed mixed rows (rows, width); the lines of `weight` are
    those that select and then those that are selected from."""
    (table, tokens), (rows, width) = embeddings, mixed.shape
    out = weight.new_empty(rows, weight.shape[0] // 2)
    _select[(triton.cdiv(out.shape[1], COLUMNS), triton.cdiv(rows, _tile(rows)))](
        mixed, table, tokens, weight, out, table.stride(0), rows, out.shape[1], epsilon,
        width=width, columns=COLUMNS, **_shape(weight, rows),
    )  # fmt: skip
    return out


def read(
    states: Tensor,
    chosen: Tensor,
    embeddings: Embedded | None,
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
    """(batch, rows, heads, head width): the queries of rows; their keys and values go to the cache.

    A row reads states[chosen] and the embedding of its token, `embeddings` = (table, tokens); `chosen` and tokens are
    (batch, rows). Row i of a text of so many committed rows stands in cell length + `cell` + i of its slot, at position
    length + `position` + i * `advance`.
    """
    keys, values = cache
    batch, rows = chosen.shape
    kv_heads, head_width = keys.shape[1], keys.shape[3]
    query = weight.new_empty(batch, rows, heads, head_width)
    table, tokens = embeddings or (states, chosen)
    chunks = triton.cdiv(head_width // 2, COLUMNS)
    _read[((heads + 2 * kv_heads) * chunks, triton.cdiv(batch * rows, _tile(batch * rows)))](
        states, chosen, table, tokens, weight, frequencies, query, keys, values, slots, lengths,
        states.stride(0), table.stride(0), *keys.stride()[:3], batch * rows, rows, keys.shape[2], cell, position,
        advance, epsilon,
        paired=embeddings is not None, width=weight.shape[1] // (2 if embeddings else 1), heads=heads,
        kv_heads=kv_heads, head_width=head_width,
        chunk=COLUMNS, **_shape(weight, batch * rows),
    )  # fmt: skip
    return query


def project(found: Tensor, weight: Tensor, states: Tensor, chosen: Tensor) -> Tensor:
    """(rows, width): states[chosen] and what attention found (rows, inputs), through its output matrix."""
    return _added(found, weight, states, chosen)


def gate_up(states: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """(rows, MLP width): the gated inner values of the MLP."""
    rows, width = states.shape
    out = weight.new_empty(rows, weight.shape[0] // 2)
    _gate_up[(triton.cdiv(out.shape[1], COLUMNS), triton.cdiv(rows, _tile(rows)))](
        states, weight, out, rows, out.shape[1], epsilon,
        width=width, columns=COLUMNS, **_shape(weight, rows),
    )  # fmt: skip
    return out


def down(inner: Tensor, weight: Tensor, states: Tensor) -> Tensor:
    """(rows, outputs * width): the states plus what the MLP adds to each copy of them."""
    return _added(inner, weight, states, None)


def _added(inputs: Tensor, weight: Tensor, states: Tensor, chosen: Tensor | None) -> Tensor:
    rows = len(inputs)
    out = weight.new_empty(rows, weight.shape[0])
    _add[(triton.cdiv(weight.shape[0], COLUMNS), triton.cdiv(rows, _tile(rows)))](
        inputs, weight, states, states if chosen is None else chosen, out, states.stride(0), rows, weight.shape[0],
        states.shape[1],
        inputs=inputs.shape[1], indexed=chosen is not None, columns=COLUMNS, **_shape(weight, rows),
    )  # fmt: skip
    return out


def _tile(rows: int) -> int:
    """Rows of a program."""
    return int(max(16, min(64, triton.next_power_of_2(rows))))


def _shape(weight: Tensor, rows: int) -> dict[str, object]:
    piece = min(PIECE, max(16, triton.next_power_of_2(weight.shape[1] // 2)))
    return {"tile": _tile(rows), "piece": piece, "operand": _operand(weight.dtype), "num_warps": 4, "num_stages": 4}


@triton.jit
def _row_piece(states, place, real, at, some, operand: tl.constexpr):
    """(tile, piece): elements of rows, as they are stored."""
    return tl.load(states + place[:, None] + at[None, :], mask=real[:, None] & some[None, :], other=0.0).to(operand)


@triton.jit
def _norms(gram, epsilon, width: tl.constexpr, tile: tl.constexpr):
    """(tile,): what the norms of rows divide by, from the products of rows with each other (tile, tile). These are made
    beside the products with weights, so that nothing but products stands in the way of the next piece."""
    row, column = tl.arange(0, tile)[:, None], tl.arange(0, tile)[None, :]
    return tl.sqrt(tl.sum(tl.where(row == column, gram, 0.0), axis=1) / width + epsilon)


@triton.jit
def _weights(weight, line, inside, at, some, inputs, operand: tl.constexpr):
    """(piece, lines): part of some lines of a matrix, as a product takes them."""
    places = weight + line[:, None].to(tl.int64) * inputs + at[None, :]
    return tl.trans(tl.load(places, mask=inside[:, None] & some[None, :], other=0.0).to(operand))


@triton.jit
def _product(
    states, place, real, weight, line, inside, epsilon, inputs,
    normed: tl.constexpr, width: tl.constexpr, columns: tl.constexpr, tile: tl.constexpr, piece: tl.constexpr,
    operand: tl.constexpr,
):  # fmt: skip
    """(tile, columns): rows, normed or as they are, times some lines of a matrix."""
    part, gram = tl.zeros((tile, columns), tl.float32), tl.zeros((tile, tile), tl.float32)
    for start in range(0, width, piece):
        at = start + tl.arange(0, piece)
        left = _row_piece(states, place, real, at, at < width, operand)
        right = _weights(weight, line, inside, at, at < width, inputs, operand)
        part = tl.dot(left, right, part, input_precision="ieee")
        if normed:
            gram = tl.dot(left, tl.trans(left), gram, input_precision="ieee")
    if normed:
        part = part / _norms(gram, epsilon, width, tile)[:, None]
    return part


@triton.jit(do_not_specialize=["stride_path", "rows", "steps"])
def _join(
    first, second, third, fourth, weight, nodes, out,
    stride_batch, stride_node, stride_path, rows, steps, epsilon,
    taps: tl.constexpr, width: tl.constexpr, columns: tl.constexpr, tile: tl.constexpr, piece: tl.constexpr,
    operand: tl.constexpr,
):  # fmt: skip
    column = tl.program_id(0) * columns + tl.arange(0, columns)
    row = tl.program_id(1) * tile + tl.arange(0, tile)
    real = row < rows
    node = tl.load(nodes + row // steps * stride_path + row % steps, mask=real, other=0)
    node = tl.maximum(node, 0).to(tl.int64)  # what pads a path is never read
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
        total += _product(
            states, place, real, weight + tap * width, column, column < width, epsilon, taps * width, True, width,
            columns, tile, piece, operand,
        )  # fmt: skip
    goal = out + row[:, None] * width + column[None, :]
    tl.store(goal, total.to(out.dtype.element_ty), mask=real[:, None] & (column < width)[None, :])


@triton.jit(do_not_specialize=["rows"])
def _mix(
    states, chosen, table, tokens, weight, bias, out, stride_state, stride_token, rows, epsilon,
    width: tl.constexpr, columns: tl.constexpr, tile: tl.constexpr, piece: tl.constexpr, operand: tl.constexpr,
):  # fmt: skip
    column = tl.program_id(0) * columns + tl.arange(0, columns)
    row = tl.program_id(1) * tile + tl.arange(0, tile)
    real, inside = row < rows, column < width
    place = tl.load(tokens + row, mask=real, other=0).to(tl.int64) * stride_token
    total = _product(
        table, place, real, weight, column, inside, epsilon, 2 * width, True, width, columns, tile, piece, operand
    )
    place = tl.load(chosen + row, mask=real, other=0).to(tl.int64) * stride_state
    total += _product(
        states, place, real, weight + width, column, inside, epsilon, 2 * width, False, width, columns, tile, piece,
        operand,
    )  # fmt: skip
    total += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)[None, :]
    goal = out + row[:, None].to(tl.int64) * width + column[None, :]
    tl.store(goal, total.to(out.dtype.element_ty), mask=real[:, None] & inside[None, :])


@triton.jit(do_not_specialize=["rows"])
def _select(
    mixed, table, tokens, weight, out, stride_token, rows, lines, epsilon,
    width: tl.constexpr, columns: tl.constexpr, tile: tl.constexpr, piece: tl.constexpr, operand: tl.constexpr,
):  # fmt: skip
    column = tl.program_id(0) * columns + tl.arange(0, columns)
    row = tl.program_id(1) * tile + tl.arange(0, tile)
    real, inside = row < rows, column < lines
    place = tl.load(tokens + row, mask=real, other=0).to(tl.int64) * stride_token
    gate = _product(
        table, place, real, weight, column, inside, epsilon, width, True, width, columns, tile, piece, operand
    )
    up = _product(
        mixed, row.to(tl.int64) * width, real, weight, column + lines, inside, epsilon, width, True, width, columns,
        tile, piece, operand,
    )  # fmt: skip
    found = gate / (1 + tl.exp(-gate)) * up
    goal = out + row[:, None].to(tl.int64) * lines + column[None, :]
    tl.store(goal, found.to(out.dtype.element_ty), mask=real[:, None] & inside[None, :])


@triton.jit
def _halves(
    states, place, real, weight, line, inside, epsilon, inputs,
    half: tl.constexpr, width: tl.constexpr, chunk: tl.constexpr, tile: tl.constexpr, piece: tl.constexpr,
    operand: tl.constexpr,
):  # fmt: skip
    """Normed rows times some lines of a matrix, and times the lines half a head below them, (tile, chunk) each."""
    lower, upper = tl.zeros((tile, chunk), tl.float32), tl.zeros((tile, chunk), tl.float32)
    gram = tl.zeros((tile, tile), tl.float32)
    for start in range(0, width, piece):
        at = start + tl.arange(0, piece)
        left = _row_piece(states, place, real, at, at < width, operand)
        first = _weights(weight, line, inside, at, at < width, inputs, operand)
        second = _weights(weight, line + half, inside, at, at < width, inputs, operand)
        lower = tl.dot(left, first, lower, input_precision="ieee")
        upper = tl.dot(left, second, upper, input_precision="ieee")
        gram = tl.dot(left, tl.trans(left), gram, input_precision="ieee")
    norms = _norms(gram, epsilon, width, tile)[:, None]
    return lower / norms, upper / norms


@triton.jit(do_not_specialize=["rows", "per_text", "cell", "position", "advance", "capacity"])
def _read(
    states, chosen, table, tokens, weight, frequencies, query, keys, values, slots, lengths,
    stride_state, stride_token, stride_slot, stride_head, stride_row, rows, per_text, capacity, cell, position, advance,
    epsilon,
    paired: tl.constexpr, width: tl.constexpr, heads: tl.constexpr, kv_heads: tl.constexpr, head_width: tl.constexpr,
    chunk: tl.constexpr, tile: tl.constexpr, piece: tl.constexpr, operand: tl.constexpr,
):  # fmt: skip
    """Part of the product of one head, of both of its halves, which rotary positions turn against each other."""
    half: tl.constexpr = head_width // 2
    chunks: tl.constexpr = (half + chunk - 1) // chunk
    head = tl.program_id(0) // chunks
    row = tl.program_id(1) * tile + tl.arange(0, tile)
    real = row < rows
    element = tl.program_id(0) % chunks * chunk + tl.arange(0, chunk)
    inside, line = element < half, head * head_width + element
    inputs: tl.constexpr = 2 * width if paired else width
    place = tl.load(chosen + row, mask=real, other=0).to(tl.int64) * stride_state
    lower, upper = _halves(
        states, place, real, weight, line, inside, epsilon, inputs, half, width, chunk, tile, piece, operand
    )
    if paired:
        place = tl.load(tokens + row, mask=real, other=0).to(tl.int64) * stride_token
        lower_more, upper_more = _halves(
            table, place, real, weight + width, line, inside, epsilon, inputs, half, width, chunk, tile, piece, operand
        )
        lower += lower_more
        upper += upper_more
    text, number = row // per_text, row % per_text
    length = tl.load(lengths + text, mask=real, other=0).to(tl.int32)
    if head < heads + kv_heads:  # queries and keys; values have no positions
        angle = (length + position + number * advance).to(tl.float32)[:, None]
        angle = angle * tl.load(frequencies + element, mask=inside, other=0.0)[None, :]
        cos, sin = tl.cos(angle), tl.sin(angle)
        lower, upper = lower * cos - upper * sin, upper * cos + lower * sin
    mask = real[:, None] & inside[None, :]
    if head < heads:
        goal = (row[:, None] * heads + head).to(tl.int64) * head_width + element[None, :]
        tl.store(query + goal, lower.to(query.dtype.element_ty), mask=mask)
        tl.store(query + goal + half, upper.to(query.dtype.element_ty), mask=mask)
    else:
        slot = tl.load(slots + text, mask=real, other=-1).to(tl.int64)
        at_cell = length + cell + number
        mask &= ((slot >= 0) & (at_cell < capacity))[:, None]
        kind, kept = (head - heads) // kv_heads, (head - heads) % kv_heads
        place = slot * stride_slot + kept * stride_head + at_cell.to(tl.int64) * stride_row
        goal = place[:, None] + element[None, :]
        if kind == 0:
            tl.store(keys + goal, lower.to(keys.dtype.element_ty), mask=mask)
            tl.store(keys + goal + half, upper.to(keys.dtype.element_ty), mask=mask)
        else:
            tl.store(values + goal, lower.to(keys.dtype.element_ty), mask=mask)
            tl.store(values + goal + half, upper.to(keys.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["rows"])
def _gate_up(
    states, weight, out, rows, lines, epsilon,
    width: tl.constexpr, columns: tl.constexpr, tile: tl.constexpr, piece: tl.constexpr, operand: tl.constexpr,
):  # fmt: skip
    column = tl.program_id(0) * columns + tl.arange(0, columns)
    row = tl.program_id(1) * tile + tl.arange(0, tile)
    real, inside = row < rows, column < lines
    gate, up = _halves(
        states, row.to(tl.int64) * width, real, weight, column, inside, epsilon, width, lines, width, columns, tile,
        piece, operand,
    )  # fmt: skip
    found = gate / (1 + tl.exp(-gate)) * up
    goal = out + row[:, None].to(tl.int64) * lines + column[None, :]
    tl.store(goal, found.to(out.dtype.element_ty), mask=real[:, None] & inside[None, :])


@triton.jit(do_not_specialize=["rows"])
def _add(
    left, weight, states, chosen, out, stride_state, rows, lines, width,
    inputs: tl.constexpr, indexed: tl.constexpr, columns: tl.constexpr, tile: tl.constexpr, piece: tl.constexpr,
    operand: tl.constexpr,
):  # fmt: skip
    column = tl.program_id(0) * columns + tl.arange(0, columns)
    row = tl.program_id(1) * tile + tl.arange(0, tile)
    real, inside = row < rows, column < lines
    place = row.to(tl.int64) * inputs
    total = tl.zeros((tile, columns), tl.float32)
    for start in range(0, inputs, piece):
        at = start + tl.arange(0, piece)
        part = _row_piece(left, place, real, at, at < inputs, operand)
        right = _weights(weight, column, inside, at, at < inputs, inputs, operand)
        total = tl.dot(part, right, total, input_precision="ieee")
    state = row.to(tl.int64)
    if indexed:
        state = tl.load(chosen + row, mask=real, other=0).to(tl.int64)
    mask = real[:, None] & inside[None, :]
    total += tl.load(states + state[:, None] * stride_state + (column % width)[None, :], mask=mask, other=0.0)
    tl.store(out + row[:, None].to(tl.int64) * lines + column[None, :], total.to(out.dtype.element_ty), mask=mask)
