"""Prompts written into the KV cache by eager passes, several of about the same length in one."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from branchwise.backends.base import Chunk, Prefill
from branchwise.backends.transformers.kv_cache import KVCache
from branchwise.backends.transformers.runner import ModelRunner, without_plans

PADDING_SHARE = 1.25
"""prompts share a pass if padding makes it at most so many times as large"""


def grouped(chunks: Sequence[Chunk], store: KVCache) -> list[list[Chunk]]:
    """The chunks in order, neighbours together as long as little of their pass is padding and it fits the cache."""
    groups: list[list[Chunk]] = []
    for chunk in chunks:
        group = [*groups[-1], chunk] if groups else [chunk]
        longest = max(len(member.tokens) for member in group)
        deepest = max(store.length(member.sequence) for member in group) + longest
        tokens = sum(len(member.tokens) for member in group)
        if groups and longest * len(group) <= PADDING_SHARE * tokens and deepest <= store.rows:
            groups[-1] = group
        else:
            groups.append([chunk])
    return groups


def prefill_eager(runner: ModelRunner, store: KVCache, chunks: Sequence[Chunk]) -> list[Prefill]:
    """One pass over all chunks, padded to the longest; padding is overwritten by whatever comes next."""
    device, lengths = runner.model.device, [len(chunk.tokens) for chunk in chunks]
    longest = max(lengths)
    if not longest:
        return [nothing_written(runner) for _ in chunks]
    steps = torch.arange(longest, device=device).expand(len(chunks), -1)
    current = store.begin([chunk.sequence for chunk in chunks], steps, None)
    ids = [[*chunk.tokens, *[0] * (longest - len(chunk.tokens))] for chunk in chunks]
    # The head over a whole prompt is not cheap: only rows from the first wanted one on.
    keep = max(longest - len(chunk.tokens) + max(chunk.keep, 1) for chunk in chunks)
    with without_plans(device):
        positions = current.lengths[:, None] + steps
        logits, hidden = runner.run(torch.tensor(ids, device=device), positions, store, keep)
    found = []
    for row, (sequence, tokens, keep) in enumerate(chunks):
        store.advance(sequence, lengths[row])
        end = logits.shape[1] - (longest - len(tokens))  # some models return all rows, whatever is to be kept
        states = {layer: layer_states[row, : len(tokens)] for layer, layer_states in hidden.items()}
        found.append(Prefill(logits[row, end - keep : end], states))
    return found


def nothing_written(runner: ModelRunner) -> Prefill:
    """The prefill of a prompt of one token, which is the root."""
    model = runner.model
    width = model.config.get_text_config().hidden_size
    hidden = {layer: torch.zeros(0, width, device=model.device, dtype=model.dtype) for layer in runner.hidden_layers}
    return Prefill(torch.zeros(0, runner.vocabulary, device=model.device), hidden)
