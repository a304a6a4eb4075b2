"""Published numbers are what the records say."""

from __future__ import annotations

import argparse
import importlib
import json
import re
import shutil
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from branchwise.bench import records
from branchwise.bench.prompts import Item
from branchwise.bench.summary import Row, summarise
from branchwise.cli import app
from branchwise.errors import UsageError
from branchwise.methods import Method

ROOT = Path(__file__).parents[1]
RECORDS = sorted((ROOT / "benchmarks" / "records").glob("foundations-*.jsonl"))
VERDICTS = sorted((ROOT / "benchmarks" / "records").glob("verifiers-*.jsonl"))
CONTESTS = sorted(
    path
    for name in ("bench-*", "styles-*", "drafting-*-t[01]", "memory-*", "speed-*")
    for path in (ROOT / "benchmarks" / "records").glob(f"{name}.jsonl")
)
OVERHEADS = sorted((ROOT / "benchmarks" / "records").glob("drafting-overhead-*.jsonl"))
MEMORIES = sorted((ROOT / "benchmarks" / "records").glob("memories-*.jsonl"))
STEPS = sorted((ROOT / "benchmarks" / "records").glob("gpu-*.jsonl"))
HEADS = sorted((ROOT / "benchmarks" / "records").glob("heads-*.jsonl"))
CELLS = sorted((ROOT / "benchmarks" / "records").glob("cells-*.jsonl"))
CONTROLLER = ROOT / "benchmarks" / "records" / "controller.jsonl"
ALL = [*RECORDS, *VERDICTS, *CONTESTS, *OVERHEADS, *MEMORIES, *STEPS, CONTROLLER, *CELLS]


def script(name: str) -> ModuleType:
    """A benchmark as Python runs it: with the folder of benchmarks in front of the path."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.pop(0)


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_the_benchmark_page_shows_what_the_records_say() -> None:
    tables = script("tables")
    page = tables.PAGE.read_text()
    assert tables.filled(page) == page, "run python benchmarks/tables.py"
    shown = {place[2] for place in tables.PLACE.finditer(page)}
    assert shown >= {path.name for path in ALL}
    heads = tables.HEADS.read_text()
    assert tables.filled(heads) == heads, "run python benchmarks/tables.py"
    assert {place[2] for place in tables.PLACE.finditer(heads)} >= {path.name for path in HEADS}
    train = tables.TRAIN.read_text()
    assert tables.filled(train) == train, "run python benchmarks/tables.py"
    for place in (*tables.PLACE.finditer(page), *tables.PLACE.finditer(heads), *tables.PLACE.finditer(train)):
        assert (place[4] == "not measured yet\n") is not (tables.RECORDS / place[2]).exists()
    readme = tables.README.read_text()
    assert tables.with_tables(readme) == readme, "run python benchmarks/tables.py"


def test_a_table_that_says_something_else_is_found() -> None:
    tables = script("tables")
    page = tables.PAGE.read_text()
    assert tables.filled(page.replace("tokens a step", "tokens a stop", 1)) == page
    assert tables.filled(page.replace("plain  ", "plane  ", 1)) == page


def test_speed_is_measured_with_the_first_prompts_of_each_category() -> None:
    heads = script("heads")
    texts = [heads.Text(torch.tensor([number, 9]), 1) for number in range(5)]
    answers = [heads.Answer(category, text, False) for category, text in zip("aabab", texts, strict=True)]
    for count, chosen in ((1, [0, 2]), (2, [0, 1, 2, 4])):
        assert [answer.text for answer in heads.first_of_each(answers, count)] == [texts[place] for place in chosen]


class Words:
    """A tokenizer of words; a turn of a chat has one word more on each side."""

    def __call__(self, text: str, **_: object) -> dict[str, list[str]]:
        return {"input_ids": text.split()}

    def decode(self, tokens: list[str]) -> str:
        return " ".join(tokens)

    def apply_chat_template(self, chat: list[dict[str, str]], **_: object) -> str:
        return f"begin {chat[0]['content']} end"


@pytest.mark.parametrize("context", [8, 9, 40])
def test_a_question_stands_behind_as_much_text_as_makes_a_context(context: int) -> None:
    long_heads, items = script("long_heads"), [Item("1", "", "", ("who am I",)), Item("2", "", "", ("a b c", "d"))]
    prompt = long_heads.behind(SimpleNamespace(tokenizer=Words()), items, 0, context)
    assert len(prompt) == context
    assert prompt[-4:] == ["who", "am", "I", "end"]
    assert prompt[:4] == ["begin", "a", "b", "c"][:context]


def test_verdicts_that_matter_most_are_measured_and_written_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    verifiers = script("verifiers")
    every = ["placed", "graph", "eager"]
    assert verifiers.chosen(every, torch.device("cuda")) == [["placed", "graph"], ["eager"]]
    assert verifiers.chosen(["graph"], torch.device("cuda")) == [["graph"]]
    assert verifiers.chosen(every, torch.device("cpu")) == [["eager"]]
    with pytest.raises(SystemExit, match="no graphs"):
        verifiers.chosen(["graph"], torch.device("cpu"))
    out = tmp_path / "out.jsonl"
    small = ["--vocabulary", "50", "--drafts", "1", "--repeat", "1", "--batch", "1", "2", "--similarity", "far"]
    monkeypatch.setattr(sys, "argv", ["verifiers.py", *small, "--out", str(out)])
    measure, done = verifiers.measure, []

    def cut_short(*given: Any) -> list[dict[str, Any]]:
        if done:
            raise KeyboardInterrupt
        done.append(given)
        return measure(*given)  # type: ignore[no-any-return]

    monkeypatch.setattr(verifiers, "measure", cut_short)
    with pytest.raises(KeyboardInterrupt):
        verifiers.main()
    records = read(out)
    assert {(record["batch"], record["mode"]) for record in records} == {(2, "eager")}
    names = {record["verifier"] for record in records}
    assert {"block", "cascade"} <= names
    assert not any("lossy" in name for name in names)
    assert "far, batch 2, eager:\n  match " in capsys.readouterr().out


def test_steps_on_a_gpu_are_told_apart_from_their_passes(capsys: pytest.CaptureFixture[str]) -> None:
    size = {"kind": "pass", "mode": "graph", "context": 1024, "batch": 1, "nodes": 64}
    step = {"kind": "step", "mode": "graph", "method": "default", "nodes": 60, "score": 0.001}
    script("gpu").summarise(
        [
            {"kind": "floor", "bytes": 2e9, "bandwidth": 4e12, "seconds": 5e-4},
            *({**size, "seconds": 0.001 * turn, "call": 0.002 * turn} for turn in (1, 2, 3)),
            {**size, "context": 4096, "seconds": 0.009, "call": 0.009},
            *({**step, "seconds": 0.001 * turn} for turn in (4, 5, 6)),
            {"kind": "lookup", "mode": "graph", "nodes": 80, "seconds": 0.00004, "call": 0.00007},
            *(
                {**step, "kind": "together", "batch": batch, "seconds": 0.001 * batch**0.5, "tokens": batch * more}
                for batch in (1, 16)
                for more in (2, 4)
            ),
        ]
    )
    assert capsys.readouterr().out.splitlines() == [
        "floor 0.500 ms: 2.00 GB at 4.00 TB/s",
        "graph, context 1024, 1 texts, 64 nodes: 2.000 [1.000, 3.000] ms, as a call 4.000 [2.000, 6.000] ms",
        "graph, context 4096, 1 texts, 64 nodes: 9.000 [9.000, 9.000] ms, as a call 9.000 [9.000, 9.000] ms",
        "graph, a step of default: 5.000 [4.000, 6.000] ms, 3.000 [2.000, 4.000] of it outside the pass",
        "graph, 80 nodes looked up in a table: 0.040 [0.040, 0.040] ms, as a call 0.070 [0.070, 0.070] ms",
        "graph, 1 texts of default: 1.000 [1.000, 1.000] ms a step, 3000 tokens/s, 1.0 times one",
        "graph, 16 texts of default: 4.000 [4.000, 4.000] ms a step, 12000 tokens/s, 4.0 times one",
    ]


def test_what_a_gpu_took_for_each_kernel_is_told_and_kept_as_it_comes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    gpu, out = script("gpu"), tmp_path / "new" / "gpu.jsonl"
    kernel = {"kind": "kernel", "mode": "compiled", "method": "none"}

    def cut_short(arguments: argparse.Namespace) -> Any:
        yield {"kind": "floor", "bytes": 2e9, "bandwidth": 4e12, "seconds": 5e-4}
        yield {**kernel, "kernel": "merge", "times": 30.0, "seconds": 0.0001}
        yield {**kernel, "kernel": "product", "times": 0.5, "seconds": 0.0005}
        assert len(read(out)) == 3
        raise KeyboardInterrupt

    monkeypatch.setattr(gpu, "measured", cut_short)
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--out", str(out)])
    gpu.main()
    assert capsys.readouterr().out.splitlines()[2:] == [
        "floor 0.500 ms: 2.00 GB at 4.00 TB/s",
        "compiled, a step of none: 0.600 ms in 30 kernels",
        "    0.500 ms in 0.5: product",
        "    0.100 ms in 30.0: merge",
    ]


@pytest.mark.parametrize("path", VERDICTS, ids=lambda path: path.stem)
def test_every_verdict_says_which_code_gave_it(path: Path) -> None:
    for record in read(path):
        assert re.fullmatch(r"[0-9a-f]{40}", record["run"]["commit"])
        # A machine without git cannot say whether its tree was clean; there the digest of the source does.
        assert record["run"]["dirty"] is False or (record["run"]["dirty"] is None and record["run"]["source"])


def speeds(name: str) -> dict[tuple[str, str], Row]:
    rows = summarise(records.read(ROOT / "benchmarks" / "records" / name))
    return {(row.contestant, row.category): row for row in rows}


def test_the_table_of_the_readme_shows_what_the_records_say() -> None:
    """Its first row, read another way; `test_the_benchmark_page_shows…` compares all of them with their functions."""
    row = next(
        line for line in (ROOT / "README.md").read_text().splitlines() if line.startswith("| SmolLM2-135M, float32")
    )
    found = speeds("bench-default-xeon.jsonl")
    shown = [cell.strip(" *") for cell in row.split("|")[4:8]]
    assert shown == [f"{found[name, 'all'].tokens_per_second:.1f}" for name in CONTESTANTS]
    gain = found["default", "all"].tokens_per_second / found["plain", "all"].tokens_per_second
    assert f"[{gain:.2f} x `none`]" in row


CONTESTANTS = "transformers", "llama.cpp", "plain", "default"


def test_rows_of_the_readme_follow_their_records(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    headline = script("headline")
    for path in headline.RECORDS.glob("*.jsonl"):
        shutil.copy(path, tmp_path)
    before = headline.table()
    monkeypatch.setattr(headline, "RECORDS", tmp_path)
    assert headline.table() == before
    for row, name in zip(headline.rows(), RECORDS_OF_THE_README, strict=True):
        lines = [json.loads(line) for line in (tmp_path / name).read_text().splitlines()]
        doubled = (tmp_path / name).read_text()
        (tmp_path / name).write_text("\n".join(json.dumps(twice_as_slow(line)) for line in lines) + "\n")
        changed = headline.table()
        assert changed != before, row
        assert sum(one != other for one, other in zip(changed.splitlines(), before.splitlines(), strict=True)) == 1
        (tmp_path / name).write_text(doubled)


RECORDS_OF_THE_README = [
    "bench-default-xeon.jsonl",
    "eight-bits-layers-cascade-lake.jsonl",
    "heads-shipped-smollm2-h200.jsonl",
    "cells-smollm2-h200.jsonl",
    "heads-coder-h200.jsonl",
]


def twice_as_slow(record: dict[str, Any]) -> dict[str, Any]:
    for name in ("seconds", "decode"):
        if isinstance(record.get(name), float):
            record[name] *= 2
    if "own" in record:
        record["own"]["tokens_per_second"] /= 2
    return record


@pytest.mark.parametrize("path", CONTESTS, ids=lambda path: path.stem)
def test_records_of_a_contest_are_of_clean_code_and_equal_where_they_must_be(path: Path) -> None:
    for record in records.read(path):
        assert re.fullmatch(r"[0-9a-f]{40}", record.run["commit"])
        # A machine without git has the commit told, and the digest of what ran beside it.
        assert record.run["dirty"] is False or (record.run["dirty"] is None and record.run["source"])
        assert record.ids_hash == records.hash_ids(record.ids)
        # llama.cpp computes with the weights as they are in the file.
        if record.run["dtype"] == "float32" and record.kind != "plain" and record.contestant != "llama.cpp":
            assert record.equal is True


def test_styles_are_as_often_right_with_speculation_as_without() -> None:
    rows = speeds("styles-cpu.jsonl")
    found = {category: row.accuracy for (name, category), row in rows.items() if name == "plain"}
    assert len(found) == 26
    assert found == {category: row.accuracy for (name, category), row in rows.items() if name == "ngram"}


@pytest.mark.parametrize("path", [*RECORDS, *STEPS], ids=lambda path: path.stem)
def test_every_record_says_where_it_comes_from(path: Path) -> None:
    for record in read(path):
        run = record["run"]
        assert re.fullmatch(r"[0-9a-f]{40}", run["commit"])
        no_git = path in STEPS and run["dirty"] is None and run["source"]  # the digest of what ran, in its place
        assert run["dirty"] is False or no_git
        assert run["machine"]
        assert set(run["versions"]) == {"branchwise", "python", "torch", "transformers"}


def test_the_interval_covers_its_median() -> None:
    assert script("measure").interval([1.0, 2.0, 3.0]) == "2.000 [1.000, 3.000]"
    assert script("measure").interval([1.5] * 4) == "1.500 [1.500, 1.500]"


@pytest.mark.filterwarnings("ignore::branchwise.errors.LossyWarning")
def test_the_commands_of_the_drafting_benchmark_can_be_run(tmp_path: Path) -> None:
    """Every word is understood, every preset is found and fits, and then the prompts are missing."""
    drafting = script("drafting")
    asked = argparse.Namespace(
        model="smollm2", draft_model="smollm2", prompts=[Path("no-such-file.jsonl")], limit=10, methods=None,
        device="cpu", threads=1, batch=10, context=1024, commit=None, out=tmp_path,
    )  # fmt: skip
    for temperature in drafting.TEMPERATURES:
        words = [str(word) for word in drafting.command(asked, temperature)]
        assert {"--budget", "24", "bfloat16", "96", "--batch", "10", "--context", "1024"} <= set(words)
        assert "--commit" not in words
        done = CliRunner().invoke(app, words)
        assert isinstance(done.exception, UsageError), done.output
        assert "no-such-file.jsonl" in str(done.exception)
    for tree, spec in drafting.WIDE.items():
        Method(tree, "disturbed", spec, drafting.RULES.get(tree, "rrs")).build()


def test_the_overhead_of_drafting_is_what_the_models_do_not_take(capsys: pytest.CaptureFixture[str]) -> None:
    step = {"tree": "paths", "spec": "paths:4x8", "verifier": "cascade", "batch": 1, "nodes": 32, "levels": 8}
    one = {**step, "seconds": 0.2, "models": 0.19, "draft": 0.05, "passes": 8}
    many = {**one, "batch": 8, "draft": 0.1}
    script("drafting").summarise([one, many])
    printed = capsys.readouterr().out
    assert "paths:4x8, cascade: 32.0 nodes a step, 200.0 ms" in printed
    assert "outside the two models 0.050 [0.050, 0.050] of the step, 1.00 draft passes a level" in printed
    assert "drafting for 8 texts takes 2.00 times one" in printed


def test_the_controller_is_compared_with_hindsight_and_with_plain_decoding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    controller, out = script("controller"), tmp_path / "controller.jsonl"
    short = ["--seeds", "1", "--noises", "0.05", "--learning", "2", "--steps", "3"]
    monkeypatch.setattr(sys, "argv", ["controller.py", *short, "--out", str(out)])
    controller.main()
    found = read(out)
    assert len({(one["cost"], one["source"]) for one in found}) == len(found) == 28
    assert all(one["hindsight"] >= one["plain"] > 0 and one["speed"] > 0 for one in found)
    capsys.readouterr()
    about = {"noise": 0.2, "source": "sure", "hindsight": 2.0, "plain": 1.0}
    controller.summarise(
        [
            {**about, "cost": "flat", "seed": 0, "speed": 2.2},
            {**about, "cost": "flat", "seed": 1, "speed": 1.8},
            {**about, "cost": "steep", "seed": 0, "speed": 0.8},
        ]
    )
    assert capsys.readouterr().out.splitlines() == [
        "noise of 20%, 3 texts",
        "  over hindsight  0.800 on average, 0.400 at least (steep, sure, seed 0)",
        "  over plain      1.600 on average, 0.800 at least (steep, sure, seed 0)",
        "  of hindsight       sure",
        "  flat              1.000",
        "  steep             0.400",
    ]


def test_the_record_of_the_controller_is_of_all_worlds_and_of_clean_code() -> None:
    found = read(CONTROLLER)
    assert {one["noise"] for one in found} == {0.05, 0.2}
    assert len({(one["cost"], one["source"]) for one in found}) == 28
    assert len(found) == 28 * 2 * 3
    assert all(one["run"]["dirty"] is False for one in found)


def test_chains_are_measured_against_plain_decoding(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chains = script("chains")
    asked = ["--shape", "tiny", "--device", "cpu", "--limit", "1", "--tokens", "6", "--context", "64"]
    asked += ["--trees", "chain:2", "--levels", "--out", str(tmp_path / "chains.jsonl")]
    monkeypatch.setattr(sys, "argv", ["chains.py", *asked])
    chains.main()
    found = read(tmp_path / "chains.jsonl")
    assert [(one["contestant"], one["temperature"]) for one in found] == [
        (contestant, temperature)
        for temperature in (0.0, 1.0)
        for contestant in ("none", "chain:2", "chain:2 by level")
    ]
    assert all(0 < one["tokens"] < 6 and one["weights"] == "random" and one["target_seconds"] > 0 for one in found)
    assert [one["draft_passes"] > 0 for one in found] == [False, True, True] * 2
    shown = capsys.readouterr().out
    assert "Random weights" in shown
    assert len([line for line in shown.splitlines() if "chain:2" in line]) == 4
