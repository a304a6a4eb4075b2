"""Token verification: what each position keeps, and what follows a rejection."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from branchwise.audit.exact import emitted
from branchwise.audit.instances import Drafts, ExactProbs, Instance
from branchwise.verify.token import Token
from tests.conformance.test_verifiers import AWKWARD, WORLDS, verdict_law
from tests.strategies import as_truth


@pytest.mark.parametrize("where", AWKWARD)
def test_a_prefix_is_kept_with_the_product_of_what_both_laws_allow(where: str) -> None:
    truth = as_truth(WORLDS[where])
    kept = {(): 1.0}
    for u in itertools.chain(*(itertools.product(range(truth.V), repeat=n) for n in range(1, truth.L + 1))):
        kept[u] = kept[u[:-1]] * min(truth.p[u[:-1]][u[-1]], truth.q[u[:-1]][u[-1]])
    for lazy in (True, False):
        _, efficiency = emitted(Token(), Drafts.of("paths", WORLDS[where]), lazy=lazy)
        assert efficiency == pytest.approx(sum(kept.values()), abs=1e-12)


@pytest.mark.parametrize("lazy", [True, False], ids=["host", "device"])
def test_after_a_rejection_comes_what_the_target_wants_more_often_than_it_is_drafted(lazy: bool) -> None:
    p, q = np.array([[0.1, 0.6, 0.3]]), np.array([[0.5, 0.25, 0.25]])
    instance = Instance((p, np.full((3, 3), 1 / 3)), (q,), paths=1)
    found = verdict_law(Token(), Drafts.of("paths", instance), lazy=lazy)
    # Token 0 is accepted with 0.1 / 0.5; else the token is 1 or 2 by what is missing, 0.35 and 0.05 of 0.4.
    assert found[((0,),), (), 1] == pytest.approx(0.8 * 0.35 / 0.4)
    assert found[((0,),), (), 2] == pytest.approx(0.8 * 0.05 / 0.4)
    assert (((0,),), (), 0) not in found
    # The others are always accepted, and the target's own token follows.
    for token, following in itertools.product((1, 2), range(3)):
        assert found[((token,),), (token,), following] == pytest.approx(1 / 3)


@pytest.mark.parametrize("lazy", [True, False], ids=["host", "device"])
def test_only_the_first_path_is_looked_at(lazy: bool) -> None:
    one, many = (Instance(WORLDS["far"].p, WORLDS["far"].q, paths) for paths in (1, 2))
    alone = verdict_law(Token(), Drafts.of("paths", one), lazy=lazy)
    for (draft, accepted, token), weight in verdict_law(Token(), Drafts.of("paths", many), lazy=lazy).items():
        assert weight == pytest.approx(alone[draft[:1], accepted, token], abs=1e-12)


def test_a_walk_on_the_host_reads_no_row_below_a_rejection() -> None:
    # p forbids what was drafted: nothing below the root need be warped, and that is most of the work.
    p = np.array([[0.0, 1.0]])
    instance = Instance((p, np.full((2, 2), 0.5), np.full((4, 2), 0.5)), (np.array([[1.0, 0.0]]), np.eye(2)), paths=1)
    drafts = Drafts.of("paths", instance)

    class Watched(ExactProbs):
        asked: list[list[int]]

        def at(self, nodes: torch.Tensor) -> torch.Tensor:
            self.asked.append(nodes.flatten().tolist())
            return super().at(nodes)

    class Never:
        def first(self, odds: torch.Tensor, draw: int) -> torch.Tensor:
            assert (odds == 0).all()
            return torch.full((len(odds),), odds.shape[1])

        def pick(self, row: torch.Tensor, draw: int = 0) -> torch.Tensor:
            return row.argmax(dim=1)

    probs = Watched(drafts.p)
    probs.asked = []
    [verdict] = Token()(drafts.batch, probs, Never()).read()  # type: ignore[arg-type]
    assert (verdict.path, verdict.token) == ((0,), 1)
    assert probs.asked == [[0]]
