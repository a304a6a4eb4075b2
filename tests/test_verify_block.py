"""Block verification: the running product, the last success, and that no verifier of one path accepts more."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from branchwise.audit.exact import emitted, lp_optimum
from branchwise.audit.instances import Drafts, Instance
from branchwise.verify import VERIFIERS
from branchwise.verify.block import Block, clipped_products
from tests.conformance.test_verifiers import AWKWARD, WORLDS, verdict_law
from tests.strategies import as_truth

modes = pytest.mark.parametrize("lazy", [True, False], ids=["host", "device"])


def clipped_by_hand(ratios: list[float]) -> list[float]:
    """The loop of the paper."""
    weights = [1.0]
    for ratio in ratios:
        weights.append(min(1.0, weights[-1] * ratio))
    return weights


@given(
    st.lists(
        st.lists(st.sampled_from([0.0, 1e-30, 0.25, 0.5, 1.0, 2.0, 4.0, 1e30]), min_size=4, max_size=4),
        min_size=1,
        max_size=5,
    )
)
def test_clipped_products_are_those_of_the_loop(rows: list[list[float]]) -> None:
    found = clipped_products(torch.tensor(rows, dtype=torch.float64))
    assert found.shape == (len(rows), 5)
    for row, products in zip(rows, found.tolist(), strict=True):
        assert products == pytest.approx(clipped_by_hand(row), rel=1e-9)


@given(st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=40))
def test_clipped_products_of_a_long_path_are_those_of_the_loop(ratios: list[float]) -> None:
    found = clipped_products(torch.tensor([ratios], dtype=torch.float64))[0]
    assert found.tolist() == pytest.approx(clipped_by_hand(ratios), rel=1e-9)
    # Where the product is held at 1 it is 1 to the last digit: `w == 1` decides what is certain.
    assert (found[torch.tensor(clipped_by_hand(ratios)) == 1].sub(1).abs() < 1e-9).all()


def test_products_that_are_held_are_exactly_one() -> None:
    assert clipped_products(torch.tensor([[3.0, 0.1, 20.0, 1.0]], dtype=torch.float64))[0].tolist()[1] == 1.0
    assert clipped_products(torch.tensor([[0.3, 0.1, 2000.0, 7.0]], dtype=torch.float64))[0, 3:].tolist() == [1.0, 1.0]


@modes
@pytest.mark.parametrize("where", AWKWARD)
def test_a_prefix_is_kept_with_all_that_both_laws_allow_it(where: str, lazy: bool) -> None:
    truth = as_truth(WORLDS[where])
    kept, drafted = {(): 1.0}, {(): 1.0}
    for u in itertools.chain(*(itertools.product(range(truth.V), repeat=n) for n in range(1, truth.L + 1))):
        drafted[u] = drafted[u[:-1]] * truth.q[u[:-1]][u[-1]]
        kept[u] = min(drafted[u], kept[u[:-1]] * truth.p[u[:-1]][u[-1]])
    drafts = Drafts.of("paths", Instance(WORLDS[where].p, WORLDS[where].q, paths=1))
    _, efficiency = emitted(Block(), drafts, lazy=lazy)
    assert efficiency == pytest.approx(sum(kept.values()), abs=1e-12)
    assert efficiency == pytest.approx(lp_optimum(drafts), abs=1e-7)


@modes
def test_a_success_behind_a_failure_counts(lazy: bool) -> None:
    # Catches a rule that stops at the first failure. The first token alone is good for a half, with the second the
    # path is worth all of its mass again.
    p = (np.array([[0.25, 0.75]]), np.array([[1.0, 0.0], [0.5, 0.5]]), np.full((4, 2), 0.5))
    q = (np.array([[0.5, 0.5]]), np.array([[0.5, 0.5], [0.5, 0.5]]))
    found = verdict_law(Block(), Drafts.of("paths", Instance(p, q, paths=1)), lazy=lazy)
    draft = ((0, 0),)
    assert found[draft, (0, 0), 0] + found[draft, (0, 0), 1] == pytest.approx(1)
    assert not any(key[0] == draft and len(key[1]) == 1 for key in found)


@modes
def test_after_a_stop_comes_what_is_left_of_the_weighted_target(lazy: bool) -> None:
    # Catches a residual of p - q where w p - q is right, and the odds that belong to it.
    p = (np.array([[0.25, 0.75]]), np.array([[0.9, 0.1], [0.5, 0.5]]), np.full((4, 2), 0.5))
    q = (np.array([[0.5, 0.5]]), np.array([[0.4, 0.6], [0.5, 0.5]]))
    found = verdict_law(Block(), Drafts.of("paths", Instance(p, q, paths=1)), lazy=lazy)
    draft, w = ((0, 1),), 0.5
    whole, left = w * 0.1 / 0.6, w * 0.9 - 0.4
    odds = left / (left + 1 - w)
    assert found[draft, (0, 1), 0] + found[draft, (0, 1), 1] == pytest.approx(whole)
    assert found[draft, (0,), 0] == pytest.approx((1 - whole) * odds)
    assert found[draft, (), 1] == pytest.approx((1 - whole) * (1 - odds))
    assert (draft, (0,), 1) not in found


@modes
@pytest.mark.parametrize("where", AWKWARD)
def test_block_is_never_below_token(where: str, lazy: bool) -> None:
    drafts = Drafts.of("paths", WORLDS[where])
    token, block = (emitted(VERIFIERS.build(name), drafts, lazy=lazy)[1] for name in ("token", "block"))
    assert block >= token - 1e-12


@modes
def test_only_the_first_path_is_looked_at(lazy: bool) -> None:
    one, many = (Instance(WORLDS["far"].p, WORLDS["far"].q, paths) for paths in (1, 2))
    alone = verdict_law(Block(), Drafts.of("paths", one), lazy=lazy)
    for (draft, accepted, token), weight in verdict_law(Block(), Drafts.of("paths", many), lazy=lazy).items():
        assert weight == pytest.approx(alone[draft[:1], accepted, token], abs=1e-12)
