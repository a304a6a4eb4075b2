"""The adjacency table as Triton kernels: two to learn from all nodes of a pass, one to look up whole trees.

`learn_marked` and `walk` of `tests/device_twins.py` are the same in torch. A tournament finds the best tokens of a row
while the row is read, as in topk.py: a program reads part of a row in blocks, a block is cut into groups of a few
adjacent tokens, and the k best tokens are among the groups with the k best winners. Only these groups are read again. A
value and its token are packed into one integer, so that the best is the maximum, and of equal values the lowest token
wins: the result depends neither on how a row is cut nor on the order of programs.

This module is imported only if the machine has a CUDA device, and by tests, which run it in Triton's interpreter.
"""

# mypy: disable-error-code="import-untyped, import-not-found, untyped-decorator, no-untyped-def"

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from branchwise.cuda.graphs import on
from branchwise.draft.recycle import adjacency
from branchwise.draft.recycle.paths_kernel import draw_paths

__all__ = ["draw_paths", "learn_marked", "walk"]

PADDING = tl.constexpr(adjacency.PADDING)
ACCEPTED = tl.constexpr(adjacency.ACCEPTED)
HALF_DOWN = tl.constexpr(adjacency.HALF_DOWN)

LAST = tl.constexpr((1 << 31) - 1)
"""the number that stands for no token"""
NOTHING = tl.constexpr((-(1 << 31) + (1 << 23) - 1) << 32)
"""the `_key` of minus infinity and no token: less than the key of every other number"""
LOWEST = tl.constexpr(torch.finfo(torch.float32).min)
"""the number that logits are compared with if all of them are minus infinity; finite, so that differences are no NaN"""
GROUP = tl.constexpr(8)
"""number of tokens of a group: 16 bytes of bfloat16, which a thread reads with one load"""
LOADS = tl.constexpr(8)
"""number of loads of a thread in a block, all of them in flight together"""


class Tiling(NamedTuple):
    """How a row is cut into programs. Any choice gives the same result."""

    lanes: int
    """number of threads that read a block, a power of two; lanes * LOADS must be at least the number of successors"""
    blocks: int
    """number of blocks that a program reads one after the other"""

    @property
    def tokens(self) -> int:
        """The number of tokens that a program reads."""
        return int(self.blocks * self.lanes * LOADS.value * GROUP.value)


def tiling(rows: int, vocabulary: int, k: int, programs: int = 528) -> Tiling:
    """The tiling of `rows` rows. 528 programs are four for every multiprocessor of an H200. With more programs there
    would be more to merge; with more than 8 blocks each program would read too much again."""
    groups = max(triton.cdiv(vocabulary, GROUP.value), k)
    one = Tiling(min(128, triton.next_power_of_2(triton.cdiv(groups, LOADS.value))), blocks=1)
    blocks = triton.cdiv(vocabulary, one.tokens)
    parts = max(min(programs // max(rows, 1), blocks), triton.cdiv(blocks, 8))
    return one._replace(blocks=triton.cdiv(blocks, parts))


# Learning


def learn_marked(
    table: Tensor,
    masses: Tensor,
    tokens: Tensor,
    logits: Tensor,
    marks: Tensor,
    *,
    rate: float,
    tiles: Tiling | None = None,
) -> None:
    """Learn from tokens, logits and marks (batch, nodes). Of several nodes with the same token only the last writes;
    accepted nodes count as later than rejected ones."""
    batch, nodes, vocabulary = logits.shape
    rows, k = batch * nodes, table.shape[1]
    assert tokens.shape == marks.shape == (batch, nodes), "tokens, distributions and marks do not belong together"
    assert masses.shape == table.shape == (vocabulary, k), "the table belongs to another vocabulary"
    assert all(part.is_contiguous() for part in (table, masses)), "a table must be contiguous"
    assert logits.stride(2) == 1, "an element of a row must lie beside the next"
    tiles = tiles or tiling(rows, vocabulary, k)
    assert k <= tiles.lanes * LOADS.value, "fewer groups than successors"
    block_k = triton.next_power_of_2(max(k, 2))
    parts = triton.cdiv(vocabulary, tiles.tokens)
    found = torch.empty(rows, parts, block_k, dtype=torch.int64, device=logits.device)
    highest, total = torch.empty(2, rows, parts, dtype=torch.float32, device=logits.device)
    with on(logits.device):
        _peaks[(rows, parts)](
            logits, marks, found, highest, total,
            logits.stride(0), logits.stride(1), *marks.stride(), vocabulary, nodes, tiles.blocks,
            k=k, block_k=block_k, lanes=tiles.lanes, stripe=triton.next_power_of_2(tiles.blocks * GROUP.value),
            num_warps=4,
        )  # fmt: skip
        _average[(rows,)](
            table, masses, tokens, logits, marks, found, highest, total,
            *tokens.stride(), logits.stride(0), logits.stride(1), *marks.stride(), rows, nodes, parts, float(rate),
            k=k, block_k=block_k, block_parts=triton.next_power_of_2(parts), block_rows=256,
            num_warps=1, enable_fp_fusion=False,  # or every thread rounds the sum of a distribution in its own way
        )  # fmt: skip


@triton.jit(do_not_specialize=["nodes", "blocks"])
def _peaks(
    logits, marks, found, highest, total,
    logit_text, logit_node, mark_text, mark_node, vocabulary, nodes, blocks,
    k: tl.constexpr, block_k: tl.constexpr, lanes: tl.constexpr, stripe: tl.constexpr,
):  # fmt: skip
    """The k best tokens in one part of a row, best first, its highest logit, and the sum of exp(logit - highest)."""
    row, part, parts = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    text, node = (row // nodes).to(tl.int64), (row % nodes).to(tl.int64)
    if tl.load(marks + text * mark_text + node * mark_node) == PADDING:
        return
    logits += text * logit_text + node * logit_node
    block_tokens: tl.constexpr = LOADS * lanes * GROUP
    first = part * blocks * block_tokens
    # A stripe is the groups at one place of every block, and has one winner. Every thread has its own sum, so that no
    # thread waits for another while the row is read.
    best = tl.full([LOADS, lanes], float("-inf"), tl.float32)
    group = (tl.arange(0, LOADS)[:, None] * lanes + tl.arange(0, lanes)[None, :]) * GROUP
    start = first + group  # first token of the group that holds the winner of each stripe
    top = tl.full([lanes], float("-inf"), tl.float32)
    sums = tl.zeros([lanes], tl.float32)
    for block in range(blocks):
        here = first + block * block_tokens + group
        token = here[:, :, None] + tl.arange(0, GROUP)[None, None, :]
        value = tl.load(logits + token, mask=token < vocabulary, other=float("-inf")).to(tl.float32)
        winner = tl.max(value, 2)
        start = tl.where(winner > best, here, start)
        best = tl.maximum(best, winner)
        higher = tl.maximum(top, tl.max(winner, 0))
        against = tl.maximum(higher, LOWEST)
        sums = sums * tl.exp(top - against) + tl.sum(tl.sum(tl.exp(value - against[None, :, None]), 2), 0)
        top = higher

    peak = tl.max(top, 0)
    everything = tl.sum(sums * tl.exp(top - tl.maximum(peak, LOWEST)), 0)
    line = row.to(tl.int64) * parts + part
    tl.store(highest + line, peak)
    tl.store(total + line, everything)

    winners = _best(tl.reshape(_key(best, start), [LOADS * lanes]), k, block_k)
    rank, step = tl.arange(0, block_k), tl.arange(0, stripe)
    stripes = first + (_token(winners) - first) % block_tokens  # first token of each winning stripe, in the first block
    token = stripes[:, None] + (step // GROUP * block_tokens + step % GROUP)[None, :]
    real = (rank < k)[:, None] & (step < blocks * GROUP)[None, :] & (token < vocabulary)
    value = tl.load(logits + token, mask=real, other=float("-inf")).to(tl.float32)
    keys = tl.reshape(_key(value, token), [block_k * stripe])
    tl.store(found + line * block_k + rank, _best(keys, k, block_k))


@triton.jit(do_not_specialize=["rows", "nodes", "parts"])
def _average(
    table, masses, tokens, logits, marks, found, highest, total,
    token_text, token_node, logit_text, logit_node, mark_text, mark_node, rows, nodes, parts, rate,
    k: tl.constexpr, block_k: tl.constexpr, block_parts: tl.constexpr, block_rows: tl.constexpr,
):  # fmt: skip
    """Average the distribution after one node into the row of its token, unless a later node has the same token."""
    row = tl.program_id(0)
    text, node = (row // nodes).to(tl.int64), (row % nodes).to(tl.int64)
    mark = tl.load(marks + text * mark_text + node * mark_node)
    if mark == PADDING:
        return
    key = tl.load(tokens + text * token_text + node * token_node).to(tl.int64)
    turn = row + tl.where(mark == ACCEPTED, rows, 0)
    later = tl.zeros([block_rows], tl.int32)
    for first in range(0, rows, block_rows):
        other = first + tl.arange(0, block_rows)
        its_text, its_node = other // nodes, other % nodes
        its_mark = tl.load(marks + its_text * mark_text + its_node * mark_node, mask=other < rows, other=PADDING)
        its_key = tl.load(tokens + its_text * token_text + its_node * token_node, mask=other < rows, other=-1)
        its_turn = other + tl.where(its_mark == ACCEPTED, rows, 0)
        later |= ((its_mark != PADDING) & (its_key == key) & (its_turn > turn)).to(tl.int32)
    if tl.max(later, 0) == 0:
        # Merge the parts of the distribution: their best tokens, and the sum over all of them.
        line, part = row.to(tl.int64) * parts, tl.arange(0, block_parts)
        tops = tl.load(highest + line + part, mask=part < parts, other=float("-inf"))
        sums = tl.load(total + line + part, mask=part < parts, other=0.0)
        against = tl.max(tops, 0)
        everything = tl.sum(sums * tl.exp(tops - against), 0)
        some = everything > 0  # False for NaN, if no token is possible: such a distribution leaves the row empty
        everything = tl.where(some, everything, 1.0)
        entry = tl.arange(0, block_parts * block_k)
        keys = tl.load(found + line * block_k + entry, mask=entry < parts * block_k, other=NOTHING)
        probs = _best(keys, k, block_k)
        new = _token(probs)

        rank = tl.arange(0, block_k)
        place = key * k + rank
        old = tl.load(table + place, mask=rank < k, other=0)
        before = tl.load(masses + place, mask=rank < k, other=0.0).to(tl.float32)
        held = before > 0
        share = tl.where(tl.max(before, 0) > 0, rate, 1.0)
        asked = logits + text * logit_text + node * logit_node + old
        asked = tl.load(asked, mask=held, other=float("-inf")).to(tl.float32)
        stay = (1 - share) * before + share * (tl.exp(asked - against) / everything)
        stay = tl.where(some, stay, 0.0)
        known = tl.max(((new[:, None] == old[None, :]) & held[None, :]).to(tl.int32), 1) > 0
        join = share * (tl.exp(_value(probs) - against) / everything)
        join = tl.where(some, tl.where(known, 0.0, join), 0.0)
        both = tl.reshape(tl.join(_key(stay, old), _key(join, new)), [2 * block_k])
        kept = _best(both, k, block_k)
        mass = (tl.maximum(_value(kept), 0.0) * HALF_DOWN).to(tl.float16)
        tl.store(table + place, tl.where(mass > 0, _token(kept), 0), mask=rank < k)
        tl.store(masses + place, mass, mask=rank < k)


@triton.jit
def _key(value, token):
    """A number and its token as one integer: larger for a larger number, and of equal numbers for the lower token."""
    bits = value.to(tl.int32, bitcast=True)
    order = bits ^ ((bits >> 31) & LAST)  # the bits of negative floats sort in reverse
    return (order.to(tl.int64) << 32) | (token ^ LAST).to(tl.int64)


@triton.jit
def _token(key):
    return ((key & LAST) ^ LAST).to(tl.int32)


@triton.jit
def _value(key):
    order = (key >> 32).to(tl.int32)
    return (order ^ ((order >> 31) & LAST)).to(tl.float32, bitcast=True)


@triton.jit
def _best(keys, k: tl.constexpr, block_k: tl.constexpr):
    """(block_k,): the k best of some keys, best first, then NOTHING."""
    rank = tl.arange(0, block_k)
    best = tl.full([block_k], NOTHING, tl.int64)
    for turn in range(k):
        top = tl.max(keys, 0)
        best = tl.where(rank == turn, top, best)
        keys = tl.where(keys == top, NOTHING, keys)
    return best


# Looking up


def walk(table: Tensor, ways: Tensor, roots: Tensor) -> Tensor:
    """(n, nodes) int64: the tokens of trees below roots (n,).

    `ways` (nodes, depth) int32 has the ranks of the successors that lead from the root to each node, padded with -1:
    every node is looked up from the root, so no level waits for the level above it.
    """
    nodes, depth = ways.shape
    assert all(part.is_contiguous() for part in (table, ways)), "tables must be contiguous"
    found = torch.empty(len(roots), nodes, dtype=torch.int64, device=roots.device)
    with on(roots.device):
        _walk[(len(roots), triton.cdiv(nodes, 128))](
            table, ways, roots, found, roots.stride(0), nodes,
            width=table.shape[1], depth=depth, block=128, num_warps=4,
        )  # fmt: skip
    return found


@triton.jit(do_not_specialize=["stride", "nodes"])
def _walk(table, ways, roots, found, stride, nodes, width: tl.constexpr, depth: tl.constexpr, block: tl.constexpr):
    text, node = tl.program_id(0), tl.program_id(1) * block + tl.arange(0, block)
    token = tl.zeros([block], tl.int64) + tl.load(roots + text * stride).to(tl.int64)
    for level in range(depth):
        rank = tl.load(ways + node * depth + level, mask=node < nodes, other=-1)
        below = tl.load(table + token * width + rank, mask=rank >= 0, other=0)
        token = tl.where(rank >= 0, below.to(tl.int64), token)
    tl.store(found + text.to(tl.int64) * nodes + node, token, mask=node < nodes)
