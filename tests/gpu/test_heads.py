"""A head on a device: its passes begin before the host has read anything, and texts and trees are those of the host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from branchwise.backends.base import Scored
from branchwise.backends.transformers.target import TransformersTarget
from branchwise.core.sampling import SamplingParams
from branchwise.core.tree import DraftTree
from branchwise.draft import build_drafter, build_policy
from branchwise.draft.base import Budget
from branchwise.draft.head.drafter import HeadDrafter
from branchwise.draft.head.trees.drawn import DrawnAhead
from branchwise.engine import Engine, Generation, Request
from branchwise.verify import VERIFIERS, Verdicts
from tests import test_head_drawn as drawn
from tests.conformance.architectures import build, served
from tests.heads import random_head
from tests.test_head_ahead import LevelByLevel, Noting
from tests.test_head_drafter import model_of
from tests.test_inflight import Watched

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

PROMPTS = ((5, 6, 7), (9, 5), (30, 31))
SHAPES = ("topk:31,depth=5,width=4", "topk:15,depth=3,width=8", "ranks:recycling-80")
FORMS = ("parallelspec", "longspec", "longspec-states")
"""all depths in one pass; a window of few rows, which texts leave, and the keys and values of the target"""
CASES = [*(("carry", shape) for shape in SHAPES), *((form, shape) for form in FORMS for shape in SHAPES[::2])]


def written(
    target: TransformersTarget, shape: str | None, temperature: float, batch: int, form: str = "carry"
) -> tuple[list[Generation], int]:
    """Texts of a target, by a head that grows such trees or without a draft, and the steps that they took."""
    drafter = build_drafter("none")
    if shape is not None:
        drafter = HeadDrafter(random_head(target.info, form, table=90), tree=build_policy(shape))
    engine = Engine(target, drafter, VERIFIERS.build("match"))
    sampling = SamplingParams(temperature=temperature, seed=4)
    asked = [
        engine.submit(Request(prompt, sampling, max_new_tokens=60 + 7 * len(prompt))) for prompt in PROMPTS[:batch]
    ]
    steps = 0
    while engine.busy:
        engine.step()
        steps += 1
    return asked, steps


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize(("form", "shape"), CASES)
def test_texts_and_trees_are_the_same_whether_passes_wait_for_the_host_or_not(
    form: str, shape: str, temperature: float, batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build(served()["llama"], device="cuda")
    plain, _ = written(TransformersTarget(model, slots=3), None, temperature, batch)
    waiting = Watched(model, slots=3)
    monkeypatch.setattr(waiting, "launch", lambda *given: None)
    late, steps = written(waiting, shape, temperature, batch, form)
    target = Watched(model, slots=3)
    early, others = written(target, shape, temperature, batch, form)
    assert [one.token_ids for one in early] == [one.token_ids for one in late] == [one.token_ids for one in plain]
    assert [one.stats.accepted_per_depth for one in early] == [one.stats.accepted_per_depth for one in late]
    assert steps == others
    assert waiting.served == 0
    assert target.served > steps / 3
    if temperature:  # a head that was never trained finds nothing in a greedy loop
        assert sum(one.stats.accepted_tokens for one in early) > 0


@pytest.mark.parametrize(("form", "shape"), [case for case in CASES if "topk" in case[1]])
def test_one_target_writes_text_after_text(form: str, shape: str) -> None:
    """What the device holds of a text means nothing for the next one in the same slot."""
    target = TransformersTarget(build(served()["llama"], device="cuda"), slots=1)
    texts = [[one.token_ids for one in written(target, shape, 0.0, 3, form)[0]] for _ in range(2)]
    assert texts[0] == texts[1] == [one.token_ids for one in written(target, None, 0.0, 3)[0]]


@pytest.mark.parametrize(("form", "shape"), CASES)
def test_a_device_accepts_what_the_host_accepts(form: str, shape: str) -> None:
    found = []
    for device in ("cpu", "cuda"):
        target = TransformersTarget(build(served()["llama"], device=device), slots=1)
        [text], _ = written(target, shape, 0.0, 1, form)
        found.append((text.token_ids, text.stats.accepted_per_depth))
    assert found[0] == found[1]


@pytest.mark.parametrize("form", FORMS)
def test_trees_laid_behind_a_verdict_are_those_that_the_host_grows(form: str) -> None:
    """Node by node, at every step of texts that come and go."""
    model, noted = build(served()["llama"], device="cuda"), []
    for kind in (Noting, LevelByLevel):
        target = TransformersTarget(model, slots=2)
        drafter = kind(random_head(target.info, form, table=90), tree=build_policy("topk:15,depth=4,width=4"))
        engine = Engine(target, drafter, VERIFIERS.build("match"), prefill_tokens=7)
        texts = [engine.submit(Request((*prompt, *range(20)), max_new_tokens=50)) for prompt in PROMPTS]
        while engine.busy:
            engine.step()
        assert (drafter.begun > 20) == (kind is Noting)
        noted.append(([text.token_ids for text in texts], drafter.noted))
    assert noted[0] == noted[1]


# Trees that are drawn

KINDS = {"drawn": drawn.WAYS[:1], "greedy": drawn.WAYS[1:2], "of all kinds": drawn.WAYS}


def drawn_on_device(
    kind: type[drawn.Noting],
    tree: str,
    verify: str,
    ways: Sequence[SamplingParams],
    form: str = "carry",
    batch: int = 4,
    **how: Any,
) -> tuple[drawn.Noting, list[list[int]], Watched]:
    """A drafter, the texts that it wrote, and their target."""
    model = model_of(vocab_size=drawn.VOCABULARY).cuda()
    target = Watched(model, slots=3, context=128, max_nodes=32, **how)
    drafter = kind(drawn.head_for(target.info, form), tree=build_policy(tree))
    texts = drawn.write(drafter, verify, ways, target, batch)
    return drafter, [one.token_ids for one in texts], target


def assert_recorded(drafter: HeadDrafter) -> None:
    """Rows and draws both, and nothing that could not be recorded."""
    ahead = drafter._ahead
    assert isinstance(ahead, DrawnAhead)
    functions = [function for _, function in ahead._drawing._ways.values()]
    assert any(function._recorded for function in functions)
    assert ahead._catch_up._recorded
    assert all(function.captures for function in (*functions, ahead._catch_up))


@pytest.mark.parametrize("ways", KINDS.values(), ids=KINDS.keys())
@pytest.mark.parametrize(("tree", "verify"), drawn.TREES)
@pytest.mark.parametrize("batch", [1, 4])
def test_drawn_trees_are_those_of_level_by_level(
    tree: str, verify: str, ways: list[SamplingParams], batch: int
) -> None:
    """Four texts in three slots: some end, one joins, and steps go on with those that are left."""
    ahead, found, target = drawn_on_device(drawn.Noting, tree, verify, ways, batch=batch)
    levels, expected, _ = drawn_on_device(drawn.LevelByLevel, tree, verify, ways, batch=batch)
    drawn.assert_same(ahead, levels)
    assert found == expected
    if len(ways) > 1 and not tree.startswith(("chain", "paths")):
        return  # where distributions are cut, some lack tokens
    assert ahead.ahead > 3
    assert ahead.looks == 0, "the host has grown a tree"
    if not tree.startswith("paths:3x3") and not tree.startswith("paths:2x4"):
        assert target.served > 2, "passes waited for the host"
    assert_recorded(ahead)


@pytest.mark.parametrize(("tree", "verify"), [("chain:4", "block"), ("paths:3x3", "cascade"), ("rsd-c:2,2,1", "rrs")])
@pytest.mark.parametrize("form", drawn.OTHERS)
def test_heads_of_every_form_draw_what_they_draw_level_by_level(form: str, tree: str, verify: str) -> None:
    ahead, found, _ = drawn_on_device(drawn.Noting, tree, verify, drawn.WAYS[:2], form)
    levels, expected, _ = drawn_on_device(drawn.LevelByLevel, tree, verify, drawn.WAYS[:2], form)
    drawn.assert_same(ahead, levels)
    assert found == expected
    assert_recorded(ahead)


@pytest.mark.parametrize("tree", ["chain:4", "paths:3x3", "rsd-c:2,2"])
def test_what_is_recorded_draws_what_is_launched(tree: str) -> None:
    """Kernel by kernel, with the same passes of the target."""
    found = [drawn_on_device(drawn.Noting, tree, "auto", drawn.WAYS, graphs=graphs) for graphs in (True, False)]
    drawn.assert_same(found[0][0], found[1][0])
    assert found[0][1] == found[1][1]


@pytest.mark.parametrize("tree", ["chain:4", "paths:3x3", "template:mcsd"])
def test_a_device_draws_what_the_host_draws(tree: str) -> None:
    """Over other products, so only as long as no two tokens arrive at nearly the same time."""
    found = []
    for device in ("cpu", "cuda"):
        model = model_of(vocab_size=drawn.VOCABULARY).to(device)
        target = TransformersTarget(model, slots=1, context=128, max_nodes=32)
        drafter = drawn.Noting(drawn.head_for(target.info), tree=build_policy(tree))
        engine = Engine(target, drafter, VERIFIERS.build("auto"))
        text = engine.submit(Request((1, 2, 3), SamplingParams(0.8, seed=6), max_new_tokens=16))
        while engine.busy:
            engine.step()
        found.append((text.token_ids, [tokens for _, tokens, *_ in drafter.noted]))
        assert (drafter._ahead is None) == (device == "cpu")
    assert found[0] == found[1]


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("tree", ["chain:4", "paths:2x3"])
def test_compiled_the_text_is_that_of_plain_decoding(tree: str, temperature: float) -> None:
    ways = [SamplingParams(temperature, seed=3)]
    drafter, found, target = drawn_on_device(drawn.Noting, tree, "match", ways, batch=2, compile=True)
    assert drafter.ahead > 5
    engine = Engine(target, build_drafter("none"), VERIFIERS.build("match"))
    plain = [engine.submit(Request(prompt, ways[0], max_new_tokens=22 + 5 * row))
             for row, prompt in enumerate(drawn.PROMPTS[:2])]  # fmt: skip
    while engine.busy:
        engine.step()
    assert found == [one.token_ids for one in plain]


class Unwatched(drawn.Noting):
    """Refuses to wait for the device between a verdict and the next trees, once all is recorded."""

    steps = 0

    def update_on_device(self, scored: Scored, verdicts: Verdicts) -> None:
        self.steps += 1
        torch.cuda.set_sync_debug_mode("error" if self.steps > 6 else "default")
        try:
            super().update_on_device(scored, verdicts)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    def draft_next(self, budgets: Sequence[Budget]) -> list[DraftTree] | None:
        torch.cuda.set_sync_debug_mode("error")
        try:
            return super().draft_next(budgets)
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("kind", ["drawn", "greedy"])
@pytest.mark.parametrize("form", ["carry", "parallel with bias", "longspec"])
def test_nothing_waits_between_a_verdict_and_the_next_chain(form: str, kind: str, batch: int) -> None:
    drafter, _, target = drawn_on_device(Unwatched, "chain:4", "block", KINDS[kind], form, batch)
    assert isinstance(drafter, Unwatched)
    assert drafter.steps > 8
    assert target.served > 3


@pytest.mark.parametrize("place", ["before", "after"])
def test_a_verdict_that_never_counted_is_undone_on_a_device(place: str) -> None:
    found = []
    for kind, interrupts in ((drawn.Noting, [place, "", "", place, "", "", place, ""]), (drawn.LevelByLevel, [])):
        model = model_of(vocab_size=drawn.VOCABULARY).cuda()
        target = Watched(model, slots=3, context=128, max_nodes=32)
        drafter = kind(drawn.head_for(target.info), tree=build_policy("chain:3"))
        drafter.interrupts = list(interrupts)
        texts = drawn.write(drafter, "block", drawn.WAYS[:1], target, 3)
        assert not drafter.interrupts
        found.append([one.token_ids for one in texts])
    assert found[0] == found[1]


def test_one_drafter_draws_text_after_text() -> None:
    """Slots go back when a text ends, and what was recorded serves the next one. A cache that has to grow lies
    elsewhere, and all of it is recorded anew."""
    model = model_of(vocab_size=drawn.VOCABULARY, max_position_embeddings=8192).cuda()
    target = Watched(model, slots=1, context=6000, max_nodes=32)
    drafter = drawn.Noting(drawn.head_for(target.info), tree=build_policy("chain:4"))
    texts = []
    for prompt in (drawn.PROMPTS[0], (*range(290),) * 15, drawn.PROMPTS[0]):
        engine = Engine(target, drafter, VERIFIERS.build("block"))
        text = engine.submit(Request(prompt, drawn.WAYS[0], max_new_tokens=40))
        while engine.busy:
            engine.step()
        texts.append(text.token_ids)
    assert texts[0] == texts[2]
    assert drafter.ahead > 20
