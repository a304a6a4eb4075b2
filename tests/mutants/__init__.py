"""Mutation check: change one operator in the source, and a named test must fail.

    python -m tests.mutants                 every mutant; exits with 1 if one survives
    python -m tests.mutants block cascade   those of some families
    python -m tests.mutants --changed       those of files that changed since tests/proof.json did
    python -m tests.mutants --jobs 2        so many at a time

The source is copied, one text in one file is replaced, and the tests of the family run until the first failure. Pytest
does not run mutants, since that takes a while; `test_verify_mutants.py` checks that every one of them still applies, so
that the tables cannot rot. A mutant that changes nothing anybody could see is marked with the reason, and is not run.
"""

from __future__ import annotations

from tests.mutants import core, devices, engine, growth, heads, models, verify

PARTS = verify, core, growth, models, heads, engine, devices
FAMILIES = [family for part in PARTS for family in part.FAMILIES]
MUTANTS = [mutant for family in FAMILIES for mutant in family.mutants()]
