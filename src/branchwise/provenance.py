"""Where measured numbers come from: code, machine, versions, arguments."""

from __future__ import annotations

import hashlib
import os
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

PACKAGE = Path(__file__).parent


def provenance(device: torch.device, arguments: Mapping[str, Any], commit: str | None = None) -> dict[str, Any]:
    """The provenance of numbers measured now. `commit` names the code if it does not run from a git checkout; a digest
    of the source is recorded as well."""
    changes = None if commit else git("status", "--porcelain", "--untracked-files=no")
    return {
        "commit": commit or git("rev-parse", "HEAD"),
        "dirty": None if changes is None else bool(changes),
        "source": source_digest(PACKAGE),
        "command": shlex.join(["branchwise", *map(without_folder, sys.argv[1:])]),
        "arguments": dict(arguments),
        "versions": versions(),
        "machine": device_name(torch.device("cpu")),
        "device": device_name(device) if device.type == "cuda" else device.type,
        "threads": torch.get_num_threads(),
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def without_folder(word: str) -> str:
    """A word of a command line, without the folders of this machine."""
    return Path(word).name if Path(word).is_absolute() else word


def versions() -> dict[str, str]:
    own = sys.modules[PACKAGE.name].__version__  # already imported, since this file is a part of it
    found = {"branchwise": own, "python": platform.python_version(), "torch": torch.__version__}
    for package in ("transformers", "xllamacpp"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def source_digest(*folders: Path) -> str:
    """Sixteen hexadecimal digits of a hash of the code and its data, which show changed code even without git."""
    digest = hashlib.sha256()
    for folder in folders:
        for file in sorted(file for file in folder.rglob("*") if file.suffix in (".c", ".h", ".py", ".toml", ".jsonl")):
            digest.update(f"{file.relative_to(folder).as_posix()}\0".encode() + file.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def git(*words: str) -> str | None:
    """The output of git about the code that runs; None if it runs from an installed package."""
    if not any((folder / ".git").exists() for folder in PACKAGE.parents[:2]):
        return None
    try:
        done = subprocess.run(["git", *words], capture_output=True, text=True, check=False, cwd=PACKAGE)
    except FileNotFoundError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def device_name(device: torch.device) -> str:
    """The vendor's name of the processor that computes."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.processor() or platform.machine()}, {os.cpu_count()} cores"
