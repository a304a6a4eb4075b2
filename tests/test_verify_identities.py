"""What verifiers must be to each other: with one path, with a perfect drafter, on the same trees, and on any tree."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from branchwise.audit.enumeration import Enumerator, outcomes
from branchwise.audit.exact import emitted
from branchwise.audit.instances import DRAWS, Drafts, ExactProbs, Instance
from branchwise.core.batch import TreeBatch
from branchwise.core.tree import DraftTree, Draw
from branchwise.verify import VERIFIERS, Verdicts
from tests.conformance.test_verifiers import AWKWARD, PAIRS, WORLDS, verdict_law
from tests.strategies import as_truth, trees, worlds

modes = pytest.mark.parametrize("lazy", [True, False], ids=["host", "device"])
LIKE_BLOCK = ["gbv", "lambda-gbv", "cascade", "traversal", "auto"]
LIKE_TOKEN = ["mss", "rrs", "k-seq"]


def with_paths(instance: Instance, paths: int) -> Instance:
    return Instance(instance.p, instance.q, paths)


@modes
@pytest.mark.parametrize("where", AWKWARD)
@pytest.mark.parametrize(("twin", "names"), [("block", LIKE_BLOCK), ("token", LIKE_TOKEN)])
def test_with_one_path_a_verifier_is_block_or_token(twin: str, names: list[str], where: str, lazy: bool) -> None:
    drafts = Drafts.of("paths", with_paths(WORLDS[where], 1))
    truth = verdict_law(VERIFIERS.build(twin), drafts, lazy=lazy)
    for name in names:
        found = verdict_law(VERIFIERS.build(name), drafts, lazy=lazy)
        for verdict in {*found, *truth}:
            assert found.get(verdict, 0.0) == pytest.approx(truth.get(verdict, 0.0), abs=1e-12), name


@settings(max_examples=30)
@given(worlds(max_paths=1))
def test_with_one_path_all_block_verifiers_agree_on_any_laws(instance: Instance) -> None:
    drafts = Drafts.of("paths", instance)
    for names in (["block", *LIKE_BLOCK], ["token", *LIKE_TOKEN]):
        found = [emitted(VERIFIERS.build(name), drafts, lazy=lazy)[1] for name in names for lazy in (True, False)]
        assert max(found) - min(found) < 1e-9


@modes
@pytest.mark.parametrize(
    ("name", "kind"), [pair for pair in PAIRS if pair[0] not in ("match", "gbv")], ids=lambda part: str(part)
)
def test_a_perfect_drafter_is_accepted_whole(name: str, kind: str, lazy: bool) -> None:
    # All but gbv, which takes the highest path even where the first one is perfect. Where the first token is certain
    # every mixture promises the same, so that lambda-gbv takes the highest too.
    certain = [] if name in ("lambda-gbv", "cascade") or (name, kind) == ("auto", "paths") else ["one-hot 2"]
    for where in ["medium", "two tokens", "ties 1", "end 1", *certain]:
        p = WORLDS[where].p
        drafts = Drafts.of(kind, Instance(p, p[:-1], WORLDS[where].paths))
        found = emitted(VERIFIERS.build(name), drafts, lazy=lazy)[1]
        assert found == pytest.approx(WORLDS[where].depth + 1, abs=1e-12)


@settings(max_examples=40)
@given(worlds())
def test_token_is_never_above_block_nor_recursive_rejection_above_traversal(instance: Instance) -> None:
    for kind, low, high in (("paths", "token", "block"), ("paths", "rrs", "traversal"), ("rsd-c", "rrs", "traversal")):
        drafts = Drafts.of(kind, instance)
        lower, upper = (emitted(VERIFIERS.build(name), drafts)[1] for name in (low, high))
        assert lower <= upper + 1e-9


@settings(max_examples=40)
@given(worlds(max_paths=2), trees(vocabulary=3, max_depth=2, max_width=3))
def test_match_is_exact_on_any_tree_whatsoever(instance: Instance, tree: DraftTree) -> None:
    # Not drawn at all, siblings that repeat a token, tokens that p forbids: all the same to it.
    truth = as_truth(instance)
    if tree.depth > instance.depth or int(tree.tokens.max()) >= instance.vocabulary:
        return
    batch = TreeBatch([tree])
    prefixes = [tuple(tree.tokens[tree.topology.path(node)[1:]].tolist()) for node in range(len(tree))]
    p = torch.stack([torch.from_numpy(truth.p[u]) for u in prefixes])[None]
    for lazy in (True, False):

        def verify(rows: Tensor, chance: Enumerator, lazy: bool = lazy) -> Verdicts:
            found: Verdicts = VERIFIERS.build("match")(batch.take(rows), ExactProbs(p[rows], lazy=lazy), chance)
            return found

        kept: dict[tuple[int, ...], float] = {}
        for found in outcomes(verify, 1):
            for verdict, weight in zip(found.verdicts.read(), found.weights.tolist(), strict=True):
                text = (*prefixes[verdict.path[-1]], verdict.token)
                kept[text] = kept.get(text, 0.0) + weight
        for text, weight in kept.items():
            mass = 1.0
            for n, token in enumerate(text):
                mass *= truth.p[text[:n]][token]
            assert weight == pytest.approx(mass, abs=1e-12)
        assert sum(kept.values()) == pytest.approx(1, abs=1e-12)


def test_every_kind_of_draw_that_can_be_enumerated_has_its_verifiers() -> None:
    elsewhere = {Draw.FORK, Draw.WITH_REPLACEMENT}  # lossy rules: test_longest.py; repeats: test_with_replacement.py
    assert set(DRAWS.values()) | {Draw.FIXED} | elsewhere == set(Draw)
    assert {kind for _, kind in PAIRS} == set(DRAWS)
