"""Shapes of trees: the parents of the nodes, and what follows from the parents alone.

Nodes are in level order, so the attention mask of the first levels is the leading block of the whole mask.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from functools import cached_property, lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from branchwise.core.rows import pack_array
from branchwise.errors import UsageError


class Topology:
    """The shape of a tree without its tokens; checked once, and shared by all trees of that shape."""

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
        self._whole: Topology | None = None

    def __len__(self) -> int:
        return len(self.parents)

    @property
    def depth(self) -> int:
        return self.depths[-1]

    @cached_property
    def ancestors(self) -> Tensor:
        """(nodes, nodes) bool: row i marks the nodes on the path from the root to node i, node i included."""
        if self._whole is not None:
            return self._whole.ancestors[: len(self), : len(self)]
        mask = np.eye(len(self), dtype=np.bool_)  # torch takes ten times as long, and paths rarely repeat a shape
        for node, parent in enumerate(self.parents[1:], start=1):
            mask[node] |= mask[parent]
        return torch.from_numpy(mask)

    @cached_property
    def bits(self) -> NDArray[np.int32]:
        """(nodes, words): the same mask as bits."""
        return pack_array(self.ancestors.numpy())

    @cached_property
    def children(self) -> tuple[tuple[int, ...], ...]:
        """The children of every node, in node order."""
        children: list[list[int]] = [[] for _ in self.parents]
        for node, parent in enumerate(self.parents[1:], start=1):
            children[parent].append(node)
        return tuple(map(tuple, children))

    @cached_property
    def levels(self) -> list[list[int]]:
        """The nodes of every level, root first."""
        levels: list[list[int]] = [[] for _ in range(self.depth + 1)]
        for node, depth in enumerate(self.depths):
            levels[depth].append(node)
        return levels

    @cached_property
    def forks(self) -> list[int]:
        """The nodes with more than one child."""
        return [node for node, below in enumerate(self.children) if len(below) > 1]

    def path(self, node: int) -> list[int]:
        """The nodes from the root to `node`, both included."""
        path = [node]
        while (parent := self.parents[path[-1]]) >= 0:
            path.append(parent)
        return path[::-1]

    def leading(self, nodes: int) -> Topology:
        """The shape of the first `nodes` nodes. Its mask is a view of this mask, so a draft that stops early builds
        no mask.

        This is the sliced topology-aware mask of improved MCSD (Lu et al. 2024, arXiv 2409.10644): no node attends
        to a later node, so the mask of the first nodes is the leading block of the mask.
        """
        if nodes == len(self):
            return self
        shape = Topology(self.parents[:nodes])
        shape._whole = self
        return shape


MOST_SHAPES = 1024
"""the size of the cache, which keeps the topologies that were used most recently"""

_shapes: OrderedDict[tuple[int, ...], Topology] = OrderedDict()
_shapes_lock = threading.Lock()  # engines of several threads share the cache


def topology(parents: tuple[int, ...]) -> Topology:
    """The shape of these parents, from the cache if possible."""
    with _shapes_lock:
        known = _shapes.get(parents)
    return _keep(known or Topology(parents))


def plant(parents: tuple[int, ...]) -> Topology:
    """A shape, cached with the shapes of its first levels: a draft may stop at any level without a new mask."""
    whole = topology(parents)
    for level in whole.levels[:-1]:
        _keep(whole.leading(level[-1] + 1))
    return whole


def _keep(shape: Topology) -> Topology:
    with _shapes_lock:
        _shapes[shape.parents] = shape
        _shapes.move_to_end(shape.parents)
        if len(_shapes) > MOST_SHAPES:
            _shapes.popitem(last=False)
    return shape


def branched(widths: Sequence[int], most: int = 512) -> tuple[int, ...]:
    """The parents of a tree in which every node at depth d has widths[d] children; complete levels, at most `most`
    nodes."""
    parents, level = [-1], range(1)
    for width in widths:
        if len(parents) + len(level) * width > most:
            break
        below = range(len(parents), len(parents) + len(level) * width)
        parents += [node for node in level for _ in range(width)]
        level = below
    return tuple(parents)


@lru_cache(maxsize=1024)
def chain_topology(nodes: int) -> Topology:
    return topology(tuple(range(-1, nodes - 1)))
