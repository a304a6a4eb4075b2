"""The cache of measured costs, each under a key of everything that would make it stale."""

from __future__ import annotations

import contextlib
import json
import os
from dataclasses import asdict, replace
from typing import Any

import torch

from branchwise.backends.base import Target
from branchwise.errors import BranchwiseError, ModelError
from branchwise.models.cache import workspace
from branchwise.provenance import PACKAGE, device_name, source_digest, versions
from branchwise.tune.costs import Cliff, Costs, Key, Point

VERSION = 1
"""of the files in the cache"""


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
        source=_source(),
    )


def _source() -> str:
    return source_digest(*(PACKAGE / folder for folder in ("backends", "core", "cuda", "tune")))


def recall(key: Key) -> Costs | None:
    """The cached costs, or None: a damaged file, or one with another key, counts as missing."""
    try:
        stored = json.loads(key.path.read_text(encoding="utf-8"))
        if stored["version"] != VERSION or stored["key"] != _as_json(asdict(key)):
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
    """Write a temporary file and rename it. A cache that cannot be written only makes the next run measure again."""
    path = costs.key.path
    whole = asdict(replace(costs, remembered=False))
    del whole["remembered"]
    with contextlib.suppress(ModelError), workspace() as work:
        (work / path.name).write_text(json.dumps({"version": VERSION, **whole}), encoding="utf-8")
        path.parent.mkdir(exist_ok=True)
        os.replace(work / path.name, path)


def _as_json(value: Any) -> Any:
    """As JSON would return it: tuples as lists."""
    return json.loads(json.dumps(value))
