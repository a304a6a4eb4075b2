"""What a head would have drafted in texts that exist already: tokens a pass, counted without a pass.

From every token of an answer the head grows its most probable tree (`topk` of the policies), for all tokens of a text
at once. A greedy target would have accepted what the text says. So jumping from verdict to verdict counts the passes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from branchwise.backends.base import CachedRows
from branchwise.draft.head.cache import MOST_EXTRA
from branchwise.draft.head.network import Attend, Head, Rows
from branchwise.draft.head.trees.copies import Nodes, copied, with_copy
from branchwise.train.corpus import Text
from branchwise.train.head.learn import Watched
from branchwise.train.head.unroll import unroll

OFF = -2
"""the place of a text that has left its tree: no node lies below it"""


@dataclass(frozen=True)
class Shape:
    """A tree as `topk:N,depth=D,width=W` draws it; a chain is a tree of width 1."""

    nodes: int
    depth: int
    width: int
    copies: int = 0
    """the most tokens that may be copied from where the end of the text stood before"""

    @classmethod
    def chain(cls, length: int) -> Shape:
        return cls(length, length, 1)


class Replay:
    def __init__(self, head: Head, target: Watched) -> None:
        self.head, self.target = head, target

    def passes(self, text: Text, shapes: Sequence[Shape]) -> list[int]:
        """How many passes an answer takes with trees of each shape; shapes may differ in `nodes` and `copies` alone."""
        kept = self.accepted(text, shapes)
        end = len(text.tokens) - 1
        found = []
        for accepted in kept.tolist():
            root, count = text.prompt - 1, 0
            while root < end:
                root += 1 + accepted[root - text.prompt + 1]
                count += 1
            found.append(count)
        return found

    @torch.inference_mode()
    def accepted(self, text: Text, shapes: Sequence[Shape]) -> Tensor:
        """(shapes, answer tokens): how many drafted tokens are accepted if the token before each one is the root."""
        tokens = text.tokens.to(self.target.table.device).long()
        grown = self._grown(tokens, text.prompt, shapes[0])
        ways = {
            copies: self._copying(grown, tokens, text.prompt, shapes[0].depth, copies)
            for copies in {shape.copies for shape in shapes}
        }
        found = torch.stack([self._walk(ways[shape.copies], tokens, text.prompt, shape) for shape in shapes])
        if text.prompt == 1:
            found[:, 0] = 0  # the first token has no hidden states before it to draft from
        return found

    def _grown(self, tokens: Tensor, prompt: int, shape: Shape) -> Nodes:
        """All nodes that the head proposes below every token of an answer."""
        head, embeddings = self.head, self.target.embeddings
        hidden, _, cached = self.target(tokens[None])
        dtype = head.dtype
        cached = None if cached is None else CachedRows(*(part.to(dtype) for part in cached))
        roots = torch.arange(prompt - 1, len(tokens) - 1, device=tokens.device)
        cache = TextCache(head, len(tokens) - 1, roots, cached)
        features = head.features([state[:, :-1].to(dtype) for state in hidden])
        after = embeddings[tokens[1:]][None].to(dtype)
        places = torch.arange(len(tokens) - 1, device=tokens.device)[None]
        rows = head(features, after, places, cache.whole, cache.look_whole)
        before = (roots - 1).clamp_min(0)
        ahead = self._ahead(features, after, before, shape.depth, cached)
        predict, carry = rows.predict[0, before][:, None], rows.carry[0, before][:, None]
        table, output = self._table(tokens[:prompt])
        values, known = torch.zeros(len(roots), 1, device=tokens.device), tokens[roots][:, None]
        expanded = torch.full_like(known, -1)  # the indices of the expanded nodes among those proposed
        levels, first = list[Nodes](), 0
        for depth in range(shape.depth):
            previous = embeddings[known].to(dtype) if head.config.bias else None
            scores = head.logits(predict, output, previous).float().log_softmax(dim=-1)
            likely = scores.topk(min(shape.width, len(table)), dim=-1)
            proposed = (values[..., None] + likely.values).flatten(1)
            drafted = table[likely.indices].flatten(1)
            children = likely.values.shape[-1]
            levels.append((proposed, drafted, expanded.repeat_interleave(children, dim=1)))
            best = proposed.topk(min(shape.width, proposed.shape[1]), dim=-1)
            parents, values, known = best.indices // children, best.values, drafted.gather(1, best.indices)
            expanded, first = first + best.indices, first + proposed.shape[1]
            if depth + 1 == shape.depth:
                break
            if ahead:
                predict = ahead[depth + 1][:, None].expand(-1, values.shape[1], -1)
            else:
                predict, carry = self._below(cache, carry, parents, known, roots + depth)
        every, drafted, above = (torch.cat(parts, dim=1) for parts in zip(*levels, strict=True))
        return every, drafted, above

    @staticmethod
    def _copying(proposed: Nodes, tokens: Tensor, prompt: int, depth: int, copies: int) -> Nodes:
        """The proposed nodes, and at most `copies` tokens that each root may copy, down to `depth`."""
        if not copies:
            return proposed
        roots = torch.arange(prompt - 1, len(tokens) - 1, device=tokens.device)
        return with_copy(proposed, copied(tokens[1:].expand(len(roots), -1), roots, copies), depth)

    def _below(self, cache: TextCache, carry: Tensor, parents: Tensor, known: Tensor, positions: Tensor) -> Rows:
        """The rows of the expanded nodes of a level, (roots, nodes, width)."""
        every = torch.arange(len(known), device=known.device)[:, None]
        embedded = self.target.embeddings[known].to(carry.dtype)
        rows: Rows = self.head(
            carry[every, parents], embedded, positions[:, None].expand_as(known), cache.below(parents), cache.look_below
        )
        return rows

    def _ahead(
        self, features: Tensor | None, embeddings: Tensor, before: Tensor, depth: int, cached: CachedRows | None
    ) -> list[Tensor]:
        """By depth what a parallel head predicts in the rows before the roots, (roots, width); empty for other
        heads."""
        if not self.head.config.masks or features is None:
            return []
        longer, after = (functional.pad(part, (0, 0, 0, depth)) for part in (features, embeddings))
        levels = unroll(self.head, longer, after, depth, cached)
        levels += levels[-1:] * (depth - len(levels))
        last = self.head.config.masks
        return [level[0, before + min(place, last)] for place, level in enumerate(levels)]

    def _table(self, prompt: Tensor) -> tuple[Tensor, Tensor]:
        """The tokens that the head can propose in a text, and their output rows."""
        listed = self.target.place >= 0
        seen = torch.tensor(list(dict.fromkeys(reversed(prompt.tolist()))), device=prompt.device)
        extra = seen[~listed[seen]][:MOST_EXTRA]
        dtype = self.head.dtype
        table = torch.cat([self.target.table, extra])
        return table, torch.cat([self.target.rows, self.target.output[extra]]).to(dtype)

    @staticmethod
    def _walk(proposed: Nodes, tokens: Tensor, prompt: int, shape: Shape) -> Tensor:
        """(answer tokens,): how far the text goes along the best nodes of each tree."""
        values, drafted, parents = proposed
        least = values.topk(min(shape.nodes, values.shape[1]), dim=1).values[:, -1:]
        count = len(values)
        at, found = torch.full((count, 1), -1, device=tokens.device), torch.zeros_like(tokens[:count])
        for depth in range(max(shape.depth, shape.copies)):
            wanted = functional.pad(tokens[prompt + depth :], (0, depth), value=-1)[:count, None]
            hits = (drafted == wanted) & (parents == at) & (values >= least)
            found += hits.any(dim=1)
            at = torch.where(hits.any(dim=1), hits.long().argmax(dim=1), OFF)[:, None]
        return found


class TextCache:
    """Keys and values of all rows of a text, and of the nodes above each expanded node in the trees of all roots."""

    def __init__(self, head: Head, rows: int, roots: Tensor, cached: CachedRows | None) -> None:
        """`cached` (1, heads, tokens, width) are the keys and values of the target, if the head attends to them."""
        self._groups = head.config.heads // head.config.kv_heads
        self._window = head.config.window
        self._depth = 0
        self._text: dict[int, tuple[Tensor, Tensor]] = {}
        self._above: dict[int, tuple[Tensor, Tensor]] = {}
        self._rows, self._roots = torch.arange(rows, device=roots.device), roots
        self._cached = None if cached is None else [self._repeated(part[:, :, :rows]) for part in cached]

    def whole(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attention of the rows of the text among themselves."""
        key, value = self._repeated(key), self._repeated(value)
        self._text[layer] = key[0], value[0]
        if not self._window:
            return functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        ages = self._rows[:, None] - self._rows
        return functional.scaled_dot_product_attention(query, key, value, (ages >= 0) & (ages < self._window))

    def look_whole(self, query: Tensor) -> Tensor:
        """Attention of the rows of the text to the target; each row sees what the target has read by then."""
        assert self._cached is not None
        keys, values = self._cached
        return functional.scaled_dot_product_attention(query, keys, values, is_causal=True)

    def look_below(self, query: Tensor) -> Tensor:
        """Attention of a level, (roots, heads, nodes, width), to what the target has read before each root."""
        assert self._cached is not None
        keys, values = (part[0] for part in self._cached)
        unread = self._rows >= self._roots[:, None].clamp_min(1)  # root 0 sees one row, to stay finite; it is not used
        scores = torch.einsum("rhnd,htd->rhnt", query, keys) * query.shape[-1] ** -0.5
        weights = scores.masked_fill(unread[:, None, None], -torch.inf).float().softmax(dim=-1).to(query.dtype)
        return torch.einsum("rhnt,htd->rhnd", weights, values)

    def below(self, parents: Tensor) -> Attend:
        """Attention of one more level, (roots, heads, nodes, width); `parents` are the nodes of the level above."""
        self._depth += 1
        ages = self._roots[:, None] - self._rows  # how far each row lies before its root
        seen = ages > 0
        if self._window:
            seen &= ages + self._depth - 1 < self._window

        def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            above = [part[:, :, :, None] for part in (self._repeated(key), self._repeated(value))]
            if layer in self._above:
                rows = torch.arange(len(parents), device=parents.device)[:, None]
                before = (part.transpose(1, 2)[rows, parents].transpose(1, 2) for part in self._above[layer])
                above = [torch.cat(pair, dim=3)[:, :, :, -self._window :] for pair in zip(before, above, strict=True)]
            self._above[layer] = above[0], above[1]
            keys, values = self._text[layer]
            scale = query.shape[-1] ** -0.5
            text = torch.einsum("rhnd,htd->rhnt", query, keys) * scale
            text = text.masked_fill(~seen[:, None, None], -torch.inf)
            tree = torch.einsum("rhnd,rhnkd->rhnk", query, above[0]) * scale
            weights = torch.cat([text, tree], dim=-1).float().softmax(dim=-1).to(query.dtype)
            of_text, of_tree = weights.split([text.shape[-1], tree.shape[-1]], dim=-1)
            return torch.einsum("rhnt,htd->rhnd", of_text, values) + torch.einsum("rhnk,rhnkd->rhnd", of_tree, above[1])

        return attend

    def _repeated(self, heads: Tensor) -> Tensor:
        return heads.repeat_interleave(self._groups, dim=1)
