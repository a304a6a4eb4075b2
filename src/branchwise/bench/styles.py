"""Styles of reasoning as a workload, after StyleBench (Guo et al., 2025, arXiv 2509.20868): five ways to ask for the
same five kinds of problem.

    style   asks for                                             ends with
    cot     chain of thought: numbered steps                     Answer: …
    tot     tree of thought: three ideas, the best carried on    Answer: …
    aot     algorithm of thought: a search with ways back        Answer: …
    sot     sketch of thought: shorthand, one kind per task      \\boxed{…}
    cod     chain of draft: at most five words a step            #### …

The wording of every prompt is our own, and so are most problems: a task whose name ends in "-like" is a SUBSTITUTE for
a data set that was not available (see `problems.py`).

Small models rarely solve these. The benchmark measures how fast a style is written, and also whether the answer is
right.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from branchwise.bench.problems import TASKS, Problem, problems
from branchwise.bench.prompts import Item, read_data
from branchwise.errors import UnknownName, UsageError
from branchwise.registry import nearest

STYLES = ("cot", "tot", "aot", "sot", "cod")


def style_items(styles: Sequence[str], problems_per_task: int, seed: int = 0, gsm8k: Path | None = None) -> list[Item]:
    """The same problems in every style, as items of the category "<style>/<task>"; a seed determines all of them."""
    if not styles:
        raise UsageError(f"There is no style to ask in; choose from {', '.join(STYLES)}.")
    for style in styles:
        if style not in STYLES:
            raise UnknownName(f"Unknown style {style!r}.{nearest(style, list(STYLES))} Known: {', '.join(STYLES)}.")
    tasks = [task for task in TASKS if task != ("gsm8k-like" if gsm8k else "gsm8k")]
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

_SHOTS = {(line["style"], line["kind"]): line["text"] for line in read_data("examples.jsonl")}
"""worked examples by style and kind of answer; no problem that is asked is among them"""


def prompt(style: str, problem: Problem) -> str:
    """A problem as a style asks it."""
    kind = _kind(problem.task)
    how = _SHORTHAND[kind] if style == "sot" else _HOW[style]
    end = _END.get(style, _PLAIN_END).format(wanted=_WANTED[kind])
    shots = _SHOTS.get((style, kind))
    return "\n\n".join([f"{how} {end}", *([shots] if shots else []), f"Problem: {problem.question}"])


def _kind(task: str) -> str:
    return {"game24": "expression", "commonsense-like": "letter", "logic-like": "letter"}.get(task, "number")
