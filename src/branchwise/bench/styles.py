"""StyleBench (Guo et al., 2025, arXiv 2509.20868) as a workload: five ways to ask for the same five kinds of problem.

    style   asks for                                             ends with
    cot     chain of thought: numbered steps                     Answer: …
    tot     tree of thought: three ideas, the best carried on    Answer: …
    aot     algorithm of thought: a search with ways back        Answer: …
    sot     sketch of thought: shorthand, one kind per task      \\boxed{…}
    cod     chain of draft: at most five words a step            #### …

The wording of every prompt is our own. Tasks are read from files that the user has (`tasks.py`). Without a file, a task
whose name ends in "-like" stands in: it is a SUBSTITUTE, and results on it are not results on the set it is named
after:

    gsm8k-like          word problems from templates
    aime-like           number theory and counting from templates, with integer answers from 0 to 999
    commonsense-like    five options, from a small table of everyday facts
    logic-like          four options: syllogisms and orders

The problems of game24 are real in any case: without a file, four numbers from 1 to 13 that make 24, by enumeration.

Templates and facts are in data/problems.jsonl; answers are calculated, never stored. Small models rarely solve these:
the benchmark measures how fast a style is written, and also whether the answer is right.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from fractions import Fraction
from functools import cache
from pathlib import Path
from random import Random

from branchwise.bench.answers import Ending, LetterIs
from branchwise.bench.prompts import Item, read_data
from branchwise.bench.tasks import Problem, choice_problem, game_problem, number_problem, read_problems
from branchwise.errors import UsageError
from branchwise.registry import check_known

STYLES = ("cot", "tot", "aot", "sot", "cod")
STAND_INS = {"gsm8k": "gsm8k-like", "aime": "aime-like", "commonsenseqa": "commonsense-like", "logiqa": "logic-like"}
"""tasks, and what is asked if the user has no file of them"""
TASKS = (
    "gsm8k", "gsm8k-like", "aime", "aime-like", "game24", "commonsenseqa", "commonsense-like", "logiqa", "logic-like",
)  # fmt: skip
MOST_PROBLEMS = 500
"""the most problems per task, as in the paper; every template can make this many different ones"""
SHOWN = {(1, 2, 3, 4), (2, 5, 7, 8), (2, 6, 7, 12), (2, 9, 10, 12), (3, 3, 3, 8), (3, 5, 7, 9), (4, 4, 6, 8)}
"""numbers of the worked examples, which are never asked"""


def style_items(
    styles: Sequence[str], problems_per_task: int, seed: int = 0, files: Mapping[str, Path] | None = None
) -> list[Item]:
    """The same problems in every style, as items of the category "<style>/<task>"; a seed determines all of them.
    `files` are files of tasks; other tasks have stand-ins."""
    if not styles:
        raise UsageError(f"There is no style to ask in; choose from {', '.join(STYLES)}.")
    for style in styles:
        check_known("style", style, STYLES)
    given = files or {}
    absent = {task if task not in given else stand_in for task, stand_in in STAND_INS.items()}
    tasks = [task for task in TASKS if task not in absent]
    asked = [problem for task in tasks for problem in problems(task, problems_per_task, seed, given.get(task))]
    return [
        Item(
            id=f"stylebench/{style}/{problem.task}/{number % problems_per_task + 1}",
            suite="stylebench",
            category=f"{style}/{problem.task}",
            turns=(prompt(style, problem),),
            check=problem.check,
            manner=ending(style, problem),
        )
        for style in dict.fromkeys(styles)
        for number, problem in enumerate(asked)
    ]


_HOW = {
    "cot": "Solve the problem in numbered steps, one short step a line.",
    "tot": (
        "Begin with three different ideas for a solution, and judge each of them in one line. Go on with the best one, "
        "drop the other two, and carry it through."
    ),
    "aot": (
        "Search for the solution in writing. Put down every move you try and the state it leaves. Where a state leads "
        "nowhere, call it a dead end, go back to the last good state and try another move, until it is solved."
    ),
    "cod": "Write a draft only: step by step, and no more than five words in a step.",
}
_SHORTHAND = {
    "number": "Think in equations: give each quantity a letter, and write no sentences.",
    "expression": "Think in equations: write each step as one equation, and no sentences.",
    "letter": "Think in keywords joined by arrows, and write no sentences.",
}
_WANTED = {
    "number": "the number",
    "expression": "one expression that uses each of the four numbers exactly once",
    "letter": "the letter of the right option",
}
_END = {
    "sot": "Put your thoughts between <think> and </think>; after them put {wanted} in \\boxed{{}}.",
    "cod": "Close with #### and then {wanted}.",
}
_PLAIN_END = "Close with a line that has 'Answer:' and then {wanted}."
_MARKS = {"sot": "\\boxed{", "cod": "####"}
_PLAIN_MARK = "Answer:"
_KINDS = {"game24": "expression"} | dict.fromkeys(
    ("commonsense-like", "commonsenseqa", "logic-like", "logiqa"), "letter"
)

_SHOTS = {(line["style"], line["kind"]): line["text"] for line in read_data("examples.jsonl")}
"""worked examples by style and kind of answer; no problem that is asked is among them"""


def prompt(style: str, problem: Problem) -> str:
    """A problem in the words of a style."""
    kind = _KINDS.get(problem.task, "number")
    how = _SHORTHAND[kind] if style == "sot" else _HOW[style]
    end = _END.get(style, _PLAIN_END).format(wanted=_WANTED[kind])
    shots = _SHOTS.get((style, kind))
    return "\n\n".join([f"{how} {end}", *([shots] if shots else []), f"Problem: {problem.question}"])


def ending(style: str, problem: Problem) -> Ending:
    """How a style asks for the answer to a problem."""
    options = problem.check.options if isinstance(problem.check, LetterIs) else ""
    return Ending(_MARKS.get(style, _PLAIN_MARK), _KINDS.get(problem.task, "number"), options)


def problems(task: str, count: int, seed: int = 0, file: Path | None = None) -> list[Problem]:
    """`count` different problems of a task; a larger count only adds some. A task with a stand-in needs a file."""
    if not 1 <= count <= MOST_PROBLEMS:
        raise UsageError(f"The problems of a task must be from 1 to {MOST_PROBLEMS}, not {count}.")
    check_known("task", task, TASKS)
    random = Random(f"{seed}/{task}")  # seeded by a text, so that tasks do not share their draws
    if file is not None:
        return _of_file(task, file, count, random)
    if task in STAND_INS:
        raise UsageError(f"The task {task} needs a file; without one there is {STAND_INS[task]}.")
    if task == "game24":
        return _games(count, random)
    found: dict[str, Problem] = {}
    while len(found) < count:
        problem = random.choice(_TEMPLATES[task])(random)
        found.setdefault(problem.question, problem)
    return list(found.values())


def _of_file(task: str, path: Path, count: int, random: Random) -> list[Problem]:
    found = read_problems(task, path)
    if len(found) < count:
        raise UsageError(f"{path} has {len(found)} problems, fewer than the {count} asked for; ask for fewer.")
    random.shuffle(found)
    return found[:count]


def _choice(task: str, question: str, right: str, wrong: Sequence[str], random: Random) -> Problem:
    options = [right, *wrong]
    random.shuffle(options)
    return choice_problem(task, question, options, options.index(right))


_DATA = read_data("problems.jsonl")
_WORD_PROBLEMS, _COMPETITION = (
    [line for line in _DATA if line.get("task") == task] for task in ("gsm8k-like", "aime-like")
)
_PLACES: dict[str, list[str]] = {line["place"]: line["things"] for line in _DATA if "place" in line}
_USES: dict[str, str] = {line["thing"]: line["use"] for line in _DATA if "use" in line}
"""everyday facts: each thing fits its own place or use and none of the others"""
_PEOPLE = ("Ada", "Bruno", "Chloe", "Dario", "Elif", "Femi", "Greta", "Hugo", "Ines", "Jonas")


def _word_problem(random: Random) -> Problem:
    values: dict[str, object] = {name: random.randint(3, 19) for name in "abc"}
    values |= {"small": random.randint(2, 9), "big": random.randint(30, 90)}
    values |= zip(("one", "two", "three"), random.sample(_PEOPLE, 3), strict=True)
    return number_problem("gsm8k-like", *_calculated(random.choice(_WORD_PROBLEMS), values))


def _competition(random: Random) -> Problem:
    values = dict(zip("ab", random.sample(range(3, 30), 2), strict=True))
    values |= {"n": random.randint(100, 999), "m": random.randint(50, 999)}
    values |= {name: random.randint(2, 7) for name in "pqr"}
    question, value = _calculated(random.choice(_COMPETITION), values)
    if value > 999:
        return _competition(random)
    return number_problem("aime-like", f"{question} The answer is a whole number from 0 to 999.", value)


def _calculated(template: Mapping[str, str], values: Mapping[str, object]) -> tuple[str, int]:
    """The question with the expressions in its braces evaluated, and the answer. Templates are part of the package, so
    evaluating them runs no foreign code."""
    functions = {"comb": math.comb, "gcd": math.gcd, "lcm": math.lcm, "pow": pow, "term": _term}
    known = {"__builtins__": {}, **functions, **values}
    question = re.sub(r"\{(.+?)\}", lambda found: str(eval(found[1], known)), template["question"])
    return question, int(eval(template["answer"], known))


def _term(first: int, second: int, plus: int, number: int) -> int:
    for _ in range(number - 1):
        first, second = second, (first + second + plus) % 1000
    return first


def _games(count: int, random: Random) -> list[Problem]:
    hands = [hand for hand in itertools.combinations_with_replacement(range(1, 14), 4) if hand not in SHOWN]
    random.shuffle(hands)
    games = ((hand, gold) for hand in hands if (gold := _solution(hand)))
    return [game_problem(hand, gold) for hand, gold in itertools.islice(games, count)]


def _solution(numbers: tuple[int, ...]) -> str | None:
    """An expression of the numbers that is 24, or None. The last operation is searched; the values of its sides are
    cached."""
    for chosen, others in _splits(numbers):
        known = _reachable(others)
        for x, left in _reachable(chosen).items():
            wanted = {"+": 24 - x, "-": x - 24} | ({"*": 24 / x, "/": x / 24} if x else {})
            for sign, y in wanted.items():
                if y in known:
                    return f"{left} {sign} {known[y]}"
    return None


@cache
def _reachable(numbers: tuple[int, ...]) -> dict[Fraction, str]:
    """Every value that an expression of all the numbers can have, with one such expression."""
    if len(numbers) == 1:
        return {Fraction(numbers[0]): str(numbers[0])}
    found: dict[Fraction, str] = {}
    for chosen, others in _splits(numbers):
        for (x, left), (y, right) in itertools.product(_reachable(chosen).items(), _reachable(others).items()):
            values = {"+": x + y, "-": x - y, "*": x * y} | ({"/": x / y} if y else {})
            for sign, value in values.items():
                found.setdefault(value, f"({left} {sign} {right})")
    return found


def _splits(numbers: tuple[int, ...]) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Every way to share the numbers between the two sides of an operation."""
    for size in range(1, len(numbers)):
        for places in itertools.combinations(range(len(numbers)), size):
            chosen = tuple(numbers[place] for place in places)
            yield chosen, tuple(number for place, number in enumerate(numbers) if place not in places)


def _thing_in_place(random: Random) -> Problem:
    place, *others = random.sample(list(_PLACES), 5)
    right, *wrong = (random.choice(_PLACES[name]) for name in (place, *others))
    return _choice("commonsense-like", f"Which of these is most likely to be found in {place}?", right, wrong, random)


def _place_of_thing(random: Random) -> Problem:
    place, *others = random.sample(list(_PLACES), 5)
    thing = random.choice(_PLACES[place])
    return _choice("commonsense-like", f"Where is {thing} most likely to be found?", place, others, random)


def _use_of_thing(random: Random) -> Problem:
    thing, *others = random.sample(list(_USES), 5)
    wrong = [_USES[other] for other in others]
    return _choice("commonsense-like", f"What is {thing} mostly used for?", _USES[thing], wrong, random)


def _order(random: Random) -> Problem:
    more, less, most = random.choice(
        [("taller", "shorter", "tallest"), ("older", "younger", "oldest"), ("faster", "slower", "fastest")]
    )
    people = random.sample(_PEOPLE, 5)
    stated = [
        f"{x} is {more} than {y}." if random.random() < 0.5 else f"{y} is {less} than {x}."
        for x, y in itertools.pairwise(people)
    ]
    random.shuffle(stated)
    place = random.randrange(5)
    right = people.pop(place)
    rank = ("", "second ", "third ", "fourth ", "fifth ")[place]
    wrong = random.sample(people, 3)
    return _choice("logic-like", f"{' '.join(stated)} Who is the {rank}{most} of the five?", right, wrong, random)


_SAYINGS = ("All {} are {}.", "No {} are {}.", "Some {} are {}.", "Some {} are not {}.")
_CLASSES = ("blims", "dorps", "fendles", "gracks", "jintos", "kivets", "mabers", "norvs", "plims", "quorls")
Saying = tuple[int, int, int]
"""which of the four sayings, and about which two of three classes"""


def _syllogism(random: Random) -> Problem:
    premises, follows, does_not = random.choice(_syllogisms())
    classes = random.sample(_CLASSES, 3)
    stated, right, *wrong = (
        [_SAYINGS[kind].format(classes[x], classes[y]) for kind, x, y in sayings]
        for sayings in (premises, [random.choice(follows)], random.sample(does_not, 3))
    )
    return _choice("logic-like", f"{' '.join(stated)} Which of these must be true?", right[0], wrong[0], random)


@cache
def _syllogisms() -> list[tuple[list[Saying], list[Saying], list[Saying]]]:
    """Pairs of premises, the sayings about the outer classes that follow from them, and those that do not.

    Found by enumerating worlds: a world says for each of the eight combinations of three classes whether it occurs. A
    saying that follows does so even if a class is empty. A saying that does not follow fails even if no class is empty.
    So no reading of "all" makes two options right.
    """
    worlds = [[mixture for mixture in range(8) if world >> mixture & 1] for world in range(256)]
    full = [world for world in worlds if all(any(mixture >> x & 1 for mixture in world) for x in range(3))]
    outer = [(kind, x, y) for kind in range(4) for x, y in ((0, 2), (2, 0))]
    linked = ([(kind, *pair) for kind in range(4) for pair in (two, two[::-1])] for two in ((0, 1), (1, 2)))
    found = []
    for premises in itertools.product(*linked):
        possible = [world for world in worlds if all(_holds(saying, world) for saying in premises)]
        probable = [world for world in full if all(_holds(saying, world) for saying in premises)]
        follows = [saying for saying in outer if all(_holds(saying, world) for world in possible)]
        does_not = [saying for saying in outer if not all(_holds(saying, world) for world in probable)]
        if follows and len(does_not) >= 3 and probable:
            found.append((list(premises), follows, does_not))
    return found


def _holds(saying: Saying, world: list[int]) -> bool:
    kind, x, y = saying
    both = any(mixture >> x & 1 and mixture >> y & 1 for mixture in world)
    only = any(mixture >> x & 1 and not mixture >> y & 1 for mixture in world)
    return (not only, not both, both, only)[kind]


_TEMPLATES: dict[str, tuple[Callable[[Random], Problem], ...]] = {
    "gsm8k-like": (_word_problem,),
    "aime-like": (_competition,),
    "commonsense-like": (_thing_in_place, _place_of_thing, _use_of_thing),
    "logic-like": (_order, _syllogism),
}
