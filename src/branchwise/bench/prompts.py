"""Prompts: files in the formats in which benchmarks are published, recognised by their content, and ten of our own.

    form          a line                                      item
    Spec-Bench    {"question_id", "category", "turns"}        a dialogue; so is MT-bench
    HumanEval     {"task_id", "prompt", …}                    a text to continue as it is, category "code"; with
                                                              "entry_point" and "test" a program that can be run
    GSM8K         {"question", "answer": "… #### 18"}         a question with a checker, category "math"
    ours          {"prompt"}                                  a question, category "prompts"
    plain text    any line that is not empty                  a question, category "prompts"

The first four are JSON lines; all may be compressed with gzip. The first line decides the form, and every other line
must have it. A line of plain text is one prompt, so a prompt of several lines needs one of the other forms.

Spec-Bench holds the 80 dialogues of MT-bench as eight categories of ten. They keep their names: no category is called
"mt-bench" here, and a mean over the thirteen categories weighs MT-bench more than the six tasks of the paper do.

The data sets are not part of Branchwise; they are read in place and never copied.
"""

from __future__ import annotations

import gzip
import itertools
import json
import os
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

from branchwise.bench.answers import Manner, NumberIs, number_in
from branchwise.bench.execution.programs import Program
from branchwise.errors import UnknownName, UsageError
from branchwise.registry import check_known, nearest

MT_BENCH = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")
SPEC_BENCH = (*MT_BENCH, "translation", "summarization", "qa", "math_reasoning", "rag")

PACKAGE_DATA = Path(__file__).parent / "data"
FOLDER_VARIABLE = "BRANCHWISE_DATA"

_SPEC_BENCH_FILES = ("spec_bench.jsonl", "spec_bench/question.jsonl")
SUITES: dict[str, tuple[str, ...]] = {
    "spec-bench": _SPEC_BENCH_FILES,
    "mt-bench": ("mt_bench.jsonl", "mt_bench/question.jsonl", *_SPEC_BENCH_FILES),
    "humaneval": ("humaneval.jsonl", "HumanEval.jsonl"),
    "gsm8k": ("gsm8k.jsonl", "gsm8k/test.jsonl"),
}
"""sets that have a name, and their possible file names; each may end in .gz"""


@dataclass(frozen=True)
class Item:
    """One prompt of a benchmark: a text to continue, or the user's side of a dialogue."""

    id: str
    """the id of the item, unique within a set"""
    suite: str
    category: str
    turns: tuple[str, ...]
    """the user's messages; the model's own answers come between them"""
    raw: bool = False
    """whether the only turn is a text to continue as it is, without the chat template"""
    ids: tuple[int, ...] = ()
    """the tokens of the only turn, used in its place if their number must be exact"""
    check: Callable[[str], bool] | None = None
    """says whether an answer to the last turn is right; None if the item has no checker"""
    manner: Callable[[str], Manner] | None = None
    """says how an answer is given; None if no style asks for a form"""
    program: Program | None = None
    """a checker that executes the answer, which is done only if asked for (see `executing`)"""


def read_data(name: str) -> list[dict[str, Any]]:
    """The JSON lines of a file that is part of the package."""
    return [json.loads(line) for line in (PACKAGE_DATA / name).read_text(encoding="utf-8").split("\n") if line]


OWN = read_data("own.jsonl")
"""the prompts that come with Branchwise; answers to free writing repeat little, those to editing much"""
FREE, EDITING = (
    tuple(line["prompt"] for line in OWN if line["category"] == category) for category in ("free writing", "editing")
)


def own_items(limit: int | None = None) -> list[Item]:
    """Our own prompts, at most `limit` of each of the two categories."""
    return [
        Item(f"own/{category.replace(' ', '-')}-{number}", "own", category, (prompt,))
        for category, prompts in (("free writing", FREE), ("editing", EDITING))
        for number, prompt in enumerate(prompts[:limit])
    ]


def load_items(
    files: Sequence[Path] = (),
    suites: Sequence[str] = (),
    folder: Path | None = None,
    limit: int | None = None,
    categories: Sequence[str] = (),
) -> list[Item]:
    """The items of the sets with these names, then those of files; only the first `limit` of each category of a set.

    `categories` are the categories to keep; all by default.
    """
    if limit is not None and limit < 1:
        raise UsageError(f"limit must be at least 1, not {limit}.")
    if not files and not suites:
        raise UsageError(f"There is nothing to run; name a prompt file or one of the sets {', '.join(SUITES)}.")
    sources = [(find_suite(name, folder), name) for name in suites] + [(path, None) for path in files]
    found: dict[str, Path] = {}
    kept: list[Item] = []
    known: set[str] = set()
    for path, suite in sources:
        taken: Counter[str] = Counter()
        for item in _items_of(path, suite) if suite else read_items(path):
            if item.id in found:
                other = "twice" if found[item.id] == path else f"after {found[item.id]}"
                raise UsageError(f"{path} was given {other}, and both have {item.id}; give a set once, or rename it.")
            found[item.id] = path
            taken[item.category] += 1
            if (limit is None or taken[item.category] <= limit) and (not categories or item.category in categories):
                kept.append(item)
        known |= set(taken)
    names = sorted(known)
    for name in categories:
        if name not in known:
            hint = f"{nearest(name, names)} There are: {', '.join(names)}."
            raise UnknownName(f"No prompt is of the category {name!r}.{hint}")
    return kept


def executing(items: Sequence[Item]) -> list[Item]:
    """The items with their programs added to their checkers: their answers will be executed, in a sandbox."""
    return [replace(item, check=item.check or item.program) for item in items]


def find_suite(name: str, folder: Path | None = None) -> Path:
    """The file of a set that has a name, in `folder` or in the folder that BRANCHWISE_DATA names."""
    check_known("set of prompts", name, SUITES, ", stylebench")
    named = os.environ.get(FOLDER_VARIABLE)
    folders = [place for place in (folder, Path(named).expanduser() if named else None) if place]
    if not folders:
        raise UsageError(
            f"The set {name!r} is not part of Branchwise; name the folder that holds {SUITES[name][0]} "
            f"with --data or {FOLDER_VARIABLE}."
        )
    for place, file, end in itertools.product(folders, SUITES[name], ("", ".gz")):
        path = place / f"{file}{end}"
        if os.path.isfile(path):  # unlike Path.is_file, this never raises for a folder without permission
            return path
    raise UsageError(
        f"The set {name!r} was not found: none of {', '.join(SUITES[name])}, with or without .gz, lies in "
        f"{' or '.join(map(str, folders))}; put it there, or name another folder with --data."
    )


def _items_of(path: Path, suite: str) -> list[Item]:
    """The items of a set that was found by its file name; the file may hold another set after all."""
    items = read_items(path)
    if suite == "mt-bench" and items[0].suite == "spec-bench":
        talks = [item for item in items if item.category in MT_BENCH]
        items = [replace(item, suite=suite, id=item.id.replace("spec-bench", suite, 1)) for item in talks]
    if not items or items[0].suite != suite:
        raise UsageError(f"{path} has the name of the set {suite!r} but not its form; put the right file there.")
    return items


def read_items(path: Path) -> list[Item]:
    """The items of a prompt file, in the order of its lines."""
    # Not splitlines: a line separator of Unicode inside a JSON string does not end a line.
    lines = [(number, line) for number, line in enumerate(text_of(path).split("\n"), 1) if line.strip()]
    if not lines:
        raise UsageError(f"The prompt file {path} is empty; a prompt is a line of text or of JSON.")
    stem = path.name.split(".")[0] or path.name
    must_be_json = {".json", ".jsonl"} & set(path.suffixes)
    if not must_be_json and not lines[0][1].lstrip().startswith("{"):
        return [Item(f"{stem}/{number}", stem, "prompts", (line.strip(),)) for number, line in lines]
    entries = [_Line.parse(line, number, path) for number, line in lines]
    items = _items_from(entries, stem)
    line_of: dict[str, int] = {}
    for entry, item in zip(entries, items, strict=True):
        if item.id in line_of:
            entry.refuse(f"is another {item.id}, after line {line_of[item.id]}; ids must differ")
        line_of[item.id] = entry.number
    return items


def text_of(path: Path) -> str:
    """The text of a file that may be compressed; a file that cannot be read is refused with a sentence."""
    try:
        raw = path.read_bytes()
    except IsADirectoryError:
        raise UsageError(f"{path} is a folder; name a prompt file in it.") from None
    except OSError as error:
        raise UsageError(f"The prompt file {path} cannot be read: {error.strerror}.") from None
    if raw[:2] == b"\x1f\x8b":
        try:
            raw = gzip.decompress(raw)
        except (OSError, EOFError, zlib.error):
            raise UsageError(f"The prompt file {path} is damaged: gzip cannot unpack it; fetch it again.") from None
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise UsageError(f"Line {line} of {path} is not UTF-8 text; save the file as UTF-8.") from None


@dataclass(frozen=True)
class _Line:
    """A line of JSON with checked access to its fields; errors name the line."""

    values: dict[str, Any]
    number: int
    path: Path

    @classmethod
    def parse(cls, text: str, number: int, path: Path) -> _Line:
        try:
            values = json.loads(text)
        except (ValueError, RecursionError):
            raise UsageError(f"Line {number} of {path} is not JSON; every line must be one JSON object.") from None
        if not isinstance(values, dict):
            raise UsageError(f"Line {number} of {path} is no JSON object; every line must be one.")
        return cls(values, number, path)

    def refuse(self, why: str) -> NoReturn:
        raise UsageError(f"Line {self.number} of {self.path} {why}.")

    def take(self, field: str) -> Any:
        if field not in self.values:
            self.refuse(f"has no field {field!r}, which lines of its form need")
        return self.values[field]

    def text(self, field: str) -> str:
        return self._checked(self.take(field), field)

    def texts(self, field: str) -> tuple[str, ...]:
        values = self.take(field)
        if not isinstance(values, list) or not values:
            self.refuse(f"must have a list of texts as {field!r}, and at least one")
        return tuple(self._checked(value, field) for value in values)

    def name(self, field: str) -> str:
        """A text or a whole number, from which an id is made."""
        value = self.take(field)
        return str(value) if type(value) is int else self._checked(value, field)

    def _checked(self, value: object, field: str) -> str:
        if not isinstance(value, str):
            self.refuse(f"has something else than text in {field!r}")
        if not value.strip():
            self.refuse(f"has an empty text in {field!r}")
        if any("\ud800" <= character <= "\udfff" for character in value):
            self.refuse(f"has half of a surrogate pair in {field!r}, which no tokenizer can read")
        return value


_FORMS = '"question_id", "category" and "turns", or "task_id" and "prompt", or "prompt", or "question" and "answer"'


def _items_from(entries: list[_Line], stem: str) -> list[Item]:
    fields = entries[0].values.keys()
    if fields & {"question_id", "turns"}:
        return _dialogues(entries, stem)
    if "task_id" in fields:
        return [_function(entry) for entry in entries]
    if "prompt" in fields:
        return [Item(f"{stem}/{entry.number}", stem, "prompts", (entry.text("prompt"),)) for entry in entries]
    if not fields & {"question", "answer"}:
        entries[0].refuse(f"has no form that is known; its fields must be {_FORMS}")
    return [_word_problem(entry) for entry in entries]


def _dialogues(entries: list[_Line], stem: str) -> list[Item]:
    items = [Item(entry.name("question_id"), "", entry.text("category"), entry.texts("turns")) for entry in entries]
    categories = {item.category for item in items}
    suite = "mt-bench" if categories <= set(MT_BENCH) else "spec-bench" if categories <= set(SPEC_BENCH) else stem
    return [replace(item, id=f"{suite}/{item.id}", suite=suite) for item in items]


def _function(entry: _Line) -> Item:
    name, prompt = entry.name("task_id").removeprefix("HumanEval/"), entry.text("prompt")
    tested = {"entry_point", "test"} <= entry.values.keys()
    program = Program(prompt, entry.text("entry_point"), entry.text("test")) if tested else None
    return Item(f"humaneval/{name}", "humaneval", "code", (prompt,), raw=True, program=program)


def _word_problem(entry: _Line) -> Item:
    """A problem of GSM8K. These have no ids, so the line number is used, which is stable and easy to find."""
    _, marker, after = entry.text("answer").rpartition("####")
    value = number_in(after) if marker else None
    if value is None:
        entry.refuse("has no number after #### in 'answer', so that no answer could be checked")
    return Item(f"gsm8k/{entry.number}", "gsm8k", "math", (entry.text("question"),), check=NumberIs(value))
