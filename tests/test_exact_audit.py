"""The exact audit: it passes what is lossless, flags every rule that is not, and its optimum is one."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from branchwise.audit.exact import TOLERANCE, Audited, audit_instance, emitted, lp_optimum
from branchwise.audit.instances import DRAWS, SIMILARITIES, Drafts, Instance, read_cases
from branchwise.core.batch import TreeBatch
from branchwise.core.rng import Chance
from branchwise.core.target_probs import TargetProbs
from branchwise.core.tree import DraftTree, Draw
from branchwise.errors import UsageError
from branchwise.verify import VERIFIERS, Verdicts, Verifier, cascade
from branchwise.verify.block import Kept
from branchwise.verify.block import Path as OnePath
from branchwise.verify.cascade import Cascade
from branchwise.verify.gbv import Choice, Draws
from branchwise.verify.recursive import RRS
from tests import slow_truth
from tests.strategies import as_truth, worlds

INSTANCES = [Instance.random(3, 2, 2, sigma, [seed]) for seed in range(2) for sigma in SIMILARITIES.values()]
PLAIN = INSTANCES[1]


# What is wrong is flagged


def along(batch: TreeBatch, probs: TargetProbs) -> tuple[OnePath, Tensor, Tensor, Tensor]:
    """The first path, its rows of p and q (batch, n, vocabulary), and p/q at its tokens (batch, n)."""
    path = OnePath.below(batch, batch.paths[:, 0])
    p, q = probs.at(path.nodes), batch.q_rows(path.nodes[:, :-1])
    tokens = path.tokens[..., None]
    return path, p, q, (p[:, :-1].gather(2, tokens) / q.gather(2, tokens))[..., 0]


class StopsAtTheFirstFailure:
    """Block verification that goes on only while the coins succeed."""

    name = "stops"
    accepts = frozenset({Draw.PATHS})

    def __call__(self, batch: TreeBatch, probs: TargetProbs, chance: Chance) -> Verdicts:
        path, p, q, ratios = along(batch, probs)
        w, kept, left = torch.ones(len(batch), dtype=torch.float64), torch.zeros_like(path.length), p[:, 0]
        left = (p[:, 0] - q[:, 0]).clamp_min(0)
        for i in range(1, path.tokens.shape[1] + 1):
            w = (w * ratios[:, i - 1]).clamp_max(1)
            if i < path.tokens.shape[1]:
                rest = (w[:, None] * p[:, i] - q[:, i]).clamp_min(0)
                odds = rest.sum(dim=1) / (rest.sum(dim=1) + 1 - w)
            else:
                rest, odds = p[:, i], w
            success = (kept == i - 1) & (chance.first(torch.where(kept == i - 1, odds, 0.0)[:, None], i) == 0)
            kept, left = torch.where(success, i, kept), torch.where(success[:, None], rest, left)
        return path.verdicts(kept, chance.pick(left))


class DrawsFromTheTargetAfterARejection:
    """Token verification with the residual of the wrong distribution."""

    name = "wrong residual"
    accepts = frozenset({Draw.PATHS})

    def __call__(self, batch: TreeBatch, probs: TargetProbs, chance: Chance) -> Verdicts:
        path, p, _, ratios = along(batch, probs)
        kept = chance.first(1 - ratios.clamp_max(1), 0)  # the first coin that rejects
        return path.verdicts(kept, chance.pick(p.gather(1, kept[:, None, None].expand(-1, 1, p.shape[2]))[:, 0]))


class KeepsQAfterARejection(RRS):
    """Recursive rejection of distinct children as if each were a fresh draw: q is not renormalised."""

    name = "keeps q"
    accepts = frozenset({Draw.WITHOUT_REPLACEMENT})
    replace = True


class KeepsCopies(Cascade):
    """The cascade that goes on with copies of the path it has rejected, and with q as it was, whatever path it took."""

    name = "keeps copies"


@pytest.fixture
def planted(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Verifier:
    verifier: Verifier = request.param()
    if isinstance(verifier, KeepsCopies):
        right = cascade.go_on

        def keep_copies(choice: Choice, block: Kept, *, last: bool) -> Draws:
            choice = copy.copy(choice)
            choice.taken_first = torch.ones_like(choice.taken_first)
            return right(choice, block, last=last)

        monkeypatch.setattr(cascade, "go_on", keep_copies)
    return verifier


@pytest.mark.parametrize(
    "planted",
    [StopsAtTheFirstFailure, DrawsFromTheTargetAfterARejection, KeepsQAfterARejection, KeepsCopies],
    indirect=True,
    ids=lambda verifier: verifier.name,
)
def test_a_planted_verifier_is_flagged(planted: Verifier) -> None:
    found = [audited for instance in INSTANCES for audited in audit_instance(instance, [planted])]
    assert len(found) == len(INSTANCES)
    assert not all(audited.lossless for audited in found)
    assert max(audited.tv for audited in found) > 1e-3


def test_the_verifiers_that_the_planted_ones_are_made_from_pass() -> None:
    for instance in INSTANCES:
        for audited in audit_instance(instance, [VERIFIERS.build(name) for name in VERIFIERS]):
            assert audited.lossless, audited


@pytest.mark.parametrize("name", ["token", "block", "gbv", "cascade", "mss", "k-seq", "rrs", "traversal"])
def test_drafts_of_the_best_token_that_pass_for_draws_are_flagged(name: str) -> None:
    # The classic mistake of an engine: it drafts by argmax and records the softmax as q.
    q = tuple(np.eye(3)[table.argmax(axis=1)] for table in PLAIN.q)
    truth = Drafts.of("paths", Instance(PLAIN.p, q, paths=2))
    [tree] = truth.trees
    softmax = torch.from_numpy(np.array([PLAIN.q[0][0], PLAIN.q[1][int(tree.tokens[1])]]))
    pretended = [replace(tree, q=softmax)]
    biased = replace(truth, trees=pretended)
    verifier = VERIFIERS.build(name)
    assert emitted(verifier, truth)[0] < TOLERANCE
    assert emitted(verifier, biased)[0] > 1e-2
    # Match looks at no q: to it any tree is as good as another.
    assert emitted(VERIFIERS.build("match"), biased)[0] < TOLERANCE


def test_a_wrong_rule_may_have_the_right_block_efficiency() -> None:
    # Why the distance is measured at all.
    drafts = Drafts.of("paths", PLAIN)
    wrong, right = (emitted(rule, drafts) for rule in (DrawsFromTheTargetAfterARejection(), VERIFIERS.build("token")))
    assert wrong[1] == pytest.approx(right[1], abs=1e-12)
    assert right[0] < TOLERANCE < 1e-3 < wrong[0]


def test_a_verifier_is_audited_on_the_drafts_that_it_accepts_only() -> None:
    found = audit_instance(PLAIN, [VERIFIERS.build(name) for name in VERIFIERS], case=7)
    pairs = [(audited.verifier, audited.drafts) for audited in found]
    assert len(pairs) == len(set(pairs))
    assert set(pairs) == {(n, kind) for n in VERIFIERS for kind in DRAWS if DRAWS[kind] in VERIFIERS.find(n).accepts}
    assert {audited.case for audited in found} == {7}
    assert audit_instance(PLAIN, []) == []


# By hand


def test_one_level_of_two_tokens_by_hand() -> None:
    instance = Instance(
        (np.array([[0.7, 0.3]]), np.array([[1.0, 0.0], [0.5, 0.5]])), (np.array([[0.4, 0.6]]),), paths=1
    )
    found = {audited.verifier: audited for audited in audit_instance(instance, list(map(VERIFIERS.build, VERIFIERS)))}
    assert found["token"].block_efficiency == pytest.approx(1 + 0.4 + 0.3)
    assert found["match"].block_efficiency == pytest.approx(1 + 0.7 * 0.4 + 0.3 * 0.6)
    assert found["token"].lp == pytest.approx(1.7)


class Nothing:
    """Accepts nothing and draws from the target."""

    name = "nothing"
    accepts = frozenset(Draw)
    shift = 0.0

    def __call__(self, batch: TreeBatch, probs: TargetProbs, chance: Chance) -> Verdicts:
        root = torch.zeros(len(batch), dtype=torch.long)
        row = probs.at(root)
        paths = torch.full((len(batch), batch.depth + 1), -1)
        paths[:, 0] = 0
        return Verdicts(paths, chance.pick(row * (1 - self.shift) + self.shift / row.shape[1]))


def test_a_verifier_that_accepts_nothing_is_lossless_with_one_token_a_step() -> None:
    distance, efficiency = emitted(Nothing(), Drafts.of("paths", PLAIN))
    assert distance < 1e-12
    assert efficiency == pytest.approx(1, abs=1e-12)


def test_the_distance_is_half_the_sum_of_differences_of_whole_texts() -> None:
    verifier = Nothing()
    verifier.shift = 0.25
    # Only the first token has another distribution, and what follows it is the target's own.
    expected = 0.25 * np.abs(PLAIN.p[0][0] - 1 / 3).sum() / 2
    assert emitted(verifier, Drafts.of("rsd-c", PLAIN))[0] == pytest.approx(expected, abs=1e-12)


# The optimum


@pytest.mark.parametrize("kind", DRAWS)
def test_the_optimum_is_that_of_the_slow_truth(kind: str) -> None:
    draw: Callable[..., slow_truth.Drafts] = {"paths": slow_truth.iid_paths, "rsd-c": slow_truth.rsd_c}[kind]
    for instance in [*INSTANCES, *(Instance.random(2, 3, 2, 1.0, [seed]) for seed in range(2))]:
        truth = slow_truth.lp_optimum(as_truth(instance), draw(as_truth(instance)))
        assert lp_optimum(Drafts.of(kind, instance)) == pytest.approx(truth, abs=1e-8)


@settings(max_examples=25)
@given(worlds())
def test_the_optimum_is_that_of_the_slow_truth_on_any_laws(instance: Instance) -> None:
    truth = as_truth(instance)
    for kind, drafts in (("paths", slow_truth.iid_paths(truth)), ("rsd-c", slow_truth.rsd_c(truth))):
        assert lp_optimum(Drafts.of(kind, instance)) == pytest.approx(slow_truth.lp_optimum(truth, drafts), abs=1e-7)


# Instances and cases


def test_random_instances_are_laws_that_repeat_with_their_seed() -> None:
    one, other, third = (Instance.random(4, 2, 3, 1.0, seed) for seed in ([1, 2], [1, 2], [1, 3]))
    assert (one.vocabulary, one.depth, one.paths) == (4, 2, 3)
    assert [table.shape for table in one.p] == [(1, 4), (4, 4), (16, 4)]
    assert [table.shape for table in one.q] == [(1, 4), (4, 4)]
    for table in (*one.p, *one.q):
        assert (table >= 0).all()
        assert np.allclose(table.sum(axis=1), 1, atol=1e-15)
    assert all((a == b).all() for a, b in zip(one.p + one.q, other.p + other.q, strict=True))
    assert not (one.p[0] == third.p[0]).all()


def test_the_farther_the_draft_the_less_is_accepted() -> None:
    def mean(sigma: float) -> float:
        instances = [Instance.random(3, 2, 1, sigma, [seed]) for seed in range(8)]
        return float(np.mean([emitted(VERIFIERS.build("block"), Drafts.of("paths", i))[1] for i in instances]))

    close, medium, far = map(mean, SIMILARITIES.values())
    assert 3 > close > medium > far > 1


def case(**changes: object) -> dict[str, object]:
    probs = {"": [0.5, 0.5], "0": [1.0, 0.0], "1": [0.25, 0.75]}
    return {"V": 2, "L": 1, "K": 2, "p": probs, "q": {"": [0.9, 0.1]}} | changes


def test_a_case_is_read_with_prefixes_in_their_places(tmp_path: Path) -> None:
    file = tmp_path / "cases.json"
    file.write_text(json.dumps({"cases": [case(), case(K=3)]}))
    [instance, more] = read_cases(file)
    assert (instance.paths, more.paths) == (2, 3)
    assert [table.tolist() for table in instance.p] == [[[0.5, 0.5]], [[1.0, 0.0], [0.25, 0.75]]]
    assert [table.tolist() for table in instance.q] == [[[0.9, 0.1]]]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "cannot be read as"),
        ("[]", "cannot be read as"),
        ("{}", "cannot be read as"),
        (json.dumps({"cases": [case(), {"V": 2}]}), "Case 1 of"),
        (json.dumps({"cases": [case(q={})]}), "Case 0 of"),
        (json.dumps({"cases": [case(q={"": [0.9, 0.2]})]}), "Case 0 .* not a distribution"),
        (json.dumps({"cases": [case(q={"": [1.5, -0.5]})]}), "Case 0 .* not a distribution"),
        (json.dumps({"cases": [case(q={"": [0.5, 0.25, 0.25]})]}), "Case 0 .* not a distribution"),
        (json.dumps({"cases": [case(V="two")]}), "Case 0 of"),
    ],
)
def test_a_broken_file_of_cases_gets_one_sentence(tmp_path: Path, content: str, message: str) -> None:
    file = tmp_path / "cases.json"
    file.write_text(content)
    with pytest.raises(UsageError, match=message):
        read_cases(file)


def test_a_file_that_is_not_there_gets_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be read"):
        read_cases(tmp_path / "none.json")


def test_a_line_of_the_audit_has_these_fields() -> None:
    audited = Audited(3, "block", "paths", 1e-17, 1.5, 1.75)
    assert audited.as_dict() == {
        "case": 3,
        "verifier": "block",
        "drafts": "paths",
        "tv": 1e-17,
        "block_efficiency": 1.5,
        "lp": 1.75,
    }
    assert audited.lossless
    assert not replace(audited, tv=2e-9).lossless


def test_repeated_paths_stay_repeats_and_zero_masses_are_never_drawn() -> None:
    instance = Instance((np.full((1, 3), 1 / 3), np.full((3, 3), 1 / 3)), (np.array([[0.5, 0.0, 0.5]]),), paths=2)
    drafts = Drafts.of("paths", instance)
    assert drafts.weights.tolist() == [0.25] * 4
    drawn = [[int(tree.tokens[leaf]) for leaf in tree.leaves] for tree in drafts.trees]
    assert drawn == [[0, 0], [0, 2], [2, 0], [2, 2]]
    assert [len(tree) for tree in drafts.trees] == [2, 3, 3, 2]
    assert all(isinstance(tree, DraftTree) and tree.draw is Draw.PATHS for tree in drafts.trees)
