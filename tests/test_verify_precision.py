"""float32 and large vocabularies: the same odds and distributions as in float64, and no number that is none."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from branchwise.audit.exact import emitted
from branchwise.audit.instances import DRAWS, Drafts, ExactProbs, Instance
from branchwise.core.batch import TreeBatch
from branchwise.core.rng import Chance, SeededChance
from branchwise.core.target_probs import TargetProbs
from branchwise.core.tree import DraftTree
from branchwise.draft.sampler import SeededSampler
from branchwise.verify import VERIFIERS, Verdict, Verdicts, Verifier
from tests.conformance.test_verifiers import PAIRS, WORLDS, pairs, random, rows
from tests.strategies import grown, random_rule, tokens_to, worlds

modes = pytest.mark.parametrize("lazy", [True, False], ids=["host", "device"])
SPECS = {"paths": "paths:4x3", "rsd-c": "rsd-c:4,2,1"}


class Recorded(SeededChance):
    """Seeded chance that keeps what it was asked, and checks that it can be asked."""

    def __init__(self, rows: int, seed: int) -> None:
        super().__init__(torch.arange(rows) + 100 * seed, torch.zeros(rows, dtype=torch.long))
        self.odds: dict[int, Tensor] = {}
        self.probs: dict[int, Tensor] = {}

    def first(self, odds: Tensor, draw: int) -> Tensor:
        assert ((odds >= 0) & (odds <= 1)).all(), "odds that are none"  # which nan would fail too
        self.odds |= {draw + column: odds[:, column].double() for column in range(odds.shape[1])}
        return (~super().hopes(odds, draw)).long().cumprod(dim=1).sum(dim=1)

    def hopes(self, bounds: Tensor, draw: int) -> Tensor:
        assert ((bounds >= 0) & (bounds <= 1)).all(), "bounds that are none"
        return torch.ones_like(bounds, dtype=torch.bool)  # so that all odds are worked out

    def pick(self, probs: Tensor, draw: int = 0) -> Tensor:
        assert probs.isfinite().all(), "a distribution that is none"
        assert (probs >= 0).all(), "negative masses"
        assert (probs.sum(dim=1) > 0).all(), "a distribution without mass"
        self.probs[draw] = probs.double() / probs.double().sum(dim=1, keepdim=True)
        return super().pick(probs, draw)


# Large vocabularies


@cache
def scored(kind: str, vocabulary: int, seed: int) -> tuple[DraftTree, Tensor]:
    """A drawn tree and p (nodes, vocabulary), both float32; distributions as peaked as those of a language model."""
    target = random_rule(vocabulary, seed, spread=3.5)
    draft = random_rule(vocabulary, seed + 70, near=target, far=1.0)
    tree = grown(SPECS[kind], draft, SeededSampler(seed, 5))
    return tree, torch.stack([target(tuple(tokens_to(tree, node))) for node in range(len(tree))])


def verify(name: str, batch: list[tuple[DraftTree, Tensor]], dtype: torch.dtype, lazy: bool, seed: int) -> Recorded:
    trees = [replace(tree, q=tree.q.to(dtype)) for tree, _ in batch]  # type: ignore[union-attr]
    p = torch.nn.utils.rnn.pad_sequence([probs.to(dtype) for _, probs in batch], batch_first=True)
    chance = Recorded(len(batch), seed)
    chance.found = VERIFIERS.build(name)(TreeBatch(trees), ExactProbs(p, lazy=lazy), chance).read()  # type: ignore[attr-defined]
    return chance


def assert_agree(one: Recorded, other: Recorded, near: float) -> None:
    found: list[Verdict] = one.found  # type: ignore[attr-defined]
    assert found == other.found  # type: ignore[attr-defined]
    assert set(one.odds) & set(other.odds)
    for coin in set(one.odds) & set(other.odds):
        assert (one.odds[coin] - other.odds[coin]).abs().max() < near
    for draw in set(one.probs) & set(other.probs):
        assert (one.probs[draw] - other.probs[draw]).abs().max() < near


@modes
@pairs
def test_odds_and_residuals_in_float32_are_those_in_float64(name: str, kind: str, lazy: bool) -> None:
    if name == "match":
        return  # it draws from the target's rows as they are
    for seed in range(6):
        batch = [scored(kind, 5_000, 3 * seed + row) for row in range(3)]
        rough, fine = (verify(name, batch, dtype, lazy, seed) for dtype in (torch.float32, torch.float64))
        assert_agree(rough, fine, near=1e-5)


@pytest.mark.parametrize(("name", "kind"), [pair for pair in PAIRS if pair[0] not in ("match", "auto")])
def test_the_vocabulary_of_a_real_model_is_verified_as_exactly(name: str, kind: str) -> None:
    batch = [scored(kind, 151_936, 0)]
    for lazy in (True, False):
        rough, fine = (verify(name, batch, dtype, lazy, 0) for dtype in (torch.float32, torch.float64))
        assert_agree(rough, fine, near=2e-5)


@pytest.mark.parametrize("name", ["gbv", "lambda-gbv", "cascade"])
def test_sixteen_paths_are_as_exact_as_two(name: str) -> None:
    # Catches differences of K-th powers, which lose their digits as K grows.
    target = random_rule(300, 1, spread=2.0)
    draft = random_rule(300, 2, near=target, far=0.5)
    tree = grown("paths:16x3", draft, SeededSampler(3, 5))
    p = torch.stack([target(tuple(tokens_to(tree, node))) for node in range(len(tree))])
    for seed in range(8):
        for lazy in (True, False):
            rough, fine = (verify(name, [(tree, p)], dtype, lazy, seed) for dtype in (torch.float32, torch.float64))
            assert_agree(rough, fine, near=2e-5)


# No number that is none


class InFloat32:
    """A verifier that is shown its distributions in float32."""

    def __init__(self, verifier: Verifier) -> None:
        self.verifier, self.name, self.accepts = verifier, verifier.name, verifier.accepts

    def __call__(self, batch: TreeBatch, probs: TargetProbs, chance: Chance) -> Verdicts:
        assert isinstance(probs, ExactProbs)
        return self.verifier(batch, ExactProbs(probs.p.float(), lazy=probs.lazy), chance)


def in_float32(kind: str, instance: Instance) -> Drafts:
    """Drafts of distributions that float32 can write down, with their q in float32."""
    p, q = (tuple(t.astype(np.float32).astype(np.float64) for t in probs) for probs in (instance.p, instance.q))
    drafts = Drafts.of(kind, Instance(p, q, instance.paths))
    trees = [replace(tree, q=tree.q.float()) for tree in drafts.trees]  # type: ignore[union-attr]
    return replace(drafts, trees=trees)


def faint(row: np.ndarray) -> np.ndarray:
    """All but one token nearly as rarely as a growth may still draw them."""
    row = row * 1e-28
    row[0] = 1
    return row


def subnormal(row: np.ndarray) -> np.ndarray:
    """Masses that float32 can hardly write down."""
    row = row * 1e-42
    row[0] = 1
    return row


EXTREME: dict[str, Instance] = {
    **WORLDS,
    "faint masses in the draft": rows(random((3, 2, 2)), q=faint),
    "faint masses in the target": rows(random((3, 2, 2)), p=faint),
    "faint masses in both": rows(random((3, 2, 3), 2.0), p=faint, q=faint),
    "subnormal masses in the target": rows(random((3, 2, 2)), p=subnormal),
}


@pytest.mark.parametrize("where", EXTREME)
def test_in_float32_the_emitted_law_is_the_target_s_to_six_digits(where: str) -> None:
    for kind, draw in DRAWS.items():
        drafts = in_float32(kind, EXTREME[where])
        for name in VERIFIERS:
            if draw in VERIFIERS.find(name).accepts:
                assert emitted(InFloat32(VERIFIERS.build(name)), drafts, lazy=False)[0] < 2e-6, f"{name} on {kind}"


@settings(max_examples=25)
@given(worlds())
def test_in_float32_any_laws_are_verified_to_six_digits(instance: Instance) -> None:
    for kind, draw in DRAWS.items():
        drafts = in_float32(kind, instance)
        for name in VERIFIERS:
            if draw in VERIFIERS.find(name).accepts:
                assert emitted(InFloat32(VERIFIERS.build(name)), drafts, lazy=False)[0] < 2e-6, f"{name} on {kind}"


def awkward(vocabulary: int, seed: int) -> list[Tensor]:
    """Laws (vocabulary,) in float32: certain ones, some with zeros, some with hardly any mass on what they may draw."""
    noise = torch.Generator().manual_seed(seed)
    flat = torch.rand(vocabulary, generator=noise)
    certain = torch.zeros(vocabulary)
    certain[torch.randint(vocabulary, (1,), generator=noise)] = 1
    few = torch.where(torch.rand(vocabulary, generator=noise) < 3 / vocabulary, flat, 0.0)
    few[seed % vocabulary] = 0.5
    tiny = 1e-38 * flat + certain
    steep = torch.softmax(200 * flat, dim=0)
    return [probs / probs.sum() for probs in (flat, certain, few, tiny, steep, certain.roll(1))]


@modes
@pytest.mark.parametrize("vocabulary", [7, 1500])
@pairs
def test_awkward_laws_in_float32_give_odds_that_are_odds_and_laws_that_are_laws(
    name: str, kind: str, vocabulary: int, lazy: bool
) -> None:
    choose = torch.Generator().manual_seed(vocabulary)
    for seed in range(8):
        batch = []
        for row in range(4):
            p_of, q_of = (awkward(vocabulary, 2 * seed + row + which) for which in (0, 1000 * (row % 2)))
            picks = torch.randint(len(p_of), (64, 2), generator=choose).tolist()

            def draft(prefix: tuple[int, ...], q_of: list[Tensor] = q_of, picks: list[list[int]] = picks) -> Tensor:
                return q_of[picks[hash(prefix) % 64][0]]

            spec = ("paths:3x3", "paths:1x2")[row % 2] if kind == "paths" else "rsd-c:3,2"
            tree = grown(spec, draft, SeededSampler(seed, row))
            p = torch.stack([p_of[picks[hash(tuple(tokens_to(tree, n))) % 64][1]] for n in range(len(tree))])
            batch.append((tree, p))
        found: list[Verdict] = verify(name, batch, torch.float32, lazy, seed).found  # type: ignore[attr-defined]
        for verdict, (tree, p) in zip(found, batch, strict=True):
            assert p[verdict.path[-1], verdict.token] > 0, "a token that the target forbids"
            for node, child in zip(verdict.path, verdict.path[1:], strict=False):
                assert p[node, int(tree.tokens[child])] > 0, "an accepted token that the target forbids"
