"""Several sources of drafts: whoever drafts a step, texts stay the same, and each goes on as if it had never paused."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast
from typer.testing import CliRunner

from branchwise.backends.base import Needs, Prefill, TargetInfo
from branchwise.backends.toy import ToyTarget
from branchwise.backends.transformers.target import TransformersTarget
from branchwise.cli import app
from branchwise.control.guard import PLAIN, Guard
from branchwise.core.sampling import SamplingParams
from branchwise.core.sequence import SequenceState
from branchwise.core.tree import DraftTree
from branchwise.draft import build_drafter, build_policy
from branchwise.draft.auto import AutoDrafter
from branchwise.draft.base import Budget, Drafter
from branchwise.draft.head import drafter as head_drafter
from branchwise.draft.head.drafter import HeadDrafter
from branchwise.draft.model.draft_model import Weights
from branchwise.draft.model.drafter import ModelDrafter
from branchwise.engine import Engine, Generation, Request
from branchwise.engine.warmup import warm_up
from branchwise.errors import ModelError
from branchwise.testing import RandomDrafter
from branchwise.verify import VERIFIERS, Verdict
from tests.doubles import PipelinedDouble, PipelinedToy
from tests.heads import let_drafting_pay
from tests.test_audit_model import tiny_model, tokenizer
from tests.test_head_drafter import Watching, assert_as_in_training, model_of, trained
from tests.test_model_drafter import Checked

PROMPTS = [(1, 2, 3, 1, 2, 3, 1), (5,), tuple(range(20)), (7, 8), (9, 3, 9, 3), (4, 4, 4)]
LENGTHS = (30, 24, 9, 30, 17, 25)


class Several(Drafter):
    """Sources for which a guard chooses."""

    name = "several"

    def __init__(self, *sources: Drafter) -> None:
        self.sources = sources
        self.draw = sources[0].draw

    @property
    def needs(self) -> Needs:
        return Needs.joined(source.needs for source in self.sources)

    def bind(self, target: TargetInfo) -> None:
        for source in self.sources:
            source.bind(target)

    def draft(self, sequences: Sequence[SequenceState], budgets: Sequence[Budget]) -> list[DraftTree]:
        raise AssertionError("one of its sources drafts")


class Bound(Several):
    """Those that were bound before, as trees of one draft model are."""

    def bind(self, target: TargetInfo) -> None:
        pass


class Anyhow(Guard):
    """Lets any source draft a step, or none."""

    def __init__(self, sources: Sequence[str], seed: int = 0) -> None:
        super().__init__(None, sources)
        self.rng = random.Random(seed)
        self.recorded: list[tuple[int, bool]] = []
        """of each step: its source, and whether that caught up in it"""

    def choose(self, batch: int) -> int:
        return self.rng.choice([PLAIN, *range(len(self.sources))])

    def record(self, batch: int, source: int, rows: int, tokens: float, seconds: float, *, caught_up: bool) -> None:
        assert seconds > 0
        assert tokens == 1 or source != PLAIN
        self.recorded.append((source, caught_up))


class InTurn(Anyhow):
    """As it is told, and then always the first."""

    def __init__(self, sources: Sequence[str], turns: Sequence[int]) -> None:
        super().__init__(sources)
        self.turns = list(turns)

    def choose(self, batch: int) -> int:
        return self.turns.pop(0) if self.turns else 0


def run(engine: Engine, sampling: SamplingParams, *, cancels: bool = False) -> list[Generation]:
    """More texts than there are slots, which end at different times; one of them is cancelled."""
    asked = [engine.submit(Request(prompt, sampling, most)) for prompt, most in zip(PROMPTS, LENGTHS, strict=True)]
    steps = 0
    while engine.busy:
        try:
            engine.step()
        except KeyboardInterrupt:
            continue
        steps += 1
        if cancels and steps == 5:
            engine.cancel(asked[1])
    return asked


def texts(asked: Sequence[Generation]) -> list[list[int]]:
    return [one.token_ids for one in asked]


def plain_texts(target: TransformersTarget, sampling: SamplingParams) -> list[list[int]]:
    return texts(run(Engine(target, build_drafter("none"), VERIFIERS.build("match")), sampling))


def small_target(slots: int = 3) -> TransformersTarget:
    return TransformersTarget(model_of(), slots=slots, context=128, max_nodes=32)


def small_model() -> Weights:
    return Weights("small", model_of(1, num_hidden_layers=1), None)


def auto_of(target: TransformersTarget) -> AutoDrafter:
    """With a head and a draft model that were not read from files."""
    drafter = AutoDrafter()
    drafter._head = HeadDrafter(trained(target, "carry"))
    drafter._model = ModelDrafter(small_model(), tree=build_policy("topk:1"))
    return drafter


# Texts


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("seed", range(3))
def test_texts_are_those_of_plain_decoding_whoever_drafts(
    seed: int, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    let_drafting_pay(monkeypatch)
    target, sampling = small_target(), SamplingParams(temperature=temperature, seed=21)
    plain = plain_texts(target, sampling)
    guard = Anyhow(["head", "memories", "model"], seed)
    engine = Engine(target, auto_of(target), VERIFIERS.build("match"), prefill_tokens=3, guard=guard)
    asked = run(engine, sampling, cancels=True)
    found = texts(asked)
    assert found[1] == plain[1][: len(found[1])]
    assert found[2:] == plain[2:]
    assert found[0] == plain[0]
    assert {source for source, _ in guard.recorded} == {PLAIN, 0, 1, 2}
    drafted = {name for one in asked for name in one.stats.drafted_by_source}
    assert drafted >= {"head", "model"}
    assert drafted & {"recycle", "stand", "suffix"}, "the members of the fusion are named"
    assert sum(one.stats.accepted_tokens for one in asked) > 0


def test_an_auto_drafter_of_its_own_accord_writes_like_plain_decoding() -> None:
    """With the guard that users get."""
    target = small_target()
    for sampling in (SamplingParams(), SamplingParams(temperature=0.9, seed=3)):
        plain = plain_texts(target, sampling)
        engine = Engine(target, auto_of(target), VERIFIERS.build("match"))
        assert engine.guard is not None
        assert engine.guard.sources == ("head", "memories", "model")
        asked = run(engine, sampling)
        assert texts(asked) == plain
        assert any("times plain decoding" in reason for reason in engine.reasons(3))
        assert sum(one.stats.drafted_tokens for one in asked) > 0


class Interrupting(RandomDrafter):
    """Is interrupted now and then when it learns, or when it follows."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__(vocabulary)
        self.interrupts = random.Random(1)

    def update(self, sequences: Sequence[SequenceState], scored: Any, verdicts: Sequence[Verdict]) -> None:
        if self.interrupts.random() < 0.3:
            raise KeyboardInterrupt

    follow = update


@torch.no_grad()
def test_steps_that_were_interrupted_are_made_again() -> None:
    target, sampling = small_target(), SamplingParams()
    plain = plain_texts(target, sampling)
    head = Watching(trained(target, "carry"), tree=build_policy("topk:6,depth=3,width=2"))
    sources = head, ModelDrafter(small_model(), tree=build_policy("topk:4,depth=2,width=2")), Interrupting(40)
    guard = Anyhow(["head", "model", "interrupting"])
    assert texts(run(Engine(target, Several(*sources), VERIFIERS.build("match"), guard=guard), sampling)) == plain
    assert len(head.seen) > 20
    assert_as_in_training(head, target.model)  # type: ignore[arg-type]


# Each as if it were alone


@pytest.mark.parametrize("form", ["carry", "two layers", "eagle"])
@pytest.mark.parametrize("most", [128, 6], ids=["read when asked", "read along"])
@torch.no_grad()
def test_a_head_predicts_as_in_training_whoever_drafted_before(
    form: str, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(head_drafter, "MOST_UNREAD", most)
    target, sampling = small_target(), SamplingParams()
    head = Watching(trained(target, form), tree=build_policy("topk:6,depth=3,width=2"))
    drafter = Several(head, build_drafter("recycle", "topk:8"))
    engine = Engine(target, drafter, VERIFIERS.build("match"), guard=Anyhow(["head", "recycle"], 2))
    asked = [engine.submit(Request(prompt, sampling, 20)) for prompt in PROMPTS]
    longest = 0
    while engine.busy:
        engine.step()
        longest = max(longest, *(len(text.unread) for text in head._texts.values()), 0)
    assert all(one.finished for one in asked)
    assert (longest > 12) == (most > 6), "what was not read is kept for long"
    assert len(head.seen) > 20
    assert_as_in_training(head, target.model)  # type: ignore[arg-type]


def test_the_distributions_of_a_draft_model_are_right_whoever_drafted_before() -> None:
    target = small_target()
    model = Checked(small_model(), tree=build_policy("topk:6,depth=3,width=2"))
    drafter = Several(build_drafter("recycle", "topk:8"), model)
    run(Engine(target, drafter, VERIFIERS.build("match"), guard=Anyhow(["recycle", "model"])), SamplingParams())
    assert model.seen > 40


def test_trees_of_one_draft_model_share_its_cache() -> None:
    target, sampling = small_target(), SamplingParams()
    plain = plain_texts(target, sampling)
    model = Checked(small_model(), tree=build_policy("topk:1"))
    model.bind(target.info)
    flat, deep = (model.with_tree(build_policy(tree)) for tree in ("topk:2,depth=1,width=2", "topk:4,depth=4,width=1"))
    assert flat._following is deep._following

    engine = Engine(target, Bound(flat, deep), VERIFIERS.build("match"), guard=Anyhow(["flat", "deep"]))
    assert texts(run(engine, sampling)) == plain
    assert flat.seen > 10  # type: ignore[attr-defined]
    assert deep.seen > 10  # type: ignore[attr-defined]
    assert not model._following._texts, "texts that have ended are not forgotten"


# Texts that begin alike


def converse(engine: Engine) -> list[Generation]:
    """Two turns; then texts that begin like the second one while it runs, and when it has ended."""
    first = engine.submit(Request(tuple(range(30)), max_new_tokens=9))
    while engine.busy:
        engine.step()
    turn = (*range(30), *first.token_ids, 7, 8)
    asked = [engine.submit(Request(turn, max_new_tokens=14))]
    for _ in range(3):
        engine.step()
    asked += [engine.submit(Request((*turn[:cut], 5, 5), max_new_tokens=12)) for cut in (40, 25)]
    while engine.busy:
        engine.step()
    asked.append(engine.submit(Request((*turn, *asked[0].token_ids, 1), max_new_tokens=12)))
    while engine.busy:
        engine.step()
    return [first, *asked]


@pytest.mark.parametrize("seed", range(3))
@torch.no_grad()
def test_every_source_has_the_rows_that_a_text_begins_with(seed: int) -> None:
    """Two trees of one draft model inherit, retire and drop the rows of its cache once."""
    target = small_target()
    plain = converse(Engine(target, build_drafter("none"), VERIFIERS.build("match")))
    head = Watching(trained(target, "carry"), tree=build_policy("topk:6,depth=3,width=2"))
    model = Checked(small_model(), tree=build_policy("topk:4,depth=2,width=2"))
    sources = head, build_drafter("recycle", "topk:8"), model
    for source in sources:
        source.bind(target.info)
    drafter = Bound(*sources, model.with_tree(build_policy("topk:3,depth=3,width=1")))
    guard = Anyhow(["head", "recycle", "model", "deep"], seed)
    engine = Engine(target, drafter, VERIFIERS.build("match"), guard=guard, prefix_cache=True)
    asked = converse(engine)
    assert texts(asked) == texts(plain)
    assert [one.stats.reused_tokens > 0 for one in asked] == [False, True, True, True, True]
    assert len(head.seen) > 8
    assert_as_in_training(head, target.model)  # type: ignore[arg-type]
    assert model.seen > 8
    engine.drop_prefixes()
    assert target.free_slots == target.slots
    assert not head._texts
    assert not head._cache.slot
    assert not model._following._texts


def test_an_auto_drafter_begins_texts_with_cached_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    let_drafting_pay(monkeypatch)
    target = small_target()
    plain = converse(Engine(target, build_drafter("none"), VERIFIERS.build("match")))
    drafter = auto_of(target)
    engine = Engine(target, drafter, VERIFIERS.build("match"), prefix_cache=True)
    asked = converse(engine)
    assert texts(asked) == texts(plain)
    assert [one.stats.reused_tokens > 0 for one in asked] == [False, True, True, True, True]
    engine.drop_prefixes()
    head, model = drafter._head, drafter._model
    assert head is not None
    assert model is not None
    assert not head._texts
    assert not model._following._texts


# On a device


def test_trees_that_are_known_ahead_are_those_of_the_source_that_goes_on() -> None:
    """Another one is asked for none, so its pass is not enqueued ahead, and nothing is wrong."""
    first, second = PipelinedDouble(60), PipelinedDouble(60, length=1)
    first.name = "first"
    turns = [0, 0, 0, 1, 1, 1, 0, 0, PLAIN, PLAIN, PLAIN, 1, 0, 0]
    target = PipelinedToy(60)
    engine = Engine(target, Several(first, second), VERIFIERS.build("match"), guard=InTurn(["a", "b"], turns))
    generation = engine.submit(Request((1, 2), max_new_tokens=40))
    used = []
    for _ in turns:
        before = target.used
        engine.step()
        used.append(target.used > before)
    changes = zip([2, *turns], turns, strict=False)
    assert used == [now in (before, PLAIN) for before, now in changes], "a change waits once, if not for plain decoding"
    assert (first.updates, second.updates) == (7, 4)
    while engine.busy:
        engine.step()
    plain = Engine(ToyTarget(60), build_drafter("none"), VERIFIERS.build("match"))
    alone = plain.submit(generation.request)
    while plain.busy:
        plain.step()
    assert generation.token_ids == alone.token_ids


# What the guard is told, and what it says


def test_a_source_catches_up_after_steps_of_another_unless_it_only_looks_up() -> None:
    model = build_drafter("disturbed", "topk:2,depth=1,width=2")
    guard = InTurn(["model", "table"], [0, 0, 1, 1, 0, PLAIN, 0, 0, 1])
    engine = Engine(
        ToyTarget(6), Several(model, build_drafter("recycle", "topk:4")), VERIFIERS.build("match"), guard=guard
    )
    assert model.cost is not None
    engine.submit(Request((1, 2, 3), max_new_tokens=40))
    for _ in range(9):
        engine.step()
    assert [caught for source, caught in guard.recorded if source == 0] == [True, False, True, True, False]
    assert not any(caught for source, caught in guard.recorded if source == 1)


def test_only_sources_that_draft_ask_for_the_logits_of_prompts() -> None:
    """A table that stands aside would learn from them at the expense of what drafts."""
    asked: list[int] = []

    class Seen(ToyTarget):
        def prefill(self, chunks: Any) -> list[Prefill]:
            asked.extend(chunk.keep for chunk in chunks if chunk.tokens)
            return super().prefill(chunks)

    drafter = Several(build_drafter("ngram"), build_drafter("recycle", "topk:4"))
    engine = Engine(Seen(6), drafter, VERIFIERS.build("match"))
    guard = engine.guard
    assert guard is not None
    for drafting in ([0, 1], [0], [1], []):
        guard.drafting = lambda batch, drafting=drafting: drafting  # type: ignore[method-assign, misc]
        engine.submit(Request((1, 2, 3), max_new_tokens=2))
        while engine.busy:
            engine.step()
    assert asked == [2, 0, 2, 0]


def test_a_text_that_was_given_a_seed_does_not_depend_on_what_steps_take() -> None:
    """Of rules other than match, whose draws depend on what was drafted: its steps are all of the first source."""
    found = []
    for given, seed in ((4, 0), (4, 1), (None, 2)):
        drafter = Several(*(build_drafter(f"disturbed:{sigma}", "paths:2x3") for sigma in (1, 2)))
        guard = Anyhow(["one", "other"], seed)
        engine = Engine(ToyTarget(6), drafter, VERIFIERS.build("block"), guard=guard)
        sampling = SamplingParams(temperature=1.0, seed=given)
        generation = engine.submit(Request((1, 2, 3), sampling, 40))
        while engine.busy:
            engine.step()
        assert {source for source, _ in guard.recorded} == ({0} if given else {PLAIN, 0, 1})
        found.append(generation.token_ids)
    assert found[0] == found[1]


def test_what_is_chosen_is_said_and_the_names_of_sources_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    guard = InTurn(["random", "recycle"], [0, 1] * 10)
    drafter = Several(RandomDrafter(6), build_drafter("recycle", "topk:4"))
    engine = Engine(ToyTarget(6), drafter, VERIFIERS.build("match"), guard=guard)
    generation = engine.submit(Request((1, 2, 3), max_new_tokens=20))
    while engine.busy:
        engine.step()
    stats = generation.stats
    assert set(stats.drafted_by_source) == {"random", "recycle"}
    assert {piece.source for piece in generation.pieces} <= {"random", "recycle", ""}
    assert stats.drafting_speed is None, "there is no choice to draft all the same"
    monkeypatch.setattr(guard, "reasons", lambda batch: [f"For {batch} text random drafts."])
    assert engine.reasons(1) == ["For 1 text random drafts."]


@pytest.mark.parametrize("sources", [2, 3])
def test_a_warm_up_lets_every_source_draft_and_leaves_no_verdict(sources: int) -> None:
    made: list[Callable[[], Drafter]] = [
        lambda: build_drafter("recycle", "topk:4"),
        lambda: PipelinedDouble(64),
        lambda: RandomDrafter(64, nodes=3),
    ]
    engine = Engine(PipelinedToy(64, slots=2), Several(*(make() for make in made[:sources])), VERIFIERS.build("match"))
    assert engine.guard is not None
    seen: dict[int, int] = {}
    own = engine.guard.record

    def record(batch: int, source: int, *given: Any, caught_up: bool) -> None:
        seen[source] = seen.get(source, 0) + 1
        own(batch, source, *given, caught_up=caught_up)

    engine.guard.record = record  # type: ignore[method-assign]
    warm_up(engine, progress=False)
    assert all(seen[source] > 80 for source in range(sources)), "in batches of one and of two"
    assert seen[PLAIN] >= 15
    assert engine.guard.speed is None
    assert engine.guard.reasons(1) == []


# Commands


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """A target and a draft model on disk."""
    found = []
    for name, model in (("target", tiny_model()), ("draft", tiny_model())):
        folder = tmp_path_factory.mktemp(name)
        model.save_pretrained(folder)
        tokenizer().save_pretrained(folder)
        found.append(str(folder))
    return found[0], found[1]


def answer(*words: str) -> dict[str, Any]:
    done = CliRunner().invoke(app, ["generate", "a b c d a b c", "--raw", "--json", "-n", "40", *words])
    assert done.exit_code == 0, (done.output, done.exception)
    return dict(json.loads(done.stdout))


@pytest.mark.filterwarnings("ignore::branchwise.errors.LargeDraftWarning")
@pytest.mark.parametrize("words", [(), ("--method", "default")], ids=["no method", "default"])
def test_a_command_that_names_a_draft_model_chooses_from_it_too(
    words: tuple[str, ...], folders: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Guard] = []

    class First(Anyhow):
        def __init__(self, target: TargetInfo, sources: Sequence[str], learning: Sequence[bool]) -> None:
            super().__init__(sources)
            made.append(self)

        def choose(self, batch: int) -> int:
            return 1

    monkeypatch.setattr("branchwise.engine.engine.Guard", First)
    target, draft = folders
    common = ("--model", target, "--dtype", "float32", "--temperature", "0.8", "--seed", "3")
    drafted = answer(*common, "--draft-model", draft, *words)
    assert [guard.sources for guard in made] == [("memories", "model")]
    assert drafted["stats"]["accepted_by_source"].keys() == {"model"}
    assert drafted["token_ids"] == answer(*common, "--method", "plain")["token_ids"]


def test_a_draft_model_that_shares_no_tokens_is_refused_by_a_sentence(folders: tuple[str, str], tmp_path: Path) -> None:
    other = tokenizer()
    words = Tokenizer(WordLevel({f"word{number}": number for number in range(len(other))}, unk_token="word0"))
    tiny_model().save_pretrained(tmp_path)
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="word2").save_pretrained(tmp_path)
    done = CliRunner().invoke(
        app, ["generate", "a b", "--model", folders[0], "--dtype", "float32", "--draft-model", str(tmp_path)]
    )
    assert isinstance(done.exception, ModelError)
    assert str(tmp_path) in str(done.exception)
