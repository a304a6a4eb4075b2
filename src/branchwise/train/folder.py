"""A folder of a model that is written as a whole: under another name first, and renamed when all files exist.

If the work ends before that, the folder does not appear. What a killed process left behind is removed by the next
process that writes there.
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
"""the file that says where a folder came from, and the sizes of its files, by which damage is recognised"""


def check_folder(out: Path) -> None:
    """Refuse a path where no new folder could be made, before a model is loaded in vain."""
    parent = out.absolute().parent
    if out.exists():
        raise UsageError(f"{out} exists; name a folder that does not, or remove it.")
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        raise UsageError(f"No folder can be made at {out}; name one in a folder that exists and is writable.")


@contextmanager
def whole_folder(out: Path, about: Mapping[str, Any], needed: int) -> Iterator[Path]:
    """A folder to write in, which becomes `out` at the end; `needed` is about how many bytes it will take."""
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
        work.chmod(0o755)  # like any folder that a user makes
        yield work
        sizes = {file.name: file.stat().st_size for file in sorted(work.iterdir())}
        noted = {"name": place.name, **about, "versions": versions(), "files": sizes}
        (work / ABOUT).write_text(json.dumps(noted, indent=2) + "\n")
        work.rename(place)
    except (OSError, SafetensorError) as error:  # a full disk raises one or the other, depending on the writer
        said = error.strerror if isinstance(error, OSError) and error.strerror else first_line(error)
        raise UsageError(f"{out} could not be written: {said}. Nothing was left there.") from error
    finally:
        with suppress(FileNotFoundError):
            shutil.rmtree(work)
