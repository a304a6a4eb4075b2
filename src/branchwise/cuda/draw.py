"""The target's own token behind every node of a batch of trees, in one Triton kernel: what `match` compares with.

Each text has its own temperature, cuts and bias, which are values and not structure: one kernel serves all texts and
all sizes, so that nothing is compiled or recorded anew for a text with other parameters. A program works on one row
and never writes a distribution. The truth is `core.sampling.Warp` with `SeededChance.tokens`: the stages are in the
same order, the noise is the same. Without a CUDA device only tests import this file.
"""

# mypy: disable-error-code="import-untyped, import-not-found, untyped-decorator, no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from branchwise.core import rng, rows
from branchwise.core.sampling import COLDEST
from branchwise.cuda.choices import PARAMETERS

BLOCK = tl.constexpr(rows.BLOCK)
GAMMA = tl.constexpr(rng.GAMMA)
FIRST_FACTOR = tl.constexpr(rng.signed(rng.FACTORS[0]))
SECOND_FACTOR = tl.constexpr(rng.signed(rng.FACTORS[1]))
STEP = tl.constexpr(2.0**-52)
STREAM = tl.constexpr(rng.stream_of("verify", "token", 0))
LEAST = tl.constexpr(COLDEST)
NOBODY = tl.constexpr(1 << 40)
"""more than any token"""
ONE = tl.constexpr(0x3F800000)
"""1.0 as float32, as an integer: numbers that are not negative rise with their bits"""
FEW_ROWS = 132
"""as many as an H200 has processors: each of so few rows has one to itself"""


def draw_tokens(
    logits: Tensor, depths: Tensor, seeds: Tensor, roots: Tensor, parameters: Tensor, bias: Tensor
) -> Tensor:
    """(batch, nodes) int64: the token that each text draws behind each node, the best one at temperature 0.

    `logits` (batch, nodes, vocabulary) of the unwarped model; `depths` (batch, nodes) of the nodes, 0 for padding, for
    which nothing is drawn; `seeds` and `roots` (batch,) are those of a `SeededChance`; `parameters` (at least batch,
    len(PARAMETERS)) float32, and `bias` (at least batch, vocabulary) float32, read where a text is `biased`.
    """
    batch, nodes, vocabulary = logits.shape
    assert logits.stride(2) == 1, "a row of logits must lie in one piece"
    assert parameters.is_contiguous(), "parameters must be contiguous"
    assert bias.is_contiguous(), "a bias must be contiguous"
    found = torch.zeros(batch, nodes, dtype=torch.int64, device=logits.device)
    at_once, warps = (64, 32) if batch * nodes <= FEW_ROWS else (16, 8)  # blocks that are read together
    _draw[(batch * nodes,)](
        logits, depths, seeds, roots, parameters, bias, found,
        nodes, vocabulary, logits.stride(0), logits.stride(1), depths.stride(0), bias.shape[1],
        width=len(PARAMETERS), at_once=at_once, num_warps=warps,
    )  # fmt: skip
    return found


@triton.jit(do_not_specialize=["nodes", "stride_text", "stride_node", "stride_depths"])
def _draw(
    logits, depths, seeds, roots, parameters, bias, found,
    nodes, vocabulary, stride_text, stride_node, stride_depths, stride_bias,
    width: tl.constexpr, at_once: tl.constexpr,
):  # fmt: skip
    text, node = (tl.program_id(0) // nodes).to(tl.int64), (tl.program_id(0) % nodes).to(tl.int64)
    depth = tl.load(depths + text * stride_depths + node).to(tl.int64)
    if (node == 0) | (depth > 0):
        row = logits + text * stride_text + node * stride_node
        own, shift = parameters + text * width, bias + text * stride_bias
        temperature, most = tl.load(own), tl.load(own + 1)
        top_p, min_p, biased = tl.load(own + 2), tl.load(own + 3), tl.load(own + 4).to(tl.int32)
        best, token = _best(row, shift, biased, vocabulary, at_once)
        if temperature > 0:
            cold = tl.maximum(temperature, LEAST)
            high = best / cold
            floor = 0.0
            if (most > 0) & (most < vocabulary):
                floor = _floor(row, shift, biased, vocabulary, cold, high, 0.0, most, False, at_once)
            if top_p < 1:
                goal = top_p * _mass(row, shift, biased, vocabulary, cold, high, floor, at_once)
                floor = _floor(row, shift, biased, vocabulary, cold, high, floor, goal, True, at_once)
            floor = tl.maximum(floor, min_p)
            position = tl.load(roots + text) + depth + 1
            key = mix(mix(mix(tl.load(seeds + text)) + STREAM) + position * GAMMA)
            token = _raced(row, shift, biased, vocabulary, cold, high, floor, key, at_once)
        tl.store(found + text * nodes + node, token)


@triton.jit
def _adjusted(row, shift, biased, names, vocabulary):
    """Logits of tokens, with the bias of the text; -inf beyond the vocabulary."""
    inside = names < vocabulary
    value = tl.load(row + names, mask=inside, other=float("-inf")).to(tl.float32)
    return value + tl.load(shift + names, mask=inside & (biased > 0), other=0.0)


@triton.jit
def _chunk(start, at_once: tl.constexpr):
    """(blocks, tokens): the names of the tokens of a few blocks."""
    return start + tl.arange(0, at_once)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]


@triton.jit
def _best(row, shift, biased, vocabulary, at_once: tl.constexpr):
    """The highest logit and the first token that has it."""
    high = tl.full((at_once, BLOCK), float("-inf"), tl.float32)
    where = _chunk(0, at_once)
    for start in range(0, vocabulary, at_once * BLOCK):
        names = _chunk(start, at_once)
        value = _adjusted(row, shift, biased, names, vocabulary)
        where = tl.where(value > high, names, where)
        high = tl.maximum(value, high)
    best = tl.max(tl.max(high, 1), 0)
    token = tl.min(tl.min(tl.where(high == best, where, vocabulary), 1), 0)
    return best, token.to(tl.int64)


@triton.jit
def _masses(row, shift, biased, names, vocabulary, cold, high, floor):
    """Of tokens, as a share of the best one's; 0 where a cut has taken them."""
    value = tl.exp(_adjusted(row, shift, biased, names, vocabulary) / cold - high)
    return tl.where(value >= floor, value, 0.0)


@triton.jit
def _mass(row, shift, biased, vocabulary, cold, high, floor, at_once: tl.constexpr):
    """Of the whole row."""
    total = tl.zeros((at_once, BLOCK), tl.float32)
    for start in range(0, vocabulary, at_once * BLOCK):
        total += _masses(row, shift, biased, _chunk(start, at_once), vocabulary, cold, high, floor)
    return tl.sum(tl.sum(total, 1), 0)


@triton.jit
def _floor(
    row, shift, biased, vocabulary, cold, high, floor, goal, weighed: tl.constexpr, at_once: tl.constexpr
):  # fmt: skip
    """The largest number of which it is true that the tokens with at least this mass are as many as the goal, or if
    they are `weighed` have as much mass together. Found by a search among all floats up to 1, four parts at a time."""
    low, beyond = tl.full((), 0, tl.int32), tl.full((), ONE + 1, tl.int32)
    while beyond - low > 1:
        part = (beyond - low + 3) // 4
        first, second, third = low + part, low + 2 * part, low + 3 * part
        over_first = tl.zeros((at_once, BLOCK), tl.float32)
        over_second = tl.zeros((at_once, BLOCK), tl.float32)
        over_third = tl.zeros((at_once, BLOCK), tl.float32)
        for start in range(0, vocabulary, at_once * BLOCK):
            names = _chunk(start, at_once)
            mass = _masses(row, shift, biased, names, vocabulary, cold, high, floor)
            bits = mass.to(tl.int32, bitcast=True)
            counted = mass if weighed else tl.where(names < vocabulary, 1.0, 0.0)
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
def _raced(row, shift, biased, vocabulary, cold, high, floor, key, at_once: tl.constexpr):
    """The token that wins the race: blocks of tokens race first, then those of the winner."""
    soonest = tl.full((at_once,), float("inf"), tl.float64)
    block = tl.zeros((at_once,), tl.int64)
    for start in range(0, vocabulary, at_once * BLOCK):
        mass = _masses(row, shift, biased, _chunk(start, at_once), vocabulary, cold, high, floor)
        names = start // BLOCK + tl.arange(0, at_once).to(tl.int64)
        times = arrivals(mix(key), names, tl.sum(mass, 1).to(tl.float64))
        block = tl.where(times < soonest, names, block)
        soonest = tl.minimum(times, soonest)
    winner = tl.min(tl.where(soonest == tl.min(soonest, 0), block, NOBODY), 0)
    names = winner * BLOCK + tl.arange(0, BLOCK).to(tl.int64)
    mass = _masses(row, shift, biased, names, vocabulary, cold, high, floor)
    times = arrivals(key, names, mass.to(tl.float64))
    return tl.min(tl.where(times == tl.min(times, 0), names, NOBODY), 0)


# `core.rng` in Triton, for all kernels that draw


@triton.jit
def mix(x):
    """`rng.mix`."""
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * FIRST_FACTOR
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * SECOND_FACTOR
    return x ^ ((x >> 31) & 0x1FFFFFFFF)


@triton.jit
def arrivals(keys, names, mass):
    """When runners of this mass arrive, float64; those without any never do."""
    bits = (mix(keys + names * GAMMA) >> 12) & 0xFFFFFFFFFFFFF
    wait = -tl.log((bits.to(tl.float64) + 0.5) * STEP)
    return tl.where(mass > 0, wait / tl.where(mass > 0, mass, 1.0), float("inf"))
