"""Measures t(n): passes over the sizes that fit, then over those where the cost jumps, then to confirm the jumps."""

from __future__ import annotations

import contextlib
import math
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median

import numpy as np
import torch

from branchwise.backends.base import Target
from branchwise.control.costs import cost_model_of
from branchwise.core.batch import TreeBatch
from branchwise.core.sequence import SequenceState
from branchwise.core.tree import DraftTree
from branchwise.errors import UsageError
from branchwise.progress import Progress, silent
from branchwise.tune.costs import Cliff, Costs, Point, keep, key_of, recall

SIZES = (1, 2, 4, 8, 9, 16, 17, 24, 32, 33, 48, 64, 65, 96, 128)
"""the sizes timed by default: mostly powers of two, and one more node where tiles end, since stairs that are timed at
their edges alone look like a line"""
MOST_PROBES = 24
"""the most pairs of sizes that are added in search of cliffs"""
PROBES_AT_ONCE = 8
MOST_CLIFFS = 8
FEWEST_TURNS = 3
"""the least number of turns; a median of fewer is chance"""
WARM_UPS = 2
"""untimed passes for each size: libraries choose their kernels on first use"""

CLIFF = 0.1
"""the least rise from one size to the next that can be a cliff, as a share of the cost before it"""
STEEPER = 2.0
"""how much more a cliff must rise than the sizes beside it"""
ERRORS = 3.0
"""how many standard errors of zero a rise must exceed"""

Turn = Mapping[int, float]
"""nodes -> seconds"""
Clock = Callable[[], float]


def measure(
    target: Target,
    *,
    model: str | None = None,
    batch: int = 1,
    context: int = 512,
    nodes: Sequence[int] | None = None,
    repeat: int = 9,
    fresh: bool = False,
    clock: Clock = time.perf_counter,
    progress: Progress = silent,
) -> Costs:
    """Time passes over trees of different sizes after `context` tokens, for a batch of `batch` sequences.

    `nodes` are the sizes to begin with (by default all of `SIZES` that fit); `repeat` passes are timed for each. The
    time is wall clock until the device is done, since a step also pays for the host's work. Costs that were measured
    before under the same conditions come from the cache, unless `fresh`.
    """
    sizes = _fitting(target, batch, context, nodes)
    if repeat < FEWEST_TURNS:
        raise UsageError(f"repeat must be at least {FEWEST_TURNS}, not {repeat}.")
    key = key_of(target, model, batch, context, sizes, repeat)
    if not fresh and (known := recall(key)) is not None:
        _tell(target, known)
        return known
    with opened(target, batch, context) as sequences:
        rig = TimingRig(target, sequences, repeat, clock, progress)
        curve = Curve()
        curve.add(rig.turns(sizes, "timing passes"))
        _refine(rig, curve)
        cliffs = _confirmed(rig, curve)
    now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    costs = Costs(curve.points(), cliffs, key, now)
    keep(costs)
    _tell(target, costs)
    return costs


def _tell(target: Target, costs: Costs) -> None:
    """Tell the costs to the drafters of this target that choose how many nodes pay."""
    model = cost_model_of(target.info, costs.key.batch)
    for point in costs.points:
        model.tell(point.nodes, point.seconds)


def _fitting(target: Target, batch: int, context: int, nodes: Sequence[int] | None) -> tuple[int, ...]:
    """The sizes to begin with, one node always among them, checked against what the target can hold."""
    for name, value in (("batch", batch), ("context", context), ("nodes", min(nodes, default=0) if nodes else 1)):
        if value < 1:
            raise UsageError(f"{name} must be at least 1, not {value}.")
    if target.free_slots < batch:
        raise UsageError(
            f"A batch of {batch} needs as many slots and {target.free_slots} are free; ask for a smaller batch, "
            "or load with a larger max_batch."
        )
    most = min(target.max_nodes, target.context - context)
    if most < 1:
        raise UsageError(f"{context} tokens and a tree do not fit into a context of {target.context}; ask for fewer.")
    if nodes and max(nodes) > most:
        raise UsageError(
            f"A tree of {max(nodes)} nodes behind {context} tokens is more than the target holds; "
            f"ask for at most {most} nodes, or for a shorter context."
        )
    wanted = nodes or [*(size for size in SIZES if size <= most), min(most, SIZES[-1])]
    return tuple(sorted({1, *wanted}))


def _refine(rig: TimingRig, curve: Curve) -> None:
    """Split intervals where the cost jumps. Both ends are timed again with the new sizes, so that all share turns."""
    left = MOST_PROBES
    while suspects := curve.suspects()[: min(left, PROBES_AT_ONCE)]:
        probes = [(a, _roundest(a, b), b) for a, b in suspects]
        sizes = {nodes for a, place, b in probes for nodes in (a, place, place + 1, b)}
        curve.add(rig.turns(sorted(sizes), "looking for cliffs"))
        for probe in probes:
            curve.judge(*probe)
        left -= len(probes)


def _roundest(a: int, b: int) -> int:
    """The size from a to b - 2 with the most trailing zero bits, since tiles end at such sizes."""
    return max(range(a, b - 1), key=lambda nodes: nodes & -nodes)


def _confirmed(rig: TimingRig, curve: Curve) -> tuple[Cliff, ...]:
    """The cliffs among the steepest edges, judged by fresh turns over each edge and the sizes beside it."""
    edges = curve.edges()[:MOST_CLIFFS]
    if not edges:
        return ()
    largest = curve.points()[-1].nodes
    sizes = sorted({nodes for edge in edges for nodes in range(edge - 2, edge + 2) if 1 <= nodes <= largest})
    turns = rig.turns(sizes, "confirming cliffs")
    curve.add(turns)
    return tuple(
        Cliff(edge, median(turn[edge] / turn[edge - 1] for turn in turns))
        for edge in sorted(edges)
        if is_cliff(edge, turns)
    )


@dataclass(frozen=True)
class TimingRig:
    """Times passes of a target over trees of any size."""

    target: Target
    sequences: Sequence[SequenceState]
    repeat: int
    clock: Clock
    progress: Progress
    _random: random.Random = field(default_factory=lambda: random.Random(1))
    _batches: dict[int, TreeBatch] = field(default_factory=dict)

    def turns(self, sizes: Sequence[int], purpose: str) -> list[Turn]:
        """Time every size once a turn."""
        for nodes in sizes:
            if nodes not in self._batches:
                chains = [[s.root, *_random_tokens(self._random, self.target, nodes - 1)] for s in self.sequences]
                self._batches[nodes] = TreeBatch([DraftTree.chain(tokens) for tokens in chains], self.target.device)
                for _ in range(WARM_UPS):
                    self._time(nodes)
        order = list(sizes)
        turns: list[Turn] = []
        for number in range(1, self.repeat + 1):
            self._random.shuffle(order)
            turns.append({nodes: self._time(nodes) for nodes in order})
            self.progress(purpose, number, self.repeat)
        return turns

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
    """Sequences of random tokens. They differ, because equal ones would use the same experts of a mixture."""
    rng = random.Random(0)
    sequences = [SequenceState(_random_tokens(rng, target, context)) for _ in range(batch)]
    with contextlib.ExitStack() as closing:
        for sequence in sequences:
            target.open(sequence)
            closing.callback(target.close, sequence)
        yield sequences


def _random_tokens(rng: random.Random, target: Target, count: int) -> list[int]:
    return [rng.randrange(target.vocabulary) for _ in range(count)]


class Curve:
    """What was timed so far, every turn divided by its pace."""

    def __init__(self) -> None:
        self._samples: dict[int, list[float]] = {}
        self._slopes: set[tuple[int, int]] = set()

    def add(self, turns: Sequence[Turn]) -> None:
        """Add turns over the same sizes; sizes that were timed before show how the pace has changed."""
        usual = {n: self.seconds(n) for n in turns[0] if n in self._samples}
        usual = usual or {n: median(turn[n] for turn in turns) for n in turns[0]}
        for turn in turns:
            pace = median(turn[n] / seconds for n, seconds in usual.items())
            for n, seconds in turn.items():
                self._samples.setdefault(n, []).append(seconds / pace)

    def seconds(self, nodes: int) -> float:
        return median(self._samples[nodes])

    def points(self) -> tuple[Point, ...]:
        return tuple(Point(nodes, *quartiles(times)) for nodes, times in sorted(self._samples.items()))

    def suspects(self) -> list[tuple[int, int]]:
        """Sizes between which the cost rises enough to hide a cliff, the steepest first; without proven slopes."""
        return [(a, b) for a, b in self._rises(CLIFF) if b - a > 1 and (a, b) not in self._slopes]

    def edges(self) -> list[int]:
        """Sizes that may be cliffs, the highest first: they cost more than the size before."""
        return [b for a, b in self._rises(CLIFF / 2) if b - a == 1]

    def _rises(self, share: float) -> list[tuple[int, int]]:
        """Neighbouring sizes between which the cost rises by this share and by more than noise, the steepest first."""
        found = []
        for a, b in pairwise(sorted(self._samples)):
            rise = self.seconds(b) - self.seconds(a)
            noise = math.hypot(_error(self._samples[a]), _error(self._samples[b]))
            if rise > max(share * self.seconds(a), ERRORS * noise):
                found.append((rise / self.seconds(a), a, b))
        return [(a, b) for _, a, b in sorted(found, reverse=True)]

    def judge(self, a: int, place: int, b: int) -> None:
        """Record the rise from a to b as a slope if the sizes near its middle lie on the line between both ends. A
        cliff between a and b would lift them off the line by half its height.

        Two neighbouring sizes must lie on it: of stairs that begin at a and at the middle, every second size does.
        """
        share = (place - a) / (b - a)
        if 0.25 <= share <= 0.75 and all(self._on_line(a, nodes, b) for nodes in (place, place + 1)):
            self._slopes |= {(a, place), (place + 1, b)}

    def _on_line(self, a: int, nodes: int, b: int) -> bool:
        line = self.seconds(a) + (nodes - a) / (b - a) * (self.seconds(b) - self.seconds(a))
        return abs(self.seconds(nodes) - line) < CLIFF / 4 * line


def is_cliff(edge: int, turns: Sequence[Turn]) -> bool:
    """Whether the cost jumps at this size. Differences are taken within a turn, where the machine had one pace."""
    rises = [turn[edge] - turn[edge - 1] for turn in turns]
    beside = [
        median(turn[nodes] - turn[nodes - 1] for turn in turns)
        for nodes in (edge - 1, edge + 1)
        if nodes in turns[0] and nodes - 1 in turns[0]
    ]
    least = median(rises) - ERRORS * _error(rises)
    return median(rises) >= CLIFF * median(turn[edge - 1] for turn in turns) and least > STEEPER * max([0.0, *beside])


def _error(values: Sequence[float]) -> float:
    """The standard error of a median, from the median distance to it, which outliers do not move."""
    middle = median(values)
    deviation = 1.4826 * median(abs(value - middle) for value in values)
    return 1.2533 * deviation / math.sqrt(len(values))


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """The median, and the values below and above it between which half of all lie."""
    low, middle, high = np.quantile(values, (0.25, 0.5, 0.75)).tolist()
    return middle, low, high
