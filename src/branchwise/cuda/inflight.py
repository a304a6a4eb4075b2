"""A forward pass enqueued before the previous verdict reaches the host.

A verdict is in device memory a while before the host has read it. If a drafter knows its next trees by then, all that a
pass over them still lacks is how long each text has become and which token it ends with, and the device knows both. So
the pass is enqueued right after the verdict, and the device never waits for the host.

The pass counts for nothing until the verdict is committed, and only for these sequences and trees.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from torch import Tensor

from branchwise.backends.base import Scored
from branchwise.core.batch import TreeBatch
from branchwise.core.sequence import SequenceState


@dataclass(eq=False)
class InflightPass:
    """The sequences and trees of an enqueued pass, and where its results will be."""

    sequences: tuple[SequenceState, ...]
    batch: TreeBatch
    scored: Scored
    intact: Callable[[], bool]
    """whether no other pass has overwritten the results and no slot has moved since"""
    committed: bool = False
    """whether the verdict in front of it was committed"""

    def result(self, sequences: Sequence[SequenceState], batch: TreeBatch) -> Scored | None:
        if not (self.committed and self.intact() and self._serves(sequences, batch)):
            return None
        if batch.host_tokens is None:
            batch.tokens = self.batch.tokens
        return self.scored

    def _serves(self, sequences: Sequence[SequenceState], batch: TreeBatch) -> bool:
        mine, theirs = self.batch.trees, batch.trees
        if self.sequences != tuple(sequences) or (self.batch.nodes, len(mine)) != (batch.nodes, len(theirs)):
            return False
        # Any bare root serves for another one: the device knows which token it is.
        return all(one is other or len(one) == len(other) == 1 for one, other in zip(mine, theirs, strict=True))


def advance_inputs(
    tokens: Tensor, positions: Tensor, lengths: Tensor, starts: Tensor, paths: Tensor, following: Tensor
) -> None:
    """Move the inputs of a pass, (batch, nodes) and (batch,), behind accepted paths (batch, steps) padded with -1, each
    of which is followed by one more token, the new root."""
    kept = (paths >= 0).sum(dim=1, dtype=lengths.dtype)
    lengths += kept
    starts += kept
    positions += kept[:, None]
    tokens[:, 0] = following


@contextmanager
def inputs_restored(*places: Tensor) -> Iterator[None]:
    """Undo what `advance_inputs` does meanwhile: a recording calls it several times."""
    inputs = places[:4]
    before = [place.clone() for place in inputs]
    try:
        yield
    finally:
        for place, values in zip(inputs, before, strict=True):
            place.copy_(values)
