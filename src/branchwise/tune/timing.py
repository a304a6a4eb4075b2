"""The rig that times passes: open sequences of a target, and trees of any size to score after them."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator, Sequence

import torch

from branchwise.backends.base import Target
from branchwise.core.batch import TreeBatch
from branchwise.core.sequence import SequenceState
from branchwise.core.tree import DraftTree
from branchwise.progress import Progress
from branchwise.tune.curve import Turn

WARM_UPS = 2
"""untimed passes for each size: libraries choose their kernels on first use"""

Clock = Callable[[], float]


class TimingRig:
    """Times passes of a target over trees of any size."""

    def __init__(
        self, target: Target, sequences: Sequence[SequenceState], repeat: int, clock: Clock, progress: Progress
    ) -> None:
        self.target = target
        self.sequences = sequences
        self.repeat = repeat
        self.clock = clock
        self.progress = progress
        self._random = random.Random(1)
        self._batches: dict[int, TreeBatch] = {}

    def turns(self, sizes: Sequence[int], purpose: str) -> list[Turn]:
        """Time every size once a turn."""
        for nodes in sizes:
            if nodes not in self._batches:
                self._batches[nodes] = self._batch(nodes)
                for _ in range(WARM_UPS):
                    self._time(nodes)
        order = list(sizes)
        turns: list[Turn] = []
        for number in range(1, self.repeat + 1):
            self._random.shuffle(order)
            turns.append({nodes: self._time(nodes) for nodes in order})
            self.progress(purpose, number, self.repeat)
        return turns

    def _batch(self, nodes: int) -> TreeBatch:
        trees = [
            DraftTree.chain([sequence.root, *_random_tokens(self._random, self.target, nodes - 1)])
            for sequence in self.sequences
        ]
        return TreeBatch(trees, self.target.device)

    def _time(self, nodes: int) -> float:
        self._wait()
        start = self.clock()
        self.target.score(self.sequences, self._batches[nodes])
        self._wait()
        return self.clock() - start

    def _wait(self) -> None:
        if self.target.device.type == "cuda":
            torch.cuda.synchronize(self.target.device)


@contextlib.contextmanager
def opened(target: Target, batch: int, context: int) -> Iterator[list[SequenceState]]:
    """Sequences of random tokens, all different: in a mixture of experts equal ones would use the same experts."""
    rng = random.Random(0)
    sequences: list[SequenceState] = []
    try:
        for _ in range(batch):
            sequence = SequenceState(_random_tokens(rng, target, context))
            target.open(sequence)
            sequences.append(sequence)
        yield sequences
    finally:
        for sequence in reversed(sequences):
            target.close(sequence)


def _random_tokens(rng: random.Random, target: Target, count: int) -> list[int]:
    return [rng.randrange(target.vocabulary) for _ in range(count)]
