"""The verdict of `match` in two Triton kernels: one draws the target's token after every node of a batch of trees, the
other walks down each tree as long as it holds the drawn tokens.

Each text has its own temperature, cuts, bias and penalties. They are values, not structure: one kernel serves all texts
and sizes, so nothing is compiled or recorded again for a text with other parameters. A program works on one row and
never writes a distribution. The reference is `core.sampling.Warp` with `SeededChance.tokens`, with the same stages in
the same order and the same noise. Without a CUDA device only tests import this file.

Mass is the probability of a token relative to that of the best one. A cut by rank (top-k) or by mass (top-p) is a
search for the least mass that is kept; over the whole row that takes many passes. Nearly always only few tokens can be
cut or kept, so these are gathered first, and the search goes over them. For a cut by mass the likeliest few hundred are
gathered; if their mass is less than what must be kept, all tokens with a mass that matters.
"""

# mypy: disable-error-code="import-untyped, import-not-found, untyped-decorator, no-untyped-def"

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from branchwise.core import rng, rows
from branchwise.core.sampling import COLDEST
from branchwise.cuda.choices import IN_PROMPT, PARAMETERS, Choices
from branchwise.cuda.noise import GAMMA, NOBODY, arrivals, mix

BLOCK = tl.constexpr(rows.BLOCK)
STREAM = tl.constexpr(rng.stream_of("verify", "token", 0))
LEAST = tl.constexpr(COLDEST)
TIMES = tl.constexpr(IN_PROMPT - 1)
"""the bits of a count that hold the number of occurrences in the output"""
ONE = tl.constexpr(0x3F800000)
"""the bits of 1.0 in float32: floats that are not negative have the same order as their bits"""
ROOM = tl.constexpr(4096)
"""the most tokens of a row that are gathered; if more have a mass that matters, the whole row is searched"""
SIFTED, SIEVES = tl.constexpr(512), tl.constexpr(32)
"""how many gathered masses are compared together, and with how many thresholds"""
SLIGHT = tl.constexpr(1e-6)
"""the mass below which tokens are not gathered for a cut by rank"""
LIKELY, SPARE = tl.constexpr(1e-3), tl.constexpr(1e-3)
"""in units of 1 - top_p: the mass from which on a token is gathered first, and the margin by which the gathered mass
must exceed what is kept, because sums are rounded"""
FEW_ROWS = 132
"""the number of multiprocessors of an H200: up to this many rows, each row has one to itself"""


def judge(
    logits: Tensor,
    tokens: Tensor,
    parents: Tensor,
    depths: Tensor,
    seeds: Tensor,
    roots: Tensor,
    choices: Choices,
    *,
    with_tokens: bool = False,
) -> Tensor:
    """The `rows` of `match`'s verdicts on a batch, on request with the tokens of the accepted nodes; the other
    arguments are those of `draw_tokens`."""
    batch, nodes = tokens.shape
    drawn = draw_tokens(logits, tokens, parents, depths, seeds, roots, choices)
    rows = torch.empty(batch, 2 * nodes + 1 if with_tokens else nodes + 1, dtype=torch.int64, device=logits.device)
    _walk[(batch,)](
        drawn, tokens, parents, rows, nodes, tokens.stride(0), parents.stride(0), rows.stride(0),
        most=triton.next_power_of_2(nodes), with_tokens=with_tokens, num_warps=1,
    )  # fmt: skip
    return rows


def draw_tokens(
    logits: Tensor, tokens: Tensor, parents: Tensor, depths: Tensor, seeds: Tensor, roots: Tensor, choices: Choices
) -> Tensor:
    """(batch, nodes) int64: the token that each text draws after each node, the best one at temperature 0.

    `logits` (batch, nodes, vocabulary) of the unwarped model; `tokens`, `parents` and `depths` (batch, nodes) of the
    nodes, with depth 0 for padding, after which nothing is drawn; `seeds` and `roots` (batch,) are those of a
    `SeededChance`.
    """
    batch, nodes, vocabulary = logits.shape
    assert logits.stride(2) == 1, "a row of logits must lie in one piece"
    assert choices.bias.shape[1] == vocabulary, "choices are made for one vocabulary"
    found = torch.zeros(batch, nodes, dtype=torch.int64, device=logits.device)
    room = torch.empty(batch * nodes, ROOM.value, device=logits.device)
    # Blocks that are read together; with 128 registers a thread, a multiprocessor works on two of many rows at a time.
    at_once, warps, registers = (32, 16, 128) if batch * nodes <= FEW_ROWS else (16, 8, 128)
    _draw[(batch * nodes,)](
        logits, tokens, parents, depths, seeds, roots,
        choices.parameters, choices.bias, choices.counts.table, room, found,
        nodes, vocabulary, logits.stride(0), logits.stride(1), tokens.stride(0), parents.stride(0), depths.stride(0),
        width=len(PARAMETERS), at_once=at_once, num_warps=warps, maxnreg=registers,
    )  # fmt: skip
    return found


class Row(NamedTuple):
    """The logits after one node, and the adjustments to them before the temperature. Some fields are pointers."""

    logits: Any
    vocabulary: Any
    bias: Any
    biased: Any
    counts: Any
    """the token counts of the text, which are read if it has a penalty"""
    tokens: Any
    """the tokens of the tree"""
    parents: Any
    node: Any
    repetition: Any
    presence: Any
    frequency: Any
    room: Any
    """scratch space for the masses of gathered tokens"""


@triton.jit(
    do_not_specialize=["nodes", "stride_text", "stride_node", "stride_tokens", "stride_parents", "stride_depths"],
    do_not_specialize_on_alignment=["tokens", "parents", "depths", "seeds", "roots"],
)
def _draw(
    logits, tokens, parents, depths, seeds, roots, parameters, bias, counts, room, found,
    nodes, vocabulary, stride_text, stride_node, stride_tokens, stride_parents, stride_depths,
    width: tl.constexpr, at_once: tl.constexpr,
):  # fmt: skip
    text, node = (tl.program_id(0) // nodes).to(tl.int64), (tl.program_id(0) % nodes).to(tl.int64)
    depth = tl.load(depths + text * stride_depths + node).to(tl.int64)
    if (node == 0) | (depth > 0):
        own = parameters + text * width
        biased, counted = tl.load(own + 4).to(tl.int32), tl.load(own + 8).to(tl.int64)
        row = Row(
            logits + text * stride_text + node * stride_node, vocabulary, bias + text * vocabulary, biased,
            counts + counted * vocabulary, tokens + text * stride_tokens, parents + text * stride_parents, node,
            tl.load(own + 5), tl.load(own + 6), tl.load(own + 7), room + tl.program_id(0).to(tl.int64) * ROOM,
        )  # fmt: skip
        position = tl.load(roots + text) + depth + 1
        key = mix(mix(mix(tl.load(seeds + text)) + STREAM) + position * GAMMA)
        # Two specialisations of the same code, so that texts without a penalty do not pay for those that have one:
        # these hold more of every token, so they read fewer blocks together.
        if counted < 0:
            tl.store(found + text * nodes + node, _token(row, own, key, False, at_once))
        else:
            tl.store(found + text * nodes + node, _token(row, own, key, True, at_once // 2))


@triton.jit
def _token(row, own, key, penalised: tl.constexpr, at_once: tl.constexpr):
    """The token that a text with the parameters `own` draws from a row."""
    temperature, most, top_p, min_p = tl.load(own), tl.load(own + 1), tl.load(own + 2), tl.load(own + 3)
    best, token = _best(row, penalised, at_once)
    if temperature > 0:
        cold = tl.maximum(temperature, LEAST)
        high = best / cold
        most = tl.where(most < row.vocabulary, most, 0.0)
        floor = 0.0
        if (most > 0) | (top_p < 1):
            likely = tl.where(top_p < 1, (1 - top_p) * LIKELY, SLIGHT)
            count, total = _gather(row, cold, high, likely, penalised, at_once)
            enough = (_gathered_mass(row, count) >= (top_p + (1 - top_p) * SPARE) * total) | (most > 0)
            if (top_p < 1) & ((count < most) | (enough == 0)):
                # Tokens with less mass have together at most half of what a cut by mass removes from the row. After a
                # cut by rank it removes less, but at least 1 - top_p times the mass of the best token, which is 1.
                whole = tl.where(most > 0, 1.0, total)
                least = (1 - top_p) * whole / (2 * row.vocabulary)
                count, total = _gather(row, cold, high, least, penalised, at_once)
            if (count <= ROOM) & (count >= most):
                floor = _floor(row, count, total, cold, high, most, top_p, penalised, True, at_once)
            else:
                floor = _floor(row, count, total, cold, high, most, top_p, penalised, False, at_once)
        token = _raced(row, cold, high, tl.maximum(floor, min_p), key, penalised, at_once)
    return token


@triton.jit
def _adjusted(row, start, names, penalised: tl.constexpr):
    """The logits of the tokens `names`, which begin at `start`, with the penalties and the bias of the text; -inf
    outside the vocabulary."""
    inside = names < row.vocabulary
    value = tl.load(row.logits + names, mask=inside, other=float("-inf")).to(tl.float32)
    if penalised:
        value = _penalised(row, value, _seen(row, start, names))
    return value + tl.load(row.bias + names, mask=inside & (row.biased > 0), other=0.0)


@triton.jit
def _penalised(row, value, seen):
    """Logits with the penalties for tokens that were `seen` before."""
    damped = tl.where(value > 0, tl.div_rn(value, row.repetition), value * row.repetition)
    value = tl.where(seen > 0, damped, value)
    times = (seen & TIMES).to(tl.float32)
    return value - tl.where(times > 0, row.presence + row.frequency * times, 0.0)


@triton.jit
def _seen(row, start, names):
    """The counts of tokens in the text, including the path to the node as if it were emitted already."""
    seen = tl.load(row.counts + names, mask=names < row.vocabulary, other=0)
    node = row.node
    while node > 0:  # the root is in the text
        token = tl.load(row.tokens + node)
        if (token >= start) & (token < start + names.numel):  # true of few tokens of a path
            seen += tl.where(names == token.to(names.dtype), 1, 0)
        node = tl.load(row.parents + node)
    return seen


@triton.jit
def _chunk(start, at_once: tl.constexpr):
    """(blocks, tokens): the ids of the tokens of a few blocks."""
    return start + tl.arange(0, at_once)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]


@triton.jit
def _best(row, penalised: tl.constexpr, at_once: tl.constexpr):
    """The highest logit and the first token that has it."""
    high = tl.full((at_once, BLOCK), float("-inf"), tl.float32)
    where = _chunk(0, at_once)
    for start in range(0, row.vocabulary, at_once * BLOCK):
        names = _chunk(start, at_once)
        value = _adjusted(row, start, names, penalised)
        where = tl.where(value > high, names, where)
        high = tl.maximum(value, high)
    best = tl.max(tl.max(high, 1), 0)
    token = tl.min(tl.min(tl.where(high == best, where, row.vocabulary), 1), 0)
    return best, token.to(tl.int64)


@triton.jit
def _masses(row, start, names, cold, high, floor, penalised: tl.constexpr):
    """The masses of tokens, relative to that of the best one; 0 for tokens that a cut has removed."""
    value = tl.exp(_adjusted(row, start, names, penalised) / cold - high)
    return tl.where(value >= floor, value, 0.0)


@triton.jit
def _gather(row, cold, high, least, penalised: tl.constexpr, at_once: tl.constexpr):
    """Write all masses of at least `least` into the scratch space of the row, as far as they fit. Returns how many
    there are, and the mass of the whole row."""
    count = tl.full((), 0, tl.int32)
    total = tl.zeros((at_once, BLOCK), tl.float32)
    for start in range(0, row.vocabulary, at_once * BLOCK):
        mass = _masses(row, start, _chunk(start, at_once), cold, high, 0.0, penalised)
        total += mass
        mass = tl.reshape(mass, (at_once * BLOCK,))
        matters = (mass >= least).to(tl.int32)
        places = count + tl.cumsum(matters, 0) - 1
        tl.store(row.room + places, mass, mask=(matters > 0) & (places < ROOM))
        count += tl.sum(matters, 0)
    tl.debug_barrier()  # other threads read them
    return count, tl.sum(tl.sum(total, 1), 0)


@triton.jit
def _floor(
    row, count, total, cold, high, most, top_p,
    penalised: tl.constexpr, gathered: tl.constexpr, at_once: tl.constexpr,
):  # fmt: skip
    """The least mass that the cuts by rank and by mass keep, found among the `count` gathered masses if `gathered`,
    else in the whole row."""
    floor = 0.0
    if most > 0:
        if gathered:
            floor = _sift(row, count, floor, most, False)
        else:
            floor = _search(row, cold, high, floor, most, False, penalised, at_once)
    if top_p < 1:
        if gathered:
            if most > 0:
                total = tl.zeros((), tl.float32)
                for start in range(0, count, SIFTED):
                    total += tl.sum(_gathered(row, count, start, floor), 0)
            floor = _sift(row, count, floor, top_p * total, True)
        else:
            if most > 0:
                kept = tl.zeros((at_once, BLOCK), tl.float32)
                for start in range(0, row.vocabulary, at_once * BLOCK):
                    kept += _masses(row, start, _chunk(start, at_once), cold, high, floor, penalised)
                total = tl.sum(tl.sum(kept, 1), 0)
            floor = _search(row, cold, high, floor, top_p * total, True, penalised, at_once)
    return floor


@triton.jit
def _gathered(row, count, start, floor):
    """A few of the gathered masses; 0 for tokens that a cut has removed."""
    names = start + tl.arange(0, SIFTED)
    mass = tl.load(row.room + names, mask=names < count, other=0.0)
    return tl.where(mass >= floor, mass, 0.0)


@triton.jit
def _gathered_mass(row, count):
    """The sum of all gathered masses; 0 if they did not fit."""
    total = tl.zeros((), tl.float32)
    if count <= ROOM:
        for start in range(0, count, SIFTED):
            total += tl.sum(_gathered(row, count, start, 0.0), 0)
    return total


@triton.jit
def _sift(row, count, floor, goal, weighed: tl.constexpr):
    """The result of `_search`, over the gathered masses. These are few, so the sum over all threads dominates a round:
    therefore a round compares with many thresholds at a time."""
    low, beyond = tl.full((), 0, tl.int32), tl.full((), ONE + 1, tl.int32)
    while beyond - low > 1:
        part = (beyond - low + SIEVES) // (SIEVES + 1)
        edges = low + part * (1 + tl.arange(0, SIEVES))
        over = tl.zeros((SIEVES,), tl.float32)
        for start in range(0, count, SIFTED):
            mass = _gathered(row, count, start, floor)
            bits = mass.to(tl.int32, bitcast=True)
            counted = mass if weighed else tl.full((SIFTED,), 1.0, tl.float32)
            over += tl.sum(tl.where(bits[:, None] >= edges[None, :], counted[:, None], 0.0), 0)
        reached = tl.sum((over >= goal).to(tl.int32), 0)  # the thresholds at which the goal is reached: the first ones
        low, beyond = low + part * reached, tl.minimum(beyond, low + part * (reached + 1))
    return low.to(tl.float32, bitcast=True)


@triton.jit
def _search(
    row, cold, high, floor, goal, weighed: tl.constexpr, penalised: tl.constexpr, at_once: tl.constexpr
):  # fmt: skip
    """The largest threshold such that the number of tokens with at least this mass reaches the goal, or, if `weighed`,
    their total mass does. It is found by a search among all floats up to 1, by four parts in each round."""
    low, beyond = tl.full((), 0, tl.int32), tl.full((), ONE + 1, tl.int32)
    while beyond - low > 1:
        part = (beyond - low + 3) // 4
        first, second, third = low + part, low + 2 * part, low + 3 * part
        over_first = tl.zeros((at_once, BLOCK), tl.float32)
        over_second = tl.zeros((at_once, BLOCK), tl.float32)
        over_third = tl.zeros((at_once, BLOCK), tl.float32)
        for start in range(0, row.vocabulary, at_once * BLOCK):
            mass = _masses(row, start, _chunk(start, at_once), cold, high, floor, penalised)
            bits = mass.to(tl.int32, bitcast=True)
            counted = mass if weighed else tl.full((at_once, BLOCK), 1.0, tl.float32)
            over_first += tl.where(bits >= first, counted, 0.0)
            over_second += tl.where(bits >= second, counted, 0.0)
            over_third += tl.where(bits >= third, counted, 0.0)
        if tl.sum(tl.sum(over_third, 1), 0) >= goal:
            low = third
        elif tl.sum(tl.sum(over_second, 1), 0) >= goal:
            low, beyond = second, tl.minimum(third, beyond)
        elif tl.sum(tl.sum(over_first, 1), 0) >= goal:
            low, beyond = first, tl.minimum(second, beyond)
        else:
            beyond = first
    return low.to(tl.float32, bitcast=True)


@triton.jit
def _raced(row, cold, high, floor, key, penalised: tl.constexpr, at_once: tl.constexpr):
    """The sampled token: the winner of a race, first among blocks, then among the tokens of the winning block."""
    soonest = tl.full((at_once,), float("inf"), tl.float64)
    block = tl.zeros((at_once,), tl.int64)
    for start in range(0, row.vocabulary, at_once * BLOCK):
        mass = _masses(row, start, _chunk(start, at_once), cold, high, floor, penalised)
        names = start // BLOCK + tl.arange(0, at_once).to(tl.int64)
        times = arrivals(mix(key), names, tl.sum(mass, 1).to(tl.float64))
        block = tl.where(times < soonest, names, block)
        soonest = tl.minimum(times, soonest)
    winner = tl.min(tl.where(soonest == tl.min(soonest, 0), block, NOBODY), 0)
    names = winner * BLOCK + tl.arange(0, BLOCK).to(tl.int64)
    mass = _masses(row, winner * BLOCK, names, cold, high, floor, penalised)
    times = arrivals(key, names, mass.to(tl.float64))
    return tl.min(tl.where(times == tl.min(times, 0), names, NOBODY), 0)


@triton.jit(do_not_specialize=["nodes", "stride_tokens", "stride_parents", "stride_rows"])
def _walk(
    drawn, tokens, parents, rows, nodes, stride_tokens, stride_parents, stride_rows,
    most: tl.constexpr, with_tokens: tl.constexpr,
):  # fmt: skip
    """Walk from the root to the child with the token that was drawn after its parent, as long as such a child
    exists."""
    text = tl.program_id(0).to(tl.int64)
    drawn, rows = drawn + text * nodes, rows + text * stride_rows
    names = tl.arange(0, most)
    inside = names < nodes
    token = tl.load(tokens + text * stride_tokens + names, mask=inside, other=-1).to(tl.int64)
    parent = tl.load(parents + text * stride_parents + names, mask=inside, other=-1).to(tl.int64)
    path = tl.where(names == 0, 0, -1)
    kept = tl.full((most,), 0, tl.int64) + tl.load(tokens + text * stride_tokens).to(tl.int64)
    node, depth = tl.full((), 0, tl.int32), tl.full((), 0, tl.int32)
    next_token = tl.load(drawn)
    going = node < nodes
    while going:
        child = tl.min(tl.where((parent == node) & (token == next_token), names, most), 0)
        going = child < most
        if going:
            node, depth = child, depth + 1
            path = tl.where(names == depth, child, path)
            kept = tl.where(names == depth, next_token, kept)
            next_token = tl.load(drawn + child)
    tl.store(rows + names, path.to(tl.int64), mask=inside)
    tl.store(rows + nodes, next_token)
    if with_tokens:
        tl.store(rows + nodes + 1 + names, kept, mask=inside)
