"""What every preset and every verifier wrote once, it writes today."""

from __future__ import annotations

import json
import os
import warnings
from pathlib import Path

import pytest

from branchwise.errors import LossyWarning
from tests.golden import FILE, differences, toy, written


@pytest.mark.parametrize("part", ["toy", "smollm2"])
def test_texts_are_the_recorded_ones(part: str) -> None:
    known = json.loads(FILE.read_text())
    assert differences(written([part], jobs=os.cpu_count() or 1), known) == []


def test_some_texts_of_the_toy_are_the_recorded_ones(tmp_path: Path) -> None:
    """What the quick tier compares."""
    known = json.loads(FILE.read_text())["toy"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", LossyWarning)
        found = toy(tmp_path, every=8)
    assert len(found) >= len(known) // 8 >= 5
    assert differences({"toy": found}, {"toy": {name: known[name] for name in found}}) == []
