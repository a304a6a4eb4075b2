"""Which experts of a mixture a task uses, and how alike they are, as its routers show while the model reads texts.

Only answers are counted: drafts are made there, while prompts are only read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from branchwise.backends.transformers.experts import ExpertLayer, distances, expert_layers

SAMPLED = 256
"""how many tokens provide the hidden states by which the experts of a layer are compared"""


class Text(NamedTuple):
    """A prompt and what the model answered to it."""

    tokens: list[int]
    prompt: int
    """the number of tokens of the prompt"""


@dataclass(frozen=True, eq=False)
class Usage:
    """How a task uses the experts of one layer."""

    layer: str
    share: Tensor
    """(experts,) float64: the share of each expert in the weight of all answers; the shares sum to 1"""
    distance: Tensor
    """(experts, experts): the distances between their outputs"""


@torch.no_grad()
def usage_of(model: Any, texts: Sequence[Text], progress: Callable[[int], None] = lambda done: None) -> list[Usage]:
    """How these texts use every layer of a mixture."""
    layers = list(expert_layers(model))
    weights = {layer.name: torch.zeros(layer.count, dtype=torch.float64) for layer in layers}
    seen: dict[str, list[Tensor]] = {layer.name: [] for layer in layers}
    each = max(1, -(-SAMPLED // len(texts)))
    answer = 0

    def watch(name: str, router: Any, inputs: tuple[Tensor, ...], found: tuple[Tensor, Tensor, Tensor]) -> None:
        _, scores, chosen = (part[answer:] for part in found)
        weights[name].index_add_(0, chosen.flatten().cpu(), scores.flatten().double().cpu())
        hidden = inputs[0].reshape(-1, inputs[0].shape[-1])[answer:]
        seen[name].append(hidden[torch.linspace(0, len(hidden) - 1, min(each, len(hidden))).long()])

    with ExitStack() as undo:
        for layer in layers:
            assert layer.router is not None
            undo.callback(layer.router.register_forward_hook(partial(watch, layer.name)).remove)
        for number, text in enumerate(texts, start=1):
            answer = text.prompt - 1  # the last token of the prompt predicts the first that is drafted
            model(torch.tensor([text.tokens], device=model.device), use_cache=False, logits_to_keep=1)
            progress(number)
    return [_usage(layer, weights[layer.name], torch.cat(seen[layer.name])) for layer in layers]


def _usage(layer: ExpertLayer, weights: Tensor, hidden: Tensor) -> Usage:
    return Usage(layer.name, weights / weights.sum(), distances(layer, hidden[:SAMPLED]))


@torch.no_grad()
def acceptance(model: Any, draft: Any, texts: Sequence[Text]) -> float:
    """The share of the draft's tokens that the model accepts: the mean of sum of min(p, q) over answer tokens."""
    kept, count = 0.0, 0
    for text in texts:
        tokens = torch.tensor([text.tokens], device=model.device)
        p, q = (_probs(one, tokens)[text.prompt - 1 : -1] for one in (model, draft))
        kept += float(torch.minimum(p, q).sum())
        count += len(p)
    return kept / count


def _probs(model: Any, tokens: Tensor) -> Tensor:
    logits: Tensor = model(tokens.to(model.device), use_cache=False).logits[0]
    return logits.float().softmax(dim=-1)
