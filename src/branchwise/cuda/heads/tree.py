"""Triton kernels that build the most probable tree of a head, between the products of `cuda.heads.rows`.

`pick` chooses the nodes that are expanded next from the proposals of a level. `propose_copy` adds a copy of the tokens
that followed an earlier occurrence of the text's end. `lay` makes a tree of the best of all proposed nodes. The plain
`draft.head.trees.best_first` is the reference. Without a CUDA device only tests import this file.
"""

# mypy: disable-error-code="import-untyped, import-not-found, untyped-decorator, no-untyped-def"

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from branchwise.core.rows import words_for
from branchwise.cuda.early import begin, early

NOTHING = tl.constexpr(-1.0e30)
RIVALS = 64
"""the most proposed nodes with which each node is compared at a time"""
MOST_COMPARED = 16384
"""the most comparisons that the registers of a program hold"""


class Proposed(NamedTuple):
    """All proposed nodes of all levels, (batch, nodes) each."""

    values: Tensor
    """the log-probabilities of the paths to the nodes"""
    tokens: Tensor
    parents: Tensor
    """the index of each node's parent among the proposed nodes, -1 for the root"""


class Level(NamedTuple):
    """The nodes that are expanded next, (batch, rows) each."""

    values: Tensor
    tokens: Tensor
    numbers: Tensor
    """the indices of the nodes among the proposed nodes"""
    states: Tensor
    """the indices of the states that the nodes read, which their parents carried on"""
    bits: Tensor
    """(batch, rows, words): the cells after the text that the nodes see, as bits"""


def pick(
    best: tuple[Tensor, Tensor],
    names: tuple[Tensor, Tensor, Tensor],
    before: Level,
    rows_at: Tensor,
    proposed: Proposed,
    first: int,
    cell: int,
    width: int,
) -> Level:
    """The best `width` nodes of a level.

    `best` are log-probabilities and places (batch, rows, count) as `best_tokens` returns them; `names` are the table,
    the tokens of each prompt and the slots, which turn places into tokens. `rows_at` (batch, rows) are the indices of
    the rows' states. The proposals of the level are written to `proposed` from index `first` on; the chosen nodes will
    use the cells from `cell` on after the text.
    """
    values, (table, known, _) = best[0], names
    batch, rows, count = values.shape
    tokens, numbers, states = (torch.empty(batch, width, dtype=torch.int64, device=values.device) for _ in range(3))
    bits = torch.empty(batch, width, before.bits.shape[2], dtype=torch.int32, device=values.device)
    found = Level(values.new_empty(batch, width), tokens, numbers, states, bits)
    block = triton.next_power_of_2(max(rows * count, width))
    rivals = max(1, min(block, RIVALS, MOST_COMPARED // block))
    _pick[(batch,)](
        *best, *names, before.values, before.numbers, before.bits, rows_at, *proposed, *found,
        len(table), known.shape[1], proposed.values.shape[1], first, cell,
        rows=rows, count=count, width=width, words=before.bits.shape[2],
        block_words=triton.next_power_of_2(before.bits.shape[2]), rivals=rivals,
        block=block, num_warps=max(1, min(16, block * rivals // 1024)), **early(values.device),
    )  # fmt: skip
    return found


def propose_copy(proposed: Proposed, history: Tensor, slots: Tensor, lengths: Tensor, hits: Tensor, count: int) -> None:
    """Make the last `count` proposed nodes a copy, as `draft.head.trees.copies` defines it. `history` (slots, cells)
    are the tokens of texts with `lengths` rows; `hits` are the log-probabilities of a copied token by how many tokens
    before it agree."""
    batch, nodes = proposed.values.shape
    _copy[(batch,)](
        history, slots, lengths, hits, *proposed, history.stride(0), nodes, nodes - count, count,
        reach=len(hits) - 1, block=min(1024, triton.next_power_of_2(history.shape[1])),
        block_nodes=triton.next_power_of_2(nodes - count), num_warps=4, **early(slots.device),
    )  # fmt: skip


class Laid(NamedTuple):
    """Trees as tables, (batch, nodes) each."""

    tokens: Tensor
    parents: Tensor
    depths: Tensor
    bits: Tensor
    """(batch, nodes, words): the ancestors of nodes, as bits"""

    @classmethod
    def place(cls, batch: int, nodes: int, device: torch.device) -> Laid:
        tokens, parents, depths = (torch.empty(batch, nodes, dtype=torch.int64, device=device) for _ in range(3))
        return cls(
            tokens, parents, depths, torch.empty(batch, nodes, words_for(nodes), dtype=torch.int32, device=device)
        )


def lay(proposed: Proposed, levels: Tensor, roots: Tensor, place: Laid, depth: int) -> None:
    """Write trees of the best proposed nodes, at most `depth` levels deep, to their place.

    `levels` (nodes,) are the depths of proposed nodes. Of equally probable nodes the first is better.
    """
    (batch, count), nodes = proposed.values.shape, place.tokens.shape[1]
    block = triton.next_power_of_2(count)
    ranks, numbers = torch.empty(2, batch, count, dtype=torch.int32, device=roots.device)
    piece = min(32, block)
    sooner = early(roots.device)
    _rank[(triton.cdiv(count, piece), batch)](
        proposed.values, ranks, count, block=block, piece=piece, num_warps=4, **sooner
    )
    _number[(batch,)](ranks, numbers, count, nodes - 1, block=block, num_warps=4, **sooner)
    _lay[(batch,)](
        numbers, proposed.tokens, proposed.parents, levels, roots, *place, roots.stride(0), count, nodes,
        depth=depth, words=place.bits.shape[2], block=block, num_warps=4, **sooner,
    )  # fmt: skip


def follow(
    paths: Tensor, tokens: Tensor, following: Tensor, lengths: Tensor, slots: Tensor, history: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The token after each node of accepted paths (batch, steps), the new number of rows of every text, and the index
    of the last row of each path among all rows. The tokens are appended to the `history` (slots, cells) of their
    texts."""
    batch, steps = paths.shape
    after = torch.empty(batch, steps, dtype=torch.int64, device=paths.device)
    ends, last = (torch.empty(batch, dtype=torch.int32, device=paths.device) for _ in range(2))
    _follow[(batch,)](
        paths, tokens, following, lengths, slots, history, after, ends, last,
        paths.stride(0), tokens.stride(0), following.stride(0), history.stride(0), steps,
        block=triton.next_power_of_2(steps), num_warps=1, **early(paths.device),
    )  # fmt: skip
    return after, ends, last


def remember(rows: Tensor, last: Tensor, slots: Tensor, predicted: Tensor, carried: Tensor) -> None:
    """Store what the last row of each text predicted and carried on, (slots, width) each; `rows` hold both, or one that
    serves as both."""
    width = predicted.shape[1]
    _remember[(len(slots),)](
        rows, last, slots, predicted, carried, rows.stride(0), rows.shape[1] - width,
        width=width, block=triton.next_power_of_2(width), num_warps=1, **early(rows.device),
    )  # fmt: skip


@triton.jit(do_not_specialize=["first", "cell"])
def _pick(
    values, places, table, known, slots, path_values, path_numbers, path_bits, rows_at,
    proposed_values, proposed_tokens, proposed_parents, out_values, out_tokens, out_numbers, out_states, out_bits,
    tokens, some, all_proposed, first, cell,
    rows: tl.constexpr, count: tl.constexpr, width: tl.constexpr, words: tl.constexpr, block_words: tl.constexpr,
    rivals: tl.constexpr, block: tl.constexpr, early: tl.constexpr,
):  # fmt: skip
    begin(early)
    text = tl.program_id(0)
    at = tl.arange(0, block)
    real = at < rows * count
    # If fewer nodes are proposed than are wanted, the last one is repeated.
    spot = tl.minimum(at, rows * count - 1)
    line, place = text * rows + spot // count, tl.load(places + text * rows * count + spot).to(tl.int64)
    value = _of_path(values, path_values, text, at, rows, count)
    slot = tl.load(slots + text).to(tl.int64)
    listed = place < tokens
    token = tl.load(table + place, mask=listed, other=0)
    token += tl.load(known + slot * some + place - tokens, mask=place >= tokens, other=0)
    parent = tl.load(path_numbers + line)
    goal = text * all_proposed + first + at
    tl.store(proposed_values + goal, value, mask=real)
    tl.store(proposed_tokens + goal, token, mask=real)
    tl.store(proposed_parents + goal, parent, mask=real)
    rank = tl.zeros((block,), tl.int32)
    for start in range(0, block, rivals):
        other = start + tl.arange(0, rivals)
        rival = _of_path(values, path_values, text, other, rows, count)[None, :]
        better = (rival > value[:, None]) | ((rival == value[:, None]) & (other[None, :] < at[:, None]))
        rank += tl.sum(better.to(tl.int32), axis=1)
    chosen, out = rank < width, text * width + rank
    tl.store(out_values + out, value, mask=chosen)
    tl.store(out_tokens + out, token, mask=chosen)
    tl.store(out_numbers + out, (first + spot).to(tl.int64), mask=chosen)
    tl.store(out_states + out, tl.load(rows_at + line).to(tl.int64), mask=chosen)
    word, bit = tl.arange(0, block_words)[None, :], (cell + rank)[:, None]
    bits = tl.load(path_bits + line[:, None] * words + word, mask=word < words, other=0)
    bits |= tl.where(word == bit // 32, 1, 0) << (bit % 32)
    tl.store(out_bits + out[:, None] * words + word, bits, mask=chosen[:, None] & (word < words))


@triton.jit
def _of_path(values, path_values, text, at, rows: tl.constexpr, count: tl.constexpr):
    """The log-probabilities of paths to proposed nodes. NaN and places beyond the proposals become the lowest value:
    with NaN, ranks could coincide."""
    real = at < rows * count
    value = tl.load(values + text * rows * count + at, mask=real, other=NOTHING)
    value += tl.load(path_values + text * rows + at // count, mask=real, other=NOTHING)
    return tl.where(value == value, value, 2 * NOTHING)


@triton.jit(do_not_specialize=["stride", "all_proposed", "first", "count"])
def _copy(
    history, slots, lengths, hits, values, tokens, parents, stride, all_proposed, first, count,
    reach: tl.constexpr, block: tl.constexpr, block_nodes: tl.constexpr, early: tl.constexpr,
):  # fmt: skip
    begin(early)
    text = tl.program_id(0)
    row = history + tl.load(slots + text).to(tl.int64) * stride
    end = tl.load(lengths + text).to(tl.int32) - 1
    best = tl.full((), 0, tl.int64)  # the number of agreeing tokens and their place, as one number
    for start in range(0, end, block):
        place = start + tl.arange(0, block)
        going = place < end
        agreeing = tl.zeros((block,), tl.int64)
        for back in tl.static_range(reach):
            token = tl.load(row + end - back, mask=end >= back, other=-1)
            there = tl.load(row + place - back, mask=going & (place >= back), other=-2)
            going = going & (there == token)
            agreeing += going.to(tl.int64)
        best = tl.maximum(best, tl.max(tl.where(agreeing > 0, agreeing * stride + place, 0), axis=0))
    agreed, place = (best // stride).to(tl.int32), (best % stride).to(tl.int32)
    period = tl.maximum(end - place, 1)
    node = tl.arange(0, block_nodes)
    real, line = node < first, text * all_proposed
    value_of = tl.load(values + line + node, mask=real, other=NOTHING)
    token_of = tl.load(tokens + line + node, mask=real, other=-1)
    parent_of = tl.load(parents + line + node, mask=real, other=-2)
    at = tl.full((), -1, tl.int64)  # the last node of the copy that is among the proposed nodes
    shared = tl.full((), 1, tl.int32)  # whether all nodes up to here are among them
    value = tl.full((), 0.0, tl.float32)
    for step in range(count):
        token = tl.load(row + place + 1 + step % period)
        value += tl.load(hits + tl.minimum(agreed + step, reach))
        worth = tl.where(agreed > 0, value, NOTHING)
        same = real & (shared > 0) & (parent_of == at) & (token_of == token)
        spot = tl.max(tl.where(same, node, -1), axis=0)
        found = (spot >= 0).to(tl.int32)
        value_of = tl.where(same, tl.maximum(value_of, worth), value_of)
        goal = line + first + step
        tl.store(tokens + goal, token)
        tl.store(values + goal, tl.where(found > 0, NOTHING, worth))
        tl.store(parents + goal, tl.where(shared > 0, at, (first + step - 1).to(tl.int64)))
        at = tl.where(found > 0, spot.to(tl.int64), at)
        shared = shared * found
    tl.store(values + line + node, value_of, mask=real)


@triton.jit
def _rank(values, ranks, count, block: tl.constexpr, piece: tl.constexpr, early: tl.constexpr):
    """The rank of each proposed node: how many nodes are better."""
    begin(early)
    text = tl.program_id(1)
    at, other = tl.program_id(0) * piece + tl.arange(0, piece), tl.arange(0, block)
    value = tl.load(values + text * count + at, mask=at < count, other=2 * NOTHING)[:, None]
    rival = tl.load(values + text * count + other, mask=other < count, other=2 * NOTHING)[None, :]
    better = (rival > value) | ((rival == value) & (other[None, :] < at[:, None]))
    tl.store(ranks + text * count + at, tl.sum(better.to(tl.int32), axis=1), mask=at < count)


@triton.jit
def _number(ranks, numbers, count, most, block: tl.constexpr, early: tl.constexpr):
    """The number in the tree of each proposed node, in order from 1 on; -1 for a node that is not in the tree."""
    begin(early)
    text = tl.program_id(0)
    at = tl.arange(0, block)
    kept = (tl.load(ranks + text * count + at, mask=at < count, other=most) < most).to(tl.int32)
    tl.store(numbers + text * count + at, tl.where(kept != 0, tl.cumsum(kept, axis=0), -1), mask=at < count)


@triton.jit(do_not_specialize=["stride_root"])
def _lay(
    numbers, proposed_tokens, proposed_parents, levels, roots, tokens, parents, depths, bits,
    stride_root, count, nodes,
    depth: tl.constexpr, words: tl.constexpr, block: tl.constexpr, early: tl.constexpr,
):  # fmt: skip
    begin(early)
    text = tl.program_id(0)
    at = tl.arange(0, block)
    number = tl.load(numbers + text * count + at, mask=at < count, other=-1)
    chosen = number > 0
    goal = text * nodes + number
    parent = tl.load(proposed_parents + text * count + at, mask=chosen, other=-1)
    # With equal probabilities a parent may be left out while its child is chosen: then the child is padding.
    real, above, node = chosen, parent, number
    directly = tl.zeros((block,), tl.int32)
    for step in tl.static_range(depth):
        below = chosen & (above >= 0)
        node = tl.load(numbers + text * count + above, mask=below, other=0)
        real = real & (node >= 0)
        if step == 0:
            directly = node
        above = tl.load(proposed_parents + text * count + above, mask=below, other=-1)
    token = tl.load(proposed_tokens + text * count + at, mask=chosen, other=0)
    level = tl.load(levels + at, mask=chosen, other=0)
    tl.store(tokens + goal, tl.where(real, token, 0), mask=chosen)
    tl.store(parents + goal, tl.where(real, directly, -1).to(tl.int64), mask=chosen)
    tl.store(depths + goal, tl.where(real, level, 0).to(tl.int64), mask=chosen)
    for word in tl.static_range(words):
        mark = tl.where(number // 32 == word, 1, 0) << (number % 32)
        if word == 0:
            mark |= 1
        above = parent
        for _ in tl.static_range(depth):
            below = chosen & (above >= 0)
            node = tl.load(numbers + text * count + above, mask=below, other=0)
            mark |= tl.where(below & (node // 32 == word), 1, 0) << (tl.maximum(node, 0) % 32)
            above = tl.load(proposed_parents + text * count + above, mask=below, other=-1)
        tl.store(bits + goal * words + word, tl.where(real, mark, 0), mask=chosen)
        tl.store(bits + text * nodes * words + word, 1 if word == 0 else 0)
    tl.store(tokens + text * nodes, tl.load(roots + text * stride_root).to(tl.int64))
    tl.store(parents + text * nodes, tl.full((), -1, tl.int64))
    tl.store(depths + text * nodes, tl.full((), 0, tl.int64))


@triton.jit(do_not_specialize=["stride_path", "stride_token", "stride_following", "stride_history", "steps"])
def _follow(
    paths, tokens, following, lengths, slots, history, after, ends, last,
    stride_path, stride_token, stride_following, stride_history, steps,
    block: tl.constexpr, early: tl.constexpr,
):  # fmt: skip
    begin(early)
    text = tl.program_id(0)
    step = tl.arange(0, block)
    node = tl.load(paths + text * stride_path + step, mask=step < steps, other=-1)
    following_node = tl.load(paths + text * stride_path + step + 1, mask=step + 1 < steps, other=-1)
    token = tl.load(tokens + text * stride_token + following_node, mask=following_node >= 0, other=0).to(tl.int64)
    token = tl.where(following_node >= 0, token, tl.load(following + text * stride_following).to(tl.int64))
    tl.store(after + text * steps + step, token, mask=step < steps)
    kept = tl.sum((node >= 0).to(tl.int32), axis=0)
    length = tl.load(lengths + text).to(tl.int32)
    slot = tl.load(slots + text).to(tl.int64)
    tl.store(history + slot * stride_history + length + step, token, mask=(step < kept) & (slot >= 0))
    tl.store(ends + text, length + kept)
    tl.store(last + text, text * steps + tl.maximum(kept - 1, 0))


@triton.jit
def _remember(
    rows, last, slots, predicted, carried, stride_row, shift,
    width: tl.constexpr, block: tl.constexpr, early: tl.constexpr,
):  # fmt: skip
    begin(early)
    text = tl.program_id(0)
    at = tl.arange(0, block)
    row, slot = tl.load(last + text).to(tl.int64), tl.load(slots + text).to(tl.int64)
    some = at < width
    tl.store(predicted + slot * width + at, tl.load(rows + row * stride_row + at, mask=some), mask=some)
    tl.store(carried + slot * width + at, tl.load(rows + row * stride_row + shift + at, mask=some), mask=some)
