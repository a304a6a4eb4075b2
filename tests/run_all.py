"""Every test, in several processes: what `make test-all` runs.

    python -m tests.run_all --jobs 16 --write-proof          everything; writes tests/proof.json if nothing failed
    python -m tests.run_all --jobs 4 tests/test_tree.py …    some files
    python -m tests.run_all -- -m "not slow"                 what follows the dashes goes to pytest

One pytest process per file, as many at a time as there are jobs, with one thread each; it needs no plugin of pytest.
Files that took longest the last time start first, so that none of them runs alone at the end.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from xml.etree import ElementTree

from tests import proof

ROOT = Path(__file__).parents[1]
KNOWN = ROOT / ".pytest_cache" / "seconds.json"
"""how long each file took the last time on this machine"""
LONG = ("golden", "smollm2", "cli", "conformance", "kernels", "attention", "bench_peers", "inflight", "graphs")
"""parts of names that are started first if nothing is known"""
NOTHING_COLLECTED = 5


@dataclass
class Result:
    """What one process found."""

    file: str
    seconds: float
    passed: int = 0
    failed: int = 0
    skipped: int = 0
    output: str = ""
    times: list[tuple[float, str]] = field(default_factory=list)


def files() -> list[str]:
    return sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "tests").rglob("test_*.py"))


def longest_first(chosen: list[str], known: dict[str, float]) -> list[str]:
    """Unknown files come first if their name says that they are long, and last otherwise."""
    guessed = {file: 1e6 if any(part in file for part in LONG) else 0.0 for file in chosen}
    return sorted(chosen, key=lambda file: -known.get(file, guessed[file]))


def run(file: str, extra: list[str], folder: Path) -> Result:
    name = file.replace("/", "-").removesuffix(".py")
    report = folder / f"{name}.xml"
    command = [
        sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider",
        f"--junitxml={report}", f"--basetemp={folder / name}", file, *extra,
    ]  # fmt: skip
    environment = os.environ | {"OMP_NUM_THREADS": "1", proof.RUNNING: "1"}
    start = time.perf_counter()
    ran = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    result = Result(file, time.perf_counter() - start, output=ran.stdout + ran.stderr)
    if report.exists():
        read(report, result)
    if ran.returncode not in (0, NOTHING_COLLECTED) and not result.failed:
        result.failed = 1  # a process that died, or could not collect
    return result


def read(report: Path, result: Result) -> None:
    for suite in ElementTree.parse(report).getroot().iter("testsuite"):
        tests, failures, errors, skipped = (
            int(suite.get(name, 0)) for name in ("tests", "failures", "errors", "skipped")
        )
        result.failed += failures + errors
        result.skipped += skipped
        result.passed += tests - failures - errors - skipped
        result.times += [(float(case.get("time", 0)), case.get("name", "")) for case in suite.iter("testcase")]


def run_files(chosen: list[str], jobs: int, extra: list[str]) -> list[Result]:
    known = json.loads(KNOWN.read_text()) if KNOWN.exists() else {}
    results = []
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(jobs) as pool:
        running = [pool.submit(run, file, extra, Path(folder)) for file in longest_first(chosen, known)]
        for number, done in enumerate(as_completed(running), 1):
            result = done.result()
            results.append(result)
            word = "FAILED" if result.failed else "passed"
            print(f"[{number}/{len(running)}] {word} {result.seconds:6.1f} s  {result.file}", flush=True)
            if result.failed:
                print(result.output, flush=True)
    KNOWN.parent.mkdir(exist_ok=True)
    KNOWN.write_text(json.dumps(known | {result.file: round(result.seconds, 1) for result in results}, indent=1))
    return results


def summary(results: list[Result], seconds: float) -> str:
    slowest = sorted(((took, result.file, name) for result in results for took, name in result.times), reverse=True)
    lines = ["The slowest tests:", *(f"{took:7.1f} s  {file}::{name}" for took, file, name in slowest[:20])]
    lines += sorted(f"FAILED {result.file}" for result in results if result.failed)
    passed, failed, skipped = counts(results)
    return "\n".join([*lines, f"{passed} passed, {failed} failed, {skipped} skipped in {seconds:.0f} s"])


def counts(results: list[Result]) -> tuple[int, int, int]:
    return tuple(sum(numbers) for numbers in zip(*((r.passed, r.failed, r.skipped) for r in results), strict=True))  # type: ignore[return-value]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="*", help="all unless given")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes at a time; one per core")
    parser.add_argument("--write-proof", action="store_true", help="add an entry to tests/proof.json if all is green")
    given = sys.argv[1:] if arguments is None else arguments
    own, extra = (given[: given.index("--")], given[given.index("--") + 1 :]) if "--" in given else (given, [])
    options = parser.parse_args(own)
    if options.write_proof and (options.files or extra):
        parser.error("a proof is of everything: give neither files nor options of pytest")
    before = proof.tree_hash()
    start = time.perf_counter()
    results = run_files(options.files or files(), options.jobs, extra)
    seconds = time.perf_counter() - start
    print(summary(results, seconds))
    passed, failed, skipped = counts(results)
    if failed or not passed:
        return 1
    if options.write_proof:
        if proof.tree_hash() != before:
            print("The source changed while its tests ran: nothing is proven.")
            return 1
        proof.write(passed=passed, failed=failed, skipped=skipped, seconds=seconds)
        print(f"{before} is proven; commit tests/proof.json.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
