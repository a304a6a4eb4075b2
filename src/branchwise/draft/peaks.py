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
    """(many, vocabulary), as they were given"""
    rows: Tensor
    """(rows,): which of them these laws are"""
    total: Tensor
    """(rows, 1) float32: log of the sum of all exp(logits)"""

    def of(self, rows: Tensor, tokens: Tensor) -> Tensor:
        """(n, m): the probabilities of tokens (n, m), each line in the law of rows (n,)."""
        return (_at(self.logits, self.rows[rows], tokens) - self.total[rows]).exp()


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
    logits = scored.logits.flatten(0, 1)
    return peaks_here(logits, k, torch.tensor(rows).to(logits.device, non_blocking=True))


def peaks_here(logits: Tensor, k: int, rows: Tensor | None = None) -> Peaks | Told:
    """The same as `peaks`, on the host; a device tells twice as many as are kept."""
    if logits.device.type == "cpu":
        return peaks(logits, k, rows)
    found = peaks(logits, 2 * k, rows)
    return told(torch.stack([found.tokens.float(), found.masses], dim=1).cpu(), k)


def peaks(logits: Tensor, k: int, rows: Tensor | None = None) -> Peaks:
    """The k best tokens of rows (n,) of logits (many, vocabulary), or of all; all tokens where there are no more."""
    on_host = logits.device.type == "cpu"
    if not on_host and rows is not None:
        logits, rows = logits.index_select(0, rows), None
    rows = torch.arange(len(logits), device=logits.device) if rows is None else rows
    stripes, rest = divmod(logits.shape[1], STRIPE)
    best, total = _summed_here(logits, rows, stripes) if on_host else (_best_of(logits, stripes), None)
    winners = best.topk(min(k, stripes), sorted=False).indices  # (n, k)
    members = stripes * torch.arange(STRIPE, device=logits.device)
    alone = stripes * STRIPE + torch.arange(rest, device=logits.device).expand(len(rows), -1)  # in no stripe
    tokens = torch.cat([(winners[:, :, None] + members).flatten(1), alone], dim=1)
    values, places = _at(logits, rows, tokens).topk(min(k, logits.shape[1]))
    found = tokens.gather(1, places)
    if total is None:  # a device takes all exponentials of a row and their sum in one launch
        total = values[:, :1] - logits.softmax(dim=1, dtype=torch.float32).gather(1, found[:, :1]).log()
    return Peaks(found, (values - total).exp(), logits, rows, total)


def _summed_here(logits: Tensor, rows: Tensor, stripes: int) -> tuple[Tensor, Tensor]:
    """The best of every stripe of some rows, and their totals, a few rows at a time."""
    room = torch.empty(AT_ONCE, logits.shape[1])  # one for all: what is written again is at hand
    found = [_summed(room[: len(few)].copy_(logits.index_select(0, few)), stripes) for few in rows.split(AT_ONCE)]
    best, total = (torch.cat(parts) for parts in zip(*found, strict=True))
    return best, total


def _summed(laws: Tensor, stripes: int) -> tuple[Tensor, Tensor]:
    """The same of laws (few, vocabulary); nothing is left of the laws themselves."""
    best = _best_of(laws, stripes)
    highest = torch.cat([best, laws[:, stripes * STRIPE :]], dim=1).amax(dim=1, keepdim=True)
    return best, highest + laws.sub_(highest).exp_().sum(dim=1, keepdim=True).log_()


def _best_of(laws: Tensor, stripes: int) -> Tensor:
    """(rows, stripes): the best logit of every stripe."""
    best: Tensor = laws[:, : stripes * STRIPE].unflatten(1, (STRIPE, stripes)).amax(dim=1)
    return best


def _at(logits: Tensor, rows: Tensor, tokens: Tensor) -> Tensor:
    """(n, m) float32: the logits of tokens (n, m), each line in one of rows (n,)."""
    return logits.take(logits.shape[1] * rows[:, None] + tokens).float()
