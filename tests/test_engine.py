"""The step on a toy target: what is emitted, where it ends, what is counted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from branchwise.backends.base import Chunk, Prefill, Scored
from branchwise.core.sampling import SamplingParams
from branchwise.core.sequence import SequenceState
from branchwise.core.text import TextStream
from branchwise.core.tree import DraftTree, Draw
from branchwise.draft import build_drafter
from branchwise.draft.base import Budget, Drafter
from branchwise.draft.policies.paths import Paths
from branchwise.draft.recycle.drafter import Recycle
from branchwise.engine import Engine, FinishReason, Generation, Piece, Request
from branchwise.errors import PairingError, UsageError
from branchwise.llm import LLM
from branchwise.testing import ContrarianDrafter, RandomDrafter, ToyTarget, TruthDrafter
from branchwise.verify import VERIFIERS, Verdict, Verdicts
from tests.doubles import PipelinedDouble, PipelinedToy

VOCABULARY = 12
PROMPTS = [(1, 2, 3), (4,), (5, 6, 5, 6, 5, 6), (7, 7, 7, 7)]


def engine(drafter: Drafter | str = "none", target: ToyTarget | None = None) -> Engine:
    target = target or ToyTarget(VOCABULARY)
    return Engine(target, build_drafter(drafter) if isinstance(drafter, str) else drafter, VERIFIERS.build("match"))


def finish(engine: Engine) -> None:
    while engine.busy:
        engine.step()


def write(engine: Engine, prompt: tuple[int, ...] = (1, 2, 3), **options: object) -> Generation:
    generation = engine.submit(Request(prompt, **options))  # type: ignore[arg-type]
    finish(engine)
    return generation


def plain(prompts: list[tuple[int, ...]], count: int, sampling: SamplingParams) -> dict[tuple[int, ...], list[int]]:
    """What plain decoding writes, and some tokens more, so that drafts can run over the end."""
    return {p: write(engine(), p, max_new_tokens=count + 8, sampling=sampling).token_ids for p in prompts}


def drafters(truth: dict[tuple[int, ...], list[int]]) -> dict[str, Drafter]:
    return {
        "ngram": build_drafter("ngram:max=3,min=1"),
        "no skill": RandomDrafter(VOCABULARY, seed=5),
        "truth": TruthDrafter(truth, VOCABULARY),
        "truth among decoys": TruthDrafter(truth, VOCABULARY, decoys=2),
        "adversarial": ContrarianDrafter(truth, VOCABULARY),
    }


@pytest.mark.parametrize("temperature", [0.0, 0.8, 2.0])
@pytest.mark.parametrize("kind", ["ngram", "no skill", "truth", "truth among decoys", "adversarial"])
def test_speculation_writes_what_plain_decoding_writes(kind: str, temperature: float) -> None:
    sampling = SamplingParams(temperature=temperature, seed=11)
    truth = plain(PROMPTS, 40, sampling)
    for prompt in PROMPTS:
        alone = write(engine(drafters(truth)[kind]), prompt, max_new_tokens=40, sampling=sampling)
        assert alone.token_ids == truth[prompt][:40]
    together = engine(drafters(truth)[kind], ToyTarget(VOCABULARY, slots=3))  # one of the four has to wait
    generations = [together.submit(Request(p, max_new_tokens=40, sampling=sampling)) for p in PROMPTS]
    finish(together)
    assert [g.token_ids for g in generations] == [truth[p][:40] for p in PROMPTS]


def test_a_truthful_draft_is_accepted_whole_and_an_adversarial_one_never() -> None:
    sampling = SamplingParams(temperature=0.7, seed=3)
    truth = plain(PROMPTS, 30, sampling)
    best = write(engine(TruthDrafter(truth, VOCABULARY, length=5)), max_new_tokens=30, sampling=sampling)
    assert best.stats.steps == 5
    assert best.stats.accepted_tokens == 25
    assert best.stats.mean_acceptance_length == 6.0
    worst = write(engine(ContrarianDrafter(truth, VOCABULARY)), max_new_tokens=30, sampling=sampling)
    assert worst.stats.steps == 30
    assert worst.stats.accepted_tokens == 0


def test_one_pass_of_the_target_serves_the_whole_batch() -> None:
    target = ToyTarget(VOCABULARY)
    running = engine("none", target)
    for prompt in PROMPTS:
        running.submit(Request(prompt, max_new_tokens=10))
    finish(running)
    assert target.passes == 10


def test_sequences_join_and_leave_between_steps() -> None:
    target = ToyTarget(VOCABULARY, slots=2)
    running = engine("none", target)
    first = running.submit(Request((1, 2, 3), max_new_tokens=4))
    running.step()
    second = running.submit(Request((4,), max_new_tokens=9))
    third = running.submit(Request((7, 7), max_new_tokens=3))
    running.step()
    assert len(second.token_ids) == 1
    assert third.token_ids == []  # no slot yet
    finish(running)
    for generation, prompt in ((first, (1, 2, 3)), (second, (4,)), (third, (7, 7))):
        assert generation.token_ids == write(engine(), prompt, max_new_tokens=9).token_ids[: len(generation.token_ids)]
    assert target.free_slots == 2


def test_a_stop_token_ends_the_output_in_mid_draft() -> None:
    truth = plain(PROMPTS, 20, SamplingParams())
    wanted = truth[(1, 2, 3)]
    stop = wanted[4]
    cut = wanted[: wanted.index(stop) + 1]
    generation = write(
        engine(TruthDrafter(truth, VOCABULARY, length=6)), max_new_tokens=20, stop_tokens=frozenset({stop})
    )
    assert generation.token_ids == cut
    assert generation.finish_reason is FinishReason.STOP
    assert generation.stats.emitted_tokens == len(cut)
    assert generation.stats.accepted_tokens <= len(cut)


@pytest.mark.parametrize("count", [1, 2, 5, 6, 7])
def test_the_length_is_exact_whatever_was_drafted(count: int) -> None:
    truth = plain(PROMPTS, 20, SamplingParams())
    generation = write(engine(TruthDrafter(truth, VOCABULARY, length=5)), max_new_tokens=count)
    assert generation.token_ids == truth[(1, 2, 3)][:count]
    assert generation.finish_reason is FinishReason.LENGTH


def test_no_tree_reaches_past_the_wanted_length_or_the_context() -> None:
    seen: list[tuple[int, Budget]] = []

    class Watching(RandomDrafter):
        def _draft(self, sequence: SequenceState, budget: Budget) -> DraftTree:
            tree = super()._draft(sequence, budget)
            seen.append((len(sequence.tokens), budget))
            assert len(sequence.tokens) + tree.depth + 1 <= min(3 + 30, 20)
            return tree

    target = ToyTarget(VOCABULARY, context=20)
    generation = write(engine(Watching(VOCABULARY), target), max_new_tokens=30)
    assert generation.finish_reason is FinishReason.LENGTH
    assert len(generation.sequence.tokens) == 20
    assert seen


def test_a_prompt_that_fills_the_context_is_refused_before_it_disturbs_others() -> None:
    running = engine("none", ToyTarget(VOCABULARY, context=8))
    with pytest.raises(UsageError, match="8 tokens and the context holds 8"):
        running.submit(Request((1,) * 8))
    assert not running.busy


def test_a_bias_on_a_token_that_the_model_does_not_have_is_refused_before_it_disturbs_others() -> None:
    running = engine()
    with pytest.raises(UsageError, match="logit_bias names token 12"):
        running.submit(Request((1,), sampling=SamplingParams(logit_bias={VOCABULARY: 1.0})))
    assert not running.busy


@pytest.mark.parametrize(
    "field",
    [
        {"prompt": ()},
        {"prompt": (1,), "max_new_tokens": 0},
        {"prompt": (1,), "top_logprobs": 21},
        {"prompt": (1,), "top_logprobs": -1},
    ],
)
def test_a_request_that_cannot_be_served_is_refused(field: dict[str, object]) -> None:
    with pytest.raises(UsageError):
        Request(**field)  # type: ignore[arg-type]


def test_cancelling_keeps_what_was_written_and_frees_the_slot() -> None:
    target = ToyTarget(VOCABULARY, slots=1)
    running = engine("none", target)
    first = running.submit(Request((1, 2, 3), max_new_tokens=50))
    waiting = running.submit(Request((4,), max_new_tokens=3))
    running.step()
    running.cancel(first)
    assert first.finish_reason is FinishReason.CANCELLED
    assert len(first.token_ids) == 1
    finish(running)
    assert len(waiting.token_ids) == 3
    running.cancel(waiting)  # nothing left to cancel
    assert waiting.finish_reason is FinishReason.LENGTH
    assert target.free_slots == 1


def test_a_waiting_generation_can_be_cancelled() -> None:
    running = engine("none", ToyTarget(VOCABULARY, slots=1))
    running.submit(Request((1,), max_new_tokens=2))
    waiting = running.submit(Request((2,), max_new_tokens=2))
    running.cancel(waiting)
    finish(running)
    assert waiting.finish_reason is FinishReason.CANCELLED
    assert waiting.token_ids == []


def test_an_interrupted_step_can_be_taken_again() -> None:
    """Nothing of a step counts before its verdicts are committed, so Ctrl-C in a pass loses nothing."""
    target = ToyTarget(VOCABULARY)
    running = engine("none", target)
    generation = running.submit(Request((1, 2, 3), max_new_tokens=6))
    running.step()
    score = target.score
    target.score = lambda *args, **kwargs: (_ for _ in ()).throw(KeyboardInterrupt)  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        running.step()
    target.score = score  # type: ignore[method-assign]
    finish(running)
    assert generation.token_ids == write(engine(), max_new_tokens=6).token_ids


def test_an_interrupt_while_a_drafter_learns_loses_nothing() -> None:
    class Interrupted(RandomDrafter):
        calls = 0

        def update(self, *args: object) -> None:
            self.calls += 1
            if self.calls == 2:
                raise KeyboardInterrupt

    running = engine(Interrupted(VOCABULARY))
    generation = running.submit(Request((1, 2, 3), max_new_tokens=12))
    running.step()
    with pytest.raises(KeyboardInterrupt):
        running.step()
    finish(running)
    assert generation.token_ids == write(engine(), max_new_tokens=12).token_ids


def test_a_prompt_that_cannot_be_opened_does_not_block_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    target = ToyTarget(VOCABULARY)
    running = engine("none", target)
    bad = running.submit(Request((1,), max_new_tokens=2))
    good = running.submit(Request((2,), max_new_tokens=2))
    reserve = target.reserve

    def failing(sequence: SequenceState) -> None:
        if sequence is bad.sequence:
            raise MemoryError
        reserve(sequence)

    monkeypatch.setattr(target, "reserve", failing)
    with pytest.raises(MemoryError):
        running.step()
    finish(running)
    assert bad.finish_reason is FinishReason.CANCELLED
    assert len(good.token_ids) == 2


@pytest.mark.parametrize("prompt", [(1, VOCABULARY), (-1, 2)])
def test_token_ids_outside_the_vocabulary_are_refused(prompt: tuple[int, ...]) -> None:
    with pytest.raises(UsageError, match="outside the vocabulary of 12"):
        engine().submit(Request(prompt))


def test_waiting_for_slots_that_another_engine_holds_is_an_error_and_no_endless_loop() -> None:
    target = ToyTarget(VOCABULARY, slots=1)
    first, second = engine("none", target), engine("none", target)
    held = first.submit(Request((1,), max_new_tokens=5))
    first.step()
    second.submit(Request((2,), max_new_tokens=5))
    with pytest.raises(UsageError, match="Every slot is taken"):
        second.step()
    first.cancel(held)
    finish(second)


def letters(tokens: object) -> str:
    return "".join(chr(ord("a") + token) for token in tokens)  # type: ignore[attr-defined]


def test_a_stop_string_across_tokens_ends_the_output_in_mid_draft() -> None:
    truth = plain(PROMPTS, 20, SamplingParams())
    written = letters(truth[(1, 2, 3)])
    stop = written[3:6]
    running = engine(TruthDrafter(truth, VOCABULARY, length=8))
    generation = running.submit(Request((1, 2, 3), max_new_tokens=20), TextStream(letters, [stop]))
    finish(running)
    assert generation.text is not None
    end = written.index(stop)
    assert generation.text.text == written[:end]
    assert len(generation.token_ids) == end + len(stop)
    assert generation.finish_reason is FinishReason.STOP
    assert "".join(piece.text for piece in generation.pieces) == generation.text.text


def test_a_stop_token_is_no_text() -> None:
    written = write(engine(), max_new_tokens=6).token_ids
    running = engine()
    generation = running.submit(
        Request((1, 2, 3), max_new_tokens=6, stop_tokens=frozenset({written[3]})), TextStream(letters)
    )
    finish(running)
    assert generation.text is not None
    assert generation.text.text == letters(written[: written.index(written[3])])


def test_text_held_back_for_a_stop_string_is_released_at_the_end() -> None:
    written = letters(write(engine(), max_new_tokens=6).token_ids)
    running = engine()
    generation = running.submit(Request((1, 2, 3), max_new_tokens=6), TextStream(letters, [written[-2:] + "!"]))
    finish(running)
    assert generation.text is not None
    assert generation.text.text == written
    assert "".join(piece.text for piece in generation.pieces) == written


def test_logprobs_are_those_of_the_unwarped_model_under_speculation_too() -> None:
    sampling = SamplingParams(temperature=0.5, top_k=4, seed=2)
    truth = plain(PROMPTS, 20, sampling)
    target = ToyTarget(VOCABULARY)
    running = engine(TruthDrafter(truth, VOCABULARY, decoys=1), target)
    generation = write(running, max_new_tokens=20, sampling=sampling, logprobs=True)
    tokens = [1, 2, 3]
    for piece in generation.pieces:
        expected = target.logits(tokens).log_softmax(dim=-1)[piece.token].item()
        assert piece.logprob == pytest.approx(expected, abs=1e-6)
        tokens.append(piece.token)


@pytest.mark.parametrize(
    "penalty", [{"repetition_penalty": 1.7}, {"presence_penalty": 1.5}, {"frequency_penalty": 0.9}]
)
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_penalties_follow_each_nodes_own_path(penalty: dict[str, float], temperature: float) -> None:
    sampling = SamplingParams(temperature=temperature, seed=4, **penalty)
    truth = plain(PROMPTS, 30, sampling)
    assert truth != plain(PROMPTS, 30, SamplingParams(temperature=temperature, seed=4))
    for drafter in drafters(truth).values():
        generation = write(engine(drafter), max_new_tokens=30, sampling=sampling)
        assert generation.token_ids == truth[(1, 2, 3)][:30]


def test_a_logit_bias_can_forbid_a_token() -> None:
    common = write(engine(), max_new_tokens=20).token_ids[0]
    sampling = SamplingParams(logit_bias={common: float("-inf")})
    assert common not in write(engine(), max_new_tokens=20, sampling=sampling).token_ids


def test_requests_with_different_sampling_share_a_batch() -> None:
    settings = [
        SamplingParams(),
        SamplingParams(temperature=1.0, seed=1),
        SamplingParams(temperature=0.6, top_p=0.7, seed=2),
    ]
    running = engine("ngram")
    generations = [running.submit(Request((1, 2, 3), max_new_tokens=25, sampling=s)) for s in settings]
    finish(running)
    for generation, sampling in zip(generations, settings, strict=True):
        assert generation.token_ids == write(engine(), max_new_tokens=25, sampling=sampling).token_ids


def test_without_a_seed_two_requests_differ() -> None:
    sampling = SamplingParams(temperature=1.5)
    outputs = {tuple(write(engine(), max_new_tokens=20, sampling=sampling).token_ids) for _ in range(3)}
    assert len(outputs) == 3


def test_stop_when_is_asked_after_every_token() -> None:
    truth = plain(PROMPTS, 20, SamplingParams())
    generation = write(
        engine(TruthDrafter(truth, VOCABULARY, length=7)), max_new_tokens=20, stop_when=lambda tokens: len(tokens) == 8
    )
    assert len(generation.sequence.tokens) == 8
    assert generation.finish_reason is FinishReason.STOP


def test_a_drafter_and_verifier_that_do_not_fit_are_refused_with_those_that_would() -> None:
    class Paths(RandomDrafter):
        name = "paths"
        draw = Draw.PATHS

    class FixedOnly:
        name = "fixed-only"
        accepts = frozenset({Draw.FIXED})

    with pytest.raises(PairingError, match=r"'fixed-only' is not exact for drafter 'paths'.*match"):
        Engine(ToyTarget(), Paths(8), FixedOnly())  # type: ignore[arg-type]


def test_a_drafter_that_starts_at_the_wrong_root_cannot_change_the_text() -> None:
    class Lost(RandomDrafter):
        def _draft(self, sequence: SequenceState, budget: Budget) -> DraftTree:
            tree = super()._draft(sequence, budget)
            tokens = tree.tokens.clone()
            tokens[0] = (tokens[0] + 1) % VOCABULARY
            return DraftTree(tokens, tree.parents)

    plain = write(engine(), max_new_tokens=20).token_ids
    assert write(engine(Lost(VOCABULARY)), max_new_tokens=20).token_ids == plain


def test_a_drafter_beyond_its_budget_or_short_of_trees_is_named() -> None:
    class Greedy(RandomDrafter):
        def _draft(self, sequence: SequenceState, budget: Budget) -> DraftTree:
            return DraftTree.chain([sequence.root] * (budget.depth + 2))

    class Lazy(RandomDrafter):
        def draft(self, sequences: object, budgets: object) -> list[DraftTree]:
            return []

    with pytest.raises(UsageError, match=r"'random' gave a tree beyond its budget: 4 nodes, 3 deep"):
        write(engine(Greedy(VOCABULARY)), max_new_tokens=3)
    with pytest.raises(UsageError, match="'random' gave 0 trees for 1 sequences"):
        write(engine(Lazy(VOCABULARY)), max_new_tokens=3)


def test_a_cancelled_text_keeps_what_was_held_back() -> None:
    written = letters(write(engine(), max_new_tokens=3).token_ids)
    running = engine()
    generation = running.submit(Request((1, 2, 3), max_new_tokens=9), TextStream(letters, [written + "!"]))
    for _ in range(3):
        running.step()
    assert generation.text is not None
    assert generation.text.text == ""
    running.cancel(generation)
    assert generation.text.text == written


@pytest.mark.parametrize("later", [False, True])
@pytest.mark.parametrize("held", [False, True])
def test_a_text_is_over_when_all_of_it_is_said_and_no_piece_changes(held: bool, later: bool) -> None:
    # Another thread streams pieces as they come, and goes when the text is over.
    written = letters(write(engine(), max_new_tokens=9).token_ids)
    seen: list[tuple[bool, list[Piece]]] = []

    def decode(tokens: object) -> str:
        seen.append((generation.finished, list(generation.pieces)))
        return letters(tokens)

    running = engine("ngram:max=3,min=1")
    running.speaks_later = later
    stream = TextStream(decode, [written + "!"] if held else ())
    generation = running.submit(Request((1, 2, 3), max_new_tokens=9), stream)
    finish(running)
    assert stream.text == written
    assert len(seen) > 9
    for finished, pieces in seen:
        assert not finished
        assert generation.pieces[: len(pieces)] == pieces


class Lettered(LLM):
    """Tokens that are letters, and a prompt that is always the same."""

    stop_tokens = frozenset()  # type: ignore[assignment]

    def encode(self, prompt: object, *, raw: bool = False) -> list[int]:
        return [1, 2, 3]

    def decode(self, tokens: Sequence[int]) -> str:
        return letters(tokens)


@pytest.mark.parametrize("steps", range(12))
def test_a_stream_ends_with_the_completion_whenever_other_threads_step(steps: int) -> None:
    # Another thread ends the text between the look at its pieces and the look whether it is over.
    class Raced(list[Piece]):
        def __getitem__(self, place):  # type: ignore[no-untyped-def]
            found = super().__getitem__(place)
            for _ in range(steps):
                running.step()
            return found

    running = engine()
    llm = Lettered("toy", None, None, running)  # type: ignore[arg-type]
    submit = running.submit

    def raced(*request: Any, **options: Any) -> Generation:
        generation = submit(*request, **options)
        generation.pieces = Raced()
        return generation

    running.submit = raced  # type: ignore[method-assign]
    chunks = list(llm.stream("?", max_new_tokens=9))
    assert [chunk.completion is None for chunk in chunks] == [True] * (len(chunks) - 1) + [False]
    assert chunks[-1].completion is not None
    assert "".join(chunk.text for chunk in chunks) == chunks[-1].completion.text
    assert len(chunks[-1].completion.text) == 9


@pytest.mark.parametrize("stop", [(), ("!",), ("cab",)])
@pytest.mark.parametrize("ends", ["length", "token", "cancel"])
def test_what_is_said_while_the_next_step_runs_is_the_same(ends: str, stop: tuple[str, ...]) -> None:
    said = []
    stops = frozenset(write(engine(), max_new_tokens=9).token_ids[8:] if ends == "token" else ())
    for later in (False, True):
        running = engine("ngram:max=3,min=1", PipelinedToy(VOCABULARY) if later else None)
        request = Request((1, 2, 3), max_new_tokens=20, stop_tokens=stops)
        generation = running.submit(request, stream := TextStream(letters, stop))
        running.step()
        assert bool(generation.pending) == (later and not stop)  # a stop string is looked for at once
        assert len(generation.pieces) + len(generation.pending) == len(generation.token_ids)
        for _ in range(5):
            running.step()
        if ends == "cancel":
            running.cancel(generation)
        finish(running)
        assert not generation.pending
        assert [piece.token for piece in generation.pieces] == generation.token_ids
        assert "".join(piece.text for piece in generation.pieces) == stream.text
        said.append((generation.pieces, stream.text, generation.finish_reason))
    assert said[0] == said[1]
    assert said[0][1]


@pytest.mark.parametrize("length", [1, 2, 3, 7, 20])
def test_a_pipelined_text_ends_at_its_length_and_its_trees_do_not(length: int) -> None:
    """Trees keep the size that is recorded; a pass is enqueued unless the text surely or likely ends before it."""
    target = PipelinedToy(VOCABULARY)
    drafter = PipelinedDouble(VOCABULARY, length=5)
    found = write(engine(drafter, target), max_new_tokens=length)
    assert found.token_ids == write(engine(), max_new_tokens=length).token_ids
    assert len(found.token_ids) == length
    assert found.stats.drafted_tokens == 5 * found.stats.steps
    assert target.used == found.stats.steps - 1
    assert target.launched - target.used <= (length > 1)


def test_a_drafter_learns_from_every_step_before_tokens_join_the_sequence() -> None:
    lengths = []

    class Learning(RandomDrafter):
        def update(self, sequences: list[SequenceState], scored: object, verdicts: list[Verdict]) -> None:  # type: ignore[override]
            lengths.append((len(sequences[0].tokens), len(verdicts[0].path)))

    generation = write(engine(Learning(VOCABULARY)), max_new_tokens=10)
    assert len(lengths) == generation.stats.steps
    assert lengths[0][0] == 3


def test_a_drafter_on_a_device_learns_while_the_verdicts_are_still_there() -> None:
    calls: list[tuple[str, list[list[int]]]] = []

    class Heeding(RandomDrafter):
        def update_on_device(self, scored: Scored, verdicts: Verdicts) -> None:
            assert len(scored.logits) == len(verdicts.paths)
            calls.append(("device", [[node for node in path if node >= 0] for path in verdicts.paths.tolist()]))

        def update(self, sequences: Sequence[SequenceState], scored: Scored, verdicts: Sequence[Verdict]) -> None:
            calls.append(("host", [list(verdict.path) for verdict in verdicts]))

    write(engine(Heeding(VOCABULARY, seed=5), PipelinedToy(VOCABULARY)), max_new_tokens=6)
    assert [name for name, _ in calls[:2]] == ["device", "host"]
    assert calls[::2] == [("device", paths) for _, paths in calls[1::2]]


@pytest.mark.parametrize("verifier", ["block", "match"])
def test_a_step_that_was_learned_from_and_interrupted_is_not_judged_by_the_same_draws(verifier: str) -> None:
    # The table knows the tokens that these draws drafted: drawn from it once more, they would not be draws.
    class Interrupted(Recycle):
        def learn(self, sequences: Sequence[SequenceState], scored: Scored, verdicts: Sequence[Verdict]) -> None:
            super().learn(sequences, scored, verdicts)
            if interrupts and interrupts.pop():
                raise KeyboardInterrupt

    interrupts = [True, False]
    running = Engine(ToyTarget(VOCABULARY), Interrupted(tree=Paths("2x3")), VERIFIERS.build(verifier))
    generation = running.submit(Request((1, 2, 3), SamplingParams(temperature=1.0, seed=5), max_new_tokens=12))
    running.step()
    rng_seed = [generation.sequence.rng_seed]
    with pytest.raises(KeyboardInterrupt):
        running.step()
    for _ in range(2):
        running.step()
        rng_seed.append(generation.sequence.rng_seed)
    assert rng_seed[0] == 5
    assert (rng_seed[1] == rng_seed[0]) == (verifier == "match")  # its tokens do not depend on the draft
    assert rng_seed[2] == rng_seed[1]


def test_stats_add_up() -> None:
    truth = plain(PROMPTS, 30, SamplingParams())
    generation = write(engine(TruthDrafter(truth, VOCABULARY, length=4)), max_new_tokens=23)
    stats = generation.stats
    assert stats.emitted_tokens == 23 == len(generation.token_ids)
    assert stats.emitted_tokens == stats.steps + stats.accepted_tokens
    assert sum(stats.accepted_per_depth) == stats.accepted_tokens
    assert set(stats.seconds) == {"draft", "score", "verify", "commit"}
    assert sum(piece.drafted for piece in generation.pieces) == stats.accepted_tokens
    assert stats.acceptance_per_depth == [1.0] * 4


def test_the_seed_and_not_the_global_generator_decides() -> None:
    sampling = SamplingParams(temperature=1.0, seed=9)
    torch.manual_seed(1)
    first = write(engine(), max_new_tokens=15, sampling=sampling).token_ids
    torch.manual_seed(2)
    assert write(engine(), max_new_tokens=15, sampling=sampling).token_ids == first


class Cramped(ToyTarget):
    """A device whose memory ends with the second text of a pass, or with a prompt of more than six tokens."""

    def prefill(self, chunks: Sequence[Chunk]) -> list[Prefill]:
        if any(len(chunk.tokens) > 5 for chunk in chunks):
            raise torch.OutOfMemoryError("CUDA out of memory")
        return super().prefill(chunks)

    def score(self, sequences, batch):  # type: ignore[no-untyped-def]
        if len(sequences) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return super().score(sequences, batch)


def test_texts_without_memory_end_with_an_error_and_the_others_go_on() -> None:
    """Whoever came last leaves; nothing of the step that failed stays behind, in the text or in the slots."""
    alone = write(engine("ngram"), (1, 2, 3), max_new_tokens=9).token_ids
    cramped = engine("ngram", Cramped(VOCABULARY))
    prompts = [(1, 2, 3), (4,), (5, 6), tuple(range(7)), (7, 7)]
    texts = [cramped.submit(Request(prompt, max_new_tokens=9)) for prompt in prompts]
    finish(cramped)
    reasons = [text.finish_reason for text in texts]
    assert reasons == [FinishReason.LENGTH] * 2 + [FinishReason.ERROR] * 3
    assert texts[0].token_ids == alone
    assert texts[2].token_ids == texts[3].token_ids == []
    for text in texts[2:]:
        assert text.error is not None
        assert "ran out of memory" in text.error
        assert "max_batch" in text.error
    assert texts[3].error is not None
    assert "at 7 tokens" in texts[3].error
    assert cramped.target.free_slots == 4
    assert write(cramped, (1, 2, 3), max_new_tokens=9).token_ids == alone
