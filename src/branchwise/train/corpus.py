"""Texts to learn from, one format for heads and students: JSON lines with a prompt and what the target answered.

A line has `prompt` and `answer`, or `text` alone. `branchwise train data` adds the `temperature` at which the answer
was drawn, its `topic`, whether it is `held_out`, `raw` if the prompt is continued without the chat template, and `cut`
if a loop was cut. A run keeps the same texts in one file of tokens, `texts.pt`.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from branchwise.errors import UsageError
from branchwise.train import prompts
from branchwise.train.keeping import kept_whole

HELD_OUT = 0.02
"""the share that is held out of texts that do not say whether they are"""
LEAST, LONGEST = 8, 2048
"""the fewest tokens of a text, prompt included, and the most; a longer text is cut"""


@dataclass(frozen=True)
class Text:
    """A prompt and what the target wrote after it."""

    tokens: Tensor
    """(length,) int32"""
    prompt: int
    """the number of tokens of the prompt"""
    temperature: float | None = None
    """the temperature at which the answer was drawn; None if unknown"""
    held_out: bool | None = None
    """whether the text may not be learned from; None if undecided"""


class Texts:
    """The texts that a run learns from, in one file."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def read(self) -> tuple[list[Text], list[Text]]:
        """Texts to learn from, and held-out texts: those that are marked, or else a small share of all."""
        kept = torch.load(self.file, weights_only=True)
        tokens = kept["tokens"].split(kept["lengths"].tolist())
        heats, sides = kept["temperatures"].tolist(), kept["held_out"].tolist()
        texts = [
            Text(part, prompt, None if math.isnan(heat) else heat, None if side < 0 else bool(side))
            for part, prompt, heat, side in zip(tokens, kept["prompts"].tolist(), heats, sides, strict=True)
        ]
        random.Random(0).shuffle(texts)
        held_out = [text for text in texts if text.held_out]
        if held_out and len(held_out) < len(texts):
            return [text for text in texts if not text.held_out], held_out
        count = max(1, round(HELD_OUT * len(texts)))
        return texts[count:], texts[:count]

    def write(self, texts: Sequence[Text]) -> None:
        heats = [math.nan if text.temperature is None else text.temperature for text in texts]
        kept = {
            "tokens": torch.cat([text.tokens for text in texts]),
            "lengths": torch.tensor([len(text.tokens) for text in texts]),
            "prompts": torch.tensor([text.prompt for text in texts]),
            "temperatures": torch.tensor(heats, dtype=torch.float64),
            "held_out": torch.tensor([-1 if text.held_out is None else int(text.held_out) for text in texts]),
        }
        kept_whole(self.file, kept)


def given_texts(file: Path, tokenizer: Any) -> list[Text]:
    """Texts of a file: the `texts.pt` of another run, or JSON lines."""
    if file.suffix == ".pt":
        learn, held_out = Texts(file).read()
        return [*held_out, *learn]
    found = []
    try:
        lines = file.read_text().split("\n")  # not splitlines: JSON strings may hold other line separators
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{file} cannot be read as text: {error}.") from None
    for number, line in enumerate(lines, 1):
        try:
            known = json.loads(line) if line.strip() else {}
        except ValueError:
            raise UsageError(f"Line {number} of {file} is no JSON.") from None
        if not isinstance(known, dict) or (known and not (known.keys() >= {"prompt", "answer"} or "text" in known)):
            raise UsageError(f"Line {number} of {file} has neither prompt and answer nor text.")
        if known:
            prompt, answer = _tokens_of(known, tokenizer)
            if len(prompt) + len(answer) > LEAST:
                tokens = torch.tensor([*prompt, *answer], dtype=torch.int32)[:LONGEST]
                about = known.get("temperature"), known.get("held_out")
                found.append(Text(tokens, max(1, len(prompt)), *about))
    return found


def _tokens_of(known: dict[str, Any], tokenizer: Any) -> tuple[list[int], list[int]]:
    """The tokens of a line: those of its prompt, and those of its answer."""

    def encode(text: str) -> list[int]:
        found: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
        return found

    if "prompt" not in known:
        return [], encode(known["text"])
    before = known["prompt"] if known.get("raw") else prompts.as_turn(tokenizer, known["prompt"])
    return encode(before), encode(known["answer"])


def checked_texts(file: Path, tokenizer: Any, learner: str) -> list[Text]:
    """The texts of `given_texts`; a file with too few texts to learn from is refused."""
    given = given_texts(file, tokenizer)
    if len(given) < 2:
        raise UsageError(f"{file} holds {len(given)} texts of more than {LEAST} tokens; a {learner} learns from many.")
    return given


# Batches


def batches(texts: Sequence[Text], tokens: int, seed: int) -> Iterator[list[Text]]:
    """Endless batches of texts of similar length, in another order every round; `seed` and the number of batches taken
    decide everything."""
    order = sorted(range(len(texts)), key=lambda number: len(texts[number].tokens))
    for turn in range(10**9):
        rng = random.Random(f"{seed} {turn}")
        groups, group = [], list[int]()
        jittered = sorted(order, key=lambda number: len(texts[number].tokens) + rng.random() * 16)
        for number in jittered:
            if group and (len(group) + 1) * len(texts[number].tokens) > tokens:
                groups.append(group)
                group = []
            group.append(number)
        groups.append(group)
        rng.shuffle(groups)
        for group in groups:
            yield [texts[number] for number in group]


def next_batches(texts: Sequence[Text], tokens: int, count: int) -> list[list[Text]]:
    """The first batches of these texts; fewer if the texts are too few."""
    found: list[list[Text]] = []
    left = len(texts)
    for batch in batches(texts, tokens, 0):
        found.append(batch)
        left -= len(batch)
        if left <= 0 or len(found) == count:
            return found
    return found


def padded(texts: Sequence[Text], device: torch.device, length: int | None = None) -> tuple[Tensor, Tensor]:
    """(batch, length) tokens, and which tokens belong to an answer; as long as the longest text by default."""
    longest = max(len(text.tokens) for text in texts) if length is None else length
    tokens = torch.zeros(len(texts), longest, dtype=torch.long)
    answers = torch.zeros(len(texts), longest, dtype=torch.bool)
    for row, text in enumerate(texts):
        tokens[row, : len(text.tokens)] = text.tokens
        answers[row, text.prompt : len(text.tokens)] = True
    return tokens.to(device), answers.to(device)
