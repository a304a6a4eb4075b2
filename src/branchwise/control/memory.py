"""The costs of passes, kept from one process to the next: the first request begins with what the last process knew.

The cache has one file for every model, machine and set of versions. A damaged file counts as missing. The costs in a
file are a first guess, which the first passes confirm or correct.
"""

from __future__ import annotations

import hashlib
import json
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from weakref import finalize

import torch

from branchwise.backends.base import TargetInfo
from branchwise.control.costs import PassCostModel, cost_model_of, cost_models
from branchwise.models.cache import cache_dir, read_notes, write_notes
from branchwise.provenance import PACKAGE, device_name, source_digest, versions

VERSION = 1
"""the version of the file format"""


def remember_costs(target: TargetInfo) -> None:
    """Begin with the costs that were kept for such a target, and write what was learned when the target is freed."""
    path = path_of(target)
    for batch, state in read_notes(path).items():
        with suppress(KeyError, TypeError, ValueError, ArithmeticError):
            cost_model_of(target, int(batch)).restore(state)
    finalize(target, _write, path, cost_models(target))


def path_of(target: TargetInfo) -> Path:
    """The file for targets like this one. Its name is a digest of everything that would make its numbers stale."""
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


def _write(path: Path, models: dict[int, PassCostModel]) -> None:
    """Write what was learned, and keep other batch sizes that the file holds. If that fails, the next process learns
    anew."""
    learned = {str(batch): model.state() for batch, model in list(models.items()) if model.knows(1)}
    if learned:
        write_notes(path, read_notes(path) | learned)
