"""A head that drafts on the device, from the verdict to the next tokens, without the host.

Two functions of tensors follow each other: `catch_up` writes the rows of the tokens that a verdict kept, and then
another function lays or draws trees below the roots. The first passes on to the second what the last row of every text
predicted and carried on (`HeadCache.predicted`, `carried`), and in a parallel head what its masks predicted
(`foreseen`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from branchwise.backends.base import CachedRows
from branchwise.backends.packed import Product, matrix
from branchwise.core.tree import DraftTree
from branchwise.cuda.graphs import have_kernels
from branchwise.draft.base import Budget
from branchwise.draft.constrained import GrammarLevels
from branchwise.draft.foresight import foreseen, keys_of
from branchwise.draft.head.cache import HeadCache
from branchwise.draft.head.host import HostHead
from branchwise.draft.head.network import Head, Rows
from branchwise.draft.head.trees.attention import Behind, attention, cross_attention
from branchwise.verify import Verdict


class Likely(NamedTuple):
    """The most probable tokens after rows, (batch, rows, count) each."""

    tokens: Tensor
    logprobs: Tensor


class HeadParts(NamedTuple):
    """The parts of a bound head that drafting on a device needs, in the order of the arguments of `HeadOnDevice`."""

    head: Head
    cache: HeadCache
    embeddings: Tensor
    """(vocabulary, width)"""
    output: Tensor
    """(vocabulary, width): output rows for tokens of prompts that are not in the table"""
    table: Tensor
    """(tokens,): the tokens that can be proposed in every text"""
    rows: Tensor
    """(tokens, width): output rows of the table"""
    cached: Callable[[], CachedRows] | None
    """finds the keys and values of the target that the head attends to; None if it attends to none"""
    product_of: Callable[[Tensor], Product]
    """makes the product with a matrix of output rows"""


class HeadOnDevice:
    """The rows of a head: those of texts, and those of the nodes of trees while they grow."""

    _cell_depths: Tensor
    """(cells,): the level of the nodes in each cell of a growing tree, counted from 0"""

    def __init__(
        self,
        head: Head,
        cache: HeadCache,
        embeddings: Tensor,
        output: Tensor,
        table: Tensor,
        rows: Tensor | None = None,
        cached: Callable[[], CachedRows] | None = None,
        product_of: Callable[[Tensor], Product] = matrix,
    ) -> None:
        """The arguments are the fields of `HeadParts`. `rows` are by default taken from `output`; `cached` finds keys
        and values (slots, heads, rows, width)."""
        self.head, self.cache = head, cache
        # In the order of the vocabulary, because a race goes through blocks of the vocabulary.
        self._table, order = table.long().sort()
        self.embeddings, self._output, self._cached = embeddings, output, cached
        self._rows = (output[table] if rows is None else rows)[order].contiguous()
        self._product = product_of(self._rows)
        self._kernels = have_kernels(table.device)
        self._host = HostHead.of(head, cache)

    def catch_up(
        self, slots: Tensor, lengths: Tensor, tokens: Tensor, paths: Tensor, following: Tensor, *hidden: Tensor
    ) -> Tensor:
        """Write the rows of accepted `paths` (batch, steps), padded with -1. `tokens` and `hidden` (batch, nodes, …)
        are those of the trees' nodes, and `following` (batch,) is the token after each path. Returns the new number of
        rows of each text."""
        slots, lengths, tokens, following = (part.long() for part in (slots, lengths, tokens, following))
        slots = torch.where(slots < 0, self.cache.padding, slots)
        nodes = paths.clamp_min(0)
        states = [state.gather(1, nodes[..., None].expand(-1, -1, state.shape[-1])) for state in hidden]
        last = functional.pad(paths[:, 1:] < 0, (0, 1), value=True)
        after = torch.where(last, following[:, None], functional.pad(tokens.gather(1, nodes[:, 1:]), (0, 1)))
        kept = (paths >= 0).sum(dim=1)
        steps, device = paths.shape[1], paths.device
        depths = torch.arange(steps, device=device).expand(len(paths), -1)
        if not self.cache.window:  # padding is written after the path, where it is overwritten before it is read
            self.cache.tokens[slots[:, None], lengths[:, None] + depths] = after
        features, embeddings = self.head.features(states), self.embeddings[after]
        if masks := self.head.config.masks:  # each text has masks of its own, after the cells of the longest path
            features, embeddings = self._with_masks(features, embeddings)
            depths = torch.cat([depths, kept[:, None] + torch.arange(masks, device=device)], dim=1)
        rows = torch.arange(steps + masks, device=device)
        real = (rows < kept[:, None]) | (rows >= steps)
        own = (rows <= rows[:, None]) & (real[:, None] | (rows < steps)[:, None])
        behind = Behind(0, own, depths, depths)
        predict, carry = self._read(slots, lengths, features, embeddings, behind, accepted=steps)
        end, every = (kept - 1).clamp_min(0), torch.arange(len(paths), device=device)
        self.cache.predicted[slots], self.cache.carried[slots] = predict[every, end], carry[every, end]
        if masks:
            self.cache.foreseen[slots] = predict[:, steps:]
        return lengths + kept

    def _with_masks(self, features: Tensor | None, embeddings: Tensor) -> tuple[Tensor, Tensor]:
        """Features and embeddings (batch, rows, width) of rows, and after them those of the masks."""
        assert features is not None, "a head without hidden states has none to mask"
        shown = self.head.mask_embeddings.expand(len(features), -1, -1)
        return (
            torch.cat([features, self.head.mask_feature.expand_as(shown)], dim=1),
            torch.cat([embeddings, shown], dim=1),
        )

    def _read(
        self, slots: Tensor, lengths: Tensor, features: Tensor | None, embeddings: Tensor, behind: Behind, accepted: int
    ) -> Rows:
        """One pass over rows after texts of `lengths` rows. The target's cache has up to `accepted` new rows after
        these texts, those of the accepted path; rows attend to them as they attend to each other."""
        if self._host is not None:
            return self._host.read(slots, lengths, features, embeddings, behind)
        look = None
        if self._cached is not None:
            own = behind.own[..., :accepted] if accepted else torch.zeros_like(behind.own[..., :1])
            look = cross_attention(self._cached(), self.cache.seats[slots], lengths, own, kernels=self._kernels)
        attend = attention(self.cache, slots, lengths, behind, kernels=self._kernels)
        rows: Rows = self.head(features, embeddings, lengths[:, None] + behind.depths, attend, look)
        return rows

    # Nodes of trees

    def _at_roots(self, slots: Tensor, roots: Tensor) -> Rows:
        """What the rows before the `roots` (batch,) predict after them, and carry on, (batch, 1, width) each."""
        predict, carry = self.cache.predicted[slots][:, None], self.cache.carried[slots][:, None]
        return Rows(self._corrected(predict, roots[:, None]), carry)

    def _below(
        self, slots: Tensor, lengths: Tensor, carry: Tensor, tokens: Tensor, first: int, own: Tensor, depth: int
    ) -> Rows:
        """The rows of nodes with `tokens` (batch, rows), `depth` levels below their roots, which read what their
        parents carried on (`carry`). They are written after the text from cell `first` on, and attend to their `own`
        cells (batch, rows, cells) after the text. A parallel head has predicted their level already."""
        if masks := self.head.config.masks:
            foreseen = self.cache.foreseen[slots, min(depth, masks) - 1][:, None]
            return Rows(self._corrected(foreseen.expand_as(carry), tokens), carry)
        depths = torch.full_like(tokens, depth - 1)
        behind = Behind(first, own, depths, self._cell_depths.expand(len(tokens), -1))
        return self._read(slots, lengths, carry, self.embeddings[tokens], behind, accepted=0)

    def _corrected(self, predict: Tensor, tokens: Tensor) -> Tensor:
        """What is predicted after `tokens` (batch, rows), corrected by them if the head has a bias."""
        return self.head.corrected(predict, self.embeddings[tokens]) if self.head.config.bias else predict


class DeviceDraft(HeadOnDevice, ABC):
    """Trees of the most probable tokens."""

    cells: int
    """number of cells after a text that a growing tree takes"""
    depth: int
    """number of levels of a whole tree"""
    nodes: int
    """most nodes of a whole tree, the root included"""
    lays_in_place = False
    """whether the trees of a given number of texts are always written to the same tensors"""
    grammars: GrammarLevels | None = None
    """what grammars allow in trees that grow on a host; drafts that are recorded on a device ignore grammars"""

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        self._normed_rows = self._rows
        if self._kernels:
            self._list_for_kernels()

    def _list_for_kernels(self) -> None:
        """Prepare the table in the form that kernels read."""
        from branchwise.cuda.heads.best_tokens import Parts

        self._normed_rows = with_norm(self._rows, self.head.output_norm.weight)
        self._table_parts = Parts.of(self._table, len(self.embeddings))

    @abstractmethod
    def grow(self, slots: Tensor, lengths: Tensor, roots: Tensor) -> tuple[Tensor, ...]:
        """Trees below `roots`, of texts with `lengths` rows, as tensors with a row for each text; the first are the
        tokens (batch, nodes)."""

    @abstractmethod
    def trees(self, found: tuple[Tensor, ...], budgets: Sequence[Budget]) -> list[DraftTree]:
        """The trees that `grow` found, cut to budgets; there may be fewer budgets than rows."""

    def rests(self, batch: int) -> bool:
        """Called when a step of `batch` texts begins; returns whether nothing is to be drafted in it."""
        return False

    def begin(self) -> None:
        """Called when prompts are read, and the work of this step alone begins."""

    def drafted(self, trees: Sequence[DraftTree]) -> None:
        """Called before these trees are scored."""

    def scored(self, verdicts: Sequence[Verdict]) -> None:
        """Called when the verdicts on the trees are known."""

    def forget(self) -> None:
        """Forget how often what the head proposed came true."""

    def _best(self, predict: Tensor, slots: Tensor, lengths: Tensor, depth: int, count: int) -> Likely:
        """The tokens of the table and of each text's prompt that are most likely to come after rows `depth` - 1 levels
        below the roots, of texts with `lengths` rows."""
        if self._host is not None and self.grammars is None and not self.cache.foresees(slots):
            return Likely(*self._host.best(self._product, self._table, predict, slots, count))
        known, size = self.cache.extra_tokens[slots], len(self._table)
        if self._kernels:
            from branchwise.cuda.heads.best_tokens import best_tokens
            from branchwise.cuda.products import Summed

            extra = self.cache.extra_rows, self.cache.extra_tokens
            every = torch.arange(predict[..., 0].numel(), device=predict.device).view(predict.shape[:2])
            states = Summed.of(predict.reshape(-1, predict.shape[-1]))
            epsilon = self.head.config.epsilon
            values, places = best_tokens(
                states, every, epsilon, self._normed_rows, self._table_parts, *extra, slots, lengths, self.cache.draws,
                depth, count,
            )  # fmt: skip
            places = places.long()
        else:
            if known.device.type == "cpu":  # skip empty columns: few texts fill all of them
                known = known[:, : max(1, int((known >= 0).sum(dim=1).max()))]
            bare = functional.rms_norm(predict, predict.shape[-1:], eps=self.head.config.epsilon)
            own = bare @ self.cache.extra_rows[:, : known.shape[1]][slots].transpose(1, 2)
            own = own.masked_fill((known < 0)[:, None], -torch.inf)
            logits = torch.cat([self._product(self.head.output(predict), None), own], dim=-1).float()
            if self.grammars is not None:
                allowed = self.grammars.allowed(len(self.embeddings))
                theirs = allowed.gather(2, known.clamp_min(0)[:, None].expand(-1, predict.shape[1], -1))
                logits = logits.masked_fill(~torch.cat([allowed[..., self._table], theirs], dim=-1), -torch.inf)
            chances = self._foreseen(logits, slots, lengths + depth, known)
            values, places = chances.topk(count, dim=-1)
        theirs = known[:, None].expand(-1, places.shape[1], -1).gather(2, (places - size).clamp_min(0))
        tokens = torch.where(places < size, self._table[places.clamp_max(size - 1)], theirs)
        likely = Likely(tokens, values)
        return likely if self.grammars is None else self._forced(likely, self.grammars)

    def _foreseen(self, logits: Tensor, slots: Tensor, positions: Tensor, known: Tensor) -> Tensor:
        """The logarithms of chances (`foresight`), given logits for the tokens of the table and for the `known` tokens
        of each text; `positions` are those of the draws."""
        dice, temperatures = (part[slots] for part in self.cache.draws)
        if logits.device.type == "cpu" and not bool(temperatures.any()):
            return logits.log_softmax(dim=-1)
        logits /= torch.where(temperatures > 0, temperatures, 1.0)[:, None, None]
        keys, size = keys_of(dice, positions)[:, None].expand(-1, logits.shape[1]), len(self._table)
        listed, own = logits.split([size, logits.shape[2] - size], dim=-1)
        return foreseen(listed, self._table, keys, temperatures > 0, own, known, len(self.embeddings))

    def _forced(self, likely: Likely, levels: GrammarLevels) -> Likely:
        """The most probable tokens, with those that a grammar forces put in: a forced token may not be in the table."""
        tokens, logprobs = likely.tokens.clone(), likely.logprobs.nan_to_num(nan=-torch.inf, neginf=-torch.inf)
        for text, row, token in levels.forced():
            tokens[text, row, 0] = token
            logprobs[text, row] = -torch.inf
            logprobs[text, row, 0] = 0.0
        return Likely(tokens, logprobs)


def with_norm(weight: Tensor, *norms: Tensor) -> Tensor:
    """A matrix with the weights of norms multiplied in, as kernels read it: its inputs are normed without weights."""
    return (weight.float() * torch.cat(norms).float()).to(weight.dtype).contiguous()
