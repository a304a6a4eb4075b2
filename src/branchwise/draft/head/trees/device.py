"""A head that drafts on the device, from the verdict to the next tokens, without the host.

Two functions of tensors follow each other: `catch_up` writes the rows of the tokens that a verdict kept, `grow` lays
trees below the roots. Between them stands what the last row of every text predicted and carried on
(`HeadCache.predicted`, `carried`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from branchwise.backends.packed import matrix
from branchwise.core.rows import WORD, pack_bits
from branchwise.core.tree import DraftTree
from branchwise.cuda.graphs import have_kernels
from branchwise.draft.base import Budget
from branchwise.draft.constrained import GrammarLevels
from branchwise.draft.foresight import foreseen, keys_of
from branchwise.draft.head.cache import HeadCache
from branchwise.draft.head.network import Attend, Head, Rows
from branchwise.verify import Verdict


class Likely(NamedTuple):
    """The most probable tokens after rows, (batch, rows, count) each."""

    tokens: Tensor
    logprobs: Tensor


class DeviceDraft(ABC):
    cells: int
    """cells behind a text that a growing tree takes"""
    depth: int
    """levels of a whole tree"""
    nodes: int
    """of a whole tree, at most, the root included"""
    grammars: GrammarLevels | None = None
    """what grammars allow in trees that grow on a host; what is recorded on a device knows no grammar"""

    def __init__(
        self,
        head: Head,
        cache: HeadCache,
        embeddings: Tensor,
        output: Tensor,
        table: Tensor,
        rows: Tensor | None = None,
    ) -> None:
        """`rows` are the output rows of the table, by default those of `output`."""
        self.head, self.cache = head, cache
        # In the order of the vocabulary, in blocks of which draws go.
        self._table, order = table.sort()
        self._embeddings = embeddings
        self._rows = (output[table] if rows is None else rows)[order].contiguous()
        self._product = matrix(self._rows)
        self._kernels = have_kernels(table.device)
        self._normed_rows = self._rows
        if self._kernels:
            self._list_for_kernels()

    def _list_for_kernels(self) -> None:
        """The table as kernels read it."""
        from branchwise.cuda.best_tokens import Parts

        self._normed_rows = with_norm(self._rows, self.head.output_norm.weight)
        self._table_parts = Parts.of(self._table, len(self._embeddings))

    @abstractmethod
    def grow(self, slots: Tensor, lengths: Tensor, roots: Tensor) -> tuple[Tensor, ...]:
        """Trees below these roots, of texts with so many rows; a row for each text, the tokens (batch, nodes) first."""

    @abstractmethod
    def trees(self, found: tuple[Tensor, ...], budgets: Sequence[Budget]) -> list[DraftTree]:
        """What `grow` found, cut to budgets; there may be fewer budgets than rows."""

    def rests(self, batch: int) -> bool:
        """A step of so many texts begins; whether nothing is to be drafted in it."""
        return False

    def begin(self) -> None:
        """Prompts are read, and what belongs to this step alone begins."""

    def drafted(self, trees: Sequence[DraftTree]) -> None:
        """These trees are scored next."""

    def scored(self, verdicts: Sequence[Verdict]) -> None:
        """The verdicts on them are known."""

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
        steps = paths.shape[1]
        positions = lengths[:, None] + torch.arange(steps, device=paths.device)
        # What pads a path is written behind it, where nobody reads it before it is written again.
        self.cache.tokens[slots[:, None], positions] = after
        before = torch.ones(steps, steps, dtype=torch.bool, device=paths.device).tril().expand(len(paths), -1, -1)
        predict, carry = self.head(
            self.head.features(states), self._embeddings[after], positions, self._attend(slots, lengths, 0, before)
        )
        end = (kept - 1).clamp_min(0)
        rows = torch.arange(len(paths), device=paths.device)
        self.cache.predicted[slots], self.cache.carried[slots] = predict[rows, end], carry[rows, end]
        return lengths + kept

    def _below(
        self, slots: Tensor, lengths: Tensor, carry: Tensor, tokens: Tensor, first: int, own: Tensor, depth: int
    ) -> Rows:
        """The rows of nodes (batch, rows), so many levels below their roots, that read what their parents carried.
        They are written behind the text from cell `first` on."""
        positions = (lengths[:, None] - 1 + depth).expand_as(tokens)
        attend = self._attend(slots, lengths, first, own)
        rows: Rows = self.head(carry, self._embeddings[tokens], positions, attend)
        return rows

    def _best(self, predict: Tensor, slots: Tensor, lengths: Tensor, depth: int, count: int) -> Likely:
        """The tokens of the table and of each text's prompt that are most likely to come `depth` levels below the
        roots, behind texts of so many rows."""
        known, size = self.cache.extra_tokens[slots], len(self._table)
        if self._kernels:
            from branchwise.cuda.best_tokens import best_tokens

            extra = self.cache.extra_rows, self.cache.extra_tokens
            every = torch.arange(predict[..., 0].numel(), device=predict.device).view(predict.shape[:2])
            states = predict.reshape(-1, predict.shape[-1])
            epsilon = self.head.config.epsilon
            values, places = best_tokens(
                states, every, epsilon, self._normed_rows, self._table_parts, *extra, slots, lengths, self.cache.draws,
                depth, count,
            )  # fmt: skip
            places = places.long()
        else:
            bare = functional.rms_norm(predict, predict.shape[-1:], eps=self.head.config.epsilon)
            own = torch.einsum("brd,bed->bre", bare, self.cache.extra_rows[slots])
            own = own.masked_fill((known < 0)[:, None], -torch.inf)
            logits = torch.cat([self._product(self.head.output(predict), None), own], dim=-1).float()
            if self.grammars is not None:
                allowed = self.grammars.allowed(len(self._embeddings))
                theirs = allowed.gather(2, known.clamp_min(0)[:, None].expand(-1, predict.shape[1], -1))
                logits = logits.masked_fill(~torch.cat([allowed[..., self._table], theirs], dim=-1), -torch.inf)
            dice, temperatures = (part[slots] for part in self.cache.draws)
            logits /= torch.where(temperatures > 0, temperatures, 1.0)[:, None, None]
            keys = keys_of(dice, lengths + depth)[:, None].expand(-1, predict.shape[1])
            listed, own = logits.split([size, own.shape[-1]], dim=-1)
            chances = foreseen(listed, self._table, keys, temperatures > 0, own, known, len(self._embeddings))
            values, places = chances.topk(count, dim=-1)
        theirs = known[:, None].expand(-1, places.shape[1], -1).gather(2, (places - size).clamp_min(0))
        tokens = torch.where(places < size, self._table[places.clamp_max(size - 1)], theirs)
        likely = Likely(tokens, values)
        return likely if self.grammars is None else self._forced(likely, self.grammars)

    def _forced(self, likely: Likely, levels: GrammarLevels) -> Likely:
        """The same where a grammar leaves no choice: its token may not even be in the table."""
        tokens, logprobs = likely.tokens.clone(), likely.logprobs.nan_to_num(nan=-torch.inf, neginf=-torch.inf)
        for text, row, token in levels.forced():
            tokens[text, row, 0] = token
            logprobs[text, row] = -torch.inf
            logprobs[text, row, 0] = 0.0
        return Likely(tokens, logprobs)

    def _attend(self, slots: Tensor, lengths: Tensor, first: int, own: Tensor) -> Attend:
        """Attention of rows that are written behind their texts from cell `first` on. They see the text, and of the
        cells behind it their `own` (batch, rows, cells)."""
        if self._kernels:
            return self._attend_by_kernels(slots.int(), lengths.int(), first, own)
        _, rows, count = own.shape
        cells = lengths[:, None] + first + torch.arange(rows, device=own.device)
        relative = self.cache.columns - lengths[:, None]  # of every cell, counted from behind the text
        inside = ((relative >= 0) & (relative < count))[:, None]
        places = relative.clamp(0, count - 1)[:, None].expand(-1, rows, -1)
        seen = (relative < 0)[:, None] | (own.gather(2, places) & inside)

        def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            keys, values = self.cache.store[0, layer], self.cache.store[1, layer]
            keys[slots[:, None], :, cells] = key.transpose(1, 2)
            values[slots[:, None], :, cells] = value.transpose(1, 2)
            end = seen.shape[-1]
            return functional.scaled_dot_product_attention(
                query, keys[slots, :, :end], values[slots, :, :end], seen[:, None], enable_gqa=True
            )

        return attend

    def _attend_by_kernels(self, slots: Tensor, lengths: Tensor, first: int, own: Tensor) -> Attend:
        from branchwise.cuda import kernels

        bits = pack_bits(own)
        depths = torch.zeros(own.shape[:2], dtype=torch.int32, device=own.device)
        columns = torch.zeros(len(own), WORD * bits.shape[2], dtype=torch.int32, device=own.device)
        starts = lengths + first

        def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            keys, values = self.cache.store[0, layer], self.cache.store[1, layer]
            kernels.write_rows(keys, values, key, value, slots, starts)
            scale = query.shape[-1] ** -0.5
            found = kernels.tree_attention(query, keys, values, slots, lengths, depths, columns, bits, scale=scale)
            return found.transpose(1, 2)

        return attend


def with_norm(weight: Tensor, *norms: Tensor) -> Tensor:
    """A matrix that takes rows before the weights of their norms, as kernels read it."""
    return (weight.float() * torch.cat(norms).float()).to(weight.dtype).contiguous()
