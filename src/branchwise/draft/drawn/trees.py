"""Trees that are drawn on the device of the logits, level by level, without the host.

A draft model or a head supplies `Passes`: the logits after the roots, and then the logits after the nodes of each level
that have children. The cache rows of these nodes after a text never depend on what was drawn, so all levels of a tree
can be recorded as one CUDA graph, which is launched after the verdict.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from branchwise.core.rng import GAMMA, mix
from branchwise.core.sequence import SequenceState
from branchwise.core.tree import DraftTree
from branchwise.draft.base import Budget
from branchwise.draft.model.reading import BatchReading


class Choose(Protocol):
    """How tokens are chosen from logits."""

    def __call__(self, *given: Tensor, **options: int) -> tuple[Tensor, Tensor]:
        """Tokens and distributions. The first argument is the logits (batch, nodes, columns); each `TreeDraft` and its
        `Choose` agree on the others."""

    def keys(self, stream: int, draws: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
        """The keys of `draw_keys`; if no text draws, their values do not matter."""


class Texts(NamedTuple):
    """Texts in slots of the draft model or head, and what their draws depend on; (batch,) each."""

    slots: Tensor
    seeds: Tensor
    greedy: Tensor
    """1 for a text that takes the most probable tokens"""


class Drawn(NamedTuple):
    """Trees below the roots of texts."""

    tokens: Tensor
    """(batch, nodes) int64: the tokens that passes and verifiers read, root first"""
    told: Tensor
    """(batch, …) int64: what the host must know of the trees"""
    q: Tensor
    """(batch, nodes with children, vocabulary) float32; no rows if nothing is drawn"""


class Level(NamedTuple):
    """The nodes of a level that have children, and the places of their cache rows after those of their text."""

    first: int
    """the row of the first of these nodes, counted from the end of the text"""
    depths: Tensor
    """(nodes,): the depth of each node; 0 comes right after the text"""
    columns: Tensor
    """(rows,): the depths of all rows after the text so far, those of these nodes included"""
    seen: Tensor
    """(nodes, rows): which of these rows each node attends to"""
    above: Tensor
    """(nodes,): the index of each node's parent among the nodes of the pass before"""


class Roots(NamedTuple):
    """The roots that trees grow from."""

    positions: Tensor
    """(batch,) int64: the positions of the roots in their texts"""
    tokens: Tensor
    """(batch,): the tokens of the roots"""
    logits: Tensor
    """(batch, 1, columns): the logits after the roots"""


class Passes(ABC):
    """Gives the logits after the nodes of trees while these are drawn."""

    roots: Roots

    @abstractmethod
    def below(self, tokens: Tensor, level: int) -> Tensor:
        """(batch, nodes, columns): the logits after `tokens` (batch, nodes), which are `level` levels below the roots.
        Called for one level after the other."""


class TreeDraft(ABC):
    """Trees of a policy, drawn on the device of the logits."""

    depth: int
    """number of levels below the root"""
    below: int
    """number of cache rows that are written after a text and its root"""
    resident: bool
    """whether the host knows the shape of its trees before it knows what was drawn"""
    tells: bool = False
    """whether trees may fail (`fails`), so that the host must read `Drawn.told`"""

    def __init__(self, levels: Sequence[Level], device: torch.device) -> None:
        """`levels` are those below the roots that need a pass."""
        self.levels, self.device = levels, device

    @property
    def steps(self) -> int:
        """The most tokens that a text gains from one verdict."""
        return self.depth + 1

    @abstractmethod
    def serves(self, budgets: Sequence[Budget]) -> bool:
        """Whether its trees are as large as these budgets allow."""

    @abstractmethod
    def whole(self, budgets: Sequence[Budget]) -> bool:
        """Whether trees within these budgets need not be cut."""

    @abstractmethod
    def place(self, size: int, vocabulary: int) -> Drawn:
        """Tensors that the trees of `size` texts can be written to."""

    @abstractmethod
    def choice(self, reading: BatchReading, *, greedy: bool, drawn: bool, compile: bool) -> Choose:
        """How tokens are chosen."""

    @abstractmethod
    def grow(self, passes: Passes, choose: Choose, place: Drawn, texts: Texts) -> Drawn:
        """Draw trees below the roots of texts, and write them to `place`."""

    @abstractmethod
    def trees(self, found: Drawn, sequences: Sequence[SequenceState], budgets: Sequence[Budget]) -> list[DraftTree]:
        """The drawn trees, cut to budgets; there may be fewer budgets than rows."""

    def fails(self, told: Sequence[int], budgets: Sequence[Budget]) -> bool:
        """Whether the host has to grow trees within these budgets."""
        return False


def draw_keys(stream: int, draws: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    """(batch, draws): the keys of numbered draws (draws,) for texts with these seeds and positions of the root, as
    `SeededSampler` makes them."""
    return mix(mix(mix(seeds)[:, None] + (stream + draws)) + (positions * GAMMA)[:, None])
