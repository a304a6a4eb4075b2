"""Styles of reasoning as a workload, after StyleBench (Guo et al., 2025, arXiv 2509.20868): five ways to ask for the
same five kinds of problem.

    style   asks for                                             ends with
    cot     chain of thought: numbered steps                     Answer: …
    tot     tree of thought: three ideas, the best carried on    Answer: …
    aot     algorithm of thought: a search with ways back        Answer: …
    sot     sketch of thought: shorthand, one kind per task      \\boxed{…}
    cod     chain of draft: at most five words a step            #### …

The wording of every prompt is our own. So are most problems, which stand in for data sets that were not to be had: a
task whose name ends in "-like" is a SUBSTITUTE, as `problems.py` says.

Small models seldom solve these. What is measured is how fast a style is written; whether the answer is right stands
beside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from branchwise.bench.items import Item
from branchwise.bench.problems import TASKS, Problem, problems
from branchwise.errors import UnknownName, UsageError
from branchwise.registry import nearest

STYLES = ("cot", "tot", "aot", "sot", "cod")


def style_items(styles: Sequence[str], problems_per_task: int, seed: int = 0, gsm8k: Path | None = None) -> list[Item]:
    """The same problems in every style, as items of the category "<style>/<task>"; the same seed gives the same."""
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
