"""Timing of products as they run in a pass: with weights that come from memory, because other layers have filled the
caches since. Times are kept in the user's cache, so that only the first processes on a machine make a trial."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from branchwise.backends.native import float_product
from branchwise.models.cache import cache_dir, read_notes, write_notes
from branchwise.provenance import PACKAGE, device_name, source_digest, versions

CACHES = 1 << 26
"""bytes of weights that exceed the caches, so that little of them stays cached"""
ENOUGH = 2
"""how many processes make a trial: whatever took the cores from the first is hardly there again at the second"""

Times = dict[str, list[float]]
"""name of a way to multiply -> seconds of its products"""


def copies(nbytes: int, count: int) -> int:
    """How many of `count` matrices of `nbytes` bytes must take turns, so that none is cached when its turn comes."""
    return min(count, -(-CACHES // nbytes))


def seconds(products: Sequence[Callable[[Tensor], object]], rows: Tensor) -> float:
    """The mean seconds of these products, computed one after the other."""
    start = time.perf_counter()
    for product in products:
        product(rows)
    return (time.perf_counter() - start) / len(products)


def remembered(about: Sequence[object], measure: Callable[[], Times]) -> Times:
    """The times of the trial `about` these matrices: the shortest that any process has measured on this machine."""
    place, key = _place(), json.dumps(about)
    made, known = _entry(read_notes(place), key)
    if made >= ENOUGH:
        return known
    found = {way: list(map(min, times, known.get(way, times))) for way, times in measure().items()}
    write_notes(place, read_notes(place) | {key: [made + 1, found]})
    return found


def _place() -> Path:
    """The file of this machine and these versions. Its name is a digest of everything that would make times stale."""
    return cache_dir() / "trials" / f"{_digest(torch.get_num_threads(), float_product() is not None)}.json"


@cache
def _digest(threads: int, compiled: bool) -> str:
    """`compiled`: whether there are functions of our own."""
    code = source_digest(PACKAGE / "backends")
    about = [device_name(torch.device("cpu")), threads, compiled, versions(), code]
    return hashlib.sha256(json.dumps(about).encode()).hexdigest()[:32]


def _entry(kept: Mapping[str, object], key: str) -> tuple[int, Times]:
    """How many processes have made a trial, and its times; a damaged entry counts as none."""
    match kept.get(key):
        case [int(made), dict(times)] if all(isinstance(one, list) and one for one in times.values()):
            return made, times
    return 0, {}
