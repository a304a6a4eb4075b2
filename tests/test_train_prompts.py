"""Prompts for texts to learn from: many, different, the same for a seed, and none of an evaluation."""

from __future__ import annotations

import random
import re

from branchwise.train import prompts


def test_there_are_as_many_as_asked_for_and_no_blank_is_left() -> None:
    asked = prompts.asked(3000, seed=1)
    assert len(set(asked)) == 3000
    code = prompts.code(500, seed=1)
    read = prompts.reading(["A text.", "Another text.", "A third one."], 300, seed=1)
    assert (len(set(code)), len(read)) == (500, 300)
    for text in (*asked, *read):
        assert not re.search(r"\{\w*\}", text), text
    for text in code:
        assert not re.search(r"\{(verb|noun|Noun)\}|\{\{", text), text
    assert any("A text.\n\nA" in text for text in read), "some are about several texts"


def test_no_kind_of_prompt_makes_up_most_of_them() -> None:
    asked = prompts.asked(20_000, seed=0)
    begun = [" ".join(text.split()[:3]) for text in asked]
    most = max(begun.count(kind) for kind in set(random.Random(0).sample(begun, 500)))
    assert most < 0.05 * len(asked)
    assert len({word for text in asked for word in text.split()}) > 1200


def test_a_seed_decides_everything() -> None:
    assert prompts.asked(50, seed=3) == prompts.asked(50, seed=3) != prompts.asked(50, seed=4)
    assert prompts.code(50, seed=3) == prompts.code(50, seed=3) != prompts.code(50, seed=4)


def test_prompts_of_an_evaluation_are_left_out_with_those_close_to_them() -> None:
    evaluation = ["Write a short story about a lighthouse keeper who finds a strange letter on the beach one morning."]
    close = "Please write a short story about a lighthouse keeper who finds a strange letter on the beach!"
    other = "Write a short story about a lighthouse and the people who used to live and work in it for many years."
    assert list(prompts.without_copies([evaluation[0].upper(), close, other, "Hello!"], evaluation)) == [
        other,
        "Hello!",
    ]
    assert list(prompts.without_copies(["Hello, there!"], ["hello there"])) == []


def test_a_program_begins_where_its_docstring_ends() -> None:
    begun = 'def add(a, b):\n    """The sum of two numbers.\n\n    >>> add(1, 2)\n    3\n    """'
    assert prompts.beginning(f"{begun}\n    return a +") == f"{begun}\n"
    assert (
        prompts.beginning("def add(a, b):\n    # the sum of both\n    ret") == "def add(a, b):\n    # the sum of both\n"
    )
    assert prompts.beginning("def add(a, b):\n    return a") == "", "too little to be a prompt"


def test_programmers_ask_for_programs_and_about_programs() -> None:
    opened = prompts.openings(200, seed=1)
    turns = prompts.programming(["x = 1"], 400, seed=1)
    assert len(opened) == 200
    assert opened == prompts.openings(200, seed=1) != prompts.openings(200, seed=2)
    assert turns == prompts.programming(["x = 1"], 400, seed=1) != prompts.programming(["x = 1"], 400, seed=2)
    for text in (*opened, *turns):
        assert not re.search(r"\{\w*\}", text), text
    about = [text for text in turns if "x = 1" in text]
    assert 10 < len(about) < len(turns) - 100
    assert len(prompts.programming([], 400, seed=1)) > 350
