"""The drafted tree: what a drafter proposes and the target scores in one pass.

Node 0 is the root, the last emitted token, whose keys and values are not in the KV cache yet. A tree of one node is
plain decoding. Nodes are numbered in level order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from branchwise.core.topology import Topology, chain_topology, topology
from branchwise.errors import UsageError

BARE = topology((-1,))


class Draw(Enum):
    """How the children of a node were chosen; this decides which verifiers are exact."""

    FIXED = "fixed"
    """Chosen without chance from the context alone: n-grams, retrieval, the most probable tokens."""
    WITHOUT_REPLACEMENT = "without-replacement"
    """Siblings drawn one after the other from q, never the same token twice, kept in draw order."""
    WITH_REPLACEMENT = "with-replacement"
    """Independent draws from q below every node, repeats merged into one node; `draws` keeps each draw."""
    PATHS = "paths"
    """K independent paths of full depth drawn from q and merged where they agree; `leaves` keeps the draws."""
    FORK = "fork-lossy"
    """A first level that may be drawn from the target, and one chain drawn from q below each of its nodes; only lossy
    rules accept it."""


@dataclass(frozen=True, eq=False)
class DraftTree:
    """Tokens on a topology, and how they were drawn.

    Topology and kind of draw are on the host and are checked here. `tokens` and `q` may be tensors on a device, whose
    values are not read, so that building a tree never waits for the device.
    """

    tokens: Tensor
    """(nodes,) int64; tokens[0] is the root"""
    parents: tuple[int, ...]
    draw: Draw = Draw.FIXED
    q: Tensor | None = field(default=None, repr=False)
    """(rows, vocabulary) float32; row i is the distribution that the children of node i were drawn from. Nodes
    after the last node with children need no row."""
    leaves: tuple[int, ...] = ()
    """for PATHS: the last node of each drawn path, in draw order, repeats kept"""
    draws: tuple[int, ...] = ()
    """for WITH_REPLACEMENT: the node that each draw led to, in draw order, repeats kept"""
    trusted: bool = False
    """for FORK: whether the first level was drawn from the distribution that the target still wants (row 0 of q), so
    that it needs no test"""
    sources: tuple[str, ...] = ()
    """the source that proposed each node, if a drafter has several; empty for the root"""

    def __post_init__(self) -> None:
        shape = self.topology  # checks the parents
        if self.tokens.shape != (len(shape),):
            raise UsageError(f"A tree of {len(shape)} nodes needs that many tokens, not {tuple(self.tokens.shape)}.")
        if self.sources and len(self.sources) != len(shape):
            raise UsageError(f"A tree of {len(shape)} nodes needs that many sources, not {len(self.sources)}.")
        if self.draw is Draw.FIXED and self.q is not None:
            raise UsageError("A fixed tree has no q: nothing was drawn.")
        if self.draw is not Draw.FIXED and len(shape) > 1 and self.q is None:
            raise UsageError(f"A tree drawn {self.draw.value} must carry q, the distributions it was drawn from.")
        if self.q is not None and (self.q.ndim != 2 or not max(self.parents) < self.q.shape[0] <= len(shape)):
            raise UsageError(f"q must have one row for every node with children, not the shape {tuple(self.q.shape)}.")
        if (self.draw is Draw.PATHS) != bool(self.leaves):
            raise UsageError("Leaves belong to a tree of paths, and a tree of paths has at least one.")
        if any(not 0 <= leaf < len(shape) or shape.depths[leaf] != shape.depth for leaf in self.leaves):
            raise UsageError(f"Every path must end at the full depth {shape.depth}.")
        if self.draw is not Draw.FIXED and self.tokens.device.type == "cpu":
            steps = list(zip(self.parents[1:], self.tokens[1:].tolist(), strict=True))
            if len(set(steps)) < len(steps):
                raise UsageError(
                    f"A tree drawn {self.draw.value} holds the same token twice below one node; merge them."
                )
        if self.leaves and {*self.parents, *self.leaves} != set(range(-1, len(shape))):
            raise UsageError("Every node of a tree of paths must lie on one of them.")
        if {*self.draws} != ({*range(1, len(shape))} if self.draw is Draw.WITH_REPLACEMENT else set()):
            raise UsageError("Draws belong to a tree drawn with replacement, and lead to every node below its root.")
        if self.trusted and (self.draw is not Draw.FORK or self.q is None):
            raise UsageError(
                "Only a fork can be trusted, and it carries the distribution that its first level was drawn from."
            )
        if self.draw is Draw.FORK:
            width = self.parents.count(0)
            if any(parent != max(node - width, 0) for node, parent in enumerate(self.parents[1:], start=1)):
                raise UsageError("Below its first level a fork is one chain a branch, in the order of that level.")

    @cached_property
    def topology(self) -> Topology:
        return topology(self.parents)

    def __len__(self) -> int:
        return len(self.parents)

    @property
    def depth(self) -> int:
        return self.topology.depth

    @staticmethod
    @lru_cache(maxsize=1024)
    def root(token: int) -> DraftTree:
        """The tree that drafts nothing."""
        tree = DraftTree(torch.tensor([token]), (-1,))
        tree.__dict__["topology"] = BARE  # always this object, so its cached layouts are found (`lay_out`)
        return tree

    @classmethod
    def chain(cls, tokens: Sequence[int]) -> DraftTree:
        """One fixed path; tokens[0] is the root."""
        return cls(torch.tensor(tokens), chain_topology(len(tokens)).parents)

    def path(self, node: int) -> list[int]:
        """The nodes from the root to `node`, both included."""
        return self.topology.path(node)

    @property
    def paths(self) -> list[list[int]]:
        """The nodes of every drawn path, root first, in draw order; a tree that drafts nothing is one path."""
        return [self.topology.path(leaf) for leaf in self.leaves or (0,)]

    @property
    def children(self) -> tuple[tuple[int, ...], ...]:
        """The children of every node in draw order; for paths, in the order in which paths first reach them."""
        if not self.leaves:
            return self.topology.children
        first: dict[int, int] = {}
        for turn, path in enumerate(self.paths):
            for node in path:
                first.setdefault(node, turn)
        return tuple(tuple(sorted(below, key=first.__getitem__)) for below in self.topology.children)

    @property
    def candidates(self) -> list[list[int]]:
        """For every node the child that each draw below it led to, in draw order, repeats kept. For paths: the next
        node of every path, or -1 if the path does not run through the node or ends there."""
        if not self.leaves:
            found: list[list[int]] = [[] for _ in self.parents]
            for node in self.draws or range(1, len(self)):
                found[self.parents[node]].append(node)
            return found
        found = [[-1] * len(self.leaves) for _ in self.parents]
        for turn, path in enumerate(self.paths):
            for node, below in pairwise(path):
                found[node][turn] = below
        return found

    @property
    def postorder(self) -> list[int]:
        """Every node after its children, siblings in draw order."""
        order, waiting, children = [], [0], self.children
        while waiting:  # built from its end: a node, then its children from the last to the first
            order.append(node := waiting.pop())
            waiting += children[node]
        return order[::-1]

    def cut(self, *, nodes: int, depth: int) -> DraftTree:
        """The leading part with at most `nodes` nodes (the root counts) and at most `depth` levels below the root.

        Only for fixed trees: dropping nodes that were drawn changes the distribution of what is left.
        """
        keep = sum(level <= depth for level in self.topology.depths[:nodes])
        if keep == len(self):
            return self
        if self.draw is not Draw.FIXED:
            raise UsageError(f"A tree drawn {self.draw.value} cannot be cut; draft it within the budget.")
        return DraftTree(self.tokens[:keep], self.parents[:keep], sources=self.sources[:keep])


class DeviceShape(NamedTuple):
    """The shape of a tree as tensors on a device; the last nodes may be padding, as in a batch."""

    parents: Tensor
    """(nodes,): -1 for the root and for padding"""
    depths: Tensor
    """(nodes,)"""
    ancestor_bits: Tensor
    """(nodes, words) int32"""


@dataclass(frozen=True, eq=False)
class LaidTree(DraftTree):
    """A fixed tree that was laid on a device: the host knows its size and its greatest depth, but not its shape.

    `parents` belong to a stand-in of that size and depth and must not be read as the parents of the tree.
    """

    shape: DeviceShape = field(kw_only=True, repr=False)

    @classmethod
    def of(cls, tokens: Tensor, shape: DeviceShape, depth: int) -> LaidTree:
        return cls(tokens, stand_in(len(tokens), depth), shape=shape)

    def path(self, node: int) -> list[int]:
        """The nodes from the root to `node`, read from the device; the path of padding is the padding node alone."""
        parents, path = self.shape.parents.tolist(), [node]
        while (parent := parents[path[-1]]) >= 0:
            path.append(parent)
        return path[::-1]

    @property
    def paths(self) -> list[list[int]]:
        raise NotImplementedError(UNKNOWN)

    @property
    def children(self) -> tuple[tuple[int, ...], ...]:
        raise NotImplementedError(UNKNOWN)


UNKNOWN = "the host does not know the shape of a tree that was laid on a device"


@lru_cache(maxsize=256)
def stand_in(nodes: int, depth: int) -> tuple[int, ...]:
    """The parents of a tree of this size and depth: children of the root, and a chain below the last of them."""
    wide = nodes - depth
    return (-1, *[0] * wide, *range(wide, nodes - 1)) if depth else (-1,)
