"""Styles of reasoning as a workload, after StyleBench (Guo et al., 2025, arXiv 2509.20868): five ways to ask for the
same five kinds of problem.

    style   asks for                                             ends with
    cot     chain of thought: numbered steps                     Answer: …
    tot     tree of thought: three ideas, the best carried on    Answer: …
    aot     algorithm of thought: a search with ways back        Answer: …
    sot     sketch of thought: shorthand, one kind per task      \\boxed{…}
    cod     chain of draft: at most five words a step            #### …

The wording of every prompt is our own. So are the problems, because the data sets of the paper were not to be had;
a task whose name ends in "-like" is a SUBSTITUTE, and its numbers are not numbers of the set it is named after:

    gsm8k               real, where a file of it is given
    gsm8k-like          word problems from templates, in its place where none is
    aime-like           number theory and counting from templates, with whole answers from 0 to 999
    game24              real: four numbers of 1 to 13 that make 24, found by enumeration
    commonsense-like    five options, from a small table of everyday facts
    logic-like          four options: syllogisms and orders

Small models seldom solve these. What is measured is how fast a style is written; whether the answer is right stands
beside it.
"""

from __future__ import annotations

import ast
import itertools
import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from pathlib import Path
from random import Random

from branchwise.bench.items import Item
from branchwise.bench.prompts import NumberIs, marked, number_in, read_items
from branchwise.errors import UnknownName, UsageError
from branchwise.registry import nearest

__all__ = [
    "MAX_NEW_TOKENS",
    "MOST_PROBLEMS",
    "STYLES",
    "LetterIs",
    "Makes24",
    "Problem",
    "letter_in",
    "makes_24",
    "number_in",
    "problems",
    "prompt",
    "style_items",
]

STYLES = ("cot", "tot", "aot", "sot", "cod")
MAX_NEW_TOKENS = {
    "gsm8k": 512,
    "gsm8k-like": 512,
    "aime-like": 2048,
    "game24": 2048,
    "commonsense-like": 512,
    "logic-like": 512,
}
"""by task, as in the paper"""
MOST_PROBLEMS = 500
"""of a task: as many as the paper asks, and every template has as many different ones to give"""


@dataclass(frozen=True)
class Problem:
    task: str
    question: str
    gold: str
    """a right answer: a number, an expression or a letter"""
    check: Callable[[str], bool]


def style_items(styles: Sequence[str], problems_per_task: int, seed: int = 0, gsm8k: Path | None = None) -> list[Item]:
    """The same problems in every style, as items of the category "<style>/<task>"; the same seed gives the same."""
    if not styles:
        raise UsageError(f"There is no style to ask in; choose from {', '.join(STYLES)}.")
    for style in styles:
        if style not in STYLES:
            raise UnknownName(f"Unknown style {style!r}.{nearest(style, list(STYLES))} Known: {', '.join(STYLES)}.")
    tasks = [task for task in MAX_NEW_TOKENS if task != ("gsm8k-like" if gsm8k else "gsm8k")]
    asked = [problem for task in tasks for problem in problems(task, problems_per_task, seed, gsm8k)]
    return [
        Item(
            id=f"stylebench/{style}/{problem.task}/{number % problems_per_task + 1}",
            suite="stylebench",
            category=f"{style}/{problem.task}",
            turns=(prompt(style, problem),),
            check=problem.check,
        )
        for style in dict.fromkeys(styles)
        for number, problem in enumerate(asked)
    ]


def problems(task: str, count: int, seed: int = 0, gsm8k: Path | None = None) -> list[Problem]:
    """Different problems of a task; the first of many are those of few. `gsm8k` is needed for that task alone."""
    if not 1 <= count <= MOST_PROBLEMS:
        raise UsageError(f"The problems of a task must be from 1 to {MOST_PROBLEMS}, not {count}.")
    random = Random(f"{seed}/{task}")  # a text, so that tasks do not share their draws
    if task == "gsm8k":
        return _of_file(gsm8k, count, random)
    if task == "game24":
        return _games(count, random)
    if task not in _TEMPLATES:
        raise UnknownName(f"Unknown task {task!r}.{nearest(task, MAX_NEW_TOKENS)} Known: {', '.join(MAX_NEW_TOKENS)}.")
    found: dict[str, Problem] = {}
    while len(found) < count:
        problem = random.choice(_TEMPLATES[task])(random)
        found.setdefault(problem.question, problem)
    return list(found.values())


def _of_file(path: Path | None, count: int, random: Random) -> list[Problem]:
    if path is None:
        raise UsageError("The task gsm8k needs a file of GSM8K; without one there is gsm8k-like.")
    items = read_items(path)
    if items[0].suite != "gsm8k":
        raise UsageError(f'{path} is no file of GSM8K, whose lines have "question" and "answer".')
    if len(items) < count:
        raise UsageError(f"{path} has {len(items)} problems, fewer than the {count} asked for; ask for fewer.")
    random.shuffle(items)
    asked = [(item.turns[0], item.check) for item in items[:count]]
    return [Problem("gsm8k", turn, str(check.value), check) for turn, check in asked if isinstance(check, NumberIs)]


# What is asked: the words of the styles.

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

_SHOTS = {
    ("aot", "number"): """\
Problem: A box holds red and blue balls, 14 in all, with 4 more red than blue. How many are red?
Try 7 red: 7 blue, difference 0. Dead end, go back.
Try 10 red: 4 blue, difference 6. Dead end, go back.
Try 9 red: 5 blue, difference 4. Solved.
Answer: 9""",
    ("aot", "expression"): """\
Problem: Make 24 from the numbers 2, 5, 7 and 8.
8 + 7 = 15 (left: 2 5 15). 15 + 5 = 20 (left: 2 20). 20 + 2 = 22. Dead end, go back to 2 5 7 8.
2 * 5 = 10 (left: 7 8 10). 10 - 7 = 3 (left: 3 8). 3 * 8 = 24. Solved.
Answer: (2 * 5 - 7) * 8""",
    ("aot", "letter"): """\
Problem: What do you need to open a locked door? A) a spoon B) a key C) a hat D) a song
Try A: a spoon eats soup, the lock stays shut. Dead end, go back.
Try B: a key turns the lock, the door opens. Solved.
Answer: B""",
    ("sot", "number"): """\
Problem: A pen costs 3 coins and a book 5 coins more. What do two books cost?
<think>p = 3; b = p + 5 = 8; 2b = 16</think>
\\boxed{16}

Problem: A rope of 20 metres is cut into 4 equal parts, and one of them in half. How long is a half?
<think>r = 20; q = r / 4 = 5; h = q / 2 = 2.5</think>
\\boxed{2.5}""",
    ("sot", "expression"): """\
Problem: Make 24 from the numbers 3, 5, 7 and 9.
<think>3 + 5 = 8; 7 + 9 = 16; 8 + 16 = 24</think>
\\boxed{(3 + 5) + (7 + 9)}

Problem: Make 24 from the numbers 2, 6, 7 and 12.
<think>7 - 6 = 1; 2 * 12 = 24; 24 * 1 = 24</think>
\\boxed{2 * 12 * (7 - 6)}""",
    ("sot", "letter"): """\
Problem: What melts in the sun? A) stone B) glass C) snow D) wood
<think>sun -> heat -> frozen water -> snow</think>
\\boxed{C}

Problem: Iva is older than Jo, and Jo is older than Kim. Who is the youngest? A) Iva B) Jo C) nobody D) Kim
<think>Iva -> Jo -> Kim -> end -> youngest</think>
\\boxed{D}""",
    ("cod", "number"): """\
Problem: Of 30 plums 12 are eaten. How many are left?
30 - 12 = 18. #### 18

Problem: Five cars have four wheels each. How many wheels are there?
5 * 4 = 20. #### 20

Problem: A film of 90 minutes starts 20 minutes late. How many minutes until it ends?
late 20; 20 + 90 = 110. #### 110

Problem: Half of a class of 26 are boys, and 3 boys are ill. How many boys are there today?
26 / 2 = 13; 13 - 3 = 10. #### 10""",
    ("cod", "expression"): """\
Problem: Make 24 from the numbers 1, 2, 3 and 4.
2 * 3 = 6; 6 * 4 = 24. #### 1 * 2 * 3 * 4

Problem: Make 24 from the numbers 4, 4, 6 and 8.
4 + 8 = 12; 6 - 4 = 2. #### (4 + 8) * (6 - 4)

Problem: Make 24 from the numbers 2, 9, 10 and 12.
10 - 9 = 1; 2 * 12 = 24. #### 2 * 12 * (10 - 9)

Problem: Make 24 from the numbers 3, 3, 3 and 8.
3 * 8 = 24; 3 - 3 = 0. #### 3 * 8 + 3 - 3""",
    ("cod", "letter"): """\
Problem: What do bees make? A) milk B) honey C) bread D) paper
bees; flowers; honey. #### B

Problem: Which is the coldest? A) ice B) tea C) soup D) fire
ice is frozen. #### A

Problem: Every owl is a bird. Olu is an owl. What is Olu? A) a fish B) a stone C) a tree D) a bird
owl, so bird. #### D

Problem: What comes after Tuesday? A) Sunday B) Monday C) Wednesday D) Friday
Tuesday, then Wednesday. #### C""",
}
"""worked examples; no problem that is asked is among them"""


def prompt(style: str, problem: Problem) -> str:
    """A problem as a style asks it."""
    kind = _kind(problem.task)
    how = _SHORTHAND[kind] if style == "sot" else _HOW[style]
    end = _END.get(style, _PLAIN_END).format(wanted=_WANTED[kind])
    shots = _SHOTS.get((style, kind))
    return "\n\n".join([f"{how} {end}", *([shots] if shots else []), f"Problem: {problem.question}"])


def _kind(task: str) -> str:
    return {"game24": "expression", "commonsense-like": "letter", "logic-like": "letter"}.get(task, "number")


# Whether an answer is right. `number_in` stands with the loaders, where GSM8K needs it.


def _number(task: str, question: str, value: int | Fraction) -> Problem:
    return Problem(task, question, str(value), NumberIs(Fraction(value)))


@dataclass(frozen=True)
class LetterIs:
    """A checker: the answer's letter is this one."""

    letter: str
    options: str

    def __call__(self, text: str) -> bool:
        return letter_in(text, self.options) == self.letter


@dataclass(frozen=True)
class Makes24:
    """A checker: the answer has an expression of these numbers that is 24."""

    numbers: tuple[int, ...]

    def __call__(self, text: str) -> bool:
        return makes_24(text, self.numbers)


def letter_in(text: str, options: str) -> str | None:
    """The option that an answer gives, of letters such as "ABCD": what a mark such as "Answer:" is followed by, else
    what the text begins with, else the last letter that stands alone. The article "A" is no option."""
    if not options:
        return None
    one = f"[{re.escape(options)}]"
    lead = re.compile(rf"\W{{0,12}}(?:(?:option|choice)\W{{1,3}})?(?P<letter>{one})(?!\w)(?P<article>\s+\w)?", re.I)
    alone = re.compile(rf"(?<![\w'’])(?P<letter>{one})(?![\w'’])(?P<article>\s(?!is\b)[a-z])?")
    for place in (*(part.strip().partition("\n")[0] for part in marked(text)), None):
        first = lead.match(text if place is None else place)
        if first and not (first["article"] and (place is None or first["letter"].islower())):
            return str(first["letter"]).upper()
        standing = [
            found["letter"]
            for found in alone.finditer(text if place is None else place)
            if found["letter"] != "A" or not found["article"]
        ]
        if standing:
            return standing[-1]
    return None


_SIGNS = str.maketrans("×·⋅∗÷−–[]{}", "****/--()()")
_WORDS = {r"\times": "*", r"\cdot": "*", r"\div": "/", "->": "=", "=>": "="} | dict.fromkeys(
    (r"\boxed", r"\text", r"\left", r"\right", r"\(", r"\)", r"\[", r"\]"), " "
)
_BULLET = re.compile(r"\s*(?:[-*]|[0-9]{1,2}[.)])\s+")
_TIMES = re.compile(r"(?<=[0-9)])\s?[xX]\s?(?=[0-9(])")
_CALL = re.compile(r"[^\W0-9]\(.*")
_RUN = re.compile(r"[0-9+\-*/() \t]+")
_LONGEST_EXPRESSION = 120
"""characters; four numbers with every bracket that can be needed have fewer, and nothing deep fits in"""


def makes_24(text: str, numbers: Sequence[int]) -> bool:
    """Whether the text has an expression that is exactly 24 and uses each of the numbers once and nothing else.

    Numbers, brackets and the four operations count, also as ×, ÷, − or in TeX; what follows an equals sign does not
    belong to it. It must stand alone: as a part of a longer formula, of a call or of a name it does not count.
    The text comes from a model and is never run: it is parsed, bounded, and calculated with fractions.
    """
    for word, sign in _WORDS.items():
        text = text.replace(word, sign)
    wanted = sorted(numbers)
    return any(
        _is_24(expression)
        for line in text.translate(_SIGNS).split("\n")
        for expression in _expressions(line)
        if len(expression) <= _LONGEST_EXPRESSION and sorted(map(int, re.findall("[0-9]+", expression))) == wanted
    )


def _expressions(line: str) -> Iterator[str]:
    """The runs of numbers, operators and brackets of a line that stand alone."""
    if bullet := _BULLET.match(line):
        line = line[bullet.end() :]
    line = _CALL.sub("", _TIMES.sub("*", line))  # what follows a call is code, not an answer
    for run in _RUN.finditer(line):
        expression = run[0].strip()
        before, after = line[max(0, run.start() - 1) : run.start()], line[run.end() : run.end() + 1]
        if _joins(before, run[0][0], "._!√") or _joins(after, run[0][-1], "_!"):
            continue
        if after == "." and line[run.end() + 1 : run.end() + 2].isalnum():  # a decimal, or an attribute
            continue
        if before in ("", ":", "="):  # bold print of Markdown, not a power
            expression = re.sub(r"^\*{1,3} ?(?=[0-9(])", "", expression)
        if after in ("", *"=.,;:"):
            expression = re.sub(r"(?<=[0-9)])\*{1,3}$", "", expression)
        if after == "=" and expression.count("(") == expression.count(")") + 1:  # (6 * 4 = 24)
            expression = expression.removeprefix("(")
        yield expression


def _joins(neighbour: str, edge: str, signs: str) -> bool:
    """Whether the character beside a run belongs to the same formula; `edge` is the run's own character next to it."""
    attached = bool(neighbour) and not edge.isspace() and (neighbour.isalnum() or neighbour in signs)
    return attached or neighbour in tuple("^%@&|")


def _is_24(expression: str) -> bool:
    try:
        return _value(ast.parse(expression, mode="eval").body) == 24
    except (SyntaxError, ValueError, ZeroDivisionError, MemoryError, RecursionError):
        return False


def _value(node: ast.expr) -> Fraction:
    match node:
        case ast.Constant(value=int(value)):
            return Fraction(value)
        case ast.BinOp(left, ast.Add(), right):
            return _value(left) + _value(right)
        case ast.BinOp(left, ast.Sub(), right):
            return _value(left) - _value(right)
        case ast.BinOp(left, ast.Mult(), right):
            return _value(left) * _value(right)
        case ast.BinOp(left, ast.Div(), right):
            return _value(left) / _value(right)
    raise ValueError("neither a number nor one of the four operations")


# The problems. Each is drawn from the random numbers it is given; its answer is calculated, never written down.


def _word_problem(random: Random) -> Problem:
    a, b, c = (random.randint(3, 19) for _ in range(3))
    small, big = random.randint(2, 9), random.randint(30, 90)
    one, two, three = random.sample(_PEOPLE, 3)
    question, value = random.choice(
        [
            (
                (
                    f"{one} buys {a} pencils at {small} coins each and {b} folders at {c} coins each, and pays with "
                    f"1000 coins. How many coins does {one} get back?"
                ),
                1000 - a * small - b * c,
            ),
            (
                (
                    f"{one} reads {a} pages on every day from Monday to Friday and {b} pages on each day of the "
                    f"weekend. How many pages does {one} read in {small} weeks?"
                ),
                small * (5 * a + 2 * b),
            ),
            (
                (
                    f"A baker bakes {small * a + b} rolls. {b} of them burn, and the others go into bags of {small}. "
                    "How many bags are filled?"
                ),
                a,
            ),
            (
                (
                    f"A train runs for {small} hours at {big} kilometres an hour, and then for {a} hours at {big + c} "
                    "kilometres an hour. How many kilometres does it run?"
                ),
                small * big + a * (big + c),
            ),
            (
                (
                    f"{one} has {a} stamps. {two} has {small} times as many as {one}, and {three} has {b} more than "
                    f"{two}. How many stamps do the three have together?"
                ),
                a + 2 * small * a + b,
            ),
            (
                (
                    f"{one} saves {2 * a} coins a week for {b} weeks, spends half of them on a lamp, and then finds "
                    f"{c} coins. How many coins does {one} have?"
                ),
                a * b + c,
            ),
            (
                (
                    f"{a} hives give {big} jars of honey each. {one} keeps {b} jars and sells the others at {small} "
                    f"coins a jar. How many coins does {one} earn?"
                ),
                (a * big - b) * small,
            ),
            (
                (
                    f"A hall has {a} rows of {big} seats. On Friday {b} seats stay empty, and on Saturday {c} more "
                    "than on Friday. How many seats are taken on the two evenings together?"
                ),
                2 * a * big - 2 * b - c,
            ),
        ]
    )
    return _number("gsm8k-like", question, value)


def _competition(random: Random) -> Problem:
    a, b = random.sample(range(3, 30), 2)
    n, m = random.randint(100, 999), random.randint(50, 999)
    p, q, r = (random.randint(2, 7) for _ in range(3))
    question, value = random.choice(
        [
            (f"What is the remainder when {a}^{n} is divided by {m}?", pow(a, n, m)),
            (
                f"How many whole numbers from 1 to {n} are divisible by {a} or by {b}, but not by both?",
                sum((k % a == 0) != (k % b == 0) for k in range(1, n + 1)),
            ),
            (f"What is the greatest common divisor of {n * a * p} and {n * b * q}?", math.gcd(n * a * p, n * b * q)),
            (
                f"How many positive divisors of 2^{p} * 3^{q} * 5^{r} are divisible by 6?",
                sum(i > 0 and j > 0 for i in range(p + 1) for j in range(q + 1) for _ in range(r + 1)),
            ),
            (
                (
                    f"A walk leads from (0, 0) through ({p}, {q}) to ({p + r}, {q + r}) by steps of length 1 to the "
                    "right or up. What is the remainder when the number of such walks is divided by 1000?"
                ),
                math.comb(p + q, p) * math.comb(2 * r, r) % 1000,
            ),
            (
                (
                    f"A sequence begins with {a} and {b}, and each further term is the sum of the two terms before it "
                    f"plus {p}. What is the remainder when its term number {m} is divided by 1000?"
                ),
                _term(a, b, p, m) % 1000,
            ),
            (f"In how many zeros does the product of all whole numbers from 1 to {n} end?", _zeros(n)),
        ]
    )
    if value > 999:
        return _competition(random)
    return _number("aime-like", f"{question} The answer is a whole number from 0 to 999.", value)


def _term(first: int, second: int, plus: int, number: int) -> int:
    for _ in range(number - 1):
        first, second = second, (first + second + plus) % 1000
    return first


def _zeros(n: int) -> int:
    return sum(n // 5**k for k in range(1, 6))


def _games(count: int, random: Random) -> list[Problem]:
    shown = {
        tuple(sorted(map(int, re.findall("[0-9]+", line.partition("numbers")[2]))))
        for shot in _SHOTS.values()
        for line in shot.split("\n")
        if "Make 24" in line
    }
    hands = [hand for hand in itertools.combinations_with_replacement(range(1, 14), 4) if hand not in shown]
    random.shuffle(hands)
    games = ((hand, gold) for hand in hands if (gold := _solution(hand)))
    return [
        Problem(
            "game24", f"Make 24 from the numbers {', '.join(map(str, hand[:3]))} and {hand[3]}.", gold, Makes24(hand)
        )
        for hand, gold in itertools.islice(games, count)
    ]


def _solution(numbers: tuple[int, ...]) -> str | None:
    """An expression of the numbers that is 24. Only the last operation is sought; its sides are known by heart."""
    for chosen, others in _splits(numbers):
        known = _reachable(others)
        for x, left in _reachable(chosen).items():
            if (right := known.get(24 - x)) is not None:
                return f"{left} + {right}"
            if (right := known.get(x - 24)) is not None:
                return f"{left} - {right}"
            if x and (right := known.get(24 / x)) is not None:
                return f"{left} * {right}"
            if x and (right := known.get(x / 24)) is not None:
                return f"{left} / {right}"
    return None


@cache
def _reachable(numbers: tuple[int, ...]) -> dict[Fraction, str]:
    """Every value that an expression of all the numbers can have, with one that has it."""
    if len(numbers) == 1:
        return {Fraction(numbers[0]): str(numbers[0])}
    found: dict[Fraction, str] = {}
    for chosen, others in _splits(numbers):
        for (x, left), (y, right) in itertools.product(_reachable(chosen).items(), _reachable(others).items()):
            found.setdefault(x + y, f"({left} + {right})")
            found.setdefault(x - y, f"({left} - {right})")
            found.setdefault(x * y, f"({left} * {right})")
            if y:
                found.setdefault(x / y, f"({left} / {right})")
    return found


def _splits(numbers: tuple[int, ...]) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Every way to share the numbers between the two sides of an operation."""
    for size in range(1, len(numbers)):
        for places in itertools.combinations(range(len(numbers)), size):
            chosen = tuple(numbers[place] for place in places)
            yield chosen, tuple(number for place, number in enumerate(numbers) if place not in places)


def _choice(task: str, question: str, right: str, wrong: Sequence[str], random: Random) -> Problem:
    options = [right, *wrong]
    random.shuffle(options)
    letters = "ABCDE"[: len(options)]
    lines = [f"{letter}) {option}" for letter, option in zip(letters, options, strict=True)]
    gold = letters[options.index(right)]
    return Problem(task, "\n".join([question, *lines]), gold, LetterIs(gold, letters))


_PEOPLE = ("Ada", "Bruno", "Chloe", "Dario", "Elif", "Femi", "Greta", "Hugo", "Ines", "Jonas")
_PLACES = {
    "a kitchen": ("a frying pan", "a rolling pin", "a whisk"),
    "a bedroom": ("a mattress", "a duvet", "a bedside lamp"),
    "a farm": ("a tractor", "a haystack", "a herd of cows"),
    "an airport": ("a runway", "a control tower", "a boarding gate"),
    "a hospital": ("an operating table", "a stretcher", "an X-ray machine"),
    "a harbour": ("a fishing boat", "a cargo ship", "an anchor chain"),
    "a library": ("a shelf of novels", "a catalogue of books", "a reading room"),
    "a garage": ("a car jack", "a spare tyre", "a can of engine oil"),
    "a theatre": ("a stage curtain", "an orchestra pit", "a row of actors"),
    "a classroom": ("a blackboard", "a piece of chalk", "a row of pupils"),
    "a swimming pool": ("a diving board", "a lane rope", "a swimming coach"),
    "a zoo": ("a lion's cage", "a monkey house", "a penguin basin"),
}
_USES = {
    "a hammer": "driving a nail into a wall",
    "an umbrella": "staying dry in the rain",
    "a needle": "sewing on a button",
    "a broom": "sweeping the floor",
    "a ladder": "reaching a roof",
    "a thermometer": "measuring a fever",
    "a spade": "digging a hole",
    "a kettle": "boiling water",
    "a razor": "shaving a beard",
    "a stamp": "posting a letter",
    "a candle": "lighting a dark room",
    "a saw": "cutting a plank",
    "a comb": "tidying hair",
    "an alarm clock": "waking up in time",
    "a bandage": "covering a wound",
    "a corkscrew": "opening a bottle of wine",
}
"""facts of our own: each thing fits its own place or use and none of the others"""


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
    told = [
        f"{x} is {more} than {y}." if random.random() < 0.5 else f"{y} is {less} than {x}."
        for x, y in itertools.pairwise(people)
    ]
    random.shuffle(told)
    place = random.randrange(5)
    right = people.pop(place)
    rank = ("", "second ", "third ", "fourth ", "fifth ")[place]
    wrong = random.sample(people, 3)
    return _choice("logic-like", f"{' '.join(told)} Who is the {rank}{most} of the five?", right, wrong, random)


_SAYINGS = ("All {} are {}.", "No {} are {}.", "Some {} are {}.", "Some {} are not {}.")
_CLASSES = ("blims", "dorps", "fendles", "gracks", "jintos", "kivets", "mabers", "norvs", "plims", "quorls")
Saying = tuple[int, int, int]
"""which of the four sayings, and of which two of three classes"""


def _syllogism(random: Random) -> Problem:
    premises, follows, does_not = random.choice(_syllogisms())
    classes = random.sample(_CLASSES, 3)
    told, right, *wrong = (
        [_SAYINGS[kind].format(classes[x], classes[y]) for kind, x, y in sayings]
        for sayings in (premises, [random.choice(follows)], random.sample(does_not, 3))
    )
    return _choice("logic-like", f"{' '.join(told)} Which of these must be true?", right[0], wrong[0], random)


@cache
def _syllogisms() -> list[tuple[list[Saying], list[Saying], list[Saying]]]:
    """Pairs of premises, what follows from them about the outer classes, and what does not.

    Found by looking at every world: a world says of each of the eight mixtures of three classes whether there are any.
    What follows does so even where a class is empty; what does not fails even where none is, so that no reading of
    "all" makes two options right.
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
