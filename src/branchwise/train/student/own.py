"""On-policy data: what the student itself would draft.

A text of the target is cut somewhere in its answer, and the student goes on from there. No gradient goes through the
draw; the target only gives its distributions at these places. Many continuations are written at once, so the student
has learned a little more when the last of them is read.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from branchwise.train.corpus import Text, next_batches
from branchwise.train.texts import Writer


@dataclass
class OwnTexts:
    """Batches that a student writes."""

    texts: Sequence[Text]
    """the texts that the student continues"""
    tokens: int
    """the tokens of a batch"""
    span: int
    """the tokens of a continuation"""
    temperature: float
    seed: int
    stops: Sequence[int] = ()
    """tokens that end a text"""
    batches: int = 8
    """how many batches are written at once"""
    waiting: list[list[Text]] = field(default_factory=list)
    rounds: int = 0

    def next(self, student: Any) -> list[Text]:
        if not self.waiting:
            self.waiting = self._write(student)
            self.rounds += 1
        return self.waiting.pop(0)

    def _write(self, student: Any) -> list[list[Text]]:
        rng = random.Random(f"own {self.seed} {self.rounds}")
        begun, room = list[list[int]](), self.tokens * self.batches
        while room > 0 or not begun:
            text = rng.choice(self.texts)
            first = min(text.prompt, len(text.tokens) - 1)
            begun.append(text.tokens[: rng.randint(max(1, first), len(text.tokens) - 1)].tolist())
            room -= len(begun[-1]) + self.span
        # On a GPU the copy is in half precision; the student itself stays in float32.
        writing = copy.deepcopy(student).eval().requires_grad_(False)
        if writing.device.type == "cuda":
            writing = writing.to(torch.bfloat16)
        with Writer(writing, self.stops, len(begun)) as writer:
            heat = [self.temperature] * len(begun)
            found = writer.write(begun, heat, self.span, seed=self.seed + self.rounds)
        texts = [
            Text(torch.tensor([*before, *after], dtype=torch.int32), len(before), self.temperature)
            for before, after in zip(begun, found, strict=True)
        ]
        written = next_batches(texts, self.tokens, len(texts))
        rng.shuffle(written)
        return written

    # Checkpoints

    def state(self) -> dict[str, Any]:
        waiting = [[(text.tokens, text.prompt) for text in batch] for batch in self.waiting]
        return {"waiting": waiting, "rounds": self.rounds}

    def restore(self, state: dict[str, Any]) -> None:
        self.rounds = state["rounds"]
        self.waiting = [[Text(tokens, prompt, self.temperature) for tokens, prompt in one] for one in state["waiting"]]
