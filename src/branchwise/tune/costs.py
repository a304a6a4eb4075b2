"""What was measured: t(n) at, between and beyond the sizes that were timed, the sizes where it jumps, and the cache."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch

from branchwise.backends.base import Target
from branchwise.errors import BranchwiseError, ModelError, UsageError
from branchwise.models.cache import cache_dir, workspace
from branchwise.provenance import PACKAGE, device_name, source_digest, versions

VERSION = 1
"""the version of the files in the cache"""


@dataclass(frozen=True)
class Key:
    """What was measured, where and how: everything that would make the numbers stale."""

    model: str
    fingerprint: str
    """identifies the model, since two models may share a name"""
    weight_bytes: int | None
    dtype: str
    precision: str
    """the precision of float32 matrix products"""
    compiled: bool
    """whether passes were fused; only a GPU does that"""
    device: str
    threads: int
    batch: int
    context: int
    nodes: tuple[int, ...]
    repeat: int
    versions: Mapping[str, str]
    source: str
    """digest of our own code that runs in a pass: a source tree changes between versions"""

    @property
    def path(self) -> Path:
        digest = hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()
        return cache_dir() / "tune" / f"{digest[:32]}.json"


@dataclass(frozen=True)
class Point:
    """The cost of one size, divided by the pace of the machine; half of the passes lie between `low` and `high`."""

    nodes: int
    seconds: float
    low: float
    high: float


@dataclass(frozen=True)
class Cliff:
    nodes: int
    """the first size on the dear side"""
    times: float
    """its cost, as a multiple of the cost of the size before"""

    @property
    def stay_at(self) -> int:
        return self.nodes - 1


@dataclass(frozen=True)
class Costs:
    """t(n) on one machine, for one model, dtype, batch and context. Nodes are counted per sequence, root included."""

    points: tuple[Point, ...]
    """the measured sizes, the smallest first, from one node on"""
    cliffs: tuple[Cliff, ...]
    """the cliffs, at the smallest size first"""
    key: Key
    measured: str
    """the time of the measurement, in UTC"""
    remembered: bool = field(default=False, compare=False)
    """whether the costs were read from the cache rather than measured now"""

    def __post_init__(self) -> None:
        sizes = [point.nodes for point in self.points]
        if not sizes or sizes[0] != 1 or any(a >= b for a, b in pairwise(sizes)):
            raise UsageError(f"Costs start with one node and go on by size, not {sizes}.")
        if not all(math.isfinite(point.seconds) and point.seconds > 0 for point in self.points):
            raise UsageError("Every cost must be a positive number of seconds.")

    def seconds(self, nodes: float) -> float:
        """The cost of a pass over n nodes: as measured, on the line between two points, or beyond the last one."""
        if nodes < 1:
            raise UsageError(f"A pass scores at least one node, not {nodes}.")
        last = self.points[-1]
        if nodes > last.nodes:
            return last.seconds + self._slope * (nodes - last.nodes)
        sizes, seconds = zip(*((point.nodes, point.seconds) for point in self.points), strict=True)
        return float(np.interp(nodes, sizes, seconds))

    def ratio(self, nodes: float) -> float:
        """The cost of a pass over n nodes in passes over one."""
        return self.seconds(nodes) / self.points[0].seconds

    @property
    def _slope(self) -> float:
        """Seconds per node at the end, over the second half of all sizes: the last two alone may be a cliff."""
        last = self.points[-1]
        if last.nodes == 1:
            return last.seconds  # with one size alone, assume that every node costs a pass
        middle = [point for point in self.points if 2 * point.nodes <= last.nodes][-1]
        return max(0.0, (last.seconds - middle.seconds) / (last.nodes - middle.nodes))


def key_of(target: Target, model: str | None, batch: int, context: int, nodes: tuple[int, ...], repeat: int) -> Key:
    info = target.info
    return Key(
        model=model or info.name,
        fingerprint=info.fingerprint,
        weight_bytes=info.weight_bytes,
        compiled=info.execution.compile,
        dtype=str(info.dtype).removeprefix("torch."),
        precision=torch.get_float32_matmul_precision(),
        device=device_name(target.device),
        threads=torch.get_num_threads(),
        batch=batch,
        context=context,
        nodes=nodes,
        repeat=repeat,
        versions=versions(),
        source=source_digest(*(PACKAGE / folder for folder in ("backends", "core", "cuda", "tune"))),
    )


def recall(key: Key) -> Costs | None:
    """The cached costs, or None: a damaged file, or one with another key, counts as missing."""
    try:
        stored = json.loads(key.path.read_text(encoding="utf-8"))
        if stored["version"] != VERSION or stored["key"] != json.loads(json.dumps(asdict(key))):
            return None
        return Costs(
            points=tuple(Point(**point) for point in stored["points"]),
            cliffs=tuple(Cliff(**cliff) for cliff in stored["cliffs"]),
            key=key,
            measured=str(stored["measured"]),
            remembered=True,
        )
    except (OSError, ValueError, KeyError, TypeError, BranchwiseError):
        return None


def keep(costs: Costs) -> None:
    """Write a temporary file and rename it. If that fails, the next run measures again."""
    path = costs.key.path
    whole = asdict(costs)
    del whole["remembered"]
    with contextlib.suppress(ModelError), workspace() as work:
        (work / path.name).write_text(json.dumps({"version": VERSION, **whole}), encoding="utf-8")
        path.parent.mkdir(exist_ok=True)
        os.replace(work / path.name, path)
