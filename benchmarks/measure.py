"""What every benchmark needs: a clock, an interval, and where a record comes from."""

from __future__ import annotations

import argparse
import hashlib
import platform
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers

import branchwise


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
    changes = None if arguments.commit else git("status", "--porcelain", "--untracked-files=no")
    return {
        "commit": arguments.commit or git("rev-parse", "HEAD"),
        "dirty": None if changes is None else bool(changes),
        "source": source(),
        "arguments": {name: value for name, value in vars(arguments).items() if name not in ("commit", "out")},
        "versions": {
            "branchwise": branchwise.__version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "machine": torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name(),
        "threads": torch.get_num_threads(),
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def source() -> str:
    """A digest of what ran: it tells a commit's own code from a changed one, also where there is no git to ask."""
    root = Path(__file__).parents[1]
    digest = hashlib.sha256()
    for file in sorted([*(root / "src").rglob("*.py"), *(root / "benchmarks").glob("*.py")]):
        digest.update(f"{file.relative_to(root).as_posix()}\0".encode() + file.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def git(*words: str) -> str | None:
    try:
        done = subprocess.run(["git", *words], capture_output=True, text=True, check=False, cwd=Path(__file__).parent)
    except FileNotFoundError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    named = next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine()
    )
    return f"{named}, {sum(line.startswith('processor') for line in lines)} cores"
