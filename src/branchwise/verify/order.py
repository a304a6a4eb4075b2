"""A strict order of the tokens at a node, and the distribution of the highest of K draws.

The highest of K independent draws from q is the token t with the probability

    G(t) = F(t)^K - F^-(t)^K        F, F^- = the mass of q ranked up to t, and below t

This is exact for any strict order that is fixed by (p, q, node); the order by p/q moves the distribution towards the
target. It costs a sort, so in a large vocabulary only tokens with enough mass of q are sorted, and the others rank
below them, by token id.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from branchwise.core.rows import BLOCK, filled_blocks, in_memory, row_sum

RANKED = 512
"""The most tokens that are sorted. In a larger vocabulary these are the tokens with q above 1 / RANKED."""


class Order:
    """The tokens of rows p, q (batch, n, vocabulary), ascending by p/q with ties by token id."""

    def __init__(self, p: Tensor, q: Tensor, *, lazy: bool, below: Tensor | None = None) -> None:
        """`lazy`: sort row by row, as on the host; otherwise in fixed shapes, as on a device. `below` is what `below()`
        returns, if it is known."""
        self.p = p
        self.q = q
        if below is not None:
            self._below = below
        self._by_row = lazy and q.shape[-1] > RANKED

    def below(self) -> Tensor:
        """(batch, n, vocabulary): the mass of q that ranks below each token."""
        if self._by_row:
            return torch.stack([row.below() for row in self._rows]).view(self.q.shape)
        return self._below

    def below_at(self, tokens: Tensor) -> Tensor:
        """(batch, n): the mass of q that ranks below the given tokens (batch, n)."""
        if self._by_row:
            found = [row.below_at(token) for row, token in zip(self._rows, tokens.flatten().tolist(), strict=True)]
            return torch.tensor(found, dtype=torch.float64).view(tokens.shape)
        return self._below.gather(-1, tokens[..., None])[..., 0]

    def only_below(self, tokens: Tensor) -> Tensor:
        """(batch, n, vocabulary): q on the tokens that rank below the given tokens (batch, n), and 0 on the others."""
        if self._by_row:
            found = [row.only_below(token) for row, token in zip(self._rows, tokens.flatten().tolist(), strict=True)]
            return torch.stack(found).view(self.q.shape)
        keys = sort_keys(self.p, self.q, self.q.shape[-1])
        own = keys.gather(-1, tokens[..., None])
        ids = torch.arange(self.q.shape[-1], device=self.q.device)
        return self.q.where((keys < own) | ((keys == own) & (ids < tokens[..., None])), 0.0)

    @cached_property
    def _rows(self) -> list[RowOrder]:
        pairs = zip(self.p.flatten(0, -2).unbind(), self.q.flatten(0, -2).unbind(), strict=True)
        return [RowOrder(p, q) for p, q in pairs]

    @cached_property
    def _below(self) -> Tensor:
        if self.q.shape[-1] <= RANKED:
            order = sort_keys(self.p, self.q, self.q.shape[-1]).argsort(dim=-1, stable=True)
            mass = self.q.gather(-1, order)
            return torch.empty_like(self.q).scatter_(-1, order, (mass.cumsum(dim=-1) - mass).clamp_min_(0))
        size = self.q.shape[-1]
        ranked = self.q > 1 / RANKED
        slots = _places(ranked)
        exists = slots < size
        inside = slots.clamp_max(size - 1)
        mass = in_memory(self.q.gather(-1, inside).where(exists, 0.0))
        keys = in_memory(self.p.gather(-1, inside) / mass)
        # All pairs are compared at once: fewer steps than a sort, and a device has threads to spare.
        mine, theirs = keys[..., :, None], keys[..., None, :]
        numbers = torch.arange(RANKED, device=self.q.device)
        lower = (theirs < mine) | ((theirs == mine) & (numbers[None, :] < numbers[:, None]))
        heavy = torch.where(lower, mass[..., None, :], 0.0).sum(dim=-1)
        light = filled_blocks(torch.where(ranked, 0.0, self.q))
        within = torch.nn.functional.pad(light.cumsum(dim=-1)[..., :-1], (1, 0))  # mass before a token, in its block
        before, everything = _before(light.sum(dim=-1))
        below = (within + before[..., None]).flatten(-2)[..., :size]
        # One extra column takes the writes for slots that do not exist.
        below = torch.nn.functional.pad(below, (0, 1)).scatter(-1, slots, heavy + everything)
        return below[..., :size]


def _before(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """For each of the numbers (…, n) the sum of those before it, and the sum (…, 1) of all."""
    running = blocks.cumsum(dim=-1)
    return running - blocks, running[..., -1:]


def _places(ranked: Tensor) -> Tensor:
    """(…, RANKED): the first RANKED tokens that a mask (…, vocabulary) marks, filled up with the vocabulary's size.

    They are found by counting, first over blocks, then within a block: on a device a sort or a search is slower.
    """
    blocks = filled_blocks(ranked)
    counts = blocks.sum(dim=-1, dtype=torch.int32)
    before, everything = _before(counts)
    wanted = torch.arange(1, RANKED + 1, device=ranked.device, dtype=torch.int32)
    block = ((before + counts)[..., None, :] < wanted[:, None]).sum(dim=-1).clamp_max(blocks.shape[-2] - 1)
    members = blocks.gather(-2, block[..., None].expand(*block.shape, BLOCK)).cumsum(dim=-1, dtype=torch.int32)
    missing = wanted - before.gather(-1, block)
    place = block * BLOCK + (members < missing[..., None]).sum(dim=-1)
    return torch.where(wanted <= everything, place, ranked.shape[-1])


class RowOrder:
    """The order of one row on the host, which can handle the few sorted tokens by themselves."""

    def __init__(self, p: Tensor, q: Tensor) -> None:
        """p, q (vocabulary,)"""
        self.q = q
        heavy = torch.from_numpy(np.flatnonzero((q > 1 / RANKED).numpy()))  # in a fifth of the time that torch takes
        self.ranked = heavy[(p[heavy] / q[heavy]).argsort(stable=True)]
        """the sorted tokens, ascending"""
        self._masses = q[self.ranked].double()

    def below(self) -> Tensor:
        row = torch.empty(len(self.q) + 1, dtype=self.q.dtype)
        row[0] = 0
        torch.cumsum(self.q.index_fill(0, self.ranked, 0.0), dim=0, out=row[1:])
        places = self._masses.cumsum(dim=0) - self._masses + row[-1]
        return row[:-1].index_copy_(0, self.ranked, places.to(row.dtype))

    def below_at(self, token: int) -> float:
        place = self._place(token)
        if place is None:
            return max(float(row_sum(self.q[:token]) - self._masses[self.ranked < token].sum()), 0.0)
        return max(float(row_sum(self.q) - self._masses[place:].sum()), 0.0)

    def only_below(self, token: int) -> Tensor:
        place = self._place(token)
        if place is not None:
            return self.q.index_fill(0, self.ranked[place:], 0.0)
        row = self.q.index_fill(0, self.ranked, 0.0)
        row[token:] = 0.0
        return row

    def _place(self, token: int) -> int | None:
        """The index of a token among the sorted tokens; None if it is not one of them."""
        found = np.flatnonzero(self.ranked.numpy() == token)
        return int(found[0]) if len(found) else None


def sort_keys(p: Tensor, q: Tensor, vocabulary: int) -> Tensor:
    """The keys by which tokens with these p and q compare, before their ids; -1 for tokens that are not sorted."""
    least = 1 / RANKED if vocabulary > RANKED else 0.0
    return torch.where(q > least, p / q, -1.0)


def boost(below: Tensor, q: Tensor, share: Tensor, count: Tensor, most: int, *, lazy: bool) -> Tensor:
    """The factor G / q by which the probability of each token grows if the highest of `count` paths is taken.

    X is the mass of the paths through a node, and A the mass of the paths that rank below the node; `share` is
    X / (A + X). `share` and `count` broadcast to the rows, and `most` bounds the counts. G is a difference of powers
    that has the factor q. The factor is divided out beforehand, so nothing cancels.
    """
    rest = 1 - share
    low = (below * share).add_(rest)
    high = (q * share).add_(low)
    norm = _mean_power(torch.ones_like(rest), rest, count, most, lazy)
    return _mean_power(high, low, count, most, lazy).div_(norm)


def _mean_power(high: Tensor, low: Tensor, count: Tensor, most: int, lazy: bool) -> Tensor:
    """(high^count - low^count) / (high - low), as the sum of high^j low^(count - 1 - j)."""
    if lazy:
        most = min(most, int(count.max()))
    result = torch.ones_like(high) if most == 1 else high + low
    if most > 1 and not (lazy and bool((count > 1).all())):
        result = torch.where(count > 1, result, 1.0)
    power = low
    for k in range(2, most):
        power = power * low
        if lazy and bool((count > k).all()):
            result.mul_(high).add_(power)
        else:
            result = torch.where(count > k, (result * high).add_(power), result)
    return result
