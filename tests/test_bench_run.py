"""The contest: who writes when, what is recorded, and that a run which was killed anywhere goes on where it was."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from branchwise.bench.contest import Answer, Asked, Ours
from branchwise.bench.prompts import Item
from branchwise.bench.records import Ledger, Record, read
from branchwise.bench.run import Contest, Play, Rules, digest, fitting, plan
from branchwise.draft.base import Budget
from branchwise.engine import Engine
from branchwise.errors import BranchwiseError, UsageError
from branchwise.methods import PLAIN, find_method
from branchwise.testing import ToyTarget
from branchwise.verify import VERIFIERS
from tests.doubles import PipelinedToy

END = 7


class Model:
    """What `Contest` asks of a model: the toy target's logits, in a plain pass."""

    device = torch.device("cpu")
    dtype = torch.float32

    def __init__(self, target: ToyTarget) -> None:
        self.target = target

    def __call__(self, input_ids: torch.Tensor) -> Any:
        return SimpleNamespace(logits=self.target.logits(input_ids[0].tolist())[None, None])


@dataclass
class ToyLLM:
    """A model of eight tokens that reads one digit as one token."""

    target: ToyTarget = field(default_factory=lambda: ToyTarget(vocabulary=8, context=128))
    stop_tokens: frozenset[int] = frozenset({END})
    template: str | None = "a template"

    def __post_init__(self) -> None:
        self.engine = Engine(self.target, *PLAIN.build())
        self.model = Model(self.target)
        self.tokenizer = SimpleNamespace(chat_template=self.template)

    def encode(self, prompt: Any, *, raw: bool = False) -> list[int]:
        assert isinstance(prompt, str) or self.template, "a conversation without a template"
        texts = [prompt] if isinstance(prompt, str) else [message["content"] for message in prompt]
        return [int(digit) % 7 for text in texts for digit in text + ("" if raw else "0")]

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(map(str, ids))


class Scribe:
    """A contestant that says what it was asked, and notes when."""

    comparable = False
    learns = False

    def __init__(self, name: str, notes: list[Any], kind: str = "peer") -> None:
        self.name, self.kind, self.notes, self.forgotten = name, kind, notes, 0

    def write(self, prompts: Sequence[Sequence[int]], asked: Asked) -> list[Answer]:
        self.notes.append((self.name, [list(prompt) for prompt in prompts], asked))
        return [Answer(ids=[1, 2, 3], finish_reason="length", seconds=0.5) for _ in prompts]

    def forget(self) -> None:
        self.forgotten += 1

    def warm_up(self, prompts: Sequence[Sequence[int]], asked: Asked) -> None:
        self.write(prompts, asked)
        self.forget()


def items(count: int = 3, turns: int = 1) -> list[Item]:
    return [
        Item(
            f"i{number}", "toy", "even" if number % 2 == 0 else "odd", tuple(f"{number}{turn}" for turn in range(turns))
        )
        for number in range(count)
    ]


def ours(llm: Any, *specs: str) -> list[Ours]:
    return [Ours(llm, find_method(spec)) for spec in specs]


def contest(path: Path, llm: Any, contestants: Sequence[Any], asked: Sequence[Item], **rules: Any) -> list[Record]:
    with Ledger(path) as ledger:
        Contest(llm, contestants, asked, Rules(**{"max_new_tokens": 6, **rules}), ledger, {"model": "toy"}).play()
        return ledger.records


# ---- order ---------------------------------------------------------------------------------------------------------


def names(plays: list[Play]) -> list[tuple[str, str, int]]:
    return [(play.contestant.name, play.items[0].id, play.round) for play in plays]


def test_interleaved_all_write_an_item_before_the_next_and_who_starts_moves_on() -> None:
    three = [Scribe(name, []) for name in "abc"]
    found = names(plan(three, items(2), Rules(max_new_tokens=1, rounds=2)))
    assert found == [
        ("a", "i0", 0), ("b", "i0", 0), ("c", "i0", 0),
        ("b", "i1", 0), ("c", "i1", 0), ("a", "i1", 0),
        ("b", "i0", 1), ("c", "i0", 1), ("a", "i0", 1),
        ("c", "i1", 1), ("a", "i1", 1), ("b", "i1", 1),
    ]  # fmt: skip


def test_sequential_a_contestant_does_everything_before_the_next() -> None:
    found = names(plan([Scribe("a", []), Scribe("b", [])], items(2), Rules(max_new_tokens=1, order="sequential")))
    assert found == [("a", "i0", 0), ("a", "i1", 0), ("b", "i0", 0), ("b", "i1", 0)]


def test_a_batch_writes_together_and_its_records_share_a_group(tmp_path: Path) -> None:
    notes: list[Any] = []
    records = contest(tmp_path / "r", ToyLLM(), [Scribe("a", notes)], items(3), batch=2)
    assert [len(prompts) for _, prompts, _ in notes[1:]] == [2, 1]  # the first was the warm-up
    assert [record.group for record in records] == ["a/0/0/0", "a/0/0/0", "a/0/1/0"]


# ---- what is asked -------------------------------------------------------------------------------------------------


def test_every_contestant_gets_the_same_ids_and_seeds(tmp_path: Path) -> None:
    notes: list[Any] = []
    contest(tmp_path / "r", ToyLLM(), [Scribe("a", notes), Scribe("b", notes)], items(3), temperature=0.7, rounds=2)
    by_name = {name: sorted((p, asked.seeds) for who, p, asked in notes[2:] if who == name) for name in "ab"}
    assert by_name["a"] == by_name["b"]
    seeds = {seed for _, _, asked in notes[2:] for seed in asked.seeds}
    assert len(seeds) == 6  # one for each item and round


def test_a_dialogue_goes_on_with_the_contestants_own_answer(tmp_path: Path) -> None:
    notes: list[Any] = []
    contest(tmp_path / "r", ToyLLM(), [Scribe("a", notes)], items(1, turns=2))
    assert [prompts for _, prompts, _ in notes[1:]] == [[[0, 0, 0]], [[0, 0, 0, 1, 2, 3, 0, 0, 1, 0]]]


def test_a_raw_item_is_continued_as_it_is(tmp_path: Path) -> None:
    notes: list[Any] = []
    contest(tmp_path / "r", ToyLLM(), [Scribe("a", notes)], [Item("x", "s", "c", ("123",), raw=True)])
    assert notes[-1][1] == [[1, 2, 3]]


def test_full_length_forbids_the_ends_and_otherwise_they_end_the_answer(tmp_path: Path) -> None:
    notes: list[Any] = []
    contest(tmp_path / "r", ToyLLM(), [Scribe("a", notes)], items(1), full_length=True)
    contest(tmp_path / "q", ToyLLM(), [Scribe("a", notes)], items(1))
    full, ended = notes[1][2], notes[3][2]
    assert (full.stop_tokens, full.forbidden) == (frozenset(), {END})
    assert (ended.stop_tokens, ended.forbidden) == ({END}, frozenset())
    records = contest(tmp_path / "p", llm := ToyLLM(), ours(llm, "plain", "ngram"), items(3), full_length=True)
    assert {record.tokens for record in records} == {6}
    assert not any(END in record.ids for record in records)


def test_cold_forgets_before_every_item_and_warm_only_at_the_start(tmp_path: Path) -> None:
    cold, warm = Scribe("a", []), Scribe("a", [])
    contest(tmp_path / "c", ToyLLM(), [cold], items(3))
    contest(tmp_path / "w", ToyLLM(), [warm], items(3), state="warm")
    assert (cold.forgotten, warm.forgotten) == (4, 1)


def test_items_that_do_not_fit_the_context_are_left_out() -> None:
    llm = ToyLLM()
    long = Item("long", "s", "c", ("1" * 60, "2" * 60))
    assert fitting([*items(1), long], llm, max_new_tokens=6) == items(1)  # type: ignore[arg-type]


def test_a_model_without_a_chat_template_is_asked_single_questions(tmp_path: Path) -> None:
    llm = ToyLLM(template=None)
    kept = fitting([*items(2), *items(3, turns=2)[2:]], llm, max_new_tokens=6)  # type: ignore[arg-type]
    assert kept == items(2)
    assert len(contest(tmp_path / "r", llm, ours(llm, "plain", "ngram"), kept)) == 4


def test_the_digest_of_questions_tells_them_apart() -> None:
    assert digest(items(2)) == digest(items(2)) != digest(items(3))
    [one] = items(1)
    for other in (replace(one, turns=("9",)), replace(one, raw=True), replace(one, id="j")):
        assert digest([other]) != digest([one])


def test_a_warm_up_is_of_the_shape_and_with_the_options_of_what_is_timed(tmp_path: Path) -> None:
    notes: list[Any] = []
    contest(tmp_path / "r", ToyLLM(), [Scribe("a", notes)], items(3), batch=2, temperature=0.5, full_length=True)
    (_, first, asked), (_, second, _), *_ = notes
    assert first == second
    assert (asked.temperature, asked.forbidden, len(asked.seeds)) == (0.5, {END}, 2)


# ---- what is recorded ----------------------------------------------------------------------------------------------


def test_records_of_our_engine_hold_what_it_counted(tmp_path: Path) -> None:
    llm = ToyLLM()
    checked = [Item("x", "s", "c", ("1212121212",), check=lambda text: text == "nothing")]
    [plain, ngram] = contest(tmp_path / "r", llm, ours(llm, "plain", "ngram//match"), checked, max_new_tokens=20)
    assert (plain.kind, ngram.kind) == ("plain", "method")
    assert plain.steps == plain.tokens == plain.target_passes
    assert (plain.drafted, plain.accepted, plain.by_source) == (0, 0, {"target": plain.tokens})
    assert ngram.steps is not None
    assert ngram.accepted is not None
    assert ngram.tokens == ngram.steps + ngram.accepted - (ngram.finish_reason == "stop" and ngram.ids[-1] != END)
    assert sum(ngram.by_source.values()) == ngram.tokens
    assert set(ngram.phases) == {"prefill", "draft", "score", "verify", "commit"}
    assert sum(ngram.phases.values()) <= ngram.seconds
    assert ngram.correct is False
    assert ngram.run == {"model": "toy"}
    assert ngram.prompt_tokens == 11


def test_the_end_of_text_is_a_token_and_no_text(tmp_path: Path) -> None:
    class Ender(Scribe):
        def write(self, prompts: Sequence[Sequence[int]], asked: Asked) -> list[Answer]:
            return [Answer(ids=[1, END], finish_reason="stop", seconds=1.0) for _ in prompts]

    [record] = contest(tmp_path / "r", ToyLLM(), [Ender("a", [])], items(1))
    assert (record.tokens, record.text) == (2, "1")


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_methods_under_match_are_equal_to_plain_decoding(tmp_path: Path, temperature: float) -> None:
    llm = ToyLLM()
    contestants = ours(llm, "plain", "ngram", "disturbed/paths:2x2/match")
    records = contest(tmp_path / "r", llm, contestants, items(4, turns=2), temperature=temperature, rounds=2, batch=2)
    assert [record.equal for record in records if record.kind == "method"] == [True] * 32
    assert all(record.equal is None for record in records if record.kind == "plain")
    assert {record.key: record for record in read(tmp_path / "r")} == {record.key: record for record in records}


def test_sampled_answers_of_other_verifiers_are_not_compared(tmp_path: Path) -> None:
    llm = ToyLLM()
    records = contest(tmp_path / "r", llm, ours(llm, "plain", "disturbed/paths:2x2/cascade"), items(2), temperature=0.8)
    assert {record.equal for record in records} == {None}


def test_a_difference_is_shown_with_its_place_and_the_gap_of_the_logits(tmp_path: Path) -> None:
    llm = ToyLLM()

    class Flips(Ours):
        def write(self, prompts: Sequence[Sequence[int]], asked: Asked) -> list[Answer]:
            answers = super().write(prompts, asked)
            for answer in answers:
                answer.ids[2] = (answer.ids[2] + 1) % 7
            return answers

    flips = Flips(llm, find_method("ngram"))  # type: ignore[arg-type]
    [plain, wrong] = contest(tmp_path / "r", llm, [*ours(llm, "plain"), flips], items(1), full_length=True)
    assert wrong.equal is False
    assert wrong.difference is not None
    logits = llm.target.logits([0, 0, 0, *plain.ids[:2]])
    assert (wrong.difference.place, wrong.difference.expected) == (2, plain.ids[2])
    assert wrong.difference.token == (plain.ids[2] + 1) % 7
    assert wrong.difference.gap == pytest.approx(
        abs(float(logits[wrong.difference.token] - logits[plain.ids[2]])), abs=1e-6
    )


@pytest.mark.parametrize("spec", ["plain", "recycle/ranks:mcsd", "ngram/chain:8", "suffix/topk:8"])
def test_on_a_device_what_was_recorded_for_a_contestant_survives_what_it_learned(spec: str) -> None:
    """Caught here: a contestant that recorded all its passes again in its first race, and was timed meanwhile."""
    targets = [PipelinedToy(8, context=128), PipelinedToy(8, context=128), ToyTarget(8, context=128)]
    contestant, fresh, on_host = (ours(ToyLLM(target), spec)[0] for target in targets)
    engine = contestant._engine
    asked = Asked(40, forbidden=frozenset({END}), seeds=(3,))
    contestant.warm_up([[1, 2, 1, 2, 1]], asked)
    [answer], [first] = contestant.write([[1, 2, 1, 2, 1]], asked), fresh.write([[1, 2, 1, 2, 1]], asked)
    assert contestant._engine is engine
    assert (answer.ids, answer.steps, answer.drafted) == (first.ids, first.steps, first.drafted)
    engine = on_host._engine
    on_host.forget()
    assert on_host._engine is not engine


def test_answers_to_another_prompt_are_not_compared(tmp_path: Path) -> None:
    llm = ToyLLM()
    records = contest(tmp_path / "r", llm, [*ours(llm, "plain"), Scribe("a", [])], items(1, turns=2))
    found = {record.turn: record.equal for record in records if record.contestant == "a"}
    assert found == {0: False, 1: None}  # its own first answer made its second prompt another one


def test_budget_and_length_bound_every_tree(tmp_path: Path) -> None:
    llm = ToyLLM()
    repeating = [Item("x", "s", "c", ("12" * 10,))]
    for most, nodes, depth in ((Budget(3, 99), 2, 2), (Budget(99, 1), 1, 1)):
        bounded = Ours(llm, find_method("ngram/chain:8"), most)  # type: ignore[arg-type]
        [record] = contest(tmp_path / f"{nodes}", llm, [bounded], repeating, max_new_tokens=20, full_length=True)
        assert record.steps is not None
        assert record.drafted is not None
        assert 0 < record.drafted <= nodes * record.steps
        assert len(record.drafted_per_depth) == depth


# ---- going on ------------------------------------------------------------------------------------------------------


class Killed(BaseException):
    """What no handler expects."""


def dying_at(kill: int, torn: bool) -> Any:
    """A ledger's `_write` that dies at its write number `kill`, before it or in the middle of its line."""
    numbers, write = itertools.count(), Ledger._write

    def dying(self: Ledger, line: str) -> None:
        if next(numbers) < kill:
            write(self, line)
            return
        if torn:
            self._file.write(line.encode()[: len(line) // 2])
            self._file.flush()
        raise Killed

    return dying


@pytest.mark.parametrize("torn", [False, True], ids=["between lines", "inside a line"])
@pytest.mark.parametrize("every", [1, 5])
def test_a_run_killed_at_any_write_goes_on_without_loss_or_doubling(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, every: int, torn: bool
) -> None:
    def fresh(path: Path) -> list[Record]:
        llm = ToyLLM()
        return contest(path, llm, ours(llm, "plain", "ngram"), items(3, turns=2), rounds=2, batch=2)

    whole = {record.key: (record.ids, record.equal) for record in fresh(tmp_path / "whole")}
    writes = len((tmp_path / "whole").read_text().splitlines())
    assert len(whole) == 24
    for kill in range(0, writes, every):
        path = tmp_path / f"killed-{kill}"
        with monkeypatch.context() as patch:
            patch.setattr(Ledger, "_write", dying_at(kill, torn))
            with pytest.raises(Killed):
                fresh(path)
        records = fresh(path)
        assert {record.key: (record.ids, record.equal) for record in records} == whole
        assert {record.key: (record.ids, record.equal) for record in read(path)} == whole


def test_what_is_done_is_not_done_again(tmp_path: Path) -> None:
    notes: list[Any] = []
    first = contest(tmp_path / "r", ToyLLM(), [Scribe("a", notes)], items(3))
    calls = len(notes)
    assert contest(tmp_path / "r", ToyLLM(), [Scribe("a", notes)], items(3)) == first
    assert len(notes) == calls


def test_a_drafter_that_learns_sees_the_earlier_items_again_when_a_warm_run_goes_on(tmp_path: Path) -> None:
    class Learner(Scribe):
        learns = True

    notes: list[Any] = []
    contest(tmp_path / "r", ToyLLM(), [Learner("a", notes)], items(2), state="warm")
    notes.clear()
    records = contest(tmp_path / "r", ToyLLM(), [Learner("a", notes)], items(3), state="warm")
    assert [prompts[0][0] for _, prompts, _ in notes] == [0, 0, 1, 2]  # the warm-up, then all three
    assert len(records) == 3


def test_a_drafter_that_learns_sees_the_earlier_turns_when_a_dialogue_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Learner(Scribe):
        learns = True

    notes: list[Any] = []
    with monkeypatch.context() as patch:
        patch.setattr(Ledger, "_write", dying_at(1, torn=False))
        with pytest.raises(Killed):
            contest(tmp_path / "r", ToyLLM(), [Learner("a", notes)], items(1, turns=2))
    notes.clear()
    assert len(contest(tmp_path / "r", ToyLLM(), [Learner("a", notes)], items(1, turns=2))) == 2
    assert len(notes) == 3  # the warm-up, the turn that was recorded, the one that was not


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"model": "other"}, "its model is 'toy', now it is 'other'"),
        ({"arguments": {"limit": 3}}, "its limit is 2, now it is 3"),
        ({"source": "b"}, "its source is 'a', now it is 'b'"),
        ({"seed": 1}, "its seed is None, now it is 1"),
        ({"questions": "x"}, "its questions is None, now it is 'x'"),
    ],
)
def test_records_of_another_run_are_not_mixed_in(tmp_path: Path, change: dict[str, Any], sentence: str) -> None:
    run = {"model": "toy", "arguments": {"limit": 2}, "source": "a"}
    for about in (run, run | {"time": "later"}):
        with Ledger(tmp_path / "r") as ledger:
            Contest(ToyLLM(), [Scribe("a", [])], items(1), Rules(max_new_tokens=2), ledger, about).play()  # type: ignore[arg-type]
    with Ledger(tmp_path / "r") as ledger, pytest.raises(UsageError, match=sentence):
        Contest(ToyLLM(), [Scribe("a", [])], items(1), Rules(max_new_tokens=2), ledger, run | change)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [({"batch": 0}, "--batch must be at least 1"), ({"rounds": 0}, "--repeat"), ({"order": "random"}, "Unknown order")],
)
def test_rules_that_make_no_sense_are_one_sentence(wrong: dict[str, Any], sentence: str) -> None:
    with pytest.raises(BranchwiseError, match=sentence):
        Rules(**{"max_new_tokens": 4, **wrong})


def test_progress_counts_up_to_all_requests(tmp_path: Path) -> None:
    told: list[tuple[str, int, int]] = []
    with Ledger(tmp_path / "r") as ledger:
        running = Contest(ToyLLM(), [Scribe("a", [])], items(2, turns=2), Rules(max_new_tokens=2), ledger, {})  # type: ignore[arg-type]
        running.progress = lambda *line: told.append(line)
        running.play()
    assert told[-1] == ("done", 4, 4)
    assert [done for _, done, _ in told] == sorted(done for _, done, _ in told)


def test_every_verifier_can_take_part(tmp_path: Path) -> None:
    llm = ToyLLM()
    paths = [name for name in VERIFIERS if name != "auto" and "lossy" not in name]
    specs = ["plain", *(f"disturbed/paths:2x2/{name}" for name in paths), "disturbed/rsd-c:2,1/rrs"]
    records = contest(tmp_path / "r", llm, ours(llm, *specs), items(1), temperature=1.0)
    assert [record.contestant for record in records] == specs
