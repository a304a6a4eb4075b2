"""Every test has run on the exact folders as they are; and what writes that down writes the truth."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from tests import proof


def test_every_test_has_run_on_the_exact_folders_as_they_are() -> None:
    if os.environ.get(proof.RUNNING):
        pytest.skip("this run is the proof")
    assert proof.proven(), proof.MISSING.format(hash=proof.tree_hash())


@pytest.fixture
def source(tmp_path: Path) -> Path:
    for folder in proof.FOLDERS:
        (tmp_path / "source" / folder).mkdir(parents=True)
        (tmp_path / "source" / folder / "one.py").write_text(f"name = '{folder}'\n")
    return tmp_path / "source"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "proof.json"
    path.write_text("[]")
    return path


def test_the_hash_is_of_names_and_contents_in_the_exact_folders_alone(source: Path) -> None:
    before = proof.tree_hash(source)
    (source / "engine").mkdir()
    (source / "engine" / "one.py").write_text("1")
    (source / "core" / "notes.txt").write_text("no code")
    assert proof.tree_hash(source) == before
    shutil.move(source / "core" / "one.py", source / "core" / "two.py")
    renamed = proof.tree_hash(source)
    shutil.move(source / "core" / "two.py", source / "core" / "one.py")
    (source / "core" / "one.py").write_text("name = 'other'\n")
    changed = proof.tree_hash(source)
    (source / "core" / "below").mkdir()
    (source / "core" / "below" / "one.py").write_text("")
    assert len({before, renamed, changed, proof.tree_hash(source)}) == 4


CODE = """
def odds(p: float, q: float = 0.5) -> float:
    return min(1.0, p / q)  # never above one
"""


@pytest.mark.parametrize(
    "same",
    [
        CODE.replace("  # never above one", ""),
        CODE.replace("    return", '    """How often."""\n    return'),
        CODE.replace("min(1.0, p / q)", "min(\n        1.0,\n        (p / q),\n    )"),
        '"""A file."""\n' + CODE + '\n\n"""what follows"""\n',
    ],
    ids=["comment", "docstring", "layout", "strings"],
)
def test_what_nothing_depends_on_is_no_code(same: str) -> None:
    assert proof.code_of(same) == proof.code_of(CODE)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("p / q", "p * q"),
        ("min", "max"),
        ("0.5", "0.25"),
        ("1.0", "1"),
        ("(p: float, q", "(q: float, p"),
        ("q: f", "*, q: f"),
    ],
)
def test_whatever_is_run_is_code(before: str, after: str) -> None:
    changed = CODE.replace(before, after, 1)
    assert changed != CODE
    assert proof.code_of(changed) != proof.code_of(CODE)


def test_a_string_that_is_used_is_code() -> None:
    assert proof.code_of('say("a")') != proof.code_of('say("b")')
    assert proof.code_of('kind = "a"') != proof.code_of('kind = "b"')
    assert proof.code_of('f"{kind} a"') != proof.code_of('f"{kind} b"'), "it may call what it shows"


def test_the_exact_folders_are_folders_of_the_package() -> None:
    for folder in proof.FOLDERS:
        assert list((proof.SOURCE / folder).glob("*.py")), folder


def test_a_state_is_proven_by_its_entry_until_it_changes(source: Path, file: Path) -> None:
    assert not proof.proven(source, file)
    entry = proof.write(passed=10, failed=0, skipped=2, seconds=3.4, machine="a desk", source=source, file=file)
    assert proof.proven(source, file)
    assert (entry["passed"], entry["failed"], entry["skipped"], entry["seconds"]) == (10, 0, 2, 3)
    assert entry["machine"] == "a desk"
    assert {"date", "python", "torch", "transformers"} <= entry.keys()
    (source / "audit" / "one.py").write_text("1 + 1\n")
    assert not proof.proven(source, file)


@pytest.mark.parametrize(("passed", "failed"), [(0, 0), (10, 1)])
def test_a_run_that_failed_or_ran_nothing_proves_nothing(source: Path, file: Path, passed: int, failed: int) -> None:
    with pytest.raises(ValueError, match="proves nothing"):
        proof.write(passed=passed, failed=failed, skipped=0, seconds=1, source=source, file=file)
    assert json.loads(file.read_text()) == []


def test_the_last_twenty_entries_are_kept_and_a_state_has_one(source: Path, file: Path) -> None:
    for number in range(25):
        (source / "core" / "one.py").write_text(f"{number}\n")
        for passed in (1, 2):
            proof.write(passed=passed, failed=0, skipped=0, seconds=1, machine="", source=source, file=file)
    kept = proof.entries(file)
    assert len(kept) == len({entry["hash"] for entry in kept}) == proof.MOST
    assert {entry["passed"] for entry in kept} == {2}
    assert proof.proven(source, file)


def test_the_command_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(proof.proven, "__defaults__", (proof.SOURCE, file))
    assert proof.main([]) == 1
    assert "make test-all" in capsys.readouterr().out
    assert proof.main(["--write", "--passed", "0"]) == 1
