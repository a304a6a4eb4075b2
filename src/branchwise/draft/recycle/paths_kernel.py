"""Paths drawn on a device, as a Triton kernel: one program for all paths of a text, from the root to the last level.

`draw_paths` of `tests/device_twins.py` is the same in torch, some eighty small operations a level. This module is
imported only if the machine has a CUDA device, and by tests, which run it in Triton's interpreter.
"""

# mypy: disable-error-code="import-untyped, import-not-found, untyped-decorator, no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from branchwise.core import rows
from branchwise.cuda.noise import GAMMA, NOBODY, arrivals, mix
from branchwise.draft import sampler

BLOCK = tl.constexpr(rows.BLOCK)
STREAM = tl.constexpr(sampler.PICKS)
"""the random stream of the independent draws of `SeededSampler`"""


def draw_paths(
    table: Tensor, masses: Tensor, texts: Tensor, q: Tensor, *, count: int, length: int, common: int
) -> Tensor:
    """(texts, count, length, 2) int64: the tokens of paths and their nodes in the tree, -1 if the root's row is empty.

    `table` and `masses` (vocabulary, width) are the successors of every token, best first; `texts` (texts, 4) are root,
    seed, position of the root and whether the text is greedy. `q` (texts, rows, vocabulary) is overwritten with the
    distributions after the nodes. Paths share their draws in the first `common` levels.

    The distribution after a token is its row; if the row is empty, that of the token before it is used again. Nodes are
    numbered level by level: children of one parent one after the other, in the order in which paths first reach them.
    """
    batch, rows, vocabulary = q.shape
    width = table.shape[1]
    assert all(it.is_contiguous() for it in (table, masses, texts, q)), "tables must be contiguous"
    assert texts.shape == (batch, 4), "a text has four numbers"
    found = torch.empty(batch, count, length, 2, dtype=torch.int64, device=q.device)
    block_paths, block_width = triton.next_power_of_2(count), triton.next_power_of_2(width)
    q.zero_()
    _draw[(batch,)](
        table, masses, texts, q, found, rows, vocabulary,
        count=count, length=length, common=common, width=width,
        block_paths=block_paths, block_width=block_width,
        num_warps=min(max(block_paths * max(block_paths, block_width) // 256, 1), 8), num_stages=1,
    )  # fmt: skip
    return found


@triton.jit(do_not_specialize=["rows", "vocabulary"])
def _draw(
    table, masses, texts, q, found, rows, vocabulary,
    count: tl.constexpr, length: tl.constexpr, common: tl.constexpr, width: tl.constexpr,
    block_paths: tl.constexpr, block_width: tl.constexpr,
):  # fmt: skip
    """All paths of one text. A block may hold more than `count` paths: the others are drawn too, but not stored."""
    text = tl.program_id(0).to(tl.int64)
    path = tl.arange(0, block_paths).to(tl.int64)
    place = tl.arange(0, block_width).to(tl.int64)  # among successors
    real = path < count
    about = texts + text * 4
    probs = tl.zeros([block_paths], tl.int64) + tl.load(about)
    seed, spot = mix(tl.load(about + 1)), tl.load(about + 2) * GAMMA
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
        key = mix(mix(seed + STREAM + level * count + tl.where(apart, path, 0)) + spot)
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
    """Whether each token has a row that is not empty."""
    row = tl.load(masses + tokens[:, None] * width + place[None, :], mask=(place < width)[None, :], other=0.0)
    return tl.max((row.to(tl.float32) > 0).to(tl.int32), 1) > 0


@triton.jit
def _race(table, masses, probs, total, tokens, likely, key, width: tl.constexpr):
    """The tokens that win races: blocks of the vocabulary race first, then the tokens (paths, width) of the winner."""
    blocks, chances = tokens // BLOCK, likely.to(tl.float64)
    sums = tl.zeros_like(chances)
    for other in range(width):
        token = tl.load(table + probs * width + other).to(tl.int64)
        weight = tl.load(masses + probs * width + other).to(tl.float32).to(tl.float64)
        chance_of = (weight / total).to(tl.float32).to(tl.float64)
        sums += tl.where(blocks == (token // BLOCK)[:, None], chance_of[:, None], 0.0)
    winner = _first(blocks, tl.where(chances > 0, sums, 0.0), mix(key))
    return _first(tokens, tl.where(blocks == winner[:, None], chances, 0.0), key)


@triton.jit
def _first(names, chances, key):
    """(paths,): the name of the runner (paths, width) that arrives first."""
    times = arrivals(key[:, None], names, chances)
    soonest = tl.min(times, 1)
    # An empty distribution has no winner: the result is token 0, and is not used.
    return tl.min(tl.where((times == soonest[:, None]) & (chances > 0), names, NOBODY), 1) % NOBODY
