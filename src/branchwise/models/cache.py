"""Our cache folder, in which a file is either complete or absent.

Everything is written in a temporary folder and renamed into place when it is complete:

    cache/
      gguf/NAME.gguf             fetched files, checksummed
      converted/SHA-vN/          models for `from_pretrained`; `branchwise.json` names their source
      quantised/KEY/             models in 8 or 4 bits, with their distance from float32
      digests.json               sha256 of local GGUF files, so that gigabytes are hashed once
      kernels/, warmup.json      what was compiled for this machine, and how long a warm-up takes
      costs/, trials/, tune/     what passes cost on this machine, and which products are fastest
      tmp-*/                     work in progress; removed when done, or after a day if its process was killed
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from branchwise.errors import ModelError

DIGESTS = "digests.json"


def cache_dir() -> Path:
    """`$BRANCHWISE_CACHE`, else `branchwise` in the user's cache folder; it need not exist yet."""
    if own := os.environ.get("BRANCHWISE_CACHE"):
        return Path(own).expanduser().absolute()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").absolute() / "branchwise"


@contextlib.contextmanager
def workspace() -> Iterator[Path]:
    """A temporary folder in the cache, from which finished work is renamed into place. It is removed at the end."""
    cache = cache_dir()
    work = None
    try:
        cache.mkdir(parents=True, exist_ok=True)
        _sweep(cache)
        work = Path(tempfile.mkdtemp(prefix="tmp-", dir=cache))
        yield work
    except OSError as error:
        raise ModelError(
            f"Cannot write to the cache {cache}: {error.strerror or error}. "
            "Let BRANCHWISE_CACHE name a folder that is writable and has room."
        ) from error
    finally:
        if work is not None:
            shutil.rmtree(work, ignore_errors=True)


def _sweep(cache: Path) -> None:
    """Remove temporary folders of killed processes. Those younger than a day are kept, as they may be in use."""
    yesterday = time.time() - 24 * 3600
    for left in cache.glob("tmp-*"):
        with contextlib.suppress(OSError):
            if max(path.stat().st_mtime for path in (left, *left.rglob("*"))) < yesterday:
                shutil.rmtree(left, ignore_errors=True)


def require_space(needed: int, purpose: str) -> None:
    """Refuse work that would fill the disk, before it begins."""
    cache = cache_dir()
    free = shutil.disk_usage(cache).free
    if free < needed:
        raise ModelError(
            f"{purpose} needs {needed / 1e9:.2f} GB in {cache}, where {free / 1e9:.2f} GB are free. "
            "Make room there, or let BRANCHWISE_CACHE name another folder."
        )


def bytes_in(folder: Path) -> int:
    """The size of all files below `folder`, which may change during the count."""
    total = 0
    for place, _, files in os.walk(folder):  # unlike `rglob`, it ignores folders that have disappeared
        for file in files:
            with contextlib.suppress(OSError):
                total += os.path.getsize(os.path.join(place, file))
    return total


def sha256_of(path: Path) -> str:
    """The digest of `path`, remembered as long as its size and modification time stay the same."""
    if known := remembered_digest(path):
        return known
    stat = path.stat()
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    notes = {place: note for place, note in read_notes(cache_dir() / DIGESTS).items() if os.path.exists(place)}
    notes[str(path)] = [stat.st_size, stat.st_mtime_ns, digest]
    write_notes(cache_dir() / DIGESTS, notes)  # a cache that cannot be written may still hold the converted model
    return digest


def remembered_digest(path: Path) -> str | None:
    """The digest of `path` if it was hashed before and has not changed since."""
    stat = path.stat()
    match read_notes(cache_dir() / DIGESTS).get(str(path)):
        case [stat.st_size, stat.st_mtime_ns, str(digest)]:
            return digest
    return None


def read_notes(file: Path) -> dict[str, Any]:
    """The JSON object in a file of the cache; an empty one if there is no such file, or it is damaged."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def write_notes(file: Path, notes: Mapping[str, Any]) -> None:
    """Write a file of the cache that may as well be missing: if it cannot be written, it stays as it was."""
    with contextlib.suppress(ModelError), workspace() as work:
        (work / file.name).write_text(json.dumps(notes), encoding="utf-8")
        file.parent.mkdir(parents=True, exist_ok=True)
        os.replace(work / file.name, file)
