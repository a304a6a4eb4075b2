"""A head that drafts a tree of ranks on the device, from the verdict to the next tokens, without the host.

The shape is known beforehand, so which row reads which, and what each may attend to, are constants. Two functions of
tensors are recorded: `catch_up` writes the rows of the tokens that a verdict kept, `grow` lays a tree below the roots.
Between them stands what the last row of every text predicted and carried on (`HeadCache.predicted`, `carried`).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from branchwise.core.topology import Topology
from branchwise.draft.head.cache import HeadCache
from branchwise.draft.head.network import Attend, Head


class Level(NamedTuple):
    """The nodes of one level that have children, as constants on the device."""

    depth: int
    nodes: Tensor
    """(rows,): where they stand in the tree"""
    above: Tensor
    """(rows,): rows of the level before that are their parents"""
    seen: Tensor
    """(rows, cells): which cells behind the text they attend to"""
    first: int
    """the first of their own cells"""
    children: Tensor
    """(children,): where the nodes below them stand in the tree"""
    elder: Tensor
    """(children,): the row of each child's parent times `width`, plus its rank"""
    width: int
    """the most children of one node"""


class RankedDraft:
    def __init__(
        self, head: Head, cache: HeadCache, embeddings: Tensor, output: Tensor, table: Tensor, shape: Topology
    ) -> None:
        self.head, self.cache, self.shape = head, cache, shape
        self._embeddings, self._rows, self._table = embeddings, output[table].contiguous(), table
        self._levels, self._cells = self._plan(shape, table.device)

    @staticmethod
    def _plan(shape: Topology, device: torch.device) -> tuple[list[Level], int]:
        levels: list[Level] = []
        cell: dict[int, int] = {}
        before = [0]
        for depth, level in enumerate(shape.levels):
            inner = [node for node in level if shape.children[node]]
            if not inner:
                break
            first = len(cell)
            if depth:
                cell |= {node: first + place for place, node in enumerate(inner)}
            width = max(len(shape.children[node]) for node in inner)
            pairs = [
                (child, row * width + rank)
                for row, node in enumerate(inner)
                for rank, child in enumerate(shape.children[node])
            ]
            seen = [[cell[above] for above in shape.path(node) if above] for node in inner]
            levels.append(
                Level(
                    depth,
                    torch.tensor(inner, device=device),
                    torch.tensor([before.index(shape.parents[node]) if depth else 0 for node in inner], device=device),
                    torch.tensor([[c in own for c in range(len(shape))] for own in seen], device=device),
                    first,
                    torch.tensor([child for child, _ in pairs], device=device),
                    torch.tensor([elder for _, elder in pairs], device=device),
                    width,
                )
            )
            before = inner
        return levels, len(shape)

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
        seen = self._columns <= positions[..., None]
        predict, carry = self.head(
            self.head.features(states), self._embeddings[after], positions, self._attend(slots, cells, seen)
        )
        end = (kept - 1).clamp_min(0)
        rows = torch.arange(len(paths), device=paths.device)
        self.cache.predicted[slots], self.cache.carried[slots] = predict[rows, end], carry[rows, end]
        return lengths + kept

    def grow(self, slots: Tensor, lengths: Tensor, roots: Tensor) -> Tensor:
        """(batch, nodes): the tokens of the trees below these roots, of texts with so many rows."""
        slots, lengths, roots = slots.long(), lengths.long(), roots.long()
        batch = len(slots)
        found = roots.new_zeros(batch, len(self.shape))
        found[:, 0] = roots
        predict, carry = self.cache.predicted[slots][:, None], self.cache.carried[slots][:, None]
        relative = self._columns[None] - lengths[:, None]  # of every cell, counted from behind the text
        inside = (relative >= 0) & (relative < self._cells)
        for level in self._levels:
            if level.depth:
                tokens = found[:, level.nodes]
                rows = torch.arange(len(level.nodes), device=roots.device)
                cells = lengths[:, None] + level.first + rows
                own = level.seen[:, relative.clamp(0, self._cells - 1)].transpose(0, 1)  # (batch, rows, cells)
                seen = (relative < 0)[:, None] | (own & inside[:, None])
                positions = (lengths[:, None] - 1 + level.depth).expand_as(cells)
                predict, carry = self.head(
                    carry[:, level.above], self._embeddings[tokens], positions, self._attend(slots, cells, seen)
                )
            best = self._best(predict, slots, level.width)
            found[:, level.children] = best.flatten(1)[:, level.elder]
        return found

    def _best(self, predict: Tensor, slots: Tensor, count: int) -> Tensor:
        """(batch, rows, count): the most probable tokens of the table and of each text's prompt."""
        common = self.head.logits(predict, self._rows)
        known = self.cache.extra_tokens[slots]
        normed = self.head.output_norm(predict)
        extra = torch.einsum("brd,bed->bre", normed, self.cache.extra_rows[slots])
        extra = extra.masked_fill((known < 0)[:, None], -torch.inf)
        places = torch.cat([common, extra], dim=-1).topk(count, dim=-1).indices
        size = len(self._table)
        theirs = known[:, None].expand(-1, places.shape[1], -1).gather(2, (places - size).clamp_min(0))
        return torch.where(places < size, self._table[places.clamp_max(size - 1)], theirs)

    @property
    def _columns(self) -> Tensor:
        return self.cache.columns

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
