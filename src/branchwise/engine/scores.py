"""How probable the tokens of a prompt are to the model, from the logits of its prefill."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from branchwise.engine.request import TokenScore

ROWS = 64
"""of logits that are normalised at once: in float32 a row of a large vocabulary has half a megabyte"""


def token_scores(logits: Tensor, tokens: Sequence[int], top: int) -> list[TokenScore]:
    """Of tokens, given the logits (tokens, vocabulary) before each of them, with so many alternatives."""
    found: list[TokenScore] = []
    top = min(top, logits.shape[-1])
    for first in range(0, len(tokens), ROWS):
        logprobs = logits[first : first + ROWS].float().log_softmax(dim=-1)
        here = torch.tensor(tokens[first : first + ROWS], device=logprobs.device)
        own = logprobs.gather(1, here[:, None])[:, 0].tolist()
        best, likely = logprobs.topk(top, dim=-1)
        alternatives = [list(zip(*row, strict=True)) for row in zip(likely.tolist(), best.tolist(), strict=True)]
        found += map(TokenScore, own, alternatives)
    return found
