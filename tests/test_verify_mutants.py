"""The tables of mutants (`python -m tests.mutants` runs them) must fit the source that they change."""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

import pytest

from tests.mutants import FAMILIES, MUTANTS
from tests.mutants.family import Mutant

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_still_applies_and_still_is_a_program(mutant: Mutant) -> None:
    text = (ROOT / "src" / "branchwise" / mutant.file).read_text()
    assert text.count(mutant.old) == 1
    assert mutant.new != mutant.old
    if mutant.file.endswith(".py"):
        ast.parse(text.replace(mutant.old, mutant.new))


def test_every_family_has_its_mutants_and_its_tests() -> None:
    living = Counter(mutant.family.name for mutant in MUTANTS if not mutant.equivalent)
    assert sorted(living) == sorted(family.name for family in FAMILIES)
    assert min(living.values()) >= 5
    assert len({(mutant.file, mutant.old, mutant.new) for mutant in MUTANTS}) == len(MUTANTS)
    assert all((ROOT / file.partition("::")[0]).exists() for family in FAMILIES for file in family.tests)
    rules = {file.name for file in (ROOT / "src" / "branchwise" / "verify").glob("*.py")}
    assert {mutant.file.removeprefix("verify/") for mutant in MUTANTS} >= rules
