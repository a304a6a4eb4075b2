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
