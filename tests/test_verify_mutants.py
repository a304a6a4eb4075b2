"""The table of mutants (`python -m tests.mutants` runs it) must fit the source that it changes."""

from __future__ import annotations

import ast
from collections import Counter

import pytest

from tests.mutants import MUTANTS, ROOT, TESTS, Mutant


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_still_applies_and_still_is_a_program(mutant: Mutant) -> None:
    text = (ROOT / "src" / "branchwise" / mutant.file).read_text()
    assert text.count(mutant.old) == 1
    assert mutant.new != mutant.old
    ast.parse(text.replace(mutant.old, mutant.new))


def test_every_family_has_its_mutants_and_its_tests() -> None:
    living = Counter(mutant.family for mutant in MUTANTS if not mutant.equivalent)
    assert set(living) == set(TESTS)
    assert min(living.values()) >= 5
    assert len({(mutant.file, mutant.old, mutant.new) for mutant in MUTANTS}) == len(MUTANTS)
    assert all((ROOT / file.partition("::")[0]).exists() for files in TESTS.values() for file in files)
    rules = {file.name for file in (ROOT / "src" / "branchwise" / "verify").glob("*.py")} - {"capture.py"}
    assert {mutant.file.removeprefix("verify/") for mutant in MUTANTS} >= rules
