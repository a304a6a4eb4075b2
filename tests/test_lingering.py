"""Rows of texts that have ended stay while passes are enqueued ahead, and nobody notices but the clock."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from branchwise.backends.transformers.target import TransformersTarget
from branchwise.core.sampling import SamplingParams
from branchwise.draft import build_policy
from branchwise.draft.base import Drafter, NoDrafter
from branchwise.draft.head.drafter import HeadDrafter
from branchwise.engine import Engine, Generation, Request
from branchwise.engine.lingering import Lingering
from branchwise.engine.request import FinishReason
from branchwise.verify import VERIFIERS
from tests.heads import random_head
from tests.test_inflight import Watched, target

pytestmark = pytest.mark.usefixtures("interpreter")
__all__ = ["target"]

PROMPTS = [(5, 6), (60,), (2, 8), (7, 7, 9)]
LONG = 12


def drafter_of(name: str, target: Watched) -> Drafter:
    if name == "none":
        return NoDrafter()
    return HeadDrafter(random_head(target.info), tree=build_policy("topk:7,depth=2,width=4"))


def engine_of(target: TransformersTarget, drafter: Drafter, **options) -> Engine:  # type: ignore[no-untyped-def]
    return Engine(target, drafter, VERIFIERS.build("match"), **options)


def alone(target: Watched, **about) -> list[list[int]]:  # type: ignore[no-untyped-def]
    """What each prompt is answered by itself, on a host, where nothing is enqueued."""
    host = TransformersTarget(target.model, slots=1, context=64, max_nodes=32)
    return [list(written(engine_of(host, NoDrafter()), prompt, **about)) for prompt in PROMPTS]


def written(engine: Engine, prompt: Sequence[int], tokens: int = LONG, **about) -> list[int]:  # type: ignore[no-untyped-def]
    one = engine.submit(Request(tuple(prompt), max_new_tokens=tokens, **about))
    while engine.busy:
        engine.step()
    return one.token_ids


def ends_at(length: int, prompt: Sequence[int]):  # type: ignore[no-untyped-def]
    """An end that nobody foresees."""
    return lambda tokens: len(tokens) - len(prompt) >= length


@pytest.mark.parametrize("sampling", [SamplingParams(), SamplingParams(temperature=0.9, seed=3)], ids=["greedy", "T"])
@pytest.mark.parametrize("name", ["none", "head"])
def test_an_end_that_nobody_foresaw_costs_the_others_no_pass(
    target: Watched, name: str, sampling: SamplingParams
) -> None:
    expected = alone(target, sampling=sampling)
    engine = engine_of(target, drafter_of(name, target))
    short = engine.submit(Request(PROMPTS[0], sampling, LONG, stop_when=ends_at(3, PROMPTS[0])))
    others = [engine.submit(Request(prompt, sampling, LONG)) for prompt in PROMPTS[1:]]
    served = []
    while engine.busy:
        before, lingers = target.served, bool(engine.scheduler.lingering)
        engine.step()
        if lingers:
            served.append(target.served - before)
    assert len(served) > 2, "the row left at once"
    assert all(served), "a pass was made for nothing"
    assert short.token_ids == expected[0][:3]
    assert [one.token_ids for one in others] == expected[1:]
    assert target.free_slots == 4


def test_a_text_that_has_ended_says_what_it_said(target: Watched) -> None:
    """Whatever its row is written on, and however long."""
    engine = engine_of(target, NoDrafter())
    short = engine.submit(Request(PROMPTS[0], max_new_tokens=LONG, stop_when=ends_at(3, PROMPTS[0])))
    for prompt in PROMPTS[1:]:
        engine.submit(Request(prompt, max_new_tokens=LONG))
    while not short.finished:
        engine.step()
    said, steps = list(short.token_ids), short.stats.steps
    moved = engine.step()
    (row,) = engine.scheduler.lingering
    assert short not in moved
    assert row not in moved
    assert len(row.sequence.output) > len(said)
    assert (short.token_ids, short.stats.steps, short.finish_reason) == (said, steps, FinishReason.STOP)


@pytest.mark.parametrize("name", ["none", "head"])
def test_who_comes_has_the_slot_before_the_next_step(target: Watched, name: str) -> None:
    expected = alone(target)
    engine = engine_of(target, drafter_of(name, target))
    short = engine.submit(Request(PROMPTS[0], max_new_tokens=LONG, stop_when=ends_at(3, PROMPTS[0])))
    others = [engine.submit(Request(prompt, max_new_tokens=LONG)) for prompt in PROMPTS[1:]]
    while not short.finished:
        engine.step()
    engine.step()
    assert engine.scheduler.lingering
    assert target.free_slots == 0
    late = engine.submit(Request(PROMPTS[0], max_new_tokens=LONG))
    assert engine.scheduler.joining
    engine.step()
    assert late.token_ids
    while engine.busy:
        engine.step()
    assert [one.token_ids for one in (late, *others)] == expected


@pytest.mark.parametrize("name", ["none", "head"])
def test_the_next_turn_begins_with_the_rows_of_the_text_and_no_others(target: Watched, name: str) -> None:
    """A prompt that goes on where the text ended, and not as its row was written on."""
    first = [*range(2, 30)]
    engine = engine_of(target, drafter_of(name, target), prefix_cache=True)
    short = engine.submit(Request(tuple(first), max_new_tokens=LONG, stop_when=ends_at(2, first)))
    others = [engine.submit(Request(prompt, max_new_tokens=LONG)) for prompt in PROMPTS[1:]]
    while not short.finished:
        engine.step()
    engine.step()
    (row,) = engine.scheduler.lingering
    unseen = row.sequence.tokens[len(first) + 2]
    turn = (*first, *short.token_ids, 1 if unseen != 1 else 4, 9)
    engine.cancel(others[0])  # the others fit a smaller pass
    engine.step()
    prefixes = engine.scheduler.prefixes
    assert prefixes is not None
    assert row not in engine.scheduler.lingering
    assert [*first, *short.token_ids] in [text.tokens for text in prefixes._kept]
    after = engine.submit(Request(turn, max_new_tokens=6))
    while engine.busy:
        engine.step()
    assert after.stats.reused_tokens >= len(first)
    host = TransformersTarget(target.model, slots=1, context=64, max_nodes=32)
    assert after.token_ids == written(engine_of(host, NoDrafter()), turn, 6)


def test_a_row_leaves_before_its_context_is_full(target: Watched) -> None:
    """The row of a prompt that nearly fills the context has no room for what the others still write."""
    long = tuple(range(1, 57))
    expected = alone(target)
    engine = engine_of(target, NoDrafter())
    short = engine.submit(Request(long, max_new_tokens=7, stop_when=ends_at(3, long)))
    others = [engine.submit(Request(prompt, max_new_tokens=LONG)) for prompt in PROMPTS[1:]]
    lingered = False
    while engine.busy:
        engine.step()
        lingered |= bool(engine.scheduler.lingering)
        assert all(len(row.sequence.tokens) <= target.info.context for row in engine.scheduler.lingering)
    assert lingered
    assert len(short.token_ids) == 3
    assert [one.token_ids for one in others] == expected[1:]


def test_other_rules_let_a_text_go_at_once(target: Watched) -> None:
    """What is learned from a row that nobody sees would be learned from draws that may come again."""
    engine = Engine(target, NoDrafter(), VERIFIERS.build("auto"))
    sampling = SamplingParams(temperature=1.0, seed=2)
    short = engine.submit(Request(PROMPTS[0], sampling, LONG, stop_when=ends_at(3, PROMPTS[0])))
    for prompt in PROMPTS[1:]:
        engine.submit(Request(prompt, sampling, LONG))
    while engine.busy:
        engine.step()
        assert not engine.scheduler.lingering
    assert short.finished


def test_where_there_is_no_memory_rows_leave_before_texts_do(target: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = alone(target)
    engine = engine_of(target, NoDrafter())
    short = engine.submit(Request(PROMPTS[0], max_new_tokens=LONG, stop_when=ends_at(3, PROMPTS[0])))
    others = [engine.submit(Request(prompt, max_new_tokens=LONG)) for prompt in PROMPTS[1:]]
    while not short.finished:
        engine.step()
    assert engine.scheduler.lingering
    step, failures = engine._step, [torch.OutOfMemoryError("no room")]

    class Short:
        def __getattr__(self, name: str) -> object:
            return getattr(step, name)

        def __call__(self, generations: Sequence[Generation], **more: bool) -> object:
            if failures:
                raise failures.pop()
            assert not any(isinstance(one, Lingering) for one in generations)
            return step(generations, **more)

    monkeypatch.setattr(engine, "_step", Short())
    engine.step()
    monkeypatch.setattr(engine, "_step", step)
    while engine.busy:
        engine.step()
    assert [one.token_ids for one in others] == expected[1:]
