"""An index of texts: right against brute force, whole whatever interrupts its writing, and refused where it is not."""

from __future__ import annotations

import json
import os
import random
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast
from typer.testing import CliRunner

from branchwise.cli import app
from branchwise.errors import ModelError, UsageError
from branchwise.index import ABOUT, About, Index, Place, fingerprint, read_about, texts
from branchwise.index import build as building
from branchwise.index.build import Writer, add_texts, build_index
from branchwise.index.texts import find_files, pieces, survey, tokenised
from branchwise.models import load_tokenizer

Documents = list[list[int]]
WORDS = [f"w{number}" for number in range(50)]


@pytest.fixture(autouse=True)
def _no_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda handle: None)


def write(folder: Path, documents: Documents, vocabulary: int, shard: int = 1 << 10) -> Index:
    """An index of tokens as they are."""
    about = read_about(folder) if (folder / ABOUT).exists() else About("toy", "toy", vocabulary, (), ())
    with Writer(folder, about, shard=shard) as writer:
        for document in documents:
            writer.extend(document)
            writer.end_document()
        writer.finish(["toy"])
    return Index(folder)


def tokenizer(words: list[str] = WORDS) -> PreTrainedTokenizerFast:
    backend = Tokenizer(WordLevel({word: number for number, word in enumerate(["?", *words])}, unk_token="?"))
    backend.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="?", eos_token="?")


def held(index: Index) -> Documents:
    """The documents of an index, as they lie in its shards."""
    found: Documents = []
    for shard in index.shards:
        document: list[int] = []
        for token in shard.tokens:
            if token == index.about.vocabulary:
                found.append(document)
                document = []
            else:
                document.append(token)
        assert not document, "a shard does not end with a separator"
    return found


def joined(documents: Documents) -> list[int]:
    return [token for document in documents for token in document]


def counted(documents: Documents, pattern: list[int]) -> Counter[int | None]:
    """The slow truth: what follows a pattern; None for the end of a document."""
    size = len(pattern)
    return Counter(
        document[at + size] if at + size < len(document) else None
        for document in documents
        for at in range(len(document) - size + 1)
        if document[at : at + size] == pattern
    )


def assert_sees(index: Index, place: Place, pattern: list[int], documents: Documents) -> None:
    truth = counted(documents, pattern)
    seen = index.after(place, hits=10**6)
    assert {token: count for token, count, _ in seen.counts} == {t: n for t, n in truth.items() if t is not None}
    assert (seen.hits, seen.length) == (sum(truth.values()), len(pattern))
    assert [(-count, token) for token, count, _ in seen.counts] == sorted((-n, t) for t, n, _ in seen.counts)
    for token, _, behind in seen.counts:
        assert_sees(index, behind, [*pattern, token], documents)


def documents_of(vocabulary: int, longest: int = 40) -> st.SearchStrategy[Documents]:
    document = st.lists(st.integers(0, vocabulary - 1), min_size=1, max_size=longest)
    return st.lists(document, min_size=1, max_size=6)


@settings(max_examples=60)
@given(st.data(), st.sampled_from([1, 2, 3, 255, 256, 65535, 65536, 200_000]), st.sampled_from([2, 3, 16, 1 << 10]))
def test_suffixes_are_in_order(data: st.DataObject, vocabulary: int, shard: int) -> None:
    few = data.draw(st.lists(st.integers(0, vocabulary - 1), min_size=1, max_size=3))
    document = st.lists(st.sampled_from(few), min_size=1, max_size=30)
    documents = data.draw(st.lists(document, min_size=1, max_size=5))
    with tempfile.TemporaryDirectory() as folder:
        index = write(Path(folder), documents, vocabulary, shard)
        for part in index.shards:
            tokens = part.tokens.tolist()
            assert len(tokens) <= shard
            assert part.suffixes.tolist() == sorted(range(len(tokens)), key=lambda at: tokens[at:])
            for token in {*few, 0, vocabulary - 1}:
                assert part.firsts[token] == sum(other < token for other in tokens)
                assert part.firsts[token + 1] == sum(other <= token for other in tokens)
        assert joined(held(index)) == joined(documents)
        assert index.about.tokens == sum(map(len, documents))


@settings(max_examples=60)
@given(st.data(), documents_of(3), st.integers(1, 3), st.integers(0, 9))
def test_what_is_found_is_what_brute_force_finds(
    data: st.DataObject, documents: Documents, least: int, more: int
) -> None:
    document = data.draw(st.sampled_from(documents))
    end = data.draw(st.integers(1, len(document)))
    text = (
        data.draw(st.lists(st.integers(0, 4), max_size=4)) + document[max(0, end - data.draw(st.integers(0, 9))) : end]
    )
    with tempfile.TemporaryDirectory() as folder:
        index = write(Path(folder), documents, 3, shard=24)
        inside, most = held(index), least + more
        lengths = [n for n in range(least, min(most, len(text)) + 1) if counted(inside, text[-n:])]
        place = index.find(text, most, least)
        assert (place and place.length) == (max(lengths) if lengths else None)
        if place:
            assert_sees(index, place, text[-place.length :], inside)


@settings(max_examples=40)
@given(documents_of(4, longest=200), st.integers(1, 9), st.integers(1, 3))
def test_hits_are_bounded_and_spread(documents: Documents, hits: int, first: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        index = write(Path(folder), documents, 4, shard=64)
        place = index.find([first], least=1)
        truth = counted(held(index), [first])
        if place is None:
            assert not truth
            return
        seen = index.after(place, hits)
        total, stride = sum(truth.values()), -(-sum(truth.values()) // hits)
        assert 1 <= seen.hits <= hits
        assert abs(seen.hits - total / stride) < 1  # no fewer than evenly spaced ones
        for token, count, behind in seen.counts:
            assert count <= truth[token]
            # Whatever was not looked at is still there behind it.
            assert index.after(behind, 10**6).hits == truth[token]
        assert len(index.after(place, hits, most=1).counts) <= 1


def test_a_frequent_token_is_seen_in_its_share(tmp_path: Path) -> None:
    rng = random.Random(0)
    documents = [[0, 1 if rng.random() < 0.75 else 2] for _ in range(4000)]
    index = write(tmp_path / "index", documents, 3, shard=1 << 11)
    assert len(index.shards) > 3
    place = index.find([0], least=1)
    assert place is not None
    seen = index.after(place)
    assert seen.hits <= 64
    assert [token for token, _, _ in seen.counts] == [1, 2]
    assert seen.counts[0][1] / seen.hits == pytest.approx(0.75, abs=0.06)  # evenly spaced over sorted: hardly any noise


def test_one_megabyte_of_text_is_searched_as_bytes_are(tmp_path: Path) -> None:
    root = Path(__file__).parents[1]
    files = sorted([*root.glob("src/**/*.py"), *root.glob("tests/**/*.py"), *root.glob("docs/*.md")])
    text = b"".join(file.read_bytes() for file in files)
    text = (text * (1_000_000 // len(text) + 1))[:1_000_000]
    cut = 700_000
    index = write(tmp_path / "index", [list(text[:cut]), list(text[cut:])], 256, shard=cut + 1)
    assert len(index.shards) == 2
    for shard in index.shards:
        assert sorted(shard.suffixes) == list(range(len(shard.tokens)))
    rng = random.Random(1)
    for _ in range(60):
        at, size = rng.randrange(len(text) - 40), rng.randint(1, 16)
        pattern = text[at : at + size]
        if rng.random() < 0.3:
            pattern = bytes([rng.randrange(256)]) + pattern[1:]
        ends = [m.end(1) for m in re.finditer(b"(?=(" + re.escape(pattern) + b"))", text)]
        ends = [end for end in ends if not end - size < cut < end]
        place = index.find(list(pattern), 16, size)
        assert (place is None) == (not ends)
        if place is not None:
            seen = index.after(place, hits=10**7)
            truth = Counter(text[end] for end in ends if end not in (cut, len(text)))
            assert {token: count for token, count, _ in seen.counts} == truth
            assert seen.hits == len(ends)


def test_no_continuation_crosses_documents_or_shards(tmp_path: Path) -> None:
    index = write(tmp_path / "index", [[1, 2], [3, 4], [1, 2]], 5)
    assert index.find([2, 3]) is None
    place = index.find([1, 2])
    assert place is not None
    assert index.after(place).counts == []
    assert index.after(place).hits == 2
    assert index.find([1, 5]) is None, "the separator is no token"
    assert index.find([5, 1, 2]) is not None
    assert index.find([-1]) is None
    assert index.find([]) is None


def test_a_place_of_a_token_that_does_not_follow_holds_nothing(tmp_path: Path) -> None:
    index = write(tmp_path / "index", [[1, 2, 3], [1, 2, 0], [1, 2, 3]], 5)
    place = index.find([1, 2])
    assert place is not None
    for token, count in enumerate([1, 0, 0, 2, 0]):
        assert index.after(place._replace(token=token)) == ([], count, 3)


# Writing


@settings(max_examples=40)
@given(documents_of(4), documents_of(4), st.sampled_from([2, 5, 9, 16, 1 << 10]))
def test_adding_is_building_of_both(first: Documents, second: Documents, shard: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder) / "grown", first, 4, shard)
        grown = write(Path(folder) / "grown", second, 4, shard)
        whole = write(Path(folder) / "whole", first + second, 4, shard)
        grown.check()
        sums = [[[file.sha256 for file in part.files] for part in index.about.parts] for index in (grown, whole)]
        assert sums[0] == sums[1]
        assert sorted(os.listdir(Path(folder) / "grown")) == sorted(
            [ABOUT, *(file.name for part in grown.about.parts for file in part.files)]
        )


def test_texts_are_added_with_the_same_tokenizer_only(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("w1 w2 w3 w4")
    (tmp_path / "b.txt").write_text("w5 w6")
    build_index(tmp_path / "index", [tmp_path / "a.txt"], tokenizer(), model="tiny")
    about = add_texts(tmp_path / "index", [tmp_path / "b.txt"], tokenizer())
    assert about.sources == ("a.txt", "b.txt")
    assert held(Index(tmp_path / "index")) == [[2, 3, 4, 5], [6, 7]]
    with pytest.raises(UsageError, match="tokenizer of tiny, and this is another"):
        add_texts(tmp_path / "index", [tmp_path / "b.txt"], tokenizer(WORDS[1:]))


def test_a_fingerprint_belongs_to_tokens_and_their_numbers() -> None:
    assert fingerprint(tokenizer()) == fingerprint(tokenizer())
    assert fingerprint(tokenizer()) != fingerprint(tokenizer(WORDS[::-1]))
    assert fingerprint(tokenizer()) != fingerprint(tokenizer([*WORDS, "more"]))


def stages(monkeypatch: pytest.MonkeyPatch) -> dict[str, Callable[[], None]]:
    """Where an interruption may fall."""

    def at(module: Any, name: str, calls: int = 1) -> None:
        real, left = getattr(module, name), [calls]

        def interrupted(*given: Any, **options: Any) -> Any:
            left[0] -= 1
            if left[0] <= 0:
                raise KeyboardInterrupt
            return real(*given, **options)

        monkeypatch.setattr(module, name, interrupted)

    def after(module: Any, name: str) -> None:
        real = getattr(module, name)

        def interrupted(*given: Any) -> None:
            real(*given)
            raise KeyboardInterrupt

        monkeypatch.setattr(module, name, interrupted)

    return {
        "sorting": lambda: at(building, "_sorted_suffixes"),
        "second shard": lambda: at(building, "_sorted_suffixes", 2),
        "table": lambda: at(building, "_firsts"),
        "disk": lambda: at(os, "fsync", 2),
        "last look": lambda: at(building, "_sync_folder"),
        "before the switch": lambda: at(os, "replace"),
        "after the switch": lambda: after(os, "replace"),
    }


@pytest.mark.parametrize("killed", [False, True], ids=["interrupted", "killed"])
@pytest.mark.parametrize("stage", stages(pytest.MonkeyPatch()))
def test_an_interruption_leaves_the_old_index_or_the_new_one(
    stage: str, killed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "index"
    old, new = [[1, 2, 3], [1, 2, 4]], [[2, 1, 2, 3]] * 5
    before = write(folder, old, 5, shard=16).about
    with monkeypatch.context() as patch:
        if killed:  # nothing is tidied up
            patch.setattr(Writer, "_sweep", lambda self: None)
        stages(patch)[stage]()
        with pytest.raises(KeyboardInterrupt):
            write(folder, new, 5, shard=16)
    index = Index(folder)
    index.check()
    done = stage == "after the switch"
    assert joined(held(index)) == joined(old + new if done else old)
    if not done:
        assert index.about == before
    if not killed:
        assert len(os.listdir(folder)) == 1 + 3 * len(index.about.parts)
    again = write(folder, [] if done else new, 5, shard=16)
    assert joined(held(again)) == joined(old + new)
    assert len(os.listdir(folder)) == 1 + 3 * len(again.about.parts), "something was left behind"


@pytest.mark.parametrize("stage", [name for name in stages(pytest.MonkeyPatch()) if name != "after the switch"])
def test_an_interrupted_build_leaves_nothing(stage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        stages(patch)[stage]()
        with pytest.raises(KeyboardInterrupt):
            write(tmp_path / "index", [[1, 2, 3]] * 9, 5, shard=16)
    assert not (tmp_path / "index").exists()


def test_a_killed_build_can_be_built_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.txt").write_text("w1 w2 w3 w4")
    with monkeypatch.context() as patch:
        patch.setattr(Writer, "_sweep", lambda self: None)
        stages(patch)["before the switch"]()
        with pytest.raises(KeyboardInterrupt):
            build_index(tmp_path / "index", [tmp_path / "a.txt"], tokenizer(), model="tiny")
    assert len(os.listdir(tmp_path / "index")) == 4
    build_index(tmp_path / "index", [tmp_path / "a.txt"], tokenizer(), model="tiny")
    assert len(os.listdir(tmp_path / "index")) == 4


def test_only_an_index_is_replaced_and_only_by_force(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("w1 w2 w3 w4")
    (tmp_path / "b.txt").write_text("w5 w6")
    folder = tmp_path / "index"

    def build(force: bool) -> About:
        return build_index(folder, [tmp_path / "b.txt"], tokenizer(), model="tiny", force=force)

    build_index(folder, [tmp_path / "a.txt"], tokenizer(), model="tiny")
    with pytest.raises(UsageError, match="index add, or replace it with --force"):
        build(False)
    assert build(True).tokens == 2
    assert len(os.listdir(folder)) == 4
    (folder / ABOUT).write_text("{ damaged")
    assert build(True).tokens == 2
    assert len(os.listdir(folder)) == 4
    (folder / "notes.txt").write_text("mine")
    build(True)
    assert (folder / "notes.txt").read_text() == "mine"
    (folder / ABOUT).write_text('{"pages": []}')
    for force in (False, True):
        with pytest.raises(UsageError, match="of something else"):
            build(force)
    with pytest.raises(UsageError, match="is no index; name another folder"):
        build_index(tmp_path, [tmp_path / "b.txt"], tokenizer(), model="tiny", force=True)
    folder = tmp_path / "a.txt"
    with pytest.raises(UsageError, match="is a file"):
        build(True)


def test_two_do_not_write_one_index(tmp_path: Path) -> None:
    folder = tmp_path / "index"
    about = write(folder, [[1, 2]], 5).about
    with Writer(folder, about) as first:
        with pytest.raises(UsageError, match="by another process; wait"), Writer(folder, about):
            pass
        first.extend([3])
        first.finish(["x"])
    with pytest.raises(UsageError, match="changed by another process"), Writer(folder, about):
        pass
    assert joined(held(Index(folder))) == [1, 2, 3]


# Damage


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    write(tmp_path / "index", [rng.integers(0, 9, 9000).tolist()], 9, shard=1 << 14)
    return tmp_path / "index"


def one(folder: Path, kind: str) -> Path:
    return next(folder.glob(f"*.{kind}"))


def change_about(folder: Path, **values: Any) -> None:
    found = json.loads((folder / ABOUT).read_text())
    (folder / ABOUT).write_text(json.dumps({**found, **values}))


def flip(file: Path, at: int) -> None:
    raw = bytearray(file.read_bytes())
    raw[at] ^= 1
    file.write_bytes(raw)


@pytest.mark.parametrize("kind", ["tokens", "suffixes", "firsts"])
def test_truncated_or_changed_files_are_refused(folder: Path, kind: str) -> None:
    file = one(folder, kind)
    whole = file.read_bytes()
    for damaged in (whole[:-1], whole + b"\0", b""):
        file.write_bytes(damaged)
        with pytest.raises(UsageError, match=f"damaged: {file.name} has {len(damaged)} bytes and not {len(whole)}"):
            Index(folder)
    for at in (0, -1):
        file.write_bytes(whole)
        flip(file, at)
        with pytest.raises(UsageError, match="is not what was written; build it again"):
            Index(folder)
    file.unlink()
    with pytest.raises(UsageError, match=r"cannot be read \(No such file"):
        Index(folder)


def test_one_bit_in_the_middle_is_found_by_a_check(folder: Path) -> None:
    Index(folder).check()
    flip(one(folder, "suffixes"), 18_000)
    index = Index(folder)
    with pytest.raises(UsageError, match="suffixes is not what was written"):
        index.check()
    flip(one(folder, "suffixes"), 18_000)
    flip(one(folder, "tokens"), 9_000)
    with pytest.raises(UsageError, match="damaged"), Writer(folder, index.about):
        pass


def test_damage_that_nobody_noticed_proposes_nothing_from_outside(folder: Path) -> None:
    """Arrays of any content: every answer is of tokens, or a sentence."""
    rng = np.random.default_rng(3)
    index, refused = Index(folder), 0
    for kind in ("tokens", "suffixes", "firsts"):
        file = one(folder, kind)
        whole = file.read_bytes()
        raw = rng.bytes(len(whole))
        file.write_bytes(raw)
        parts = json.loads((folder / ABOUT).read_text())["shards"]
        parts[0][kind]["ends"] = index.about.parts[0].tokens.ends
        patched = pytest.MonkeyPatch()
        patched.setattr("branchwise.index.ends_of", lambda first, last: None)
        for shard in parts:
            for name in ("tokens", "suffixes", "firsts"):
                shard[name]["ends"] = None
        change_about(folder, shards=parts)
        broken = Index(folder)
        patched.undo()
        for first in range(9):
            for second in range(9):
                try:
                    place = broken.find([first, second], least=1)
                    found = [] if place is None else broken.after(place).counts
                    found += [entry for _, _, behind in found for entry in broken.after(behind).counts]
                except UsageError:
                    refused += 1
                else:
                    assert all(0 <= token < 9 for token, _, _ in found)
        file.write_bytes(whole)
    assert refused


def test_what_is_no_index_is_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"There is no index .*nowhere; build one with: branchwise index build"):
        Index(tmp_path / "nowhere")
    with pytest.raises(UsageError, match=r"is no index: there is no index\.json"):
        Index(tmp_path)
    change_about(folder, version=2)
    with pytest.raises(UsageError, match=r"has format 2, and this Branchwise reads formats up to 1; update"):
        Index(folder)
    change_about(folder, version=1, format="other")
    with pytest.raises(UsageError, match="of something else"):
        Index(folder)


@pytest.mark.parametrize(
    "values",
    [
        {"tokens": 7},
        {"width": 4},
        {"vocabulary": 10},
        {"vocabulary": "many"},
        {"shards": []},
        {"shards": None},
        {"shards": [{}]},
        {"sources": None},
        {"model": ...},
    ],
    ids=str,
)
def test_an_index_that_does_not_hold_together_is_refused(folder: Path, values: dict[str, Any]) -> None:
    found = json.loads((folder / ABOUT).read_text()) | values
    (folder / ABOUT).write_text(json.dumps({key: value for key, value in found.items() if value is not ...}))
    with pytest.raises(UsageError, match=r"damaged: index.json does not hold together; build it again"):
        Index(folder)


def test_a_file_of_an_index_lies_in_its_folder(folder: Path) -> None:
    parts = json.loads((folder / ABOUT).read_text())["shards"]
    name = parts[0]["tokens"]["name"]
    (folder.parent / name).write_bytes((folder / name).read_bytes())
    parts[0]["tokens"]["name"] = f"../{name}"
    change_about(folder, shards=parts)
    with pytest.raises(UsageError, match="does not hold together"):
        Index(folder)
    (folder / ABOUT).write_text((folder / ABOUT).read_text()[:-9])
    with pytest.raises(UsageError, match=r"index.json cannot be read"):
        Index(folder)


# Texts


def test_a_long_file_is_read_in_pieces_that_end_with_lines(tmp_path: Path) -> None:
    rng = random.Random(0)
    lines = ["".join(rng.choice("ab ") for _ in range(rng.randint(0, 300))) + "\n" for _ in range(2500)]
    lines[1000:1000] = ["x" * 200_000 + " " + "y" * 200_000 + "\n", "z " * 200_000 + "\n"]
    (tmp_path / "a.txt").write_text("".join(lines))
    found = list(pieces(tmp_path / "a.txt"))
    assert "".join(text for text, _ in found) == "".join(lines)
    assert [last for _, last in found] == [False] * (len(found) - 1) + [True]
    assert max(len(text) for text, _ in found) <= 2 * texts.PIECE
    assert sum(text.endswith("\n") for text, _ in found) > len(found) / 3


def test_batches_join_pieces_and_leave_none_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(texts, "PIECE", 64)
    monkeypatch.setattr(texts, "BATCH", 300)
    rng = random.Random(0)
    words = [[rng.choice(WORDS) for _ in range(rng.randint(1, 200))] for _ in range(9)]
    for number, document in enumerate(words):
        (tmp_path / f"{number}.txt").write_text(" ".join(document))
    files = find_files([tmp_path])
    found: Documents = [[]]
    characters = 0
    for tokens, last, size in tokenised(files, tokenizer()):
        found[-1] += tokens
        characters += size
        if last:
            found.append([])
    assert found == [*([WORDS.index(word) + 1 for word in document] for document in words), []]
    assert characters == survey(files)


def test_json_lines_are_documents(tmp_path: Path) -> None:
    rows = [{"text": "w1 w2"}, {"prompt": "w3", "id": 4}, {"turns": ["w5", "w6"]}, {"question": "w7", "answer": "w8"}]
    (tmp_path / "a.jsonl").write_text("\n\n".join(map(json.dumps, rows)) + "\n")
    build_index(tmp_path / "index", [tmp_path], tokenizer(), model="tiny")
    assert held(Index(tmp_path / "index")) == [[2, 3], [4], [6, 7], [8]]


def test_folders_are_read_by_endings_and_every_file_once(tmp_path: Path) -> None:
    for name in ("b/x.py", "a.md", "c.bin", ".git/d.txt", "b/.e.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("w1")
    found = find_files([tmp_path / "c.bin", tmp_path, tmp_path / "b" / ".." / "a.md"])
    assert [file.name for file in found] == ["c.bin", "a.md", "x.py"]


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.txt", b"w1 \xff", "a.txt is not UTF-8 text"),
        ("a.jsonl", b'{"text": "w1"}\n{"text', "Line 2 of .*a.jsonl is not JSON"),
        ("a.jsonl", b'{"other": "w1"}', "Line 1 of .* has no text; it must be a JSON object with one of text, "),
        ("a.jsonl", b"[1]", "Line 1 of .* has no text"),
        ("a.jsonl", b'{"text": 1}', "something else than text in 'text'"),
        ("a.jsonl", b'{"text": "\\ud800"}', "half of a surrogate pair"),
        ("a.txt", b"", "There is no text in these files"),
        ("a.bin", b"w1", "holds no text that is known by its ending"),
    ],
)
def test_what_cannot_be_read_is_told_before_anything_is_written(
    tmp_path: Path, name: str, content: bytes, words: str
) -> None:
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / name).write_bytes(content)
    with pytest.raises(UsageError, match=words):
        build_index(tmp_path / "index", [tmp_path / "texts"], tokenizer(), model="tiny")
    assert not (tmp_path / "index").exists()


def test_text_of_which_no_token_is_left_makes_no_index(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("  \n ")
    with pytest.raises(UsageError, match="There is no text"):
        build_index(tmp_path / "index", [tmp_path / "a.txt"], tokenizer(), model="tiny")
    assert not (tmp_path / "index").exists()
    with pytest.raises(UsageError, match="There is no file or folder"):
        find_files([tmp_path / "nothing"])


# The commands


def test_a_tokenizer_is_loaded_without_its_weights(tmp_path: Path) -> None:
    tokenizer().save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama", "architectures": ["LlamaForCausalLM"]}')
    (tmp_path / "model.safetensors").write_bytes(b"no weights at all")
    assert fingerprint(load_tokenizer(str(tmp_path))) == fingerprint(tokenizer())
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ModelError):
        load_tokenizer(str(tmp_path))


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    asked: list[str] = []

    def load_tokenizer(name: str, **options: Any) -> PreTrainedTokenizerFast:
        asked.append(name)
        return tokenizer()

    monkeypatch.setattr("branchwise.models.load_tokenizer", load_tokenizer)

    def invoke(*words: object) -> Any:
        return CliRunner().invoke(app, ["index", *map(str, words)])

    invoke.asked = asked  # type: ignore[attr-defined]
    return invoke  # type: ignore[return-value]


def test_the_commands_build_add_and_tell(run: Any, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("w1 w2 w3")
    (tmp_path / "b.md").write_text("w4 w5")
    built = run("build", tmp_path / "a.txt", "--model", "tiny", "--out", tmp_path / "index")
    assert built.exit_code == 0, built.output
    assert "3 tokens of 1 documents in 1 shard" in built.stdout
    assert f"--draft retrieval:{tmp_path / 'index'}" in built.stdout
    added = run("add", tmp_path / "index", tmp_path / "b.md", "--json")
    assert json.loads(added.stdout)["tokens"] == 5
    assert run.asked == ["tiny", "tiny"]
    told = json.loads(run("info", tmp_path / "index", "--check", "--json").stdout)
    assert told["sources"] == ["a.txt", "b.md"]
    assert told["model"] == "tiny"
    assert (told["documents"], told["version"]) == (2, 1)
    assert told["bytes"] == sum(file.stat().st_size for file in (tmp_path / "index").glob("*.*s"))
    assert "from a.txt, b.md" in run("info", tmp_path / "index").stdout


def test_the_commands_refuse_before_they_load_anything(run: Any, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("w1 w2 w3")
    refused = run("build", tmp_path / "a.txt", "--out", tmp_path)
    assert isinstance(refused.exception, UsageError)
    assert isinstance(run("add", tmp_path / "no", tmp_path / "a.txt").exception, UsageError)
    assert isinstance(run("info", tmp_path).exception, UsageError)
    assert run.asked == []
    assert run("build", "--out", tmp_path / "index").exit_code == 2


def test_info_checks_only_when_asked(run: Any, folder: Path) -> None:
    flip(one(folder, "tokens"), 9_000)
    assert run("info", folder).exit_code == 0
    assert isinstance(run("info", folder, "--check").exception, UsageError)


def test_reading_an_index_needs_no_library_to_sort_or_count(folder: Path) -> None:
    import subprocess
    import sys

    code = (
        "import sys\nfor name in ('numpy', 'pydivsufsort', 'torch'): sys.modules[name] = None\n"
        f"from branchwise.index import Index\nassert Index({str(folder)!r}).find([1, 2]).length == 2"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=40))
def test_without_the_package_numpy_sorts_the_suffixes_alike(tokens: list[int]) -> None:
    shard = np.array([*tokens, 4], dtype="<u2")
    expected = sorted(range(len(shard)), key=lambda start: shard[start:].tolist())
    assert np.concatenate([*building._sorted_suffixes(shard, 4)]).tolist() == expected
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "pydivsufsort", None)
        assert np.concatenate([*building._sorted_suffixes(shard, 4)]).tolist() == expected
