"""Count which tokens a target writes, so that a draft head can be trimmed to the frequent ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from branchwise.index.texts import find_files, tokenised
from branchwise.progress import Progress, silent
from branchwise.train.corpus import given_texts

if TYPE_CHECKING:
    from branchwise.bench.prompts import Item
    from branchwise.llm import LLM

BATCH = 8
"""answers that the target writes together"""
ANSWER = 256
"""the most tokens of an answer"""


def count_tokens(
    llm: LLM, items: list[Item], *, tokens: int, temperature: float, seed: int, progress: Progress = silent
) -> torch.Tensor:
    """(vocabulary,) int64: how often the target wrote each token, in at least `tokens` tokens unless interrupted.

    The prompts are asked again and again, each round with seeds of its own.
    """
    counts = torch.zeros(llm.engine.target.vocabulary, dtype=torch.long)
    asked, most = 0, min(ANSWER, tokens)
    try:
        while int(counts.sum()) < tokens:
            batch: list[str] = [items[(asked + n) % len(items)].turns[0] for n in range(BATCH)]
            for answer in llm.generate(batch, max_new_tokens=most, temperature=temperature, seed=seed + asked):
                counts += torch.bincount(torch.tensor(answer.token_ids), minlength=len(counts))
            asked += BATCH
            progress("counting what the target writes", min(int(counts.sum()), tokens), tokens)
    except KeyboardInterrupt:
        pass  # with fewer tokens the table is coarser, but not wrong
    return counts


@dataclass(frozen=True)
class Counts:
    """How often texts have each token, (vocabulary,) int64 each."""

    answers: torch.Tensor
    """counts of what the target wrote, or of texts of the task"""
    others: torch.Tensor
    """counts of prompts and other text, which rank the tokens that the target did not write"""
    held_out: torch.Tensor
    """counts of answers that are kept apart, to test the other counts on"""


def count_texts(llm: LLM, data: Sequence[Path], texts: Sequence[Path], background: Sequence[Path]) -> Counts:
    """The counts of files that `branchwise train data` wrote, and of texts in files and folders, taken as they are."""
    size, empty = llm.engine.target.vocabulary, torch.zeros(0, dtype=torch.long)

    def counted(parts: list[torch.Tensor]) -> torch.Tensor:
        return torch.bincount(torch.cat([empty, *parts]).long(), minlength=size)

    def tokens_of(paths: Sequence[Path]) -> list[torch.Tensor]:
        files = find_files(paths) if paths else []
        return [torch.tensor(tokens, dtype=torch.long) for tokens, _, _ in tokenised(files, llm.tokenizer)]

    given = [text for file in data for text in given_texts(file, llm.tokenizer)]
    learned = [text for text in given if not text.held_out]
    return Counts(
        counted([text.tokens[text.prompt :] for text in learned] + tokens_of(texts)),
        counted([text.tokens[: text.prompt] for text in learned] + tokens_of(background)),
        counted([text.tokens[text.prompt :] for text in given if text.held_out]),
    )


def coverage(counts: torch.Tensor, of: torch.Tensor | None = None) -> dict[int, float]:
    """The share of a text that the most frequent tokens make up, for some sizes of a trimmed head. The text is the
    counted one, or another one that `of` counts."""
    ranked = (counts if of is None else of)[counts.argsort(descending=True, stable=True)].double()
    sizes = [size for size in (1024, 4096, 8192, 16384, 32768) if size < len(counts)] or [len(counts)]
    return {size: float(ranked[:size].sum() / ranked.sum()) for size in sizes}
