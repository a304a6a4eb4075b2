"""The most probable tokens of distributions, as arrays on the host.

A device reports them (`core.rows.top_tokens`). The host finds them by a tournament instead of sorting a vocabulary: the
vocabulary is cut into stripes, and the k best tokens are in the k stripes with the best winners. Only these stripes are
sorted. The probabilities are divided by a sum over the whole row, so they are exact however few are kept.
"""

from __future__ import annotations

from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from branchwise.backends.base import Scored
from branchwise.core.rows import top_tokens

Ints = NDArray[np.int64]
Floats = NDArray[np.float32]
STRIPE = 64
"""number of tokens of one stripe"""
AT_ONCE = 4
"""number of rows that the host works on at once, so that they stay in its caches"""


class Sums(NamedTuple):
    """The numbers that need a look at every logit of a row."""

    best: Tensor
    """(rows, stripes) float32: the best logit of every stripe"""
    total: Tensor
    """(rows, 1) float32: log of the sum of all exp(logits)"""


class HostTopTokens(NamedTuple):
    """The best tokens of distributions on the host, and the whole distributions, to look up other tokens."""

    tokens: Ints
    """(rows, k) int64, best first"""
    masses: Floats
    """(rows, k) float32"""
    logits: Tensor
    """(many, vocabulary): logits, among them the rows of the distributions"""
    starts: Ints
    """(rows, 1): the offset of each distribution in the flattened logits"""
    total: Floats
    """(rows, 1) float32: log of the sum of all exp(logits)"""

    def of(self, rows: list[int], tokens: Ints) -> Floats:
        """(n, m): the probabilities of `tokens` (n, m), line i in the distribution of row rows[i]."""
        values = self.logits.take(torch.from_numpy(self.starts[rows] + tokens)).float()
        return values.sub_(torch.from_numpy(self.total[rows])).exp_().numpy()


class ReportedTopTokens(NamedTuple):
    """The best tokens of distributions on a device, and further tokens that can be looked up."""

    tokens: Ints
    """(rows, k) int64, best first"""
    masses: Floats
    """(rows, k) float32"""
    further: Ints
    """(rows, n) int64: all tokens that the device reported"""
    chances: Floats
    """(rows, n) float32: their probabilities"""

    def of(self, rows: list[int], tokens: Ints) -> Floats:
        """As `HostTopTokens.of`, but 0 for tokens that were not reported."""
        hits = self.further[rows][:, None, :] == tokens[:, :, None]
        found: Floats = (hits * self.chances[rows][:, None, :]).sum(axis=2)
        return found


def reported(best: Floats, k: int) -> ReportedTopTokens:
    """The result of `top_tokens` on a device, (rows, 2, n), of which k tokens are kept."""
    tokens, chances = best[:, 0].astype(np.int64), best[:, 1]
    return ReportedTopTokens(tokens[:, :k], chances[:, :k], tokens, chances)


def top_tokens_at(scored: Scored, rows: list[int], k: int) -> HostTopTokens | ReportedTopTokens:
    """The k best tokens after the nodes `rows` of a batch, which are numbered tree by tree."""
    if scored.host_topk is not None and scored.host_topk.shape[3] >= min(k, scored.logits.shape[2]):
        return reported(scored.host_topk.flatten(0, 1).numpy()[rows], k)
    logits = scored.logits.flatten(0, 1)
    sums = _sums_of(scored, rows) if logits.device.type == "cpu" else None
    return host_top_tokens(logits, k, torch.tensor(rows).to(logits.device, non_blocking=True), sums)


def host_top_tokens(
    logits: Tensor, k: int, rows: Tensor | None = None, sums: Sums | None = None
) -> HostTopTokens | ReportedTopTokens:
    """The k best tokens of `rows` (n,) of the logits (many, vocabulary), or of all rows; fewer if the vocabulary is
    smaller. A device reports 2k tokens, of which k are kept."""
    vocabulary = logits.shape[1]
    if logits.device.type != "cpu":
        asked = logits if rows is None else logits.index_select(0, rows)
        return reported(top_tokens(asked, min(2 * k, vocabulary)).cpu().numpy(), k)
    rows = torch.arange(len(logits)) if rows is None else rows
    best, total = sums or _sums(logits, rows)
    stripes, rest = divmod(vocabulary, STRIPE)
    winners = best.topk(min(k, stripes), sorted=False).indices  # (n, k)
    tokens = (winners[:, :, None] + stripes * torch.arange(STRIPE)).flatten(1)
    if rest:  # the last tokens are in no stripe
        tokens = torch.cat([tokens, (stripes * STRIPE + torch.arange(rest)).expand(len(rows), -1)], dim=1)
    starts = vocabulary * rows[:, None]
    values, places = logits.take(starts + tokens).float().topk(min(k, vocabulary))
    masses = (values - total).exp()
    return HostTopTokens(tokens.gather(1, places).numpy(), masses.numpy(), logits, starts.numpy(), total.numpy())


_seen: WeakKeyDictionary[Scored, tuple[dict[int, int], Sums]] = WeakKeyDictionary()
"""pass -> (row -> its index in the sums), and the sums"""


def _sums_of(scored: Scored, rows: list[int]) -> Sums:
    """The sums of rows of a pass, cached as long as the pass: several drafters of a fusion need the same rows."""
    if scored not in _seen or not _seen[scored][0].keys() >= set(rows):
        sums = _sums(scored.logits.flatten(0, 1), torch.tensor(rows))
        _seen[scored] = {row: place for place, row in enumerate(rows)}, sums
    places, sums = _seen[scored]
    if rows == list(places):
        return sums
    few = torch.tensor([places[row] for row in rows])
    return Sums(*(part.index_select(0, few) for part in sums))


def _sums(logits: Tensor, rows: Tensor) -> Sums:
    """The sums of some rows of logits, a few rows at a time."""
    found = [_sums_in_place(logits.index_select(0, few).float()) for few in rows.split(AT_ONCE)]
    return Sums(*(torch.cat(parts) for parts in zip(*found, strict=True)))


def _sums_in_place(logits: Tensor) -> Sums:
    """The sums of logits (few, vocabulary), which are overwritten."""
    stripes = logits.shape[1] // STRIPE
    best: Tensor = logits[:, : stripes * STRIPE].unflatten(1, (STRIPE, stripes)).amax(dim=1)
    highest = torch.cat([best, logits[:, STRIPE * stripes :]], dim=1).amax(dim=1, keepdim=True)
    return Sums(best, highest + logits.sub_(highest).exp_().sum(dim=1, keepdim=True).log_())
