# ruff: noqa: N806  (P, Q, G are the letters of the papers)
"""The slow truth: against frozen numbers, the lemmas it rests on, and rules that are known to be wrong."""

from __future__ import annotations

import itertools
import json
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests import slow_truth
from tests.slow_truth import (
    END,
    KINDS,
    Chance,
    Draft,
    Drafts,
    Emitted,
    Instance,
    Prefix,
    Probs,
    Verdict,
    Verifier,
    accept_block,
    block,
    candidates,
    cascade,
    children,
    emitted_probs,
    gbv,
    highest,
    iid_paths,
    joint,
    k_seq,
    lambda_gbv,
    lp_optimum,
    match,
    merged,
    mixture,
    mss,
    one_path,
    outcomes,
    prefixes,
    residual,
    rrs,
    rsd_c,
    rsd_s,
    token,
    traversal,
    without_replacement,
)

Draw = Callable[[Instance], Drafts]

FROZEN = Path(__file__).parent / "data" / "verification_cases.json"
CASES: list[dict[str, Any]] = json.loads(FROZEN.read_text())["cases"]
CASE_IDS = [f"{c['V']},{c['L']},{c['K']} {c['similarity']}" for c in CASES]

RULES: dict[str, tuple[Verifier, Draw]] = {
    "token": (token, one_path),
    "block": (block, one_path),
    "gbv": (gbv, iid_paths),
    "lambda-gbv": (lambda_gbv, iid_paths),
    "cascade": (cascade, iid_paths),
    "cascade, lam=1": (partial(cascade, lam=1.0), iid_paths),
    "cascade, lam=0": (partial(cascade, lam=0.0), iid_paths),
    "match": (match, iid_paths),
    "mss": (mss, iid_paths),
    "k-seq": (k_seq, iid_paths),
    "rrs on i.i.d. paths, repeats dropped": (rrs, iid_paths),
    "rrs on RSD-C (K,1,..)": (rrs, rsd_c),
    "rrs on RSD-S": (rrs, rsd_s),
    "traversal on i.i.d. paths, repeats dropped": (traversal, iid_paths),
    "traversal on RSD-C (K,1,..)": (traversal, rsd_c),
    "traversal on RSD-S": (traversal, rsd_s),
}
"""by the names of the frozen cases"""

UNFROZEN: dict[str, tuple[Verifier, Draw]] = {
    "lambda-gbv, lam=1/2": (partial(lambda_gbv, lam=0.5), iid_paths),
    "cascade, lam=1/2": (partial(cascade, lam=0.5), iid_paths),
    "match on RSD-S": (match, rsd_s),
    "rrs on RSD-C (2,2,..)": (rrs, lambda instance: rsd_c(instance, [2] * instance.L)),
    "traversal on RSD-C (2,2,..)": (traversal, lambda instance: rsd_c(instance, [2] * instance.L)),
}

OPTIMA: dict[str, Draw] = {"lp single path": one_path, "lp i.i.d. paths": iid_paths, "lp RSD-C (K,1,..)": rsd_c}


def assert_laws(emitted: Emitted) -> None:
    """Whatever was drafted, some verdict follows."""
    totals: dict[Draft, float] = defaultdict(float)
    for (draft, _, _), probability in emitted.verdicts.items():
        totals[draft] += probability
    assert all(abs(total - 1) < 1e-12 for total in totals.values())


# The frozen cases


@pytest.mark.parametrize(
    ("case", "name"),
    [
        pytest.param(case, name, id=f"{name} {which}")
        for case, which in zip(CASES, CASE_IDS, strict=True)
        for name in RULES
        if name in case["block_efficiency"]
    ],
)
def test_a_frozen_case_has_its_block_efficiency_and_the_law_of_the_target(case: dict[str, Any], name: str) -> None:
    instance, (verifier, draw) = Instance.from_case(case), RULES[name]
    emitted = emitted_probs(instance, verifier, draw(instance))
    assert emitted.block_efficiency == pytest.approx(case["block_efficiency"][name], abs=1e-9, rel=0)
    assert emitted.total_variation < 1e-12
    assert_laws(emitted)


@pytest.mark.parametrize("case", CASES, ids=CASE_IDS)
def test_a_frozen_case_has_its_optimum(case: dict[str, Any]) -> None:
    instance = Instance.from_case(case)
    for name, optimum in case["optimum"].items():
        assert lp_optimum(instance, OPTIMA[name](instance)) == pytest.approx(optimum, abs=1e-9, rel=0)


def test_every_frozen_number_is_compared_but_those_of_one_verifier() -> None:
    frozen = {name for case in CASES for name in case["block_efficiency"]}
    assert frozen - set(RULES) == {"optimal transport per node"}
    assert {name for case in CASES for name in case["optimum"]} == set(OPTIMA)


# Distributions that are awkward


SIZES = [(3, 2, 2), (2, 2, 3), (4, 1, 3)]


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_every_verifier_is_lossless_and_below_the_optimum_on_awkward_laws(
    kind: str, size: tuple[int, int, int]
) -> None:
    for seed, sigma in enumerate((0.3, 2.0)):
        instance = Instance.random(*size, sigma, seed, kind)
        optimum = {draw: lp_optimum(instance, draw(instance)) for draw in (one_path, iid_paths, rsd_c, rsd_s)}
        for name, (verifier, draw) in (RULES | UNFROZEN).items():
            emitted = emitted_probs(instance, verifier, draw(instance))
            assert emitted.total_variation < 1e-12, name
            assert 1 <= emitted.block_efficiency <= optimum.get(draw, instance.L + 1) + 1e-8, name
            assert_laws(emitted)


@pytest.mark.parametrize("kind", KINDS)
def test_random_laws_are_laws_and_repeat_with_their_seed(kind: str) -> None:
    instance, again = (Instance.random(3, 2, 2, 1.0, 7, kind) for _ in range(2))
    assert set(instance.p) == set(prefixes(3, 2))
    assert set(instance.q) == set(prefixes(3, 1))
    for u, row in [*instance.p.items(), *instance.q.items()]:
        assert row.shape == (3,)
        assert (row >= 0).all()
        assert row.sum() == pytest.approx(1, abs=1e-15), u
    assert all((instance.p[u] == again.p[u]).all() for u in instance.p)
    assert all((instance.q[u] == again.q[u]).all() for u in instance.q)


def pairs(kind: str) -> list[tuple[Prefix, np.ndarray, np.ndarray]]:
    """Every (u, p(u), q(u)) of a few instances."""
    drawn = [Instance.random(3, 3, 2, 1.0, seed, kind) for seed in range(5)]
    return [(u, instance.p[u], row) for instance in drawn for u, row in instance.q.items()]


def test_ties_are_exact_among_unequal_tokens() -> None:
    tied = [
        P[s] != P[t] and P[s] / Q[s] == P[t] / Q[t]
        for _, P, Q in pairs("ties")
        for s, t in itertools.combinations(range(3), 2)
    ]
    assert sum(tied) > len(tied) / 10
    assert not any((P == Q).all() for _, P, Q in pairs("plain"))


def test_zeros_are_where_the_other_law_has_mass_and_where_it_has_none() -> None:
    seen = {(bool(P[t] > 0), bool(Q[t] > 0)) for _, P, Q in pairs("zeros") for t in range(3)}
    assert len(seen) == 4
    assert any(not (P * Q).any() for _, P, Q in pairs("zeros"))  # nothing in common


def test_one_hot_laws_meet_each_other_and_spread_ones() -> None:
    seen = {(P.max() == 1, Q.max() == 1, bool(P.argmax() == Q.argmax())) for _, P, Q in pairs("one-hot")}
    assert seen >= {(True, True, True), (True, True, False), (True, False, True), (False, True, True)}


def test_nothing_but_the_end_follows_the_end() -> None:
    for u, P, Q in pairs("end"):
        assert (END in u) == (P[END] == Q[END] == 1)


# What the verifiers must be to each other


@pytest.mark.parametrize("kind", KINDS)
def test_with_one_path_each_verifier_is_block_or_token(kind: str) -> None:
    instance = Instance.random(3, 2, 1, 1.0, 3, kind)
    drafts = list(iid_paths(instance))
    for twin, verifiers in {block: (gbv, lambda_gbv, cascade, traversal), token: (mss, rrs, k_seq)}.items():
        truth = emitted_probs(instance, twin, drafts).verdicts
        for verifier in verifiers:
            found = emitted_probs(instance, verifier, drafts).verdicts
            assert all(abs(found.get(key, 0) - truth.get(key, 0)) < 1e-12 for key in {*found, *truth}), verifier


def test_block_keeps_of_every_prefix_all_that_both_laws_allow() -> None:
    instance = Instance.random(3, 3, 1, 1.0, 5)
    kept = {(): 1.0}
    for u in itertools.islice(prefixes(3, 3), 1, None):
        kept[u] = min(joint(instance.q, u), kept[u[:-1]] * instance.p[u[:-1]][u[-1]])
    efficiency = emitted_probs(instance, block, one_path(instance)).block_efficiency
    assert efficiency == pytest.approx(sum(kept.values()), abs=1e-12)
    assert efficiency == pytest.approx(lp_optimum(instance, one_path(instance)), abs=1e-8)


def test_a_perfect_drafter_is_accepted_whole() -> None:
    drawn = Instance.random(3, 2, 2, 1.0, 1)
    instance = Instance(3, 2, 2, drawn.p, {u: drawn.p[u] for u in drawn.q})
    for verifier in (token, block, lambda_gbv, cascade, mss, k_seq, rrs, traversal):
        efficiency = emitted_probs(instance, verifier, iid_paths(instance)).block_efficiency
        assert efficiency == pytest.approx(3, abs=1e-12), verifier


def test_traversal_is_never_below_recursive_rejection_on_the_same_trees() -> None:
    for kind in KINDS:
        instance = Instance.random(3, 2, 2, 1.0, 2, kind)
        for draw in (iid_paths, rsd_c, rsd_s):
            top_down, bottom_up = (emitted_probs(instance, rule, draw(instance)) for rule in (rrs, traversal))
            assert bottom_up.block_efficiency >= top_down.block_efficiency - 1e-12


@pytest.mark.parametrize("lam", [0.0, 0.25, 1.0])
@pytest.mark.parametrize("kind", KINDS)
def test_the_skewed_rows_are_the_law_of_the_chosen_path(kind: str, lam: float) -> None:
    instance = Instance.random(3, 2, 3, 1.0, 4, kind)
    p, q = instance.p.__getitem__, instance.q.__getitem__
    chosen: dict[Prefix, float] = defaultdict(float)
    for weight, paths in iid_paths(instance):
        chosen[paths[0]] += lam * weight
        chosen[highest(p, q, paths)] += (1 - lam) * weight
    for x in chosen:
        rows = mixture(p, q, x, 3, lam)
        assert all(row.sum() == pytest.approx(1, abs=1e-12) for row in rows)
        assert np.prod([row[t] for row, t in zip(rows, x, strict=True)]) == pytest.approx(chosen[x], abs=1e-12)


def test_equal_ratios_rank_by_token_and_tokens_that_cannot_be_drafted_do_no_harm() -> None:
    P, Q = np.array([0.25, 0.0, 0.5, 0.25]), np.array([0.25, 0.25, 0.5, 0.0])
    rank = slow_truth.ranks(P, Q)
    assert rank[1] < rank[0] < rank[2]
    G, _ = slow_truth.skewed(P, Q, 0.0, 1.0, 2)
    assert G.tolist() == pytest.approx([0.5**2 - 0.25**2, 0.25**2, 1 - 0.5**2, 0])


def test_lam_has_the_greatest_overlap_and_of_equals_is_the_smallest() -> None:
    chosen = set()
    for seed in range(100):
        instance = Instance.random(3, 1, 2, 1.0, seed)
        P, Q = instance.p[()], instance.q[()]
        G, _ = slow_truth.skewed(P, Q, 0.0, 1.0, 2)
        overlap = {lam: np.minimum(P, lam * Q + (1 - lam) * G).sum() for lam in (0, 0.25, 0.5, 0.75, 1)}
        best = slow_truth.best_lam(P, Q, 2)
        assert all(overlap[best] >= other - 1e-12 for other in overlap.values())
        chosen.add(best)
    assert chosen == {0, 0.25, 0.5, 0.75, 1}
    assert slow_truth.best_lam(np.array([1.0, 0.0]), np.array([0.0, 1.0]), 2) == 0


# The drafts


@pytest.mark.parametrize("draw", [one_path, iid_paths, rsd_c, rsd_s])
@pytest.mark.parametrize("kind", KINDS)
def test_the_drafts_of_an_instance_weigh_one_together(kind: str, draw: Draw) -> None:
    instance = Instance.random(3, 2, 3, 1.0, 6, kind)
    weights = merged(draw(instance))
    assert sum(weights.values()) == pytest.approx(1, abs=1e-12)
    assert all(weight > 0 for weight in weights.values())


@pytest.mark.parametrize("draw", [rsd_c, rsd_s])
@pytest.mark.parametrize("kind", KINDS)
def test_siblings_of_the_first_level_are_drawn_without_replacement(kind: str, draw: Draw) -> None:
    instance = Instance.random(3, 2, 2, 1.0, 8, kind)
    drawn: dict[Prefix, float] = defaultdict(float)
    for weight, draft in draw(instance):
        drawn[tuple(children(draft, ()))] += weight
    assert drawn == pytest.approx({tokens: weight for weight, tokens in without_replacement(instance.q[()], 2)})


def test_a_level_of_a_stochastic_beam_is_a_draw_of_prefixes_without_replacement() -> None:
    instance = Instance.random(3, 2, 2, 1.0, 9)
    leaves = list(itertools.product(range(3), repeat=2))
    masses = np.array([joint(instance.q, x) for x in leaves])
    drawn: dict[Draft, float] = defaultdict(float)
    for weight, draft in rsd_s(instance):
        drawn[tuple(x for x in draft if len(x) == 2)] += weight
        assert len(children(draft, ())) == 2
    truth = {tuple(leaves[t] for t in order): weight for weight, order in without_replacement(masses, 2)}
    assert drawn == pytest.approx(truth)


def test_paths_read_as_a_tree_drop_repeats_in_order_of_first_appearance() -> None:
    paths = ((2, 0), (1, 1), (2, 0), (1, 0))
    assert candidates(paths, ()) == [2, 1, 2, 1]
    assert children(paths, ()) == [2, 1]
    assert children(paths, (1,)) == [1, 0]
    assert children(paths, (1, 1)) == []


# The enumerator


def test_every_answer_that_can_be_given_is_given_once_with_its_weight() -> None:
    probs = np.array([0.5, 0.0, 0.5])
    found = list(
        outcomes(lambda chance: (chance.coin(0.25) and chance.draw(probs), chance.coin(1.0), chance.coin(0.0)))
    )
    assert sorted(found) == [(0.125, (0, True, False)), (0.125, (2, True, False)), (0.75, (False, True, False))]


def test_chance_refuses_what_is_no_probability() -> None:
    for program in (lambda chance: chance.coin(1.1), lambda chance: chance.draw(np.array([0.5, 0.4]))):
        with pytest.raises(AssertionError):
            list(outcomes(program))


# Rules that look right: the distance must show each of them


def forgets_the_residual(p: Probs, q: Probs, paths: Draft, chance: Chance) -> Verdict:
    """Token verification that draws from p after a rejection."""
    x = paths[0]
    for i, t in enumerate(x):
        if not chance.coin(min(1, p(x[:i])[t] / q(x[:i])[t])):
            return x[:i], chance.draw(p(x[:i]))
    return x, chance.draw(p(x))


def clips_every_factor(p: Probs, q: Probs, paths: Draft, chance: Chance) -> Verdict:
    """Block verification whose weight is a product of clipped factors, and which stops at the first failure."""
    x, w = paths[0], 1.0
    for i, t in enumerate(x):
        w *= min(1, p(x[:i])[t] / q(x[:i])[t])
        if not chance.coin(w):
            return x[:i], chance.draw(residual(p(x[:i]), q(x[:i])))
    return x, chance.draw(p(x))


def verifies_the_highest_path_as_if_drawn_from_q(p: Probs, q: Probs, paths: Draft, chance: Chance) -> Verdict:
    return block(p, q, (highest(p, q, paths),), chance)


def breaks_ties_by_draft_order(p: Probs, q: Probs, paths: Draft, chance: Chance) -> Verdict:
    """GBV that selects by ratios, of equals the first drawn, and skews by ranks, of equals the last token."""
    s = max(paths, key=lambda x: [p(x[:i])[t] / q(x[:i])[t] for i, t in enumerate(x)])
    i, probs = accept_block(s, p, mixture(p, q, s, len(paths), lam=0.0), chance)
    return s[:i], chance.draw(probs)


def drops_repeats_first(rule: Verifier) -> Verifier:
    """For rules that count on K independent paths."""
    return lambda p, q, paths, chance: rule(p, q, tuple(dict.fromkeys(paths)), chance)


def keeps_q_after_a_rejection(p: Probs, q: Probs, tree: Draft, chance: Chance) -> Verdict:
    """Recursive rejection with replacement on children drawn without."""
    return mss(p, q, tree, chance)


def visits_siblings_backwards(p: Probs, q: Probs, tree: Draft, chance: Chance) -> Verdict:
    return traversal(p, q, tree[::-1], chance)


WRONG: list[tuple[Verifier, Draw]] = [
    (forgets_the_residual, one_path),
    (clips_every_factor, one_path),
    (verifies_the_highest_path_as_if_drawn_from_q, iid_paths),
    (breaks_ties_by_draft_order, iid_paths),
    (drops_repeats_first(gbv), iid_paths),
    (drops_repeats_first(cascade), iid_paths),
    (drops_repeats_first(mss), iid_paths),
    (keeps_q_after_a_rejection, rsd_c),
    (visits_siblings_backwards, rsd_c),
]


@pytest.mark.parametrize(("verifier", "draw"), WRONG, ids=lambda rule: rule.__name__)
def test_a_rule_that_is_wrong_is_seen(verifier: Verifier, draw: Draw) -> None:
    drawn = [Instance.random(3, 2, 2, 1.0, seed, kind) for seed in range(3) for kind in ("plain", "ties")]
    assert max(emitted_probs(instance, verifier, draw(instance)).total_variation for instance in drawn) > 1e-3


def test_a_wrong_rule_may_have_the_right_block_efficiency() -> None:
    instance = Instance.random(3, 2, 1, 1.0, 0)
    right, wrong = (emitted_probs(instance, rule, one_path(instance)) for rule in (token, forgets_the_residual))
    assert right.total_variation < 1e-12 < 1e-3 < wrong.total_variation
    assert right.block_efficiency == pytest.approx(wrong.block_efficiency, abs=1e-12)
