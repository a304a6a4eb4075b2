"""Run mutants: what `python -m tests.mutants` does."""

from __future__ import annotations

import argparse
import os
import re
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

from tests.mutants import FAMILIES, MUTANTS
from tests.mutants.family import Mutant

ROOT = Path(__file__).parents[2]
NAMES = [family.name for family in FAMILIES]
MEMORY = 8 << 30
"""bytes of a test process; a mutant that never ends fills them and fails"""
SECONDS = 1800
"""of a mutant that never ends and takes no memory"""


def killer(mutant: Mutant, source: Path) -> str | None:
    """The name of the test that fails, if one does."""
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(source, Path(folder) / "src")
        mutant.apply(Path(folder) / "src")
        return first_failure(Path(folder) / "src", mutant.family.tests)


def first_failure(source: Path, tests: Iterable[str], workers: int = 1) -> str | None:
    command = [sys.executable, "-m", "pytest", "-x", "-q", "--tb=no", "-p", "no:cacheprovider", *tests]
    if workers > 1 and find_spec("xdist"):
        command += ["-n", str(workers)]
    environment = os.environ | {"PYTHONPATH": str(source), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    try:
        run = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=SECONDS
        )
    except subprocess.TimeoutExpired:
        return f"pytest does not end within {SECONDS} seconds"
    if run.returncode == 0:
        return None
    found = re.search(r"^(?:FAILED|ERROR) (\S+::.+?)(?: - |$)", run.stdout, re.MULTILINE)
    return found[1] if found else f"pytest ended with {run.returncode}: {run.stdout[-300:]}{run.stderr[-300:]}"


def changed() -> set[str]:
    """Files below src/branchwise that differ from those of the commit that last wrote down a proof; all without one."""
    git = ["git", "-C", str(ROOT)]
    last = subprocess.run(
        [*git, "log", "-1", "--format=%H", "--", "tests/proof.json"], capture_output=True, text=True, check=True
    ).stdout.strip()
    if not last:
        return {mutant.file for mutant in MUTANTS}
    below = "src/branchwise"
    differ = subprocess.run(
        [*git, "diff", "--name-only", f"--relative={below}", last, "--", below],
        capture_output=True,
        text=True,
        check=True,
    )
    return set(differ.stdout.splitlines())


def main() -> int:
    parser = argparse.ArgumentParser(description="Mutation check.")
    parser.add_argument("families", nargs="*", help=f"of {', '.join(NAMES)}; all unless given")
    parser.add_argument("--jobs", type=int, default=1, help="mutants at a time")
    parser.add_argument("--changed", action="store_true", help="of files that changed since the last proof")
    parser.add_argument("--source", type=Path, default=ROOT / "src", help="what is mutated")
    options = parser.parse_args()
    if unknown := set(options.families) - set(NAMES):
        parser.error(f"unknown families: {', '.join(sorted(unknown))}")
    chosen = [mutant for mutant in MUTANTS if not options.families or mutant.family.name in options.families]
    if options.changed:
        files = changed()
        chosen = [mutant for mutant in chosen if mutant.file in files]
    if not chosen:
        print("No mutants to run.")
        return 0
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
    needed = dict.fromkeys(file for mutant in chosen for file in mutant.family.tests)
    if (failed := first_failure(options.source, needed, options.jobs)) is not None:
        print(f"Without any mutant {failed} fails: nothing can be learnt.")
        return 2
    survivors = 0
    living = [mutant for mutant in chosen if not mutant.equivalent]
    with ThreadPoolExecutor(options.jobs) as pool:
        for mutant, killed in zip(living, pool.map(lambda m: killer(m, options.source), living), strict=True):
            survivors += killed is None
            print(
                f"{'SURVIVES' if killed is None else 'killed  '}  {mutant.name}\n          {killed or '-'}", flush=True
            )
    for mutant in chosen:
        if mutant.equivalent:
            print(f"equivalent  {mutant.name}\n          {mutant.equivalent}")
    print(f"{len(living)} mutants, {survivors} survive, {len(chosen) - len(living)} change nothing.")
    return int(survivors > 0)


if __name__ == "__main__":
    sys.exit(main())
