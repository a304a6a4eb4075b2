"""Admission: nobody waits for a step to submit or cancel, and no prompt holds up the others."""

from __future__ import annotations

import threading

import pytest

from branchwise.backends.toy import ToyTarget
from branchwise.core.sampling import SamplingParams
from branchwise.draft import build_drafter
from branchwise.engine import Engine, FinishReason, Generation, Piece, Request
from branchwise.engine.scheduler import MOST_PIECES
from branchwise.errors import QueueFull
from branchwise.verify import VERIFIERS


def engine_for(target: ToyTarget, **options: int) -> Engine:
    return Engine(target, build_drafter("none"), VERIFIERS.build("match"), **options)  # type: ignore[arg-type]


def finish(engine: Engine) -> None:
    while engine.busy:
        engine.step()


class SlowTarget(ToyTarget):
    """Its passes last until the test lets them end."""

    def __init__(self) -> None:
        super().__init__(6)
        self.inside, self.go_on = threading.Event(), threading.Event()

    def score(self, sequences, batch):  # type: ignore[no-untyped-def]
        self.inside.set()
        assert self.go_on.wait(10)
        return super().score(sequences, batch)


def test_submit_and_cancel_return_while_a_step_runs() -> None:
    target = SlowTarget()
    engine = engine_for(target)
    first = engine.submit(Request((1, 2), max_new_tokens=1))
    stepping = threading.Thread(target=engine.step)
    stepping.start()
    assert target.inside.wait(10)
    second = engine.submit(Request((3, 4), max_new_tokens=1))  # would wait for ever if it took the step's lock
    engine.cancel(first)
    assert first.finish_reason is FinishReason.CANCELLED
    assert not second.finished
    target.go_on.set()
    stepping.join(10)
    finish(engine)
    assert first.token_ids == []
    assert len(second.token_ids) == 1
    assert target.free_slots == target.slots


def test_a_long_prompt_does_not_hold_up_the_others() -> None:
    target = ToyTarget(6, prefill_chunk=8)
    engine = engine_for(target, prefill_tokens=4)
    short = engine.submit(Request((1, 2), max_new_tokens=20))
    engine.step()
    long = engine.submit(Request(tuple(i % 6 for i in range(41)), max_new_tokens=1))
    for written in range(1, 11):
        engine.step()
        assert len(short.token_ids) == written + 1  # a token every step
        assert long.prefilled == min(4 * written, 40)
    finish(engine)
    assert len(long.token_ids) == 1


def test_several_prompts_are_written_in_one_pass() -> None:
    target = ToyTarget(6)
    engine = engine_for(target)
    for prompt in ((1, 2, 3), (4, 5), (1, 2, 3, 4, 5)):
        engine.submit(Request(prompt, max_new_tokens=2))
    engine.step()
    assert target.prefills == [[2, 1, 4]]


def test_prompts_that_a_pass_writes_piece_by_piece_are_written_side_by_side() -> None:
    target = ToyTarget(6, prefill_chunk=8, prefill_piece=2)
    engine = engine_for(target)
    for length in (9, 10, 4):
        engine.submit(Request(tuple(i % 6 for i in range(length)), max_new_tokens=2))
    engine.step()
    # When the third runs there are two left, each of which may have two pieces of what is written at once.
    assert target.prefills == [[2, 2, 2], [2, 2, 1]]
    finish(engine)
    assert target.prefills[2:] == [[4, 4], [1]]


def test_a_prompt_alone_gets_all_that_may_be_written_and_less_while_others_wait() -> None:
    prompt = tuple(i % 6 for i in range(41))
    alone, target = ToyTarget(6, prefill_chunk=32, prefill_piece=2), ToyTarget(6, prefill_chunk=32, prefill_piece=2)
    engine = engine_for(alone)
    engine.submit(Request(prompt, max_new_tokens=1))
    finish(engine)
    assert alone.prefills == [[32], [8]]
    engine = engine_for(target)
    engine.submit(Request((1, 2), max_new_tokens=20))
    engine.step()
    engine.submit(Request(prompt, max_new_tokens=1))
    finish(engine)
    assert target.prefills == [[1], *[[2 * MOST_PIECES]] * 5]


def test_the_queue_is_bounded() -> None:
    engine = engine_for(ToyTarget(6, slots=1), queue=2)
    engine.submit(Request((1, 2), max_new_tokens=3))
    engine.step()
    for _ in range(2):
        engine.submit(Request((1, 2), max_new_tokens=3))
    with pytest.raises(QueueFull, match="2 requests are waiting"):
        engine.submit(Request((1, 2), max_new_tokens=3))
    finish(engine)
    engine.submit(Request((1, 2), max_new_tokens=3))
    finish(engine)


def test_outputs_come_by_callback_in_order_and_once() -> None:
    engine = engine_for(ToyTarget(6))
    heard: dict[Generation, list[Piece]] = {}
    ended: list[Generation] = []

    def listen(generation: Generation, pieces: list[Piece]) -> None:
        heard.setdefault(generation, []).extend(pieces)
        if generation.finished:
            ended.append(generation)

    generations = [
        engine.submit(Request((1, 2, n), SamplingParams(temperature=1.0, seed=n), 5 + n), on_output=listen)
        for n in range(3)
    ]
    finish(engine)
    assert {generation: [piece.token for piece in pieces] for generation, pieces in heard.items()} == {
        generation: generation.token_ids for generation in generations
    }
    assert sorted(ended, key=id) == sorted(generations, key=id)


def test_a_callback_may_cancel_its_own_generation() -> None:
    engine = engine_for(ToyTarget(6))

    def enough(generation: Generation, pieces: list[Piece]) -> None:
        if len(generation.token_ids) >= 3:
            engine.cancel(generation)

    stopped = engine.submit(Request((1, 2), max_new_tokens=50), on_output=enough)
    other = engine.submit(Request((3, 4), max_new_tokens=10))
    finish(engine)
    assert len(stopped.token_ids) == 3
    assert stopped.finish_reason is FinishReason.CANCELLED
    assert len(other.token_ids) == 10
    assert engine.target.free_slots == 4


def test_cancelled_in_mid_prefill_frees_its_slot_and_leaves_the_others_their_text() -> None:
    target = ToyTarget(6, prefill_chunk=4)
    plain = engine_for(ToyTarget(6))
    expected = plain.submit(Request((1, 2), max_new_tokens=12))
    finish(plain)
    engine = engine_for(target, prefill_tokens=4)
    short = engine.submit(Request((1, 2), max_new_tokens=12))
    engine.step()
    long = engine.submit(Request(tuple(i % 6 for i in range(60)), max_new_tokens=5))
    engine.step()
    assert 0 < long.prefilled < 59
    engine.cancel(long)
    assert target.free_slots == 3
    finish(engine)
    assert short.token_ids == expected.token_ids
    assert target.free_slots == 4
