"""Drafters that are let rest now and then: the text stays the same, and they go on as if they never had."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from branchwise.audit.exact import TOLERANCE, emitted
from branchwise.audit.instances import DRAWS, SIMILARITIES, Drafts, Instance
from branchwise.backends.toy import ToyTarget
from branchwise.backends.transformers.target import TransformersTarget
from branchwise.control.guard import PLAIN, Guard
from branchwise.core.sampling import SamplingParams
from branchwise.core.sequence import SequenceState
from branchwise.core.tree import DraftTree, Draw
from branchwise.draft import build_drafter, build_policy
from branchwise.draft.base import Budget, Drafter
from branchwise.draft.head.drafter import HeadDrafter
from branchwise.draft.model.drafter import ModelDrafter
from branchwise.engine import Engine, Generation, Request
from branchwise.engine.guarded import may_rest
from branchwise.engine.pipelined import PipelinedStep
from branchwise.engine.step import Step
from branchwise.engine.warmup import warm_up
from branchwise.testing import RandomDrafter
from branchwise.verify import VERIFIERS, Verifier
from tests.conformance.test_drafters import LENGTH, PROMPTS, SHIPPED, VOCABULARY
from tests.doubles import PipelinedDouble, PipelinedToy
from tests.heads import random_head
from tests.test_builder import PAIRS, TEXTS, Remembered, assert_law, sampled, target_law
from tests.test_head_drafter import Watching, assert_as_in_training, model_of, trained
from tests.test_model_drafter import Checked, target, weights


class AtRandom(Guard):
    """Rests in about every other step."""

    def __init__(self, seed: int = 0, share: float = 0.5, sources: Sequence[str] = ("drafter",)) -> None:
        super().__init__(sources=sources)
        self.rng, self.share = random.Random(seed), share
        self.recorded: list[tuple[bool, bool]] = []
        """of each step: whether it rested, and whether the drafter caught up in it"""

    def choose(self, batch: int) -> int:
        return PLAIN if self.rng.random() < self.share else self.rng.randrange(len(self.sources))

    def record(self, batch: int, source: int, rows: int, tokens: float, seconds: float, *, caught_up: bool) -> None:
        assert seconds > 0
        assert tokens == 1 or source != PLAIN
        self.recorded.append((source == PLAIN, caught_up))


class InTurns(AtRandom):
    """Rests and drafts for as many steps, as it is told."""

    def __init__(self, *turns: int) -> None:
        super().__init__()
        self.turns = itertools.chain.from_iterable(
            itertools.repeat(bool(place % 2), turn) for place, turn in enumerate(turns)
        )

    def choose(self, batch: int) -> int:
        return PLAIN if next(self.turns, False) else 0


def run(engine: Engine, sampling: SamplingParams, prompts: Sequence[tuple[int, ...]] = PROMPTS) -> list[Generation]:
    asked = [engine.submit(Request(prompt, sampling, LENGTH)) for prompt in prompts]
    while engine.busy:
        engine.step()
    return asked


def texts(asked: Sequence[Generation]) -> list[list[int]]:
    return [one.token_ids for one in asked]


# Texts


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("name", SHIPPED)
def test_the_text_of_every_drafter_is_that_of_plain_decoding(name: str, temperature: float) -> None:
    drafter = SHIPPED[name]({})
    verifier = next(rule for rule in ("match", "block", "rrs") if drafter.draw in VERIFIERS.build(rule).accepts)
    sampling = SamplingParams(temperature=temperature, seed=21)
    plain = run(Engine(ToyTarget(VOCABULARY, slots=2), build_drafter("none"), VERIFIERS.build("match")), sampling)
    target = ToyTarget(VOCABULARY, slots=2)
    drafter.bind(target.info)
    guard = AtRandom(sources=[source.name for source in drafter.sources or (drafter,)])
    engine = Engine(target, drafter, VERIFIERS.build(verifier), guard=guard)
    asked = run(engine, sampling)
    assert texts(asked) == texts(plain)
    if drafter.paces and not drafter.sources:
        assert engine.guard is None
        assert not guard.recorded
    else:
        rested = [rested for rested, _ in guard.recorded]
        assert 10 < sum(rested) < len(rested) - 10
        assert all(0 < one.stats.rested < one.stats.steps for one in asked)


class Watched(Drafter):
    """Remembers what another drafter drafted behind which text."""

    def __init__(self, inner: Drafter) -> None:
        self.inner, self.name, self.draw = inner, inner.name, inner.draw
        self.drafted: dict[tuple[int, ...], list[int]] = {}

    def __getattribute__(self, name: str) -> Any:
        own = ("inner", "name", "draw", "drafted", "draft", "rest")
        return object.__getattribute__(self, name) if name in own else getattr(self.inner, name)

    def draft(self, sequences: Sequence[SequenceState], budgets: Sequence[Budget]) -> list[DraftTree]:
        trees = self.inner.draft(sequences, budgets)
        for sequence, tree in zip(sequences, trees, strict=True):
            self.drafted[tuple(sequence.tokens)] = tree.tokens.tolist()
        return trees

    def rest(self, sequences: Sequence[SequenceState]) -> list[DraftTree]:
        return self.inner.rest(sequences)


AS_IF_NEVER: dict[str, Callable[[], Drafter]] = {
    "ngram": lambda: build_drafter("ngram", "chain:4"),
    "ngram, tree": lambda: build_drafter("ngram", "topk:8"),
    "suffix": lambda: build_drafter("suffix"),
    "retrieval": lambda: SHIPPED["retrieval"]({}),
    "trigram": lambda: build_drafter("trigram", "puct:8"),
    "model": lambda: SHIPPED["model"]({}),
    "head": lambda: HeadDrafter(random_head(ToyTarget(VOCABULARY).info), tree=build_policy("topk:7,depth=2,width=4")),
    "head, drawn": lambda: HeadDrafter(random_head(ToyTarget(VOCABULARY).info), tree=build_policy("paths:2x2")),
    "disturbed": lambda: build_drafter("disturbed", "rsd-c:2,1"),
}
"""drafters whose trees follow from the text alone"""


@pytest.mark.parametrize("name", AS_IF_NEVER)
def test_after_a_rest_a_drafter_drafts_what_it_would_have_drafted_without(name: str) -> None:
    """With one text and greedily, so that both drafters meet the same texts."""
    found = []
    for guard in (False, AtRandom(3)):
        drafter = Watched(AS_IF_NEVER[name]())
        rule = next(rule for rule in VERIFIERS if drafter.draw in VERIFIERS.build(rule).accepts and rule != "auto")
        engine = Engine(ToyTarget(VOCABULARY), drafter, VERIFIERS.build(rule), guard=guard)
        run(engine, SamplingParams(), [PROMPTS[0]])
        found.append(drafter.drafted)
    common = found[0].keys() & found[1].keys()
    assert len(common) > 5
    assert sum(len(found[1][text]) > 1 for text in common) > 3
    for text in common:
        assert found[0][text] == found[1][text]


@pytest.mark.parametrize("members", ["recycle+suffix", "stand+trigram"])
def test_memories_learn_on_while_they_rest(members: str) -> None:
    drafter = build_drafter(f"fused:{members}", "topk:8,depth=3,width=2")
    engine = Engine(ToyTarget(VOCABULARY), drafter, VERIFIERS.build("match"), guard=InTurns(1, 30, 40))
    [asked] = run(engine, SamplingParams(), [PROMPTS[0]])
    assert asked.stats.rested == 30
    assert asked.stats.drafted_tokens > 0


# Passes that a rest saves


def test_a_draft_model_that_rests_makes_no_pass_and_catches_up_in_one() -> None:
    drafter = ModelDrafter(weights(), tree=build_policy("chain:3"))
    engine = Engine(target(1), drafter, VERIFIERS.build("match"), guard=InTurns(2, 9, 20))
    generation = engine.submit(Request(PROMPTS[0], SamplingParams(), 24))
    for _ in range(2):
        engine.step()
    before = drafter.passes
    own, rows = drafter.weights.model.forward, []

    def forward(*given: Any, **about: Any) -> Any:
        rows.append(about["input_ids"].shape[1])
        return own(*given, **about)

    drafter.weights.model.forward = forward
    for _ in range(9):
        engine.step()
    assert drafter.passes == before
    assert rows == []
    new = len(generation.sequence.tokens) - len(drafter._following._texts[generation.sequence].cached)
    assert new >= 9
    engine.step()
    assert rows[1:] == [1, 1], "one pass for what is new and the first token, one for each of the others"
    assert 9 <= rows[0] <= new


@pytest.mark.parametrize(("tree", "verify"), [("chain:4", "block"), ("rsd-c:2,1", "rrs"), ("paths:2x3", "cascade")])
def test_the_distributions_of_a_draft_model_are_right_after_any_rests(tree: str, verify: str) -> None:
    drafter = Checked(weights(), tree=build_policy(tree))
    engine = Engine(target(), drafter, VERIFIERS.build(verify), guard=AtRandom(1))
    run(engine, SamplingParams(temperature=0.9), [(1, 2, 3, 4, 5), (6,), tuple(range(1, 24)), (7, 8)])
    assert drafter.seen > 40


@pytest.mark.parametrize("shape", ["chain:4", "topk:12,depth=4,width=3", "paths:2x3"])
@pytest.mark.parametrize("form", ["carry", "two layers"])
@torch.no_grad()
def test_a_head_predicts_as_in_training_after_any_rests(form: str, shape: str) -> None:
    model = model_of()
    target = TransformersTarget(model, slots=3, context=128, max_nodes=32)
    drafter = Watching(trained(target, form), tree=build_policy(shape))
    engine = Engine(target, drafter, VERIFIERS.build("match" if "paths" not in shape else "block"), guard=AtRandom(2))
    sampling = SamplingParams(temperature=0.7 if "paths" in shape else 0.0)
    for prompt in [(1, 2, 3), (5,), tuple(range(20))]:
        engine.submit(Request(prompt, sampling, max_new_tokens=20))
    while engine.busy:
        engine.step()
    assert len(drafter.seen) > 20
    assert_as_in_training(drafter, model, sampling.temperature or 1.0)


# Exactness


RULES = [name for name in VERIFIERS if VERIFIERS.build(name).lossless]


@pytest.mark.parametrize("rule", RULES)
def test_a_bare_root_is_a_step_of_plain_decoding_for_every_rule(rule: str) -> None:
    """Enumerated: every decision of the rule, on worlds of every kind, and beside trees that are drawn."""
    verifier: Verifier = VERIFIERS.build(rule)
    for sigma in SIMILARITIES.values():
        instance = Instance.random(3, 2, 2, sigma, [7])
        bare = Drafts(instance, [DraftTree.root(0)], torch.ones(1, dtype=torch.float64))
        assert emitted(verifier, bare) == pytest.approx((0.0, 1.0), abs=TOLERANCE)
        for kind, draw in DRAWS.items():
            if draw not in verifier.accepts:
                continue
            drawn = Drafts.of(kind, instance)
            mixed = Drafts(instance, [DraftTree.root(0), *drawn.trees], torch.cat([torch.ones(1), drawn.weights]) / 2)
            tv, efficiency = emitted(verifier, mixed)
            assert tv < TOLERANCE
            assert efficiency > 1


class AfterLuck(AtRandom):
    """Rests after every step that kept something, as one that knows the past and means no good might."""

    def __init__(self) -> None:
        super().__init__()
        self.lucky = False

    def choose(self, batch: int) -> int:
        return PLAIN if self.lucky else 0

    def record(self, batch: int, source: int, rows: int, tokens: float, seconds: float, *, caught_up: bool) -> None:
        super().record(batch, source, rows, tokens, seconds, caught_up=caught_up)
        self.lucky = tokens > 1.5


@pytest.mark.parametrize(
    ("guard", "slots"), [(lambda: AtRandom(0), 40), (AfterLuck, 4)], ids=["at random", "after luck"]
)
@pytest.mark.parametrize(("name", "spec"), PAIRS, ids=[f"{name} on {spec}" for name, spec in PAIRS])
def test_short_texts_have_the_law_of_the_target_whatever_steps_rest(
    name: str, spec: str, guard: Callable[[], AtRandom], slots: int
) -> None:
    resting = guard()
    drafter = build_drafter("disturbed:1", spec)
    engine = Engine(Remembered(3, slots=slots), drafter, VERIFIERS.build(name), guard=resting)
    assert engine._guarded is not None
    engine._guarded._same_text = True  # texts that were given a seed rest too: they need not be the same again
    asked = [engine.submit(request) for request in sampled(range(TEXTS))]
    while engine.busy:
        engine.step()
    assert_law(Counter(tuple(one.token_ids) for one in asked), target_law())
    assert 5 < sum(rested for rested, _ in resting.recorded) < len(resting.recorded) - 5


def test_a_fork_is_never_let_rest_because_it_draws_the_token_after_its_root() -> None:
    drafter = build_drafter("disturbed", "fork-lossy:2x3")
    engine = Engine(ToyTarget(VOCABULARY), drafter, VERIFIERS.build("lossy-longest"), guard=AtRandom())
    assert engine.guard is None
    assert drafter.draw is Draw.FORK
    assert not may_rest(drafter)


def test_a_text_that_was_given_a_seed_is_the_same_whatever_steps_take() -> None:
    """Of rules other than match, whose draws depend on what was drafted."""
    found = []
    for seed, given in ((1, 4), (2, 4), (3, None), (4, None)):
        guard = AtRandom(seed)
        engine = Engine(
            ToyTarget(VOCABULARY), build_drafter("disturbed", "paths:2x3"), VERIFIERS.build("block"), guard=guard
        )
        [asked] = run(engine, SamplingParams(temperature=1.0, seed=given), [PROMPTS[0]])
        found.append(asked.token_ids)
        assert bool(asked.stats.rested) is (given is None)
    assert found[0] == found[1]


# Both steps

TARGETS: dict[type[Step], Callable[..., ToyTarget]] = {Step: ToyTarget, PipelinedStep: PipelinedToy}
DRAFTERS: dict[str, Callable[[], Drafter]] = {
    "no skill": lambda: RandomDrafter(VOCABULARY),
    "known ahead": lambda: PipelinedDouble(VOCABULARY),
    "learning": lambda: build_drafter("recycle"),
    "drawn": lambda: build_drafter("disturbed", "paths:2x3"),
}


@pytest.mark.parametrize("step", TARGETS, ids=lambda step: step.__name__)
@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("padded", [False, True], ids=["exact sizes", "buckets"])
def test_both_steps_write_like_plain_decoding(step: type[Step], drafter: str, padded: bool) -> None:
    sampling = SamplingParams(temperature=0.0 if drafter == "drawn" else 0.9, seed=7)
    rule = VERIFIERS.build("block" if drafter == "drawn" else "match")
    plain = run(Engine(ToyTarget(VOCABULARY), build_drafter("none"), VERIFIERS.build("match")), sampling)
    for seed in range(3):
        guard = AtRandom(seed)
        engine = Engine(TARGETS[step](VOCABULARY, padded=padded), DRAFTERS[drafter](), rule, guard=guard)
        assert type(engine._step) is step
        assert texts(run(engine, sampling)) == texts(plain)
        assert 5 < sum(rested for rested, _ in guard.recorded) < len(guard.recorded)


@pytest.mark.parametrize("drafter", [lambda: PipelinedDouble(VOCABULARY), lambda: build_drafter("ngram")])
def test_plain_steps_of_the_pipelined_step_are_launched_ahead(drafter: Callable[[], Drafter]) -> None:
    target = PipelinedToy(VOCABULARY)
    engine = Engine(target, drafter(), VERIFIERS.build("match"), guard=AtRandom(share=1.0))
    [asked] = run(engine, SamplingParams(), [PROMPTS[0]])
    assert asked.stats.rested == asked.stats.steps == LENGTH
    assert target.used >= LENGTH - 2


def test_a_rest_is_not_padded_like_a_drafted_step() -> None:
    class Padded(RandomDrafter):
        @property
        def needs(self) -> Any:
            from branchwise.backends.base import Needs
            from branchwise.core.batch import PadShape

            return Needs(pad_shape=PadShape(nodes=8))

    seen: list[tuple[bool, int]] = []

    class Counting(AtRandom):
        def record(self, batch: int, source: int, rows: int, *given: Any, **about: Any) -> None:
            seen.append((source == PLAIN, rows))

    engine = Engine(PipelinedToy(VOCABULARY), Padded(VOCABULARY), VERIFIERS.build("match"), guard=Counting(2))
    run(engine, SamplingParams(), [PROMPTS[0]])
    assert {rows for rested, rows in seen if rested} == {1}
    assert min(rows for rested, rows in seen if not rested) >= 8


# What the guard is told


def test_a_drafter_catches_up_with_texts_that_are_new_or_that_it_missed() -> None:
    guard = InTurns(2, 2, 2, 3, 100)
    drafter = build_drafter("disturbed", "chain:2")
    engine = Engine(ToyTarget(VOCABULARY), drafter, VERIFIERS.build("match"), guard=guard)
    generation = engine.submit(Request(PROMPTS[0], SamplingParams(), 40))
    for _ in range(10):
        engine.step()
    caught = [caught for rested, caught in guard.recorded if not rested]
    assert caught == [True, False, True, False, True]
    engine.cancel(generation)


def test_time_between_steps_counts_unless_a_prompt_was_written_then(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    spent: list[float] = []

    class Told(AtRandom):
        def choose(self, batch: int) -> int:
            now[0] += 1.0
            return 0

        def record(self, batch: int, source: int, rows: int, tokens: float, seconds: float, *, caught_up: bool) -> None:
            spent.append(seconds)

    engine = Engine(ToyTarget(VOCABULARY, slots=2), build_drafter("ngram"), VERIFIERS.build("match"), guard=Told())
    engine.submit(Request(PROMPTS[0], SamplingParams(), 40))
    for pause in (5.0, 0.5, 0.25):
        now[0] += pause
        engine.step()
    now[0] += 100.0
    engine.submit(Request(PROMPTS[1], SamplingParams(), 40))
    engine.step()
    engine.step()
    assert spent == [1.0, 1.5, 1.25, 1.0, 1.0]


def test_without_a_guard_every_step_drafts_and_by_default_there_is_none() -> None:
    engine = Engine(ToyTarget(VOCABULARY), RandomDrafter(VOCABULARY), VERIFIERS.build("match"))
    assert engine.guard is None
    assert all(one.stats.rested == 0 for one in run(engine, SamplingParams()))


def test_a_drafter_that_is_slow_is_left_out_and_the_answer_says_so() -> None:
    from time import sleep

    from branchwise.engine.explain import explain

    class Slow(RandomDrafter):
        def draft(self, sequences: Sequence[SequenceState], budgets: Sequence[Budget]) -> list[DraftTree]:
            if max(budget.depth for budget in budgets) > 0:
                sleep(0.02)
            return super().draft(sequences, budgets)

    engine = Engine(ToyTarget(VOCABULARY), Slow(VOCABULARY), VERIFIERS.build("match"), guard=True)
    [asked] = run(engine, SamplingParams(), [PROMPTS[0]])
    assert asked.stats.rested > 0.7 * asked.stats.steps
    found = explain(asked.stats, engine.target.info, "slow")
    assert found.drafting_speed is not None
    assert found.drafting_speed < 0.5
    assert f"In {asked.stats.rested} of {asked.stats.steps} steps nothing was drafted" in str(found)
    assert found.as_dict()["rested"] == asked.stats.rested


@pytest.mark.parametrize("context", [8, 256])
def test_a_warm_up_makes_both_kinds_of_steps_and_leaves_no_verdict(context: int) -> None:
    engine = Engine(
        PipelinedToy(64, context=context), build_drafter("recycle", "chain:2"), VERIFIERS.build("match"), guard=True
    )
    made: list[bool] = []
    assert engine.guard is not None
    own = engine.guard.record

    def record(batch: int, source: int, *given: Any, caught_up: bool) -> None:
        made.append(source == PLAIN)
        own(batch, source, *given, caught_up=caught_up)

    engine.guard.record = record  # type: ignore[method-assign]
    warm_up(engine, progress=False)
    assert 15 <= sum(made) < len(made)
    assert engine.guard.speed is None
