"""The likeliest tokens of a table after rows of states, as Triton kernels.

A program norms the rows of a tile, multiplies them with a part of the output rows, and returns the best of its logits
and the sum of their exponentials. The k best tokens of a row are in the k parts with the highest best logits, so a
second kernel reads no other logits. A table of 16,384 rows is 19 MB for a model of width 576, which an H200 reads in 5
microseconds; softmax and top-k over whole rows of logits take ten times as long. For sampled texts the noise of their
draws is added to the logits, as `draft.foresight` explains: a draw chooses a block of the vocabulary first, so all rows
of a part are from one block. The plain code of `draft.head.trees.device` is the reference. Without a CUDA device only
tests import this file.
"""

# mypy: disable-error-code="import-untyped, import-not-found, untyped-decorator, no-untyped-def"

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from branchwise.core.rows import BLOCK
from branchwise.cuda.early import begin, early, fetch
from branchwise.cuda.kernels import _operand
from branchwise.cuda.noise import GAMMA, mix
from branchwise.cuda.products import Summed, asked, product, scales

NOTHING = tl.constexpr(-1.0e30)
"""the logit outside the vocabulary; it is finite, so that differences are numbers"""
SIZE = 64
"""the output rows of a program"""
MOST_TILED = 32
"""the most rows of states in a tile: every tile reads its part of the table again, but the noise of more rows does not
fit into registers"""
MOST = tl.constexpr(BLOCK // SIZE)
"""the most parts of a block of the vocabulary"""
WHOLE = tl.constexpr(BLOCK)
"""the tokens of a block of the vocabulary"""


class Parts(NamedTuple):
    """The rows of a table in rising order of their tokens, in parts of at most 64 rows from one block of the
    vocabulary."""

    names: Tensor
    """(tokens,): the token of each row"""
    starts: Tensor
    """(parts,): the first row of each part"""
    counts: Tensor
    """(parts,): the number of rows of each part"""
    owners: Tensor
    """(parts,): the block of the vocabulary of each part"""
    firsts: Tensor
    """(blocks + 1,): the first part of each block of the vocabulary, and last the number of parts"""

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
    rows: Summed,
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
    """The log-probabilities of the best tokens after rows[chosen], and the places of these tokens, (batch, rows, count)
    each.

    `chosen` is (batch, rows). Of every row only the first elements are read, as many as the table is wide. Rows are
    normed here; the weights of the norm are multiplied into the table. Places below len(table) are rows of the table
    (tokens, width); the next places are the `extra` rows (slots, some, width) of the slot of each text, if `known`
    (slots, some) names tokens for them. The tokens come `depth` positions after the last row of each text; `draws` are
    the `Draws` of slots.
    """
    (batch, per_text), width, (states, squares) = chosen.shape, table.shape[1], rows
    whole, every, some = batch * per_text, len(parts.starts), extra.shape[1]
    device = states.device
    logits, sums = torch.empty(whole, len(table), device=device), torch.empty(4, whole, every, device=device)
    more, best = torch.empty(whole, some, device=device), torch.empty(whole, count, device=device)
    where = torch.empty(whole, count, device=device, dtype=torch.int32)
    tile, fill = (max(16, triton.next_power_of_2(rows)) for rows in (min(whole, MOST_TILED), per_text))
    tiles = triton.cdiv(whole, tile)
    _parts[(every * tiles + triton.cdiv(some, SIZE) * batch,)](
        states, squares, chosen, table, *parts[:3], extra, known, slots, lengths, *draws, logits, *sums, more,
        states.stride(0), squares.stride(0), lengths.stride(0), whole, per_text, tiles, some, batch, len(table),
        depth, epsilon,
        width=width, every=every, parts=squares.shape[1], size=SIZE, piece=64 if width >= 64 else 16, tile=tile,
        fill=fill, operand=_operand(table.dtype), num_warps=4, num_stages=4, **early(device),
    )  # fmt: skip
    blocks, at_least = len(parts.firsts) - 1, max(2, count)  # a sort needs two or more elements
    _merge[(whole,)](
        logits, *sums, more, *parts[1:], known, slots, lengths, *draws, best, where,
        lengths.stride(0), per_text, len(table), depth,
        every=every, count=count, some=some, blocks=blocks, size=SIZE,
        padded_every=triton.next_power_of_2(max(every, at_least)), padded_count=triton.next_power_of_2(at_least),
        padded=triton.next_power_of_2(max(some, at_least)), padded_blocks=triton.next_power_of_2(blocks), num_warps=8,
        **early(device),
    )  # fmt: skip
    return best.view(batch, per_text, count), where.view(batch, per_text, count)


@triton.jit
def _waits(keys, names):
    """`foresight.waits`."""
    bits = (mix(keys + names.to(tl.int64) * GAMMA) >> 41) & 0x7FFFFF
    return -tl.log((bits.to(tl.float32) + 0.5) * (1.0 / 8388608))


@triton.jit
def _key(dice, lengths, text, slot, stride, depth, real):
    """The random key of the draw of a text after a row."""
    position = tl.load(lengths + text * stride, mask=real, other=0).to(tl.int64) + depth
    return mix(tl.load(dice + slot, mask=real, other=0) + position * GAMMA)


@triton.jit
def _product(
    rows, squares, place, stride_row, stride_squares, real, epsilon, weights, column, inside,
    width: tl.constexpr, parts: tl.constexpr, tile: tl.constexpr, size: tl.constexpr, piece: tl.constexpr,
    operand: tl.constexpr,
):  # fmt: skip
    """(tile, size): the logits of normed rows for output rows."""
    summed = asked(squares, place * stride_squares, real, parts)
    found = product(
        rows, place * stride_row, real, weights, column, inside, width, width, size, tile, 1, piece, operand
    )  # fmt: skip
    return found * scales(summed, epsilon, width)


@triton.jit(do_not_specialize=["whole", "per_text", "tiles", "texts", "depth"])
def _parts(
    rows, squares, chosen, table, names, starts, counts, extra, known, slots, lengths, dice, temperatures,
    logits, highest, totals, speeds, bests, more,
    stride_row, stride_squares, stride_length, whole, per_text, tiles, some, texts, tokens, depth, epsilon,
    width: tl.constexpr, every: tl.constexpr, parts: tl.constexpr, size: tl.constexpr, piece: tl.constexpr,
    tile: tl.constexpr, fill: tl.constexpr, operand: tl.constexpr, early: tl.constexpr,
):  # fmt: skip
    """A part of the table for a tile of rows, or some tokens of a prompt for the rows of its text."""
    program, columns = tl.program_id(0), tl.arange(0, size)
    if program < every * tiles:
        part, group = program // tiles, program % tiles  # programs of one part run together
        row = group * tile + tl.arange(0, tile)
        real = row < whole
        start = tl.load(starts + part)
        inside = columns < tl.load(counts + part)
        fetch(table, start + columns, tokens, width, early)
        begin(early)
        place = tl.load(chosen + row, mask=real, other=0).to(tl.int64)
        found = _product(
            rows, squares, place, stride_row, stride_squares, real, epsilon, table, start + columns, inside, width,
            parts, tile, size, piece, operand,
        )  # fmt: skip
        text = row // per_text
        slot = tl.load(slots + text, mask=real, other=0).to(tl.int64)
        temperature = tl.load(temperatures + slot, mask=real, other=0.0)
        found = found / tl.where(temperature > 0, temperature, 1.0)[:, None]
        found = tl.where(inside[None, :], found, NOTHING)
        high = tl.max(found, axis=1)
        mass = tl.where(inside[None, :], tl.exp(found - high[:, None]), 0.0)
        total = tl.sum(mass, axis=1)
        speed, best = total, high
        if tl.max(temperature, axis=0) > 0:
            key = _key(dice, lengths, text, slot, stride_length, depth, real)
            name = tl.load(names + start + columns, mask=inside, other=0)
            wait = tl.where((temperature > 0)[:, None], _waits(key[:, None], name[None, :]), 1.0)
            found = tl.where(inside[None, :], found - tl.log(wait), NOTHING)
            speed, best = tl.sum(mass / wait, axis=1), tl.max(found, axis=1)
        at = row * every + part
        tl.store(highest + at, high, mask=real)
        tl.store(totals + at, total, mask=real)
        tl.store(speeds + at, speed, mask=real)
        tl.store(bests + at, best, mask=real)
        goal = logits + row[:, None].to(tl.int64) * tokens + start + columns[None, :]
        tl.store(goal, found, mask=real[:, None] & inside[None, :])
    else:
        begin(early)
        _beside(
            program - every * tiles, rows, squares, chosen, extra, known, slots, temperatures, more,
            stride_row, stride_squares, per_text, some, texts, epsilon, width, parts, size, piece, fill, operand,
        )  # fmt: skip


@triton.jit
def _beside(
    program, rows, squares, chosen, extra, known, slots, temperatures, more,
    stride_row, stride_squares, per_text, some, texts, epsilon,
    width: tl.constexpr, parts: tl.constexpr, size: tl.constexpr, piece: tl.constexpr, fill: tl.constexpr,
    operand: tl.constexpr,
):  # fmt: skip
    """Some tokens of a prompt for the rows of its text."""
    text, inner = program % texts, tl.arange(0, fill)
    row, real = text * per_text + inner, inner < per_text
    column = program // texts * size + tl.arange(0, size)
    slot = tl.load(slots + text).to(tl.int64)
    inside = tl.load(known + slot * some + column, mask=column < some, other=-1) >= 0
    place = tl.load(chosen + row, mask=real, other=0).to(tl.int64)
    theirs = extra + slot * some * width
    found = _product(
        rows, squares, place, stride_row, stride_squares, real, epsilon, theirs, column, inside, width, parts, fill,
        size, piece, operand,
    )  # fmt: skip
    temperature = tl.load(temperatures + slot)
    found = tl.where(inside[None, :], found / tl.where(temperature > 0, temperature, 1.0), NOTHING)
    goal = more + row[:, None] * some + column[None, :]
    tl.store(goal, found, mask=real[:, None] & (column < some)[None, :])


@triton.jit
def _ranked(value, place):
    """Values and their places as integers in the order of the values; of equal values the first place is greatest."""
    bits = (value + 0.0).to(tl.int32, bitcast=True)  # turns -0.0 into 0.0
    bits ^= (bits >> 31) & 0x7FFFFFFF
    return (bits.to(tl.int64) << 32) | ((~place).to(tl.int64) & 0xFFFFFFFF)


@triton.jit
def _unranked(rank):
    """The value and the place of an integer that `_ranked` made."""
    bits = (rank >> 32).to(tl.int32)
    bits ^= (bits >> 31) & 0x7FFFFFFF
    return bits.to(tl.float32, bitcast=True), (~rank & 0x7FFFFFFF).to(tl.int32)


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
    """The term that turns the logits of parts, minus the highest one, into log-probabilities."""
    share = tl.zeros_like(part).to(tl.float32) + 1.0
    if drawn:
        block = tl.load(owners + part, mask=inside, other=0)
        mass, speed = _block(firsts, highest, totals, speeds, block, inside, top)
        likely = inside & (mass > 0) & (speed > 0)
        share = tl.where(likely, mass / _waits(mix(key), block) / tl.where(likely, speed, 1.0), 0.0)
    return tl.where(share > 0, tl.log(tl.where(share > 0, share, 1.0) / whole), NOTHING)


@triton.jit(do_not_specialize=["per_text", "depth"])
def _merge(
    logits, highest, totals, speeds, bests, more, starts, counts, owners, firsts, known, slots, lengths, dice,
    temperatures, best, where, stride_length, per_text, tokens, depth,
    every: tl.constexpr, count: tl.constexpr, some: tl.constexpr, blocks: tl.constexpr, size: tl.constexpr,
    padded_every: tl.constexpr, padded_count: tl.constexpr, padded: tl.constexpr, padded_blocks: tl.constexpr,
    early: tl.constexpr,
):  # fmt: skip
    """Find the best tokens, which are in the parts with the highest best logits: first find as many parts as tokens are
    wanted, then the best among their tokens and those of the prompt."""
    begin(early)
    row = tl.program_id(0)
    text = row // per_text
    slot = tl.load(slots + text).to(tl.int64)
    drawn = tl.load(temperatures + slot) > 0
    key = _key(dice, lengths, text, slot, stride_length, depth, drawn)
    highest, totals = highest + row * every, totals + row * every
    speeds, bests = speeds + row * every, bests + row * every
    # The tokens of the prompt, each with the sums of its block in the table.
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
    # Order parts by their best tokens; of equal parts the earlier comes first.
    highs = tl.load(bests + part, mask=there, other=NOTHING)
    scale = _log_share(owners, firsts, highest, totals, speeds, key, part, there, top, whole, drawn)
    highs = tl.where((highs > NOTHING) & (scale > NOTHING), highs - top + scale, NOTHING)
    ranks = _ranked(highs, part)
    rank_of = tl.arange(0, padded_count)
    high, winner = _unranked(tl.topk(ranks, padded_count))
    winners = tl.where((rank_of < count) & (high > NOTHING), winner, every)
    # Order tokens by their probability.
    scale = _log_share(owners, firsts, highest, totals, speeds, key, winners, winners < every, top, whole, drawn)
    start = tl.load(starts + winners, mask=winners < every, other=0)
    within = tl.load(counts + winners, mask=winners < every, other=0)
    inner = tl.arange(0, size)
    place, inside = start[:, None] + inner[None, :], inner[None, :] < within[:, None]
    value = tl.load(logits + row.to(tl.int64) * tokens + place, mask=inside, other=NOTHING)
    value = tl.where((value > NOTHING) & (scale > NOTHING)[:, None], value - top + scale[:, None], NOTHING)
    listed = tl.topk(tl.reshape(_ranked(value, place), (padded_count * size,)), padded_count)
    own = tl.topk(_ranked(own_value, tokens + column), padded_count)
    value, place = _unranked(tl.topk(tl.reshape(tl.join(listed, own), (2 * padded_count,)), padded_count))
    tl.store(best + row * count + rank_of, value, mask=rank_of < count)
    tl.store(where + row * count + rank_of, place, mask=rank_of < count)
