"""What passes cost, kept from one process to the next: the first request begins with what the last process knew.

A file of the cache holds it, by model, machine and versions. Whatever is wrong with a file, it counts as missing; and
what a file says is a first guess, which the first passes confirm or correct.
"""

from __future__ import annotations

import hashlib
import json
import os
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from weakref import finalize

import torch

from branchwise.backends.base import TargetInfo
from branchwise.control.costs import PassCostModel, cost_model_of, cost_models
from branchwise.errors import ModelError
from branchwise.models.cache import cache_dir, workspace
from branchwise.provenance import PACKAGE, device_name, source_digest, versions

VERSION = 1
"""of the files"""


def remember_costs(target: TargetInfo) -> None:
    """Begin with what was kept of such a target, and keep what is learned of this one when it goes."""
    path = path_of(target)
    for batch, state in _read(path).items():
        with suppress(KeyError, TypeError, ValueError, ArithmeticError):
            cost_model_of(target, int(batch)).restore(state)
    finalize(target, _write, path, cost_models(target))


def path_of(target: TargetInfo) -> Path:
    """The file for targets like this one: all that would make its numbers stale is in its name."""
    about = [
        VERSION,
        target.fingerprint,
        target.weight_bytes,
        str(target.dtype),
        torch.get_float32_matmul_precision(),
        asdict(target.execution),
        device_name(target.device),
        torch.get_num_threads(),
        versions(),
        source_digest(*(PACKAGE / folder for folder in ("backends", "control", "cuda"))),
    ]
    return cache_dir() / "costs" / f"{hashlib.sha256(json.dumps(about).encode()).hexdigest()[:32]}.json"


def _read(path: Path) -> dict[str, dict[str, object]]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _write(path: Path, models: dict[int, PassCostModel]) -> None:
    """Other batches that the file knows stay in it. If it cannot be written, the next process learns anew."""
    learned = {str(batch): model.state() for batch, model in list(models.items()) if model.knows(1)}
    if not learned:
        return
    with suppress(ModelError, OSError), workspace() as work:
        (work / path.name).write_text(json.dumps(_read(path) | learned), encoding="utf-8")
        path.parent.mkdir(exist_ok=True)
        os.replace(work / path.name, path)
