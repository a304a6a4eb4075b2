"""Files of a run. Each replaces the old one as a whole, so that a run that was killed continues from the last one."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from branchwise.errors import UsageError


@contextmanager
def with_room(place: Path) -> Iterator[None]:
    """Turn a failure to write, such as a full disk, into an error of one sentence."""
    try:
        yield
    except OSError as error:
        raise UsageError(
            f"{place} cannot be written: {error.strerror or error}. Make room, or name another place; what was kept "
            "until then is whole, and the same command goes on from it."
        ) from error


def kept_whole(file: Path, value: Any) -> None:
    """Replace a file as a whole: bytes and text as they are, other values so that `torch.load` reads them."""
    if isinstance(value, str):
        value = value.encode()
    if not isinstance(value, bytes):
        # In memory first: on a full disk torch would say only that writing failed.
        buffer = io.BytesIO()
        torch.save(value, buffer)
        value = buffer.getvalue()
    partial = file.with_name(f".{file.name}.part")
    with with_room(file):
        try:
            with partial.open("wb") as out:
                out.write(value)
                out.flush()
                os.fsync(out.fileno())
            partial.replace(file)
        finally:
            partial.unlink(missing_ok=True)
