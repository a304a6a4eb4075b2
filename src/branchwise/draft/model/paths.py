"""Paths of a draft model as functions of tensors: from the tokens that a text has gained to the paths below its end.

Nothing here asks the host, so all levels can be recorded as one CUDA graph behind the verdict. One pass writes the rows
of the accepted tokens and of the new root, whatever was written of them before; then every level is one pass over the
ends of the paths. The rows of a path lie apart from those of the others even where both have the same tokens, so that
shapes never depend on what was drawn. Paths that agree still are one path: they draw from the distribution of the first
of them, which is the q of their node.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from branchwise.core.rng import GAMMA, mix
from branchwise.core.rows import WORD, pack_bits, words_for
from branchwise.cuda.inputs import PassTensors
from branchwise.draft.model.choice import Choice
from branchwise.draft.sampler import PICKS

Run = Callable[[PassTensors], Tensor]
"""a pass of the draft model: logits (batch, nodes, columns of its head)"""


class Texts(NamedTuple):
    """Texts in the slots of a draft model, and what their draws depend on; (batch,) each."""

    slots: Tensor
    """-1 for a text that is padding"""
    seeds: Tensor
    greedy: Tensor
    """1 for a text that takes the most probable tokens"""


class Drawn(NamedTuple):
    """Paths below the roots of texts."""

    tokens: Tensor
    """(batch, length + 1) int64: the first path, root first"""
    steps: Tensor
    """(batch, paths, length, 2) int64: the tokens of all paths, and which nodes of the tree these are"""
    q: Tensor
    """(batch, nodes with children, vocabulary) float32"""


class Layout(NamedTuple):
    """Where the nodes of a pass stand behind the rows of their text; constants on the device."""

    depths: Tensor
    key_depths: Tensor
    ancestor_bits: Tensor


class PathDraft:
    """`count` paths of `length` tokens for every text, of which the first `common` are one path's."""

    def __init__(self, run: Run, count: int, length: int, common: int, own: int, device: torch.device) -> None:
        """`own` is the size of the draft model's vocabulary: it reads no other tokens of the target."""
        self._run, self._own, self._device = run, own, device
        self.count, self.length, self.common = count, length, common
        self.steps = length + 1
        """tokens that a text gains at most from one verdict"""
        self.inner = count * (length - 1) + 1
        """nodes with children, if no paths agree"""
        self.rows = self.steps + count * length
        """rows behind a text that are written"""
        self._layouts: dict[tuple[int, int | None], Layout] = {}

    def grow(self, choose: Choice, place: Drawn, texts: Texts, gained: Tensor) -> Drawn:
        """Draw paths below the ends of texts, given what these have `gained` (see `gain`), and write them to their
        `place`."""
        written, counts, ahead = gained[0], gained[1], gained[2:].T
        batch, device = len(ahead), ahead.device
        lengths = written + counts
        logits = self._catch_up(texts.slots, written, counts, ahead)
        place.tokens[:, 0] = ahead.gather(1, (counts - 1).clamp_min(0)[:, None])[:, 0]
        keys = self._keys(texts.seeds, lengths - 1)
        texts_of = torch.arange(batch, device=device)[:, None]
        node = first = torch.zeros(batch, self.count, dtype=torch.long, device=device)
        size = torch.ones(batch, 1, dtype=torch.long, device=device)
        for level in range(self.length):
            # Distributions (batch, nodes, vocabulary): one at the root, then one for every path.
            token, probs = choose(logits, first, keys[:, level], texts.greedy, apart=level >= self.common)
            place.tokens[:, level + 1] = token[:, 0]
            if self.count == 1:
                place.q[:, level] = probs[:, 0]
            else:
                place.q[texts_of, node] = probs[texts_of, first]  # all paths of a node write the same
                node, first, size = numbered(node, token, size)
                place.steps[:, :, level, 0], place.steps[:, :, level, 1] = token, node
            if level + 1 < self.length:
                logits = self._below(texts.slots, lengths, level, token)
        return place

    def _keys(self, seeds: Tensor, positions: Tensor) -> Tensor:
        """(batch, levels, paths): the keys of all draws of texts with these seeds and positions of the root, as
        `SeededSampler` makes them."""
        level = torch.arange(self.length, device=seeds.device)[:, None]
        path = torch.arange(self.count, device=seeds.device)
        draws = level * self.count + torch.where(level >= self.common, path, 0)
        return mix(mix(mix(seeds)[:, None, None] + (PICKS + draws)) + (positions * GAMMA)[:, None, None])

    # Passes

    def _catch_up(self, slots: Tensor, written: Tensor, counts: Tensor, ahead: Tensor) -> Tensor:
        """(batch, 1, columns): what follows the last of the tokens that a text has gained."""
        batch, steps = ahead.shape
        last = (counts - 1).clamp_min(0)
        # What pads these tokens is written behind them, where nobody reads it, at positions that there are.
        places = torch.minimum(torch.arange(steps, device=ahead.device), last[:, None])
        logits = self._pass(slots, written, written, ahead, written[:, None] + places, self._layout(batch, None))
        return logits[torch.arange(batch, device=ahead.device), last][:, None]

    def _below(self, slots: Tensor, lengths: Tensor, level: int, tokens: Tensor) -> Tensor:
        """(batch, paths, columns): what follows the tokens of a level, of texts with so many rows."""
        starts, positions = lengths + level * self.count, (lengths + level)[:, None].expand_as(tokens)
        return self._pass(slots, lengths, starts, tokens, positions, self._layout(len(tokens), level))

    def _pass(
        self, slots: Tensor, lengths: Tensor, starts: Tensor, tokens: Tensor, positions: Tensor, layout: Layout
    ) -> Tensor:
        known = torch.where(tokens < self._own, tokens, 0)
        numbers = (known, positions, layout.depths, slots, lengths, starts, layout.key_depths, layout.ancestor_bits)
        return self._run(PassTensors(*(part.int().contiguous() for part in numbers)))

    def _layout(self, batch: int, level: int | None) -> Layout:
        """Of a pass over a level, or over the tokens that a text has gained. A recorded pass reads it, so it stays."""
        if (batch, level) not in self._layouts:
            self._layouts[batch, level] = self._laid_out(batch, level)
        return self._layouts[batch, level]

    def _laid_out(self, batch: int, level: int | None) -> Layout:
        if level is None:
            depths, columns = torch.arange(self.steps), torch.arange(self.steps)
            seen = depths[:, None] >= depths
        else:
            rows = torch.arange((level + 1) * self.count)
            depths, columns = torch.full((self.count,), level), rows // self.count
            seen = rows % self.count == torch.arange(self.count)[:, None]
        padded = functional.pad(columns, (0, WORD * words_for(len(columns)) - len(columns)))
        parts = depths, padded, pack_bits(seen)
        return Layout(*(part.int().expand(batch, *part.shape).contiguous().to(self._device) for part in parts))


def gain(gained: Tensor, lengths: Tensor, tokens: Tensor, paths: Tensor, following: Tensor) -> None:
    """Write what texts gain by verdicts, (2 + steps, batch): how many rows of each a draft model has written, how many
    tokens it has gained, and these tokens.

    The texts had so many tokens (batch,) before the roots of their trees, whose nodes have these tokens (batch, nodes);
    the paths (batch, steps or less), padded with -1, were accepted, and one more token (batch,) follows each."""
    steps = len(gained) - 2
    paths = functional.pad(paths, (0, steps - paths.shape[1]), value=-1)  # those of trees that were cut
    last = functional.pad(paths[:, 1:] < 0, (0, 1), value=True)
    below = functional.pad(tokens.long().gather(1, paths.clamp_min(0)[:, 1:]), (0, 1))
    gained[0] = lengths + 1  # and the root
    gained[1] = (paths >= 0).sum(dim=1)
    gained[2:] = torch.where(last, following[:, None], below).T


def numbered(node: Tensor, token: Tensor, size: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The nodes that paths (batch, paths) come to from these nodes with these tokens, numbered from `size` (batch, 1)
    on; for each the first path that comes to it, and the nodes of the tree then. Children of one node stand together,
    in the order in which paths first reach them."""
    count = node.shape[1]
    path = torch.arange(count, device=node.device)
    same = (node[:, :, None] == node[:, None, :]) & (token[:, :, None] == token[:, None, :])
    first = torch.where(same, path, count).amin(dim=2)
    order, leads = node * count + first, first == path
    before = leads[:, None, :] & (order[:, None, :] < order[:, :, None])
    return size + before.sum(dim=2), first, size + leads.sum(dim=1, keepdim=True)
