"""Prompts that begin like other texts: what is written, and what is drafted, is that of a prompt prefilled whole."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from branchwise.backends.base import Needs, Prefill, Target
from branchwise.backends.toy import ToyTarget
from branchwise.backends.transformers.target import TransformersTarget
from branchwise.core.sampling import SamplingParams
from branchwise.core.sequence import SequenceState
from branchwise.draft import TREES, build_drafter
from branchwise.draft.base import Drafter, NoDrafter
from branchwise.draft.head.drafter import HeadDrafter
from branchwise.draft.model.draft_model import Weights
from branchwise.draft.model.drafter import ModelDrafter
from branchwise.engine import Engine, FinishReason, Generation, Request, prefixes
from branchwise.engine.warmup import warm_up
from branchwise.errors import UsageError
from branchwise.testing import RandomDrafter, TruthDrafter
from branchwise.verify import VERIFIERS
from tests import test_head_drafter as heads
from tests.doubles import PipelinedDouble, PipelinedToy
from tests.heads import random_head
from tests.test_model_drafter import tiny

VOCABULARY = 6
LONG = tuple((7 * n + n // 3) % VOCABULARY for n in range(40))


def engine_for(target: Target, drafter: Drafter | None = None, **options: Any) -> Engine:
    options = {"prefix_cache": True} | options
    return Engine(target, drafter or build_drafter("none"), VERIFIERS.build("match"), **options)


def finish(engine: Engine) -> None:
    while engine.busy:
        engine.step()


def write(engine: Engine, prompt: Sequence[int], tokens: int = 8, **options: Any) -> Generation:
    generation = engine.submit(Request(tuple(prompt), max_new_tokens=tokens, **options))
    finish(engine)
    return generation


def truth(target: ToyTarget, prompt: Sequence[int], tokens: int) -> list[int]:
    text = list(prompt)
    for _ in range(tokens):
        text.append(int(target.logits(text).argmax()))
    return text[len(prompt) :]


# What is reused


def test_the_next_turn_prefills_only_what_is_new() -> None:
    target = ToyTarget(VOCABULARY)
    engine = engine_for(target)
    first = write(engine, LONG)
    assert first.stats.reused_tokens == 0
    turn = [*LONG, *first.token_ids, 1, 2, 3]
    target.prefills.clear()
    second = write(engine, turn)
    assert second.stats.reused_tokens == len(LONG) + 8 - 1  # the last token was never in the cache
    assert target.prefills == [[3]]  # itself, and all behind it but the root
    assert second.token_ids == truth(target, turn, 8)
    assert second.stats.as_dict()["reused_tokens"] == 47


def test_the_same_prompt_again_prefills_nothing() -> None:
    target = ToyTarget(VOCABULARY)
    engine = engine_for(target)
    first = write(engine, LONG)
    target.prefills.clear()
    again = write(engine, LONG)
    assert again.stats.reused_tokens == len(LONG) - 1
    assert target.prefills == [[0]]
    assert again.token_ids == first.token_ids


def test_a_running_text_lends_its_rows() -> None:
    target = ToyTarget(VOCABULARY)
    engine = engine_for(target)
    first = engine.submit(Request(LONG, max_new_tokens=30))
    for _ in range(5):
        engine.step()
    second = engine.submit(Request((*LONG[:30], 5, 5, 5), max_new_tokens=9))
    finish(engine)
    assert second.stats.reused_tokens == 29
    assert second.token_ids == truth(target, (*LONG[:30], 5, 5, 5), 9)
    assert first.token_ids == truth(target, LONG, 30)


def test_a_few_tokens_in_common_are_not_worth_it() -> None:
    target = ToyTarget(VOCABULARY)
    engine = engine_for(target)
    write(engine, LONG)
    for common, reused in ((prefixes.WORTHWHILE, 0), (prefixes.WORTHWHILE + 1, prefixes.WORTHWHILE)):
        other = (LONG[common] + 1) % VOCABULARY
        assert write(engine, (*LONG[:common], other, 1)).stats.reused_tokens == reused


def test_the_longest_beginning_is_found_among_several() -> None:
    engine = engine_for(ToyTarget(VOCABULARY, slots=4))
    for cut in (20, 35, 30):
        write(engine, (*LONG[:cut], (LONG[cut] + 1) % VOCABULARY), tokens=1)
    assert write(engine, LONG).stats.reused_tokens == 34


def test_nothing_is_kept_unless_asked_for() -> None:
    target = ToyTarget(VOCABULARY)
    engine = engine_for(target, prefix_cache=False)
    for _ in range(2):
        assert write(engine, LONG).stats.reused_tokens == 0
    assert not target._retired


def test_texts_are_shared_within_their_scope_alone() -> None:
    engine = engine_for(ToyTarget(VOCABULARY, slots=8))
    for scope, reused in (("a", 0), ("b", 0), (None, 0), ("a", 39), ("b", 39), (None, 39)):
        assert write(engine, LONG, scope=scope).stats.reused_tokens == reused
    running = engine.submit(Request(LONG, max_new_tokens=9, scope="c"))
    engine.step()
    other = engine.submit(Request(LONG, max_new_tokens=9, scope="d"))
    finish(engine)
    assert (running.stats.reused_tokens, other.stats.reused_tokens) == (0, 0)


def test_at_most_so_many_are_kept_and_the_one_used_longest_ago_goes() -> None:
    target = ToyTarget(VOCABULARY, slots=8)
    engine = engine_for(target, prefix_cache=2)
    texts = [tuple((n * n + start) % VOCABULARY for n in range(30)) for start in range(3)]
    for number in (0, 1, 0, 2):  # the first is used again before the third comes
        write(engine, texts[number])
    assert len(target._retired) == len(engine.scheduler.prefixes or ()) == 2
    assert [write(engine, texts[number]).stats.reused_tokens for number in (0, 2)] == [29, 29]
    assert write(engine, texts[1]).stats.reused_tokens == 0


def test_a_text_that_another_begins_with_is_not_kept_beside_it() -> None:
    target = ToyTarget(VOCABULARY, slots=4)
    engine = engine_for(target)
    for _ in range(3):
        first = write(engine, LONG)
    assert len(target._retired) == 1
    write(engine, LONG, scope="other")
    write(engine, (*LONG, *first.token_ids, 2, 2))
    assert len(target._retired) == 2
    assert write(engine, LONG, tokens=20).stats.reused_tokens == len(LONG) - 1


def test_a_text_makes_room_for_those_that_need_its_slot() -> None:
    target = ToyTarget(VOCABULARY, slots=2)
    engine = engine_for(target)
    write(engine, LONG)
    assert target.free_slots == 2
    others = [engine.submit(Request((number, *[5] * 20), max_new_tokens=6)) for number in range(4)]
    finish(engine)
    assert all(other.token_ids == truth(target, other.request.prompt, 6) for other in others)
    assert write(engine, LONG).stats.reused_tokens == 0


def test_with_one_slot_a_text_is_taken_over_even_if_not_all_of_it_fits() -> None:
    target = ToyTarget(VOCABULARY, slots=1)
    engine = engine_for(target)
    write(engine, LONG)
    second = write(engine, (*LONG[:30], 5, 5))
    assert second.stats.reused_tokens == 29
    assert second.token_ids == truth(target, (*LONG[:30], 5, 5), 8)
    assert len(target._retired) == 1


def test_a_cancelled_text_serves_as_far_as_it_came_and_an_unread_prompt_does_not() -> None:
    target = ToyTarget(VOCABULARY, prefill_chunk=8)
    engine = engine_for(target, prefill_tokens=8)
    text = engine.submit(Request(LONG, max_new_tokens=30))
    for _ in range(4):
        engine.step()
    unread = engine.submit(Request(tuple(reversed(LONG)), max_new_tokens=5))
    engine.step()
    assert 0 < unread.prefilled < len(LONG) - 1
    engine.cancel(unread)
    engine.cancel(text)
    turn = (*LONG, *text.token_ids, 0)
    assert write(engine, turn).stats.reused_tokens == len(turn) - 2
    assert write(engine, tuple(reversed(LONG))).stats.reused_tokens == 0


def test_who_begins_like_a_prompt_that_is_being_prefilled_waits_for_its_rows_and_keeps_a_slot() -> None:
    target = ToyTarget(VOCABULARY, slots=3, prefill_chunk=8)
    engine = engine_for(target, prefill_tokens=8)
    running = engine.submit(Request((1, 2), max_new_tokens=30))
    engine.step()
    first, second = (engine.submit(Request(LONG, max_new_tokens=4)) for _ in range(2))
    other = engine.submit(Request((3, 4), max_new_tokens=4))
    engine.step()
    assert first.began is not None
    assert second.began is None
    assert other.began is None  # the last slot is for the one that waits
    finish(engine)
    assert second.stats.reused_tokens == len(LONG) - 1
    assert all(text.token_ids == truth(target, text.request.prompt, 4) for text in (first, second, other))
    assert running.token_ids == truth(target, (1, 2), 30)


@pytest.mark.parametrize("why", ["cancelled", "another scope", "much longer"])
def test_nobody_waits_for_rows_that_do_not_come_or_come_late(why: str) -> None:
    target = ToyTarget(VOCABULARY, slots=3, prefill_chunk=8, context=400)
    engine = engine_for(target, prefill_tokens=8)
    engine.submit(Request((1, 2), max_new_tokens=30))
    engine.step()
    longer = (*LONG, *LONG[::-1], *LONG, *LONG[::-1]) if why == "much longer" else LONG
    first = engine.submit(Request(longer, max_new_tokens=4))
    second = engine.submit(Request(LONG, max_new_tokens=4, scope="other" if why == "another scope" else None))
    engine.step()
    if why == "cancelled":
        assert second.began is None
        engine.cancel(first)
        engine.step()
    assert second.began is not None
    finish(engine)
    assert second.stats.reused_tokens == 0
    assert second.token_ids == truth(target, LONG, 4)


def test_rows_behind_a_stop_in_mid_draft_are_not_part_of_the_text() -> None:
    target = ToyTarget(VOCABULARY)
    known = {LONG: truth(target, LONG, 20)}
    engine = engine_for(target, TruthDrafter(known, VOCABULARY, length=6))
    first = engine.submit(Request(LONG, max_new_tokens=20, stop_when=lambda tokens: len(tokens) == len(LONG) + 3))
    finish(engine)
    assert first.finish_reason is FinishReason.STOP
    assert len(first.token_ids) == 3
    turn = (*LONG, *first.token_ids, *[(token + 1) % VOCABULARY for token in known[LONG][3:9]])
    again = engine_for(ToyTarget(VOCABULARY), prefix_cache=False)
    engine.drafter.truth[turn] = expected = write(again, turn).token_ids  # type: ignore[attr-defined]
    second = write(engine, turn)
    assert second.stats.reused_tokens == len(LONG) + 2
    assert second.token_ids == expected


def test_another_engine_of_the_same_target_has_all_slots() -> None:
    target = ToyTarget(VOCABULARY, slots=2)
    one, other = engine_for(target), engine_for(target, prefix_cache=False)
    write(one, LONG)
    write(one, tuple(reversed(LONG)))
    texts = [other.submit(Request((number, 2), max_new_tokens=4)) for number in range(3)]
    finish(other)
    assert all(text.token_ids == truth(target, text.request.prompt, 4) for text in texts)
    assert write(one, LONG).stats.reused_tokens == 0
    assert len(one.scheduler.prefixes or ()) == 1


def test_what_is_dropped_is_gone() -> None:
    target = ToyTarget(VOCABULARY)
    engine = engine_for(target)
    write(engine, LONG)
    engine.drop_prefixes()
    assert not target._retired
    assert write(engine, LONG).stats.reused_tokens == 0


def test_a_warm_up_prefills_its_prompts_and_leaves_nothing() -> None:
    target = PipelinedToy(VOCABULARY, slots=2, context=40)
    engine = engine_for(target, PipelinedDouble(VOCABULARY))
    warm_up(engine, progress=False)
    assert not target._retired
    parts = [tokens for tokens in target.prefills if 19 not in tokens]
    assert 0 < len(parts) < len(target.prefills) / 4, "some prompts begin like one before them, and no others"
    assert all(len(tokens) <= 3 for tokens in parts)


@pytest.mark.parametrize("wrong", [-1, 0])
def test_a_cache_for_no_text_and_a_target_without_one_are_refused(wrong: int) -> None:
    with pytest.raises(UsageError, match="at least 1 text"):
        prefixes.Prefixes(ToyTarget(VOCABULARY), NoDrafter(), wrong)
    target = ToyTarget(VOCABULARY)
    target.keeps_rows = False  # type: ignore[misc]
    with pytest.raises(UsageError, match="leave out prefix_cache"):
        engine_for(target)


# Drafters


class Reading(RandomDrafter):
    """Needs the hidden states of whole prompts, and says no more of it."""

    needs = Needs(hidden_layers=("embedding",))
    rows = 0

    def start(self, sequence: SequenceState, prefill: Prefill) -> None:
        self.rows = len(prefill.hidden["embedding"])


def test_a_drafter_that_needs_hidden_states_gets_all_of_them_unless_it_says_otherwise() -> None:
    drafter = Reading(VOCABULARY)
    engine = engine_for(ToyTarget(VOCABULARY), drafter)
    for _ in range(2):
        assert write(engine, LONG).stats.reused_tokens == 0
        assert drafter.rows == len(LONG) - 1


class Forgetful(RandomDrafter):
    """Has no memory for what a text inherits."""

    def inherit(self, source: SequenceState, sequence: SequenceState, rows: int, *, moved: bool) -> None:
        raise torch.OutOfMemoryError


@pytest.mark.parametrize("length", [len(LONG), 30], ids=["moved", "copied"])
def test_without_memory_for_a_drafter_the_text_fails_and_its_slot_is_free(length: int) -> None:
    target = ToyTarget(VOCABULARY, slots=2)
    engine = engine_for(target, Forgetful(VOCABULARY))
    first = write(engine, LONG)
    failed = write(engine, (*LONG, *first.token_ids, 1)[:length])
    assert failed.finish_reason is FinishReason.ERROR
    assert target.free_slots == 2
    assert write(engine, (3, 3)).token_ids == truth(target, (3, 3), 8)


def draft_model() -> Drafter:
    weights = Weights("tiny", tiny(1, layers=1, vocabulary=VOCABULARY), None)
    return ModelDrafter(weights, tree=TREES.build("topk:6,depth=3,width=2"))


def head(form: str) -> Callable[[], Drafter]:
    return lambda: HeadDrafter(random_head(ToyTarget(VOCABULARY).info, form, table=4), tree=TREES.build("chain:3"))


DRAFTERS: dict[str, Callable[[], Drafter]] = {
    "none": NoDrafter,
    "random": lambda: RandomDrafter(VOCABULARY),
    "memories": lambda: build_drafter("memories"),
    "model": draft_model,
    "head": head("carry"),
    "head with a window": head("longspec-states"),
}
token = st.integers(0, VOCABULARY - 1)


@st.composite
def conversations(draw: st.DrawFn) -> list[tuple[Any, ...]]:
    """What users do: ask something new or what begins like an earlier text, wait for some steps, leave."""
    ask = st.tuples(
        st.just("ask"), st.integers(0, 9), st.integers(0, 60), st.lists(token, max_size=6), st.integers(1, 12),
        st.sampled_from([None, None, "other"]),
    )  # fmt: skip
    step = st.tuples(st.just("step"), st.integers(1, 6))
    cancel = st.tuples(st.just("cancel"), st.integers(0, 9))
    return draw(st.lists(st.one_of(ask, ask, step, cancel), min_size=3, max_size=14))


def hold(engine: Engine, doings: list[tuple[Any, ...]], first: Sequence[int]) -> list[Generation]:
    """Have conversations; the tokens of earlier texts are what they were when asked."""
    asked: list[Generation] = []
    for kind, *what in doings:
        if kind == "step":
            for _ in range(what[0]):
                engine.step()
        elif kind == "cancel" and asked:
            engine.cancel(asked[what[0] % len(asked)])
        elif kind == "ask":
            number, cut, new, tokens, scope = what
            begun = asked[-1 - number % len(asked)].sequence.tokens if asked else first
            prompt = (*begun[:cut], *new) or (0,)
            if len(prompt) < engine.target.info.context:
                asked.append(engine.submit(Request(prompt, max_new_tokens=tokens, scope=scope)))
    finish(engine)
    return asked


@pytest.mark.parametrize("name", DRAFTERS)
@settings(max_examples=25, deadline=None)
@given(doings=conversations(), slots=st.integers(1, 3), most=st.integers(1, 3), least=st.integers(1, 4), data=st.data())
def test_conversations_are_written_as_if_every_prompt_were_prefilled_whole(
    name: str, doings: list[tuple[Any, ...]], slots: int, most: int, least: int, data: st.DataObject
) -> None:
    """The toy target checks that its cache holds the tokens of every text."""
    target = ToyTarget(VOCABULARY, slots=slots, context=80, prefill_chunk=data.draw(st.sampled_from([3, 64])))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prefixes, "WORTHWHILE", least)
        engine = engine_for(target, DRAFTERS[name](), prefix_cache=most)
        for generation in hold(engine, doings, LONG[:20]):
            wanted = truth(target, generation.request.prompt, len(generation.token_ids))
            assert generation.token_ids == wanted
            assert generation.finished
        assert target.free_slots == slots
        assert len(target._retired) <= min(most, slots)
        engine.drop_prefixes()
    assert_nothing_is_left(engine.drafter)


def assert_nothing_is_left(drafter: Drafter) -> None:
    """When all texts are dropped, a drafter holds none of them."""
    if isinstance(drafter, HeadDrafter):
        assert not drafter._texts
        assert not drafter._cache.slot
        assert len(drafter._cache._free) == drafter._cache.padding
    if isinstance(drafter, ModelDrafter):
        assert not drafter._following._texts
        assert drafter._following._acquired is None


@settings(max_examples=15, deadline=None)
@given(doings=conversations(), slots=st.integers(1, 3), seed=st.integers(0, 99))
def test_a_pass_that_was_enqueued_ahead_does_not_count_for_who_takes_the_slot(
    doings: list[tuple[Any, ...]], slots: int, seed: int
) -> None:
    target = PipelinedToy(VOCABULARY, slots=slots, context=80)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prefixes, "WORTHWHILE", 2)
        engine = engine_for(target, PipelinedDouble(VOCABULARY))
        for generation in hold(engine, doings, LONG[:20]):
            assert generation.token_ids == truth(target, generation.request.prompt, len(generation.token_ids))


# Real caches

MODEL = heads.model_of()
WORDS = tuple((11 * n + n // 4) % heads.VOCABULARY for n in range(40))


def real_drafter(name: str, target: TransformersTarget) -> Drafter:
    if name == "model":
        weights = Weights("tiny", heads.model_of(seed=3), None)
        return ModelDrafter(weights, tree=TREES.build("topk:6,depth=3,width=2"))
    if name == "head":
        return HeadDrafter(heads.trained(target, "carry"), tree=TREES.build("topk:6,depth=3,width=2"))
    return build_drafter(name)


@pytest.mark.parametrize("name", ["none", "ngram", "memories", "model", "head"])
@settings(max_examples=8, deadline=None)
@given(doings=conversations(), slots=st.integers(1, 3))
@torch.no_grad()
def test_a_model_writes_what_it_writes_from_whole_prompts(name: str, doings: list[tuple[Any, ...]], slots: int) -> None:
    target = TransformersTarget(MODEL, slots=slots, context=100, max_nodes=16)
    plain = engine_for(target, prefix_cache=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prefixes, "WORTHWHILE", 2)
        engine = engine_for(target, real_drafter(name, target))
        asked = hold(engine, doings, WORDS[:20])
    engine.drop_prefixes()
    assert not any(tensor.any() for tensor in target.store._tensors.values())
    for generation in asked:
        if generation.token_ids:
            alone = write(plain, generation.request.prompt, len(generation.token_ids))
            assert generation.token_ids == alone.token_ids
    assert_nothing_is_left(engine.drafter)


def test_the_next_turn_copies_no_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    target = TransformersTarget(MODEL, slots=2, context=100, max_nodes=16)
    engine = engine_for(target)
    first = write(engine, WORDS)
    for forbidden in ("fork", "open"):
        monkeypatch.setattr(target.store, forbidden, None)
    turn = (*WORDS, *first.token_ids, 1, 2)
    assert write(engine, turn).stats.reused_tokens == len(turn) - 3


@pytest.mark.parametrize("form", heads.FORMS)
@torch.no_grad()
def test_a_head_predicts_behind_inherited_rows_as_in_training(form: str) -> None:
    """Of texts that run and that have ended, as they are and in part, copied and taken over."""
    target = TransformersTarget(MODEL, slots=3, context=128, max_nodes=32)
    drafter = heads.Watching(heads.trained(target, form), tree=TREES.build("topk:6,depth=3,width=2"))
    engine = engine_for(target, drafter)
    first = write(engine, WORDS, 12)
    turn = (*WORDS, *first.token_ids, 4, 5, 6)
    second = write(engine, turn, 12)
    running = engine.submit(Request((*turn, *second.token_ids, 7, 8), max_new_tokens=20))
    engine.step()
    others = [engine.submit(Request((*turn[:cut], 9, 9, 1), max_new_tokens=8)) for cut in (30, 52, 47)]
    again = engine.submit(Request(running.request.prompt, max_new_tokens=8))
    finish(engine)
    reused = [one.stats.reused_tokens for one in (second, running, *others, again)]
    assert min(reused[:2]) > 40
    assert max(reused) < len(running.request.prompt) - 1  # a last row is read: its predictions are nobody else's
    assert sum(count > 0 for count in reused) >= 4
    heads.assert_as_in_training(drafter, MODEL)
    assert all(one.stats.drafted_tokens for one in (first, second, running, *others, again))


@torch.no_grad()
def test_a_draft_model_reads_nothing_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    target = TransformersTarget(MODEL, slots=2, context=100, max_nodes=16)
    drafter = real_drafter("model", target)
    assert isinstance(drafter, ModelDrafter)
    engine = engine_for(target, drafter)
    first = write(engine, WORDS)
    written: list[int] = []
    extend = TransformersTarget.extend

    def counting(slots: TransformersTarget, sequence: SequenceState, tokens: Sequence[int], keep: int = 0) -> Prefill:
        written.append(len(tokens))
        return extend(slots, sequence, tokens, keep)

    monkeypatch.setattr(TransformersTarget, "extend", counting)
    turn = (*WORDS, *first.token_ids, *WORDS[:20])
    write(engine, turn)
    assert written
    assert sum(written) <= 20 + 4  # what is new, and what was not drafted of the answer


@torch.no_grad()
def test_a_head_that_stood_aside_shares_what_it_read_of_the_prompt_and_no_more() -> None:
    target = TransformersTarget(MODEL, slots=2, context=128, max_nodes=32)
    drafter = heads.Watching(heads.trained(target, "carry"), tree=TREES.build("chain:2"))
    engine = engine_for(target, drafter)
    text = engine.submit(Request(WORDS, max_new_tokens=20))
    engine.step()
    drafter._texts[text.sequence].unread.cut(0)  # as after a step that left no memory to learn
    finish(engine)
    turn = (*WORDS, *text.token_ids, 4, 5)
    second = write(engine, turn)
    assert second.stats.reused_tokens == len(WORDS) - 1
    assert second.stats.drafted_tokens > 0
    drafter.seen = [seen for seen in drafter.seen if len(seen[0]) >= len(turn)]
    heads.assert_as_in_training(drafter, MODEL)


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_sampled_texts_are_the_same_seed_for_seed(temperature: float) -> None:
    sampling = SamplingParams(temperature=temperature, seed=5)
    target = TransformersTarget(MODEL, slots=2, context=100, max_nodes=16)
    plain, engine = engine_for(target, prefix_cache=False), engine_for(target, build_drafter("ngram"))
    write(engine, WORDS)
    texts = [write(one, (*WORDS[:30], 3, 2), 20, sampling=sampling) for one in (plain, engine)]
    assert texts[0].token_ids == texts[1].token_ids
    assert [text.stats.reused_tokens for text in texts] == [0, 29]
