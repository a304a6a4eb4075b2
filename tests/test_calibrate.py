"""Counting what a target writes: of its own text, reproducible, kept beside the model, read by a trimmed head."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from branchwise.backends.transformers.target import TransformersTarget
from branchwise.bench.prompts import Item
from branchwise.cli import app
from branchwise.draft import build_drafter, build_policy
from branchwise.draft.head.drafter import HeadDrafter
from branchwise.draft.model.vocabulary import frequent_tokens, ranked_tokens, read_counts, save_counts
from branchwise.engine import Engine
from branchwise.errors import UsageError
from branchwise.llm import LLM
from branchwise.train.corpus import Text
from branchwise.train.head.run import frequent
from branchwise.train.vocab import BATCH, count_texts, count_tokens, coverage
from branchwise.verify import VERIFIERS
from tests.heads import random_head
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
    counts, background = read_counts(llm.engine.target.info)
    assert not background.any()
    kept = frequent_tokens(llm.engine.target.info, 5)
    assert int(counts[kept].min()) >= int(counts[[n for n in range(len(counts)) if n not in kept.tolist()]].max())


def test_answers_of_training_data_are_counted_and_prompts_rank_the_rest(tmp_path: Path) -> None:
    llm = model()
    words = llm.tokenizer
    lines = [
        {"prompt": "a b c", "answer": "t s t t s t t s t", "raw": True},
        {"prompt": "a b b", "answer": "s s s s s s s s s", "raw": True, "held_out": True},
    ]
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "task.txt").write_text("r r")
    (tmp_path / "other.txt").write_text("c c c c")

    def tally(text: str) -> Counter[int]:
        return Counter(words(text, add_special_tokens=False)["input_ids"])

    def told(counts: torch.Tensor) -> Counter[int]:
        return Counter({token: count for token, count in enumerate(counts.tolist()) if count})

    found = count_texts(llm, [tmp_path / "texts.jsonl"], [tmp_path / "task.txt"], [tmp_path / "other.txt"])
    assert told(found.answers) == tally("t s t t s t t s t") + tally("r r")
    assert told(found.others) == tally("a b c") + tally("c c c c")
    assert told(found.held_out) == tally("s s s s s s s s s")


def test_what_was_never_written_is_ranked_by_other_text_and_never_by_its_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BRANCHWISE_CACHE", str(tmp_path))
    info = replace(model().engine.target.info, tokenizer=None)
    counts, background = (torch.zeros(info.vocabulary, dtype=torch.long) for _ in range(2))
    counts[[7, 3]] = torch.tensor([1, 5])
    background[[9, 7, 8]] = torch.tensor([10**6, 50, 3])
    save_counts(info, counts, {}, background)
    assert ranked_tokens(info, 3).tolist() == [3, 7, 9]
    assert ranked_tokens(info, 10).tolist() == [3, 7, 9, 8], "nothing is known of the others"
    assert frequent_tokens(info, 10).tolist() == [3, 7, 8, 9]
    assert ranked_tokens(info, info.vocabulary).tolist() == list(range(info.vocabulary))


def test_coverage_of_texts_that_were_held_out_is_by_the_order_of_the_others() -> None:
    counts, held_out = torch.zeros(2000, dtype=torch.long), torch.zeros(2000, dtype=torch.long)
    counts[:1024] = 1
    held_out[[0, 1999]] = torch.tensor([3, 1])
    assert coverage(counts, held_out) == {1024: 0.75}


def test_a_head_is_trimmed_to_what_the_target_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BRANCHWISE_CACHE", str(tmp_path))
    target = model().engine.target
    trained = random_head(target.info, table=9)
    counts = torch.arange(target.vocabulary)
    save_counts(target.info, counts, {})
    drafter = HeadDrafter(trained, trim=target.vocabulary - 4, tree=build_policy("chain:2"))
    drafter.bind(target.info)
    kept = [token for token in range(target.vocabulary - 1, 3, -1) if token in trained.table.tolist()]
    assert drafter._table.tolist() == kept
    assert torch.equal(drafter._rows, target.info.embeddings[1][kept])  # type: ignore[index]
    whole = HeadDrafter(trained, tree=build_policy("chain:2"))
    whole.bind(target.info)
    assert (drafter.cost or 0) <= (whole.cost or 0)
    with pytest.raises(UsageError, match="name one"):
        HeadDrafter(trained, table=3, trim=3)
    with pytest.raises(UsageError, match="not trim=0"):
        HeadDrafter(trained, trim=0)


def test_texts_of_a_trimmed_head_are_those_of_plain_decoding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BRANCHWISE_CACHE", str(tmp_path))
    llm = model()
    target = llm.engine.target
    save_counts(target.info, torch.arange(target.vocabulary), {})
    plain = llm.generate("a b c", max_new_tokens=12, temperature=1.0, seed=3)
    drafter = HeadDrafter(random_head(target.info), trim=5, tree=build_policy("chain:3"))
    drafted = LLM("tiny", llm.model, llm.tokenizer, Engine(target, drafter, VERIFIERS.build("match")))
    assert drafted.generate("a b c", max_new_tokens=12, temperature=1.0, seed=3).token_ids == plain.token_ids


def test_a_table_of_a_head_has_what_answers_have_and_then_what_prompts_have() -> None:
    texts = [Text(torch.tensor([8, 8, 9, 5, 5, 4]), prompt=3), Text(torch.tensor([2, 6, 4, 5]), prompt=2)]
    assert frequent(texts, 12, 3).tolist() == [5, 4, 8]
    assert frequent(texts, 12, 12).tolist()[:3] == [5, 4, 8]
    assert sorted(frequent(texts, 12, 12).tolist()) == [2, 4, 5, 6, 8, 9]


def test_nothing_to_count_is_refused() -> None:
    said = CliRunner().invoke(app, ["calibrate", "vocab", "--tokens", "0"])
    assert isinstance(said.exception, UsageError)
    assert "at least 1" in str(said.exception)
