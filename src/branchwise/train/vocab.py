"""Count which tokens a target writes, so that a draft head can be trimmed to the frequent ones."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from branchwise.progress import Progress, silent

if TYPE_CHECKING:
    from branchwise.bench.prompts import Item
    from branchwise.llm import LLM

BATCH = 8
"""answers that are written together"""
ANSWER = 256
"""tokens of one answer"""


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
        pass  # fewer tokens make a coarser table, not a wrong one
    return counts


def coverage(counts: torch.Tensor) -> dict[int, float]:
    """The share of the text that the most frequent tokens make up, for some sizes of a trimmed head."""
    ranked = counts.sort(descending=True).values.double()
    sizes = [size for size in (1024, 4096, 8192, 16384, 32768) if size < len(counts)] or [len(counts)]
    return {size: float(ranked[:size].sum() / ranked.sum()) for size in sizes}
