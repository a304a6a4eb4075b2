"""A pass that begins before the host knows what it stands behind.

A verdict lies on the device a while before the host has read it. Where a drafter foresees its next trees there, all
that a pass over them still has to be told is how long each text has become and which token it ends with, and the device
knows both. So the pass is launched right behind the verdict, and a device need not wait for a host that keeps up.

It counts for nothing until the verdict is committed, and for no other texts and trees: whoever wants others scores them
as ever, over the same rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from torch import Tensor

from branchwise.backends.base import Scored
from branchwise.core.batch import TreeBatch
from branchwise.core.sequence import SequenceState


@dataclass(eq=False)
class InflightPass:
    """Which texts and trees a pass was begun for, and where it finds what follows them."""

    sequences: tuple[SequenceState, ...]
    batch: TreeBatch
    scored: Scored
    committed: bool = False
    """whether the verdict before it is"""

    def serves(self, sequences: Sequence[SequenceState], batch: TreeBatch) -> bool:
        mine, theirs = self.batch.trees, batch.trees
        same = self.committed and self.sequences == tuple(sequences)
        same &= (self.batch.nodes, len(mine)) == (batch.nodes, len(theirs))
        # A bare root is any other: it is the device that says which token it is.
        return same and all(
            one is other or len(one) == len(other) == 1 for one, other in zip(mine, theirs, strict=True)
        )


def step_on(
    tokens: Tensor, positions: Tensor, lengths: Tensor, starts: Tensor, paths: Tensor, following: Tensor
) -> None:
    """Move what a sheet tells, (batch, nodes) and (batch,), behind accepted paths (batch, steps) padded with -1, each
    of which is followed by one token more, the new root."""
    kept = (paths >= 0).sum(dim=1, dtype=lengths.dtype)
    lengths += kept
    starts += kept
    positions += kept[:, None]
    tokens[:, 0] = following


@contextmanager
def standing(*places: Tensor) -> Iterator[None]:
    """Let `step_on` move nothing for good meanwhile: what steps on twice is too far."""
    told = places[:4]
    before = [place.clone() for place in told]
    try:
        yield
    finally:
        for place, values in zip(told, before, strict=True):
            place.copy_(values)
