"""Trees that are drawn where the logits are, level by level, without the host.

Whoever drafts supplies `Passes`: what follows the roots, and then what follows the nodes of each level that have
children. Where the rows of these stand behind a text never depends on what was drawn, so all levels of a tree can be
recorded as one CUDA graph behind the verdict.
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
    """How tokens are chosen."""

    def __call__(self, *given: Tensor, **options: int) -> tuple[Tensor, Tensor]:
        """Tokens and distributions of logits (batch, nodes, columns), the first of what is given; what else it is given
        is between it and its trees."""

    def keys(self, stream: int, draws: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
        """`draw_keys`, if a text draws; else nobody looks at them."""


class Texts(NamedTuple):
    """Texts in the slots of whoever drafts, and what their draws depend on; (batch,) each."""

    slots: Tensor
    seeds: Tensor
    greedy: Tensor
    """1 for a text that takes the most probable tokens"""


class Drawn(NamedTuple):
    """Trees below the roots of texts."""

    tokens: Tensor
    """(batch, nodes) int64: what passes and verifiers read, root first"""
    told: Tensor
    """(batch, …) int64: what the host has to know of them"""
    q: Tensor
    """(batch, nodes with children, vocabulary) float32; nothing where nothing is drawn"""


class Level(NamedTuple):
    """The nodes of a level that have children, and where their rows stand behind those of their text."""

    first: int
    """the row of the first of them"""
    depths: Tensor
    """(nodes,): 0 comes right after the text"""
    columns: Tensor
    """(rows,): the depths of all rows behind the text, theirs included"""
    seen: Tensor
    """(nodes, rows): which of these each of them attends to"""
    above: Tensor
    """(nodes,): which of the nodes that were passed over before them are their parents"""


class Roots(NamedTuple):
    """What trees grow from."""

    positions: Tensor
    """(batch,) int64: the places of the roots in their texts"""
    tokens: Tensor
    """(batch,)"""
    logits: Tensor
    """(batch, 1, columns): what follows them"""


class Passes(ABC):
    """What may follow the nodes of trees while they are drawn."""

    roots: Roots

    @abstractmethod
    def below(self, tokens: Tensor, level: int) -> Tensor:
        """(batch, nodes, columns): the logits after these tokens (batch, nodes), which stand so many levels below the
        roots. Every level follows the one above it."""


class TreeDraft(ABC):
    """Trees of a policy, drawn where the logits are."""

    depth: int
    """levels"""
    below: int
    """rows behind a text and its root that are written"""
    resident: bool
    """whether the host knows the shape of its trees before it knows what was drawn"""
    tells: bool = False
    """whether trees may fail, which the host has to be told"""

    def __init__(self, levels: Sequence[Level], device: torch.device) -> None:
        """Levels below the roots that are passed over."""
        self.levels, self.device = levels, device

    @property
    def steps(self) -> int:
        """Tokens that a text gains at most from one verdict."""
        return self.depth + 1

    @abstractmethod
    def serves(self, budgets: Sequence[Budget]) -> bool:
        """Whether its trees are as large as these budgets allow."""

    @abstractmethod
    def whole(self, budgets: Sequence[Budget]) -> bool:
        """Whether trees within these budgets need not be cut."""

    @abstractmethod
    def place(self, size: int, vocabulary: int) -> Drawn:
        """Where the trees of so many texts are written."""

    @abstractmethod
    def choice(self, reading: BatchReading, *, greedy: bool, drawn: bool, compile: bool) -> Choose:
        """How tokens are chosen."""

    @abstractmethod
    def grow(self, passes: Passes, choose: Choose, place: Drawn, texts: Texts) -> Drawn:
        """Draw trees below the ends of texts, and write them to their `place`."""

    @abstractmethod
    def trees(self, found: Drawn, sequences: Sequence[SequenceState], budgets: Sequence[Budget]) -> list[DraftTree]:
        """What was drawn, within budgets; there may be fewer budgets than rows."""

    def fails(self, told: Sequence[int], budgets: Sequence[Budget]) -> bool:
        """Whether the host has to grow trees within these budgets."""
        return False


def draw_keys(stream: int, draws: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    """(batch, draws): the keys of numbered draws (draws,) for texts with these seeds and positions of the root, as
    `SeededSampler` makes them."""
    return mix(mix(mix(seeds)[:, None] + (stream + draws)) + (positions * GAMMA)[:, None])
