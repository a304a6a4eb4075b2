"""What every preset and every verifier wrote once, it writes today."""

from __future__ import annotations

import json

import pytest

from tests.golden import FILE, differences, written


@pytest.mark.parametrize("part", ["toy", "smollm2"])
def test_texts_are_the_recorded_ones(part: str) -> None:
    known = json.loads(FILE.read_text())
    if part not in known:
        pytest.skip(f"no texts of {part} are recorded")
    assert differences(written([part]), known) == []
