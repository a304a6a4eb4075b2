"""The target: the model whose distribution is kept, behind five verbs.

    open(sequence, tell)       take a slot and write keys and values of all tokens but the last, the first root; tells
                               what follows the last `tell` of those tokens
    fork(source, sequence)     the same for a sequence of the same tokens as an open one, by a copy of its rows
    score(sequences, batch of trees)   one forward pass over every node of every tree; row i is what follows node i
    commit(sequences, verdicts) keep the cache rows of the accepted paths
    close(sequence)            give the slot back

Between steps the cache of a sequence holds exactly its tokens without the last one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from branchwise.core.batch import TreeBatch
from branchwise.core.sequence import SequenceState
from branchwise.verify import Verdict


class Nodes(NamedTuple):
    """The nodes of a pass as a device knows them, padding included."""

    tokens: Tensor
    """(batch, nodes)"""
    seen: Tensor
    """(batch, nodes, words): ancestors as bits, its own included; padding has none"""
    slots: Tensor
    """(batch,): -1 for a tree without a text"""
    lengths: Tensor
    """(batch,): committed tokens before the root"""


@dataclass(frozen=True, eq=False)
class Scored:
    """What one pass of the target found."""

    logits: Tensor
    """(batch, nodes, vocabulary) of the unwarped model, in its dtype; row i is what follows node i"""
    hidden: Mapping[str, Tensor] = field(default_factory=dict)
    """tapped layer -> (batch, nodes, width)"""
    best: Tensor | None = None
    """(batch, nodes, 2, k) float32: the k best tokens behind every node and their probabilities, where a pass on a
    device was asked to tell them: the host reads these in place of whole rows"""

    nodes: Nodes | None = None
    """what was scored, where a device was told"""

    @cached_property
    def host_best(self) -> Tensor | None:
        """`best` on the host, read once."""
        return None if self.best is None else self.best.cpu()


class Target(Protocol):
    device: torch.device
    context: int
    """the most tokens that a sequence may hold"""
    max_nodes: int
    """the largest tree that one pass may score, root included"""

    @property
    def vocabulary(self) -> int: ...
    @property
    def free_slots(self) -> int:
        """how many more sequences can be opened"""

    def room(self, batch: int, nodes: int) -> tuple[int, int]:
        """for how many trees and nodes a pass is made where so many are wanted; trees without a sequence fill it up"""

    def open(self, sequence: SequenceState, tell: int = 0) -> Tensor:
        """(at most `tell`, vocabulary): the logits after the last tokens before the root."""

    def fork(self, source: SequenceState, sequence: SequenceState) -> None: ...
    def score(self, sequences: Sequence[SequenceState], batch: TreeBatch, taps: Sequence[str] = ()) -> Scored: ...
    def commit(self, sequences: Sequence[SequenceState], verdicts: Sequence[Verdict]) -> None:
        """Where it can, a target on a device moves rows before, by `update_on_device(scored, found)`, called while the
        verdicts are still there: nobody waits then. One that `scores_ahead` may behind that also begin a pass over the
        trees that come next, by `launch(sequences, batch of trees, found)`; a later `score` of these trees returns the
        same."""

    def close(self, sequence: SequenceState) -> None: ...
