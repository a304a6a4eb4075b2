"""The quick tier: its table names tests that exist, and every kind of thing keeps a case."""

from __future__ import annotations

import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

from branchwise.draft import DRAFTERS
from branchwise.verify import VERIFIERS
from tests.conformance.architectures import served
from tests.tiers import CASES, NONE, SLOW, quick_cases

TESTS = Path(__file__).parent
PROMISED = ("test_smollm2_default.py",)
"""files without slow tests that the promises below look at"""


LISTING = """
import sys, pytest

class Listing:
    def pytest_collection_finish(self, session):
        for item in session.items:
            print("CASE", "slow" if item.get_closest_marker("slow") else "quick", item.nodeid)

sys.exit(pytest.main(["--collect-only", "-qq", "-p", "no:cacheprovider", *sys.argv[1:]], plugins=[Listing()]))
"""
Cases = dict[str, set[str]]
"""`file::test` -> the parameters of its cases"""


@pytest.fixture(scope="module")
def tiers(request: pytest.FixtureRequest) -> dict[str, Cases]:
    """The cases of both tiers, of all files that the table or a promise names; asked of another process where this one
    has not collected them all."""
    files = {key.split("::")[0] for key in SLOW} | set(PROMISED)
    found: dict[str, Cases] = {"slow": defaultdict(set), "quick": defaultdict(set)}
    collected = request.config.stash[CASES]
    if files <= {test.split("::")[0] for test in collected}:
        for test, cases in collected.items():
            for parameters, quick in cases.items():
                if test.split("::")[0] in files:
                    found["quick" if quick else "slow"][test].add(parameters)
        return found
    command = [sys.executable, "-c", LISTING, *(f"tests/{file}" for file in sorted(files))]
    ran = subprocess.run(command, cwd=TESTS.parent, capture_output=True, text=True, check=True)
    for tier, test, parameters in re.findall(r"^CASE (slow|quick) tests/(.+?::\w+)(?:\[(.*)\])?$", ran.stdout, re.M):
        found[tier][test].add(parameters)
    return found


@pytest.fixture
def quick(tiers: dict[str, Cases]) -> Cases:
    return tiers["quick"]


def test_every_entry_names_a_test_and_parts_its_cases(tiers: dict[str, Cases]) -> None:
    for name, pattern in SLOW.items():
        assert name in tiers["slow"], f"no case of {name} is slow, if it exists: take it out of tests/tiers.py"
        assert (pattern == NONE) == (name not in tiers["quick"]), f"no case of {name} is quick, as its pattern says"


def test_what_the_table_does_not_name_is_quick(tiers: dict[str, Cases]) -> None:
    assert tiers["slow"].keys() == SLOW.keys()


def test_a_number_of_cases_is_scattered_over_all_values(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SLOW, "test_it.py::test_all", 6)
    cases = [f"{world}-{rule}-{place}" for world in "abcd" for rule in "xyz" for place in ("host", "device")]
    kept = quick_cases("test_it.py::test_all", cases)
    assert len(set(kept)) == 6
    for values in zip(*(case.split("-") for case in kept), strict=True):
        assert len(set(values)) > 1
    assert quick_cases("test_it.py::test_all", cases[:4]) == cases[:4]
    assert quick_cases("test_it.py::test_other", cases) == cases


def test_every_lossless_verifier_is_enumerated(tiers: dict[str, Cases]) -> None:
    enumerated = "test_the_emitted_law_is_the_target_s_and_no_verifier_passes_the_optimum"
    slow, quick = (tiers[tier][f"conformance/test_verifiers.py::{enumerated}"] for tier in ("slow", "quick"))
    assert {case.rsplit("-", 1)[0] for case in quick} >= {case.rsplit("-", 1)[0] for case in slow if "hot" not in case}
    assert {case.split(" on ")[0] for case in quick} == {name for name in VERIFIERS if not name.startswith("lossy")}


def test_every_drafter_writes_like_plain_decoding(quick: Cases) -> None:
    written = quick["conformance/test_drafters.py::test_the_text_is_that_of_plain_decoding"]
    assert {f"{name}-match" for name in DRAFTERS} <= written


def test_every_family_of_models_is_scored(quick: Cases) -> None:
    scored = quick["conformance/test_target.py::test_tree_scores_equal_the_models_own_forward_before_and_after_commits"]
    assert scored == set(served())


def test_a_real_model_runs_the_default_and_a_draft_model(quick: Cases) -> None:
    assert len([name for name in quick if name.startswith("test_smollm2_default.py::")]) == 2
    assert quick["test_smollm2_presets.py::test_greedy_text_is_that_of_plain_decoding"]
    assert "test_golden.py::test_some_texts_of_the_toy_are_the_recorded_ones" in quick


def test_every_kernel_runs_in_the_interpreter(quick: Cases) -> None:
    assert len(quick["test_attention.py::test_tree_attention_equals_the_plain_one"]) >= 5
    assert len(quick["test_recycle_kernels.py::test_learning_equals_the_plain_one"]) >= 5
    assert quick["test_device_paths.py::test_the_kernel_draws_the_same"]
    assert quick["test_graphs.py::test_a_fused_pass_scores_as_the_model_does"]
    laid = quick["test_head_drafter.py::test_the_best_trees_are_laid_on_the_device_as_on_the_host"]
    assert any(case.endswith("-True") for case in laid)
    assert len(quick["test_head_kernels.py::test_trees_are_laid_as_without_kernels"]) >= 5
    assert "test_head_kernels.py::test_of_equally_probable_nodes_the_first_is_kept_and_none_hangs_in_the_air" in quick
