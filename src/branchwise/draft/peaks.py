"""The most probable tokens of a few laws, without sorting a vocabulary.

A tournament: a vocabulary is cut into stripes, and the k best tokens lie in the k stripes with the best winners. Only
those are sorted. All else that a law needs is one sum over the row, so a probability is exact however few are kept.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from branchwise.target import Scored

STRIPE = 64
"""tokens of one stripe"""
AT_ONCE = 4
"""rows that the host works on at once, so that they stay in its caches"""


class Peaks(NamedTuple):
    """The best tokens of laws, and the laws to look up others in."""

    tokens: Tensor
    """(rows, k) int64, best first"""
    masses: Tensor
    """(rows, k) float32: their probabilities"""
    logits: Tensor
    """(rows, vocabulary), as they were given"""
    total: Tensor
    """(rows, 1) float32: log of the sum of all exp(logits)"""

    def of(self, rows: Tensor, tokens: Tensor) -> Tensor:
        """(n, m): the probabilities of tokens (n, m), each line in the law of rows (n,)."""
        return (self.logits[rows[:, None], tokens].float() - self.total[rows]).exp()


class Told(NamedTuple):
    """The best tokens of laws that a device keeps to itself; further ones, told with them, serve to look up others."""

    tokens: Tensor
    """(rows, k) int64, best first"""
    masses: Tensor
    """(rows, k) float32"""
    further: Tensor
    """(rows, n) int64: all tokens that were told, n of them"""
    chances: Tensor
    """(rows, n) float32: their probabilities"""

    def of(self, rows: Tensor, tokens: Tensor) -> Tensor:
        """(n, m): the probabilities of tokens (n, m), each line in the law of rows (n,); 0 where nothing was told."""
        hits = self.further[rows][:, None, :] == tokens[:, :, None]
        return (hits * self.chances[rows][:, None, :]).sum(dim=2)


def told(best: Tensor, k: int) -> Told:
    """What a pass said of its best tokens (rows, 2, n), of which k are kept."""
    tokens, chances = best[:, 0].long(), best[:, 1]
    return Told(tokens[:, :k], chances[:, :k], tokens, chances)


def peaks_at(scored: Scored, rows: list[int], k: int) -> Peaks | Told:
    """The best tokens behind nodes of a batch, numbered tree by tree, on the host."""
    if scored.told is not None and scored.told.shape[3] >= min(k, scored.logits.shape[2]):
        return told(scored.told.flatten(0, 1)[rows], k)
    flat = scored.logits.flatten(0, 1)
    return peaks_here(flat.index_select(0, torch.tensor(rows).to(flat.device, non_blocking=True)), k)


def peaks_here(logits: Tensor, k: int) -> Peaks | Told:
    """The best tokens of logits (rows, vocabulary) on the host; a device tells twice as many as are kept."""
    if logits.device.type == "cpu":
        return peaks(logits, k)
    found = peaks(logits, 2 * k)
    return told(torch.stack([found.tokens.float(), found.masses], dim=1).cpu(), k)


def peaks(logits: Tensor, k: int) -> Peaks:
    """The k best tokens of every row of logits (rows, vocabulary); all of them where there are no more."""
    k = min(k, logits.shape[1])
    if logits.device.type != "cpu":
        return _peaks_there(logits, k)
    found = [_peaks(rows.float(), k) for rows in logits.split(AT_ONCE)]
    tokens, masses, total = (torch.cat(parts) for parts in zip(*found, strict=True))
    return Peaks(tokens, masses, logits, total)


def _peaks_there(logits: Tensor, k: int) -> Peaks:
    """The same in few launches: a device takes the sum over a row in one with the exponentials."""
    values, tokens = _best(logits, k)
    chances = logits.softmax(dim=1, dtype=torch.float32).gather(1, tokens)
    return Peaks(tokens, chances, logits, values[:, :1].float() - chances[:, :1].log())


def _peaks(rows: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    values, tokens = _best(rows, k)
    highest = values[:, :1]
    total = highest + (rows - highest).exp_().sum(dim=1, keepdim=True).log_()
    return tokens, (values - total).exp(), total


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
