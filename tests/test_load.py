"""The load generator: it counts every token, and notices one that is lost, doubled or mixed up."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.serving import serving, tiny_llm
from tests.test_benchmarks import script

load = script("load")
PROMPTS = ["one", "two", "three", "ÄÖ"]


def arguments(tmp_path: Path, **given: Any) -> argparse.Namespace:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in PROMPTS))
    usual = {"library": False, "limit": 4, "letters": 99, "streams": [1, 4], "seconds": 60.0, "requests": 8}
    usual |= {"tokens": 6, "seeds": False, "overhead": 0, "second_turn": 0, "commit": "0", "pid": os.getpid()}
    return argparse.Namespace(**usual | {"prompts": prompts, "out": tmp_path / "load.jsonl"} | given)


def assert_accounted(records: list[dict[str, Any]]) -> None:
    assert [record["streams"] for record in records] == [1, 4]
    for record in records:
        assert record["compared"] == {"same": 8}
        assert not record["faults"]
        assert record["tokens"] == 48
        assert record["counters"]["score"] > 0
        assert record["counters"]["cpu"] > 0


def test_a_server_that_is_right_is_found_right(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with serving(lambda: tiny_llm(slots=2, context=256)) as client:
        records = asyncio.run(load.run(arguments(tmp_path, address=client.address, seeds=True)))
    assert_accounted(records)
    assert [json.loads(line) for line in (tmp_path / "load.jsonl").read_text().splitlines()] == records
    load.summarise(records)
    assert "8 same" in capsys.readouterr().out


def test_the_engine_alone_is_driven_alike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "load", lambda *_, **__: tiny_llm(slots=2, context=256))
    assert_accounted(asyncio.run(load.run(arguments(tmp_path, library=True))))


def test_the_server_is_compared_with_the_library_and_the_second_turn_with_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(load, "load", lambda *_, **__: tiny_llm(context=256))
    with serving(lambda: tiny_llm(context=256)) as client:
        given = arguments(tmp_path, address=client.address, streams=[], overhead=1, second_turn=1)
        records = asyncio.run(load.run(given))
    assert [record["kind"] for record in records] == ["overhead"] * 4 + ["second turn"]
    assert all(record["http"]["tokens"] == record["library"]["tokens"] for record in records[:4])
    assert records[4]["prompt_tokens"][0] < records[4]["prompt_tokens"][1]
    load.summarise(records)
    told = capsys.readouterr().out
    assert "through HTTP" in told
    assert "second turn" in told


def test_a_token_that_is_lost_doubled_or_mixed_up_is_noticed() -> None:
    tokens = [("a", -0.1), ("b", -0.2), ("c", -3.0)]
    right = load.Answer(0.0, "abc", tokens, [1, 2, 3], ["length"], 1, 3, b"abc")
    assert right.fault is None
    assert right.against(right) == "same"
    assert replace(right, tokens=tokens[:2]).fault == "usage is not the tokens that came"
    assert replace(right, spelt=b"abbc").fault == "tokens are not the text"
    assert replace(right, finish=[]).fault == "not one end"
    assert replace(right, finish=["length", "stop"]).fault == "not one end"
    assert replace(right, status="429").fault == "status 429"
    mixed = replace(right, text="abx", tokens=[*tokens[:2], ("x", -0.5)], spelt=b"abx")
    assert mixed.fault is None
    assert mixed.against(right) == "different"
    assert replace(right, tokens=[*tokens[:2], ("x", -2.95)]).against(right) == "near-tie"
    assert replace(right, text="ab", tokens=tokens[:2]).against(right) == "different"
