"""Counting what a target writes: of its own text, reproducible, kept beside the model, read by a trimmed head."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from branchwise.backends.transformers.target import TransformersTarget
from branchwise.bench.prompts import Item
from branchwise.cli import app
from branchwise.draft import build_drafter
from branchwise.draft.model.vocabulary import frequent_tokens, read_counts
from branchwise.engine import Engine
from branchwise.errors import UsageError
from branchwise.llm import LLM
from branchwise.train.vocab import BATCH, count_tokens, coverage
from branchwise.verify import VERIFIERS
from tests.test_audit_model import tiny_model, tokenizer

ITEMS = [Item(id=f"own/{n}", suite="own", category="words", turns=(text,)) for n, text in enumerate(("a b c", "t s r"))]


def model() -> LLM:
    weights, words = tiny_model(), tokenizer()
    target = TransformersTarget(weights, slots=BATCH, tokenizer=words)
    return LLM("tiny", weights, words, Engine(target, build_drafter("none"), VERIFIERS.build("match")))


def test_every_token_that_is_written_is_counted_and_no_other() -> None:
    llm, written = model(), Counter[int]()
    whole = llm.generate

    def noted(*arguments, **options):  # type: ignore[no-untyped-def]
        answers = whole(*arguments, **options)
        written.update(token for answer in answers for token in answer.token_ids)
        return answers

    llm.generate = noted  # type: ignore[method-assign]
    counts = count_tokens(llm, ITEMS, tokens=150, temperature=1.0, seed=0)
    assert int(counts.sum()) >= 150
    assert {token: count for token, count in enumerate(counts.tolist()) if count} == dict(written)


def test_one_seed_gives_one_table_and_rounds_differ() -> None:
    first, again, other = (count_tokens(model(), ITEMS, tokens=40, temperature=1.0, seed=s) for s in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_ctrl_c_keeps_what_is_counted() -> None:
    llm, whole, rounds = model(), None, 0
    whole = llm.generate

    def interrupted(*arguments, **options):  # type: ignore[no-untyped-def]
        nonlocal rounds
        rounds += 1
        if rounds == 2:
            raise KeyboardInterrupt
        return whole(*arguments, **options)

    llm.generate = interrupted  # type: ignore[method-assign]
    assert int(count_tokens(llm, ITEMS, tokens=10**6, temperature=1.0, seed=0).sum()) > 0


def test_coverage_is_the_share_of_the_most_frequent() -> None:
    counts = torch.zeros(2000, dtype=torch.long)
    counts[:1500] = 1
    counts[7] = 501
    assert coverage(counts) == {1024: pytest.approx((501 + 1023) / 2000)}


def test_the_command_keeps_a_table_that_a_trimmed_head_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BRANCHWISE_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "tiny"
    llm = model()
    llm.model.save_pretrained(folder)
    llm.tokenizer.save_pretrained(folder)
    (tmp_path / "prompts.txt").write_text("a b c\n\nt s r\n")
    said = CliRunner().invoke(
        app,
        ["calibrate", "vocab", "--model", str(folder), "--prompts", str(tmp_path / "prompts.txt"), "--tokens", "100",
         "--dtype", "float32", "--threads", "1", "--json"],
    )  # fmt: skip
    assert said.exit_code == 0, said.output
    found = json.loads(said.stdout)
    assert found["tokens"] >= 100
    assert Path(found["file"]).is_relative_to(tmp_path / "cache" / "vocab")
    counts = read_counts(llm.engine.target.info)
    kept = frequent_tokens(llm.engine.target.info, 5)
    assert int(counts[kept].min()) >= int(counts[[n for n in range(len(counts)) if n not in kept.tolist()]].max())


def test_nothing_to_count_is_refused() -> None:
    said = CliRunner().invoke(app, ["calibrate", "vocab", "--tokens", "0"])
    assert isinstance(said.exception, UsageError)
    assert "at least 1" in str(said.exception)
