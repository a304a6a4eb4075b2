"""The runner of everything finds what each file found, and fails if one fails."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests import proof, run_all

PASSING = "import pytest\ndef test_one(): pass\ndef test_two(): pytest.skip('not today')\n"
FAILING = "def test_three(): assert 1 == 2\ndef test_four(): pass\n"
BROKEN = "import nothing_of_this_name\n"
EMPTY = "x = 1\n"


@pytest.fixture(autouse=True)
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(run_all, "ROOT", tmp_path)
    monkeypatch.setattr(run_all, "KNOWN", tmp_path / "cache" / "seconds.json")
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # plugins take longer to import than these tests to run
    (tmp_path / "tests").mkdir()
    return tmp_path / "tests"


def test_counts_are_those_of_all_files_and_a_failure_is_shown(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, text in (("test_a", PASSING), ("test_b", FAILING), ("test_c", BROKEN), ("test_d", EMPTY)):
        (project / f"{name}.py").write_text(text)
    assert run_all.main(["--jobs", "2"]) == 1
    said = capsys.readouterr().out
    assert "2 passed, 2 failed, 1 skipped" in said
    assert "assert 1 == 2" in said
    assert "nothing_of_this_name" in said
    slowest = said.split("The slowest tests:")[1]
    assert "tests/test_a.py::test_one" in slowest
    assert [line for line in slowest.splitlines() if "FAILED" in line] == [f"FAILED tests/test_{x}.py" for x in "bc"]


def test_a_green_run_writes_a_proof_and_a_part_of_one_may_not(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (project / "test_a.py").write_text(PASSING)
    written = []
    monkeypatch.setattr(proof, "write", lambda **counts: written.append(counts))
    for partly in (["tests/test_a.py"], ["--", "-k", "one"]):
        with pytest.raises(SystemExit):
            run_all.main(["--write-proof", *partly])
    assert run_all.main(["--jobs", "1", "--", "-k", "one"]) == 0
    assert written == []
    assert run_all.main(["--jobs", "1", "--write-proof"]) == 0
    assert [(counts["passed"], counts["failed"], counts["skipped"]) for counts in written] == [(1, 0, 1)]
    assert "tests/test_a.py" in json.loads(run_all.KNOWN.read_text())
    assert "is proven" in capsys.readouterr().out


def test_a_source_that_changes_meanwhile_is_not_proven(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (project / "test_a.py").write_text(PASSING)
    states = iter(("one", "another"))
    monkeypatch.setattr(proof, "tree_hash", lambda: next(states))
    monkeypatch.setattr(proof, "write", None)
    assert run_all.main(["--write-proof"]) == 1


def test_nothing_that_ran_is_no_success(project: Path) -> None:
    (project / "test_a.py").write_text(EMPTY)
    assert run_all.main([]) == 1


def test_files_that_took_longest_come_first_and_unknown_ones_by_their_name() -> None:
    chosen = ["tests/test_tree.py", "tests/test_cli.py", "tests/test_ngram.py", "tests/test_rng.py"]
    known = {"tests/test_ngram.py": 3.0, "tests/test_rng.py": 40.0}
    assert run_all.longest_first(chosen, known) == [
        "tests/test_cli.py",
        "tests/test_rng.py",
        "tests/test_ngram.py",
        "tests/test_tree.py",
    ]
