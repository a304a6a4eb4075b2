"""The drafted tree: what a drafter proposes and the target scores in one pass.

Node 0 is the root, the last emitted token, whose keys and values are not in the cache yet. A tree of one node is
plain decoding. Nodes stand in level order, so the mask of the first levels is the leading block of the whole mask.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from branchwise.errors import UsageError


class Draw(Enum):
    """How the children of a node came about; it decides which verifiers are exact."""

    FIXED = "fixed"
    """Chosen without chance from the context alone: n-grams, retrieval, the most probable tokens."""
    WITHOUT_REPLACEMENT = "without-replacement"
    """Siblings drawn one after the other from q, never the same token twice, kept in draw order."""
    PATHS = "paths"
    """K independent paths of full depth drawn from q and merged where they agree; `leaves` keeps the draws."""


class Topology:
    """The shape of a tree without its tokens; shared by every tree of that shape, checked once."""

    def __init__(self, parents: tuple[int, ...]) -> None:
        if not parents or parents[0] != -1:
            raise UsageError("A tree starts with its root, whose parent is -1.")
        depths = [0]
        for node, parent in enumerate(parents[1:], start=1):
            if not 0 <= parent < node:
                raise UsageError(f"The parent of node {node} must be an earlier node, not {parent}.")
            depths.append(depths[parent] + 1)
            if depths[node] < depths[node - 1]:
                raise UsageError(f"Nodes must stand in level order; node {node} is less deep than node {node - 1}.")
        self.parents = parents
        self.depths = tuple(depths)

    def __len__(self) -> int:
        return len(self.parents)

    @property
    def depth(self) -> int:
        return self.depths[-1]

    @cached_property
    def ancestors(self) -> Tensor:
        """(nodes, nodes) bool: row i marks the nodes on the path from the root to node i, node i included."""
        mask = torch.eye(len(self), dtype=torch.bool)
        for node, parent in enumerate(self.parents[1:], start=1):
            mask[node] |= mask[parent]
        return mask

    def path(self, node: int) -> list[int]:
        """The nodes from the root to `node`, both included."""
        path = [node]
        while (parent := self.parents[path[-1]]) >= 0:
            path.append(parent)
        return path[::-1]


@lru_cache(maxsize=1024)
def topology(parents: tuple[int, ...]) -> Topology:
    return Topology(parents)


@lru_cache(maxsize=1024)
def chain_topology(nodes: int) -> Topology:
    return topology(tuple(range(-1, nodes - 1)))


@dataclass(frozen=True, eq=False)
class DraftTree:
    """Tokens on a topology, and how they were drawn.

    Topology and kind of draw live on the host and are checked here. `tokens` and `q` may be tensors on a device,
    whose values are not looked at, so that building a tree never waits for the device.
    """

    tokens: Tensor
    """(nodes,) int64; tokens[0] is the root"""
    parents: tuple[int, ...]
    draw: Draw = Draw.FIXED
    q: Tensor | None = field(default=None, repr=False)
    """(nodes, vocabulary) float32; row i is the law that the children of node i were drawn from"""
    leaves: tuple[int, ...] = ()
    """for PATHS: the last node of each drawn path, in draw order, repeats kept"""

    def __post_init__(self) -> None:
        shape = self.topology  # checks the parents
        if self.tokens.shape != (len(shape),):
            raise UsageError(f"A tree of {len(shape)} nodes needs that many tokens, not {tuple(self.tokens.shape)}.")
        if self.draw is Draw.FIXED and self.q is not None:
            raise UsageError("A fixed tree has no q: nothing was drawn.")
        if self.draw is not Draw.FIXED and len(shape) > 1 and self.q is None:
            raise UsageError(f"A tree drawn {self.draw.value} must carry q, the laws it was drawn from.")
        if self.q is not None and (self.q.ndim != 2 or self.q.shape[0] != len(shape)):
            raise UsageError(f"q must have one row for each of the {len(shape)} nodes, not {tuple(self.q.shape)}.")
        if (self.draw is Draw.PATHS) != bool(self.leaves):
            raise UsageError("Leaves belong to a tree of paths, and a tree of paths has at least one.")
        if any(not 0 <= leaf < len(shape) or shape.depths[leaf] != shape.depth for leaf in self.leaves):
            raise UsageError(f"Every path must end at the full depth {shape.depth}.")
        if self.leaves and {*self.parents, *self.leaves} != set(range(-1, len(shape))):
            raise UsageError("Every node of a tree of paths must lie on one of them.")

    @property
    def topology(self) -> Topology:
        return topology(self.parents)

    def __len__(self) -> int:
        return len(self.parents)

    @property
    def depth(self) -> int:
        return self.topology.depth

    @classmethod
    def root(cls, token: int) -> DraftTree:
        """The tree that drafts nothing."""
        return cls(torch.tensor([token]), (-1,))

    @classmethod
    def chain(cls, tokens: Sequence[int]) -> DraftTree:
        """One fixed path; tokens[0] is the root."""
        return cls(torch.tensor(tokens), chain_topology(len(tokens)).parents)

    def cut(self, *, nodes: int, depth: int) -> DraftTree:
        """The leading part with at most `nodes` nodes (the root counts) and at most `depth` levels below the root.

        Only for fixed trees: dropping nodes that were drawn changes the law of what is left.
        """
        keep = sum(level <= depth for level in self.topology.depths[:nodes])
        if keep == len(self):
            return self
        if self.draw is not Draw.FIXED:
            raise UsageError(f"A tree drawn {self.draw.value} cannot be cut; draft it within the budget.")
        return DraftTree(self.tokens[:keep], self.parents[:keep])


class Forest:
    """The trees of a batch, padded to one size: what a pass of the target and a verifier work on.

    Padding nodes carry token 0, stand at the root's depth and have no parent, so that nothing ever reaches them.
    """

    def __init__(self, trees: Sequence[DraftTree], device: torch.device | str = "cpu") -> None:
        assert trees, "a forest has at least one tree"
        self.trees = tuple(trees)
        self.nodes = max(map(len, trees))
        self.depth = max(tree.depth for tree in trees)
        shapes = [tree.topology for tree in trees]
        pads = [self.nodes - len(shape) for shape in shapes]
        self.depths = torch.tensor([s.depths + (0,) * pad for s, pad in zip(shapes, pads, strict=True)], device=device)
        """(batch, nodes) int64, levels below the root"""
        self.parents = torch.tensor(
            [s.parents + (-1,) * pad for s, pad in zip(shapes, pads, strict=True)], device=device
        )
        """(batch, nodes) int64; -1 for roots and padding, so a search for children never finds padding"""
        self.tokens = torch.nn.utils.rnn.pad_sequence(
            [tree.tokens.to(device, non_blocking=True) for tree in trees], batch_first=True
        )
        """(batch, nodes) int64"""

    def __len__(self) -> int:
        return len(self.trees)

    def children_of(self, nodes: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """For each tree the child of nodes[b] that carries tokens[b], and whether there is one; both (batch,)."""
        hits = (self.parents == nodes[:, None]) & (self.tokens == tokens[:, None])
        return hits.int().argmax(dim=1), hits.any(dim=1)
