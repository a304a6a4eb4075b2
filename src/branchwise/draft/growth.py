"""Growing trees: a policy decides which nodes to expand, a source says what could follow them.

A policy is a coroutine. It yields the tree so far and the nodes whose laws it wants, receives them, draws, and in the
end returns the tree. So one pass of a source can serve the wishes of all sequences of a batch; a policy that draws a
level at once yields that too, and the draws of all sequences are made in one go.

What keeps it exact: a policy may look at nodes that are drawn, never at the token whose admission it is deciding, and
the q it records is the very law that it drew from.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor

from branchwise.draft import Budget
from branchwise.draft.dice import Dice, Throw
from branchwise.draft.few import Law, Level, table
from branchwise.tree import DraftTree, Draw


@dataclass
class Sapling:
    """A tree while it grows. Nodes stand in the order in which they joined, parents before their children."""

    tokens: list[int]
    parents: list[int] = field(default_factory=lambda: [-1])
    depths: list[int] = field(default_factory=lambda: [0])
    laws: dict[int, Law] = field(default_factory=dict)
    """node -> the law that its children are drawn from"""
    sources: dict[int, str] = field(default_factory=dict)
    """node -> who proposed it, where there are several"""

    def __len__(self) -> int:
        return len(self.tokens)

    def add(self, parent: int, token: int) -> int:
        self.tokens.append(token)
        self.parents.append(parent)
        self.depths.append(self.depths[parent] + 1)
        return len(self.tokens) - 1

    def leading(self, nodes: int) -> Sapling:
        """The tree of the first nodes, with their sources; what was drawn cannot be cut."""
        assert not self.laws
        sources = {node: source for node, source in self.sources.items() if node < nodes}
        return Sapling(self.tokens[:nodes], self.parents[:nodes], self.depths[:nodes], sources=sources)

    def path(self, node: int) -> list[int]:
        """The tokens from below the root to a node."""
        tokens = []
        while node > 0:
            tokens.append(self.tokens[node])
            node = self.parents[node]
        return tokens[::-1]

    @property
    def places(self) -> dict[int, int]:
        """Where each node stands in level order; siblings keep the order in which they joined."""
        order = sorted(range(len(self)), key=self.depths.__getitem__)
        return {node: place for place, node in enumerate(order)}

    def finish(self, draw: Draw, leaves: tuple[int, ...] = (), *, trusted: bool = False) -> DraftTree:
        """The tree in level order."""
        place = self.places
        order = list(place)
        parents = tuple(place.get(self.parents[node], -1) for node in order)
        q = None
        if draw is not Draw.FIXED and len(self) > 1:
            q = table([self.laws.get(node) for node in order[: max(parents) + 1]])
        return DraftTree(
            torch.tensor([self.tokens[node] for node in order]),
            parents,
            draw,
            q,
            tuple(place[leaf] for leaf in leaves),
            trusted=trusted,
            sources=tuple(self.sources.get(node, "") for node in order) if self.sources else (),
        )


def drawable(laws: Tensor) -> Tensor:
    """Laws without masses so small that a verifier could not divide by them."""
    kind = torch.finfo(laws.dtype)
    below = kind.tiny * (1 - kind.eps)  # the largest of those; on the host `where` takes far longer
    return torch.nn.functional.threshold(laws, below, 0.0)


class Found:
    """What a source says of the nodes that a policy asked for."""

    def __init__(self, laws: Level, hidden: Tensor | None = None) -> None:
        """`hidden` (nodes, width) is what the head of a draft model saw, where the policy wants it."""
        self._laws = laws
        self.hidden = hidden

    @cached_property
    def laws(self) -> Tensor:
        """(nodes, vocabulary) float32: what could follow each"""
        return self._laws if isinstance(self._laws, Tensor) else table(self._laws)

    @property
    def drawable(self) -> Level:
        """The same to draw from, as the source has them."""
        return drawable(self._laws) if isinstance(self._laws, Tensor) else self._laws


Growing = Generator[tuple[Sapling, list[int]] | Throw, Any, DraftTree]
"""yields (tree so far, nodes to expand) and receives what is `Found` there, or yields a throw and receives what is
drawn; returns the tree"""


def grow_with(growing: Growing, look: Callable[[Sapling, list[int]], Found]) -> DraftTree:
    """Grow one tree by itself, from whatever answers its wishes."""
    answer: Any = None
    while True:
        try:
            asked = growing.send(answer)
        except StopIteration as end:
            tree: DraftTree = end.value
            return tree
        answer = asked.alone() if isinstance(asked, Throw) else look(*asked)


class Growth(Protocol):
    """A policy. One that looks at hidden states also says `wants_hidden = True`.

    One that can be laid down over a memory, with nothing drawn, also has `lay(root, place, after, budget)`, which is
    called in the place of `grow` and returns the `Sapling`; it may have `begin(batch, target)`, called before a batch,
    and `drafted()`, called behind it.

    One that remembers what the target found for a text also has `plant(sequence, budget, dice)`, which is called in the
    place of `grow`, and `observe(sequences, trees, scored, verdicts)`, called after every step.
    """

    draw: Draw

    def grow(self, root: int, budget: Budget, dice: Dice) -> Growing: ...
