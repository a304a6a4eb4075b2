"""The cascade: it goes on after a stop, with the draws that are still draws and the distribution that is now theirs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from branchwise.audit.exact import emitted
from branchwise.audit.instances import SIMILARITIES, Drafts, Instance
from branchwise.verify import VERIFIERS
from branchwise.verify.cascade import Cascade
from tests.conformance.test_verifiers import CASE_IDS, CASES, verdict_law

modes = pytest.mark.parametrize("lazy", [True, False], ids=["host", "device"])


class FirstOnly(Cascade):
    """Always takes the first path: recursive block verification."""

    mixtures = (1.0,)


class HighestOnly(Cascade):
    mixtures = (0.0,)


class Halves(Cascade):
    mixtures = (0.5,)


@modes
@pytest.mark.parametrize("case", CASES, ids=CASE_IDS)
def test_the_cascade_is_exact_with_any_mixture(case: dict[str, Any], lazy: bool) -> None:
    drafts = Drafts.of("paths", Instance.from_case(case))
    for rule, name in ((FirstOnly, "cascade, lam=1"), (HighestOnly, "cascade, lam=0"), (Halves, "")):
        distance, efficiency = emitted(rule(), drafts, lazy=lazy)
        assert distance < 1e-12
        assert efficiency == pytest.approx(case["block_efficiency"].get(name, efficiency), abs=1e-9, rel=0)


@modes
def test_a_copy_of_a_first_path_is_a_draw_like_any_other(lazy: bool) -> None:
    # Catches a cascade that drops the repeats of a chosen first path. The first of 0, 0, 1 is kept with 0.2 / 0.5.
    # Then 1/6 of token 1 and 5/6 of token 2 are wanted. The copy is rejected too, and takes all of token 1 with it.
    p, q = np.array([[0.2, 0.45, 0.35]]), np.array([[0.5, 0.4, 0.1]])
    drafts = Drafts.of("paths", Instance((p, np.full((3, 3), 1 / 3)), (q,), paths=3))
    probs = verdict_law(FirstOnly(), drafts, lazy=lazy)
    draft = ((0,), (0,), (1,))
    assert sum(probs[draft, (0,), y] for y in range(3)) == pytest.approx(0.4)
    assert probs[draft, (), 2] == pytest.approx(0.6)
    # Without the copy, the 1 is kept with (1/6) / 0.4.
    draft = ((0,), (1,), (0,))
    assert sum(probs[draft, (1,), y] for y in range(3)) == pytest.approx(0.6 * (1 / 6) / 0.4)


@modes
def test_after_the_highest_the_others_are_known_to_rank_below(lazy: bool) -> None:
    # Catches a cascade that forgets what it learnt: the others' distribution is q among the tokens below the chosen
    # one.
    p, q = np.array([[0.5, 0.2, 0.3]]), np.array([[0.1, 0.4, 0.5]])  # ranks: 1, 2, 0
    drafts = Drafts.of("paths", Instance((p, np.full((3, 3), 1 / 3)), (q,), paths=2))
    probs = verdict_law(HighestOnly(), drafts, lazy=lazy)
    # Of (1, 2) token 2 is taken, which is the highest of two with 0.9^2 - 0.4^2 = 0.65 and wanted with 0.3.
    draft = ((1,), (2,))
    assert sum(probs[draft, (2,), y] for y in range(3)) == pytest.approx(0.3 / 0.65)
    # Left: 0.5 - (1 - 0.9^2) of token 0 and 0.2 - 0.4^2 of token 1. The other draw ranked below 2: it is a 1, surely.
    left = {0: 0.5 - 0.19, 1: 0.2 - 0.16}
    wanted = left[1] / sum(left.values())
    assert sum(probs[draft, (1,), y] for y in range(3)) == pytest.approx((1 - 0.3 / 0.65) * wanted)
    assert probs[draft, (), 0] == pytest.approx((1 - 0.3 / 0.65) * (1 - wanted))


@pytest.mark.parametrize("similarity", SIMILARITIES)
def test_the_cascade_leads_the_other_verifiers_of_the_same_paths(similarity: str) -> None:
    for size in ((3, 2, 2), (2, 2, 3)):
        instances = [Instance.random(*size, SIMILARITIES[similarity], [seed, 5]) for seed in range(8)]
        mean = {
            name: np.mean([emitted(VERIFIERS.build(name), Drafts.of("paths", i), lazy=False)[1] for i in instances])
            for name in ("block", "gbv", "lambda-gbv", "mss", "traversal", "cascade")
        }
        assert max(mean, key=mean.__getitem__) == "cascade"
