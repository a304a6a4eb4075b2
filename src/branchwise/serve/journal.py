"""The journal: a line of JSON for every request, with counts and times but no text, and one for every failure."""

from __future__ import annotations

import json
import logging
import sys
import time
from traceback import extract_tb
from typing import Any

log = logging.getLogger("branchwise.requests")


def write(**entry: Any) -> None:
    """Write a line in ASCII: nothing that a client sends can look like another line or control a terminal."""
    log.info(json.dumps({"time": round(time.time(), 3), **entry}))


def write_failure(what: str, error: BaseException) -> None:
    """Write the line of a failure that must not end the server."""
    where = [f"{frame.name} ({frame.filename}:{frame.lineno})" for frame in extract_tb(error.__traceback__)]
    write(event="failure", what=what, error=type(error).__name__, message=str(error)[:500], where=where)


def to_stderr() -> None:
    """Send the lines to standard error."""
    plain = logging.StreamHandler(sys.stderr)
    plain.setFormatter(logging.Formatter("%(message)s"))
    log.addHandler(plain)
    log.setLevel(logging.INFO)
    log.propagate = False
