"""Rows of texts that have ended stay while passes are enqueued ahead, and nobody notices but the clock."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from branchwise.backends.base import Prefill, Scored, Target
from branchwise.backends.toy import ToyTarget
from branchwise.backends.transformers.target import TransformersTarget
from branchwise.core.batch import TreeBatch
from branchwise.core.sampling import SamplingParams
from branchwise.core.sequence import SequenceState
from branchwise.cuda.inputs import BATCHES, fitting
from branchwise.draft import build_policy
from branchwise.draft.base import Drafter, NoDrafter
from branchwise.draft.head.drafter import HeadDrafter
from branchwise.engine import Engine, Generation, Request
from branchwise.engine.lingering import Lingering
from branchwise.engine.request import FinishReason
from branchwise.verify import VERIFIERS, Verdict
from tests.doubles import PipelinedDouble, PipelinedToy
from tests.heads import random_head
from tests.test_inflight import Watched, target

pytestmark = pytest.mark.usefixtures("interpreter")
__all__ = ["target"]

PROMPTS = [(5, 6), (60,), (2, 8), (7, 7, 9)]
LONGER = [tuple(range(start, start + 40)) for start in (3, 11, 24)]
LONG = 12


def drafter_of(name: str, target: Watched) -> Drafter:
    if name == "none":
        return NoDrafter()
    return HeadDrafter(random_head(target.info), tree=build_policy("topk:7,depth=2,width=4"))


def engine_of(target: Target, drafter: Drafter, **options) -> Engine:  # type: ignore[no-untyped-def]
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
    others = [engine.submit(Request(prompt, max_new_tokens=LONG)) for prompt in LONGER]
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
    host = TransformersTarget(target.model, slots=1, context=64, max_nodes=32)
    expected = [written(engine_of(host, NoDrafter()), prompt) for prompt in LONGER]
    engine = engine_of(target, NoDrafter())
    short = engine.submit(Request(long, max_new_tokens=7, stop_when=ends_at(3, long)))
    others = [engine.submit(Request(prompt, max_new_tokens=LONG)) for prompt in LONGER]
    lingered = False
    while engine.busy:
        engine.step()
        lingered |= bool(engine.scheduler.lingering)
        assert all(len(row.sequence.tokens) <= target.info.context for row in engine.scheduler.lingering)
    assert lingered
    assert len(short.token_ids) == 3
    assert [one.token_ids for one in others] == expected


def test_a_row_that_holds_more_than_the_others_leaves_at_once(target: Watched) -> None:
    """Its keys and values would be read in every pass."""
    engine = engine_of(target, NoDrafter())
    short = engine.submit(Request(LONGER[0], max_new_tokens=LONG, stop_when=ends_at(3, LONGER[0])))
    for prompt in PROMPTS[1:]:
        engine.submit(Request(prompt, max_new_tokens=6))
    while engine.busy:
        engine.step()
        assert not engine.scheduler.lingering
    assert len(short.token_ids) == 3


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


# Random schedules, on doubles that are quick

TOY = 6
"""tokens of the toy"""
SLOTS = 12
BEGINNINGS = [tuple((number * place + place // 3) % TOY for place in range(24)) for number in (1, 2)]
"""long enough to be worth sharing"""


class Bucketed(PipelinedToy):
    """The toy with passes of few sizes, as they are recorded on a device."""

    def bucket(self, batch: int, nodes: int) -> tuple[int, int]:
        return fitting(batch, BATCHES), nodes


class Books(PipelinedDouble):
    """Checks that every text comes and goes once, and is itself when it goes."""

    def __init__(self) -> None:
        super().__init__(TOY, length=2)
        self.running: set[SequenceState] = set()
        self.retired: set[SequenceState] = set()
        self.left: list[list[int]] = []
        self.interrupts = 0

    def start(self, sequence: SequenceState, prefill: Prefill) -> None:
        assert sequence not in self.running | self.retired
        self.running.add(sequence)

    def update(self, sequences: Sequence[SequenceState], scored: Scored, verdicts: Sequence[Verdict]) -> None:
        assert self.running.issuperset(sequences)
        if self.interrupts:
            self.interrupts -= 1
            raise KeyboardInterrupt

    def inherit(self, source: SequenceState, sequence: SequenceState, rows: int, *, moved: bool) -> None:
        assert source in self.retired if moved else source in self.running | self.retired
        if moved:
            self.retired.remove(source)

    def finish(self, sequence: SequenceState) -> None:
        self.left.append(sequence.tokens)
        self.running.discard(sequence)  # or it was cancelled before it ran

    def retire(self, sequence: SequenceState) -> None:
        self.left.append(sequence.tokens)
        self.running.remove(sequence)
        self.retired.add(sequence)

    def drop(self, sequence: SequenceState) -> None:
        self.retired.remove(sequence)


def some_request(chance: random.Random) -> Request:
    begun = chance.choice(BEGINNINGS)[: chance.choice((0, 18, 24))]
    prompt = (*begun, *(chance.randrange(TOY) for _ in range(chance.randint(1, 4))))
    sampling = SamplingParams(
        temperature=chance.choice((0.0, 1.2)), seed=chance.randrange(99), frequency_penalty=chance.choice((0.0, 0.5))
    )
    ends = frozenset(chance.sample(range(TOY), int(chance.random() < 0.2)))
    asked = ends_at(chance.randint(1, 20), prompt) if chance.random() < 0.4 else None
    scored = chance.random() < 0.3
    return Request(prompt, sampling, chance.randint(1, 30), ends, asked, scored, 2 * scored, trace=scored)


def test_a_processor_is_asked_for_nothing_behind_the_end_of_its_text() -> None:
    def three_tokens(tokens: Sequence[int], logits: torch.Tensor) -> torch.Tensor:
        assert len(tokens) - len(PROMPTS[0]) < 3
        return logits

    engine = engine_of(Bucketed(TOY, slots=8), NoDrafter())
    sampling = SamplingParams(processors=(three_tokens,))
    short = engine.submit(Request((1, 2), sampling, LONG, stop_when=ends_at(3, (1, 2))))
    others = [engine.submit(Request((3, number), max_new_tokens=LONG)) for number in range(5)]
    while engine.busy:
        engine.step()
    assert [len(one.token_ids) for one in (short, *others)] == [3, *[LONG] * 5]


@pytest.mark.parametrize("cached", [False, True], ids=["nothing kept", "prefixes"])
@pytest.mark.parametrize("seed", range(8))
def test_whoever_comes_and_goes_texts_are_those_they_are_alone(seed: int, cached: bool) -> None:
    chance, drafter = random.Random(seed), Books()
    target = Bucketed(TOY, slots=SLOTS, context=44)
    engine = engine_of(target, drafter, prefix_cache=cached)
    own, starved = target.score, [False]

    def score(sequences: Sequence[SequenceState], batch: TreeBatch) -> Scored:
        if starved[0] and engine.scheduler.lingering:
            starved[0] = False
            raise torch.OutOfMemoryError("no room")
        return own(sequences, batch)

    target.score = score  # type: ignore[method-assign]
    source = SequenceState([1, 2, 3])
    target.open(source)
    asked: list[Generation] = []
    ended: dict[Generation, list[int]] = {}
    lingered = 0
    for turn in range(400):
        for _ in range(chance.choice((1, 8, 11)) if turn < 60 and chance.random() < 0.1 else 0):
            request, like = some_request(chance), None
            if chance.random() < 0.1:
                request, like = replace(request, prompt=(1, 2, 3), stop_when=None), source
            asked.append(engine.submit(request, like=like))
        if asked and chance.random() < 0.1:
            engine.cancel(chance.choice(asked[-11:]))
        if chance.random() < 0.02:
            for one in asked:
                engine.cancel(one)
            assert not engine.busy
            assert target.free_slots == SLOTS - 1
        drafter.interrupts, starved[0] = int(chance.random() < 0.05), chance.random() < 0.05
        try:
            moved = engine.step() if engine.busy else []
        except KeyboardInterrupt:
            moved = []
        rows = engine.scheduler.running
        lingered += len(engine.scheduler.lingering)
        assert not any(isinstance(one, Lingering) for one in moved)
        assert all(target._cached[one.sequence] == one.sequence.tokens[:-1] for one in rows)
        assert not rows or not all(one.finished for one in rows)
        assert all(one.token_ids == said for one, said in ended.items())
        ended |= {one: one.token_ids for one in asked if one.finished and one not in ended}
        if turn >= 60 and not engine.busy:
            break
    assert lingered > 4
    assert not engine.busy
    assert len(ended) == len(asked)
    engine.drop_prefixes()
    target.close(source)
    assert target.free_slots == SLOTS
    assert not drafter.running | drafter.retired
    texts = [[*one.request.prompt, *one.token_ids] for one in asked if one.began is not None]
    assert sorted(drafter.left) == sorted(texts) if not cached else all(text in drafter.left for text in texts)
    for one in asked:
        assert one.finish_reason is not FinishReason.ERROR
        assert one.stats.emitted_tokens == len(one.token_ids)
        assert [piece.token for piece in one.pieces] == one.token_ids
        assert len(one.traces) == (one.stats.steps if one.request.trace else 0)
        host = engine_of(ToyTarget(TOY, slots=1, context=44), NoDrafter())
        alone = host.submit(one.request)
        while host.busy:
            host.step()
        if one.finish_reason is FinishReason.CANCELLED:
            assert one.token_ids == alone.token_ids[: len(one.token_ids)]
        else:
            assert (one.token_ids, one.finish_reason) == (alone.token_ids, alone.finish_reason)
            logprobs = [piece.logprob for piece in alone.pieces]
            assert [piece.logprob for piece in one.pieces] == pytest.approx(logprobs, abs=1e-4)
