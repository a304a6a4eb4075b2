"""The drafted tree: what a drafter proposes and the target scores in one pass.

Node 0 is the root, the last emitted token, whose keys and values are not in the cache yet. A tree of one node is
plain decoding. Nodes stand in level order, so the mask of the first levels is the leading block of the whole mask.
"""

from __future__ import annotations

import copy
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from branchwise.errors import UsageError
from branchwise.rows import rows_at


class Draw(Enum):
    """How the children of a node came about; it decides which verifiers are exact."""

    FIXED = "fixed"
    """Chosen without chance from the context alone: n-grams, retrieval, the most probable tokens."""
    WITHOUT_REPLACEMENT = "without-replacement"
    """Siblings drawn one after the other from q, never the same token twice, kept in draw order."""
    PATHS = "paths"
    """K independent paths of full depth drawn from q and merged where they agree; `leaves` keeps the draws."""
    FORK = "fork-lossy"
    """A first level that may be the target's own, and one chain drawn from q below each; only lossy rules take it."""


WORD = 32
"""nodes whose bits share a word"""


def words_for(nodes: int) -> int:
    return -(-nodes // WORD)


def bits_of(marks: NDArray[np.bool_]) -> NDArray[np.int32]:
    """(…, words) from (…, columns): bit j % 32 of word j // 32 is column j."""
    columns = marks.shape[-1]
    packed = np.zeros((*marks.shape[:-1], 4 * words_for(columns)), dtype=np.uint8)
    packed[..., : -(-columns // 8)] = np.packbits(marks, axis=-1, bitorder="little")
    return packed.view("<i4")


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
        mask = np.eye(len(self), dtype=np.bool_)  # torch would take ten times as long, and paths rarely repeat a shape
        for node, parent in enumerate(self.parents[1:], start=1):
            mask[node] |= mask[parent]
        return torch.from_numpy(mask)

    @cached_property
    def bits(self) -> NDArray[np.int32]:
        """(nodes, words): the same mask as bits."""
        return bits_of(self.ancestors.numpy())

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
        """The shape of the first nodes. Its mask is a view of this one's, so nothing is built when a draft stops early.

        The sliced topology-aware mask of improved MCSD (Lu et al. 2024, arXiv 2409.10644): no node sees a later one, so
        what is left of the mask is its leading block.
        """
        if nodes == len(self):
            return self
        shape = Topology(self.parents[:nodes])
        shape._whole = self
        return shape


MOST_SHAPES = 1024
"""topologies that are kept at hand, those used last"""

_shapes: OrderedDict[tuple[int, ...], Topology] = OrderedDict()
_shapes_turn = threading.Lock()  # engines of several threads share the shapes


def topology(parents: tuple[int, ...]) -> Topology:
    """The shape of these parents. One that is kept is neither checked nor built again."""
    with _shapes_turn:
        shape = _shapes.get(parents)
        if shape is not None:
            _shapes.move_to_end(parents)
            return shape
    return _keep(Topology(parents))


def plant(parents: tuple[int, ...]) -> Topology:
    """A shape, kept with those of its first levels: whichever level a draft stops at, its mask is there already."""
    whole = topology(parents)
    for level in whole.levels[:-1]:
        _keep(whole.leading(level[-1] + 1))
    return whole


def _keep(shape: Topology) -> Topology:
    with _shapes_turn:
        _shapes[shape.parents] = shape
        _shapes.move_to_end(shape.parents)
        if len(_shapes) > MOST_SHAPES:
            _shapes.popitem(last=False)
    return shape


def branched(widths: Sequence[int], most: int = 512) -> tuple[int, ...]:
    """The parents of a tree in which every node at depth d has widths[d] children; whole levels up to `most` nodes."""
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
    """(rows, vocabulary) float32; row i is the law that the children of node i were drawn from. Nodes behind the last
    one that has children need no row."""
    leaves: tuple[int, ...] = ()
    """for PATHS: the last node of each drawn path, in draw order, repeats kept"""
    trusted: bool = False
    """for FORK: the first level was drawn from what the target wants, row 0 of q, and is not tested"""
    sources: tuple[str, ...] = ()
    """who proposed each node, where a drafter has several sources; the root's is empty"""

    def __post_init__(self) -> None:
        shape = self.topology  # checks the parents
        if self.tokens.shape != (len(shape),):
            raise UsageError(f"A tree of {len(shape)} nodes needs that many tokens, not {tuple(self.tokens.shape)}.")
        if self.sources and len(self.sources) != len(shape):
            raise UsageError(f"A tree of {len(shape)} nodes needs that many sources, not {len(self.sources)}.")
        if self.draw is Draw.FIXED and self.q is not None:
            raise UsageError("A fixed tree has no q: nothing was drawn.")
        if self.draw is not Draw.FIXED and len(shape) > 1 and self.q is None:
            raise UsageError(f"A tree drawn {self.draw.value} must carry q, the laws it was drawn from.")
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
        if self.trusted and (self.draw is not Draw.FORK or self.q is None):
            raise UsageError("Only a fork can be trusted, and it carries the law that its first level was drawn from.")
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

    @classmethod
    def root(cls, token: int) -> DraftTree:
        """The tree that drafts nothing."""
        return cls(torch.tensor([token]), (-1,))

    @classmethod
    def chain(cls, tokens: Sequence[int]) -> DraftTree:
        """One fixed path; tokens[0] is the root."""
        return cls(torch.tensor(tokens), chain_topology(len(tokens)).parents)

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
    def postorder(self) -> list[int]:
        """Every node behind its children, which come in draw order."""
        order, waiting, children = [], [0], self.children
        while waiting:  # from the root backwards: a node, then its children from the last to the first
            order.append(node := waiting.pop())
            waiting += children[node]
        return order[::-1]

    def cut(self, *, nodes: int, depth: int) -> DraftTree:
        """The leading part with at most `nodes` nodes (the root counts) and at most `depth` levels below the root.

        Only for fixed trees: dropping nodes that were drawn changes the law of what is left.
        """
        keep = sum(level <= depth for level in self.topology.depths[:nodes])
        if keep == len(self):
            return self
        if self.draw is not Draw.FIXED:
            raise UsageError(f"A tree drawn {self.draw.value} cannot be cut; draft it within the budget.")
        return DraftTree(self.tokens[:keep], self.parents[:keep], sources=self.sources[:keep])


@dataclass(frozen=True)
class Room:
    """The least size of what a forest holds: with the same room, the shapes of a batch are the same at every step."""

    nodes: int = 0
    inner: int = 0
    """nodes with children, and those before them"""
    children: int = 0
    """of one node"""
    width: int = 0
    """of one level"""
    forks: int = 0

    @classmethod
    def for_paths(cls, count: int, length: int) -> Room:
        """Whatever of `count` paths of `length` tokens agrees."""
        return cls(count * length + 1, count * (length - 1) + 1, children=count, width=count, forks=count - 1)


class Laid(NamedTuple):
    """How the nodes of a batch of trees lie, padded to one size: all that does not depend on tokens, on the host."""

    depths: NDArray[np.int64]
    """(batch, nodes): levels below the root"""
    parents: NDArray[np.int64]
    """(batch, nodes): -1 for roots and padding, so a search for children never finds padding"""
    seen: NDArray[np.int32]
    """(batch, nodes, words): the ancestors of every node, itself included, as bits. Padding has none."""


@lru_cache(maxsize=64)
def laid_out(shapes: tuple[Topology, ...], nodes: int) -> Laid:
    """Where trees keep their shapes from step to step, this is the same at every step."""
    depths = np.zeros((len(shapes), nodes), dtype=np.int64)
    parents = np.full((len(shapes), nodes), -1, dtype=np.int64)
    seen = np.zeros((len(shapes), nodes, words_for(nodes)), dtype=np.int32)
    for row, shape in enumerate(shapes):
        depths[row, : len(shape)] = shape.depths
        parents[row, : len(shape)] = shape.parents
        seen[row, : len(shape), : shape.bits.shape[1]] = shape.bits
    return Laid(depths, parents, seen)


class Forest:
    """The trees of a batch, padded to one size: what a pass of the target and a verifier work on.

    Padding nodes carry token 0, stand at the root's depth and have no parent, so that nothing ever reaches them.
    """

    def __init__(
        self,
        trees: Sequence[DraftTree],
        device: torch.device | str = "cpu",
        room: Room | None = None,
        roots: Sequence[int] | None = None,
    ) -> None:
        """`roots` stand in the place of the trees' own."""
        assert trees, "a forest has at least one tree"
        self.trees = tuple(trees)
        self.device = torch.device(device)
        self.room = room or Room()
        self.nodes = max(self.room.nodes, *map(len, trees))
        self.depth = max(tree.depth for tree in trees)
        self._roots = roots
        self._told: dict[str, Tensor] = {}
        self._source: tuple[Forest, Tensor] | None = None

    def __len__(self) -> int:
        return len(self.trees) if self._source is None else len(self._source[1])

    # Nodes. On the host they are arrays; on the device they are there when somebody asks.

    @cached_property
    def laid(self) -> Laid:
        """How the nodes lie, on the host."""
        return laid_out(tuple(tree.topology for tree in self.trees), self.nodes)

    @cached_property
    def told_tokens(self) -> NDArray[np.int64] | None:
        """(batch, nodes) on the host; None where trees were drafted on a device."""
        if any(tree.tokens.device.type != "cpu" for tree in self.trees):
            return None
        tokens = np.zeros((len(self.trees), self.nodes), dtype=np.int64)
        for row, tree in zip(tokens, self.trees, strict=True):
            row[: len(tree)] = tree.tokens.numpy()
        if self._roots is not None:
            tokens[:, 0] = self._roots
        return tokens

    @cached_property
    def depths(self) -> Tensor:
        """(batch, nodes) int64, levels below the root"""
        return torch.from_numpy(self.laid.depths).to(self.device)

    @cached_property
    def parents(self) -> Tensor:
        """(batch, nodes) int64; -1 for roots and padding"""
        return torch.from_numpy(self.laid.parents).to(self.device)

    @cached_property
    def seen(self) -> Tensor:
        """(batch, nodes, words) int32: the ancestors of every node as bits"""
        if self._source is not None:
            source, rows = self._source
            return source.seen[rows]
        return torch.from_numpy(self.laid.seen).to(self.device)

    @cached_property
    def tokens(self) -> Tensor:
        """(batch, nodes) int64"""
        if self.told_tokens is not None:
            return torch.from_numpy(self.told_tokens).to(self.device)
        drafted = self.drafted
        tokens = torch.nn.functional.pad(drafted, (0, self.nodes - drafted.shape[1]))  # a copy in any case
        if self._roots is not None:
            tokens[:, 0] = torch.tensor(self._roots, device=self.device)
        return tokens

    @property
    def drafted(self) -> Tensor:
        """(batch, at most nodes) int64: the tokens as they were drafted on a device; roots are not to be trusted."""
        rows = [tree.tokens.to(self.device, non_blocking=True) for tree in self.trees]
        if len(rows) == 1:
            return rows[0][None]
        alike = len(set(map(len, rows))) == 1
        return torch.stack(rows) if alike else torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)

    def children_of(self, nodes: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """For each tree the child of nodes[b] that carries tokens[b], and whether there is one; both (batch,)."""
        hits = (self.parents == nodes[:, None]) & (self.tokens == tokens[:, None])
        return hits.int().argmax(dim=1), hits.any(dim=1)

    # What verifiers look up, made when one asks for it. All are int64 and padded with -1.

    @cached_property
    def lengths(self) -> Tensor:
        """(batch,): how deep each tree is."""
        return self._table("lengths")

    @cached_property
    def paths(self) -> Tensor:
        """(batch, paths, depth + 1): the nodes of every drawn path, root first, in draw order."""
        return self._table("paths")

    @cached_property
    def children(self) -> Tensor:
        """(batch, nodes, most children): the children of every node in draw order."""
        return self._table("children")

    @cached_property
    def levels(self) -> Tensor:
        """(batch, depth + 1, widest level): the nodes of every level."""
        return self._table("levels")

    @cached_property
    def postorder(self) -> Tensor:
        """(batch, nodes): every node behind its children, which come in draw order."""
        return self._table("postorder")

    @cached_property
    def forks(self) -> Tensor:
        """(batch, most forks): the nodes with more than one child, where drawn paths part."""
        return self._table("forks")

    @cached_property
    def trusted(self) -> Tensor:
        """(batch,): 1 for forks whose first level is the target's own, 0 for all other trees."""
        return self._table("trusted")

    def told(self, name: str) -> Tensor:
        """A table as it is on the host; tokens that were drafted on a device stay there."""
        assert self._source is None, "a forest that was taken from another has no tables of its own"
        if name == "tokens" and self.told_tokens is None:
            return self.tokens
        if name not in self._told:  # a recorded verdict asks for shapes and for numbers
            array = self.told_tokens if name == "tokens" else getattr(self.laid, name, None)
            self._told[name] = torch.from_numpy(self._array(name) if array is None else array)
        return self._told[name]

    @cached_property
    def widths(self) -> list[int]:
        """The most children that a node has, level by level; how long the loops over siblings must be."""
        widths = [self.room.children] * self.depth
        for tree in self.trees:
            for depth, below in zip(tree.topology.depths, tree.topology.children, strict=True):
                if below:
                    widths[depth] = max(widths[depth], len(below))
        return widths

    @cached_property
    def q(self) -> Tensor | None:
        """(batch, rows, vocabulary): what the children of every node were drawn from; None where nothing was drawn."""
        if self._source is not None:
            source, rows = self._source
            return None if source.q is None else source.q[rows]
        drawn = [tree.q for tree in self.trees if tree.q is not None]
        if not drawn:
            return None
        if len(self.trees) == 1:
            return drawn[0].to(self.device)[None]  # a view: the rows of a large vocabulary are worth not copying
        nothing = drawn[0].new_zeros(1, drawn[0].shape[1])
        return torch.nn.utils.rnn.pad_sequence(
            [(nothing if tree.q is None else tree.q).to(self.device) for tree in self.trees], batch_first=True
        )

    def q_rows(self, nodes: Tensor) -> Tensor:
        """(…, vocabulary) for nodes (batch,) or (batch, n); a row without meaning where a node has no children."""
        assert self.q is not None
        return rows_at(self.q, nodes.clamp(0, self.q.shape[1] - 1))

    def take(self, rows: Tensor) -> Forest:
        """The forest of the given trees, which may repeat; nothing is looked up again on the host."""
        taken: Forest = copy.copy(self)
        for name in ("q", "seen", *LOOKED_UP):
            taken.__dict__.pop(name, None)
        taken.tokens, taken.parents, taken.depths = self.tokens[rows], self.parents[rows], self.depths[rows]
        taken._source = (self, rows)
        return taken

    def _table(self, name: str) -> Tensor:
        if self._source is not None:
            source, rows = self._source
            table: Tensor = getattr(source, name)[rows]
            return table
        return self.told(name).to(self.device)

    def _array(self, name: str) -> NDArray[np.int64]:
        room = self.room
        least = {
            "children": (self.nodes, room.children),
            "levels": (0, room.width),
            "postorder": (self.nodes,),
            "forks": (room.forks,),
        }
        return padded([LOOKED_UP[name](tree) for tree in self.trees], least.get(name, ()))


NODES = ("tokens", "parents", "depths", "seen")
"""what a forest knows of every node"""

LOOKED_UP: dict[str, Callable[[DraftTree], Any]] = {
    "lengths": lambda tree: tree.depth,
    "paths": lambda tree: tree.paths,
    "children": lambda tree: tree.children,
    "levels": lambda tree: tree.topology.levels,
    "postorder": lambda tree: tree.postorder,
    "forks": lambda tree: tree.topology.forks,
    "trusted": lambda tree: int(tree.trusted),
}
"""the tables of a forest, from each of its trees"""


def padded(lists: Sequence[Any], least: tuple[int, ...] = ()) -> NDArray[np.int64]:
    """Numbers, lists of numbers or lists of such lists as one array, filled up with -1 to at least a given size."""

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
