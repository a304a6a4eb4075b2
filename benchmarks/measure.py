"""What every benchmark needs: a clock, an interval, and where a record comes from."""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from branchwise.provenance import PACKAGE, source_digest, without_folder
from branchwise.provenance import provenance as about


def timed(device: torch.device, call: Callable[..., Any], *arguments: Any) -> tuple[float, Any]:
    cuda = device.type == "cuda"
    if cuda:
        torch.cuda.synchronize()
    start = time.perf_counter()
    result = call(*arguments)
    if cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - start, result


def progress(line: str) -> None:
    if sys.stderr.isatty():
        print(f"\r{line}\033[K", end="", file=sys.stderr)


def interval(values: list[float]) -> str:
    """Median with a 95 % bootstrap interval."""
    rng = random.Random(0)
    medians = sorted(statistics.median(rng.choices(values, k=len(values))) for _ in range(2000))
    return f"{statistics.median(values):.3f} [{medians[50]:.3f}, {medians[1949]:.3f}]"


def provenance(device: torch.device, arguments: argparse.Namespace) -> dict[str, Any]:
    asked = {name: bare(value) for name, value in vars(arguments).items() if name not in ("commit", "out", "folder")}
    found = about(device, asked, arguments.commit)
    return {**found, "source": source_digest(PACKAGE, Path(__file__).parent)}


def bare(value: Any) -> Any:
    """An argument without the folders of this machine."""
    if isinstance(value, list):
        return [bare(one) for one in value]
    return without_folder(str(value)) if isinstance(value, str | Path) else value


def kept(records: Iterable[dict[str, Any]], file: Path) -> list[dict[str, Any]]:
    """The records, each of which is in the file before the next one is measured: a run may be cut short."""
    file.parent.mkdir(parents=True, exist_ok=True)
    found = []
    with file.open("w") as out:
        for record in records:
            out.write(json.dumps(record) + "\n")
            out.flush()
            found.append(record)
    return found


def recorded(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]
