"""Records: a schema that is checked, lines that are whole, a file that goes on after anything."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from branchwise.bench.records import Comparison, Difference, Ledger, Record, hash_ids, read
from branchwise.errors import UsageError


def record(contestant: str = "plain", item: str = "a", turn: int = 0, round: int = 0, **other: object) -> Record:
    ids = (1, 2, 3)
    values: dict[str, object] = {
        "contestant": contestant,
        "kind": "plain" if contestant == "plain" else "method",
        "suite": "own",
        "category": "free writing",
        "item": item,
        "turn": turn,
        "round": round,
        "group": f"{contestant}/{round}/{item}",
        "state": "cold",
        "prompt_tokens": 5,
        "prompt_hash": hash_ids([9, 9]),
        "tokens": len(ids),
        "ids": ids,
        "ids_hash": hash_ids(ids),
        "text": "größer als\n„zwei“  ",
        "finish_reason": "length",
        "seconds": 1.5,
        **other,
    }
    return Record(**values)  # type: ignore[arg-type]


def test_a_record_comes_back_as_it_was_written(tmp_path: Path) -> None:
    full = record(
        steps=2,
        drafted=8,
        accepted=1,
        drafted_per_depth=(2, 2),
        accepted_per_depth=(1, 0),
        by_source={"target": 2, "ngram": 1},
        phases={"draft": 0.1},
        correct=True,
        run={"commit": "c", "arguments": {"limit": None}},
    )
    with Ledger(tmp_path / "r.jsonl") as ledger:
        ledger.add(full)
    assert read(tmp_path / "r.jsonl") == [full]
    [line] = (tmp_path / "r.jsonl").read_text().splitlines()
    assert json.loads(line)["version"] == 1
    assert set(json.loads(line)) == {field.name for field in dataclasses.fields(Record)}


def test_a_comparison_joins_its_record(tmp_path: Path) -> None:
    own = record("ngram")
    apart = Difference(place=2, token=3, expected=4, gap=0.125)
    with Ledger(tmp_path / "r.jsonl") as ledger:
        ledger.add(own)
        ledger.add(record("plain"))
        ledger.add_comparison(Comparison(own.key, False, apart))
        assert ledger.get(own.key) == dataclasses.replace(own, equal=False, difference=apart)
    assert [(r.equal, r.difference) for r in read(tmp_path / "r.jsonl")] == [(False, apart), (None, None)]


def test_every_character_of_a_text_survives(tmp_path: Path) -> None:
    odd = record(text="a\u2028b\u0085c\x0bd\x1ce\r\nf\ud83d\ude00".encode("utf-16", "surrogatepass").decode("utf-16"))
    with Ledger(tmp_path / "r.jsonl") as ledger:
        ledger.add(odd)
    assert read(tmp_path / "r.jsonl") == [odd]
    with Ledger(tmp_path / "r.jsonl") as ledger:
        assert ledger.records == [odd]


@pytest.mark.parametrize("cut", range(1, 60, 7))
def test_a_line_that_a_crash_cut_short_is_dropped(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "r.jsonl"
    first, second = record(item="a"), record(item="b")
    path.write_bytes(f"{first.line()}\n{second.line()}\n".encode()[:-cut])
    with Ledger(path) as ledger:
        assert ledger.records == [first]
        ledger.add(second)
    assert read(path) == [first, second]


def test_a_cut_inside_a_character_is_dropped_too(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    line = record(item="b").line().encode()
    path.write_bytes(record().line().encode() + b"\n" + line[: line.index("ö".encode()) + 1])
    with Ledger(path) as ledger:
        assert [r.item for r in ledger.records] == ["a"]


@pytest.mark.parametrize("content", [b'{"a": 1}', b"first\nsecond", b"\xff\xfe\n", b"notes\n", b'{"a": 1}\n{"b"'])
def test_a_file_of_somebody_else_is_refused_and_stays_as_it_is(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "mine"
    path.write_bytes(content)
    with pytest.raises(UsageError, match="mine"):
        Ledger(path)
    assert path.read_bytes() == content


def test_a_place_that_takes_no_records_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is no file that records can be written to"):
        Ledger(tmp_path)
    with pytest.raises(UsageError, match="is no file that records can be written to"):
        Ledger(Path("/dev/null"))
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match=r"cannot be written: (Not a directory|File exists)"):
        Ledger(tmp_path / "file" / "r.jsonl")


def test_a_run_that_wrote_nothing_leaves_no_file(tmp_path: Path) -> None:
    Ledger(tmp_path / "r.jsonl").close()
    assert not (tmp_path / "r.jsonl").exists()
    (tmp_path / "empty.jsonl").write_text("")
    Ledger(tmp_path / "empty.jsonl").close()
    assert (tmp_path / "empty.jsonl").exists()


def test_two_runs_cannot_write_one_file(tmp_path: Path) -> None:
    with Ledger(tmp_path / "r.jsonl"), pytest.raises(UsageError, match="Another run is writing"):
        Ledger(tmp_path / "r.jsonl")


@pytest.mark.parametrize(
    ("lines", "sentence"),
    [
        ("{", r"r\.jsonl, line 1 is no JSON"),
        ("[1]", "line 1 is no record of branchwise bench"),
        ('{"a": 1}', "line 1 is no record"),
        ('{"version": 7, "contestant": "x"}', "has version 7, and this Branchwise reads version 1"),
        ('{"version": 1, "contestant": "x"}', "line 1 is a damaged record: .*missing"),
        (record().line().replace('"turn"', '"trun"'), "line 1 is a damaged record: .*trun"),
        (f"{record().line()}\n{record().line()}", "line 2 is the second record of one request: plain, a, 0, 0"),
        (Comparison(record().key, True, None).line(), "line 1 compares an answer that the file does not hold"),
        ('{"version": 1, "compares": ["a"], "equal": true, "difference": null}', "line 1 is a damaged record"),
    ],
)
def test_a_damaged_file_is_one_sentence_with_the_line(tmp_path: Path, lines: str, sentence: str) -> None:
    path = tmp_path / "r.jsonl"
    path.write_text(lines + "\n")
    with pytest.raises(UsageError, match=sentence):
        read(path)


def test_a_file_that_is_not_there_or_no_text_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be read: No such file"):
        read(tmp_path / "none.jsonl")
    (tmp_path / "b.jsonl").write_bytes(b"\xff\xfe")
    with pytest.raises(UsageError, match="not UTF-8"):
        read(tmp_path / "b.jsonl")


def test_hashes_tell_lists_apart() -> None:
    assert hash_ids([1, 23]) != hash_ids([12, 3])
    assert hash_ids([1, 2]) == hash_ids((1, 2))
    assert hash_ids([]) != hash_ids([0])
