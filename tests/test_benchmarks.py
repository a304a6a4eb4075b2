"""Published numbers are what the records say."""

from __future__ import annotations

import importlib
import json
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
RECORDS = sorted((ROOT / "benchmarks" / "records").glob("foundations-*.jsonl"))
VERDICTS = sorted((ROOT / "benchmarks" / "records").glob("verifiers-*.jsonl"))


def script(name: str) -> ModuleType:
    """A benchmark as Python runs it: with the folder of benchmarks in front of the path."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.pop(0)


@pytest.fixture(scope="module")
def foundations() -> ModuleType:
    return script("foundations")


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.stem)
def test_the_benchmark_page_shows_what_the_records_say(
    path: Path, foundations: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    foundations.summarise(read(path))
    printed = capsys.readouterr().out
    assert printed.count("\n") > 10
    assert printed in (ROOT / "docs" / "benchmarks.md").read_text()


@pytest.mark.parametrize("path", VERDICTS, ids=lambda path: path.stem)
def test_the_benchmark_page_shows_the_verdicts_of_the_records(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    records = read(path)
    script("verifiers").summarise(records)
    printed = capsys.readouterr().out
    assert printed.count("\n") > 10
    page = (ROOT / "docs" / "benchmarks.md").read_text()
    assert printed in page
    for record in records:
        assert re.fullmatch(r"[0-9a-f]{40}", record["run"]["commit"])
        # A machine without git cannot say whether its tree was clean; there the digest of the source does.
        assert record["run"]["dirty"] is False or (record["run"]["dirty"] is None and record["run"]["source"])


def test_the_table_of_the_readme_shows_what_the_records_say(
    foundations: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    for path in RECORDS:
        foundations.summarise(read(path))
    printed = capsys.readouterr().out
    table = re.findall(r"^\| SmolLM2.*", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert len(table) == 4
    for row in table:
        _, _, _, prompts, baseline, ours, acceptance, _, _ = (cell.strip() for cell in row.split("|"))
        assert f"{prompts}, transformers.generate: {baseline}\n" in printed
        assert re.search(rf"{prompts}, ngram: {ours}, .* mean acceptance length {acceptance}\n", printed)


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.stem)
def test_every_record_says_where_it_comes_from(path: Path) -> None:
    for record in read(path):
        run = record["run"]
        assert re.fullmatch(r"[0-9a-f]{40}", run["commit"])
        assert run["dirty"] is False
        assert run["machine"]
        assert set(run["versions"]) == {"branchwise", "python", "torch", "transformers"}


def test_the_interval_covers_its_median() -> None:
    assert script("measure").interval([1.0, 2.0, 3.0]) == "2.000 [1.000, 3.000]"
    assert script("measure").interval([1.5] * 4) == "1.500 [1.500, 1.500]"
