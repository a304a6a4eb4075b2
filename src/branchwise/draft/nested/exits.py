"""Where a draft leaves a nested model: how sure an exit must be.

A threshold of 0.5 is the paper's. Better ones are found from two measurements: what a pass to each exit takes on this
machine, and for places of held-out texts how sure each exit was and how likely its draft would have been accepted
(`exits.json`, written by `branchwise train nested`). They are chosen before anything is drafted. Where a host must not
look between two levels, one exit is chosen for all drafts by the same measurements.
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
"""the threshold of an exit at which nobody looks"""
TRIED = (0.0, 0.3, 0.5, 0.7, 0.8, 0.9, NEVER)
DEPTH = 5
"""tokens of the chain for which thresholds are best"""
FILE = "exits.json"


@dataclass(frozen=True)
class Ladder:
    """Thresholds for all exits but the last, and what is expected of them."""

    thresholds: tuple[float, ...]
    cost: float | None = None
    """of a drafted token, as a share of a pass of the target"""
    acceptance: float | None = None
    shares: tuple[float, ...] = ()
    """of the tokens, by the exit at which they leave"""


def read_samples(folder: Path | None, exits: Sequence[int]) -> NDArray[np.float64] | None:
    """(places, 2, exits): how sure each exit was, and its acceptance; None where nothing was measured."""
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
    """The thresholds with the most tokens in the time of a pass of the target, for a chain of this depth.

    `segments` and `head` are shares of such a pass.
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
    """The number of the exit with the most tokens in the time of a pass of the target, if all drafts leave there.

    `costs` are those of a drafted token by exit, as shares of such a pass.
    """
    accepted = samples[:, 1].mean(axis=0)
    return max(range(len(costs)), key=lambda number: _speed(accepted[number], costs[number], depth))


def _speed(acceptance: float, cost: float, depth: int) -> float:
    """Tokens in the time of a pass of the target, in a chain of this depth."""
    return sum(acceptance**level for level in range(depth + 1)) / (1 + depth * cost)


def expected(
    samples: NDArray[np.float64], segments: Sequence[float], head: float, thresholds: Sequence[float]
) -> Ladder:
    """What these thresholds would have done at the places of the samples."""
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
