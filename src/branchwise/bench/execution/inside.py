"""The script that runs inside the sandbox. It imports nothing but the standard library.

Three processes run, so that no answer can claim to be right:

    warden    enters namespaces without network, processes of others or writable files; waits for the judge
    judge     runs the tests of the problem; its exit status is the verdict, which the answer cannot reach
    answer    runs what the model wrote; hears arguments and returns values over two pipes, as plain data

The kernel limits time, memory, files and processes of the answer; an audit hook of Python, which no code can remove,
also refuses processes, signals, sockets and files. On systems without namespaces, the limits and the hook remain.
"""

from __future__ import annotations

import builtins
import contextlib
import ctypes
import importlib
import json
import os
import signal
import sys
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

with contextlib.suppress(ImportError):  # some systems lack it
    import resource

PASSED, FAILED, BROKEN = 0, 1, 3
NOBODY = 65534
EAR, MOUTH = 3, 4
"""pipes of the answer's process, the only files that it has open"""
LONGEST_MESSAGE = 4 * 2**20
"""the most bytes of a call or of a returned value"""
DEEPEST = 64
"""the deepest nesting of lists in a value"""

USUAL = (
    "bisect", "collections", "copy", "datetime", "decimal", "fractions", "functools", "hashlib", "heapq", "itertools",
    "math", "operator", "random", "re", "statistics", "string", "typing",
)  # fmt: skip
"""modules that answers use, imported beforehand if only root can read them"""

USER, PID, NETWORK, MOUNTS, IPC, NAMES = 0x10000000, 0x20000000, 0x40000000, 0x00020000, 0x08000000, 0x04000000
MOUNT_SETATTR, AT_FDCWD, AT_RECURSIVE, READ_ONLY = 442, -100, 0x8000, 1
DEATH_SIGNAL, DUMPABLE, NO_NEW_PRIVILEGES = 1, 4, 38
CAPABILITIES_VERSION = 0x20080522


# ---- the warden --------------------------------------------------------------------------------------------------


def main() -> NoReturn:
    """Read a job from standard input: the program, its tests and the limits. A job without tests only prints the names
    of the protections that hold, as a list."""
    job = json.load(sys.stdin.buffer)
    held = enclose()
    if "tests" not in job:
        print(json.dumps(sorted(held)), flush=True)
        os._exit(PASSED)
    child = os.fork()  # the first process of the namespace: if it ends, all others end
    if child == 0:
        die_with_parent()
        judge(job)
    _, status = os.waitpid(child, 0)
    os._exit(os.waitstatus_to_exitcode(status) if os.WIFEXITED(status) else FAILED)


def enclose() -> set[str]:
    """Give up what an answer does not need; returns the names of the protections that hold."""
    if sys.platform != "linux":
        return {"processes"} if os.geteuid() != 0 else set()
    held = set()
    if os.geteuid() != 0:
        held.add("processes")
    else:  # limits on processes do not bind root
        if not readable_by_others(os.__file__):
            for name in USUAL:
                importlib.import_module(name)
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
        held.add("processes")
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(USER | PID | NETWORK | MOUNTS | IPC | NAMES) == 0:
        held |= {"network", "signals"}
        attributes = (ctypes.c_uint64 * 4)(READ_ONLY, 0, 0, 0)
        asked = AT_FDCWD, b"/", AT_RECURSIVE, ctypes.byref(attributes), ctypes.c_size_t(32)
        if libc.syscall(MOUNT_SETATTR, *asked) == 0:
            held.add("files")
    header, nothing = (ctypes.c_uint32 * 2)(CAPABILITIES_VERSION, 0), (ctypes.c_uint32 * 6)()
    if libc.capset(ctypes.byref(header), ctypes.byref(nothing)) != 0:  # capabilities could undo all of this
        held.clear()
    libc.prctl(NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    return held


def readable_by_others(path: str) -> bool:
    """Whether every user may read a file."""
    while path != "/":
        needed = 0o005 if os.path.isdir(path) else 0o004
        if os.stat(path).st_mode & needed != needed:
            return False
        path = os.path.dirname(path)
    return True


def die_with_parent() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)


# ---- the judge ---------------------------------------------------------------------------------------------------


def judge(job: dict[str, Any]) -> NoReturn:
    """Run the tests with a candidate that lives in another process, and exit with the verdict."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(DUMPABLE, 0, 0, 0, 0)  # closes its memory to the answer
    (ear, asking), (answering, mouth) = os.pipe(), os.pipe()
    if os.fork() == 0:
        die_with_parent()
        answer(job, ear, mouth)
    os.close(ear)
    os.close(mouth)

    def candidate(*args: Any) -> Any:
        send(asking, list(args))
        told, value = receive(answering)
        if told != "value":
            raise RuntimeError(f"the answer raised {value}")
        return value

    if receive(answering) != "ready":
        raise RuntimeError("the process of the answer did not start")
    try:
        known: dict[str, Any] = {"__name__": "tests"}
        exec(compile(job["tests"], "tests", "exec"), known)
        known[job["entry"]] = candidate  # some tests call it by its name
        known["check"](candidate)
    except BaseException as error:
        with contextlib.suppress(BaseException):
            os.write(1, f"{type(error).__name__}: {error}"[:500].encode())
        os._exit(FAILED)
    os._exit(PASSED)


def send(pipe: int, value: Any) -> None:
    raw = json.dumps(packed(value)).encode()
    if len(raw) > LONGEST_MESSAGE:
        raise ValueError("a value is too long")
    raw = len(raw).to_bytes(8, "big") + raw
    while raw:
        raw = raw[os.write(pipe, raw) :]


def receive(pipe: int) -> Any:
    length = int.from_bytes(exactly(pipe, 8), "big")
    if length > LONGEST_MESSAGE:
        raise ValueError("a value is too long")
    return unpacked(json.loads(exactly(pipe, length)))


def exactly(pipe: int, length: int) -> bytes:
    parts = []
    while length:
        part = os.read(pipe, min(length, 1 << 16))
        if not part:
            raise EOFError("the process of the answer ended")
        parts.append(part)
        length -= len(part)
    return b"".join(parts)


CONTAINERS: dict[str, Callable[[Iterable[Any]], Any]] = {
    "list": list, "tuple": tuple, "set": set, "frozenset": frozenset, "dict": dict,
}  # fmt: skip


def packed(value: Any, depth: int = 0) -> Any:
    """Plain data as JSON that keeps its types. Other objects could claim to be equal to anything."""
    if value is None or type(value) in (bool, int, float, str):
        return value
    if depth < DEEPEST:
        for name, kind in CONTAINERS.items():
            if isinstance(value, kind):  # type: ignore[arg-type]
                inner = value.items() if name == "dict" else value
                return [name, [packed(one, depth + 1) for one in inner]]
    raise TypeError(f"{type(value).__name__} is no plain value")


def unpacked(value: Any) -> Any:
    if isinstance(value, list):
        name, inner = value
        return CONTAINERS[name](map(unpacked, inner))
    return value


# ---- the answer --------------------------------------------------------------------------------------------------


def answer(job: dict[str, Any], ear: int, mouth: int) -> NoReturn:
    """Define what the model wrote, and call it with the arguments that arrive."""
    os.setsid()  # a group of its own, so that it can send signals to itself alone
    signal.alarm(job["limits"]["seconds"] + 1)
    nowhere = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(nowhere, number)
    ear, mouth = os.dup(ear), os.dup(mouth)  # away from the numbers that they will get
    os.dup2(ear, EAR)
    os.dup2(mouth, MOUTH)
    os.closerange(MOUTH + 1, 4096)
    confine(job["limits"])
    if job["hook"]:
        sys.addaudithook(refuse)
    send(MOUTH, "ready")
    known: dict[str, Any] = {"__name__": "answer", "__builtins__": builtins}
    try:
        exec(compile(job["program"], "answer", "exec"), known)
        function = known[job["entry"]]
    except BaseException as error:
        failure: str | None = f"{type(error).__name__}: {error}"
    else:
        failure = None
    while True:
        args = receive(EAR)
        try:
            if failure is not None:
                raise RuntimeError(failure)
            send(MOUTH, ("value", function(*args)))
        except BaseException as error:
            send(MOUTH, ("error", f"{type(error).__name__}: {error}"[:500]))


def confine(limits: dict[str, int]) -> None:
    """Set limits that only the kernel can lift. After that no process or thread can be started."""
    bounds = {
        resource.RLIMIT_CPU: limits["seconds"],
        resource.RLIMIT_AS: limits["memory"],
        resource.RLIMIT_FSIZE: 0,
        resource.RLIMIT_NPROC: 0,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_NOFILE: 64,
    }
    for kind, most in bounds.items():
        with contextlib.suppress(ValueError, OSError):  # some systems have fewer limits
            resource.setrlimit(kind, (most, most))


REFUSED = (
    "socket.", "subprocess.", "ctypes.", "pty.", "shutil.", "signal.", "resource.", "os.fork", "os.kill", "os.exec",
    "os.posix_spawn", "os.spawn", "os.system", "os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.link",
    "os.symlink", "os.truncate", "os.chmod", "os.chown", "os.chflags", "os.setxattr", "os.utime", "os.putenv",
    "tempfile.", "webbrowser.", "mmap.", "ftplib.", "smtplib.", "urllib.", "http.",
)  # fmt: skip
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


def refuse(event: str, args: tuple[Any, ...]) -> None:
    """An audit hook that refuses everything that a tested function has no need for."""
    if event.startswith(REFUSED) or (event == "open" and (args[2] or 0) & WRITING):
        raise PermissionError(f"an answer may not use {event}")


if __name__ == "__main__":
    try:
        main()
    except BaseException as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        os._exit(BROKEN)
