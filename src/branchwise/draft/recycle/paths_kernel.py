"""Paths drawn on a device, as a Triton kernel: one program for all paths of a text, from the root to the last level.

`draw` in `device_paths.py` is the truth, and says what the steps are for; as operations of torch it is some eighty
small ones a level. Nothing here is imported where there is no CUDA device, except by tests, which run it in Triton's
interpreter.
"""

# mypy: disable-error-code="import-untyped, import-not-found, untyped-decorator, no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from branchwise.core import rng as chance
from branchwise.core import rows
from branchwise.draft.recycle.device_paths import PICKS, TOLD

BLOCK = tl.constexpr(rows.BLOCK)
GAMMA = tl.constexpr(chance.GAMMA)
FIRST_FACTOR = tl.constexpr(chance.signed(chance.FACTORS[0]))
SECOND_FACTOR = tl.constexpr(chance.signed(chance.FACTORS[1]))
STREAM = tl.constexpr(PICKS)
STEP = tl.constexpr(2.0**-52)
NOBODY = tl.constexpr(1 << 40)
"""more than any token"""


def draw_paths_kernel(
    table: Tensor, masses: Tensor, told: Tensor, q: Tensor, *, count: int, length: int, common: int
) -> Tensor:
    """What `draw` does."""
    texts, rows, vocabulary = q.shape
    width = table.shape[1]
    assert all(it.is_contiguous() for it in (table, masses, told, q)), "tables must be whole"
    assert told.shape == (texts, TOLD), "every text is told of with the same numbers"
    found = torch.empty(texts, count, length, 2, dtype=torch.int64, device=q.device)
    block_paths, block_width = triton.next_power_of_2(count), triton.next_power_of_2(width)
    q.zero_()
    _draw[(texts,)](
        table, masses, told, q, found, rows, vocabulary,
        told_numbers=TOLD, count=count, length=length, common=common, width=width,
        block_paths=block_paths, block_width=block_width,
        num_warps=min(max(block_paths * max(block_paths, block_width) // 256, 1), 8), num_stages=1,
    )  # fmt: skip
    return found


@triton.jit(do_not_specialize=["rows", "vocabulary"])
def _draw(
    table, masses, told, q, found, rows, vocabulary,
    told_numbers: tl.constexpr, count: tl.constexpr, length: tl.constexpr, common: tl.constexpr, width: tl.constexpr,
    block_paths: tl.constexpr, block_width: tl.constexpr,
):  # fmt: skip
    """All paths of one text. A block may have more paths than are wanted: they go down like the others, unseen."""
    text = tl.program_id(0).to(tl.int64)
    path = tl.arange(0, block_paths).to(tl.int64)
    place = tl.arange(0, block_width).to(tl.int64)  # among successors
    real = path < count
    about = told + text * told_numbers
    probs = tl.zeros([block_paths], tl.int64) + tl.load(about)
    seed, spot = _mix(tl.load(about + 1)), tl.load(about + 2) * GAMMA
    sure = tl.load(about + 3) > 0
    rank, node, size = path, tl.zeros([block_paths], tl.int64), tl.full([block_paths], 1, tl.int64)
    known = _held(masses, probs, place, width)
    for level in range(length):
        line = probs[:, None] * width + place[None, :]
        tokens = tl.load(table + line, mask=(place < width)[None, :], other=0).to(tl.int64)
        weights = tl.load(masses + line, mask=(place < width)[None, :], other=0.0).to(tl.float32).to(tl.float64)
        total = tl.sum(weights, 1)
        total = tl.where(total > 0, total, 1.0)
        likely = (weights / total[:, None]).to(tl.float32)
        behind = q + ((text * rows + node) * vocabulary)[:, None] + tokens
        tl.store(behind, likely, mask=(weights > 0) & (real & known)[:, None])

        apart = level >= common
        key = _mix(_mix(seed + STREAM + level * count + tl.where(apart, path, 0)) + spot)
        drawn = _race(table, masses, probs, total, tokens, likely, key, width)
        many = tl.sum((weights > 0).to(tl.int64), 1)
        turn = tl.where(apart & (rank < many), rank, 0)
        best = tl.sum(tl.where(place[None, :] == turn[:, None], tokens, 0), 1)
        rank = tl.where(apart, tl.where(rank < many, 0, rank - many + 1), rank)
        token = tl.where(sure, best, drawn)

        same = (node[:, None] == node[None, :]) & (token[:, None] == token[None, :]) & real[None, :]
        first = tl.min(tl.where(same, path[None, :], block_paths), 1)
        opens = first == path
        order = node * (block_paths + 1) + first
        node = size + tl.sum((opens[None, :] & (order[None, :] < order[:, None])).to(tl.int64), 1)
        size += tl.sum(opens.to(tl.int64), 0)
        goal = found + ((text * count + path) * length + level) * 2
        tl.store(goal, tl.where(known, token, -1), mask=real)
        tl.store(goal + 1, tl.where(known, node, -1), mask=real)
        probs = tl.where(_held(masses, token, place, width), token, probs)


@triton.jit
def _held(masses, tokens, place, width: tl.constexpr):
    """Of which tokens a successor is known."""
    row = tl.load(masses + tokens[:, None] * width + place[None, :], mask=(place < width)[None, :], other=0.0)
    return tl.max((row.to(tl.float32) > 0).to(tl.int32), 1) > 0


@triton.jit
def _race(table, masses, probs, total, tokens, likely, key, width: tl.constexpr):
    """Which tokens (paths, width) arrive first: blocks of the vocabulary race, then the tokens of the winning one."""
    blocks, chances = tokens // BLOCK, likely.to(tl.float64)
    sums = tl.zeros_like(chances)
    for other in range(width):
        token = tl.load(table + probs * width + other).to(tl.int64)
        weight = tl.load(masses + probs * width + other).to(tl.float32).to(tl.float64)
        chance_of = (weight / total).to(tl.float32).to(tl.float64)
        sums += tl.where(blocks == (token // BLOCK)[:, None], chance_of[:, None], 0.0)
    winner = _first(blocks, tl.where(chances > 0, sums, 0.0), _mix(key))
    return _first(tokens, tl.where(blocks == winner[:, None], chances, 0.0), key)


@triton.jit
def _first(names, chances, key):
    """(paths,): of runners (paths, width) the name of the one that arrives first."""
    bits = (_mix(key[:, None] + names * GAMMA) >> 12) & 0xFFFFFFFFFFFFF
    wait = -tl.log((bits.to(tl.float64) + 0.5) * STEP)
    times = tl.where(chances > 0, wait / tl.where(chances > 0, chances, 1.0), float("inf"))
    soonest = tl.min(times, 1)
    # An empty distribution has no winner: then it is token 0, and nobody looks.
    return tl.min(tl.where((times == soonest[:, None]) & (chances > 0), names, NOBODY), 1) % NOBODY


@triton.jit
def _mix(x):
    """`chance.mix`."""
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * FIRST_FACTOR
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * SECOND_FACTOR
    return x ^ ((x >> 31) & 0x1FFFFFFFF)
