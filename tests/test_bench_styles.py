"""Styles of reasoning: problems whose answers are right, and prompts that ask for them."""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from pathlib import Path

import pytest

from branchwise.bench.answers import LetterIs, letter_in, makes_24, number_in
from branchwise.bench.run import digest as items_digest
from branchwise.bench.styles import (
    _PLACES,
    _SHOTS,
    _USES,
    MOST_PROBLEMS,
    SHOWN,
    STAND_INS,
    STYLES,
    TASKS,
    _solution,
    ending,
    problems,
    prompt,
    style_items,
)
from branchwise.bench.tasks import Problem, find_tasks, read_problems
from branchwise.errors import UnknownName, UsageError

GENERATED = [task for task in TASKS if task not in STAND_INS]


@pytest.fixture
def gsm8k(tmp_path: Path) -> Path:
    lines = [{"question": f"What is {n} and {n}?", "answer": f"Twice {n}.\n#### {2 * n}"} for n in range(20)]
    path = tmp_path / "gsm8k.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


# Problems.


@pytest.mark.parametrize("task", GENERATED)
def test_every_gold_answer_passes_its_own_check_in_every_ending(task: str) -> None:
    for problem in problems(task, 60, seed=3):
        for close in ("Answer: {}", "**Answer:** {}", "3 steps.\nAnswer: {}.", "so #### {}", r"\boxed{{{}}}", "{}"):
            assert problem.check(close.format(problem.gold)), (problem, close)


@pytest.mark.parametrize("task", GENERATED)
def test_a_wrong_answer_fails(task: str) -> None:
    for problem in problems(task, 60, seed=4):
        for wrong in wrong_answers(problem):
            assert not problem.check(f"Answer: {wrong}"), problem


def wrong_answers(problem: Problem) -> list[str]:
    if problem.task == "game24":
        return [problem.gold + " + 1", "24", f"{problem.gold} - 24 + 24", ""]
    if isinstance(problem.check, LetterIs):
        return [*(letter for letter in problem.check.options if letter != problem.gold), "none of them", ""]
    return [str(int(problem.gold) + 1), problem.gold + "0" if problem.gold != "0" else "10", "unknown", ""]


@pytest.mark.parametrize("task", GENERATED)
def test_the_same_seed_gives_the_same_problems_and_another_gives_others(task: str) -> None:
    assert problems(task, 8, seed=5) == problems(task, 8, seed=5) == problems(task, 20, seed=5)[:8]
    assert problems(task, 8, seed=5) != problems(task, 8, seed=6)


@pytest.mark.parametrize("task", GENERATED)
def test_as_many_different_problems_as_the_paper_asks_can_be_drawn(task: str) -> None:
    assert len({problem.question for problem in problems(task, MOST_PROBLEMS)}) == MOST_PROBLEMS


def test_competition_answers_are_whole_and_below_a_thousand() -> None:
    assert all(0 <= int(problem.gold) <= 999 for problem in problems("aime-like", 300))


def test_competition_answers_agree_with_counting_by_hand() -> None:
    seen = set()
    for problem in problems("aime-like", 200, seed=1):
        numbers = [int(number) for number in re.findall("[0-9]+", problem.question)]
        if "^" in problem.question and "remainder" in problem.question:
            kind, truth = "power", numbers[0] ** numbers[1] % numbers[2]
        elif "common divisor" in problem.question:
            x, y = numbers[:2]
            kind, truth = "gcd", max(d for d in range(1, min(x, y) + 1) if x % d == y % d == 0)
        elif "zeros" in problem.question:
            kind, truth = "zeros", sum(_fives(k) for k in range(1, numbers[1] + 1))
        elif "sequence" in problem.question:
            terms = [numbers[0], numbers[1]]
            while len(terms) < numbers[3]:
                terms.append(terms[-1] + terms[-2] + numbers[2])
            kind, truth = "sequence", terms[numbers[3] - 1] % 1000
        elif "walk" in problem.question:
            _, _, p, q, s, t = numbers[:6]
            kind, truth = "walk", _walks(p, q) * _walks(s - p, t - q) % 1000
        elif "positive divisors" in problem.question:
            whole = 2 ** numbers[1] * 3 ** numbers[3] * 5 ** numbers[5]
            kind, truth = "divisors", sum(whole % d == 0 for d in range(6, min(whole, 200_000) + 1, 6))
            if whole > 200_000:
                continue
        else:
            kind = "either"
            _, n, a, b = numbers[:4]
            truth = len(set(range(a, n + 1, a)) ^ set(range(b, n + 1, b)))
        seen.add(kind)
        assert problem.gold == str(truth), problem
    assert len(seen) == 7


def _fives(number: int) -> int:
    return 1 + _fives(number // 5) if number % 5 == 0 else 0


def _walks(right: int, up: int) -> int:
    return 1 if right == 0 or up == 0 else _walks(right - 1, up) + _walks(right, up - 1)


def test_games_of_24_are_all_that_can_be_won() -> None:
    """1362 of the 1820 hands have a solution: a number known from many programs."""
    hands = itertools.combinations_with_replacement(range(1, 14), 4)
    assert sum(_solution(hand) is not None for hand in hands) == 1362


def test_exactly_one_option_of_an_order_fits_what_is_told() -> None:
    orders = [problem for problem in problems("logic-like", 80) if "of the five" in problem.question]
    assert len(orders) > 20
    for problem in orders:
        told = re.findall(r"(\w+) is (\w+) than (\w+)\.", problem.question)
        above = [(x, y) if more in ("taller", "older", "faster") else (y, x) for x, more, y in told]
        people = sorted({name for pair in above for name in pair})
        fitting = [o for o in itertools.permutations(people) if all(o.index(x) < o.index(y) for x, y in above)]
        assert len(fitting) == 1
        place = next(
            (i for i, word in enumerate(("second", "third", "fourth", "fifth"), 1) if word in problem.question), 0
        )
        assert f"{problem.gold}) {fitting[0][place]}" in problem.question


def test_exactly_one_option_of_a_syllogism_holds_in_every_small_world() -> None:
    """An independent look: three creatures, each of them in any of the three classes, in every way."""
    found = [problem for problem in problems("logic-like", 80) if "must be true" in problem.question]
    assert len(found) > 20
    for problem in found:
        told, *options = problem.question.split("\n")
        premises = re.findall(r"(?:All|No|Some)[^.]*\.", told)
        classes = sorted(set(re.findall(r"[a-z]+", " ".join(premises))) - {"are", "not"} - {"ll", "o", "ome"})
        assert len(classes) == 3
        worlds = itertools.product(itertools.product([False, True], repeat=3), repeat=4)
        full = [w for w in worlds if all(map(any, zip(*w, strict=True)))]
        possible = [w for w in full if all(_true(p, w, classes) for p in premises)]
        right = [option[0] for option in options if all(_true(option[3:], w, classes) for w in possible)]
        assert right == [problem.gold], problem.question


def _true(saying: str, world: tuple[tuple[bool, ...], ...], classes: list[str]) -> bool:
    quantifier, x, _, *rest = saying.strip(".").split()
    first, second = classes.index(x), classes.index(rest[-1])
    them = [creature[second] for creature in world if creature[first]]
    if quantifier == "All":
        return all(them)
    if quantifier == "No":
        return not any(them)
    return any(not it for it in them) if rest[0] == "not" else any(them)


def test_things_and_uses_come_once_in_the_tables() -> None:
    things = [thing for group in _PLACES.values() for thing in group]
    assert len(set(things)) == len(things)
    assert len(set(_USES.values())) == len(_USES)


# Prompts.


def test_the_worked_examples_are_right() -> None:
    for (_, kind), shot in _SHOTS.items():
        for example_ in shot.split("\n\n"):
            question, *work = example_.split("\n")
            assert question.startswith("Problem: ")
            if kind == "expression":
                hand = [int(number) for number in re.findall("[0-9]+", question)][1:]
                assert makes_24(work[-1].partition("####")[2] or work[-1], hand), example_
            elif kind == "letter":
                assert f"{letter_in(work[-1], 'ABCD')}) " in question
            else:
                assert number_in(work[-1]) is not None


def test_no_game_is_asked_that_a_worked_example_solves() -> None:
    shown = set(re.findall(r"Make 24 from .*", "\n".join(_SHOTS.values())))
    assert {tuple(sorted(map(int, re.findall("[0-9]+", game)[1:]))) for game in shown} == SHOWN
    assert not shown & {problem.question for problem in problems("game24", MOST_PROBLEMS)}


@pytest.mark.parametrize("task", GENERATED)
def test_every_style_asks_the_question_last_and_names_its_own_ending(task: str) -> None:
    (problem,) = problems(task, 1)
    texts = {style: prompt(style, problem) for style in STYLES}
    assert len(set(texts.values())) == len(STYLES)
    for style, text in texts.items():
        assert text.endswith(problem.question)
        assert {"sot": r"\boxed{}", "cod": "####"}.get(style, "Answer:") in text.split("\n\n")[0]
        assert ("Problem:" in text.removesuffix(f"Problem: {problem.question}")) == (style in ("aot", "sot", "cod"))


def test_items_are_the_same_problems_in_every_style() -> None:
    items = style_items(["cot", "cod"], 3, seed=1)
    assert [item.category for item in items[::3]] == [f"{s}/{task}" for s in ("cot", "cod") for task in GENERATED]
    assert len({item.id for item in items}) == len(items) == 2 * 5 * 3
    assert {item.suite for item in items} == {"stylebench"}
    assert items[0].id == "stylebench/cot/gsm8k-like/1"
    half = len(items) // 2
    assert [item.check for item in items[:half]] == [item.check for item in items[half:]]
    assert items == style_items(["cot", "cod", "cot"], 3, seed=1)


def test_a_file_of_gsm8k_takes_the_place_of_its_substitute(gsm8k: Path) -> None:
    items = style_items(["cot"], 4, files={"gsm8k": gsm8k})
    assert [item.category for item in items[::4]][:2] == ["cot/gsm8k", "cot/aime-like"]
    assert not any("gsm8k-like" in item.category for item in items)
    for problem in problems("gsm8k", 20, file=gsm8k):
        assert problem.check(f"Answer: {problem.gold}")
        assert int(problem.gold) == sum(map(int, re.findall("[0-9]+", problem.question)))


def test_what_cannot_be_asked_is_refused(gsm8k: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.txt"
    other.write_text("A prompt\n")
    with pytest.raises(UsageError, match="no style"):
        style_items([], 1)
    with pytest.raises(UnknownName, match="Did you mean 'cot'"):
        style_items(["cott"], 1)
    with pytest.raises(UnknownName, match="Did you mean 'game24'"):
        problems("game25", 1)
    for count in (0, -1, MOST_PROBLEMS + 1):
        with pytest.raises(UsageError, match="from 1 to 500"):
            style_items(["cot"], count)
    with pytest.raises(UsageError, match="has 20 problems"):
        style_items(["cot"], 21, files={"gsm8k": gsm8k})
    with pytest.raises(UsageError, match="no file of GSM8K"):
        style_items(["cot"], 1, files={"gsm8k": other})
    with pytest.raises(UsageError, match="needs a file"):
        problems("gsm8k", 1)


@pytest.mark.parametrize(
    ("task", "digest"),
    [
        ("gsm8k-like", "eb4b8596013c7916"),
        ("aime-like", "2a94dba618c7a25e"),
        ("game24", "27d54ba3e6509573"),
        ("commonsense-like", "dc9ee821d8341bff"),
        ("logic-like", "c60de510b27aa591"),
    ],
)
def test_the_problems_of_a_seed_never_change(task: str, digest: str) -> None:
    """Records name problems by seed and number, so an edit of templates or facts would change what they mean."""
    asked = [(problem.question, problem.gold, repr(problem.check)) for problem in problems(task, MOST_PROBLEMS, seed=7)]
    assert hashlib.sha256(json.dumps(asked).encode()).hexdigest()[:16] == digest


def test_the_prompts_of_all_styles_never_change() -> None:
    assert items_digest(style_items(STYLES, 20)) == "c15845f43340e873"


# Files of the tasks, in the formats of their sets.

OPTIONS = ["a bank", "a shelf", "a cloud", "a boat", "a shoe"]
CHOICES = [{"label": label, "text": text} for label, text in zip("ABCDE", OPTIONS, strict=True)]
LOGIC = {"context": "All p are q.", "options": ["A. p", "B. q", "C. r", "D. s"]}
PUBLISHED_FORMS: dict[str, tuple[str, str, str, str]] = {
    "aime of the hub": ("aime", "a.jsonl", json.dumps({"problem": "How many?", "answer": "033"}), "33"),
    "aime 2024": ("aime", "a.jsonl", json.dumps({"ID": "I-1", "Problem": "How many?", "Answer": 204}), "204"),
    "aime of all years": ("aime", "a.csv", "ID,Year,Question,Answer\nx,1983,How many?,60\n", "60"),
    "games of tree of thoughts": ("game24", "24.csv", "Rank,Puzzles,AMT (s)\n1,1 1 4 6,4.4\n", ""),
    "games as numbers": ("game24", "g.jsonl", json.dumps({"numbers": [1, 1, 4, 6]}), ""),
    "commonsenseqa of its authors": (
        "commonsenseqa",
        "c.jsonl",
        json.dumps({"answerKey": "B", "question": {"stem": "Where are books?", "choices": CHOICES}}),
        "B",
    ),
    "commonsenseqa of the hub": (
        "commonsenseqa",
        "c.jsonl",
        json.dumps(
            {"question": "Where are books?", "choices": {"label": [*"ABCDE"], "text": OPTIONS}, "answerKey": "B"}
        ),
        "B",
    ),
    "logiqa of its authors": ("logiqa", "l.txt", "\nc\nAll p are q.\nWhich?\nA.p\nB.q\nC.r\nD.s\n", "C"),
    "logiqa of the hub": ("logiqa", "l.jsonl", json.dumps(LOGIC | {"query": "Which?", "correct_option": 2}), "C"),
    "logiqa 2": ("logiqa", "l.jsonl", json.dumps(LOGIC | {"question": "Which?", "answer": 2}), "C"),
    "logiqa with letters": ("logiqa", "l.jsonl", json.dumps(LOGIC | {"question": "Which?", "label": "c"}), "C"),
}


@pytest.mark.parametrize("form", PUBLISHED_FORMS)
def test_a_task_is_read_as_its_set_is_published(form: str, tmp_path: Path) -> None:
    task, name, text, gold = PUBLISHED_FORMS[form]
    (tmp_path / name).write_text(text)
    (problem,) = read_problems(task, tmp_path / name)
    assert (problem.task, problem.gold) == (task, gold)
    if task == "game24":
        assert problem.check("Answer: (1 + 1 + 4) * 6 - 12") is False
        assert problem.check("Answer: 6 * 4 * 1 * 1")
        return
    assert problem.check(f"Answer: {gold}")
    assert not problem.check("Answer: " + ("A" if isinstance(problem.check, LetterIs) else "7"))
    if task == "commonsenseqa":
        assert problem.question == "Where are books?\nA) a bank\nB) a shelf\nC) a cloud\nD) a boat\nE) a shoe"
    if task == "logiqa":
        assert problem.question == "All p are q.\nWhich?\nA) p\nB) q\nC) r\nD) s"


@pytest.mark.parametrize(
    ("task", "name", "text"),
    [
        ("aime", "a.jsonl", json.dumps({"problem": "How many?", "answer": 1000})),
        ("aime", "a.jsonl", json.dumps({"problem": "How many?"})),
        ("aime", "a.csv", "Question,Answer\nHow many?,many\n"),
        ("game24", "g.csv", "Rank,Puzzles\n1,1 2 3\n"),
        ("commonsenseqa", "c.jsonl", json.dumps({"question": "Where?", "choices": None, "answerKey": "A"})),
        ("commonsenseqa", "c.jsonl", json.dumps({"question": {"stem": "?", "choices": CHOICES}, "answerKey": "F"})),
        ("logiqa", "l.jsonl", json.dumps(LOGIC | {"question": "Which?", "answer": 4})),
        ("logiqa", "l.jsonl", "no json"),
        ("logiqa", "l.txt", "e\nAll p are q.\nWhich?\nA.p\nB.q\nC.r\nD.s\n"),
        ("logiqa", "l.txt", "a\nAll p are q.\nWhich?\nA.p\n"),
    ],
)
def test_a_file_that_is_not_of_its_task_is_one_sentence(task: str, name: str, text: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text + "\n")
    with pytest.raises(UsageError, match=f"{name}.*\\.$"):
        read_problems(task, tmp_path / name)


def test_files_in_a_folder_take_the_place_of_stand_ins(gsm8k: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("BRANCHWISE_DATA", raising=False)
    folder = gsm8k.parent
    (folder / "24.csv").write_text("Rank,Puzzles\n1,1 1 4 6\n")
    (folder / "aime.jsonl").write_text(json.dumps({"problem": "How many?", "answer": 3}) + "\n")
    found = find_tasks(folder)
    assert found == {"gsm8k": gsm8k, "aime": folder / "aime.jsonl", "game24": folder / "24.csv"}
    categories = [item.category for item in style_items(["cot"], 1, files=found)]
    assert categories == ["cot/gsm8k", "cot/aime", "cot/game24", "cot/commonsense-like", "cot/logic-like"]
    assert find_tasks(None) == {}


# How an answer is given.


@pytest.mark.parametrize(
    ("style", "text", "followed", "guessed"),
    [
        ("cot", "1. Twelve and six are eighteen.\nAnswer: 18", True, False),
        ("cot", "Answer: 18", True, True),
        ("cot", "18", False, True),
        ("cot", "1. Twelve and six are eighteen.\nIt is 18.", False, False),
        ("cot", "1. Twelve and six are eighteen.\nAnswer: unknown", False, False),
        ("cot", "I do not know.", False, False),
        ("cod", "12 + 6 = 18. #### 18", True, False),
        ("cod", "12 + 6 = 18. Answer: 18", False, False),
        ("sot", "<think>x = 12 + 6 = 18</think> \\boxed{18}", True, False),
        ("sot", "\\boxed{18}", True, True),
    ],
)
def test_format_and_guesses_are_counted(style: str, text: str, followed: bool, guessed: bool) -> None:
    manner = ending(style, problems("gsm8k-like", 1)[0])(text)
    assert (manner.followed, manner.guessed) == (followed, guessed)


def test_a_letter_without_a_thought_is_a_guess() -> None:
    form = ending("cot", problems("logic-like", 1)[0])
    assert (form("B").followed, form("B").guessed) == (False, True)
    reasoned = form("The tallest must be the first one told.\nAnswer: C")
    assert (reasoned.followed, reasoned.guessed) == (True, False)
