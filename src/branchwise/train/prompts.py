"""Prompts to let a target write texts: its own, those of topics and tasks, and what it wrote to be read again.

No prompt of an evaluation may be among them: `without_copies` leaves out whatever is close to one.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterable, Iterator, Sequence
from importlib.resources import files
from typing import Any

WORDS = 6
"""two prompts share something if they share so many consecutive words"""
SHARED = 0.5
"""a prompt is a copy if so much of it is shared with an evaluation prompt"""


def _known() -> dict[str, list[str]]:
    known: dict[str, list[str]] = json.loads(files("branchwise.train").joinpath("data/prompts.json").read_text())
    return known


def asked(count: int, seed: int) -> list[str]:
    """User turns: tasks about topics, and sums."""
    known, rng = _known(), random.Random(f"asked {seed}")
    found = dict[str, None]()
    while len(found) < count:
        if rng.random() < 0.1:
            number = {name: rng.randint(2, 60) for name in "abc"} | {"d": rng.randint(100, 900)}
            filled = rng.choice(known["arithmetic"]).format(
                name=rng.choice(known["names"]), things=rng.choice(known["things"]), **number
            )
        else:
            topic, other = rng.sample(known["topics"], 2)
            filled = rng.choice(known["tasks"]).format(topic=topic, other=other)
        found.setdefault(filled)
    return list(found)


def reading(texts: Sequence[str], seed: int) -> list[str]:
    """A user turn about each of these texts."""
    known, rng = _known(), random.Random(f"reading {seed}")
    return [rng.choice(known["reading"]).format(text=text) for text in texts]


def code(count: int, seed: int) -> list[str]:
    """Beginnings of programs, to be continued as they are."""
    known, rng = _known(), random.Random(f"code {seed}")
    pairs = [(verb, noun, form) for verb in known["verbs"] for noun in known["nouns"] for form in known["code"]]
    rng.shuffle(pairs)
    return [form.format(verb=verb, noun=noun, Noun=noun.title()) for verb, noun, form in pairs[:count]]


def user_prefix(tokenizer: Any) -> str:
    """What the chat template writes before a user's turn, the system prompt included."""
    mark = "@@user@@"
    shown: str = tokenizer.apply_chat_template([{"role": "user", "content": mark}], tokenize=False)
    return shown.partition(mark)[0]


def without_copies(prompts: Iterable[str], evaluation: Iterable[str]) -> Iterator[str]:
    """The prompts that are not, for the most part, in a prompt of an evaluation."""
    taken = {run for prompt in evaluation for run in _runs(prompt)}
    for prompt in prompts:
        runs = _runs(prompt)
        if sum(run in taken for run in runs) < SHARED * len(runs):
            yield prompt


def _runs(text: str) -> list[tuple[str, ...]]:
    """Consecutive words; a short text is one run."""
    words = re.findall(r"\w+", text.lower())
    return [tuple(words[at : at + WORDS]) for at in range(max(1, len(words) - WORDS + 1))]
