"""Growing trees by drawing: a policy decides which nodes to expand, a source says what could follow them.

A policy is a coroutine. It yields the tree so far and the nodes whose laws it wants, receives the laws, draws, and in
the end returns the tree. So one pass of a source can serve the wishes of all sequences of a batch.

What keeps it exact: a policy may look at nodes that are drawn, never at the token whose admission it is deciding, and
the q it records is the very law that it drew from.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from branchwise.chance import Chance
from branchwise.draft import Budget
from branchwise.tree import DraftTree, Draw


@dataclass
class Sapling:
    """A tree while it grows."""

    tokens: list[int]
    parents: list[int] = field(default_factory=lambda: [-1])
    laws: list[Tensor] = field(default_factory=list)
    """q of the nodes that were expanded, in node order"""

    def __len__(self) -> int:
        return len(self.tokens)

    def add(self, parent: int, token: int) -> int:
        self.tokens.append(token)
        self.parents.append(parent)
        return len(self.tokens) - 1

    def finish(self, draw: Draw, leaves: tuple[int, ...] = ()) -> DraftTree:
        return DraftTree(
            torch.tensor(self.tokens, device=self.laws[0].device),
            tuple(self.parents),
            draw,
            torch.stack(self.laws),
            leaves,
        )


def drawable(laws: Tensor) -> Tensor:
    """Laws without masses so small that a verifier could not divide by them."""
    return laws.where(laws >= torch.finfo(laws.dtype).tiny, 0.0)


Growing = Generator[tuple[Sapling, list[int]], Tensor, DraftTree]
"""yields (tree so far, nodes to expand), receives their laws (nodes, vocabulary), returns the tree"""


class Growth(Protocol):
    draw: Draw

    def grow(self, root: int, budget: Budget, chance: Chance) -> Growing: ...
