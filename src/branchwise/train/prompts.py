"""Prompts for texts that a target writes: its own user turns, topics and tasks, and texts that it wrote.

No prompt of an evaluation may be among them: `without_copies` leaves out every prompt that is close to one.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterable, Iterator, Sequence
from importlib.resources import files
from typing import Any

WORDS = 6
"""how many consecutive words two prompts must share to have something in common"""
SHARED = 0.5
"""a prompt is a copy if this share of it is also in an evaluation prompt"""


def _known() -> dict[str, list[str]]:
    known: dict[str, list[str]] = json.loads(files("branchwise.train").joinpath("data/prompts.json").read_text())
    return known


def topics() -> list[str]:
    """The topics that tasks are about."""
    return _known()["topics"]


def asked(count: int, seed: int) -> list[str]:
    """User turns: tasks about topics, questions of fact, translations and sums."""
    known, rng = _known(), random.Random(f"asked {seed}")
    found = dict[str, None]()
    while len(found) < count:
        kind = rng.choices(KINDS, SHARES)[0]
        found.setdefault(kind(known, rng))
    return list(found)


def _topic(known: dict[str, list[str]], rng: random.Random) -> str:
    """A topic, or an aspect of it."""
    topic = rng.choice(known["topics"])
    aspect = rng.choice(known["aspects"]) if rng.random() < 0.5 else "{topic}"
    return aspect.format(topic=topic, place=rng.choice(known["places"]))


def _task(known: dict[str, list[str]], rng: random.Random) -> str:
    filled = rng.choice(known["tasks"]).format(topic=_topic(known, rng), other=rng.choice(known["topics"]))
    return f"{filled} {rng.choice(known['manners'])}".strip()


def _fact(known: dict[str, list[str]], rng: random.Random) -> str:
    names = {"place": "places", "thing": "inventions", "things": "things", "topic": "topics"}
    return rng.choice(known["facts"]).format(**{name: rng.choice(known[many]) for name, many in names.items()})


def _translation(known: dict[str, list[str]], rng: random.Random) -> str:
    foreign = rng.random() < 0.4
    sentence = rng.choice(known["foreign" if foreign else "sentences"])
    sentence = sentence.format(topic=rng.choice(known["topics"]), place=rng.choice(known["places"]))
    language = "English" if foreign else rng.choice(known["languages"])
    return rng.choice(known["translation"]).format(language=language, sentence=sentence)


def _sum(known: dict[str, list[str]], rng: random.Random) -> str:
    numbers = {name: rng.randint(2, 60) for name in "abc"} | {"d": rng.randint(100, 900)}
    chosen = {"name": rng.choice(known["names"]), "things": rng.choice(known["things"])}
    return rng.choice(known["arithmetic"]).format(**chosen, **numbers)


KINDS = (_task, _fact, _translation, _sum)
SHARES = (0.64, 0.1, 0.12, 0.14)


def reading(texts: Sequence[str], count: int, seed: int) -> list[str]:
    """User turns about one to three of these texts each."""
    known, rng = _known(), random.Random(f"reading {seed}")
    found = []
    for _ in range(count if texts else 0):
        some = rng.sample(texts, min(len(texts), rng.choices((1, 2, 3), (0.6, 0.25, 0.15))[0]))
        found.append(rng.choice(known["reading"]).format(text="\n\n".join(some), topic=rng.choice(known["topics"])))
    return found


def code(count: int, seed: int) -> list[str]:
    """Beginnings of programs, which are continued as they are."""
    known, rng = _known(), random.Random(f"code {seed}")
    parts = [(form, verb, noun) for form in known["code"] for verb in known["verbs"] for noun in known["nouns"]]
    rng.shuffle(parts)
    filled = (form.format(verb=verb, noun=noun, Noun=noun.title()) for form, verb, noun in parts)
    return list(dict.fromkeys(filled))[:count]  # repeated lines are dropped; some forms have no blank to fill


def openings(count: int, seed: int) -> list[str]:
    """The first words of programs. They repeat, because the model decides what becomes of them."""
    known, rng = _known(), random.Random(f"openings {seed}")
    found = []
    for _ in range(count):
        opening = rng.choice(known["openings"]).format(verb=rng.choice(known["verbs"]), noun=rng.choice(known["nouns"]))
        found.append(rng.choice(known["headers"]) + opening)
    return found


def beginning(program: str) -> str:
    """A program up to the end of its first docstring, or up to its last whole line; empty if that is too little."""
    ends = [found.end() for found in re.finditer(r'"""|\'\'\'', program)]
    begun = program[: ends[1]] if len(ends) > 1 else program.rpartition("\n")[0]
    return f"{begun}\n" if len(re.findall(r"\w+", begun)) > WORDS else ""


def programming(programs: Sequence[str], count: int, seed: int) -> list[str]:
    """User turns of programmers: half of them ask for a program, half ask something about one of these programs."""
    known, rng = _known(), random.Random(f"programming {seed}")
    found = []
    for _ in range(count):
        words = {"verb": rng.choice(known["verbs"]), "noun": rng.choice(known["nouns"])}
        words |= {"language": rng.choice(known["programming languages"]), "topic": rng.choice(known["topics"])}
        if programs and rng.random() < 0.5:
            found.append(rng.choice(known["about code"]).format(code=rng.choice(programs), **words))
        else:
            found.append(f"{rng.choice(known['programs']).format(**words)} {rng.choice(known['manners'])}".strip())
    return list(dict.fromkeys(found))


def as_turn(tokenizer: Any, content: str) -> str:
    """A question as the model reads it; without a chat template, the question as it is."""
    if not tokenizer.chat_template:
        return f"{content}\n"
    message = [{"role": "user", "content": content}]
    shown: str = tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
    return shown


def user_prefix(tokenizer: Any) -> str:
    """What the chat template writes before a user's turn, the system prompt included; without a template, the token
    that texts begin with."""
    if not tokenizer.chat_template:
        return str(tokenizer.bos_token or tokenizer.eos_token or "The")
    mark = "@@user@@"
    shown: str = tokenizer.apply_chat_template([{"role": "user", "content": mark}], tokenize=False)
    return shown.partition(mark)[0]


def without_copies(prompts: Iterable[str], evaluation: Iterable[str]) -> Iterator[str]:
    """The prompts of which no large part is in a prompt of an evaluation."""
    taken = {run for prompt in evaluation for run in _runs(prompt)}
    for prompt in prompts:
        runs = _runs(prompt)
        if sum(run in taken for run in runs) < SHARED * len(runs):
            yield prompt


def _runs(text: str) -> list[tuple[str, ...]]:
    """All runs of consecutive words; a short text is one run."""
    words = re.findall(r"\w+", text.lower())
    return [tuple(words[at : at + WORDS]) for at in range(max(1, len(words) - WORDS + 1))]
