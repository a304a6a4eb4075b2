"""The kernels of the adjacency table in torch: the slow truth that they are compared with, and their stand-ins in tests
without Triton. Names and arguments are those of `branchwise.draft.recycle.kernels`."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor

from branchwise.backends.base import TargetInfo
from branchwise.core.rng import GAMMA, _first, mix
from branchwise.core.rows import BLOCK
from branchwise.draft.recycle.adjacency import ACCEPTED, HALF_DOWN, PADDING
from branchwise.draft.recycle.drafter import Recycle
from branchwise.draft.sampler import PICKS


class OnDevice(Recycle):
    """As on a device with kernels, with a table on the host and the twins of the kernels."""

    def bind(self, target: TargetInfo) -> None:
        super().bind(target)
        self.on_device = True
        assert self._bound_to is not None
        self._move_to(*self._bound_to)

    @property
    def _kernels(self) -> Any:
        return sys.modules[__name__]


# Learning


class Softmax:
    """Distributions (rows, vocabulary), and the k best tokens of each."""

    def __init__(self, logits: Tensor, k: int) -> None:
        self.probs = logits.float().softmax(dim=1)
        self.masses, self.tokens = self.probs.topk(k)

    def of(self, rows: Tensor, tokens: Tensor) -> Tensor:
        """(n, m): the probabilities of tokens (n, m), each line in the distribution of rows (n,)."""
        return self.probs[rows].gather(1, tokens)


def learn_marked(table: Tensor, masses: Tensor, tokens: Tensor, logits: Tensor, marks: Tensor, *, rate: float) -> None:
    """Learn from tokens, distributions and marks (batch, nodes) in a table, in fixed shapes.

    Several nodes may carry one token. All of them write the distribution of the last one, and accepted nodes count as
    last: so the order of writes does not matter. Padding writes what the first node of all writes.
    """
    flat, marks = tokens.flatten().long(), marks.flatten()
    places = torch.arange(len(flat), device=flat.device)
    keys = torch.where(marks > PADDING, flat, flat[0])
    turns = torch.where(marks > PADDING, places + len(flat) * (marks == ACCEPTED), -1)
    last = torch.zeros(len(table), dtype=torch.int64, device=flat.device)
    last.scatter_reduce_(0, keys, turns, "amax")
    found = Softmax(logits.flatten(0, 1), table.shape[1])
    table[keys], masses[keys] = averaged(table[keys], masses[keys], found, last[keys] % len(flat), rate)


def averaged(tokens: Tensor, masses: Tensor, found: Any, rows: Tensor, rate: float) -> tuple[Tensor, Tensor]:
    """Rows of a table, with row rows[i] of what was found averaged into row i: `adjacency.averaged` in torch."""
    old, before = tokens.long(), masses.float()
    held = before > 0
    share = torch.where(held.any(dim=1, keepdim=True), rate, 1.0)
    stay = torch.where(held, (1 - share) * before + share * found.of(rows, old), 0.0)
    new = found.tokens[rows]
    known = ((new[:, :, None] == old[:, None, :]) & held[:, None, :]).any(dim=2)
    join = torch.where(known, 0.0, share * found.masses[rows])
    best, places = torch.cat([stay, join], dim=1).topk(tokens.shape[1])
    best = (best * HALF_DOWN).half()
    return torch.where(best > 0, torch.cat([old, new], dim=1).gather(1, places), 0).int(), best


# Looking up


def walk(table: Tensor, ways: Tensor, roots: Tensor) -> Tensor:
    """(n, nodes): the tokens of trees below roots (n,); `ways` (nodes, depth) are ranks of successors."""
    found = roots.long()[:, None].expand(-1, len(ways))
    for ranks in ways.T:
        below = table[found, ranks.clamp_min(0).expand_as(found)]
        found = torch.where(ranks >= 0, below.long(), found)
    return found.contiguous()


# Drawing


def draw_paths(
    table: Tensor, masses: Tensor, texts: Tensor, q: Tensor, *, count: int, length: int, common: int
) -> Tensor:
    """(texts, count, length, 2) int64: what the kernel of this name draws; it says what the arguments are."""
    root, rng_seed, position, greedy = (numbers[:, None] for numbers in texts.unbind(dim=1))
    batch, rows, vocabulary = q.shape
    path = torch.arange(count, device=q.device).expand(batch, -1)
    probs, rank, node = root.expand(-1, count), path, torch.zeros_like(path)
    known, size = held(masses, root), torch.ones_like(root)
    places, values, found = [], [], []
    for level in range(length):
        apart = level >= common
        tokens, weights = table[probs].long(), masses[probs].double()  # (texts, paths, width)
        likely = (weights / weights.sum(dim=2, keepdim=True)).float()
        places.append((torch.arange(batch, device=q.device)[:, None] * rows + node)[..., None] * vocabulary + tokens)
        values.append(torch.where(known[..., None] & (weights > 0), likely, 0.0))

        draws = level * count + (path if apart else 0)
        keys = mix(mix(mix(rng_seed) + PICKS + draws) + position * GAMMA)
        drawn = race_among(tokens.flatten(0, 1), likely.double().flatten(0, 1), keys.expand_as(path).flatten())
        # In a greedy text the paths of a node take its best tokens in turn, and the best if there are no more.
        many, turn = (weights > 0).sum(dim=2), rank if apart else torch.zeros_like(rank)
        best = tokens.gather(2, torch.where(turn < many, turn, 0)[..., None])[..., 0]
        if apart:
            rank = torch.where(rank < many, 0, rank - many + 1)
        token = torch.where(greedy > 0, best, drawn.view_as(path))

        same = (node[:, :, None] == node[:, None, :]) & (token[:, :, None] == token[:, None, :])
        first = torch.where(same, path[:, None, :], count).amin(dim=2)
        order = node * count + first
        before = (first == path)[:, None, :] & (order[:, None, :] < order[:, :, None])
        node = size + before.sum(dim=2)
        size = size + (first == path).sum(dim=1, keepdim=True)
        found.append(torch.where(known[..., None], torch.stack([token, node], dim=2), -1))
        probs = torch.where(held(masses, token), token, probs)
    # Several paths write the row of one node, all the same; an empty entry names token 0 with mass 0.
    q.zero_().view(-1).scatter_reduce_(0, torch.cat(places).flatten(), torch.cat(values).flatten(), "amax")
    return torch.stack(found, dim=2)


def race_among(tokens: Tensor, masses: Tensor, keys: Tensor) -> Tensor:
    """(draws,) int64: what `race` draws from distributions that are a few tokens (draws, few) with masses (draws, few)
    float64. Entries without mass are empty.
    """
    blocks = tokens // BLOCK
    shared = blocks[:, :, None] == blocks[:, None, :]
    sums = torch.where(masses > 0, (shared * masses[:, None, :]).sum(dim=2), 0.0)
    winner = blocks.gather(1, _first(sums, mix(keys), blocks)[:, None])
    inside = _first(torch.where(blocks == winner, masses, 0.0), keys, tokens)
    return tokens.gather(1, inside[:, None])[:, 0]


def held(masses: Tensor, tokens: Tensor) -> Tensor:
    """Which tokens (texts, n) have a row that is not empty."""
    return (masses[tokens] > 0).any(dim=2)
