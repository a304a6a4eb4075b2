"""Long contexts: pieces of documents with exactly as many tokens as were asked for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from branchwise.bench.documents import PIECES, long_items
from branchwise.bench.run import digest, fitting, plan
from branchwise.errors import UsageError
from tests.test_audit_model import tokenizer
from tests.test_bench_run import Rules, Scribe, ToyLLM, contest


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "b.txt").write_text("a b c " * 40)
    (tmp_path / "a.txt").write_text("t s r " * 40)
    (tmp_path / "c.jsonl").write_text(json.dumps({"turns": ["a a a " * 40]}) + "\n")
    return tmp_path


def test_a_piece_and_its_answer_have_exactly_the_length(folder: Path) -> None:
    items = long_items([folder], [32, 50], 10, None, tokenizer())
    assert [len(item.ids) for item in items if item.category == "long/32"] == [22] * PIECES
    assert [len(item.ids) for item in items if item.category == "long/50"] == [40] * PIECES
    assert len({item.id for item in items}) == len(items)


def test_pieces_are_the_documents_in_order_and_do_not_overlap(folder: Path) -> None:
    words = tokenizer()
    whole = words((folder / "a.txt").read_text(), add_special_tokens=False)["input_ids"]
    items = long_items([folder], [24], 4, 3, words)
    assert [token for item in items for token in item.ids] == whole[: 3 * 20]


def test_too_few_tokens_and_answers_that_do_not_fit_are_refused(folder: Path) -> None:
    with pytest.raises(UsageError, match="too few for a context of 100,000"):
        long_items([folder], [100_000], 10, None, tokenizer())
    with pytest.raises(UsageError, match="no room for answers of 64"):
        long_items([folder], [64], 64, None, tokenizer())
    with pytest.raises(UsageError, match="no file or folder"):
        long_items([folder / "nothing"], [64], 4, None, tokenizer())


def test_pieces_are_asked_as_they_are_and_known_by_their_tokens(folder: Path, tmp_path: Path) -> None:
    notes: list[object] = []
    items = long_items([folder], [24], 6, 2, tokenizer())
    asked = [item.__class__(**{**vars(item), "ids": tuple(token % 7 for token in item.ids)}) for item in items]
    records = contest(tmp_path / "r", ToyLLM(), [Scribe("a", notes)], asked)
    assert [record.prompt_tokens for record in records] == [18, 18]
    assert digest(asked) != digest(items)
    assert len(plan([Scribe("a", notes)], asked, Rules(max_new_tokens=1))) == 2
    assert fitting(asked, ToyLLM(), 128 - 18) == asked  # type: ignore[arg-type]
    assert fitting(asked, ToyLLM(), 128 - 17) == []  # type: ignore[arg-type]
