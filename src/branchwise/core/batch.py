"""Batches of drafted trees as padded tensors: the input of a forward pass of the target and of a verifier."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from branchwise.core.rows import gather_rows, unpack_bits, words_for
from branchwise.core.topology import Topology
from branchwise.core.tree import DeviceShape, DraftTree, LaidTree


@dataclass(frozen=True)
class PadShape:
    """The least sizes to which a batch of trees is padded, so that its tensors have the same shapes at every step."""

    nodes: int = 0
    inner: int = 0
    """the nodes up to the last node with children: those need a row of q"""
    children: int = 0
    """the children of one node"""
    width: int = 0
    """the nodes of one level"""
    forks: int = 0
    """the nodes with more than one child"""

    @classmethod
    def for_paths(cls, count: int, length: int) -> PadShape:
        """The sizes for `count` paths of `length` tokens, wherever the paths part."""
        return cls(count * length + 1, count * (length - 1) + 1, children=count, width=count, forks=count - 1)


class TreeLayout(NamedTuple):
    """The arrays that follow from the shapes of the trees of a batch alone, padded to one size; on the host."""

    depths: NDArray[np.int64]
    """(batch, nodes): levels below the root"""
    parents: NDArray[np.int64]
    """(batch, nodes): -1 for roots and padding, so that a search for the children of a node never finds padding"""
    ancestor_bits: NDArray[np.int32]
    """(batch, nodes, words): the ancestors of every node, the node included, as bits; no bits for padding"""


@lru_cache(maxsize=64)
def lay_out(shapes: tuple[Topology, ...], nodes: int) -> TreeLayout:
    """The layout of trees of these shapes; cached, because trees often keep their shapes from step to step."""
    depths = np.zeros((len(shapes), nodes), dtype=np.int64)
    parents = np.full((len(shapes), nodes), -1, dtype=np.int64)
    ancestor_bits = np.zeros((len(shapes), nodes, words_for(nodes)), dtype=np.int32)
    for row, shape in enumerate(shapes):
        depths[row, : len(shape)] = shape.depths
        parents[row, : len(shape)] = shape.parents
        ancestor_bits[row, : len(shape), : shape.bits.shape[1]] = shape.bits
    return TreeLayout(depths, parents, ancestor_bits)


class Table(cached_property[Tensor]):
    """A tensor over the trees of a batch, copied to the device when it is first read; `array` is made on the host."""

    def __init__(self, array: Callable[[TreeBatch], NDArray[Any]]) -> None:
        super().__init__(self._read)
        self.array = array

    def _read(self, batch: TreeBatch) -> Tensor:
        if batch.source is not None:
            source, rows = batch.source
            return self.__get__(source)[rows]
        assert self.attrname is not None
        return batch.host(self.attrname).to(batch.device, copy=True)


class TreeBatch:
    """The trees of a batch, padded to one size.

    Padding nodes have token 0, the depth of the root and no parent, so that no path ever reaches them.
    """

    def __init__(
        self,
        trees: Sequence[DraftTree],
        device: torch.device | str = "cpu",
        pad_shape: PadShape | None = None,
        roots: Sequence[int] | None = None,
    ) -> None:
        """`roots`, a token for each tree, replace the root tokens of the trees."""
        assert trees, "a batch of trees has at least one tree"
        self.trees = tuple(trees)
        self.device = torch.device(device)
        self.pad_shape = pad_shape or PadShape()
        self.nodes = max(self.pad_shape.nodes, *map(len, trees))
        self.depth = max(tree.depth for tree in trees)
        self._roots = roots
        self._host: dict[str, Tensor] = {}
        self.source: tuple[TreeBatch, Tensor] | None = None
        """the batch that this one was taken from, and the indices of its rows there (`take`)"""

    def __len__(self) -> int:
        return len(self.trees) if self.source is None else len(self.source[1])

    @cached_property
    def layout(self) -> TreeLayout:
        return lay_out(tuple(tree.topology for tree in self.trees), self.nodes)

    @cached_property
    def laid(self) -> DeviceShape | None:
        """(batch, nodes, …): the shapes, if some trees were laid on a device; None if the host knows all shapes."""
        if not any(isinstance(tree, LaidTree) for tree in self.trees):
            return None
        shapes = [
            tree.shape if isinstance(tree, LaidTree) else shape_on(tree.topology, self.device) for tree in self.trees
        ]
        parents, depths, bits = zip(*(padded_shape(shape, self.nodes) for shape in shapes), strict=True)
        return DeviceShape(*(torch.stack(part) if len(part) > 1 else part[0][None] for part in (parents, depths, bits)))

    @cached_property
    def host_tokens(self) -> NDArray[np.int64] | None:
        """(batch, nodes) on the host; None if a tree was drafted on a device."""
        if any(tree.tokens.device.type != "cpu" or isinstance(tree, LaidTree) for tree in self.trees):
            return None
        tokens = np.zeros((len(self.trees), self.nodes), dtype=np.int64)
        for row, tree in zip(tokens, self.trees, strict=True):
            row[: len(tree)] = tree.tokens.numpy()
        if self._roots is not None:
            tokens[:, 0] = self._roots
        return tokens

    @cached_property
    def tokens(self) -> Tensor:
        """(batch, nodes) int64"""
        if self.host_tokens is not None:
            return torch.from_numpy(self.host_tokens).to(self.device)
        drafted = self.drafted
        tokens = torch.nn.functional.pad(drafted, (0, self.nodes - drafted.shape[1]))  # always a copy
        if self._roots is not None:
            tokens[:, 0] = torch.tensor(self._roots, device=self.device)
        return tokens

    @property
    def drafted(self) -> Tensor:
        """(batch, at most nodes) int64: the tokens as drafted on a device; column 0 has the trees' own roots."""
        rows = [tree.tokens.to(self.device, non_blocking=True) for tree in self.trees]
        if len(rows) == 1:
            return rows[0][None]
        alike = len(set(map(len, rows))) == 1
        return torch.stack(rows) if alike else torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)

    def children_of(self, nodes: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """For each tree the child of nodes[b] with the token tokens[b], and whether it exists; both (batch,)."""
        hits = (self.parents == nodes[:, None]) & (self.tokens == tokens[:, None])
        return hits.int().argmax(dim=1), hits.any(dim=1)

    def paths_to(self, nodes: Tensor) -> Tensor:
        """(batch, nodes): for each tree the nodes from the root to nodes[b], padded with -1."""
        every = torch.arange(self.nodes, device=self.device).expand(len(self), -1)
        above = unpack_bits(gather_rows(self.ancestor_bits, nodes), self.nodes)
        return torch.full_like(every, -1).scatter_reduce(1, self.depths, torch.where(above, every, -1), "amax")

    depths = Table(lambda batch: batch.layout.depths)
    """(batch, nodes): levels below the root"""
    parents = Table(lambda batch: batch.layout.parents)
    """(batch, nodes): -1 for roots and padding"""
    ancestor_bits = Table(lambda batch: batch.layout.ancestor_bits)
    """(batch, nodes, words) int32: the ancestors of every node as bits"""

    # Tables that only some verifiers read, int64 and padded with -1.

    lengths = Table(lambda batch: padded([tree.depth for tree in batch.trees]))
    """(batch,): the depth of each tree"""
    paths = Table(lambda batch: padded([tree.paths for tree in batch.trees]))
    """(batch, paths, depth + 1): the nodes of every drawn path, root first, in draw order"""
    children = Table(
        lambda batch: padded([tree.children for tree in batch.trees], (batch.nodes, batch.pad_shape.children))
    )
    """(batch, nodes, most children): the children of every node in draw order"""
    candidates = Table(
        lambda batch: padded([tree.candidates for tree in batch.trees], (batch.nodes, batch.pad_shape.children))
    )
    """(batch, nodes, most draws): the child that each draw below a node led to, in draw order, repeats kept"""
    levels = Table(lambda batch: padded([tree.topology.levels for tree in batch.trees], (0, batch.pad_shape.width)))
    """(batch, depth + 1, widest level): the nodes of every level"""
    postorder = Table(lambda batch: padded([tree.postorder for tree in batch.trees], (batch.nodes,)))
    """(batch, nodes): every node after its children, siblings in draw order"""
    forks = Table(lambda batch: padded([tree.topology.forks for tree in batch.trees], (batch.pad_shape.forks,)))
    """(batch, most forks): the nodes with more than one child, where drawn paths part"""
    trusted = Table(lambda batch: padded([int(tree.trusted) for tree in batch.trees]))
    """(batch,): 1 for forks whose first level needs no test (`DraftTree.trusted`), 0 for all other trees"""

    def host(self, name: str) -> Tensor:
        """A table on the host; tokens and shapes that were drafted on a device stay on the device."""
        assert self.source is None, "a batch of trees that was taken from another has no tables of its own"
        if self.laid is not None and name in TreeLayout._fields:
            found: Tensor = getattr(self.laid, name)
            return found
        if name == "tokens":
            return self.tokens if self.host_tokens is None else torch.from_numpy(self.host_tokens)
        if name not in self._host:  # kept: a recorded verdict reads shapes, then values
            self._host[name] = torch.from_numpy(ARRAYS[name](self))
        return self._host[name]

    @cached_property
    def widths(self) -> list[int]:
        """For each level the largest number of children of a node, which is the length of a loop over siblings."""
        widths = [self.pad_shape.children] * self.depth
        for tree in self.trees:
            for depth, below in zip(tree.topology.depths, tree.topology.children, strict=True):
                if below:
                    widths[depth] = max(widths[depth], len(below))
        return widths

    @cached_property
    def q(self) -> Tensor | None:
        """(batch, rows, vocabulary): row i is the distribution that the children of node i were drawn from; None if no
        tree was drawn."""
        if self.source is not None:
            source, rows = self.source
            return None if source.q is None else source.q[rows]
        drawn = [tree.q for tree in self.trees if tree.q is not None]
        if not drawn:
            return None
        if len(self.trees) == 1:
            return drawn[0].to(self.device)[None]  # a view, because copying rows of a large vocabulary takes time
        nothing = drawn[0].new_zeros(1, drawn[0].shape[1])
        return torch.nn.utils.rnn.pad_sequence(
            [(nothing if tree.q is None else tree.q).to(self.device) for tree in self.trees], batch_first=True
        )

    def q_rows(self, nodes: Tensor) -> Tensor:
        """(…, vocabulary): q of nodes (batch,) or (batch, n); the row of a node without children has no meaning."""
        assert self.q is not None
        return gather_rows(self.q, nodes.clamp(0, self.q.shape[1] - 1))

    def take(self, rows: Tensor) -> TreeBatch:
        """The batch of the trees `rows` (n,), which may repeat. Its tables are rows of the tables of this batch, so the
        host computes nothing again."""
        taken: TreeBatch = copy.copy(self)
        for name in ("q", *ARRAYS):
            taken.__dict__.pop(name, None)
        taken.tokens = self.tokens[rows]
        taken.source = (self, rows)
        return taken


@lru_cache(maxsize=16)
def shape_on(shape: Topology, device: torch.device) -> DeviceShape:
    """A shape that the host knows, copied to a device."""
    arrays = np.array(shape.parents), np.array(shape.depths), shape.bits
    return DeviceShape(*(torch.from_numpy(array).to(device) for array in arrays))


def padded_shape(shape: DeviceShape, nodes: int) -> DeviceShape:
    """The shape of a tree, padded to `nodes` nodes."""
    more, words = nodes - len(shape.parents), words_for(nodes) - shape.ancestor_bits.shape[1]
    if not more:
        return shape
    pad = torch.nn.functional.pad
    return DeviceShape(
        pad(shape.parents, (0, more), value=-1),
        pad(shape.depths, (0, more)),
        pad(shape.ancestor_bits, (0, words, 0, more)),
    )


ARRAYS = {name: part.array for name, part in vars(TreeBatch).items() if isinstance(part, Table)}
LOOKED_UP = tuple(name for name in ARRAYS if name not in TreeLayout._fields)
"""the tables that `TreeLayout` does not have"""
TABLES = ("tokens", *ARRAYS)
"""all tables that a verifier may read"""


def padded(lists: Sequence[Any], least: tuple[int, ...] = ()) -> NDArray[np.int64]:
    """Numbers, lists of numbers or lists of such lists as one array, padded with -1; `least` has the least sizes of its
    dimensions after the first."""

    def shape(item: Any) -> tuple[int, ...]:
        if isinstance(item, int):
            return ()
        inner = [shape(part) for part in item]
        return (len(item), *(max(sizes) for sizes in zip(*inner, strict=True)))

    def fill(place: Any, item: Any) -> None:
        if item and isinstance(item[0], int):
            place[: len(item)] = item
        else:
            for inside, part in zip(place, item, strict=False):
                fill(inside, part)

    first, *rest = shape(lists)
    sizes = [max(size, wanted) for size, wanted in zip(rest, least or rest, strict=True)]
    array = np.full((first, *sizes), -1, dtype=np.int64)
    fill(array, lists)
    return array
