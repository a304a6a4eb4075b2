"""A head that drafts on the device, from the verdict to the next tokens, without the host.

Two functions of tensors are recorded: `catch_up` writes the rows of the tokens that a verdict kept, `grow` lays trees
below the roots. Between them stands what the last row of every text predicted and carried on (`HeadCache.predicted`,
`carried`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from branchwise.core.tree import DraftTree
from branchwise.draft.base import Budget
from branchwise.draft.head.cache import HeadCache
from branchwise.draft.head.network import Attend, Head


class Likely(NamedTuple):
    """The most probable tokens after rows, (batch, rows, count) each."""

    tokens: Tensor
    logits: Tensor
    total: Tensor
    """(batch, rows, 1): the logarithm of the sum over all tokens"""


class DeviceDraft(ABC):
    cells: int
    """cells behind a text that a growing tree takes"""
    depth: int
    """levels of a whole tree"""

    def __init__(self, head: Head, cache: HeadCache, embeddings: Tensor, output: Tensor, table: Tensor) -> None:
        self.head, self.cache = head, cache
        self._embeddings, self._rows, self._table = embeddings, output[table].contiguous(), table

    @abstractmethod
    def grow(self, slots: Tensor, lengths: Tensor, roots: Tensor) -> tuple[Tensor, ...]:
        """Trees below these roots, of texts with so many rows; a row for each text, the tokens (batch, nodes) first."""

    @abstractmethod
    def trees(self, found: tuple[Tensor, ...], budgets: Sequence[Budget]) -> list[DraftTree]:
        """What `grow` found, cut to budgets; there may be fewer budgets than rows."""

    def catch_up(
        self, slots: Tensor, lengths: Tensor, tokens: Tensor, paths: Tensor, following: Tensor, *hidden: Tensor
    ) -> Tensor:
        """Write the rows of accepted paths (batch, steps), padded with -1, whose nodes have these tokens and hidden
        states (batch, nodes, …) and which are followed by one more token each. Returns the rows of each text then."""
        slots, lengths, tokens, following = (part.long() for part in (slots, lengths, tokens, following))
        slots = torch.where(slots < 0, self.cache.padding, slots)
        nodes = paths.clamp_min(0)
        states = [state.gather(1, nodes[..., None].expand(-1, -1, state.shape[-1])) for state in hidden]
        last = functional.pad(paths[:, 1:] < 0, (0, 1), value=True)
        after = torch.where(last, following[:, None], functional.pad(tokens.gather(1, nodes[:, 1:]), (0, 1)))
        kept = (paths >= 0).sum(dim=1)
        positions = lengths[:, None] + torch.arange(paths.shape[1], device=paths.device)
        cells = torch.where(paths >= 0, positions, self.cache.scratch)
        seen = self.cache.columns <= positions[..., None]
        predict, carry = self.head(
            self.head.features(states), self._embeddings[after], positions, self._attend(slots, cells, seen)
        )
        end = (kept - 1).clamp_min(0)
        rows = torch.arange(len(paths), device=paths.device)
        self.cache.predicted[slots], self.cache.carried[slots] = predict[rows, end], carry[rows, end]
        return lengths + kept

    def _below(
        self, slots: Tensor, lengths: Tensor, carry: Tensor, tokens: Tensor, cells: Tensor, own: Tensor, depth: int
    ) -> tuple[Tensor, Tensor]:
        """Rows (batch, rows, …) of nodes with these tokens, so many levels below their roots: what they predict and
        carry on. They are written to `cells` behind the text and attend to it and to their `own` of these cells."""
        relative = self.cache.columns - lengths[:, None]  # of every cell, counted from behind the text
        inside = (relative >= 0) & (relative < self.cells)
        places = relative.clamp(0, self.cells - 1)[:, None].expand(-1, own.shape[1], -1)
        seen = (relative < 0)[:, None] | (own.gather(2, places) & inside[:, None])
        positions = (lengths[:, None] - 1 + depth).expand_as(tokens)
        written = lengths[:, None] + cells
        predict, carry = self.head(carry, self._embeddings[tokens], positions, self._attend(slots, written, seen))
        return predict, carry

    def _best(self, predict: Tensor, slots: Tensor, count: int) -> Likely:
        """The most probable tokens of the table and of each text's prompt."""
        common = self.head.logits(predict, self._rows)
        known = self.cache.extra_tokens[slots]
        normed = self.head.output_norm(predict)
        extra = torch.einsum("brd,bed->bre", normed, self.cache.extra_rows[slots])
        extra = extra.masked_fill((known < 0)[:, None], -torch.inf)
        logits = torch.cat([common, extra], dim=-1).float()
        best = logits.topk(count, dim=-1)
        size = len(self._table)
        theirs = known[:, None].expand(-1, best.indices.shape[1], -1).gather(2, (best.indices - size).clamp_min(0))
        tokens = torch.where(best.indices < size, self._table[best.indices.clamp_max(size - 1)], theirs)
        return Likely(tokens, best.values, logits.logsumexp(dim=-1, keepdim=True))

    def _attend(self, slots: Tensor, cells: Tensor, seen: Tensor) -> Attend:
        """Attention of rows that are written to cells (batch, rows), over what they see (batch, rows, all cells)."""

        def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            keys, values = self.cache.store[0, layer], self.cache.store[1, layer]
            keys[slots[:, None], :, cells] = key.transpose(1, 2)
            values[slots[:, None], :, cells] = value.transpose(1, 2)
            batch, heads, rows, width = query.shape
            groups = heads // key.shape[1]
            # The query heads of a group as further rows: fused kernels with a mask know no groups.
            folded = query.reshape(batch, key.shape[1], groups * rows, width)
            mask = seen[:, None].repeat(1, 1, groups, 1)
            seen_cells = seen.shape[-1]
            found = functional.scaled_dot_product_attention(
                folded, keys[slots, :, :seen_cells], values[slots, :, :seen_cells], mask
            )
            return found.reshape(batch, heads, rows, width)

        return attend
