"""`branchwise train data`, `student` and `nested`: texts of a target, and the folders that are made of them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from branchwise.errors import UsageError
from branchwise.train import prompts
from branchwise.train.corpus import Text, Texts, checked_texts, given_texts
from branchwise.train.texts import Writer
from branchwise.train.writing import HEAT, Asked, Scribe, TextFile, Written, heated, parted, questions
from tests.test_audit_model import tiny_model, tokenizer
from tests.test_head_cli import TEMPLATE, run

SETTINGS = {"seed": 0}


def asked_of(count: int) -> list[Asked]:
    letters = "abcdefghijklmnop"
    return [
        Asked(f"{letters[n % 16]} {letters[n // 16]} {letters[n % 7]}", temperature=n % 2, held_out=n % 5 == 0)
        for n in range(count)
    ]


def write(out: Path, ended: Callable[[int], None] = lambda done: None, count: int = 20, together: int = 4) -> Written:
    """Texts of a tiny model; `ended` may end it."""
    with Writer(tiny_model(), [2], 4) as writer:
        scribe = Scribe(writer, tokenizer(), [2], lambda what, done, of: ended(done))
        return TextFile(out, SETTINGS, together, length=30).write(scribe, lambda: asked_of(count))


def test_a_file_that_was_ended_is_gone_on_with_as_if_it_had_not_been(tmp_path: Path) -> None:
    counted = write(tmp_path / "whole.jsonl")
    whole = (tmp_path / "whole.jsonl").read_bytes()
    lines = [json.loads(line) for line in whole.splitlines()]
    assert counted.texts == len(lines) == 20 - counted.left_out
    assert counted.held_out == sum(line["held_out"] for line in lines) > 0
    assert counted.cut == sum("cut" in line for line in lines)
    out = tmp_path / "ended.jsonl"

    def end(done: int) -> None:
        if done > 9:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write(out, end)
    partial = tmp_path / ".ended.jsonl.part"
    assert 0 < len(partial.read_bytes()) < len(whole)
    with partial.open("ab") as file:
        file.write(b'{"prompt": "half a li')  # killed in the middle of a line
    assert not out.exists()
    assert write(out) == counted
    assert out.read_bytes() == whole
    assert sorted(file.name for file in tmp_path.iterdir()) == ["ended.jsonl", "whole.jsonl"]


def test_a_file_begun_with_other_settings_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def end(done: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write(tmp_path / "texts.jsonl", end)
    monkeypatch.setitem(SETTINGS, "seed", 1)
    with pytest.raises(UsageError, match="was begun with other settings; name another file, or remove"):
        write(tmp_path / "texts.jsonl")


def test_no_room_for_texts_is_said_in_a_sentence(tmp_path: Path) -> None:
    out = tmp_path / "texts.jsonl"
    (tmp_path / ".texts.jsonl.part").symlink_to("/dev/full")
    with pytest.raises(UsageError, match=r"cannot be written: No space left on device\. Make room"):
        write(out)


def test_what_is_held_out_has_topics_that_nobody_learns_from() -> None:
    asked = parted([Asked(text) for text in prompts.asked(1500, 3)], 0.1, seed=0)
    held_out, learned = ([one for one in asked if one.held_out is side] for side in (True, False))
    assert 0.05 < len(held_out) / len(asked) < 0.3
    out = {topic for one in held_out if one.topics for topic in one.topics}
    kept = {topic for one in learned for topic in one.topics}
    by_two = [one for one in held_out if len(one.topics) == 1]
    assert {topic for one in by_two for topic in one.topics}.isdisjoint(kept)
    assert len(out) > 5
    assert not any(one.held_out for one in parted(asked, 0.0, seed=0))
    assert [one.held_out for one in parted(asked, 0.1, seed=0)] == [one.held_out for one in asked]


def test_temperatures_are_the_usual_ones_or_the_one_asked_for() -> None:
    asked = [Asked("a")] * 400
    shares = {heat: sum(one.temperature == heat for one in heated(asked, 0)) / 400 for heat, _ in HEAT}
    assert shares == pytest.approx(dict(HEAT), abs=0.08)
    assert {one.temperature for one in heated(asked, 0, 0.3)} == {0.3}


@pytest.mark.parametrize(("kind", "least"), [("topics", 12), ("turns", 1)])
def test_questions_are_of_the_kind_asked_for(kind: str, least: int) -> None:
    with Writer(tiny_model(), [2], 4) as writer:
        scribe = Scribe(writer, tokenizer(), [2])
        found = questions(scribe, 12, kind, [], 0)
        assert least <= len(found) <= 12
        made = prompts.asked(12, 0)
        assert {one.prompt in made for one in found} == {kind == "topics"}
        assert not questions(scribe, 12, "topics", made, 0), "what is to be avoided is asked of nobody"


def test_texts_keep_their_temperature_and_their_side(tmp_path: Path) -> None:
    texts = [
        Text(torch.arange(n + 4, dtype=torch.int32), 2, heat, side)
        for n, (heat, side) in enumerate([(0.0, True), (0.6, False), (None, None), (1.0, False)])
    ]
    file = Texts(tmp_path / "texts.pt")
    file.write(texts)
    learn, held_out = file.read()
    assert [len(text.tokens) for text in held_out] == [4]
    assert {(len(text.tokens), text.temperature, text.held_out) for text in learn} == {
        (5, 0.6, False),
        (6, None, None),
        (7, 1.0, False),
    }


def test_lines_are_read_as_they_were_asked(tmp_path: Path) -> None:
    words = tokenizer()
    words.chat_template = TEMPLATE
    answer = "a b c d e f g h </s>"
    lines = [{"prompt": "k l", "answer": answer, "held_out": True, "temperature": 0.6}]
    lines += [{"prompt": "k l", "answer": answer, "raw": True}]
    (tmp_path / "texts.jsonl").write_text("\n".join(map(json.dumps, lines)))
    turned, raw = given_texts(tmp_path / "texts.jsonl", words)
    assert (turned.held_out, turned.temperature) == (True, 0.6)
    assert (raw.held_out, raw.temperature) == (None, None)
    assert words.decode(raw.tokens[: raw.prompt]) == "k l"
    assert turned.prompt > raw.prompt
    for text in (turned, raw):
        assert words.decode(text.tokens[text.prompt :]) == answer


def test_separators_inside_a_text_end_no_line(tmp_path: Path) -> None:
    answer = "a b c d e f g h \u2028 i \x85 j"
    line = json.dumps({"prompt": "k l", "answer": answer, "raw": True}, ensure_ascii=False)
    (tmp_path / "texts.jsonl").write_text(f"{line}\n{line}\n")
    assert len(given_texts(tmp_path / "texts.jsonl", tokenizer())) == 2


@pytest.mark.parametrize("content", ["", "\n\n", '{"text": "a b"}'])
def test_a_file_without_texts_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "texts.jsonl").write_text(content)
    with pytest.raises(UsageError, match=r"holds 0 texts of more than 8 tokens; a student learns from many"):
        checked_texts(tmp_path / "texts.jsonl", tokenizer(), "student")


@pytest.mark.filterwarnings("ignore::branchwise.errors.LargeDraftWarning")
def test_from_texts_to_folders_that_draft(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The commands one after the other, each with what the last one wrote."""
    tiny_model().save_pretrained(tmp_path / "model")
    tokenizer().save_pretrained(tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    loading = ["--device", "cpu", "--dtype", "float32"]
    made = run(
        monkeypatch, capsys, "train", "data", "--target", "model", *loading, "--texts", 24, "--length", 30, "--json"
    )
    assert json.loads(made)["texts"] == len((tmp_path / "texts.jsonl").read_text().splitlines()) > 10
    lessons = [*loading, "--data", "texts.jsonl", "--steps", 2, "--batch-tokens", 300, "--json"]
    found = run(monkeypatch, capsys, "train", "student", "--target", "model", "--init", "layers:1", *lessons)
    assert json.loads(found)["steps"] == 2
    found = run(monkeypatch, capsys, "train", "nested", "--target", "model", "--exits", "1,2", *lessons)
    assert [one["layers"] for one in json.loads(found)["after"]] == [1, 2]
    asked = ["generate", "a b c", "--raw", "--model", "model", *loading, "-n", 10]
    texts = [
        run(monkeypatch, capsys, *asked, *method)
        for method in (
            ["--method", "plain"],
            ["--method", "distillspec", "--draft-model", "student"],
            ["--method", "s2d", "--draft-model", "nested"],
            ["--draft", "nested:nested,threshold=0.1"],
        )
    ]
    assert len(set(texts)) == 1
    for folder, layers in (("student", 1), ("nested", 2)):
        model = AutoModelForCausalLM.from_pretrained(tmp_path / folder)
        assert model.config.num_hidden_layers == layers
        assert AutoTokenizer.from_pretrained(tmp_path / folder).get_vocab() == tokenizer().get_vocab()
        note = json.loads((tmp_path / folder / "training.json").read_text())
        assert {"before", "after", "curve", "provenance", "target_weights"} <= note.keys()
        assert str(tmp_path) not in json.dumps(note)
