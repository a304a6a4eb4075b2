"""The most probable tokens of a few distributions, without sorting a vocabulary.

A tournament: a vocabulary is cut into stripes, and the k best tokens lie in the k stripes with the best winners. Only
those are sorted. All else that a distribution needs is one sum over the row, so a probability is exact however few are
kept.
"""

from __future__ import annotations

from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from branchwise.backends.base import Scored

Ints = NDArray[np.int64]
Floats = NDArray[np.float32]
STRIPE = 64
"""tokens of one stripe"""
AT_ONCE = 4
"""rows that the host works on at once, so that they stay in its caches"""


class TopTokens(NamedTuple):
    """The best tokens of distributions, and the distributions to look up others in."""

    tokens: Tensor
    """(rows, k) int64, best first"""
    masses: Tensor
    """(rows, k) float32: their probabilities"""
    logits: Tensor
    """(many, vocabulary), as they were given"""
    rows: Tensor
    """(rows,): which of them these distributions are"""
    total: Tensor
    """(rows, 1) float32: log of the sum of all exp(logits)"""

    def of(self, rows: Tensor, tokens: Tensor) -> Tensor:
        """(n, m): the probabilities of tokens (n, m), each line in the distribution of rows (n,)."""
        return (_at(self.logits, self.rows[rows], tokens) - self.total[rows]).exp()


class Sums(NamedTuple):
    """What nobody knows of distributions before all their tokens were looked at."""

    best: Tensor
    """(rows, stripes) float32: the best logit of every stripe"""
    total: Tensor
    """(rows, 1) float32, as above"""


class HostTopTokens(NamedTuple):
    """Peaks as arrays, for few distributions on the host: there a tensor costs more than what is done with it."""

    tokens: Ints
    """(rows, k) int64, best first"""
    masses: Floats
    """(rows, k) float32"""
    logits: Tensor
    """(many, vocabulary)"""
    starts: Ints
    """(rows, 1): where in the logits a distribution starts"""
    total: Floats
    """(rows, 1) float32"""

    def of(self, rows: list[int], tokens: Ints) -> Floats:
        """(n, m): the probabilities of tokens (n, m), each line in the distribution of one of n rows."""
        values = self.logits.take(torch.from_numpy(self.starts[rows] + tokens)).float()
        found: Floats = values.sub_(torch.from_numpy(self.total[rows])).exp_().numpy()
        return found


class ReportedTopTokens(NamedTuple):
    """The best tokens of distributions that a device keeps to itself; further ones, told with them, serve to look up
    others."""

    tokens: Ints
    """(rows, k) int64, best first"""
    masses: Floats
    """(rows, k) float32"""
    further: Ints
    """(rows, n) int64: all tokens that were told, n of them"""
    chances: Floats
    """(rows, n) float32: their probabilities"""

    def of(self, rows: list[int], tokens: Ints) -> Floats:
        """(n, m): the probabilities of tokens (n, m), each line in the distribution of one of n rows; 0 where nothing
        was told."""
        hits = self.further[rows][:, None, :] == tokens[:, :, None]
        found: Floats = (hits * self.chances[rows][:, None, :]).sum(axis=2)
        return found


def told(best: Floats, k: int) -> ReportedTopTokens:
    """What a pass said of its best tokens (rows, 2, n), of which k are kept."""
    tokens, chances = best[:, 0].astype(np.int64), best[:, 1]
    return ReportedTopTokens(tokens[:, :k], chances[:, :k], tokens, chances)


def top_tokens_at(scored: Scored, rows: list[int], k: int) -> HostTopTokens | ReportedTopTokens:
    """The best tokens behind nodes of a batch, numbered tree by tree, on the host."""
    if scored.host_topk is not None and scored.host_topk.shape[3] >= min(k, scored.logits.shape[2]):
        return told(scored.host_topk.flatten(0, 1).numpy()[rows], k)
    logits = scored.logits.flatten(0, 1)
    sums = _sums_of(scored, rows) if logits.device.type == "cpu" else None
    return host_top_tokens(logits, k, torch.tensor(rows).to(logits.device, non_blocking=True), sums)


def host_top_tokens(
    logits: Tensor, k: int, rows: Tensor | None = None, sums: Sums | None = None
) -> HostTopTokens | ReportedTopTokens:
    """The same as `peaks`, on the host; a device tells twice as many as are kept."""
    if logits.device.type != "cpu":
        found = top_tokens(logits, 2 * k, rows)
        return told(torch.stack([found.tokens.float(), found.masses], dim=1).cpu().numpy(), k)
    found = top_tokens(logits, k, rows, sums)
    starts = logits.shape[1] * found.rows[:, None].numpy()
    return HostTopTokens(found.tokens.numpy(), found.masses.numpy(), logits, starts, found.total.numpy())


_seen: WeakKeyDictionary[Scored, tuple[dict[int, int], Sums]] = WeakKeyDictionary()
"""pass -> places of its rows in their sums, and these"""


def _sums_of(scored: Scored, rows: list[int]) -> Sums:
    """Of rows of a pass. They are kept as long as it is: the next memory asks mostly about some of the same."""
    if scored not in _seen or not _seen[scored][0].keys() >= set(rows):
        _seen[scored] = (
            {row: place for place, row in enumerate(rows)},
            _summed_here(scored.logits.flatten(0, 1), torch.tensor(rows)),
        )
    places, sums = _seen[scored]
    if rows == list(places):
        return sums
    few = torch.tensor([places[row] for row in rows])
    return Sums(*(part.index_select(0, few) for part in sums))


def top_tokens(logits: Tensor, k: int, rows: Tensor | None = None, sums: Sums | None = None) -> TopTokens:
    """The k best tokens of rows (n,) of logits (many, vocabulary), or of all; all tokens where there are no more."""
    on_host = logits.device.type == "cpu"
    if not on_host and rows is not None:
        logits, rows = logits.index_select(0, rows), None
    rows = torch.arange(len(logits), device=logits.device) if rows is None else rows
    stripes, rest = divmod(logits.shape[1], STRIPE)
    best, total = (sums or _summed_here(logits, rows)) if on_host else (_best_of(logits), None)
    winners = best.topk(min(k, stripes), sorted=False).indices  # (n, k)
    tokens = (winners[:, :, None] + stripes * torch.arange(STRIPE, device=logits.device)).flatten(1)
    if rest:  # in no stripe
        alone = stripes * STRIPE + torch.arange(rest, device=logits.device)
        tokens = torch.cat([tokens, alone.expand(len(rows), -1)], dim=1)
    values, places = _at(logits, rows, tokens).topk(min(k, logits.shape[1]))
    found = tokens.gather(1, places)
    if total is None:  # a device takes all exponentials of a row and their sum in one launch
        total = values[:, :1] - logits.softmax(dim=1, dtype=torch.float32).gather(1, found[:, :1]).log()
    return TopTokens(found, (values - total).exp(), logits, rows, total)


def _summed_here(logits: Tensor, rows: Tensor) -> Sums:
    """Some rows of logits summed up, a few at a time."""
    found = [_summed(logits.index_select(0, few).float()) for few in rows.split(AT_ONCE)]
    return Sums(*(torch.cat(parts) for parts in zip(*found, strict=True)))


def _summed(probs: Tensor) -> Sums:
    """The same of distributions (few, vocabulary); nothing is left of the distributions themselves."""
    best = _best_of(probs)
    highest = torch.cat([best, probs[:, STRIPE * best.shape[1] :]], dim=1).amax(dim=1, keepdim=True)
    return Sums(best, highest + probs.sub_(highest).exp_().sum(dim=1, keepdim=True).log_())


def _best_of(probs: Tensor) -> Tensor:
    """(rows, stripes): the best logit of every stripe."""
    stripes = probs.shape[1] // STRIPE
    best: Tensor = probs[:, : stripes * STRIPE].unflatten(1, (STRIPE, stripes)).amax(dim=1)
    return best


def _at(logits: Tensor, rows: Tensor, tokens: Tensor) -> Tensor:
    """(n, m) float32: the logits of tokens (n, m), each line in one of rows (n,)."""
    return logits.take(logits.shape[1] * rows[:, None] + tokens).float()
