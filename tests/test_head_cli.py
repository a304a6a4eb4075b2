"""`branchwise train head` from a model to a file that drafts."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import pytest

from branchwise.cli import main
from branchwise.draft.head.file import TrainedHead
from branchwise.errors import UsageError
from branchwise.llm import load
from branchwise.train import prompts
from branchwise.train.corpus import Texts, given_texts
from branchwise.train.writing import hours_to_write
from tests.test_audit_model import tiny_model, tokenizer

TEMPLATE = "{% for message in messages %}{{ message['role'] }} : {{ message['content'] }} {% endfor %}"


@pytest.fixture(params=["chat", "base"])
def folder(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """A model with a chat template, or without one."""
    words = tokenizer()
    words.chat_template = TEMPLATE if request.param == "chat" else None
    tiny_model().save_pretrained(tmp_path / "model")
    words.save_pretrained(tmp_path / "model")
    return tmp_path


def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: object) -> str:
    monkeypatch.setattr(sys, "argv", ["branchwise", *map(str, words)])
    with pytest.raises(SystemExit) as ended:
        main()
    told = capsys.readouterr()
    assert not ended.value.code, told.err
    return told.out


def test_a_head_is_trained_and_drafts(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    loading = ["--model", folder / "model", "--device", "cpu", "--dtype", "float32"]
    sizes = ["--minutes", 0.02, "--texts", 24, "--mlp", 16, "--table", 12]
    found = json.loads(run(monkeypatch, capsys, "train", "head", *loading, *sizes, "--out", folder / "head", "--json"))
    assert found["steps"] >= 1
    assert 0 < found["weights"] < 1e6
    assert len(found["hits"]) == 5
    assert TrainedHead.load(folder / "head").target == "model"
    written = [
        run(monkeypatch, capsys, "generate", "the cat", "--raw", *loading, "-n", 12, *method)
        for method in (["--method", "none"], ["--method", "eagle", "--head", folder / "head"])
    ]
    assert written[0] == written[1]


def test_what_a_head_has_learned_is_shown_while_it_learns_and_drawn(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    loading = ["--model", folder / "model", "--device", "cpu", "--dtype", "float32"]
    sizes = ["--minutes", 0.02, "--texts", 24, "--mlp", 16, "--table", 12, "--plot", folder / "curve.png"]
    title, *lines, weights, use = run(
        monkeypatch, capsys, "train", "head", *loading, *sizes, "--out", folder / "head"
    ).splitlines()
    [entry] = TrainedHead.load(folder / "head").about["curve"]
    [row] = lines
    assert title.split()[:3] == ["time", "steps", "loss"]
    assert row.split()[:2] == [f"0:{round(entry['seconds']):02d}", str(entry["steps"])]
    kept = [math.prod(entry["hits"][: depth + 1]) for depth in range(5)]
    assert row.split()[3] == f"{1 + sum(kept):.2f}"
    assert f"{1 + sum(kept):.2f} tokens a pass" in weights
    assert use.endswith(str(folder / "head"))
    assert (folder / "curve.png").read_bytes().startswith(b"\x89PNG")


def test_whoever_would_wait_for_hours_is_told(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("branchwise.train.writing.hours_to_write", lambda llm, texts: 7.3)
    loading = ["--model", folder / "model", "--device", "cpu", "--dtype", "float32"]
    sizes = ["--minutes", 0.01, "--texts", 24, "--mlp", 16, "--table", 12]
    words = map(str, ["branchwise", "train", "head", *loading, *sizes, "--out", folder / "head"])
    monkeypatch.setattr(sys, "argv", [*words])
    with pytest.raises(SystemExit):
        main()
    assert "about 7 hours to write 24 texts; a GPU takes minutes" in " ".join(capsys.readouterr().err.split())


def test_how_long_writing_takes_grows_with_the_texts_on_a_cpu(folder: Path) -> None:
    llm = load(folder / "model", draft="none", device="cpu", dtype="float32")
    few, many = (hours_to_write(llm, count) for count in (1, 10**6))
    assert 0 < few < 1e-2 < many


def test_texts_may_be_programs(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    programs = list[str]()

    def beginning(program: str) -> str:
        programs.append(program)
        return "the cat sat"

    monkeypatch.setattr(prompts, "openings", lambda count, seed: ["the cat"] * count)
    monkeypatch.setattr(prompts, "beginning", beginning)
    loading = ["--model", folder / "model", "--device", "cpu", "--dtype", "float32", "--json"]
    sizes = ["--minutes", 0.01, "--texts", 24, "--mlp", 16, "--table", 12, "--batch-tokens", 64]
    run(monkeypatch, capsys, "train", "head", *loading, *sizes, "--kind", "code", "--out", folder / "head")
    assert len(programs) == round(0.36 * 24)
    assert all(program.startswith("the cat") for program in programs)
    assert TrainedHead.load(folder / "head").about["recipe"]["tokens"] == 64
    assert len(Texts(folder / "head.run" / "texts.pt").read()[0]) > 5


def test_a_head_learns_from_texts_that_are_given(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = " ".join(tokenizer().get_vocab())
    lines = [{"prompt": words, "answer": words}, {"text": f"{words} {words}"}, {"text": "short"}]
    (folder / "texts.jsonl").write_text("\n".join(map(json.dumps, lines * 4)))
    asked = ["train", "head", "--model", folder / "model", "--device", "cpu", "--dtype", "float32", "--minutes", 0.01]
    sizes = ["--mlp", 16, "--table", 12]
    for name, data in (("one", folder / "texts.jsonl"), ("two", folder / "one.run" / "texts.pt")):
        run(monkeypatch, capsys, *asked, *sizes, "--data", data, "--out", folder / name)
        learn, held_out = Texts(folder / f"{name}.run" / "texts.pt").read()
        assert len(learn) + len(held_out) == 8


def test_data_that_is_none_is_refused_with_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "odd.jsonl").write_text('{"question": 1}')
    with pytest.raises(UsageError, match=r"Line 1 of .* has neither prompt and answer nor text"):
        given_texts(tmp_path / "odd.jsonl", tokenizer())
    (tmp_path / "odd.jsonl").write_text("\nno JSON")
    with pytest.raises(UsageError, match=r"Line 2 of .* is no JSON"):
        given_texts(tmp_path / "odd.jsonl", tokenizer())
