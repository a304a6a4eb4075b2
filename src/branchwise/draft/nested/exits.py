"""The thresholds of a nested model: how sure an exit must be for a draft to leave at it.

A threshold of 0.5 is the paper's. Better thresholds are found from two measurements: how long a pass to each exit takes
on this machine, and for positions of held-out texts how sure each exit was and how likely its draft would have been
accepted (`exits.json`, written by `branchwise train nested`). They are chosen before anything is drafted. On a device,
where the host must not wait between two levels, one exit is chosen for all drafts by the same measurements.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from branchwise.errors import ModelError

USUAL = 0.5
NEVER = 2.0
"""the threshold of an exit that is not evaluated"""
TRIED = (0.0, 0.3, 0.5, 0.7, 0.8, 0.9, NEVER)
"""thresholds that are tried at every exit"""
DEPTH = 5
"""length of the chain for which thresholds are chosen"""
FILE = "exits.json"


@dataclass(frozen=True)
class Ladder:
    """Thresholds for all exits but the last, and the results that are expected with them."""

    thresholds: tuple[float, ...]
    cost: float | None = None
    """expected cost of a drafted token, as a share of a pass of the target"""
    acceptance: float | None = None
    """expected probability that a drafted token is accepted"""
    shares: tuple[float, ...] = ()
    """expected share of the drafted tokens that leave at each exit"""


def read_samples(folder: Path | None, exits: Sequence[int]) -> NDArray[np.float64] | None:
    """(places, 2, exits): how sure each exit was, and its acceptance; None if nothing was measured."""
    if folder is None or not (folder / FILE).is_file():
        return None
    try:
        known = json.loads((folder / FILE).read_text())
        samples = np.array(known["samples"], dtype=np.float64).reshape(-1, 2, len(known["exits"]))
        if known["exits"] != list(exits) or not len(samples):
            raise ValueError("it is of other exits")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelError(f"{folder / FILE} cannot be used: {error}. Remove it, or name a threshold.") from None
    return samples


def fixed_ladder(exits: int, threshold: float) -> Ladder:
    return Ladder((threshold,) * (exits - 1))


def best_ladder(samples: NDArray[np.float64], segments: Sequence[float], head: float, depth: int = DEPTH) -> Ladder:
    """The thresholds with the most expected tokens in the time of a pass of the target, for a chain of this depth.

    `segments` and `head` are the costs of each segment and of the head, as shares of a pass of the target.
    """
    worth, found = -1.0, fixed_ladder(len(segments), NEVER)
    for thresholds in itertools.product(TRIED, repeat=len(segments) - 1):
        ladder = expected(samples, segments, head, thresholds)
        assert ladder.acceptance is not None
        assert ladder.cost is not None
        if (speed := _speed(ladder.acceptance, ladder.cost, depth)) > worth:
            worth, found = speed, ladder
    return found


def best_exit(samples: NDArray[np.float64], costs: Sequence[float], depth: int = DEPTH) -> int:
    """The index of the exit with the most expected tokens in the time of a pass of the target, if all drafts leave at
    it.

    `costs` are those of a drafted token by exit, as shares of a pass of the target.
    """
    accepted = samples[:, 1].mean(axis=0)
    return max(range(len(costs)), key=lambda number: _speed(accepted[number], costs[number], depth))


def _speed(acceptance: float, cost: float, depth: int) -> float:
    """Expected tokens in the time of a pass of the target, for a chain of this depth."""
    return sum(acceptance**level for level in range(depth + 1)) / (1 + depth * cost)


def expected(
    samples: NDArray[np.float64], segments: Sequence[float], head: float, thresholds: Sequence[float]
) -> Ladder:
    """The ladder of these thresholds, with what it would have cost and gained at the places of the samples."""
    sure, accepted = samples[:, 0], samples[:, 1]
    left = np.ones(len(sure), dtype=bool)
    cost = acceptance = 0.0
    shares = []
    for number, threshold in enumerate((*thresholds, 0.0)):
        cost += segments[number] * float(left.mean())
        leaves = left & (sure[:, number] >= threshold)
        cost += head * float(left.mean()) if threshold <= 1 else 0.0
        acceptance += float((accepted[:, number] * leaves).mean())
        shares.append(float(leaves.mean()))
        left = left & ~leaves
    return Ladder(tuple(thresholds), cost, acceptance, tuple(shares))
