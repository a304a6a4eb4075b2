"""A head that drafts on the device, from the verdict to the next tokens, without the host.

Two functions of tensors follow each other: `catch_up` writes the rows of the tokens that a verdict kept, and another
one lays or draws trees below the roots. Between them stands what the last row of every text predicted and carried on
(`HeadCache.predicted`, `carried`), and in a parallel head what its masks predicted (`foreseen`).
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


class HeadOnDevice:
    """The rows of a head: of texts, and of the nodes of trees while they grow."""

    _cell_depths: Tensor
    """(cells,): the level of the nodes in each cell of a growing tree, 0 for the first"""

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
        """`rows` are the output rows of the table, by default those of `output`, and `product_of` makes a product of
        them. A head that attends to a layer of its target is shown where that one's keys and values are `cached`,
        (slots, heads, rows, width)."""
        self.head, self.cache = head, cache
        # In the order of the vocabulary, in blocks of which draws go.
        self._table, order = table.long().sort()
        self.embeddings, self._output, self._cached = embeddings, output, cached
        self._rows = (output[table] if rows is None else rows)[order].contiguous()
        self._product = product_of(self._rows)
        self._kernels = have_kernels(table.device)
        self._host = HostHead.of(head, cache)

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
        steps, device = paths.shape[1], paths.device
        depths = torch.arange(steps, device=device).expand(len(paths), -1)
        if not self.cache.window:  # what pads a path is written behind it, where nobody reads it before it is rewritten
            self.cache.tokens[slots[:, None], lengths[:, None] + depths] = after
        features, embeddings = self.head.features(states), self.embeddings[after]
        if masks := self.head.config.masks:  # each text has its own behind the cells of the longest path
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
        """Rows (batch, rows, width) and behind them those of the masks."""
        assert features is not None, "a head without hidden states has none to mask"
        shown = self.head.mask_embeddings.expand(len(features), -1, -1)
        return (
            torch.cat([features, self.head.mask_feature.expand_as(shown)], dim=1),
            torch.cat([embeddings, shown], dim=1),
        )

    def _read(
        self, slots: Tensor, lengths: Tensor, features: Tensor | None, embeddings: Tensor, behind: Behind, accepted: int
    ) -> Rows:
        """One pass over rows behind texts of so many rows. Of the nodes that the target scored behind them it has kept
        as many as are accepted, at most so many, and rows see those that they see of each other."""
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
        """What is predicted after roots (batch,), and carried on, (batch, 1, width) each."""
        predict, carry = self.cache.predicted[slots][:, None], self.cache.carried[slots][:, None]
        return Rows(self._corrected(predict, roots[:, None]), carry)

    def _below(
        self, slots: Tensor, lengths: Tensor, carry: Tensor, tokens: Tensor, first: int, own: Tensor, depth: int
    ) -> Rows:
        """The rows of nodes (batch, rows), so many levels below their roots, that read what their parents carried.
        They are written behind the text from cell `first` on, and see their `own` (batch, rows, cells) there. A
        parallel head has predicted their level already."""
        if masks := self.head.config.masks:
            foreseen = self.cache.foreseen[slots, min(depth, masks) - 1][:, None]
            return Rows(self._corrected(foreseen.expand_as(carry), tokens), carry)
        depths = torch.full_like(tokens, depth - 1)
        behind = Behind(first, own, depths, self._cell_depths.expand(len(tokens), -1))
        return self._read(slots, lengths, carry, self.embeddings[tokens], behind, accepted=0)

    def _corrected(self, predict: Tensor, tokens: Tensor) -> Tensor:
        """What is predicted after tokens (batch, rows), of a head with a bias by these."""
        return self.head.corrected(predict, self.embeddings[tokens]) if self.head.config.bias else predict


class DeviceDraft(HeadOnDevice, ABC):
    """Trees of the most probable tokens."""

    cells: int
    """cells behind a text that a growing tree takes"""
    depth: int
    """levels of a whole tree"""
    nodes: int
    """of a whole tree, at most, the root included"""
    lays_in_place = False
    """whether the trees of so many texts are always laid at the same place"""
    grammars: GrammarLevels | None = None
    """what grammars allow in trees that grow on a host; what is recorded on a device knows no grammar"""

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        self._normed_rows = self._rows
        if self._kernels:
            self._list_for_kernels()

    def _list_for_kernels(self) -> None:
        """The table as kernels read it."""
        from branchwise.cuda.heads.best_tokens import Parts

        self._normed_rows = with_norm(self._rows, self.head.output_norm.weight)
        self._table_parts = Parts.of(self._table, len(self.embeddings))

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

    def forget(self) -> None:
        """How much of what the head said came true."""

    def _best(self, predict: Tensor, slots: Tensor, lengths: Tensor, depth: int, count: int) -> Likely:
        """The tokens of the table and of each text's prompt that are most likely to come `depth` levels below the
        roots, behind texts of so many rows."""
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
            if known.device.type == "cpu":  # room is for many, and texts have few
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
        """The logarithms of chances, given logits for the tokens of the table and for those that each text has known of
        besides, of which some are to be drawn in these positions."""
        dice, temperatures = (part[slots] for part in self.cache.draws)
        if logits.device.type == "cpu" and not bool(temperatures.any()):
            return logits.log_softmax(dim=-1)
        logits /= torch.where(temperatures > 0, temperatures, 1.0)[:, None, None]
        keys, size = keys_of(dice, positions)[:, None].expand(-1, logits.shape[1]), len(self._table)
        listed, own = logits.split([size, logits.shape[2] - size], dim=-1)
        return foreseen(listed, self._table, keys, temperatures > 0, own, known, len(self.embeddings))

    def _forced(self, likely: Likely, levels: GrammarLevels) -> Likely:
        """The same where a grammar leaves no choice: its token may not even be in the table."""
        tokens, logprobs = likely.tokens.clone(), likely.logprobs.nan_to_num(nan=-torch.inf, neginf=-torch.inf)
        for text, row, token in levels.forced():
            tokens[text, row, 0] = token
            logprobs[text, row] = -torch.inf
            logprobs[text, row, 0] = 0.0
        return Likely(tokens, logprobs)


def with_norm(weight: Tensor, *norms: Tensor) -> Tensor:
    """A matrix that takes rows before the weights of their norms, as kernels read it."""
    return (weight.float() * torch.cat(norms).float()).to(weight.dtype).contiguous()
