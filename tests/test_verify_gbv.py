"""Greedy multi-path block verification: which path is taken, and the distribution that it was taken from."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from branchwise.audit.exact import emitted
from branchwise.audit.instances import Drafts, ExactProbs, Instance
from branchwise.core.rng import SeededChance
from branchwise.verify import VERIFIERS, gbv
from branchwise.verify.block import clipped_products, verify_block
from branchwise.verify.gbv import GBV, GRID, LambdaGBV, Paths, best_mixture
from branchwise.verify.order import Order
from tests import slow_truth
from tests.conformance.test_verifiers import AWKWARD, WORLDS, as_draft
from tests.strategies import as_truth, worlds

modes = pytest.mark.parametrize("lazy", [True, False], ids=["host", "device"])


def some_chance(rows: int) -> SeededChance:
    return SeededChance(torch.arange(rows), torch.zeros(rows, dtype=torch.long))


def assert_the_highest_path_is_taken(drafts: Drafts, lazy: bool) -> None:
    truth = as_truth(drafts.instance)
    paths = Paths(drafts.batch, ExactProbs(drafts.p, lazy=lazy))
    choice = paths.choose(paths.all, some_chance(len(drafts.trees)), (0.0,), coin=0)
    for tree, taken in zip(drafts.trees, choice.taken.tolist(), strict=True):
        draft = as_draft(tree)
        assert draft[taken] == slow_truth.highest(truth.p.__getitem__, truth.q.__getitem__, draft)


@modes
@pytest.mark.parametrize("where", [*AWKWARD, "three paths", "four paths", "zeros 2", "one-hot 2", "ties 2"])
def test_of_several_paths_the_one_that_ranks_highest_is_taken(where: str, lazy: bool) -> None:
    assert_the_highest_path_is_taken(Drafts.of("paths", WORLDS[where]), lazy)


@settings(max_examples=40)
@given(worlds(max_depth=3, max_paths=2))
def test_the_highest_path_is_taken_on_any_laws(instance: Instance) -> None:
    for lazy in (True, False):
        assert_the_highest_path_is_taken(Drafts.of("paths", instance), lazy)


@modes
@pytest.mark.parametrize("verifier", [GBV, LambdaGBV], ids=lambda rule: rule.name)
@pytest.mark.parametrize("where", ["medium", "close", "three paths", "deep", "ties 1", "zeros 0", "one-hot 2", "end 0"])
def test_the_rows_that_a_path_is_verified_against_are_the_law_it_was_taken_from(
    where: str, verifier: type[GBV], lazy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Catches a skewed distribution that is a distribution, sums to 1, and is that of another order or another number of
    # paths.
    drafts = Drafts.of("paths", WORLDS[where])
    truth = as_truth(drafts.instance)
    p, q = truth.p.__getitem__, truth.q.__getitem__
    drawn: dict[tuple[int, ...], float] = {}

    def spy(probs: Any, chance: Any, path: Any, spans: Any, weights: Tensor, drawn_from: Any, coin: int = 0) -> Any:
        rows = torch.cat([drawn_from(span, None) for span in spans], dim=1)
        inside = torch.arange(rows.shape[1]) < path.length[:, None]
        assert ((rows.sum(dim=-1) - 1).abs()[inside] < 1e-12).all()
        at_tokens = rows.gather(2, path.tokens[..., None])[..., 0]
        wanted = torch.cat([span.p for span in spans], dim=1).gather(2, path.tokens[..., None])[..., 0]
        assert torch.allclose(weights, clipped_products(wanted / at_tokens), atol=1e-12)
        for tokens, masses in zip(path.tokens.tolist(), at_tokens, strict=True):
            mass = float(masses.prod())
            assert drawn.setdefault(tuple(tokens), mass) == pytest.approx(mass, abs=1e-12), "it depends on the draft"
        return verify_block(probs, chance, path, spans, weights, drawn_from, coin)

    monkeypatch.setattr(gbv, "verify_block", spy)
    verifier()(drafts.batch, ExactProbs(drafts.p, lazy=lazy), some_chance(len(drafts.trees)))
    lam = 0.0 if verifier is GBV else slow_truth.best_lam(p(()), q(()), truth.K)
    taken: dict[tuple[int, ...], float] = defaultdict(float)
    for weight, paths in slow_truth.iid_paths(truth):
        taken[paths[0]] += lam * weight
        taken[slow_truth.highest(p, q, paths)] += (1 - lam) * weight
    for path, mass in drawn.items():  # those that this chance took; the distribution holds all
        assert mass == pytest.approx(taken[path], abs=1e-12)
    assert len(drawn) > 1


def mixture_of(p: np.ndarray, q: np.ndarray, count: int, lazy: bool, dtype: torch.dtype = torch.float64) -> float:
    rows = [torch.from_numpy(row).to(dtype)[None] for row in (p, q)]
    draws = gbv.Draws(torch.zeros(1, dtype=torch.long), torch.ones(1, count, dtype=torch.bool), *rows)
    order = Order(rows[0][:, None], rows[1][:, None], lazy=lazy)
    return float(best_mixture(draws, order, GRID, count, lazy=lazy))


@modes
def test_the_mixture_promises_most_and_of_equals_takes_the_first_path_least(lazy: bool) -> None:
    chosen = set()
    for seed in range(60):
        instance = slow_truth.Instance.random(4, 1, 2, (0.3, 1.0)[seed % 2], seed, ("plain", "ties")[seed % 3 == 0])
        p, q = instance.p[()], instance.q[()]
        for count in (2, 3, 5):
            best = slow_truth.best_lam(p, q, count)
            assert mixture_of(p, q, count, lazy) == best
            chosen.add(best)
            rough = mixture_of(p, q, count, lazy, torch.float32)
            highest, _ = slow_truth.skewed(p, q, 0.0, 1.0, count)
            promise = {lam: np.minimum(p, lam * q + (1 - lam) * highest).sum() for lam in (best, rough)}
            assert promise[rough] > promise[best] - 1e-5
    assert chosen == set(GRID)
    # Nothing in common: all promise nothing, so the highest is taken.
    assert mixture_of(np.array([1.0, 0.0]), np.array([0.0, 1.0]), 2, lazy) == 0


@modes
def test_one_path_is_taken_as_the_first(lazy: bool) -> None:
    p, q = np.array([0.9, 0.1]), np.array([0.2, 0.8])
    assert mixture_of(p, q, 1, lazy) == 1


def test_the_highest_path_may_be_worse_than_one_path_and_the_mixture_is_not() -> None:
    instances = [Instance.random(3, 2, 2, 0.3, [seed]) for seed in range(8)]
    mean = {
        name: np.mean([emitted(VERIFIERS.build(name), Drafts.of("paths", i))[1] for i in instances])
        for name in ("block", "gbv", "lambda-gbv")
    }
    assert mean["gbv"] < mean["block"] < mean["lambda-gbv"]
