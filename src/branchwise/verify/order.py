"""A strict order of the tokens at a node, and the law of the highest of K draws.

Of K independent draws from q, the one that ranks highest has the mass

    G(t) = F(t)^K - F^-(t)^K        F, F^- = the mass of q ranked up to t, and below t

Any strict order that is fixed by (p, q, node) gives an exact law; the order of p/q gives the one that suits the
target. It costs a sort, so in a large vocabulary only tokens that carry mass are sorted, and the others rank below
them by token id.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np
import torch
from torch import Tensor

RANKED = 1024
"""At most so many tokens are sorted: in a vocabulary beyond it, those with q above 1 / RANKED."""


class Order:
    """The tokens of rows p, q (batch, n, vocabulary), ascending by p/q with ties by token id."""

    def __init__(self, p: Tensor, q: Tensor, *, lazy: bool) -> None:
        self.p = p
        self.q = q
        self._lazy = lazy

    @cached_property
    def keys(self) -> Tensor:
        """(batch, n, vocabulary): what is compared first; -1 for tokens that only their id ranks."""
        return sort_keys(self.p, self.q, self.q.shape[-1])

    @cached_property
    def below(self) -> Tensor:
        """(batch, n, vocabulary): the mass of q that ranks below each token."""
        vocabulary = self.q.shape[-1]
        if vocabulary <= RANKED:
            return _fill_sorted(torch.empty_like(self.q), self.keys.argsort(dim=-1, stable=True), self.q, 0.0)
        return self._below_on_host() if self._lazy else self._below_on_device()

    def ranks_below(self, tokens: Tensor) -> Tensor:
        """(batch, n, vocabulary) bool: which tokens rank below the given ones (batch, n)."""
        own = self.keys.gather(-1, tokens[..., None])
        ids = torch.arange(self.q.shape[-1], device=self.q.device)
        return (self.keys < own) | ((self.keys == own) & (ids < tokens[..., None]))

    def _below_on_host(self) -> Tensor:
        rows = []
        for p, q in zip(self.p.flatten(0, -2), self.q.flatten(0, -2), strict=True):
            ranked = torch.from_numpy(np.flatnonzero((q > 1 / RANKED).numpy()))  # a fifth of the time that torch takes
            light = q.index_fill(0, ranked, 0.0)
            below = torch.zeros(len(q) + 1, dtype=q.dtype)
            torch.cumsum(light, dim=0, out=below[1:])
            keys, order = sort_keys(p[ranked], q[ranked], len(q)).sort(stable=True)
            rows.append(_fill_sorted(below[:-1], ranked[order], q, below[-1]))
        return torch.stack(rows).view(self.q.shape)

    def _below_on_device(self) -> Tensor:
        # As many slots as tokens could be ranked; what does not belong there keeps its place among the light ones.
        mass, ranked = self.q.topk(RANKED, dim=-1)
        ranked = ranked.sort(dim=-1).values  # so that the stable sort of keys leaves ties in the order of ids
        mass = self.q.gather(-1, ranked)
        heavy = mass > 1 / RANKED
        light = self.q.masked_fill(self.q > 1 / RANKED, 0.0)
        below = light.cumsum(dim=-1)
        total = below[..., -1:].clone()
        below -= light
        keys, order = sort_keys(self.p.gather(-1, ranked), mass, self.q.shape[-1]).sort(dim=-1, stable=True)
        slots, sorted_mass = ranked.gather(-1, order), (mass * heavy).gather(-1, order)
        place = total + sorted_mass.cumsum(dim=-1) - sorted_mass
        return below.scatter(-1, slots, torch.where(heavy.gather(-1, order), place, below.gather(-1, slots)))


def sort_keys(p: Tensor, q: Tensor, vocabulary: int) -> Tensor:
    """What tokens with these masses are compared by, before their ids."""
    least = 1 / RANKED if vocabulary > RANKED else 0.0
    return torch.where(q > least, p / q, -1.0)


def _fill_sorted(below: Tensor, order: Tensor, q: Tensor, start: Tensor | float) -> Tensor:
    """Write to the tokens of an ascending order the mass of those before them, counted from `start`."""
    mass = q.gather(-1, order)
    return below.scatter_(-1, order, (mass.cumsum(dim=-1) - mass).clamp_min_(0) + start)


def boost(below: Tensor, q: Tensor, share: Tensor, count: Tensor, most: int, *, lazy: bool) -> Tensor:
    """By how much each token's mass grows when the highest of `count` paths is taken: G = boost * q.

    The paths that reach a node have the mass X there, and A is the mass of paths that rank below the node;
    `share` = X / (A + X). All of `share` and `count` broadcast to the rows; `most` bounds the counts. The difference
    of powers is divided by its factor q beforehand, so nothing cancels.
    """
    rest = 1 - share
    low = (below * share).add_(rest)
    high = (q * share).add_(low)
    return _mean_power(high, low, count, most, lazy) / _mean_power(torch.ones_like(rest), rest, count, most, lazy)


def _mean_power(high: Tensor, low: Tensor, count: Tensor, most: int, lazy: bool) -> Tensor:
    """(high^count - low^count) / (high - low), as the sum of high^j low^(count - 1 - j)."""
    if lazy:
        most = min(most, int(count.max()))
    if most == 1:
        return torch.ones_like(high)
    total, power = high + low, low
    if not (lazy and bool((count > 1).all())):
        total = torch.where(count > 1, total, 1.0)
    for k in range(2, most):
        power = power * low
        longer = (total * high).add_(power)
        everywhere = lazy and bool((count > k).all())
        total = longer if everywhere else torch.where(count > k, longer, total)
    return total
