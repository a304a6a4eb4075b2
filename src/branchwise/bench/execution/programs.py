"""Functions to complete, as HumanEval (Chen et al., 2021, arXiv 2107.03374) asks for them, checked by their tests.

An answer continues the prompt and ends where the function does; what a model writes after it does not count. An answer
that holds the whole function in a block of Markdown counts as well.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from branchwise.bench.execution.sandbox import run_tests

_BLOCK = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)(?:```|\Z)", re.DOTALL)


@dataclass(frozen=True)
class Program:
    """A problem of HumanEval. Calling it with an answer executes the answer, and says whether it passes."""

    prompt: str
    entry: str
    """the name of the function"""
    tests: str
    """source code that defines `check(candidate)`"""

    def __call__(self, text: str) -> bool:
        return run_tests(self.completed(text), self.entry, f"{self.prompt}\n    pass\n\n{self.tests}").passed

    def completed(self, text: str) -> str:
        """The source code of an answer: the prompt, and the rest of its function or a whole function after it."""
        defined = re.compile(rf"^def {re.escape(self.entry)}\b", re.MULTILINE)
        for block in _BLOCK.findall(text):
            if defined.search(block):
                return f"{self.prompt}\n    pass\n\n{block}"
        return self.prompt + body(text)


def body(text: str) -> str:
    """The lines before the first line that stands at the margin, unless that line closes a bracket or is empty."""
    lines = text.split("\n")
    ends = (number for number, line in enumerate(lines) if number and re.match(r"[^\s)\]}]", line))
    return "\n".join(lines[: next(ends, len(lines))]) + "\n"
