"""The five tasks of StyleBench, in the formats in which their sets are published, read from the user's files.

    task             files in --data                     a problem
    gsm8k            gsm8k.jsonl                         {"question", "answer": "… #### 18"}
    aime             aime.jsonl, aime.csv                a problem or question, and an answer from 0 to 999
    game24           24.csv, game24.csv, game24.jsonl    Puzzles: four numbers, as in Tree of Thoughts; or "numbers"
    commonsenseqa    commonsenseqa.jsonl, dev_rand_split.jsonl    {"question", "choices", "answerKey"}, of both releases
    logiqa           logiqa.jsonl, logiqa.txt            {"context", "query" or "question", "options", "correct_option",
                                                         "answer" or "label"}, or the eight lines of the first release

Names of columns and fields may be in capitals; every file may end in .gz.
"""

from __future__ import annotations

import csv
import io
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import product
from pathlib import Path
from typing import Any

from branchwise.bench.answers import LetterIs, Makes24, NumberIs
from branchwise.bench.prompts import FOLDER_VARIABLE, read_items, text_of
from branchwise.errors import UsageError

FILES: dict[str, tuple[str, ...]] = {
    "gsm8k": ("gsm8k.jsonl", "gsm8k/test.jsonl"),
    "aime": ("aime.jsonl", "aime.csv"),
    "game24": ("24.csv", "game24.csv", "game24.jsonl"),
    "commonsenseqa": ("commonsenseqa.jsonl", "dev_rand_split.jsonl"),
    "logiqa": ("logiqa.jsonl", "logiqa.txt"),
}
"""possible names of the file of a task; each may end in .gz"""


@dataclass(frozen=True)
class Problem:
    task: str
    question: str
    gold: str
    """a right answer: a number, an expression or a letter"""
    check: Callable[[str], bool]


def number_problem(task: str, question: str, value: int | Fraction) -> Problem:
    return Problem(task, question, str(value), NumberIs(Fraction(value)))


def choice_problem(task: str, question: str, options: Sequence[str], right: int) -> Problem:
    letters = "ABCDE"[: len(options)]
    lines = map("{}) {}".format, letters, options)
    return Problem(task, "\n".join([question, *lines]), letters[right], LetterIs(letters[right], letters))


def game_problem(hand: Sequence[int], gold: str = "") -> Problem:
    question = "Make 24 from the numbers {}, {}, {} and {}.".format(*hand)
    return Problem("game24", question, gold, Makes24(tuple(hand)))


def find_tasks(folder: Path | None) -> dict[str, Path]:
    """The tasks for which files exist, in `folder` or in the folder that BRANCHWISE_DATA names."""
    named = os.environ.get(FOLDER_VARIABLE)
    folders = [place for place in (folder, Path(named).expanduser() if named else None) if place]
    found: dict[str, Path] = {}
    for task, names in FILES.items():
        for place, name, end in product(folders, names, ("", ".gz")):
            if os.path.isfile(path := place / f"{name}{end}"):
                found.setdefault(task, path)
    return found


def read_problems(task: str, path: Path) -> list[Problem]:
    """The problems of a file, in its order. Those of game24 come without a solution and have an empty `gold`."""
    if task == "gsm8k":
        items = read_items(path)
        if items[0].suite != "gsm8k":
            raise UsageError(f'{path} is no file of GSM8K, whose lines have "question" and "answer".')
        asked = [(item.turns[0], item.check) for item in items]
        return [number_problem(task, turn, check.value) for turn, check in asked if isinstance(check, NumberIs)]
    if task == "logiqa" and ".txt" in path.suffixes:
        return _blocks(path)
    found = []
    for number, fields in _rows(path):
        try:
            found.append(_READERS[task]({str(key).strip().lower(): value for key, value in fields.items()}))
        except (KeyError, ValueError, TypeError, IndexError):
            raise UsageError(f"Line {number} of {path} is not a problem of {task} as that set is published.") from None
    if not found:
        raise UsageError(f"{path} holds no problem.")
    return found


def _rows(path: Path) -> list[tuple[int, dict[str, Any]]]:
    text = text_of(path)
    if ".csv" in path.suffixes:
        rows = csv.DictReader(io.StringIO(text))
        return [(rows.line_num, row) for row in rows]
    found = []
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            try:
                values = json.loads(line)
            except (ValueError, RecursionError):
                values = None
            if not isinstance(values, dict):
                raise UsageError(f"Line {number} of {path} is no JSON object; every line must be one.")
            found.append((number, values))
    return found


def _said(fields: Mapping[str, Any], *names: str) -> Any:
    """The value of the first of these fields that exists."""
    return fields[next((name for name in names if name in fields), names[0])]


def _aime(fields: Mapping[str, Any]) -> Problem:
    question, value = str(_said(fields, "problem", "question")), int(str(_said(fields, "answer")))
    if not question.strip() or not 0 <= value <= 999:
        raise ValueError
    return number_problem("aime", f"{question} The answer is a whole number from 0 to 999.", value)


def _game(fields: Mapping[str, Any]) -> Problem:
    told = _said(fields, "puzzles", "numbers")
    hand = [int(number) for number in (told.split() if isinstance(told, str) else told)]
    if len(hand) != 4 or min(hand) < 1:
        raise ValueError
    return game_problem(hand)


def _commonsense(fields: Mapping[str, Any]) -> Problem:
    choices: Any = fields.get("choices")
    question = fields["question"]
    if isinstance(question, dict):  # the format of the authors
        question, choices = question["stem"], question["choices"]
    if isinstance(choices, dict):  # the format of the hub
        choices = [
            {"label": label, "text": text} for label, text in zip(choices["label"], choices["text"], strict=True)
        ]
    right = [choice["label"] for choice in choices].index(fields["answerkey"])
    return choice_problem("commonsenseqa", str(question), [str(choice["text"]) for choice in choices], right)


def _logic(fields: Mapping[str, Any]) -> Problem:
    told = f"{_said(fields, 'context', 'text')}\n{_said(fields, 'query', 'question')}"
    right, options = _said(fields, "correct_option", "answer", "label"), fields["options"]
    place = "abcd".index(right.strip().lower()) if isinstance(right, str) and not right.isdigit() else int(right)
    if not 0 <= place < len(options) <= 5:
        raise ValueError
    return choice_problem("logiqa", told, [_unlettered(str(option)) for option in options], place)


def _unlettered(option: str) -> str:
    """The text of an option without its letter: "A. so" -> "so"."""
    return option[2:].strip() if option[:1] in "ABCD" and option[1:2] in (".", ")") else option.strip()


def _blocks(path: Path) -> list[Problem]:
    """Problems of seven lines each, as LogiQA was first published: letter, context, question and four options."""
    lines = [line.strip() for line in text_of(path).split("\n") if line.strip()]
    found = []
    for start in range(0, len(lines), 7):
        letter, context, question, *options = [*lines[start : start + 7], "", ""][:7]
        if letter.lower() not in ("a", "b", "c", "d") or not all(options):
            raise UsageError(f"Problem {start // 7 + 1} of {path} is not of LogiQA: it begins with {letter[:40]!r}.")
        place = "abcd".index(letter.lower())
        found.append(choice_problem("logiqa", f"{context}\n{question}", [*map(_unlettered, options)], place))
    if not found:
        raise UsageError(f"{path} holds no problem.")
    return found


_READERS = {"aime": _aime, "game24": _game, "commonsenseqa": _commonsense, "logiqa": _logic}
