"""Checkers of answers: they find what is meant, and nothing can fool them, stop them or slow them down."""

from __future__ import annotations

import time
from fractions import Fraction

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from branchwise.bench.answers import letter_in, makes_24, number_in
from branchwise.bench.styles import problems
from branchwise.bench.tasks import Problem

HAND = (2, 3, 4, 6)


# Numbers.


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("so 3 and 4 make 7", 7),
        ("Answer: 1,234,567.50", Fraction("1234567.5")),
        ("#### -5", -5),
        ("Answer: −7.", -7),
        ("It is -$3.", -3),
        ("10-5", 5),
        ("(2)-3", 3),
        ("costs $18.", 18),
        ("20%", 20),
        ("Answer: 3/4 of it", Fraction(3, 4)),
        (r"\boxed{\frac{-1}{2}} of 9", Fraction(-1, 2)),
        (r"\boxed{x_{1} = 5} for 3", 5),
        (r"\boxed{1{,}000}", 1000),
        ("Answer: 12\nThat took 5 steps.", 12),
        ("**Answer:**\n\n12\nThat took 5 steps.", 12),
        ("The answer is 12. Then 5", 5),
        ("The answer is 12.\nBut first 5", 12),
        ("Answer: 3\nAnswer: 4", 4),
        ("Answer: 3 + 4 = 7", 7),
        ("Answer: 3\nAnswer:", 3),
        ("Answer: none. #### none", None),
        ("1, 2, 3", 3),
        (".5", Fraction(1, 2)),
        ("3/0", None),
        ("٣", None),
        ("", None),
    ],
)
def test_the_number_of_an_answer_is_found(text: str, value: Fraction | int | None) -> None:
    assert number_in(text) == value


@given(st.integers(-(10**12), 10**12), st.sampled_from(["{}", "{:,}", "{}.0", "{:,}.00"]))
def test_a_number_is_found_however_it_is_written(number: int, form: str) -> None:
    for text in ("Answer: {}.\nIn 3 steps", "#### {}", r"in 3 steps \boxed{{{}}}", "2 and {}"):
        assert number_in(text.format(form.format(number))) == number


@pytest.mark.parametrize("text", ["9" * 100_000, "1/" + "9" * 5000, "1." + "0" * 5000])
def test_a_number_of_thousands_of_digits_is_none(text: str) -> None:
    assert number_in(text) is None


@given(st.text(alphabet=st.sampled_from(list("0123456789,./-−$\\{}#%:\n Answerboxdfc٣²")), max_size=60) | st.text())
def test_junk_has_a_number_or_none_and_never_raises(text: str) -> None:
    found = number_in(text)
    assert found is None or isinstance(found, Fraction)


# Letters.


@pytest.mark.parametrize(
    ("text", "letter"),
    [
        ("Answer: B", "B"),
        ("answer: (b)", "B"),
        ("**Answer:** D) plank", "D"),
        ("Answer:\n\nB\nbecause A fails", "B"),
        ("Answer: option C", "C"),
        ("Answer: The right one is (C) plank", "C"),
        ("Answer: A because", "A"),
        ("Answer: a dog", None),
        ("#### C", "C"),
        (r"\boxed{D}", "D"),
        (r"\boxed{\text{D}}", "D"),
        ("The right option is C.", "C"),
        ("B. A bird flies.", "B"),
        ("A bird flies.", None),
        ("I think B is it", "B"),
        ("Answer: A\nAnswer: B", "B"),
        ("Answer: E", None),
        ("ABCD", None),
        ("Ä", None),
        ("", None),
    ],
)
def test_the_letter_of_an_answer_is_found(text: str, letter: str | None) -> None:
    assert letter_in(text, "ABCD") == letter


def test_without_options_there_is_no_letter() -> None:
    assert letter_in("Answer: A", "") is None


@given(
    st.text(alphabet=st.sampled_from(list("ABCDEabcde ():.*#\\{}\n'K")) | st.characters()),
    st.sampled_from(["ABCD", "ABCDE"]),
)
def test_junk_has_an_option_or_none_and_never_raises(text: str, options: str) -> None:
    assert letter_in(text, options) in (None, *options)


# Game of 24.


@pytest.mark.parametrize(
    "text",
    [
        "6 * 4 * (3 - 2)",
        "6*4*(3-2)=24",
        "6 × 4 × (3 − 2) = 24",
        "6 x 4 x (3 - 2)",
        "24 = 6*4/(3-2)",
        "6·4÷(3–2)",
        "[6 * 4] * {3 - 2}",
        r"\boxed{6 \times 4 \cdot (3 - 2)}",
        r"\(6 \div (3-2) \times 4\)",
        r"$\left(6 \times 4\right) \times (3 - 2)$",
        "**6*4*(3-2)**",
        "**Answer:** 6*4*(3-2)",
        "**Answer: 6*4*(3-2)**",
        "- 6*4*(3-2) = 24.",
        "2. 6*4*(3-2)",
        "(6*4*(3-2) = 24)",
        "Solved! 6*4*(3-2) gives 24, as 6*4 is 24.",
        "<think>6*4 = 24</think>\nAnswer: 6*4*(3-2)",
        "3 + 2 + 4 + 6 is 15, no\n6*4*(3-2) -> 24",
        "((((6))*4)*(3-2))",
    ],
)
def test_an_expression_that_is_24_is_found(text: str) -> None:
    assert makes_24(text, HAND)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "24",
        "6 * 4",
        "6*4*(3-2)*1",
        "64*(3-2)",
        "6+4+3+2",
        "6*4*(3-2)**2",
        "6*4*(3-2)**x",
        "6*4*(3-2) ** x",
        "6*4*(3-2)^2",
        "6*4*(3-2) % 5",
        "6*4//(3-2)",
        "6*4*(3-2)!",
        "√ 6*4*(3-2)",
        "-6*4*(3-2)",
        "x + 6*4*(3-2)",
        "x*6*4*(3-2)",
        "6*4*(3-2)*x",
        "6*4*(3-2) + f(1)",
        "abs(6*4*(3-2))",
        "max(0, 6*4*(3-2))",
        "max(0, 6*4*(3-2), 1)",
        "__import__('os').system(6*4*(3-2))",
        "6*4*(3-2).real",
        "6*4*(3-2).bit_length()",
        "6*4*(3-2).5",
        "0.6*4*(3-2)",
        "6 4*(3-2)",
        "(6)(4)*(3-2)",
        "6*4/(3-2-0)",
        "6*4*(3-2",
        "6*4*3-2)",
        "٦*٤*(٣-٢)",
        "٦6*4*(3-2)",
        "６*４*(３-２)",
        "06*4*(3-2)",
        "6*4*(3\n-2)",
    ],
)
def test_what_is_no_expression_of_the_numbers_is_refused(text: str) -> None:
    assert not makes_24(text, HAND)


def test_fractions_on_the_way_are_exact() -> None:
    assert makes_24("8 / (3 - 8 / 3)", (3, 3, 8, 8))
    assert not makes_24("8 / (3 - 8 / 3)", (3, 3, 3, 8))


def test_a_division_by_zero_is_no_solution() -> None:
    assert not makes_24("8 / (3 - 3) * 8", (3, 3, 8, 8))


@pytest.mark.parametrize(
    "text",
    [
        "(" * 100_000,
        "(" * 50_000 + "6*4*(3-2)" + ")" * 50_000,
        "9" * 100_000,
        "9**9**9**9**9",
        "6*4*(3-2)**" + "9" * 90_000,
        "-" * 100_000 + "6",
        " " * 100_000,
        "a" * 100_000,
        "x(" * 50_000,
        "6 x " * 25_000,
        "6a" * 50_000,
        "1," * 50_000,
        "6+4+3+2\n" * 12_500,
        "((((6+4+3+2\n" * 8_000,
        "*" * 100_000,
        "\\boxed{" * 14_000,
        "answer" + " " * 99_000,
        "####" * 25_000,
        "1,234" + ",234" * 25_000 + "5",
        "Answer:\n" * 12_500,
    ],
    ids=lambda text: f"{text[:8]!r}",
)
def test_hostile_answers_are_refused_quickly(text: str) -> None:
    started = time.perf_counter()
    assert not makes_24(text, HAND)
    letter_in(text, "ABCD")
    number_in(text)
    assert time.perf_counter() - started < 20  # a check whose time grows with the square takes minutes


Tree = int | tuple["Tree", str, "Tree"]


@st.composite
def expressions(draw: st.DrawFn) -> tuple[Tree, tuple[int, ...]]:
    """A tree over four numbers, in any shape and order."""
    hand = draw(st.tuples(*[st.integers(1, 13)] * 4))
    parts: list[Tree] = list(hand)
    while len(parts) > 1:
        left = parts.pop(draw(st.integers(0, len(parts) - 1)))
        right = parts.pop(draw(st.integers(0, len(parts) - 1)))
        parts.append((left, draw(st.sampled_from("+-*/")), right))
    return parts[0], hand


def value(tree: Tree) -> Fraction | None:
    """The truth, along the tree that was drawn and not along its text."""
    if isinstance(tree, int):
        return Fraction(tree)
    left, right = value(tree[0]), value(tree[2])
    if left is None or right is None or (tree[1] == "/" and right == 0):
        return None
    return {"+": left + right, "-": left - right, "*": left * right, "/": left / (right or 1)}[tree[1]]


def written(tree: Tree) -> str:
    return str(tree) if isinstance(tree, int) else f"({written(tree[0])} {tree[1]} {written(tree[2])})"


@given(expressions())
@example(((8, "/", (3, "-", (8, "/", 3))), (3, 3, 8, 8)))
@example((((6, "*", 4), "*", (3, "-", 2)), HAND))
def test_an_expression_is_24_exactly_when_its_tree_is(drawn: tuple[Tree, tuple[int, ...]]) -> None:
    tree, hand = drawn
    assert makes_24(written(tree), hand) == (value(tree) == 24)


@given(st.sampled_from(problems("game24", 50)), st.integers(1, 13), st.integers(0, 3))
def test_a_solution_of_other_numbers_is_none(problem: Problem, number: int, place: int) -> None:
    hand = list(problem.check.numbers)  # type: ignore[attr-defined]
    assume(hand[place] != number)
    hand[place] = number
    assert not makes_24(problem.gold, hand)


@given(st.text(alphabet=st.sampled_from(list("0123456789+-*/() .=x×÷−[]{}\\^!_a\n٣²"))) | st.text())
def test_junk_is_judged_and_never_raises(text: str) -> None:
    assert makes_24(text, HAND) in (True, False)
