"""Trees whose shape is known in advance, drawn on the device: the order of their passes, and what each node attends to,
are constants.

Siblings are drawn without replacement, or are the most probable tokens. If a distribution has fewer tokens with mass
than the shape has children, the tree has another shape. Such trees are rare, and the host grows them. The host learns
of them only after it has read the verdict before them, and by then a pass over them may have begun.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from branchwise.core.rng import stream_of
from branchwise.core.sequence import SequenceState
from branchwise.core.topology import Topology, branched, topology
from branchwise.core.tree import DraftTree, Draw
from branchwise.draft.base import Budget
from branchwise.draft.drawn.choice import Orders
from branchwise.draft.drawn.trees import Choose, Drawn, Level, Passes, Texts, TreeDraft
from branchwise.draft.model.reading import BatchReading
from branchwise.draft.policies.rsd import Branching
from branchwise.draft.policies.template import Ranks, Template, places_in

ORDERS = stream_of("draft", "order", 0)
"""the random stream of the draws without replacement of `SeededSampler`"""


Shaped = Template | Branching | Ranks
"""the tree policies with a known shape"""


class Inner(NamedTuple):
    """The nodes of one level that have children."""

    nodes: Tensor
    """(rows,): the places of these nodes in the tree"""
    draws: Tensor
    """(rows,): the numbers of the draws of their children"""
    children: Tensor
    """(children,): the places of their children in the tree"""
    elder: Tensor
    """(children,): the row of each child's parent times `width`, plus the rank of the child"""
    width: int
    """the most children of one node"""


class ShapeDraft(TreeDraft):
    """Trees of the shape of a policy. A tree of ranks can be cut to any part of the shape, other trees to their first
    levels."""

    resident = True

    def __init__(self, policy: Shaped, width: int, device: torch.device) -> None:
        """`width` is the number of tokens that can be proposed."""
        self._policy, self._width = policy, width
        self._shape = shape = shape_of(policy, width)
        self._ranked = isinstance(policy, Ranks)
        self.tells = not self._ranked
        self.depth = shape.depth
        inner = [[node for node in level if shape.children[node]] for level in shape.levels[:-1]]
        cells = {node: cell for cell, node in enumerate(node for nodes in inner[1:] for node in nodes)}
        self.below = len(cells)
        self._inner = [self._plan(level, nodes, device) for level, nodes in enumerate(inner)]
        self._depths = torch.tensor(shape.depths, device=device)
        self._last = max(shape.parents) + 1
        self._parts: dict[tuple[int, ...], Tensor] = {}
        super().__init__([self._level(*nodes, cells) for nodes in pairwise(inner)], device)

    def _plan(self, depth: int, nodes: list[int], device: torch.device) -> Inner:
        shape = self._shape
        width = max(len(shape.children[node]) for node in nodes)
        pairs = [
            (child, row * width + rank)
            for row, node in enumerate(nodes)
            for rank, child in enumerate(shape.children[node])
        ]
        level = shape.levels[depth]
        numbered = isinstance(self._policy, Branching)  # its draws are numbered by level and place in the level
        draws = [(depth << 16) + level.index(node) if numbered else node for node in nodes]
        lists = nodes, draws, [child for child, _ in pairs], [elder for _, elder in pairs]
        found, numbers, children, elder = (torch.tensor(part, device=device) for part in lists)
        return Inner(found, numbers, children, elder, width)

    def _level(self, before: list[int], nodes: list[int], cells: dict[int, int]) -> Level:
        depths, first = self._shape.depths, cells[nodes[0]]
        columns = [depths[node] - 1 for node, cell in cells.items() if cell < first + len(nodes)]
        seen = torch.zeros(len(nodes), len(columns), dtype=torch.bool)
        for row, node in enumerate(nodes):
            seen[row, [cells[above] for above in self._shape.path(node)[1:]]] = True
        above = torch.tensor([before.index(self._shape.parents[node]) for node in nodes])
        return Level(first, torch.full((len(nodes),), depths[nodes[0]] - 1), torch.tensor(columns), seen, above)

    def serves(self, budgets: Sequence[Budget]) -> bool:
        return True

    def whole(self, budgets: Sequence[Budget]) -> bool:
        return all(len(self._within(budget)) == len(self._shape) for budget in budgets)

    def _within(self, budget: Budget) -> tuple[int, ...]:
        """The parents of the nodes, for the part of the shape that fits in a budget."""
        if isinstance(self._policy, Ranks):
            return self._policy.within(budget, self._width).parents
        return self._shape.parents[: self._shape.levels[self._levels_within(budget)][-1] + 1]

    def _levels_within(self, budget: Budget) -> int:
        """The number of whole levels below the root that fit in a budget."""
        ends = [level[-1] for level in self._shape.levels[1 : max(budget.depth, 0) + 1]]
        return sum(end < budget.nodes for end in ends)

    def place(self, size: int, vocabulary: int) -> Drawn:
        tokens = torch.zeros(size, len(self._shape), dtype=torch.long, device=self.device)
        told = torch.zeros(size, dtype=torch.long, device=self.device)
        rows = 0 if self._ranked else self._last
        return Drawn(tokens, told, torch.zeros(size, rows, vocabulary, device=self.device))

    def choice(self, reading: BatchReading, *, greedy: bool, drawn: bool, compile: bool) -> Choose:
        return Orders(reading, greedy=greedy or self._ranked, drawn=drawn and not self._ranked, compile=compile)

    def grow(self, passes: Passes, choose: Choose, place: Drawn, texts: Texts) -> Drawn:
        """Draw level by level. `place.told` gets the first level in which a token is missing."""
        positions, roots, logits = passes.roots
        place.tokens[:, 0] = roots
        for number, inner in enumerate(self._inner):
            if number:
                logits = passes.below(place.tokens[:, inner.nodes], number)
            keys = choose.keys(ORDERS, inner.draws, texts.seeds, positions)
            tokens, probs = choose(logits, keys, texts.greedy, width=inner.width)
            place.tokens[:, inner.children] = tokens.flatten(1)[:, inner.elder]
            if not self._ranked:
                place.q[:, inner.nodes] = probs
        missing = torch.where(place.tokens < 0, self._depths, self.depth + 1)
        place.told.copy_(missing.amin(dim=1))
        place.tokens.clamp_min_(0)
        return place

    def fails(self, told: Sequence[int], budgets: Sequence[Budget]) -> bool:
        """Whether a token is missing in a tree, within its budget."""
        return any(level <= self._levels_within(budget) for level, budget in zip(told, budgets, strict=False))

    def trees(self, found: Drawn, sequences: Sequence[SequenceState], budgets: Sequence[Budget]) -> list[DraftTree]:
        parents = [self._within(budget) for budget in budgets]
        if self._ranked:
            parts = zip(found.tokens, parents, strict=False)
            return [DraftTree(self._part(row, part), part, Draw.FIXED) for row, part in parts]
        return [self._tree(*one) for one in zip(found.tokens, found.q, parents, strict=False)]

    def _tree(self, tokens: Tensor, q: Tensor, parents: tuple[int, ...]) -> DraftTree:
        """The first levels of a drawn tree. Cutting it is exact: the draws of a node do not depend on deeper nodes."""
        rows = max(parents) + 1
        return DraftTree(tokens[: len(parents)], parents, self._policy.draw, q[:rows] if rows else None)

    def _part(self, whole: Tensor, parents: tuple[int, ...]) -> Tensor:
        """The tokens of a part of a tree of ranks."""
        if len(parents) == len(self._shape):
            return whole
        if parents not in self._parts:
            places = torch.tensor(places_in(self._shape, topology(parents)))
            self._parts[parents] = places.to(whole.device, non_blocking=True)
        return whole.index_select(0, self._parts[parents])


def shape_of(policy: Shaped, width: int) -> Topology:
    """The whole shape of a policy's trees, if `width` tokens can be proposed."""
    if isinstance(policy, Ranks):
        return policy.whole(width)
    return policy.shape if isinstance(policy, Template) else topology(branched(policy.branching))
