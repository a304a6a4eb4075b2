"""A draft model on a device: all levels of its paths are one recording, and its trees are those of level by level."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from branchwise.backends.base import Scored
from branchwise.core.sampling import SamplingParams
from branchwise.draft import build_drafter, build_policy
from branchwise.draft.base import Budget, Drafter
from branchwise.draft.model.draft_model import Weights
from branchwise.engine import Engine, Generation, Request
from branchwise.verify import VERIFIERS, Verdicts
from tests.test_inflight import Watched
from tests.test_model_ahead import PROMPTS, TREES, VOCABULARY, WAYS, LevelByLevel, Noting, assert_same, close_to
from tests.test_model_drafter import tiny

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

DRAWN = replace(WAYS[0], seed=6)
"""with the seed of the host's tests two tokens arrive within 2e-5 of each other, which other sums decide otherwise"""
KINDS = [[DRAWN], WAYS[1:2], [DRAWN, *WAYS[1:]]]


def target_of(slots: int = 3, **how: bool) -> Watched:
    return Watched(tiny(0, layers=1, vocabulary=VOCABULARY).cuda(), slots=slots, context=128, max_nodes=32, **how)


def on_device() -> Weights:
    weights = close_to()
    return Weights(weights.name, weights.model.cuda(), None)


def write(
    drafter: Drafter, verify: str, ways: Sequence[SamplingParams], target: Watched, batch: int = 4
) -> list[Generation]:
    engine = Engine(target, drafter, VERIFIERS.build(verify))
    asked = [
        engine.submit(Request(prompt, ways[row % len(ways)], max_new_tokens=80 + 5 * row))
        for row, prompt in enumerate(PROMPTS[:batch])
    ]
    while engine.busy:
        engine.step()
    return asked


def texts_of(asked: Sequence[Generation]) -> list[list[int]]:
    return [one.token_ids for one in asked]


@pytest.mark.parametrize("ways", KINDS, ids=["drawn", "greedy", "of all kinds"])
@pytest.mark.parametrize(("tree", "verify"), TREES)
@pytest.mark.parametrize("batch", [1, 4])
def test_trees_are_those_of_level_by_level(tree: str, verify: str, ways: list[SamplingParams], batch: int) -> None:
    """Four texts in three slots: some end, one joins, and steps go on with those that are left."""
    ahead, levels = (kind(on_device(), tree=build_policy(tree)) for kind in (Noting, LevelByLevel))
    target = target_of()
    found, expected = write(ahead, verify, ways, target, batch), write(levels, verify, ways, target_of(), batch)
    assert_same(ahead, levels)
    assert texts_of(found) == texts_of(expected)
    assert ahead._ahead is not None
    if len(ways) > 1 and not tree.startswith(("chain", "paths")):
        return  # where distributions are cut, some lack tokens
    assert ahead.ahead > 3
    if not tree.startswith("paths"):
        assert target.served > 2, "passes waited for the host"
    recorded = [function for _, function in ahead._ahead._drawing._ways.values() if function._recorded]
    assert recorded, "nothing was recorded"
    assert all(function.captures for _, function in ahead._ahead._drawing._ways.values())


@pytest.mark.parametrize("ways", KINDS[:2], ids=["drawn", "greedy"])
@pytest.mark.parametrize("batch", [1, 3])
def test_trees_of_ranks_are_those_of_level_by_level(ways: list[SamplingParams], batch: int) -> None:
    target = target_of()
    ahead, levels = (kind(on_device(), tree=build_policy("ranks:mcsd")) for kind in (Noting, LevelByLevel))
    found, expected = write(ahead, "match", ways, target, batch), write(levels, "match", ways, target_of(), batch)
    assert texts_of(found) == texts_of(expected)
    assert [one.stats.accepted_tokens for one in found] == [one.stats.accepted_tokens for one in expected]
    assert target.served > 2


def test_where_a_distribution_has_too_few_tokens_the_host_grows_the_tree() -> None:
    few = [SamplingParams(1.0, seed=2, top_k=2), *WAYS[:1]]
    ahead, levels = (kind(on_device(), tree=build_policy("template:mcsd")) for kind in (Noting, LevelByLevel))
    found, expected = write(ahead, "rrs", few, target_of()), write(levels, "rrs", few, target_of())
    assert_same(ahead, levels)
    assert texts_of(found) == texts_of(expected)


@pytest.mark.parametrize("tree", ["chain:4", "paths:3x3", "rsd-c:2,2"])
def test_what_is_recorded_draws_what_is_launched(tree: str) -> None:
    """Kernel by kernel, with the same passes of the target."""
    found = []
    for graphs in (True, False):
        drafter = Noting(on_device(), tree=build_policy(tree))
        found.append((drafter, texts_of(write(drafter, "auto", WAYS, target_of(graphs=graphs)))))
    assert_same(found[0][0], found[1][0])
    assert found[0][1] == found[1][1]


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_compiled_the_text_is_that_of_plain_decoding(temperature: float) -> None:
    target = target_of(compile=True)
    ways = [SamplingParams(temperature, seed=3)]
    drafter = Noting(on_device(), tree=build_policy("chain:4"))
    plain = write(build_drafter("none"), "match", ways, target, 2)
    assert texts_of(write(drafter, "match", ways, target, 2)) == texts_of(plain)
    assert drafter.ahead > 5


class Unwatched(Noting):
    """Refuses to wait for the device between a verdict and the next trees, once all is recorded."""

    steps = 0

    def update_on_device(self, scored: Scored, verdicts: Verdicts) -> None:
        self.steps += 1
        torch.cuda.set_sync_debug_mode("error" if self.steps > 6 else "default")
        try:
            super().update_on_device(scored, verdicts)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    def draft_next(self, budgets: Sequence[Budget]):  # type: ignore[no-untyped-def]
        torch.cuda.set_sync_debug_mode("error")
        try:
            return super().draft_next(budgets)
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("ways", KINDS[:2], ids=["drawn", "greedy"])
def test_nothing_waits_between_a_verdict_and_the_next_chain(batch: int, ways: list[SamplingParams]) -> None:
    target, drafter = target_of(), Unwatched(on_device(), tree=build_policy("chain:4"))
    write(drafter, "block", ways, target, batch)
    assert drafter.steps > 8
    assert target.served > 3


def test_one_drafter_writes_text_after_text() -> None:
    """Slots go back when a text ends, and what was recorded in them serves the next one."""
    drafter, target = Noting(on_device(), tree=build_policy("chain:4")), target_of(slots=1)
    texts = [texts_of(write(drafter, "block", WAYS, target, 3)) for _ in range(2)]
    assert texts[0] == texts[1]
    other = LevelByLevel(on_device(), tree=build_policy("chain:4"))
    assert texts[0] == texts_of(write(other, "block", WAYS, target_of(slots=1), 3))
