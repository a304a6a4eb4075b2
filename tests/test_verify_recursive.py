"""Recursive rejection, with and without replacement: the odds of every try, and what is wanted after the last."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from branchwise.audit.exact import emitted
from branchwise.audit.instances import Drafts, Instance
from branchwise.core.batch import TreeBatch
from branchwise.core.tree import DraftTree
from branchwise.verify import VERIFIERS
from branchwise.verify.recursive import Tried, reject
from tests.conformance.test_verifiers import AWKWARD, WORLDS, verdict_law
from tests.slow_truth import residual, without
from tests.strategies import path_trees

modes = pytest.mark.parametrize("lazy", [True, False], ids=["host", "device"])


def by_hand(
    p: np.ndarray, q: np.ndarray, tokens: list[int], replace: bool, acceptance: float
) -> tuple[list[float], float, np.ndarray]:
    """The loop of the papers, which rewrites both distributions after every rejection."""
    odds, wanted, left, drawn = [], acceptance, p, q
    for token in tokens:
        odds.append(min(1.0, wanted * left[token] / drawn[token]) if drawn[token] > 0 else 0.0)
        mass = np.maximum(wanted * left - drawn, 0).sum()
        left = residual(left, drawn, wanted)
        wanted = mass / (mass + 1 - wanted) if mass + 1 - wanted > 0 else 0.0
        if not replace:
            drawn = without(drawn, token)
    return odds, wanted, left


def tried(p: np.ndarray, q: np.ndarray, tokens: list[int], replace: bool, acceptance: float | None) -> Tried:
    rows = (torch.from_numpy(row)[None, None] for row in (p, q))
    start = None if acceptance is None else torch.tensor([[acceptance]], dtype=torch.float64)
    valid = torch.ones(1, 1, len(tokens), dtype=torch.bool)
    return reject(*rows, torch.tensor([[tokens]]), valid, replace=replace, acceptance=start)


@st.composite
def nodes(draw: st.DrawFn, replace: bool) -> tuple[np.ndarray, np.ndarray, list[int]]:
    """Distributions p, q (vocabulary,), and tokens that may have been drawn from q."""
    size = draw(st.integers(2, 5))
    weights = st.lists(st.integers(0, 4), min_size=size, max_size=size).filter(any)
    p, q = (np.array(draw(weights), dtype=np.float64) for _ in range(2))
    if draw(st.booleans()):
        p, q = (
            probs * draw(st.sampled_from([1.0, 0.5])) + np.linspace(0.01, 0.3, size) * (probs > 0) for probs in (p, q)
        )
    p, q = p / p.sum(), q / q.sum()
    token = st.sampled_from(np.flatnonzero(q).tolist())
    return p, q, draw(st.lists(token, min_size=1, max_size=4, unique=not replace))


@settings(max_examples=150)
@given(st.booleans().flatmap(lambda r: st.tuples(st.just(r), nodes(r))), st.sampled_from([None, 0.9, 0.5, 0.1]))
def test_tries_have_the_odds_of_the_loop_that_rewrites_both_laws(
    case: tuple[bool, tuple[np.ndarray, np.ndarray, list[int]]], acceptance: float | None
) -> None:
    replace, (p, q, tokens) = case
    if replace:
        acceptance = None  # only traversal starts with less than all, and its children are distinct
    odds, wanted, left = by_hand(p, q, tokens, replace, 1.0 if acceptance is None else acceptance)
    found = tried(p, q, tokens, replace, acceptance)
    # Behind a child that is accepted for sure nothing is asked, and nothing that is said there matters.
    sure = next((turn for turn, chance in enumerate(odds) if chance > 1 - 1e-12), len(odds))
    assert found.odds[0, 0, : sure + 1].tolist() == pytest.approx(odds[: sure + 1], abs=1e-9)
    assert found.odds.isfinite().all()
    assert ((found.odds >= 0) & (found.odds <= 1)).all()
    if sure == len(odds):
        assert float(found.acceptance) == pytest.approx(wanted, abs=1e-9)
        kept = np.maximum(p - float(found.share) * q, 0)
        if kept.sum() > 1e-9:
            assert kept / kept.sum() == pytest.approx(left, abs=1e-7)


@given(nodes(replace=False), st.integers(1, 3))
def test_children_that_do_not_exist_change_nothing(case: tuple[np.ndarray, np.ndarray, list[int]], pad: int) -> None:
    p, q, tokens = case
    rows = [torch.from_numpy(row).expand(2, 1, -1) for row in (p, q)]
    padded = torch.tensor([[tokens + [0] * pad]] * 2)
    valid = torch.arange(len(tokens) + pad).expand(2, 1, -1) < torch.tensor([len(tokens), 1])[:, None, None]
    found = reject(*rows, padded, valid, replace=False)
    for row, count in enumerate((len(tokens), 1)):
        alone = tried(p, q, tokens[:count], False, None)
        assert found.odds[row, 0].tolist() == alone.odds[0, 0].tolist() + [0.0] * (len(tokens) + pad - count)
        assert float(found.acceptance[row]) == float(alone.acceptance)
        assert float(found.share[row]) == float(alone.share)


def test_trying_leaves_the_laws_as_they_were() -> None:
    # q may be a view of what the drafter recorded.
    p, q = torch.tensor([[[0.2, 0.3, 0.5]]]), torch.tensor([[[0.5, 0.25, 0.25]]])
    before = p.clone(), q.clone()
    reject(p, q, torch.tensor([[[0, 1]]]), torch.ones(1, 1, 2, dtype=torch.bool), replace=False)
    assert torch.equal(p, before[0])
    assert torch.equal(q, before[1])


@modes
def test_distinct_children_that_cover_the_target_always_serve_it(lazy: bool) -> None:
    # The cover property: with as many children as tokens, one of them is accepted.
    drafts = Drafts.of("rsd-c", Instance(WORLDS["one level"].p, WORLDS["one level"].q, paths=4))
    assert emitted(VERIFIERS.build("rrs"), drafts, lazy=lazy)[1] == pytest.approx(2, abs=1e-12)


@modes
def test_a_rejected_token_has_nothing_left(lazy: bool) -> None:
    # A repeat of it is rejected for free, with replacement or without.
    p, q = np.array([[0.1, 0.5, 0.4]]), np.array([[0.6, 0.2, 0.2]])
    drafts = Drafts.of("paths", Instance((p, np.full((3, 3), 1 / 3)), (q,), paths=2))
    for name in ("mss", "rrs"):
        probs = verdict_law(VERIFIERS.build(name), drafts, lazy=lazy)
        assert sum(probs[((0,), (0,)), (0,), y] for y in range(3)) == pytest.approx(0.1 / 0.6)
        assert (((0,), (0,)), (), 0) not in probs


@modes
def test_a_repeat_takes_its_share_with_replacement_and_none_without(lazy: bool) -> None:
    # What tells mss and rrs apart: after 0, 0 were rejected, mss has taken q away twice and rrs once.
    p, q = np.array([[0.1, 0.5, 0.4]]), np.array([[0.6, 0.3, 0.1]])
    drafts = Drafts.of("paths", Instance((p, np.full((3, 3), 1 / 3)), (q,), paths=2))
    once = np.maximum(p - q, 0)[0] / np.maximum(p - q, 0).sum()
    twice = np.maximum(once - q, 0)[0] / np.maximum(once - q, 0).sum()
    for name, left in (("rrs", once), ("mss", twice)):
        probs = verdict_law(VERIFIERS.build(name), drafts, lazy=lazy)
        for token in (1, 2):
            assert probs[((0,), (0,)), (), token] == pytest.approx((1 - 0.1 / 0.6) * left[token])


@modes
@pytest.mark.parametrize("where", AWKWARD)
def test_recursive_rejection_is_never_above_traversal_on_the_same_trees(where: str, lazy: bool) -> None:
    for kind in ("paths", "rsd-c"):
        drafts = Drafts.of(kind, WORLDS[where])
        top_down, bottom_up = (emitted(VERIFIERS.build(name), drafts, lazy=lazy)[1] for name in ("rrs", "traversal"))
        assert top_down <= bottom_up + 1e-12


@given(st.lists(path_trees(), min_size=1, max_size=3))
def test_the_next_nodes_of_all_paths_are_kept_in_draw_order_with_repeats(batch: list[DraftTree]) -> None:
    tree_batch = TreeBatch(batch)
    table: Tensor = tree_batch.candidates
    for row, tree in enumerate(batch):
        for node in range(tree_batch.nodes):
            expected = [-1] * tree_batch.paths.shape[1]
            for number, path in enumerate(tree.paths):
                if node in path[:-1]:
                    expected[number] = path[path.index(node) + 1]
            assert table[row, node].tolist() == expected
