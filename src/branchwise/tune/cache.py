"""What is remembered: costs that were measured under the same circumstances."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
from dataclasses import asdict, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from branchwise.backends.base import Target
from branchwise.errors import BranchwiseError, ModelError
from branchwise.models.cache import workspace
from branchwise.tune.costs import Cliff, Costs, Key, Point

VERSION = 1
"""of the files in the cache"""


def key_of(target: Target, model: str | None, batch: int, context: int, nodes: tuple[int, ...], repeat: int) -> Key:
    from branchwise import __version__

    return Key(
        model=model or str(getattr(target, "name", type(target).__name__)),
        compiled=bool(getattr(target, "compile", False)),
        architecture=_architecture(target),
        dtype=str(getattr(target, "dtype", "unknown")).removeprefix("torch."),
        precision=torch.get_float32_matmul_precision(),
        device=device_name(target.device),
        threads=torch.get_num_threads(),
        batch=batch,
        context=context,
        nodes=nodes,
        repeat=repeat,
        versions={
            "branchwise": __version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": version("transformers"),
        },
        source=_source(),
    )


def device_name(device: torch.device) -> str:
    """The processor that computes, as its maker calls it."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    name = platform.processor() or platform.machine()
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                name = line.partition(":")[2].strip()
                break
    return f"{name}, {os.cpu_count()} cores"


def _architecture(target: Target) -> str:
    config = getattr(getattr(target, "model", None), "config", None)
    stated = config.to_dict() if config is not None else {}
    for where_it_came_from in ("_name_or_path", "transformers_version"):
        stated.pop(where_it_came_from, None)
    whole = [type(target).__qualname__, target.vocabulary, stated]
    return hashlib.sha256(json.dumps(whole, sort_keys=True, default=str).encode()).hexdigest()[:16]


def _source() -> str:
    root, digest = Path(__file__).parents[1], hashlib.sha256()
    for pattern in ("target/*.py", "topology.py", "tree.py", "forest.py", "tune/*.py"):
        for file in sorted(root.glob(pattern)):
            digest.update(file.name.encode() + b"\0" + file.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def recall(key: Key) -> Costs | None:
    """What the cache knows; a file that is damaged, or of something else, is as good as none."""
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
    """Write the file aside and rename it into place. A cache that cannot be written costs the next measurement only."""
    path = costs.key.path
    whole = asdict(replace(costs, remembered=False))
    del whole["remembered"]
    with contextlib.suppress(ModelError), workspace() as work:
        (work / path.name).write_text(json.dumps({"version": VERSION, **whole}), encoding="utf-8")
        path.parent.mkdir(exist_ok=True)
        os.replace(work / path.name, path)


def _as_json(value: Any) -> Any:
    """As it would come back from a file: tuples as lists."""
    return json.loads(json.dumps(value))
