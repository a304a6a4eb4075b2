"""The likeliest tokens of a table after rows of states, as Triton kernels: logits are never in memory.

A program norms the rows of a tile, multiplies them with a part of the output rows, keeps the best few of its logits and
the sum of their exponentials, and a second kernel merges what the parts found. A table of 16,384 rows is 19 MB for a
model of width 576, which an H200 reads in 5 microseconds; softmax and top-k over logits in memory take ten times as
long. Where texts draw their tokens, logits count with the noise of these draws, as `draft.foresight` says: the rows of
a part are of one block of the vocabulary, which draws choose first. The plain way of `draft.head.trees.device` is the
truth. Without a CUDA device only tests import this file.
"""

# mypy: disable-error-code="import-untyped, import-not-found, untyped-decorator, no-untyped-def"

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from branchwise.core.rows import BLOCK
from branchwise.cuda.heads.rows import _norms, _row_piece, _weights
from branchwise.cuda.kernels import _operand
from branchwise.cuda.noise import GAMMA, mix

NOTHING = tl.constexpr(-1.0e30)
"""the logit of no token; it is finite, so that differences are numbers"""
SIZE = 64
"""output rows of a program"""
MOST = tl.constexpr(BLOCK // SIZE)
"""parts of a block of the vocabulary, at most"""
WHOLE = tl.constexpr(BLOCK)
"""tokens of a block of the vocabulary"""


class Parts(NamedTuple):
    """The rows of a table, whose tokens rise, in parts of at most 64 rows of one block of the vocabulary."""

    names: Tensor
    """(tokens,)"""
    starts: Tensor
    """(parts,): the first row of each part"""
    counts: Tensor
    """(parts,): how many rows it has"""
    owners: Tensor
    """(parts,): its block of the vocabulary"""
    firsts: Tensor
    """(blocks + 1,): the first part of each block of the vocabulary, and behind the last one the number of parts"""

    @classmethod
    def of(cls, names: Tensor, vocabulary: int) -> Parts:
        blocks = names.cpu() // BLOCK
        sizes = torch.bincount(blocks, minlength=-(-vocabulary // BLOCK)).tolist()
        parts: list[tuple[int, int, int]] = []
        firsts, row = [], 0
        for owner, size in enumerate(sizes):
            firsts.append(len(parts))
            parts += [(row + first, min(SIZE, size - first), owner) for first in range(0, size, SIZE)]
            row += size
        columns = *zip(*parts, strict=True), [*firsts, len(parts)]
        return cls(names, *(torch.tensor(column, dtype=torch.int32, device=names.device) for column in columns))


def best_tokens(
    rows: Tensor,
    chosen: Tensor,
    epsilon: float,
    table: Tensor,
    parts: Parts,
    extra: Tensor,
    known: Tensor,
    slots: Tensor,
    lengths: Tensor,
    draws: tuple[Tensor, Tensor],
    depth: int,
    count: int,
) -> tuple[Tensor, Tensor]:
    """The logarithms of the best chances after rows[chosen], and where their tokens stand, (batch, rows, count) each.

    `chosen` is (batch, rows), and of every row the first elements count, as many as the table has. Rows are normed; the
    weights of the norm are in the table. Places below len(table) are rows of the table (tokens, width); behind them
    come the `extra` rows (slots, some, width) of the slot of each text, if `known` (slots, some) names tokens for them.
    Tokens are to come `depth` positions behind the last of so many rows of each text; `draws` are the `Draws` of slots.
    """
    (batch, per_text), width = chosen.shape, table.shape[1]
    whole, every, some = batch * per_text, len(parts.starts), extra.shape[1]
    values = torch.empty(whole, every, count, device=rows.device)
    places = torch.empty(whole, every, count, device=rows.device, dtype=torch.int32)
    sums = torch.empty(3, whole, every, device=rows.device)
    more = torch.empty(whole, some, device=rows.device)
    best, where = torch.empty_like(values[:, 0]), torch.empty_like(places[:, 0])
    tile, fill = max(16, min(64, triton.next_power_of_2(whole))), max(16, triton.next_power_of_2(per_text))
    programs = every + triton.cdiv(some, SIZE), max(triton.cdiv(whole, tile), batch)
    _parts[programs](
        rows, chosen, table, *parts[:3], extra, known, slots, lengths, *draws, values, places, *sums, more,
        rows.stride(0), lengths.stride(0), whole, per_text, some, batch, depth, epsilon,
        width=width, every=every, count=count, size=SIZE, tile=tile, fill=fill,
        operand=_operand(table.dtype), num_warps=4, num_stages=4,
    )  # fmt: skip
    _merge[(whole,)](
        values, places, *sums, more, *parts[3:], known, slots, lengths, *draws, best, where,
        lengths.stride(0), per_text, len(table), depth,
        every=every, count=count, some=some, blocks=len(parts.firsts) - 1,
        padded_every=triton.next_power_of_2(every), padded_count=triton.next_power_of_2(count),
        padded=triton.next_power_of_2(some), padded_blocks=triton.next_power_of_2(len(parts.firsts) - 1), num_warps=4,
    )  # fmt: skip
    return best.view(batch, per_text, count), where.view(batch, per_text, count)


@triton.jit
def _waits(keys, names):
    """`foresight.waits`."""
    bits = (mix(keys + names.to(tl.int64) * GAMMA) >> 41) & 0x7FFFFF
    return -tl.log((bits.to(tl.float32) + 0.5) * (1.0 / 8388608))


@triton.jit
def _key(dice, lengths, text, slot, stride, depth, real):
    """That of the draw of a text behind a row."""
    position = tl.load(lengths + text * stride, mask=real, other=0).to(tl.int64) + depth
    return mix(tl.load(dice + slot, mask=real, other=0) + position * GAMMA)


@triton.jit
def _product(
    rows, place, real, epsilon, weights, column, inside, width: tl.constexpr, tile: tl.constexpr, size: tl.constexpr,
    operand: tl.constexpr,
):  # fmt: skip
    """(tile, size): logits of normed rows with output rows; both are read in pieces."""
    piece: tl.constexpr = 64 if width >= 64 else 16
    found, gram = tl.zeros((tile, size), tl.float32), tl.zeros((tile, tile), tl.float32)
    for start in range(0, width, piece):
        at = start + tl.arange(0, piece)
        left = _row_piece(rows, place, real, at, at < width, operand)
        right = _weights(weights, column, inside, at, at < width, width, operand)
        found = tl.dot(left, right, found, input_precision="ieee")
        gram = tl.dot(left, tl.trans(left), gram, input_precision="ieee")
    return found / _norms(gram, epsilon, width, tile)[:, None]


@triton.jit(do_not_specialize=["whole", "per_text", "texts", "depth"])
def _parts(
    rows, chosen, table, names, starts, counts, extra, known, slots, lengths, dice, temperatures,
    values, places, highest, totals, speeds, more,
    stride_row, stride_length, whole, per_text, some, texts, depth, epsilon,
    width: tl.constexpr, every: tl.constexpr, count: tl.constexpr, size: tl.constexpr,
    tile: tl.constexpr, fill: tl.constexpr, operand: tl.constexpr,
):  # fmt: skip
    """A part of the table for a tile of rows, or some tokens of a prompt for the rows of its text."""
    part, group = tl.program_id(0), tl.program_id(1)
    columns = tl.arange(0, size)
    if part < every:
        row = group * tile + tl.arange(0, tile)
        real = row < whole
        if group * tile < whole:
            start = tl.load(starts + part)
            inside = columns < tl.load(counts + part)
            place = tl.load(chosen + row, mask=real, other=0).to(tl.int64) * stride_row
            logits = _product(rows, place, real, epsilon, table, start + columns, inside, width, tile, size, operand)
            text = row // per_text
            slot = tl.load(slots + text, mask=real, other=0).to(tl.int64)
            temperature = tl.load(temperatures + slot, mask=real, other=0.0)
            logits = logits / tl.where(temperature > 0, temperature, 1.0)[:, None]
            logits = tl.where(inside[None, :], logits, NOTHING)
            high = tl.max(logits, axis=1)
            mass = tl.where(inside[None, :], tl.exp(logits - high[:, None]), 0.0)
            at = row * every + part
            tl.store(highest + at, high, mask=real)
            tl.store(totals + at, tl.sum(mass, axis=1), mask=real)
            if tl.max(temperature, axis=0) > 0:
                key = _key(dice, lengths, text, slot, stride_length, depth, real)
                name = tl.load(names + start + columns, mask=inside, other=0)
                wait = tl.where((temperature > 0)[:, None], _waits(key[:, None], name[None, :]), 1.0)
                mass = mass / wait
                logits = tl.where(inside[None, :], logits - tl.log(wait), NOTHING)
            tl.store(speeds + at, tl.sum(mass, axis=1), mask=real)
            for rank in range(count):
                best = tl.max(logits, axis=1)
                spot = tl.min(tl.where(logits == best[:, None], columns[None, :], size), axis=1)
                tl.store(values + at * count + rank, best, mask=real)
                tl.store(places + at * count + rank, start + spot, mask=real)
                logits = tl.where(columns[None, :] == spot[:, None], NOTHING, logits)
    elif group < texts:
        inner = tl.arange(0, fill)
        row, real = group * per_text + inner, inner < per_text
        column = (part - every) * size + columns
        slot = tl.load(slots + group).to(tl.int64)
        inside = tl.load(known + slot * some + column, mask=column < some, other=-1) >= 0
        place = tl.load(chosen + row, mask=real, other=0).to(tl.int64) * stride_row
        theirs = extra + slot * some * width
        logits = _product(rows, place, real, epsilon, theirs, column, inside, width, fill, size, operand)
        temperature = tl.load(temperatures + slot)
        logits = tl.where(inside[None, :], logits / tl.where(temperature > 0, temperature, 1.0), NOTHING)
        goal = more + row[:, None] * some + column[None, :]
        tl.store(goal, logits, mask=real[:, None] & (column < some)[None, :])


@triton.jit
def _block(firsts, highest, totals, speeds, block, inside, top):
    """The mass and the speed of blocks of the vocabulary, from their parts."""
    first = tl.load(firsts + block, mask=inside, other=0)
    end = tl.load(firsts + block + 1, mask=inside, other=0)
    mass, speed = tl.zeros_like(first).to(tl.float32), tl.zeros_like(first).to(tl.float32)
    for number in tl.static_range(MOST):
        real = first + number < end
        scale = tl.exp(tl.load(highest + first + number, mask=real, other=NOTHING) - top)
        mass += scale * tl.load(totals + first + number, mask=real, other=0.0)
        speed += scale * tl.load(speeds + first + number, mask=real, other=0.0)
    return mass, speed


@triton.jit
def _log_share(owners, firsts, highest, totals, speeds, key, part, inside, top, whole, drawn):
    """What is added to the logits of parts, less the highest one, so that they are logarithms of chances."""
    share = tl.zeros_like(part).to(tl.float32) + 1.0
    if drawn:
        block = tl.load(owners + part, mask=inside, other=0)
        mass, speed = _block(firsts, highest, totals, speeds, block, inside, top)
        likely = inside & (mass > 0) & (speed > 0)
        share = tl.where(likely, mass / _waits(mix(key), block) / tl.where(likely, speed, 1.0), 0.0)
    return tl.where(share > 0, tl.log(tl.where(share > 0, share, 1.0) / whole), NOTHING)


@triton.jit(do_not_specialize=["per_text", "depth"])
def _merge(
    values, places, highest, totals, speeds, more, owners, firsts, known, slots, lengths, dice, temperatures,
    best, where, stride_length, per_text, tokens, depth,
    every: tl.constexpr, count: tl.constexpr, some: tl.constexpr, blocks: tl.constexpr,
    padded_every: tl.constexpr, padded_count: tl.constexpr, padded: tl.constexpr, padded_blocks: tl.constexpr,
):  # fmt: skip
    """The best tokens are in the parts whose best ones are best: so many parts are found first, then the tokens among
    theirs and those of the prompt."""
    row = tl.program_id(0)
    text = row // per_text
    slot = tl.load(slots + text).to(tl.int64)
    drawn = tl.load(temperatures + slot) > 0
    key = _key(dice, lengths, text, slot, stride_length, depth, drawn)
    highest, totals, speeds = highest + row * every, totals + row * every, speeds + row * every
    values, places = values + row * every * count, places + row * every * count
    # The tokens of the prompt, each beside what the table has of its block.
    column = tl.arange(0, padded)
    name = tl.load(known + slot * some + column, mask=column < some, other=-1).to(tl.int64)
    real = name >= 0
    logit = tl.load(more + row * some + column, mask=real, other=NOTHING)
    part = tl.arange(0, padded_every)
    there = part < every
    top = tl.maximum(tl.max(tl.load(highest + part, mask=there, other=NOTHING), axis=0), tl.max(logit, axis=0))
    number = tl.arange(0, padded_blocks)
    mass, _ = _block(firsts, highest, totals, speeds, number, number < blocks, top)
    own_mass = tl.where(real, tl.exp(logit - top), 0.0)
    share = own_mass
    if drawn:
        first_wait, own_block = _waits(mix(key), number), tl.where(real, name // WHOLE, 0)
        own_first = _waits(mix(key), own_block)
        whole = tl.sum(mass / first_wait, axis=0) + tl.sum(own_mass / own_first, axis=0)
        own_speed = own_mass / _waits(key, name)
        beside_mass, beside_speed = _block(firsts, highest, totals, speeds, own_block, real, top)
        likely = real & (own_speed > 0)
        share = (beside_mass + own_mass) / own_first * own_speed / tl.where(likely, beside_speed + own_speed, 1.0)
    else:
        whole = tl.sum(mass, axis=0) + tl.sum(own_mass, axis=0)
    own_value = tl.where(share > 0, tl.log(tl.where(share > 0, share, 1.0) / whole), NOTHING)
    # Parts by their best tokens; the earlier one of equals comes first.
    highs = tl.load(values + part * count, mask=there, other=NOTHING)
    scale = _log_share(owners, firsts, highest, totals, speeds, key, part, there, top, whole, drawn)
    highs = tl.where((highs > NOTHING) & (scale > NOTHING), highs - top + scale, NOTHING)
    rank_of = tl.arange(0, padded_count)
    winners = tl.full((padded_count,), every, tl.int32)
    for rank in range(count):
        high = tl.max(highs, axis=0)
        first = tl.min(tl.where(highs == high, part, padded_every), axis=0)
        winners = tl.where(rank_of == rank, tl.where(high > NOTHING, first, every), winners)
        highs = tl.where(part == first, NOTHING, highs)
    # Tokens by their chances.
    scale = _log_share(owners, firsts, highest, totals, speeds, key, winners, winners < every, top, whole, drawn)
    inside = (winners < every)[:, None] & (rank_of < count)[None, :]
    at = tl.where(inside, winners[:, None] * count + rank_of[None, :], every * count)
    value = tl.load(values + at, mask=inside, other=NOTHING)
    value = tl.where((value > NOTHING) & (scale > NOTHING)[:, None], value - top + scale[:, None], NOTHING)
    at, value = tl.reshape(at, (padded_count * padded_count,)), tl.reshape(value, (padded_count * padded_count,))
    for rank in range(count):
        listed, own = tl.max(value, axis=0), tl.max(own_value, axis=0)
        chosen = tl.min(tl.where(value == listed, at, every * count), axis=0)
        chosen_own = tl.min(tl.where(own_value == own, column, padded), axis=0)
        found = tl.load(places + chosen, mask=chosen < every * count, other=0)
        tl.store(best + row * count + rank, tl.maximum(listed, own))
        tl.store(where + row * count + rank, tl.where(listed >= own, found, tokens + chosen_own))
        value = tl.where(at == tl.where(listed >= own, chosen, -1), 2 * NOTHING, value)
        own_value = tl.where(column == tl.where(listed >= own, -1, chosen_own), 2 * NOTHING, own_value)
