"""The benchmark of cells: groups, turns and ratios are what it says, on engines of which everything is known."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from branchwise.bench.prompts import Item
from branchwise.draft.base import NoDrafter
from branchwise.draft.lookup.suffix import Suffix
from branchwise.engine import Engine
from branchwise.testing import RandomDrafter, ToyTarget
from branchwise.verify import VERIFIERS
from tests.test_audit_model import tiny_model, tokenizer
from tests.test_benchmarks import read, script

cells = script("cells")
END = 7
"""the token that ends a text"""


def items(**counts: int) -> list[Item]:
    return [
        Item(f"{category}/{number}", "", category, (f"{category} {number}",))
        for category, count in counts.items()
        for number in range(count)
    ]


def engines() -> dict[str, Engine]:
    target = ToyTarget(8, slots=8)
    drafters = {"plain": NoDrafter(), "random": RandomDrafter(8, nodes=6), "suffix": Suffix(min=1, keep=1000)}
    return {name: Engine(target, drafter, VERIFIERS.build("match")) for name, drafter in drafters.items()}


def asking(**options: Any) -> Any:
    """A model with a tokenizer of letters, and what a run was asked for."""
    llm = SimpleNamespace(encode=lambda text, raw: [ord(letter) % 7 for letter in text], stop_tokens=frozenset({END}))
    return llm, argparse.Namespace(**{"turns": 2, "tokens": 12, **options})


def test_a_group_holds_one_category_where_each_can_fill_it() -> None:
    groups = cells.grouped(items(a=5, b=4), 4)
    assert [(group.category, len(group.items)) for group in groups] == [("a", 4), ("a", 1), ("b", 4)]
    mixed = cells.grouped(items(a=5, b=3), 4)
    assert [(group.category, len(group.items)) for group in mixed] == [(None, 4), (None, 4)]
    assert {item.category for item in mixed[1].items} == {"a", "b"}
    assert [(group.category, len(group.items)) for group in cells.grouped(items(a=3), 64)] == [("a", 3)]


def test_prompts_are_the_first_of_each_category() -> None:
    assert [item.id for item in cells.first_of_each(items(a=3, b=1), 2)] == ["a/0", "a/1", "b/0"]


@pytest.mark.parametrize("batch", [1, 3, 8])
@pytest.mark.parametrize("way", cells.WAYS)
def test_every_engine_writes_the_texts_of_plain_decoding_and_is_counted_by_them(way: str, batch: int) -> None:
    llm, asked = asking()
    given, groups = engines(), cells.grouped(items(a=3, b=3), batch)
    sides = cells.cell(llm, given, groups, way, asked, {})
    plain = sides["plain"]
    assert len(plain.ids) == 12, "two turns of six texts"
    for side in sides.values():
        record = cells.compared(plain, side, exact=True)
        assert record["equal"] == record["texts"] == 12
        assert side.tokens == plain.tokens
        assert sum(side.tokens) == sum(map(len, side.ids.values()))
        assert 0 < sum(side.phases.values()) <= sum(side.seconds) * 1.001, "phases are booked once for a batch"
        assert (record["categories"].keys() == {"a", "b"}) == (batch < 8)
    assert plain.as_dict()["tokens_per_step"] == 1
    assert plain.steps == sum(plain.tokens)
    assert plain.passes <= plain.steps
    assert (plain.passes == plain.steps) == (batch == 1)
    assert sides["random"].as_dict()["nodes_per_step"] > 1
    ended = [ids[-1] == END for ids in plain.ids.values()]
    assert any(ended) is not (way == "bias")
    different = {(0, item): plain.ids[0, item] for _, item in plain.ids} != {
        (0, item): plain.ids[1, item] for _, item in plain.ids
    }
    assert different is (way in ("t1", "nucleus")), "a turn has its own seeds"


def test_the_order_of_the_engines_alternates(monkeypatch: pytest.MonkeyPatch) -> None:
    llm, asked = asking()
    given, order = engines(), []
    names = {engine: name for name, engine in given.items()}
    monkeypatch.setattr(cells, "write", lambda engine, *_: order.append(names[engine]))
    cells.cell(llm, given, cells.grouped(items(a=3), 1), "greedy", asked, {})
    turns = [order[start : start + 3] for start in range(0, len(order), 3)]
    assert turns[0] == ["plain", "random", "suffix"]
    assert turns[1] == turns[0][::-1]
    assert turns == [turns[(turn + group) % 2] for turn in range(2) for group in range(3)]


@pytest.mark.parametrize("keep", [False, True])
def test_a_memory_knows_nothing_of_the_turns_before_unless_it_may(keep: bool) -> None:
    llm, asked = asking(turns=3, tokens=24)
    given = engines()
    fresh = {} if keep else {name: cells.learned(engine) for name, engine in given.items()}
    drafted = []
    for _ in range(2):
        sides = cells.cell(llm, given, cells.grouped(items(a=4), 2), "bias", asked, fresh)
        drafted.append(sides["suffix"].as_dict()["tokens_per_step"])
    assert (drafted[1] > drafted[0]) is keep
    assert (drafted[1] == drafted[0]) is not keep


def test_a_ratio_is_of_tokens_a_second_turn_by_turn() -> None:
    plain = cells.Side(tokens=[100, 100], seconds=[1.0, 2.0], steps=200, ids={(0, "a"): [1], (1, "a"): [2]})
    own = cells.Side(tokens=[100, 90], seconds=[0.5, 0.9], steps=95, drafted=190, passes=95)
    own.ids = {(0, "a"): [1], (1, "a"): [3]}
    plain.by_category, own.by_category = {"x": [(50, 1.0), (50, 1.0)]}, {"x": [(50, 0.25), (40, 0.4)]}
    own.phases |= {"verify": 0.1, "score": 0.3, "prefill": 0.5}
    found = cells.compared(plain, own, exact=True)
    assert found["ratios"] == pytest.approx([2.0, 2.0])
    assert found["categories"]["x"] == pytest.approx([4.0, 2.0])
    assert (found["equal"], found["texts"]) == (1, 2)
    assert found["own"]["verify_share"] == pytest.approx(0.25)
    assert (found["own"]["tokens_per_step"], found["own"]["nodes_per_step"]) == (2.0, 2.0)
    assert cells.compared(plain, own, exact=False)["equal"] is None


def record(batch: int, way: str, ratios: list[float], **categories: list[float]) -> dict[str, Any]:
    side = cells.Side(tokens=[256], seconds=[0.25], passes=100, steps=100, drafted=2400).as_dict()
    side |= {"verify_share": 0.07, "rested": 0.25, "prepared": {"compiled": 0, "recorded": 3}}
    about = {"method": "default", "batch": batch, "way": way, "ratios": ratios, "categories": categories}
    return {**about, "texts": 6, "equal": 5, "own": side, "plain": side}


def test_what_was_measured_is_told_cell_by_cell_and_as_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    cells.summarise([record(1, "greedy", [2.0, 2.5, 3.0], code=[1.0, 1.5, 2.0]), record(64, "nucleus", [0.9])])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == (
        "batch  1, greedy: default 1024 tokens/s, plain 1024: 2.500 [2.000, 3.000], first turn 2.000; 2.56 tokens and "
        "24.0 nodes a step of 2.50 ms (plain 2.50), verdict 7% of it, 25% of steps without a draft, 5/6 texts equal, "
        "3 recorded"
    )
    assert lines[3:] == [
        "default: times as fast as plain decoding, median of turns with a 95 % interval",
        "batch  prompts                        greedy    T = 0.8, top-p 0.9",
        "    1  all              2.500 [2.000, 3.000]",
        "       code             1.500 [1.000, 2.000]",
        "   64  all                                    0.900 [0.900, 0.900]",
    ]


def test_a_run_that_is_cut_short_keeps_its_cells_and_a_record_can_be_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    out, plot = tmp_path / "cells.jsonl", tmp_path / "cells.png"

    def cut_short(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
        yield record(1, "greedy", [2.0], code=[1.0])
        raise KeyboardInterrupt

    monkeypatch.setattr(cells, "measured", cut_short)
    monkeypatch.setattr(sys, "argv", ["cells.py", "--prompts", "none.jsonl", "--out", str(out)])
    cells.main()
    assert read(out) == [record(1, "greedy", [2.0], code=[1.0])]
    assert "1 records in" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["cells.py", "--read", str(out), "--plot", str(plot)])
    cells.main()
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert "2.000 [2.000, 2.000]" in capsys.readouterr().out


def test_a_model_is_measured_from_its_folder_to_the_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model, prompts, out = tmp_path / "tiny", tmp_path / "prompts.jsonl", tmp_path / "cells.jsonl"
    tiny_model().save_pretrained(model)
    tokenizer().save_pretrained(model)
    asked = [
        ("a b c d", "letters"),
        ("t s r " * 40, "letters"),
        ("h h h", "letters"),
        ("q p", "others"),
        ("o", "others"),
    ]
    lines = [{"question_id": number, "category": kind, "turns": [text]} for number, (text, kind) in enumerate(asked)]
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    words = ["--model", str(model), "--prompts", str(prompts), "--categories", "all", "--limit", "2", "--context", "64"]
    words += ["--methods", "default", "ngram", "--batches", "1", "4", "--max-batch", "4", "--tokens", "6"]
    words += ["--turns", "2", "--device", "cpu", "--dtype", "float32", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", ["cells.py", *words])
    cells.main()
    found = read(out)
    keys = [(one["batch"], one["way"], one["method"]) for one in found]
    assert keys == [*product((1, 4), cells.WAYS, ("default", "ngram"))]
    for one in found:
        assert one["equal"] == one["texts"] == 8, "two turns of two prompts of each category; one is too long"
        assert (one["groups"], len(one["categories"])) == {1: (4, 2), 4: (1, 0)}[one["batch"]]
        assert one["run"]["arguments"]["model"] == "tiny"
        assert str(tmp_path) not in json.dumps(one)
    assert capsys.readouterr().out.count("default: times as fast as plain decoding") == 1


def test_records_name_files_without_their_folders() -> None:
    asked = {"prompts": [Path("/home/me/a.jsonl")], "head": None, "model": "/home/me/model", "plot": Path("b.png")}
    found = cells.without_folders({**asked, "tokens": 128})
    assert found == {"prompts": ["a.jsonl"], "head": None, "model": "model", "plot": "b.png", "tokens": 128}
