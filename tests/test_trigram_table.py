"""Tri-grams of a corpus: what is counted, what a drafter begins with, and files that cannot be used."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from branchwise.cli import app
from branchwise.core.sampling import SamplingParams
from branchwise.core.sequence import SequenceState
from branchwise.draft import build_drafter
from branchwise.draft.base import Budget
from branchwise.draft.builder import Candidate
from branchwise.draft.lookup import table as counted
from branchwise.draft.lookup.table import FORMAT, WEIGHT, Counting, TrigramTable
from branchwise.draft.policies.puct import Puct
from branchwise.engine import Engine, Request
from branchwise.errors import ModelError, PairingError, UsageError
from branchwise.methods import find_any
from branchwise.testing import ToyTarget
from branchwise.verify import VERIFIERS

VOCABULARY = 6


def documents(seed: int, count: int = 5) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(VOCABULARY) for _ in range(rng.randrange(60))] for _ in range(count)]


def count(texts: list[list[int]], pieces: int = 7, **options: Any) -> TrigramTable:
    counting = Counting(VOCABULARY)
    for text in texts:
        for start in range(0, len(text), pieces):
            counting.extend(text[start : start + pieces])
        counting.end_document()
    return counting.table("toy", "toy", **options)


def truth(texts: list[list[int]]) -> dict[tuple[int, int], Counter[int]]:
    found: dict[tuple[int, int], Counter[int]] = {}
    for text in texts:
        for a, b, c in zip(text, text[1:], text[2:], strict=False):
            found.setdefault((a, b), Counter())[c] += 1
    return found


def as_dict(table: TrigramTable) -> dict[tuple[int, int], dict[int, int]]:
    return {
        (int(pair) // VOCABULARY, int(pair) % VOCABULARY): dict(
            zip(table.tokens[start:end].tolist(), table.counts[start:end].tolist(), strict=True)
        )
        for pair, start, end in zip(table.pairs, table.starts, table.starts[1:], strict=False)
    }


@pytest.mark.parametrize("at_once", [3, 20, 1 << 22])
@pytest.mark.parametrize("seed", range(3))
def test_every_tri_gram_of_a_document_is_counted_once(seed: int, at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counted, "AT_ONCE", at_once)
    texts = documents(seed)
    table = count(texts)
    assert as_dict(table) == truth(texts)
    assert table.read == sum(map(len, texts))


def test_the_most_frequent_successors_of_the_most_frequent_pairs_stay() -> None:
    texts = documents(1, 20)
    whole = truth(texts)
    cut = as_dict(count(texts, successors=2, size=9))
    assert len(cut) == 9
    least = min(sum(whole[pair].values()) for pair in cut)
    assert all(sum(row.values()) <= least for pair, row in whole.items() if pair not in cut)
    for pair, row in cut.items():
        assert sorted(row.values()) == sorted(whole[pair].values())[-2:]
        assert list(row.values()) == sorted(row.values(), reverse=True)


def test_what_is_not_in_the_corpus_has_no_successors_and_counts_are_scaled() -> None:
    table = count([[1, 2, 3] * 40 + [1, 2, 4]])
    assert table.after((1, 2), 9) == {4: 1, 3: WEIGHT}
    assert table.after((1, 2), 1) == {3: WEIGHT}
    assert table.after((5, 5), 9) == table.after((0, 0), 9) == {}
    assert len(count([])) == 0
    assert count([]).after((1, 2), 9) == {}


def test_a_drafter_begins_with_the_corpus_and_learns_what_is_written(tmp_path: Path) -> None:
    file = tmp_path / "corpus.safetensors"
    count([[1, 2, 3] * 40]).write(file)
    drafter: Any = build_drafter(f"trigram:table={file}")
    drafter.bind(ToyTarget(VOCABULARY).info)
    assert [(c.token, c.mass) for c in drafter.candidates((1, 2))] == [(3, WEIGHT / (WEIGHT + 1))]
    assert drafter.candidates((4, 4)) == []
    text = SequenceState([0, 1, 2, 5], SamplingParams())
    drafter.locate(text)
    assert [(c.token, c.mass) for c in drafter.candidates((1, 2))] == [
        (3, WEIGHT / (WEIGHT + 3)),
        (5, 1 / (WEIGHT + 3)),
    ]
    for _ in range(WEIGHT + 1):
        text.tokens += [1, 2, 5]
    drafter.locate(text)
    assert drafter.candidates((1, 2))[0].token == 5, "what is written outweighs the corpus"
    assert build_drafter("trigram").candidates((1, 2)) == []  # type: ignore[attr-defined]


def test_texts_are_those_of_plain_decoding_and_more_of_them_is_drafted(tmp_path: Path) -> None:
    def run(draft: str, tree: str | None) -> Any:
        engine = Engine(ToyTarget(VOCABULARY), build_drafter(draft, tree), VERIFIERS.build("match"))
        text = engine.submit(Request((1, 2), SamplingParams(), max_new_tokens=30))
        while engine.busy:
            engine.step()
        return text

    plain = run("none", None)
    file = tmp_path / "corpus.safetensors"
    count([[1, 2, *plain.token_ids]]).write(file)
    with_table, without = run(f"trigram:table={file}", "puct:12"), run("trigram", "puct:12")
    assert with_table.token_ids == without.token_ids == plain.token_ids
    assert with_table.stats.steps < without.stats.steps


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda file: file.unlink(), "There is no tri-gram table"),
        (lambda file: file.write_bytes(file.read_bytes()[:-9]), "is damaged"),
        (lambda file: file.write_text("hello"), "is damaged"),
    ],
)
def test_a_damaged_table_is_one_sentence(spoil: Callable[[Path], object], words: str, tmp_path: Path) -> None:
    file = tmp_path / "corpus.safetensors"
    count(documents(0)).write(file)
    assert as_dict(TrigramTable.load(file)) == as_dict(count(documents(0)))
    spoil(file)
    with pytest.raises(ModelError, match=f"{words}.*branchwise index trigrams FILES --out FILE") as raised:
        build_drafter(f"trigram:table={file}")
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("name", ["pairs", "starts", "tokens", "counts"])
def test_numbers_that_do_not_fit_together_are_refused(name: str, tmp_path: Path) -> None:
    file = tmp_path / "corpus.safetensors"
    count(documents(0)).write(file)
    known, tensors = FORMAT.read(file, lambda known, tensors: (known, tensors))
    for wrong in (tensors[name] - 99999, tensors[name][1:]):
        FORMAT.write(file, known, tensors | {name: wrong})
        with pytest.raises(ModelError, match="do not fit together"):
            TrigramTable.load(file)


def test_a_table_of_another_tokenizer_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "corpus.safetensors"
    count(documents(0)).write(file)
    with pytest.raises(PairingError, match="counted with the tokenizer of toy, and the target has another"):
        Engine(ToyTarget(VOCABULARY - 1), build_drafter(f"trigram:table={file}"), VERIFIERS.build("match"))
    with pytest.raises(UsageError, match="cannot be counted"):
        Counting(1 << 21)


def test_a_method_may_name_a_file_in_a_folder() -> None:
    method = find_any("trigram:table=a/b.safetensors/puct:24,c1=8/match")
    assert (method.draft, method.tree, method.verify) == ("trigram:table=a/b.safetensors", "puct:24,c1=8", "match")


def test_the_command_counts_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Words:
        def get_vocab(self) -> dict[str, int]:
            return {letter: number for number, letter in enumerate("abcdef")}

        def __call__(self, texts: list[str], **_: Any) -> dict[str, list[list[int]]]:
            return {"input_ids": [["abcdef".index(letter) for letter in text.strip()] for text in texts]}

    monkeypatch.setattr("branchwise.models.load_tokenizer", lambda *_, **__: Words())
    (tmp_path / "one.txt").write_text("abcabd")
    (tmp_path / "two.txt").write_text("abc")
    out = tmp_path / "table.safetensors"
    words = ["index", "trigrams", str(tmp_path / "one.txt"), str(tmp_path / "two.txt"), "--out", str(out)]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    assert f"--draft trigram:table={out} --tree puct:24" in done.output
    assert TrigramTable.load(out).after((0, 1), 9) == {3: 1, 2: 2}
    found = json.loads(CliRunner().invoke(app, [*words, "--json"]).output)
    assert (found["tokens"], found["pairs"], found["trigrams"]) == (9, 3, 4)
    (tmp_path / "other").write_text("a letter")
    assert isinstance(CliRunner().invoke(app, [*words[:-1], str(tmp_path / "other")]).exception, UsageError)


def test_the_constants_of_the_search_are_options() -> None:
    def tree(**options: float) -> list[int]:
        masses = {(): [0.5, 0.45], (0,): [0.1], (1,): [0.99]}  # the second leads to more

        def candidates(path: Any) -> list[Any]:
            found = masses.get(path, [])
            return [Candidate(token, mass, (*path, token)) for token, mass in enumerate(found)]

        return Puct(1, simulations=60, length=2, **options).lay(0, (), candidates, Budget(99, 9)).tokens

    assert tree() == tree(c1=32.0, c2=8.0)
    assert (tree(c1=0.0, c2=1e9), tree(c1=1000.0)) == ([0, 1], [0, 0])
    assert tree(c1=0.0, c2=1e-300) == [0, 0], "a small c2 makes masses count from the first visit on"
    for options in ({"c1": -1.0}, {"c2": 0.0}, {"c1": float("nan")}):
        with pytest.raises(UsageError, match="as in puct:24,c1=32,c2=8"):
            Puct(4, **options)
