"""The order of tokens and the distribution of the highest of K draws: against a full sort, and against enumeration."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from branchwise.audit.exact import emitted
from branchwise.audit.instances import Drafts, Instance
from branchwise.verify import VERIFIERS, order
from branchwise.verify.order import Order, boost, sort_keys
from tests.strategies import probs


def slow_ranks(p: Tensor, q: Tensor) -> np.ndarray:
    """(vocabulary,): the place of each token in a full sort by the same rule, lowest first."""
    size = len(q)
    ratio = torch.where(q > 0, p / q, -1.0).tolist()
    if size > order.RANKED:  # those that carry little rank below all others, by their ids
        ratio = [r if heavy else -1.0 for r, heavy in zip(ratio, (q > 1 / order.RANKED).tolist(), strict=True)]
    places = np.empty(size, dtype=int)
    places[sorted(range(size), key=lambda token: (ratio[token], token))] = np.arange(size)
    return places


def slow_below(p: Tensor, q: Tensor) -> np.ndarray:
    """(vocabulary,) float64: the mass of the tokens that rank below."""
    places, masses = slow_ranks(p, q), q.double().numpy()
    by_place = np.empty(len(places), dtype=int)
    by_place[places] = np.arange(len(places))
    return (np.cumsum(masses[by_place]) - masses[by_place])[places]


def normal(size: int, seed: int, spread: float = 3.0) -> Tensor:
    return torch.softmax(spread * torch.randn(size, generator=torch.Generator().manual_seed(seed)).double(), dim=-1)


def one_hot(size: int, token: int) -> Tensor:
    return (torch.arange(size) == token).double()


def quantised(probs: Tensor) -> Tensor:
    """A distribution of powers of two, which keep their exact ratios: many ties in p/q."""
    rough = torch.where(probs > 0, 2.0 ** probs.clamp_min(1e-300).log2().round(), 0.0)
    return rough / rough.sum()


def pairs(size: int) -> dict[str, tuple[Tensor, Tensor]]:
    """Distributions p, q (vocabulary,) float64 that are awkward each in its own way."""
    p, q = normal(size, 1), normal(size, 2)
    few = torch.arange(size) % 7 == 1
    peaked = torch.where(torch.arange(size) == size // 2, 0.999, 0.001 * q)
    return {
        "plain": (p, q),
        "flat": (p, torch.full_like(q, 1 / size)),
        "all heavy tokens last": (p, q.sort().values),
        "equal": (q, q),
        "ties": (quantised(p), quantised(q)),
        "zeros": ((p * few) / (p * few).sum(), (q * (~few | (p > 0.001))) / (q * (~few | (p > 0.001))).sum()),
        "q certain": (p, one_hot(size, size - 1)),
        "p certain": (one_hot(size, size // 3), q),
        "both certain": (one_hot(size, 0), one_hot(size, size - 1)),
        "peaked": (p, peaked / peaked.sum()),
        "two tokens": (p, (one_hot(size, 1) + one_hot(size, size - 2)) / 2),
    }


SIZES = [2, 5, 700, 5_000]
CASES = [(size, name) for size in SIZES for name in pairs(2)] + [
    (151_936, "plain"),
    (151_936, "ties"),
    (151_936, "flat"),
]
cases = pytest.mark.parametrize(("size", "name"), CASES, ids=[f"{name} {size}" for size, name in CASES])
modes = pytest.mark.parametrize("lazy", [True, False], ids=["host", "device"])
types = pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])


def some_tokens(p: Tensor, q: Tensor) -> list[int]:
    """Ends, the heaviest, the highest and the lowest, and a few at random."""
    drawn = torch.randint(len(q), (6,), generator=torch.Generator().manual_seed(4)).tolist()
    return [0, len(q) - 1, int(q.argmax()), int((p / q).nan_to_num(0).argmax()), int(slow_ranks(p, q).argmax()), *drawn]


@modes
@types
@cases
def test_the_mass_below_every_token_is_that_of_a_full_sort(
    size: int, name: str, dtype: torch.dtype, lazy: bool
) -> None:
    p, q = (probs.to(dtype) for probs in pairs(size)[name])
    truth = slow_below(p, q)
    near = 1e-10 if dtype == torch.float64 else 2e-6
    found = Order(p[None, None], q[None, None], lazy=lazy)
    below = found.below()
    assert below.shape == (1, 1, size)
    assert below.dtype == dtype
    assert np.abs(below[0, 0].double().numpy() - truth).max() < near
    ranks = slow_ranks(p, q)
    for token in some_tokens(p, q):
        here = torch.tensor([[token]])
        assert float(found.below_at(here)) == pytest.approx(truth[token], abs=near)
        lower = torch.where(torch.from_numpy(ranks < ranks[token]), q, 0.0)
        assert torch.equal(found.only_below(here)[0, 0], lower)


@modes
@cases
def test_the_order_is_strict_so_that_masses_add_up_to_one(size: int, name: str, lazy: bool) -> None:
    # Catches two tokens that share a place: of K draws the highest would have a distribution of less or more than 1.
    p, q = pairs(size)[name]
    low = Order(p[None, None], q[None, None], lazy=lazy).below()[0, 0]
    for count in (1, 2, 5):
        assert float(((low + q) ** count - low**count).sum()) == pytest.approx(1, abs=1e-9)
    gaps = low[torch.from_numpy(np.argsort(slow_ranks(p, q)))].diff()
    masses = q[torch.from_numpy(np.argsort(slow_ranks(p, q)))]
    assert torch.allclose(gaps, masses[:-1], atol=1e-12)


@modes
def test_rows_of_a_batch_are_ordered_each_for_itself(lazy: bool) -> None:
    for size in (6, 2_000):
        rows = list(pairs(size).values())
        p, q = (torch.stack(probs).view(-1, 1, size) for probs in zip(*rows, strict=True))
        tokens = torch.arange(len(rows))[:, None] % size
        together = Order(p, q, lazy=lazy)
        for row in range(len(rows)):
            alone = Order(p[row, None], q[row, None], lazy=lazy)
            assert torch.equal(together.below()[row, None], alone.below())
            assert torch.equal(together.below_at(tokens)[row, None], alone.below_at(tokens[row, None]))
            assert torch.equal(together.only_below(tokens)[row, None], alone.only_below(tokens[row, None]))
        several = Order(p.transpose(0, 1), q.transpose(0, 1), lazy=lazy)  # as rows of one tree
        assert torch.equal(several.below()[0], together.below()[:, 0])
        assert torch.equal(several.below_at(tokens.T)[0], together.below_at(tokens)[:, 0])


@cases
def test_keys_and_then_ids_compare_as_the_order_does(size: int, name: str) -> None:
    # Paths are compared by keys, rows are sorted: a token must not be high for one and low for the other.
    p, q = pairs(size)[name]
    ranks = slow_ranks(p, q)
    tokens = torch.tensor(some_tokens(p, q))
    keys = sort_keys(p[tokens], q[tokens], size).tolist()
    for (key, token), (other_key, other) in itertools.combinations(zip(keys, tokens.tolist(), strict=True), 2):
        assert ((key, token) > (other_key, other)) == (ranks[token] > ranks[other])


def test_equal_ratios_rank_by_id() -> None:
    p, q = torch.tensor([0.125, 0.5, 0.25, 0.125]), torch.tensor([0.25, 0.25, 0.125, 0.375])
    p, q = torch.cat([p, p[:3]]) / 2, torch.cat([q, q[:3]]) / 2  # tokens 4, 5, 6 tie with 0, 1, 2, and 1 with 2
    below = Order(p[None, None], q[None, None], lazy=True).below()[0, 0]
    assert below.argsort().tolist() == [3, 0, 4, 1, 2, 5, 6]


@given(probs(2, 8), st.data())
def test_small_laws_are_ordered_like_a_full_sort(q: Tensor, data: st.DataObject) -> None:
    p = data.draw(probs(len(q), len(q)))
    truth = slow_below(p, q)
    for lazy in (True, False):
        found = Order(p[None, None], q[None, None], lazy=lazy)
        assert np.abs(found.below()[0, 0].double().numpy() - truth).max() < 1e-6


@settings(max_examples=60)
@given(probs(4, 9), st.integers(2, 3), st.data())
def test_laws_larger_than_what_is_ranked_are_ordered_like_a_full_sort(
    q: Tensor, ranked: int, data: st.DataObject
) -> None:
    p = data.draw(probs(len(q), len(q)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(order, "RANKED", ranked)
        truth, ranks = slow_below(p, q), slow_ranks(p, q)
        for lazy in (True, False):
            found = Order(p[None, None], q[None, None], lazy=lazy)
            assert np.abs(found.below()[0, 0].double().numpy() - truth).max() < 1e-6
            for token in range(len(q)):
                lower = torch.where(torch.from_numpy(ranks < ranks[token]), q, 0.0)
                assert torch.equal(found.only_below(torch.tensor([[token]]))[0, 0], lower)
                assert float(found.below_at(torch.tensor([[token]]))) == pytest.approx(truth[token], abs=1e-6)


@pytest.mark.parametrize("ranked", [2, 3])
@pytest.mark.parametrize("name", ["gbv", "lambda-gbv", "cascade"])
def test_verifiers_stay_exact_where_only_some_tokens_are_ranked(
    name: str, ranked: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What a vocabulary of 150,000 does, in one that can be enumerated: tokens with q up to 1/2 or 1/3 are not sorted.
    monkeypatch.setattr(order, "RANKED", ranked)
    sizes = [(4, 2, 2, 1.0), (4, 1, 3, 2.0), (5, 1, 2, 0.3), (4, 2, 2, 2.0)]
    instances = [Instance.random(v, depth, k, sigma, [seed, 2]) for seed, (v, depth, k, sigma) in enumerate(sizes)]
    for instance in instances:
        drafts = Drafts.of("paths", instance)
        found = [emitted(VERIFIERS.build(name), drafts, lazy=lazy) for lazy in (True, False)]
        assert max(distance for distance, _ in found) < 1e-12
        assert found[0][1] == pytest.approx(found[1][1], abs=1e-12)


# The distribution of the highest


def powers(below: Tensor, q: Tensor, share: float, count: int) -> Tensor:
    """The same distribution by differences of powers, in float64: [(A + X F)^K - (A + X F^-)^K] / [(A + X)^K - A^K]."""
    low = (1 - share) + share * below.double()
    return ((low + share * q.double()) ** count - low**count) / (1 - (1 - share) ** count)


@modes
@pytest.mark.parametrize("count", [1, 2, 3, 4, 8, 16])
@pytest.mark.parametrize("share", [1.0, 0.4, 0.01])
def test_the_boosted_law_is_a_law_and_that_of_the_highest_of_k(share: float, count: int, lazy: bool) -> None:
    for size in (4, 3_000):
        p, q = pairs(size)["plain"]
        below = Order(p[None, None], q[None, None], lazy=lazy).below()
        shares, counts = torch.tensor([[[share]]], dtype=torch.float64), torch.tensor([[[count]]])
        gain = boost(below, q[None, None], shares, counts, 16, lazy=lazy)
        probs = (gain * q)[0, 0]
        assert float(probs.sum()) == pytest.approx(1, abs=1e-12)
        assert torch.allclose(probs, powers(below[0, 0], q, share, count), atol=1e-9)
        rough = boost(below.float(), q[None, None].float(), shares.float(), counts, 16, lazy=lazy)
        assert torch.allclose(rough.double(), gain, rtol=1e-4)
        assert float((rough[0, 0].double() * q).sum()) == pytest.approx(1, abs=1e-5)


@modes
def test_rows_with_different_numbers_of_paths_are_boosted_each_by_its_own(lazy: bool) -> None:
    p, q = (probs.expand(6, 1, -1) for probs in pairs(5)["plain"])
    below = Order(p, q, lazy=lazy).below()
    counts, shares = torch.tensor([1, 2, 3, 5, 4, 1])[:, None, None], torch.full((6, 1, 1), 0.7, dtype=torch.float64)
    together = boost(below, q, shares, counts, 5, lazy=lazy)
    for row, count in enumerate(counts.flatten().tolist()):
        assert torch.allclose((together * q)[row, 0], powers(below[row, 0], q[row, 0], 0.7, count), atol=1e-12)
    assert (together[0] == 1).all()


def test_nothing_cancels_where_a_token_has_hardly_any_mass() -> None:
    # Catches differences of K-th powers: in float32 they lose all digits of a mass of 1e-9.
    q = torch.tensor([[[1e-9, 0.5, 0.5 - 1e-9]]])
    below = Order(q, q, lazy=True).below()
    gain = boost(below.float(), q, torch.ones(1, 1, 1), torch.tensor([[[4]]]), 4, lazy=True)
    places = Order(q, q, lazy=True).below()[0, 0].tolist()
    assert gain[0, 0, 0] == pytest.approx(4 * places[0] ** 3, abs=1e-6)
