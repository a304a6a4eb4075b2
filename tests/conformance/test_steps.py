"""One suite for both steps: the plain one, and the pipelined one on a target and a drafter that work ahead on a CPU."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import pytest
import torch

from branchwise.backends.base import Needs, Prefill, Scored
from branchwise.backends.toy import ToyTarget
from branchwise.core.sampling import SamplingParams
from branchwise.core.sequence import SequenceState
from branchwise.core.tree import DraftTree
from branchwise.draft import build_drafter
from branchwise.draft.base import Budget, Drafter
from branchwise.engine import Engine, FinishReason, Generation, Request
from branchwise.engine.pipelined import PipelinedStep
from branchwise.engine.step import Step
from branchwise.errors import UsageError
from branchwise.testing import RandomDrafter
from branchwise.verify import VERIFIERS, Verdict, Verdicts
from tests.doubles import PipelinedDouble, PipelinedToy

VOCABULARY = 6
PROMPTS = [(1, 2, 3, 1, 2), (4,), (5, 0, 5, 0, 5, 0, 5)]
TARGETS: dict[type[Step], Callable[..., ToyTarget]] = {Step: ToyTarget, PipelinedStep: PipelinedToy}
DRAFTERS: dict[str, Callable[[], Drafter]] = {
    "none": lambda: build_drafter("none"),
    "no skill": lambda: RandomDrafter(VOCABULARY),
    "known ahead": lambda: PipelinedDouble(VOCABULARY),
    "learning": lambda: build_drafter("recycle"),
    "drawn": lambda: build_drafter("disturbed", "paths:2x3"),
}

steps = pytest.mark.parametrize("step", TARGETS, ids=lambda step: step.__name__)


def engine_for(step: type[Step], drafter: Drafter, verifier: str = "match", **options: object) -> Engine:
    engine = Engine(TARGETS[step](VOCABULARY, **options), drafter, VERIFIERS.build(verifier))
    assert type(engine._step) is step
    return engine


def run(engine: Engine, sampling: SamplingParams, length: int = 30, **options: object) -> list[Generation]:
    requests = [Request(prompt, sampling, length, **options) for prompt in PROMPTS]  # type: ignore[arg-type]
    generations = [engine.submit(request) for request in requests]
    while engine.busy:
        engine.step()
    return generations


def texts(generations: list[Generation]) -> list[list[int]]:
    return [generation.token_ids for generation in generations]


@steps
@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("padded", [False, True], ids=["exact sizes", "buckets"])
def test_texts_are_those_of_plain_decoding(step: type[Step], drafter: str, temperature: float, padded: bool) -> None:
    sampling = SamplingParams(temperature=temperature, seed=7)
    plain = texts(run(engine_for(Step, build_drafter("none")), sampling))
    verifier = "token" if drafter == "drawn" and temperature == 0 else "match"
    if drafter == "drawn" and temperature > 0:
        drafter = "no skill"  # other rules than match draw other texts
    assert texts(run(engine_for(step, DRAFTERS[drafter](), verifier, padded=padded), sampling)) == plain


@pytest.mark.parametrize("verifier", ["block", "cascade", "mss", "token", "gbv"])
def test_both_steps_write_the_same_with_every_rule(verifier: str) -> None:
    sampling = SamplingParams(temperature=0.8, seed=1)
    found = [texts(run(engine_for(step, DRAFTERS["drawn"](), verifier), sampling)) for step in TARGETS]
    assert found[0] == found[1]


def test_the_pipelined_step_uses_the_passes_it_launched() -> None:
    engine = engine_for(PipelinedStep, PipelinedDouble(VOCABULARY))
    run(engine, SamplingParams())
    target = engine.target
    assert isinstance(target, PipelinedToy)
    assert target.used == target.launched > 10
    assert target.passes < 1.5 * target.used


@steps
@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(temperature=0.7, top_k=4, top_p=0.9, min_p=0.01, seed=2),
        SamplingParams(temperature=0.7, seed=2, logit_bias={1: 2.0, 3: -math.inf}),
        SamplingParams(seed=2, repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.2),
    ],
    ids=["cuts", "bias", "penalties"],
)
def test_every_sampling_parameter_stays_on_the_pipelined_path(step: type[Step], sampling: SamplingParams) -> None:
    plain = texts(run(engine_for(Step, build_drafter("none")), sampling))
    engine = engine_for(step, PipelinedDouble(VOCABULARY))
    assert texts(run(engine, sampling)) == plain
    if isinstance(engine.target, PipelinedToy):
        assert engine.target.used > 10


@steps
def test_logprobs_are_those_of_the_model_before_warping(step: type[Step]) -> None:
    target = ToyTarget(VOCABULARY)
    engine = engine_for(step, PipelinedDouble(VOCABULARY))
    for generation in run(engine, SamplingParams(temperature=0.6, top_k=3, seed=4), logprobs=True):
        tokens = generation.sequence.tokens
        for place, piece in enumerate(generation.pieces, start=generation.sequence.prompt_length):
            expected = target.logits(tokens[:place]).log_softmax(dim=-1)[tokens[place]]
            assert piece.logprob == pytest.approx(float(expected), abs=1e-5)
    if isinstance(engine.target, PipelinedToy):
        assert engine.target.used > 10  # a request for logprobs does not end pipelining


@steps
def test_the_most_probable_tokens_are_those_of_a_plain_forward(step: type[Step]) -> None:
    """Also where texts that ask for different numbers of them, or for none, share a batch."""
    target, sampling = ToyTarget(VOCABULARY), SamplingParams(temperature=1.3, seed=4, logit_bias={1: 2.0})
    engine = engine_for(step, PipelinedDouble(VOCABULARY))
    wanted = [0, 3, 20]
    made = [engine.submit(Request((1, n % 5), sampling, max_new_tokens=30, top_logprobs=n)) for n in wanted]
    while engine.busy:
        engine.step()
    assert any(piece.drafted for generation in made for piece in generation.pieces)
    for number, generation in zip(wanted, made, strict=True):
        tokens = generation.sequence.tokens
        assert len(generation.pieces) == 30
        for place, piece in enumerate(generation.pieces, start=generation.sequence.prompt_length):
            best = target.logits(tokens[:place]).log_softmax(dim=-1).topk(min(number, VOCABULARY))
            assert [token for token, _ in piece.top] == best.indices.tolist()
            assert [value for _, value in piece.top] == pytest.approx(best.values.tolist(), abs=1e-5)
            assert piece.logprob is None


class Watcher(Drafter):
    """Writes down what it is called with."""

    name = "watcher"

    def __init__(self, needs: Needs) -> None:
        self._needs = needs
        self.calls: list[str] = []
        self.prefills: dict[SequenceState, Prefill] = {}
        self.hidden: dict[SequenceState, list[torch.Tensor]] = {}

    @property
    def needs(self) -> Needs:
        return self._needs

    def start(self, sequence: SequenceState, prefill: Prefill) -> None:
        self.calls.append("start")
        self.prefills[sequence] = prefill

    def draft(self, sequences: Sequence[SequenceState], budgets: Sequence[Budget]) -> list[DraftTree]:
        self.calls.append("draft")
        return [DraftTree.root(sequence.root) for sequence in sequences]

    def update_on_device(self, scored: Scored, verdicts: Verdicts) -> None:
        self.calls.append("update_on_device")

    def update(self, sequences: Sequence[SequenceState], scored: Scored, verdicts: Sequence[Verdict]) -> None:
        self.calls.append("update")
        for row, (sequence, verdict) in enumerate(zip(sequences, verdicts, strict=True)):
            for states in scored.hidden.values():
                self.hidden.setdefault(sequence, []).append(states[row, list(verdict.path)].clone())

    def finish(self, sequence: SequenceState) -> None:
        self.calls.append("finish")


@steps
def test_a_drafter_is_called_in_the_order_that_the_protocol_says(step: type[Step]) -> None:
    watcher = Watcher(Needs())
    engine = engine_for(step, watcher)
    engine.submit(Request((1, 2), max_new_tokens=2))
    while engine.busy:
        engine.step()
    ahead = ["update_on_device"] if step is PipelinedStep else []
    assert watcher.calls == ["start", "draft", *ahead, "update", "draft", *ahead, "update", "finish"]


@steps
@pytest.mark.parametrize("chunk", [2, 512])
def test_hidden_states_and_logits_come_as_they_are_needed(step: type[Step], chunk: int) -> None:
    watcher = Watcher(Needs(prefill_logits=3, hidden_layers=("embedding",)))
    engine = engine_for(step, watcher, prefill_chunk=chunk)
    generations = run(engine, SamplingParams())
    target = ToyTarget(VOCABULARY)
    for generation in generations:
        tokens, sequence = generation.sequence.tokens, generation.sequence
        before = sequence.prompt_length - 1  # the last prompt token is the first root
        prefill = watcher.prefills[sequence]
        ends = range(max(before - 3, 0) + 1, before + 1)
        assert len(prefill.logits) == len(ends)
        for row, end in zip(prefill.logits, ends, strict=True):
            assert torch.equal(row, target.logits(tokens[:end]))
        written = [prefill.hidden["embedding"]] if before else []
        hidden = torch.cat([*written, *watcher.hidden[sequence]])
        expected = [target.hidden(tokens[: place + 1]) for place in range(len(tokens) - 1)]
        assert torch.equal(hidden, torch.stack(expected))


@steps
def test_a_fork_brings_the_prefill_of_its_source(step: type[Step]) -> None:
    watcher = Watcher(Needs(prefill_logits=2, hidden_layers=("embedding",)))
    engine = engine_for(step, watcher)
    source = SequenceState([1, 2, 3, 4])
    opened = engine.target.open(source, 2)
    generation = engine.submit(Request((1, 2, 3, 4), max_new_tokens=3), like=source)
    while engine.busy:
        engine.step()
    found = watcher.prefills[generation.sequence]
    assert torch.equal(found.logits, opened.logits)
    assert torch.equal(found.hidden["embedding"], opened.hidden["embedding"])


@steps
def test_an_interrupted_step_is_taken_again_with_the_same_text(step: type[Step]) -> None:
    plain = texts(run(engine_for(Step, build_drafter("none")), SamplingParams(temperature=0.9, seed=3)))
    drafter = PipelinedDouble(VOCABULARY)
    engine = engine_for(step, drafter)
    own, calls = drafter.update, iter(range(1000))

    def breaking(*given: object) -> None:
        if next(calls) % 5 == 2:
            raise KeyboardInterrupt
        own(*given)  # type: ignore[arg-type]

    drafter.update = breaking  # type: ignore[method-assign,assignment]
    generations = [engine.submit(Request(p, SamplingParams(temperature=0.9, seed=3), 30)) for p in PROMPTS]
    interrupted = 0
    while engine.busy:
        try:
            engine.step()
        except KeyboardInterrupt:
            interrupted += 1
    assert interrupted > 2
    assert texts(generations) == plain


@steps
def test_out_of_memory_ends_the_last_text_alone(step: type[Step]) -> None:
    engine = engine_for(step, build_drafter("none"))
    own = engine.target.score

    def starved(sequences: Sequence[SequenceState], batch: object) -> Scored:
        if len(sequences) == 3:
            raise torch.OutOfMemoryError("no memory")
        return own(sequences, batch)  # type: ignore[arg-type]

    engine.target.score = starved  # type: ignore[method-assign,assignment]
    generations = run(engine, SamplingParams())
    reasons = [generation.finish_reason for generation in generations]
    assert reasons == [FinishReason.LENGTH, FinishReason.LENGTH, FinishReason.ERROR]
    assert "ran out of memory" in (generations[2].error or "")


@pytest.mark.parametrize(
    ("logits", "said"),
    [
        (torch.zeros(1, VOCABULARY), r"of shape \(1, 1, 6\), not \(1, 6\)"),
        (torch.zeros(1, 1, VOCABULARY).numpy(), r"as a tensor of shape \(1, 1, 6\), not ndarray"),
    ],
)
def test_a_target_that_scores_something_else_is_named(logits: torch.Tensor, said: str) -> None:
    engine = engine_for(Step, build_drafter("none"))
    engine.target.score = lambda *given: Scored(logits)  # type: ignore[method-assign]
    engine.submit(Request((1, 2), max_new_tokens=2))
    with pytest.raises(UsageError, match=said):
        engine.step()
