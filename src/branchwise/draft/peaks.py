"""The most probable tokens of a few laws, without sorting a vocabulary.

A tournament: a vocabulary is cut into stripes, and the k best tokens lie in the k stripes with the best winners. Only
those are sorted. All else that a law needs is one sum over the row, so a probability is exact however few are kept.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

STRIPE = 64
"""tokens of one stripe"""
AT_ONCE = 8
"""rows that the host works on at once, so that they stay in its caches"""


class Peaks(NamedTuple):
    """The best tokens of laws, and the laws to look up others in."""

    tokens: Tensor
    """(rows, k) int64, best first"""
    masses: Tensor
    """(rows, k) float32: their probabilities"""
    logits: Tensor
    """(rows, vocabulary) float32"""
    total: Tensor
    """(rows, 1) float32: log of the sum of all exp(logits)"""

    def of(self, rows: Tensor, tokens: Tensor) -> Tensor:
        """(n, m): the probabilities of tokens (n, m), each line in the law of rows (n,)."""
        return (self.logits[rows[:, None], tokens] - self.total[rows]).exp()


def portions(logits: Tensor) -> tuple[Tensor, ...]:
    """Rows of logits as many at a time as are best worked on together, in their order."""
    return logits.split(AT_ONCE) if logits.device.type == "cpu" else (logits,)


def peaks(logits: Tensor, k: int) -> Peaks:
    """The k best tokens of every row of logits (rows, vocabulary); all of them where there are no more."""
    logits = logits.float()
    values, tokens = _best(logits, min(k, logits.shape[1]))
    highest = values[:, :1]
    total = highest + (logits - highest).exp_().sum(dim=1, keepdim=True).log_()
    return Peaks(tokens, (values - total).exp(), logits, total)


def _best(rows: Tensor, k: int) -> tuple[Tensor, Tensor]:
    stripes = rows.shape[1] // STRIPE
    if stripes <= k:
        found = rows.topk(k)
        return found.values, found.indices
    whole = stripes * STRIPE
    winners = rows[:, :whole].unflatten(1, (STRIPE, stripes)).amax(dim=1).topk(k, sorted=False).indices  # (rows, k)
    members = torch.arange(0, whole, stripes, device=rows.device)
    rest = torch.arange(whole, rows.shape[1], device=rows.device).expand(len(rows), -1)  # in no stripe
    tokens = torch.cat([(winners[:, :, None] + members).flatten(1), rest], dim=1)
    found = rows.gather(1, tokens).topk(k)
    return found.values, tokens.gather(1, found.indices)
