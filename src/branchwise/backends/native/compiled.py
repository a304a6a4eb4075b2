"""The library of our functions in C: compiled for the present CPU when first needed, and kept in the user's cache.

Its file is named by a digest of everything that decides what a compiler makes of the sources, so a file that is there
is the right one; one that cannot be loaded, or that others can write, is made anew. What the functions compute is
compared with torch whenever a model is loaded (`packed.py`, `host_layers.py`), so a file that computes something else
is not used either.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import logging
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path

from branchwise.errors import ModelError
from branchwise.models.cache import cache_dir, workspace

log = logging.getLogger(__name__)

FOLDER = Path(__file__).parent
SOURCES = [FOLDER / name for name in ("products.c", "rows.c", "attention.c", "layer.c", "likely.c")]
FLAGS = (
    *("-O3", "-march=native", "-ffp-contract=fast", "-fopenmp-simd", "-fno-math-errno", "-fno-trapping-math"),
    *("-shared", "-fPIC", "-Wl,-Bsymbolic"),
)
ALIKE = "--param=avoid-fma-max-bits=0"
"""Without this option GCC rounds a single sum differently from several, for some CPUs. Other compilers may not have
it."""
SECONDS = 60
"""the time limit of a compiler"""
_COMPILING = threading.Lock()


def begin() -> None:
    """Compile in a thread beside what the caller does. A request for the library waits until it is done."""
    threading.Thread(target=library, daemon=True, name="compiling").start()


def library() -> ctypes.CDLL | None:
    """The library; None without a compiler that makes it."""
    with _COMPILING:
        return _library()


@cache
def _library() -> ctypes.CDLL | None:
    for flags in ((*FLAGS, ALIKE), FLAGS):
        try:
            compiler = shlex.split(os.environ.get("CC", "")) or [shutil.which("cc") or shutil.which("gcc") or "clang"]
            kept = _place(compiler, flags)
            with suppress(OSError):  # there is none, or it is damaged
                if _is_own(kept):
                    return ctypes.CDLL(str(kept))
            with tempfile.TemporaryDirectory() as folder:
                made = Path(folder) / kept.name
                _run([*compiler, *flags, *map(str, SOURCES), "-o", str(made), "-lm"])
                found = ctypes.CDLL(str(made))
                _keep(made, kept)
                return found
        except (OSError, ValueError, subprocess.SubprocessError) as error:
            log.info("Functions of our own are not compiled: %s", error)
    return None


def _place(compiler: Sequence[str], flags: Sequence[str]) -> Path:
    """Where the library that this compiler makes here is kept."""
    instructions = sorted({line for line in _lines("/proc/cpuinfo") if line.startswith(("flags", "Features", "model"))})
    about = [compiler, flags, _run([*compiler, "--version"]), platform.machine(), instructions]
    digest = hashlib.sha256(json.dumps(about).encode())
    for file in sorted(FOLDER.glob("*.[ch]")):
        digest.update(file.read_bytes())
    return cache_dir() / "kernels" / "native" / f"{digest.hexdigest()[:32]}.so"


def _is_own(file: Path) -> bool:
    """Whether nobody but this user can have written a file: a cache may be a folder that users share."""
    about = file.stat()
    return about.st_uid == os.geteuid() and not about.st_mode & 0o022


def _keep(made: Path, kept: Path) -> None:
    """If the cache cannot be written, the next process compiles again."""
    with suppress(ModelError, OSError), workspace() as work:
        shutil.copyfile(made, work / kept.name)
        (work / kept.name).chmod(0o700)
        kept.parent.mkdir(parents=True, exist_ok=True)
        os.replace(work / kept.name, kept)


def _run(command: Sequence[str]) -> str:
    return subprocess.run(command, check=True, capture_output=True, timeout=SECONDS, text=True).stdout


def _lines(file: str) -> list[str]:
    with suppress(OSError):
        return Path(file).read_text().splitlines()
    return []
