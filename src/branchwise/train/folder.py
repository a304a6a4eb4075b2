"""A folder of a model, written as a whole: beside its place first, and renamed when every file is there.

Whatever ends the work before leaves nothing at the place, and what a killed process left beside it is removed by the
next one that writes there.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from branchwise.errors import UsageError, first_line
from branchwise.provenance import versions

ABOUT = "branchwise.json"
"""where a folder came from, and the sizes of its files, by which a damaged one is known"""


def check_folder(out: Path) -> None:
    """Refuse a place where no new folder could be made, before a model is loaded in vain."""
    parent = out.absolute().parent
    if out.exists():
        raise UsageError(f"{out} exists; name a folder that does not, or remove it.")
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        raise UsageError(f"No folder can be made at {out}; name one in a folder that exists and is writable.")


@contextmanager
def whole_folder(out: Path, about: Mapping[str, Any], needed: int) -> Iterator[Path]:
    """A folder to write in, which becomes `out` at the end; `needed` are the bytes that it will about take."""
    check_folder(out)
    place = out.absolute()
    for left in place.parent.glob(f".{place.name}.*.part"):
        shutil.rmtree(left, ignore_errors=True)
    free = shutil.disk_usage(place.parent).free
    if free < needed:
        raise UsageError(
            f"{out} needs {needed / 1e9:.2f} GB, and {free / 1e9:.2f} GB are free there; make room, or name another."
        )
    work = Path(tempfile.mkdtemp(prefix=f".{place.name}.", suffix=".part", dir=place.parent))
    try:
        work.chmod(0o755)  # as any folder that a user makes
        yield work
        sizes = {file.name: file.stat().st_size for file in sorted(work.iterdir())}
        noted = {"name": place.name, **about, "versions": versions(), "files": sizes}
        (work / ABOUT).write_text(json.dumps(noted, indent=2) + "\n")
        work.rename(place)
    except (OSError, SafetensorError) as error:  # a full disk is the one here and the other there
        said = error.strerror if isinstance(error, OSError) and error.strerror else first_line(error)
        raise UsageError(f"{out} could not be written: {said}. Nothing was left there.") from error
    finally:
        with suppress(FileNotFoundError):
            shutil.rmtree(work)
