"""Triton kernels for tree attention over the KV cache, and for writing and moving its rows.

The plain `tree_mask` and `attend` are the reference; these compute the same without a mask in memory. Every node sees
all committed rows, so most blocks of keys need no mask at all. Only the block in which the committed rows end, and the
rows of the tree after it, look at ancestors, one bit each (the two halves of LongSpec's hybrid tree attention,
2502.17421). The keys are split between programs, as in FlashDecoding, and their outputs are merged by log-sum-exp.
Lengths and slots are read on the device and the grid depends on neither, so a captured pass serves any text. Without a
CUDA device only tests import this file, and run it in Triton's interpreter.
"""

# mypy: disable-error-code="import-untyped, import-not-found, untyped-decorator, no-untyped-def"

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from branchwise.cuda.early import begin, early

LOG2E = tl.constexpr(1.4426950408889634)

NOTHING = tl.constexpr(-1.0e30)
"""the score of a row that saw no key; it is finite, so that differences of such scores are numbers"""


SPLITS, SHORT = 16, 8192
"""Halving a tile pays if the keys would still be split this many ways without more programs than run at once, and if
the capacity of a slot is at most this: over more keys it takes each tile too long to read them."""


@dataclass(frozen=True)
class Tiling:
    """How the work of one layer is divided into programs. The choice does not change the result, except by rounding."""

    rows: int  # rows of a tile: nodes times the query heads that share a key head
    keys: int  # keys of a block, which a tile reads in one step
    splits: int  # the number of programs that share the keys of a tile
    warps: int
    stages: int


def tiling(
    *, batch: int, heads: int, rows: int, keys: int, width: int, size: int, programs: int = 264, shared: int = 232_448
) -> Tiling:
    """A tiling for `heads` key heads, each with `rows` queries of `width` elements of `size` bytes and up to `keys`.

    `keys` is the capacity of a slot, because the grid of a captured pass cannot depend on the length of a text. 264
    programs are two for every multiprocessor of an H200; `shared` is the shared memory, in bytes, of one program.
    """
    if size > 2:  # float32 is for proofs: its products use no tensor cores, and small tiles to fit registers
        tile, block = 16, 32
    else:
        evenly = triton.cdiv(rows, 64) % 2 == 0 and width <= 128
        tile, block = 128 if evenly else max(16, min(triton.next_power_of_2(rows), 64)), 64
    few = programs + programs // 10  # small tiles leave room for some more
    while tile > 16 and keys <= SHORT and SPLITS * batch * heads * triton.cdiv(rows, tile // 2) <= few:
        tile //= 2  # more programs hide more of the latency of their keys
    stages = 2 if size > 2 or width > 128 else 3
    while size * (tile * width + 2 * (stages - 1) * block * width + tile * block) > shared:
        if stages > 2:
            stages -= 1
        elif block > 16:
            block //= 2
        elif tile > 16:
            tile //= 2
        else:
            break
    tiles = batch * heads * triton.cdiv(rows, tile)
    parts = (few if tile < 32 else programs) // tiles
    # Merging two more splits of many rows costs more than they save, and so does merging many splits of a short text.
    parts = min(parts if parts >= 4 else programs // 2 // tiles, keys // (2 * block), 32 if keys <= SHORT else 64)
    return Tiling(
        rows=tile,
        keys=block,
        splits=1 << max(parts, 1).bit_length() - 1,
        warps=8 if tile == 128 or (tile == 64 and width > 128) else 4,
        stages=stages,
    )


@cache
def shared_memory(device: torch.device) -> int:
    if device.type != "cuda":  # Triton's interpreter has no limit
        return 232_448
    about = torch.cuda.get_device_properties(device)
    return int(getattr(about, "shared_memory_per_block_optin", about.shared_memory_per_block))


# Attention


def tree_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    slots: Tensor,
    lengths: Tensor,
    depths: Tensor,
    key_depths: Tensor,
    ancestor_bits: Tensor,
    *,
    scale: float,
    softcap: float | None = None,
    window: int | None = None,
    splits: int | None = None,
    tiles: Tiling | None = None,
) -> Tensor:
    """(batch, nodes, heads, value width): the result of `attend` under `tree_mask`, read from one layer of the cache.

    `query` is (batch, heads, nodes, width); `keys` and `values` are (slots, key heads, rows, width). Text b is in slot
    slots[b]: first its committed rows, then row j of its tree, rows of this pass included, at lengths[b] + j. Slots of
    -1 are padding and yield zeros, and so does a node that sees nothing. Windows need `depths` (batch, nodes) of the
    nodes and `key_depths` (batch, columns) of the rows of the tree. `ancestor_bits` (batch, nodes, words) are the
    ancestors as `pack_bits` packs them. All of these are int32 on the device.
    """
    batch, heads, nodes, width = query.shape
    _, kv_heads, capacity, value_width = values.shape
    columns, words = key_depths.shape[1], ancestor_bits.shape[2]
    assert heads % kv_heads == 0, "key heads do not divide the heads"
    assert keys.shape == (*values.shape[:3], width), "queries, keys and values do not belong together"
    assert columns <= 32 * words, "fewer bits than rows of the tree"
    assert keys.stride(3) == values.stride(3) == 1, "an element of a row must lie beside the next"
    indices = (slots, lengths, depths, key_depths, ancestor_bits)
    assert all(it.is_contiguous() for it in indices), "index tensors must be whole"
    group = heads // kv_heads
    block_width, block_value = (max(16, triton.next_power_of_2(it)) for it in (width, value_width))
    tiles = tiles or tiling(
        batch=batch,
        heads=kv_heads,
        rows=nodes * group,
        keys=capacity,
        width=max(block_width, block_value),
        size=keys.element_size(),
        shared=shared_memory(keys.device),
    )
    splits = splits or tiles.splits
    row_tiles = triton.cdiv(nodes * group, tiles.rows)
    out = query.new_empty(batch, nodes, heads, value_width)
    # With one split the kernel does not use these two, but the arguments must be valid pointers.
    parts, scores = out, out
    if splits > 1:
        parts = torch.empty(splits, *out.shape, dtype=torch.float32, device=out.device)
        scores = torch.empty(splits, batch, nodes, heads, dtype=torch.float32, device=out.device)
    _attend[(row_tiles, batch * kv_heads, splits)](
        query, keys, values, slots, lengths, depths, key_depths, ancestor_bits, out, parts, scores,
        *query.stride(), *keys.stride()[:3], *values.stride()[:3],
        nodes, columns, words, capacity, 0 if window is None else window,
        scale, 0.0 if softcap is None else softcap,
        kv_heads=kv_heads, group=group, width=width, value_width=value_width,
        block_width=block_width, block_value=block_value, block_rows=tiles.rows, block_keys=tiles.keys,
        splits=splits, capped=softcap is not None, windowed=window is not None,
        operand=_operand(keys.dtype),
        num_warps=tiles.warps, num_stages=tiles.stages, **early(keys.device),
    )  # fmt: skip
    if splits > 1:
        _merge[(batch * nodes * heads,)](
            parts, scores, out, batch * nodes * heads,
            splits=splits, block_splits=triton.next_power_of_2(splits), value_width=value_width,
            block_value=block_value, num_warps=max(1, min(4, triton.next_power_of_2(splits) * block_value // 1024)),
            **early(keys.device),
        )  # fmt: skip
    return out


def _operand(dtype: torch.dtype) -> tl.dtype:
    """The dtype of the operands of products: as stored, except that the interpreter cannot multiply bfloat16."""
    if dtype == torch.bfloat16 and triton.knobs.runtime.interpret:
        return tl.float32
    return {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}[dtype]


@triton.jit(do_not_specialize=["nodes", "columns", "words", "capacity", "window"])
def _attend(
    query, keys, values, slots, lengths, depths, key_depths, ancestor_bits, out, parts, scores,
    query_batch, query_head, query_node, query_element, key_slot, key_head, key_row, value_slot, value_head, value_row,
    nodes, columns, words, capacity, window, scale, softcap,
    kv_heads: tl.constexpr, group: tl.constexpr, width: tl.constexpr, value_width: tl.constexpr,
    block_width: tl.constexpr, block_value: tl.constexpr, block_rows: tl.constexpr, block_keys: tl.constexpr,
    splits: tl.constexpr, capped: tl.constexpr, windowed: tl.constexpr, operand: tl.constexpr, early: tl.constexpr,
):  # fmt: skip
    """Attention of one tile of rows to one share of the keys. Row m is node m // group and head m % group of its
    group."""
    begin(early)
    # Tiles come first, so that programs which read the same keys run together.
    tile, pair, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    text, head = pair // kv_heads, pair % kv_heads
    slot = tl.load(slots + text).to(tl.int32)
    length = tl.minimum(tl.load(lengths + text).to(tl.int32), capacity)
    end = tl.minimum(length + columns, capacity)
    # Padding has no keys, so nothing below reads any.
    length, end, slot = tl.where(slot < 0, 0, length), tl.where(slot < 0, 0, end), tl.maximum(slot, 0)
    keys += slot.to(tl.int64) * key_slot + head.to(tl.int64) * key_head
    values += slot.to(tl.int64) * value_slot + head.to(tl.int64) * value_head

    row = tile * block_rows + tl.arange(0, block_rows)
    node, real = row // group, row < nodes * group
    query_head_of_row = head * group + row % group
    element, value_element = tl.arange(0, block_width), tl.arange(0, block_value)
    places = text.to(tl.int64) * query_batch + query_head_of_row * query_head + node * query_node
    mask = real[:, None] & (element < width)[None, :]
    tile_query = tl.load(query + places[:, None] + element[None, :] * query_element, mask=mask, other=0.0).to(operand)

    # Full blocks of keys hold committed rows alone. Each split takes an equal share of the blocks that the tile sees.
    first, full, blocks = 0, length // block_keys, tl.cdiv(end, block_keys)
    oldest = tl.zeros([block_rows], tl.int32)
    if windowed:
        depth = tl.load(depths + text * nodes + node, mask=real, other=0)
        oldest = depth - window + 1  # the oldest position that the row sees, counted from the root
        first = tl.maximum(length + tl.min(tl.where(real, oldest, 1 << 30), 0), 0) // block_keys
    share = tl.cdiv(tl.maximum(blocks - first, 0), splits)
    start = first + split * share
    stop = tl.minimum(start + share, blocks)

    highest = tl.full([block_rows], NOTHING, tl.float32)
    total = tl.zeros([block_rows], tl.float32)
    found = tl.zeros([block_rows, block_value], tl.float32)
    for block in tl.range(start, tl.minimum(stop, full)):
        key_index = block * block_keys + tl.arange(0, block_keys)
        key = _rows(keys, key_index, key_row, element, True, width, block_width, False).to(operand)
        score = _score(tile_query, key, scale, softcap, capped)
        if windowed:
            score = tl.where((key_index - length)[None, :] >= oldest[:, None], score, float("-inf"))
        value = _rows(values, key_index, value_row, value_element, True, value_width, block_value, False).to(operand)
        highest, total, found = _absorb(highest, total, found, score, value)
    for block in tl.range(tl.maximum(start, full), stop, num_stages=1):
        key_index = block * block_keys + tl.arange(0, block_keys)
        key = _rows(keys, key_index, key_row, element, key_index < end, width, block_width, True).to(operand)
        column = key_index - length
        behind = (column >= 0) & (key_index < end)
        spot = text.to(tl.int64) * nodes * words + node[:, None] * words + (tl.maximum(column, 0) >> 5)[None, :]
        bits = tl.load(ancestor_bits + spot, mask=real[:, None] & behind[None, :], other=0)
        visible = (column < 0)[None, :] | (((bits >> (column & 31)[None, :]) & 1) != 0)
        # After a tree are rows of earlier trees. An infinity or NaN in them would survive a weight of zero.
        seen_by_any = tl.max(visible.to(tl.int32), 0) > 0
        value = _rows(values, key_index, value_row, value_element, seen_by_any, value_width, block_value, True)
        if windowed:
            position = tl.load(key_depths + text * columns + column, mask=behind, other=0)
            position = tl.where(column < 0, column, position)
            visible = visible & (position[None, :] >= oldest[:, None])
        score = tl.where(visible, _score(tile_query, key, scale, softcap, capped), float("-inf"))
        highest, total, found = _absorb(highest, total, found, score, value.to(operand))

    some = total != 0  # true of NaN, which must propagate
    found = found / tl.where(some, total, 1.0)[:, None]
    line = (text.to(tl.int64) * nodes + node) * (kv_heads * group) + query_head_of_row  # of (batch, nodes, heads)
    goal = line[:, None] * value_width + value_element[None, :]
    mask = real[:, None] & (value_element < value_width)[None, :]
    if splits == 1:
        tl.store(out + goal, found.to(out.dtype.element_ty), mask=mask)
    else:
        lines = tl.num_programs(1).to(tl.int64) * nodes * group
        score = tl.where(some, highest + tl.log2(tl.where(some, total, 1.0)), NOTHING)
        tl.store(scores + split * lines + line, score, mask=real)
        tl.store(parts + split * lines * value_width + goal, found, mask=mask & some[:, None])


@triton.jit
def _rows(store, index, stride, element, wanted, width: tl.constexpr, block: tl.constexpr, some: tl.constexpr):
    """(keys, block): rows of the cache; if only `some` are wanted, the others are zeros."""
    places = store + index[:, None] * stride + element[None, :]
    if some:
        return tl.load(places, mask=wanted[:, None] & (element < width)[None, :], other=0.0)
    elif width < block:
        return tl.load(places, mask=(element < width)[None, :], other=0.0)
    else:
        return tl.load(places)


@triton.jit
def _score(query, key, scale, softcap, capped: tl.constexpr):
    """(rows, keys): attention scores for a softmax to the base 2."""
    score = tl.dot(query, tl.trans(key), input_precision="ieee") * scale
    if capped:
        # The hyperbolic tangent, from a power that cannot overflow.
        power = tl.exp2(tl.abs(score) * (-2 * LOG2E / softcap))
        bent = (1 - power) / (1 + power)
        score = softcap * tl.where(score < 0, -bent, bent)
    return score * LOG2E


@triton.jit
def _absorb(highest, total, found, score, value):
    """Update the running softmax with one more block of keys."""
    higher = tl.maximum(highest, tl.max(score, 1))
    fade = tl.exp2(highest - higher)
    weight = tl.exp2(score - higher[:, None])
    total = total * fade + tl.sum(weight, 1)
    found = tl.dot(weight.to(value.dtype), value, found * fade[:, None], input_precision="ieee")
    return higher, total, found


@triton.jit(do_not_specialize=["lines"])
def _merge(
    parts, scores, out, lines,
    splits: tl.constexpr, block_splits: tl.constexpr, value_width: tl.constexpr, block_value: tl.constexpr,
    early: tl.constexpr,
):  # fmt: skip
    """One row of the output: the mean of the outputs of its splits, weighted by the sums of their softmaxes."""
    begin(early)
    line = tl.program_id(0).to(tl.int64)
    split, element = tl.arange(0, block_splits), tl.arange(0, block_value)
    score = tl.load(scores + split * lines.to(tl.int64) + line, mask=split < splits, other=NOTHING)
    places = parts + (split * lines.to(tl.int64) + line)[:, None] * value_width + element[None, :]
    part = tl.load(places, mask=(split < splits)[:, None] & (element < value_width)[None, :], other=0.0)
    # A split without keys wrote no part. Loading it anyway is faster than waiting for its score.
    part = tl.where((score > NOTHING)[:, None], part, 0.0)
    weight = tl.exp2(score - tl.max(score, 0))
    found = tl.sum(part * weight[:, None], 0) / tl.sum(weight, 0)
    tl.store(out + line * value_width + element, found.to(out.dtype.element_ty), mask=element < value_width)


# Rows of the cache


def write_rows(
    keys: Tensor, values: Tensor, new_keys: Tensor, new_values: Tensor, slots: Tensor, starts: Tensor
) -> None:
    """Write the keys and values (batch, heads, nodes, width) of a pass to one layer of the cache, (slots, heads, rows,
    width): node i of text b goes to row starts[b] + i of slot slots[b]. Slots of -1 and rows after the end of a slot
    are skipped."""
    batch, heads, nodes, width = new_keys.shape
    value_width = new_values.shape[3]
    assert keys.shape[1:3] == values.shape[1:3], "keys and values do not belong together"
    assert keys.stride(3) == values.stride(3) == 1, "an element of a row must lie beside the next"
    assert all(it.is_contiguous() for it in (slots, starts)), "index tensors must be whole"
    block_rows = min(16, triton.next_power_of_2(nodes))
    _write[(triton.cdiv(nodes, block_rows), batch * heads)](
        keys, values, new_keys, new_values, slots, starts,
        *keys.stride()[:3], *values.stride()[:3], *new_keys.stride(), *new_values.stride(), nodes, keys.shape[2],
        heads=heads, width=width, value_width=value_width, block_rows=block_rows,
        block_width=triton.next_power_of_2(max(width, value_width)), num_warps=2,
    )  # fmt: skip


@triton.jit(do_not_specialize=["nodes", "capacity"])
def _write(
    keys, values, new_keys, new_values, slots, starts,
    key_slot, key_head, key_row, value_slot, value_head, value_row,
    key_batch, key_from_head, key_node, key_element, value_batch, value_from_head, value_node, value_element,
    nodes, capacity,
    heads: tl.constexpr, width: tl.constexpr, value_width: tl.constexpr, block_rows: tl.constexpr,
    block_width: tl.constexpr,
):  # fmt: skip
    text, head = (tl.program_id(1) // heads).to(tl.int64), (tl.program_id(1) % heads).to(tl.int64)
    slot, start = tl.load(slots + text).to(tl.int64), tl.load(starts + text).to(tl.int64)
    node = tl.program_id(0) * block_rows + tl.arange(0, block_rows)
    row, element = start + node, tl.arange(0, block_width)
    written = (node < nodes) & (row < capacity) & (slot >= 0)
    mask = written[:, None] & (element < width)[None, :]
    new = new_keys + text * key_batch + head * key_from_head + node[:, None] * key_node + element[None, :] * key_element
    goal = keys + slot * key_slot + head * key_head + row[:, None] * key_row + element[None, :]
    tl.store(goal, tl.load(new, mask=mask), mask=mask)
    mask = written[:, None] & (element < value_width)[None, :]
    new = new_values + text * value_batch + head * value_from_head
    new += node[:, None] * value_node + element[None, :] * value_element
    goal = values + slot * value_slot + head * value_head + row[:, None] * value_row + element[None, :]
    tl.store(goal, tl.load(new, mask=mask), mask=mask)


def keep_rows(tensor: Tensor, slots: Tensor, lengths: Tensor, paths: Tensor) -> None:
    """Move the rows of accepted paths to the front of their trees, in all layers and heads of a tensor (layers, slots,
    heads, rows, width). `paths` (batch, steps) int32 holds the nodes of each path, root first, padded with -1: row
    lengths[b] + paths[b, i] of slot slots[b] moves to row lengths[b] + i."""
    layers, _, heads, capacity, width = tensor.shape
    batch, steps = paths.shape
    assert tensor.stride(4) == 1, "an element of a row must lie beside the next"
    assert all(it.is_contiguous() for it in (slots, lengths, paths)), "index tensors must be whole"
    block_steps = triton.next_power_of_2(steps)
    block_width = min(triton.next_power_of_2(width), max(16, 8192 // block_steps))
    _keep[(layers * heads, batch, triton.cdiv(width, block_width))](
        tensor, slots, lengths, paths, *tensor.stride()[:4], steps, capacity,
        heads=heads, width=width, block_steps=block_steps, block_width=block_width, num_warps=4,
    )  # fmt: skip


@triton.jit(do_not_specialize=["steps", "capacity"])
def _keep(
    tensor, slots, lengths, paths, stride_layer, stride_slot, stride_head, stride_row, steps, capacity,
    heads: tl.constexpr, width: tl.constexpr, block_steps: tl.constexpr, block_width: tl.constexpr,
):  # fmt: skip
    """One program moves all rows of a path. It reads all before it writes any, because a row may be both the goal of
    one step and the source of another."""
    layer, head = (tl.program_id(0) // heads).to(tl.int64), (tl.program_id(0) % heads).to(tl.int64)
    text = tl.program_id(1)
    slot, length = tl.load(slots + text).to(tl.int64), tl.load(lengths + text).to(tl.int64)
    step, element = tl.arange(0, block_steps), tl.program_id(2) * block_width + tl.arange(0, block_width)
    node = tl.load(paths + text * steps + step, mask=step < steps, other=-1).to(tl.int64)
    moved = (node > step) & (length + node < capacity) & (slot >= 0)
    mask = moved[:, None] & (element < width)[None, :]
    base = tensor + layer * stride_layer + slot * stride_slot + head * stride_head + element[None, :]
    rows = tl.load(base + (length + node)[:, None] * stride_row, mask=mask)
    tl.debug_barrier()
    tl.store(base + (length + step)[:, None] * stride_row, rows, mask=mask)
