"""K-sequential selection: the root that it solves for, and exactness beside the root."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from branchwise.audit.exact import emitted
from branchwise.audit.instances import Drafts, ExactProbs
from branchwise.verify import spectr
from branchwise.verify.spectr import KSeq, solve
from tests.conformance.test_verifiers import AWKWARD, WORLDS
from tests.strategies import probs

modes = pytest.mark.parametrize("lazy", [True, False], ids=["host", "device"])


def excess(p: np.ndarray, q: np.ndarray, rho: float, count: int) -> float:
    """rho beta - 1 + (1 - beta)^m: below 0 left of the root, where the residual would be negative."""
    beta = np.minimum(p / rho, q).sum()
    return float(rho * beta - 1 + (1 - beta) ** count)


def bisect(p: np.ndarray, q: np.ndarray, count: int) -> float:
    low, high = 1.0, float(count)
    for _ in range(200):
        rho = (low + high) / 2
        low, high = (rho, high) if excess(p, q, rho, count) < 0 else (low, rho)
    return high


def solved(p: Tensor, q: Tensor, count: list[int], lazy: bool) -> tuple[Tensor, Tensor]:
    return solve(p, q, torch.tensor([count]), max(count), ExactProbs(p, lazy=lazy))


def softmax(size: int, seed: int) -> Tensor:
    noise = torch.randn(size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return torch.softmax(3 * noise, dim=-1)


@modes
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
@pytest.mark.parametrize("size", [3, 50, 5_000, 151_936])
def test_as_much_is_accepted_as_at_the_root_that_bisection_finds(size: int, dtype: torch.dtype, lazy: bool) -> None:
    # With many candidates of a good draft, everything is accepted at any rho beyond some point: there the digits of
    # rho mean nothing, those of 1 - (1 - beta)^m do. float32 stops after a few steps, always on the safe side.
    near, hair = (1e-12, 1e-12) if dtype == torch.float64 else (1e-4, 2e-6)
    for seed in range(2 if size > 100_000 else 6):
        p, q = softmax(size, seed), softmax(size, seed + 50)
        if seed % 3 == 1:
            q = 0.9 * p + 0.1 * q  # close
        counts = [1, 2, 4, 16]
        rows = [probs.to(dtype).expand(1, len(counts), -1) for probs in (p, q)]
        rho, beta = solved(*rows, counts, lazy)
        for column, count in enumerate(counts):
            truth, found = bisect(p.numpy(), q.numpy(), count), float(rho[0, column])
            betas = [np.minimum(p.numpy() / r, q.numpy()).sum() for r in (truth, found)]
            assert 1 <= found <= count
            assert found > truth * (1 - hair) or excess(p.numpy(), q.numpy(), found, count) > -1e-14
            assert 1 - (1 - betas[1]) ** count == pytest.approx(1 - (1 - betas[0]) ** count, abs=near)
            assert float(beta[0, column]) == pytest.approx(betas[1], abs=1e-12 if dtype == torch.float64 else 1e-5)
            if count == 2:  # where the root is a sharp one
                assert found == pytest.approx(truth, rel=hair)


@given(probs(2, 8), st.integers(1, 6), st.data())
def test_what_is_left_is_never_negative(q: Tensor, count: int, data: st.DataObject) -> None:
    # Left of the root more would be accepted of some token than the target wants.
    p = data.draw(probs(len(q), len(q)))
    for dtype, near in ((torch.float64, 1e-11), (torch.float32, 1e-5)):
        wide = [row.double() / row.double().sum() for row in (p, q)]
        rows = [row.to(dtype)[None, None] for row in wide]
        for lazy in (True, False):
            rho, beta = (float(value) for value in solved(*rows, [count], lazy))
            assert 1 <= rho <= count
            assert 0 <= beta <= 1 + near
            if beta > 0:
                taken = torch.minimum(wide[0] / rho, wide[1]) * ((1 - (1 - min(beta, 1.0)) ** count) / beta)
                assert float((wide[0] - taken).min()) > -near


@modes
def test_laws_with_nothing_in_common_accept_nothing(lazy: bool) -> None:
    p, q = torch.eye(2, dtype=torch.float64)[:, None, None]
    _, beta = solved(p, q, [3], lazy)
    assert float(beta) == 0
    assert emitted(KSeq(), Drafts.of("paths", WORLDS["forbidden tokens only"]), lazy=lazy) == pytest.approx(
        (0, 1), abs=1e-12
    )


@modes
@pytest.mark.parametrize("where", AWKWARD)
def test_a_rho_above_the_root_accepts_less_and_stays_exact(
    where: str, lazy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Where the iterations run out, or digits do. Catches a residual that is right only at the root.
    drafts = Drafts.of("paths", WORLDS[where])
    best = emitted(KSeq(), drafts, lazy=lazy)[1]

    def too_high(p: Tensor, q: Tensor, count: Tensor, most: int, probs: ExactProbs) -> tuple[Tensor, Tensor]:
        rho, _ = solve(p, q, count, most, probs)
        rho = rho + 0.3 * (count.clamp_min(1) - rho)
        return rho, torch.minimum(p / rho[..., None], q).sum(dim=-1)

    monkeypatch.setattr(spectr, "solve", too_high)
    distance, efficiency = emitted(KSeq(), drafts, lazy=lazy)
    assert distance < 1e-12
    assert efficiency <= best + 1e-9


@modes
def test_it_accepts_at_least_the_share_of_the_optimum_that_the_paper_promises(lazy: bool) -> None:
    for where in ("one level", "more paths than tokens", "not covered by the draft"):
        instance = WORLDS[where]
        p, q, count = instance.p[0][0], instance.q[0][0], instance.paths
        # The optimum of one level: 1 + min over lower sets H of the p/q order of p(H) - q(H)^m.
        order = np.argsort(np.divide(p, q, out=np.full_like(p, np.inf), where=q > 0))
        sets = [order[:n] for n in range(len(order) + 1)]
        optimum = 1 + min(p[H].sum() - q[H].sum() ** count for H in sets)
        accepted = emitted(KSeq(), Drafts.of("paths", instance), lazy=lazy)[1] - 1
        assert (1 - 1 / np.e) * optimum - 1e-9 <= accepted <= optimum + 1e-9
