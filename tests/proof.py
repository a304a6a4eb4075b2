"""Which states of the exact folders have passed every test: `make test-all` writes an entry, `make test` looks for it.

    python -m tests.proof                                                    whether this state is proven
    python -m tests.proof --write --passed 9000 --skipped 80 --seconds 1500  after a green run of everything

An exact algorithm is proven by tests that take longer than a newcomer waits. They need to run again only if the code
that they prove changes, so their result is kept by a hash of that code: of its syntax trees, since comments, docstrings
and layout decide nothing.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import os
import platform
import sys
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "branchwise"
FILE = Path(__file__).with_name("proof.json")
FOLDERS = ("core", "verify", "draft/policies", "audit")
MOST = 20
"""entries that are kept"""
RUNNING = "BRANCHWISE_TEST_ALL"
"""set in the environment of a run of everything, which cannot have its own result yet"""
MISSING = (
    f"Nobody has run every test on this state of {', '.join(FOLDERS)} ({{hash}}): run `make test-all`, which writes "
    "tests/proof.json, and commit that file together with the change."
)


def tree_hash(source: Path = SOURCE) -> str:
    """sha256 over the paths and the code of all Python files of the exact folders."""
    digest = hashlib.sha256()
    paths = {
        path.relative_to(source).as_posix(): path for folder in FOLDERS for path in (source / folder).rglob("*.py")
    }
    for name, path in sorted(paths.items()):
        content = code_of(path.read_text()).encode()
        digest.update(f"{name}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()


def code_of(text: str) -> str:
    """What Python runs: without comments, layout, and statements that are nothing but a string. Fields that a node
    leaves empty are not written, because each version of Python adds some."""

    def written(part: Any) -> str:
        if isinstance(part, list):
            return f"[{', '.join(written(one) for one in part if not is_string(one))}]"
        if not isinstance(part, ast.AST):
            return repr(part)
        fields = [(name, field) for name, field in ast.iter_fields(part) if field is not None and field != []]
        return f"{type(part).__name__}({', '.join(f'{name}={written(field)}' for name, field in fields)})"

    def is_string(one: Any) -> bool:
        return isinstance(one, ast.Expr) and isinstance(one.value, ast.Constant) and isinstance(one.value.value, str)

    return written(ast.parse(text))


def entries(file: Path = FILE) -> list[dict[str, Any]]:
    """Oldest first."""
    found: list[dict[str, Any]] = json.loads(file.read_text())
    return found


def proven(source: Path = SOURCE, file: Path = FILE) -> bool:
    wanted = tree_hash(source)
    return any(entry["hash"] == wanted and not entry["failed"] for entry in entries(file))


def write(
    *,
    passed: int,
    failed: int,
    skipped: int,
    seconds: float,
    machine: str | None = None,
    source: Path = SOURCE,
    file: Path = FILE,
) -> dict[str, Any]:
    """Add an entry for the state of today; one of the same state is replaced."""
    if failed or not passed:
        raise ValueError(f"{failed} tests failed and {passed} passed: that proves nothing.")
    entry = {
        "hash": tree_hash(source),
        "date": datetime.now(UTC).date().isoformat(),
        "python": platform.python_version(),
        "torch": version("torch"),
        "transformers": version("transformers"),
        "passed": passed,
        "failed": failed,
        "skipped": skipped,
        "seconds": round(seconds),
        "machine": machine or this_machine(),
    }
    kept = [other for other in entries(file) if other["hash"] != entry["hash"]][-MOST + 1 :]
    file.write_text(json.dumps([*kept, entry], indent=1) + "\n")
    return entry


def this_machine() -> str:
    import torch

    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    return f"{platform.system()} on {platform.machine()}, {os.cpu_count()} cores, {gpu}"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="add an entry for this state")
    for count in ("passed", "failed", "skipped"):
        parser.add_argument(f"--{count}", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=0.0)
    parser.add_argument("--machine", help="in words; by default what Python knows of it")
    options = vars(parser.parse_args(arguments))
    if options.pop("write"):
        try:
            print(f"{write(**options)['hash']} is proven.")
        except ValueError as error:
            print(error)
            return 1
        return 0
    if proven():
        print(f"{tree_hash()} is proven.")
        return 0
    print(MISSING.format(hash=tree_hash()))
    return 1


if __name__ == "__main__":
    sys.exit(main())
