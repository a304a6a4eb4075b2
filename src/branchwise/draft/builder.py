"""Growing trees: a policy decides which nodes to expand, a source says what could follow them.

A policy is a coroutine. It yields the tree so far and the nodes whose distributions it wants, receives them, draws, and
in the end returns the tree. So one pass of a source can serve the wishes of all sequences of a batch; a policy that
draws a level at once yields that too, and the draws of all sequences are made in one go.

What keeps it exact: a policy may look at nodes that are drawn, never at the token whose admission it is deciding, and
the q it records is the very distribution that it drew from.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor

from branchwise.core.tree import DraftTree, Draw
from branchwise.draft.base import Budget
from branchwise.draft.sampler import DraftSampler, SampleRequest
from branchwise.draft.sparse import Probs, ProbsBatch, table


@dataclass
class TreeBuilder:
    """A tree while it grows. Nodes stand in the order in which they joined, parents before their children."""

    tokens: list[int]
    parents: list[int] = field(default_factory=lambda: [-1])
    depths: list[int] = field(default_factory=lambda: [0])
    probs: dict[int, Probs] = field(default_factory=dict)
    """node -> the distribution that its children are drawn from"""
    sources: dict[int, str] = field(default_factory=dict)
    """node -> who proposed it, where there are several"""

    def __len__(self) -> int:
        return len(self.tokens)

    def add(self, parent: int, token: int) -> int:
        self.tokens.append(token)
        self.parents.append(parent)
        self.depths.append(self.depths[parent] + 1)
        return len(self.tokens) - 1

    def leading(self, nodes: int) -> TreeBuilder:
        """The tree of the first nodes, with their sources; what was drawn cannot be cut."""
        assert not self.probs
        sources = {node: source for node, source in self.sources.items() if node < nodes}
        return TreeBuilder(self.tokens[:nodes], self.parents[:nodes], self.depths[:nodes], sources=sources)

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
            q = table([self.probs.get(node) for node in order[: max(parents) + 1]])
        return DraftTree(
            torch.tensor([self.tokens[node] for node in order]),
            parents,
            draw,
            q,
            tuple(place[leaf] for leaf in leaves),
            trusted=trusted,
            sources=tuple(self.sources.get(node, "") for node in order) if self.sources else (),
        )


def drawable(probs: Tensor) -> Tensor:
    """Distributions without masses so small that a verifier could not divide by them."""
    kind = torch.finfo(probs.dtype)
    below = kind.tiny * (1 - kind.eps)  # the largest of those; on the host `where` takes far longer
    return torch.nn.functional.threshold(probs, below, 0.0)


class NodeProbs:
    """What a source says of the nodes that a policy asked for."""

    def __init__(self, probs: ProbsBatch, hidden: Tensor | None = None) -> None:
        """`hidden` (nodes, width) is what the head of a draft model saw, where the policy wants it."""
        self._probs = probs
        self.hidden = hidden

    @cached_property
    def probs(self) -> Tensor:
        """(nodes, vocabulary) float32: what could follow each"""
        return self._probs if isinstance(self._probs, Tensor) else table(self._probs)

    @property
    def drawable(self) -> ProbsBatch:
        """The same to draw from, as the source has them."""
        return drawable(self._probs) if isinstance(self._probs, Tensor) else self._probs


TreeCoroutine = Generator[tuple[TreeBuilder, list[int]] | SampleRequest, Any, DraftTree]
"""yields (tree so far, nodes to expand) and receives what is `Found` there, or yields a throw and receives what is
drawn; returns the tree"""


def grow_with(growing: TreeCoroutine, look: Callable[[TreeBuilder, list[int]], NodeProbs]) -> DraftTree:
    """Grow one tree by itself, from whatever answers its wishes."""
    answer: Any = None
    while True:
        try:
            asked = growing.send(answer)
        except StopIteration as end:
            tree: DraftTree = end.value
            return tree
        answer = asked.alone() if isinstance(asked, SampleRequest) else look(*asked)


class TreePolicy(Protocol):
    """A policy. One that looks at hidden states also says `wants_hidden = True`.

    One that can be laid down over a memory, with nothing drawn, also has `lay(root, place, after, budget)`, which is
    called in the place of `grow` and returns the `TreeBuilder`; it may have `begin(batch, target)`, called before a
    batch, and `drafted()`, called behind it.

    One that remembers what the target found for a text also has `plant(sequence, budget, sampler)`, which is called in
    the place of `grow`, and `update(sequences, trees, scored, verdicts)`, called after every step.
    """

    draw: Draw

    def grow(self, root: int, budget: Budget, sampler: DraftSampler) -> TreeCoroutine: ...
