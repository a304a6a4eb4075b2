"""The sandbox from outside: a process without environment, in an empty folder, that is killed when its time is up."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

from branchwise.bench.execution.inside import FAILED, PASSED
from branchwise.errors import BranchwiseError, UsageError

INSIDE = Path(__file__).with_name("inside.py")
GRACE = 10
"""seconds from the time limit of an answer, at which it ends by itself, until its remaining processes are killed"""
PROTECTIONS = {
    "network": "the network is not cut off",
    "signals": "processes of the same user can be sent signals",
    "files": "files of the same user can be written to",
    "processes": "the number of processes has no limit",
}
"""the protections that the kernel can provide, each with the danger that remains without it"""


@dataclass(frozen=True)
class Limits:
    """The limits of one answer, for all of its tests together."""

    seconds: int = 10
    memory: int = 2**30
    """bytes of address space"""


@dataclass(frozen=True)
class Outcome:
    passed: bool
    reason: str
    """why the tests did not pass, for people"""


def run_tests(program: str, entry: str, tests: str, limits: Limits | None = None, *, hook: bool = True) -> Outcome:
    """Whether the function `entry` of a program passes `check(candidate)` of its tests. Without `hook`, Python's audit
    hook is left out, and the kernel alone protects."""
    limits = limits or Limits()
    job = {"program": program, "entry": entry, "tests": tests, "limits": asdict(limits), "hook": hook}
    code, told, complaint = _enter(job, limits.seconds + GRACE)
    if code is None:
        return Outcome(False, f"took more than {limits.seconds} seconds")
    if code not in (PASSED, FAILED):
        raise BranchwiseError(f"The sandbox for answers that are programs broke: {complaint or f'status {code}'}.")
    return Outcome(code == PASSED, told or ("" if code == PASSED else "ended before its tests"))


@cache
def missing() -> tuple[str, ...]:
    """The dangers that this machine does not rule out, as parts of a sentence."""
    if os.name != "posix":
        raise UsageError("Answers that are programs can be run on Linux and macOS only; leave out --check-answers.")
    code, told, complaint = _enter({}, 10)
    if code != PASSED:
        raise BranchwiseError(f"The sandbox for answers that are programs cannot start: {complaint or code}.")
    held = json.loads(told)
    return tuple(words for name, words in PROTECTIONS.items() if name not in held)


def _enter(job: dict[str, Any], seconds: float) -> tuple[int | None, str, str]:
    """Exit status, output and complaints of a process in the sandbox; the status is None if its time was up."""
    pipes: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    words = [sys.executable, "-I", "-S", "-B", str(INSIDE)]
    with tempfile.TemporaryDirectory(prefix="branchwise-") as folder:
        os.chmod(folder, 0o555)
        with subprocess.Popen(words, cwd=folder, env={}, start_new_session=True, **pipes) as process:
            try:
                told, complaint = process.communicate(json.dumps(job).encode(), timeout=seconds)
            except subprocess.TimeoutExpired:
                return None, "", ""
            finally:
                _kill(process)
    return process.returncode, told.decode(errors="replace"), complaint.decode(errors="replace").strip()


def _kill(process: subprocess.Popen[bytes]) -> None:
    """End the process and all that it started: if the first process of a namespace ends, all others in it end."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.kill()
