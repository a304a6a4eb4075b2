"""Loaders of prompt files: every form, every damage, and the published sets where they lie beside the repository."""

from __future__ import annotations

import gzip
import json
import pickle
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from branchwise.bench.prompts import MT_BENCH, SUITES, executing, find_suite, load_items, own_items, read_items
from branchwise.bench.run import digest
from branchwise.cli import app
from branchwise.errors import UnknownName, UsageError

PUBLISHED = Path(__file__).parents[2] / "shared" / "prompts"
needs_published = pytest.mark.skipif(
    not PUBLISHED.is_dir(), reason="the published sets do not lie beside this checkout"
)

DIALOGUE = {"question_id": 7, "category": "writing", "turns": ["Write.", "Write again."]}
FUNCTION = {"task_id": "HumanEval/3", "prompt": "def three():\n    ", "entry_point": "three"}
TESTED = FUNCTION | {"test": "def check(candidate):\n    assert candidate() == 3\n"}
PROBLEM = {"question": "How many?", "answer": "Two and two.\n#### 1,004"}


def write(path: Path, *lines: dict[str, Any] | str) -> Path:
    text = "".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines)
    data = text.encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


@pytest.fixture(autouse=True)
def no_folder_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("BRANCHWISE_DATA", raising=False)


# The published sets.


@needs_published
def test_spec_bench_has_480_items_in_its_thirteen_categories() -> None:
    items = load_items(suites=["spec-bench"], folder=PUBLISHED)
    tasks = ("translation", "summarization", "qa", "math_reasoning", "rag")
    assert Counter(item.category for item in items) == dict.fromkeys(MT_BENCH, 10) | dict.fromkeys(tasks, 80)
    assert len({item.id for item in items}) == 480
    assert items[0].id == "spec-bench/81"
    assert {len(item.turns) for item in items if item.category in MT_BENCH} == {2}
    assert not any(item.raw or item.check for item in items)


@needs_published
def test_mt_bench_is_found_inside_spec_bench() -> None:
    items = load_items(suites=["mt-bench"], folder=PUBLISHED)
    assert Counter(item.category for item in items) == dict.fromkeys(MT_BENCH, 10)
    assert {item.suite for item in items} == {"mt-bench"}
    assert items[0].id == "mt-bench/81"


@needs_published
def test_humaneval_has_164_texts_to_continue_as_they_are() -> None:
    items = load_items(suites=["humaneval"], folder=PUBLISHED)
    assert len({item.id for item in items}) == 164
    assert all(item.raw and item.category == "code" for item in items)


@needs_published
def test_every_published_solution_of_gsm8k_passes_its_own_check() -> None:
    items = load_items(suites=["gsm8k"], folder=PUBLISHED)
    solutions = [json.loads(line)["answer"] for line in (PUBLISHED / "gsm8k.jsonl").read_text().split("\n") if line]
    assert len(items) == len(solutions) == 300
    for item, solution in zip(items, solutions, strict=True):
        assert item.category == "math"
        assert item.check is not None
        assert item.check(solution)
        assert not item.check(solution + "7")


@needs_published
def test_all_sets_together_have_different_ids() -> None:
    items = load_items(suites=list(SUITES), folder=PUBLISHED)
    assert len({item.id for item in items}) == len(items) == 480 + 80 + 164 + 300


# Every form.


@pytest.mark.parametrize("name", ["any.jsonl", "any.jsonl.gz", "any"])
def test_dialogues_keep_their_turns_and_categories(tmp_path: Path, name: str) -> None:
    (item,) = read_items(write(tmp_path / name, DIALOGUE))
    assert (item.id, item.suite, item.category) == ("mt-bench/7", "mt-bench", "writing")
    assert item.turns == ("Write.", "Write again.")


def test_dialogues_of_other_categories_are_named_after_their_file(tmp_path: Path) -> None:
    write(tmp_path / "mine.jsonl", DIALOGUE, DIALOGUE | {"question_id": "b", "category": "cooking"})
    assert [item.id for item in read_items(tmp_path / "mine.jsonl")] == ["mine/7", "mine/b"]


def test_a_file_with_a_task_of_spec_bench_is_spec_bench(tmp_path: Path) -> None:
    path = write(tmp_path / "x.jsonl", DIALOGUE, DIALOGUE | {"question_id": 8, "category": "rag"})
    assert {item.suite for item in read_items(path)} == {"spec-bench"}


def test_functions_are_continued_as_they_are(tmp_path: Path) -> None:
    (item,) = read_items(write(tmp_path / "x.jsonl", FUNCTION))
    assert (item.id, item.suite, item.category, item.raw) == ("humaneval/3", "humaneval", "code", True)
    assert item.turns == (FUNCTION["prompt"],)


def test_a_function_is_executed_only_if_that_is_asked_for(tmp_path: Path) -> None:
    untested, tested = read_items(write(tmp_path / "x.jsonl", FUNCTION, TESTED | {"task_id": "HumanEval/4"}))
    assert untested.program is None
    assert tested.check is None
    assert tested.program is not None
    assert [item.check for item in executing([untested, tested])] == [None, tested.program]
    assert tested.program("return 3\n")
    assert not tested.program("return 4\n")


def test_word_problems_are_checked_by_their_number(tmp_path: Path) -> None:
    (item,) = read_items(write(tmp_path / "x.jsonl", PROBLEM))
    assert (item.id, item.suite, item.category, item.raw) == ("gsm8k/1", "gsm8k", "math", False)
    assert item.check is not None
    assert item.check("1000 + 4 = 1004 euros")
    assert not item.check("1005")
    assert not item.check("I do not know.")


def test_items_with_a_checker_can_be_compared_and_sent_to_another_process(tmp_path: Path) -> None:
    items = read_items(write(tmp_path / "x.jsonl", PROBLEM))
    assert pickle.loads(pickle.dumps(items)) == items


def test_prompts_of_our_own_form_are_named_by_file_and_line(tmp_path: Path) -> None:
    path = write(tmp_path / "mine.v2.jsonl", {"prompt": "One"}, "", {"prompt": "Two", "note": 3})
    assert [(item.id, item.suite, item.category) for item in read_items(path)] == [
        ("mine/1", "mine", "prompts"),
        ("mine/3", "mine", "prompts"),
    ]


def test_a_line_of_plain_text_is_a_prompt(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_bytes("\ufeffFirst thing\r\n\r\n  Second — thing \n".encode())
    items = read_items(tmp_path / "notes.txt")
    assert [(item.id, item.turns) for item in items] == [
        ("notes/1", ("First thing",)),
        ("notes/3", ("Second — thing",)),
    ]


@pytest.mark.parametrize("separator", ["\u2028", "\x85", "\x0b", "\x0c", "\x1c"])
def test_a_separator_of_unicode_inside_a_prompt_ends_no_line(tmp_path: Path, separator: str) -> None:
    text = f"one{separator}two"
    line = json.dumps({"prompt": text}, ensure_ascii=False)
    assert read_items(write(tmp_path / "x.jsonl", line))[0].turns == (text,)


# Every damage is one sentence with its place.


def refusal(path: Path) -> str:
    with pytest.raises(UsageError) as caught:
        read_items(path)
    message = str(caught.value)
    assert str(path) in message
    assert message.endswith(".")
    assert "\n" not in message
    return message


@pytest.mark.parametrize("line", ["{not json", '{"prompt": "x"', "[" * 100_000, "plain words", '{"prompt": NaN'])
def test_a_line_that_is_no_json_is_named_with_its_number(tmp_path: Path, line: str) -> None:
    assert "Line 3" in refusal(write(tmp_path / "x.jsonl", {"prompt": "a"}, "", line))


def test_plain_text_in_a_file_that_calls_itself_json_is_refused(tmp_path: Path) -> None:
    assert "Line 1" in refusal(write(tmp_path / "x.jsonl", "version of a pointer", "to a file"))


@pytest.mark.parametrize("line", ["[1, 2]", '"text"', "3", "null"])
def test_a_line_that_is_no_object_is_named_with_its_number(tmp_path: Path, line: str) -> None:
    assert "Line 2" in refusal(write(tmp_path / "x.jsonl", {"prompt": "a"}, line))


@pytest.mark.parametrize(
    ("entry", "field"),
    [(DIALOGUE, field) for field in ("question_id", "category", "turns")]
    + [(FUNCTION, field) for field in ("task_id", "prompt")]
    + [(PROBLEM, field) for field in ("question", "answer")],
)
def test_a_missing_field_is_named_with_its_line(tmp_path: Path, entry: dict[str, Any], field: str) -> None:
    rest = {key: value for key, value in entry.items() if key != field}
    message = refusal(write(tmp_path / "x.jsonl", entry, rest))
    assert "Line 2" in message
    assert repr(field) in message


@pytest.mark.parametrize(
    "entry",
    [DIALOGUE | {"turns": value} for value in ([], "text", None, [""], [" \n"], ["ok", 3], [["x"]], {"a": "b"})]
    + [DIALOGUE | {"category": value} for value in (3, "", None, ["x"])]
    + [DIALOGUE | {"question_id": value} for value in (None, True, 1.5, [], "")]
    + [FUNCTION | {"prompt": value} for value in (None, 3, "", ["x"])]
    + [TESTED | {"test": value} for value in (None, 3, "")]
    + [PROBLEM | {"answer": value} for value in ("no mark 4", "#### none", 4, "")]
    + [PROBLEM | {"question": value} for value in (4, "", None)]
    + [{"prompt": value} for value in (4, "", None, [], "half \ud800 of a pair")],
)
def test_a_value_that_cannot_be_used_is_named_with_its_line(tmp_path: Path, entry: dict[str, Any]) -> None:
    assert "Line 1" in refusal(write(tmp_path / "x.jsonl", entry))


def test_a_form_that_nobody_knows_is_refused_with_those_that_are_known(tmp_path: Path) -> None:
    message = refusal(write(tmp_path / "x.jsonl", {"text": "hello"}))
    assert "Line 1" in message
    assert '"turns"' in message


def test_an_id_that_comes_twice_is_refused_with_both_lines(tmp_path: Path) -> None:
    message = refusal(write(tmp_path / "x.jsonl", DIALOGUE, "", DIALOGUE))
    assert "Line 3" in message
    assert "line 1" in message


def test_bytes_that_are_not_utf8_are_named_with_their_line(tmp_path: Path) -> None:
    (tmp_path / "x.txt").write_bytes(b"fine\nfine\nsch\xf6n\n")
    assert "Line 3" in refusal(tmp_path / "x.txt")


@pytest.mark.parametrize("damage", ["cut short", "changed", "no body"])
def test_a_damaged_gzip_file_is_refused(tmp_path: Path, damage: str) -> None:
    packed = bytearray(gzip.compress(json.dumps(DIALOGUE).encode() * 20))
    if damage == "changed":
        packed[len(packed) // 2] ^= 0xFF
        packed[-6] ^= 0xFF
    (tmp_path / "x.jsonl.gz").write_bytes({"cut short": packed[:-9], "changed": packed, "no body": packed[:4]}[damage])
    assert "gzip" in refusal(tmp_path / "x.jsonl.gz")


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    assert "No such file" in refusal(tmp_path / "nothing.jsonl")


def test_a_folder_is_no_prompt_file(tmp_path: Path) -> None:
    assert "folder" in refusal(tmp_path)


@pytest.mark.parametrize("content", [b"", b"\n \n", b"\xef\xbb\xbf"])
def test_an_empty_file_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x.txt").write_bytes(content)
    assert "empty" in refusal(tmp_path / "x.txt")


# Sets by name.


def test_an_unknown_set_is_refused_with_the_nearest_and_the_known(tmp_path: Path) -> None:
    with pytest.raises(UnknownName, match=r"Did you mean 'gsm8k'\? Known: spec-bench, mt-bench, humaneval, gsm8k"):
        find_suite("gsm8", tmp_path)


def test_a_set_that_is_not_there_says_what_was_looked_for_and_where(tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        find_suite("humaneval", tmp_path)
    assert "humaneval.jsonl" in str(caught.value)
    assert str(tmp_path) in str(caught.value)


def test_without_any_folder_the_variable_is_named() -> None:
    with pytest.raises(UsageError, match="BRANCHWISE_DATA"):
        find_suite("gsm8k", None)


def test_a_set_is_looked_for_in_the_folder_and_then_where_the_variable_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    near = write(tmp_path / "near" / "gsm8k.jsonl.gz", PROBLEM)
    far = write(tmp_path / "far" / "gsm8k.jsonl", PROBLEM)
    only_far = write(tmp_path / "far" / "humaneval.jsonl", FUNCTION)
    monkeypatch.setenv("BRANCHWISE_DATA", str(tmp_path / "far"))
    assert find_suite("gsm8k", tmp_path / "near") == near
    assert find_suite("gsm8k", None) == far
    assert find_suite("humaneval", tmp_path / "near") == only_far


def test_a_file_of_mt_bench_is_preferred_to_one_inside_spec_bench(tmp_path: Path) -> None:
    write(tmp_path / "spec_bench.jsonl", DIALOGUE | {"category": "rag"})
    own = write(tmp_path / "mt_bench.jsonl", DIALOGUE)
    assert find_suite("mt-bench", tmp_path) == own


@pytest.mark.parametrize(
    ("suite", "file", "entry"),
    [
        ("humaneval", "humaneval.jsonl", PROBLEM),
        ("spec-bench", "spec_bench.jsonl", DIALOGUE),
        ("mt-bench", "spec_bench.jsonl", DIALOGUE | {"category": "rag"}),
    ],
)
def test_a_file_that_is_not_what_its_name_says_is_refused(
    tmp_path: Path, suite: str, file: str, entry: dict[str, Any]
) -> None:
    path = write(tmp_path / file, entry)
    with pytest.raises(UsageError, match=suite) as caught:
        load_items(suites=[suite], folder=tmp_path)
    assert str(path) in str(caught.value)


# All together.


def test_the_limit_holds_for_each_category_of_each_set(tmp_path: Path) -> None:
    lines = [DIALOGUE | {"question_id": n, "category": ("math", "coding")[n % 2]} for n in range(10)]
    dialogues = write(tmp_path / "a.jsonl", *lines)
    problems = write(tmp_path / "b.jsonl", *[PROBLEM] * 5)
    items = load_items([dialogues, problems], limit=2)
    assert [item.id for item in items] == [
        *("mt-bench/0", "mt-bench/1", "mt-bench/2", "mt-bench/3"),
        *("gsm8k/1", "gsm8k/2"),
    ]
    assert len(load_items([dialogues, problems], limit=100)) == 15


def test_categories_are_chosen_before_they_are_counted(tmp_path: Path) -> None:
    lines = [{**DIALOGUE, "question_id": n, "category": ("writing", "coding", "qa")[n % 3]} for n in range(9)]
    file = write(tmp_path / "a.jsonl", *lines)
    chosen = load_items([file], limit=2, categories=["qa", "writing"])
    assert [item.category for item in chosen] == ["writing", "qa"] * 2
    assert chosen == [item for item in load_items([file], limit=2) if item.category != "coding"]
    with pytest.raises(UnknownName, match=r"category 'codin'. Did you mean 'coding'\? There are: coding, qa, writing"):
        load_items([file], categories=["codin"])


def test_a_category_belongs_to_a_set_or_a_file() -> None:
    done = CliRunner().invoke(app, ["bench", "--category", "qa"])
    assert isinstance(done.exception, UsageError)
    assert "--category chooses among prompts of --prompts or --suite" in str(done.exception)


@pytest.mark.parametrize("limit", [0, -1])
def test_a_limit_below_one_is_refused(tmp_path: Path, limit: int) -> None:
    with pytest.raises(UsageError, match="at least 1"):
        load_items([write(tmp_path / "a.jsonl", DIALOGUE)], limit=limit)


def test_nothing_to_run_is_refused() -> None:
    with pytest.raises(UsageError, match="nothing to run"):
        load_items()


@pytest.mark.parametrize("limit", [None, 1])
def test_the_same_item_from_two_files_is_refused(tmp_path: Path, limit: int | None) -> None:
    one, two = write(tmp_path / "a.jsonl", DIALOGUE), write(tmp_path / "b.jsonl", DIALOGUE)
    with pytest.raises(UsageError, match="mt-bench/7"):
        load_items([one, two], limit=limit)
    with pytest.raises(UsageError, match="twice"):
        load_items([one, one], limit=limit)


def test_dialogues_of_both_sets_stay_apart(tmp_path: Path) -> None:
    write(tmp_path / "spec_bench.jsonl", DIALOGUE, DIALOGUE | {"question_id": 8, "category": "rag"})
    items = load_items(suites=["spec-bench", "mt-bench"], folder=tmp_path)
    assert [item.id for item in items] == ["spec-bench/7", "spec-bench/8", "mt-bench/7"]


def test_the_prompts_of_the_package_never_change() -> None:
    assert digest(own_items()) == "c95d20c2dfaca4ed"
    assert [item.category for item in own_items(1)] == ["free writing", "editing"]
