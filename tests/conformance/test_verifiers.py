"""One suite for every registered verifier, on every kind of draft that it accepts, through every draft and every coin.

The code that runs is the one that serves users, in both of its forms: row by row as on the host (lazy), and in fixed
shapes as on a device. What it emits is compared with the target's distribution, its efficiency with the optimum that no
verifier passes, and each of its verdicts with the slow truth.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from branchwise.audit.enumeration import Enumerator, outcomes
from branchwise.audit.exact import audit_instance, emitted, lp_optimum
from branchwise.audit.instances import DRAWS, Drafts, ExactProbs, Instance
from branchwise.core.tree import DraftTree
from branchwise.verify import VERIFIERS, Verdicts, Verifier
from tests import slow_truth, strategies
from tests.slow_truth import normalise
from tests.strategies import as_truth, tokens_to, world, worlds

PAIRS = [(name, kind) for name in VERIFIERS for kind, draw in DRAWS.items() if draw in VERIFIERS.find(name).accepts]
pairs = pytest.mark.parametrize(("name", "kind"), PAIRS, ids=[f"{name} on {kind}" for name, kind in PAIRS])

TOLERANCE = 1e-9
"""of distributions, for rounding"""
SLACK = 1e-7
"""of optima, for the solver"""


# Worlds


def random(size: tuple[int, int, int], sigma: float = 1.0, seed: int = 0, kind: str = "plain") -> Instance:
    return world(slow_truth.Instance.random(*size, sigma, seed, kind))


def rows(instance: Instance, p: Any = None, q: Any = None) -> Instance:
    """The instance with every row of p or q changed by a function of the row."""
    tables = ((change, probs) for change, probs in ((p, instance.p), (q, instance.q)))
    new = [
        probs if change is None else tuple(np.apply_along_axis(change, 1, t) for t in probs) for change, probs in tables
    ]
    return Instance(new[0], new[1], instance.paths)


def perfect(instance: Instance) -> Instance:
    """Drafted from the target's own distributions."""
    return Instance(instance.p, instance.p[:-1], instance.paths)


def certain(row: np.ndarray) -> np.ndarray:
    return np.eye(len(row))[row.argmax()]


def top_two(row: np.ndarray) -> np.ndarray:
    return normalise(np.where(row >= np.sort(row)[-2], row, 0.0))


def last_two(row: np.ndarray) -> np.ndarray:
    return normalise(np.where(np.arange(len(row)) >= len(row) - 2, row, 0.0))


def first_only(row: np.ndarray) -> np.ndarray:
    return np.eye(len(row))[0]


def tiny(row: np.ndarray) -> np.ndarray:
    """All but the first token hardly ever."""
    return normalise(np.where(np.arange(len(row)) == 0, 1.0, 1e-17 * row))


WORLDS: dict[str, Instance] = {
    "close": random((3, 2, 2), 0.3),
    "medium": random((3, 2, 2), 1.0),
    "far": random((3, 2, 2), 2.0),
    "deep": random((2, 3, 2), 1.0),
    "three paths": random((3, 2, 3), 1.0),
    "four paths": random((2, 2, 4), 1.0),
    "one path": random((3, 3, 1), 1.0),
    "one level": random((4, 1, 3), 1.0),
    "two tokens": random((2, 2, 3), 2.0),
    "more paths than tokens": random((2, 1, 4), 0.3),
    "equal distributions": perfect(random((3, 2, 2))),
    "certain target": rows(random((3, 2, 2)), p=certain),
    "certain draft": rows(random((3, 2, 2)), q=certain),
    "both certain": rows(random((3, 2, 2), 2.0), p=certain, q=certain),
    "forbidden by the target": rows(random((3, 2, 2)), p=last_two),
    "forbidden tokens only": rows(random((3, 2, 3)), p=last_two, q=first_only),
    "cut to the top of each distribution": rows(random((4, 2, 2), 2.0), p=top_two, q=top_two),
    "not covered by the draft": rows(random((4, 1, 4)), q=last_two),
    "tiny masses in the draft": rows(random((3, 2, 2)), q=tiny),
    "tiny masses in the target": rows(random((3, 2, 3)), p=tiny),
} | {
    f"{kind} {seed}": random(((3, 2, 2), (2, 2, 3), (3, 2, 3))[seed], (0.3, 1.0, 2.0)[seed], seed, kind)
    for kind in ("ties", "zeros", "one-hot", "end")
    for seed in range(3)
}


@cache
def drafts_of(name: str, kind: str) -> Drafts:
    return Drafts.of(kind, WORLDS[name])


@cache
def optimum_of(name: str, kind: str) -> float:
    return lp_optimum(drafts_of(name, kind))


# What is emitted


@pytest.mark.parametrize("where", WORLDS)
@pairs
def test_the_emitted_law_is_the_target_s_and_no_verifier_passes_the_optimum(name: str, kind: str, where: str) -> None:
    drafts, verifier = drafts_of(where, kind), VERIFIERS.build(name)
    for lazy in (True, False):
        distance, efficiency = emitted(verifier, drafts, lazy=lazy)
        assert distance < TOLERANCE, f"lazy={lazy}"
        assert 1 - TOLERANCE <= efficiency <= optimum_of(where, kind) + SLACK, f"lazy={lazy}"


@settings(max_examples=25)
@given(worlds())
@pairs
def test_the_emitted_law_is_the_target_s_on_any_laws(name: str, kind: str, instance: Instance) -> None:
    drafts, verifier = Drafts.of(kind, instance), VERIFIERS.build(name)
    on_host, on_device = (emitted(verifier, drafts, lazy=lazy) for lazy in (True, False))
    assert max(on_host[0], on_device[0]) < TOLERANCE
    assert on_host[1] == pytest.approx(on_device[1], abs=1e-9)


@settings(max_examples=25)
@given(worlds())
def test_no_verifier_passes_the_optimum_on_any_laws(instance: Instance) -> None:
    for found in audit_instance(instance, [VERIFIERS.build(name) for name in VERIFIERS]):
        assert found.lossless
        assert found.block_efficiency <= found.lp + SLACK


# Drafts of other shapes


SHAPES = {
    "wide trees": ("rsd-c", lambda truth: slow_truth.rsd_c(truth, [2] * truth.L)),
    "three below two": ("rsd-c", lambda truth: slow_truth.rsd_c(truth, [2, 3, 1][: truth.L])),
    "ragged trees": ("rsd-c", slow_truth.rsd_s),
    "paths, nodes by token": ("paths", slow_truth.iid_paths),
}
SHAPED = [(name, shape) for shape, (kind, _) in SHAPES.items() for name, fitting in PAIRS if fitting == kind]


@pytest.mark.parametrize(("name", "shape"), SHAPED, ids=[f"{name} on {shape}" for name, shape in SHAPED])
def test_verdicts_are_exact_whatever_the_shape_of_the_tree(name: str, shape: str) -> None:
    # Stochastic beams leave nodes without children at every level, and children in another order than their nodes.
    kind, draw = SHAPES[shape]
    for seed, what in enumerate(("plain", "ties", "zeros")):
        truth = slow_truth.Instance.random(3, 2, 3 if kind == "rsd-c" else 2, 1.0, seed, what)
        drafts = strategies.drafts_of(truth, draw(truth), kind, by_token=kind == "paths")
        for lazy in (True, False):
            assert emitted(VERIFIERS.build(name), drafts, lazy=lazy)[0] < TOLERANCE
        assert_equals_the_slow_truth(name, kind, drafts)


# The frozen cases


CASES: list[dict[str, Any]] = json.loads((Path(__file__).parents[1] / "data" / "verification_cases.json").read_text())[
    "cases"
]
CASE_IDS = [f"{c['V']},{c['L']},{c['K']} {c['similarity']}" for c in CASES]
FROZEN = {
    ("auto", "paths"): "cascade",
    ("auto", "rsd-c"): "traversal on RSD-C (K,1,..)",
    ("rrs", "paths"): "rrs on i.i.d. paths, repeats dropped",
    ("rrs", "rsd-c"): "rrs on RSD-C (K,1,..)",
    ("traversal", "paths"): "traversal on i.i.d. paths, repeats dropped",
    ("traversal", "rsd-c"): "traversal on RSD-C (K,1,..)",
}
"""what the cases call a pair, where it is not the verifier's own name"""
OPTIMA = {"paths": "lp i.i.d. paths", "rsd-c": "lp RSD-C (K,1,..)"}


@pytest.mark.parametrize("case", CASES, ids=CASE_IDS)
@pytest.mark.parametrize("kind", DRAWS)
def test_a_frozen_case_has_its_optimum_and_its_block_efficiencies(kind: str, case: dict[str, Any]) -> None:
    drafts = Drafts.of(kind, Instance.from_case(case))
    optimum = lp_optimum(drafts)
    assert optimum == pytest.approx(case["optimum"].get(OPTIMA[kind], optimum), abs=1e-9, rel=0)
    for name in (name for name, fitting in PAIRS if fitting == kind):
        frozen = case["block_efficiency"].get(FROZEN.get((name, kind), name))
        for lazy in (True, False):
            distance, efficiency = emitted(VERIFIERS.build(name), drafts, lazy=lazy)
            assert distance < TOLERANCE, name
            assert efficiency <= optimum + SLACK, name
            assert (
                frozen is None
                or (name, kind) == ("match", "rsd-c")
                or efficiency == pytest.approx(frozen, abs=1e-9, rel=0)
            ), name


def test_every_registered_verifier_has_frozen_numbers() -> None:
    for name, kind in PAIRS:
        known = sum(FROZEN.get((name, kind), name) in case["block_efficiency"] for case in CASES)
        assert known >= 9, f"{name} on {kind}"


# Verdict by verdict


def as_draft(tree: DraftTree) -> slow_truth.Draft:
    """A tree as the slow truth writes it: its paths with their repeats, or its leaves with siblings in draw order."""
    leaves = tree.leaves or tuple(node for node in tree.postorder if not tree.children[node])
    return tuple(tuple(tokens_to(tree, leaf)) for leaf in leaves)


def verdict_law(verifier: Verifier, drafts: Drafts, *, lazy: bool) -> dict[tuple[slow_truth.Draft, Any, int], float]:
    """The probability, given the draft, of each accepted prefix and token after it."""
    p = drafts.p

    def verify(rows: Tensor, chance: Enumerator) -> Verdicts:
        return verifier(drafts.batch.take(rows), ExactProbs(p[rows], lazy=lazy), chance)

    known = [as_draft(tree) for tree in drafts.trees]
    same = Counter(known)  # draws that differ only in what no verifier looks at
    probs: dict[tuple[slow_truth.Draft, Any, int], float] = defaultdict(float)
    for found in outcomes(verify, len(drafts.trees)):
        for row, weight, verdict in zip(
            found.rows.tolist(), found.weights.tolist(), found.verdicts.read(), strict=True
        ):
            assert drafts.trees[row].topology.path(verdict.path[-1]) == list(verdict.path), "the path has a gap"
            probs[known[row], tuple(tokens_to(drafts.trees[row], verdict.path[-1])), verdict.token] += (
                weight / same[known[row]]
            )
    return probs


def truth_of(name: str, kind: str, paths: int) -> slow_truth.Verifier:
    if name == "auto":
        name = "traversal" if kind == "rsd-c" else "cascade" if paths > 1 else "block"
    rule: slow_truth.Verifier = getattr(slow_truth, name.replace("-", "_"))
    return rule


def assert_equals_the_slow_truth(name: str, kind: str, drafts: Drafts) -> None:
    # Where p and q agree, the rho of k-seq is a double root: half of the digits are all there are, in both.
    tolerance = 2e-8 if name == "k-seq" else 1e-12
    instance = as_truth(drafts.instance)
    drawn = [(1.0, as_draft(tree)) for tree in drafts.trees]
    truth = slow_truth.emitted_probs(instance, truth_of(name, kind, instance.K), drawn).verdicts
    for lazy in (True, False):
        found = verdict_law(VERIFIERS.build(name), drafts, lazy=lazy)
        for key in {*found, *truth}:
            assert found.get(key, 0.0) == pytest.approx(truth.get(key, 0.0), abs=tolerance, rel=0), (
                key,
                f"lazy={lazy}",
            )


AWKWARD = [
    "far",
    "deep",
    "one path",
    "one level",
    "equal distributions",
    "certain draft",
    "both certain",
    "forbidden by the target",
    "cut to the top of each distribution",
    "tiny masses in the draft",
    *("ties 0", "ties 1", "zeros 0", "one-hot 1", "end 1"),
]


@pytest.mark.parametrize("where", AWKWARD)
@pairs
def test_every_verdict_has_the_probability_that_the_slow_truth_gives_it(name: str, kind: str, where: str) -> None:
    # Catches what the emitted distribution does not show: two mistakes that cancel, or a rule that is lossless and
    # another one.
    assert_equals_the_slow_truth(name, kind, drafts_of(where, kind))


@pytest.mark.parametrize("kind", DRAWS)
def test_the_audit_s_drafts_are_those_of_the_slow_truth(kind: str) -> None:
    draw = {"paths": slow_truth.iid_paths, "rsd-c": slow_truth.rsd_c}[kind]
    for where, instance in WORLDS.items():
        drafts = drafts_of(where, kind)
        found: dict[slow_truth.Draft, float] = defaultdict(float)
        for tree, weight in zip(drafts.trees, drafts.weights.tolist(), strict=True):
            found[as_draft(tree)] += weight
        assert found == pytest.approx(slow_truth.merged(draw(as_truth(instance))), abs=1e-15), where


def test_every_law_of_a_draft_is_the_row_of_its_prefix() -> None:
    for kind in DRAWS:
        drafts, truth = drafts_of("three paths", kind), as_truth(WORLDS["three paths"])
        for row, tree in enumerate(drafts.trees):
            for node in range(len(tree)):
                prefix = tuple(tokens_to(tree, node))
                assert torch.equal(drafts.p[row, node], torch.from_numpy(truth.p[prefix]))
                if len(prefix) < truth.L:
                    assert tree.q is not None
                    assert torch.equal(tree.q[node], torch.from_numpy(truth.q[prefix]))
