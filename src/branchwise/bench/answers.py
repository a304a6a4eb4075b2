"""Checkers: find the number, letter or expression that an answer gives, and compare it with the right one."""

from __future__ import annotations

import ast
import operator
import re
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction


@dataclass(frozen=True)
class NumberIs:
    value: Fraction

    def __call__(self, text: str) -> bool:
        return number_in(text) == self.value


@dataclass(frozen=True)
class LetterIs:
    letter: str
    options: str

    def __call__(self, text: str) -> bool:
        return letter_in(text, self.options) == self.letter


@dataclass(frozen=True)
class Makes24:
    numbers: tuple[int, ...]

    def __call__(self, text: str) -> bool:
        return makes_24(text, self.numbers)


@dataclass(frozen=True)
class Manner:
    """How an answer is given. The abstract of StyleBench (arXiv 2509.20868) says that small models fail to follow
    output instructions and guess; these two are counted here."""

    followed: bool
    """whether the answer has the ending that was asked for, with a value of the kind that was asked for"""
    guessed: bool
    """whether an answer is given with hardly a word before it"""


FEWEST_WORDS = 4
"""the fewest words before an answer that is not a guess; the shortest step, such as 30 - 12 = 18, has five"""


@dataclass(frozen=True)
class Ending:
    """The form in which a style asks for an answer."""

    mark: str
    """the mark before the answer: Answer:, #### or \\boxed{"""
    kind: str
    """the kind of answer: number, letter or expression"""
    options: str = ""
    """the letters to choose from"""

    def __call__(self, text: str) -> Manner:
        before, mark, after = text.rpartition(self.mark)
        followed = bool(mark) and self._given(after.strip().partition("\n")[0])
        given = followed or self._given(text)
        thoughts = before if mark else text
        return Manner(followed, given and len(thoughts.split()) < FEWEST_WORDS)

    def _given(self, text: str) -> bool:
        if self.kind == "letter":
            return letter_in(text, self.options) is not None
        return number_in(text) is not None


_MARKER = re.compile(r"\banswer(?:\s{1,3}is\b|\*{0,2}\s{0,3}:)|####|(?P<box>\\boxed\s?\{)", re.IGNORECASE)
_DIGITS = r"[0-9]{1,3}(?:,[0-9]{3}){1,20}(?![0-9])|[0-9]+"
_NUMBER = re.compile(
    r"(?:(?<![\w)\].])(?P<minus>[-−]))?\\?\$?"  # a minus after a number or a bracket is a subtraction
    rf"(?P<value>(?:{_DIGITS})(?:\.[0-9]+)?|\.[0-9]+)"
    r"(?:\s?/\s?(?P<below>[0-9]+))?"
)
_FRACTION = re.compile(r"\\[dt]?frac\s?\{(-?[0-9]{1,20})\}\s?\{([0-9]{1,20})\}")
_LONGEST_NUMBER = 60
"""the most characters of a number; Python refuses to convert numbers of thousands of digits, which no problem needs"""


def number_in(text: str) -> Fraction | None:
    """The number that an answer gives: the last number in the line after "Answer:", "####" or in \\boxed{}, else the
    last number of the text.

    If several places are marked, the last one with a number counts; "the answer is" marks like "Answer:".
    """
    text = _FRACTION.sub(r"\1/\2", text.replace("{,}", ",").replace("\\!", "").replace("\\,", ""))
    lines = (line for part in marked(text) for line in part.split("\n"))
    for place in (*lines, text):
        if numbers := deque(_NUMBER.finditer(place), maxlen=1):
            return _number_of(numbers[0])
    return None


def _number_of(found: re.Match[str]) -> Fraction | None:
    if len(found[0]) > _LONGEST_NUMBER:
        return None
    below = int(found["below"] or 1)
    value = Fraction(found["value"].replace(",", ""))
    return None if below == 0 else (-value if found["minus"] else value) / below


def marked(text: str) -> Iterator[str]:
    """The text after each mark of an answer up to the next mark, the last one first; for \\boxed{} the text inside."""
    end = len(text)
    for mark in reversed(list(_MARKER.finditer(text))):
        part = text[mark.end() : end]
        yield _up_to_brace(part) if mark["box"] else part
        end = mark.start()


def _up_to_brace(text: str) -> str:
    depth = 1
    for place, character in enumerate(text):
        depth += (character == "{") - (character == "}")
        if depth == 0:
            return text[:place]
    return text


def letter_in(text: str, options: str) -> str | None:
    """The option that an answer gives, of letters such as "ABCD": the letter after a mark such as "Answer:", else the
    letter that the text begins with, else the last letter that stands alone. The article "A" is no option."""
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
"""the most characters of an expression; four numbers with all needed brackets are shorter, and nothing deep fits in"""


def makes_24(text: str, numbers: Sequence[int]) -> bool:
    """Whether the text has an expression that is exactly 24 and uses each of the numbers once.

    It may use numbers, brackets and the four operations, also as ×, ÷, − or in TeX, and ends at an equals sign. It must
    stand alone: a part of a longer formula, of a call or of a name does not count. The text comes from a model and is
    never executed: it is parsed, bounded, and calculated with fractions.
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
    """The parts of a line that consist of numbers, operators and brackets, and stand alone."""
    if bullet := _BULLET.match(line):
        line = line[bullet.end() :]
    line = _CALL.sub("", _TIMES.sub("*", line))  # code after a call is no answer
    for run in _RUN.finditer(line):
        expression = run[0].strip()
        before, after = line[max(0, run.start() - 1) : run.start()], line[run.end() : run.end() + 1]
        if _joins(before, run[0][0], "._!") or _joins(after, run[0][-1], "_!"):
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
    return attached or neighbour in tuple("^%@&|√")


_OPERATIONS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


def _is_24(expression: str) -> bool:
    try:
        return _calculated(ast.parse(expression, mode="eval").body) == 24
    except (SyntaxError, ValueError, ZeroDivisionError, MemoryError, RecursionError):
        return False


def _calculated(node: ast.expr) -> Fraction:
    match node:
        case ast.Constant(value=int(value)):
            return Fraction(value)
        case ast.BinOp(left, sign, right) if operation := _OPERATIONS.get(type(sign)):
            return operation(_calculated(left), _calculated(right))
    raise ValueError("neither a number nor one of the four operations")
