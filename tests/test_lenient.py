"""Lenient acceptance, a plugin: its distribution is the one of its formula, and its distance is what it says."""

from __future__ import annotations

import itertools
import re
import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from branchwise.audit.exact import emitted
from branchwise.audit.instances import SIMILARITIES, Drafts, Instance
from branchwise.errors import LossyWarning, UsageError
from branchwise.methods import DISTANCES, Method
from branchwise.verify import VERIFIERS

DOCS = Path(__file__).parents[1] / "docs"
PLUGIN, PAGE = DOCS / "examples" / "lenient.py", DOCS / "train.md"


@pytest.fixture(autouse=True)
def lenient(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setattr(VERIFIERS, "_entries", dict(VERIFIERS._entries))
    monkeypatch.setattr("branchwise.methods.DISTANCES", DISTANCES)
    before = dict(DISTANCES)
    runpy.run_path(str(PLUGIN))
    yield VERIFIERS.find("lossy-lenient")
    DISTANCES.clear()
    DISTANCES.update(before)


def worlds(depth: int) -> list[Instance]:
    return [
        Instance.random(3, depth, 1, sigma, (seed,)) for sigma, seed in itertools.product(SIMILARITIES.values(), (0, 1))
    ]


@pytest.mark.parametrize("eps", [0.2, 0.5, 0.9])
def test_the_distance_is_that_of_the_formula(eps: float, lenient: Any) -> None:
    for instance in worlds(1):
        p, q = instance.p[0][0], instance.q[0][0]
        kept = np.minimum(q, p / eps)
        left = np.maximum(p - eps * q, 0)
        law = kept + (1 - kept.sum()) * left / left.sum() if left.sum() > 1e-12 else kept
        assert law.sum() == pytest.approx(1)
        assert bool((law <= p / eps + 1e-12).all())
        # A second token after a kept one is the target's own, so the whole distance is in the first.
        distance, efficiency = emitted(lenient(eps), Drafts.of("paths", instance))
        assert distance == pytest.approx(float(np.abs(law - p).sum() / 2), abs=1e-9)
        assert efficiency == pytest.approx(1 + kept.sum())


def test_more_leniency_keeps_more_and_is_further_away(lenient: Any) -> None:
    for instance in worlds(2):
        found = [emitted(lenient(eps), Drafts.of("paths", instance)) for eps in (1.0, 0.7, 0.4)]
        distances, efficiencies = zip(*found, strict=True)
        assert distances[0] < 1e-9, "no leniency is token verification"
        assert list(distances) == sorted(distances)
        assert list(efficiencies) == sorted(efficiencies)


def test_what_it_says_of_its_distance_was_measured(lenient: Any) -> None:
    largest = max(emitted(lenient(0.5), Drafts.of("paths", instance))[0] for instance in worlds(3))
    assert DISTANCES["lossy-lenient"][0] == pytest.approx(largest, abs=6e-4)
    with pytest.warns(LossyWarning, match="is lossy: it changes the distribution"):
        Method("", "model:x/y", "chain:6", "lossy-lenient:0.5").warn_if_lossy()


def test_the_page_tells_what_is_measured(lenient: Any) -> None:
    rows = re.findall(r"^\| (0\.\d) \| (0\.\d+) \| (\d\.\d+) \|$", PAGE.read_text(), re.MULTILINE)
    assert len(rows) == 4
    for eps, told, tokens in rows:
        found = [emitted(lenient(float(eps)), Drafts.of("paths", instance)) for instance in worlds(3)]
        distances, efficiencies = zip(*found, strict=True)
        assert float(told) == pytest.approx(max(distances), abs=6e-4)
        assert float(tokens) == pytest.approx(np.mean(efficiencies), abs=6e-3)


def test_no_leniency_is_refused_with_a_sentence() -> None:
    for eps in ("0", "1.5"):
        with pytest.raises(UsageError, match="Leniency is a share of q"):
            VERIFIERS.build(f"lossy-lenient:{eps}")
