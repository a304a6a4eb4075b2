"""What a head with cross-attention learns from: keys and values of its target, also as they stand far into a text.

Texts to learn from are short, and distances in a long text are large. LongSpec's anchor-offset positions (arXiv
2502.17421) bring the distances without the length: the first few tokens, to which attention always returns, keep their
positions, and all others are moved far away. The target itself reads the text at its true positions. Rotary keys turn
with their positions, so the keys of the moved tokens are turned further; nothing else of the target changes.
"""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor

from branchwise.backends.base import CachedRows
from branchwise.backends.transformers.kv_cache import BlankCache
from branchwise.draft.head.network import rotated
from branchwise.errors import UsageError

ANCHORS = 4
"""the most tokens that keep their positions"""
FARTHEST = 30_000
"""the largest position that is learned, if the target has it; both numbers are LongSpec's"""


class LayerCache(BlankCache):
    """Catches the keys and values of one layer during a pass over whole texts, and keeps no others."""

    def __init__(self, layer: str) -> None:
        """`layer` is a name from `TargetInfo.layers`; its last part is the layer's number."""
        super().__init__()
        self._layer = int(layer.rpartition(".")[2])
        self.rows: CachedRows | None = None

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        if layer_idx == self._layer:
            self.rows = CachedRows(key_states, value_states)
        return key_states, value_states


def moved_positions(rows: int, farthest: int, rng: random.Random) -> Tensor:
    """(rows,): consecutive positions with one jump after the first few, such that all are below `farthest`."""
    places = torch.arange(rows)
    anchors, offset = rng.randint(0, ANCHORS), rng.randint(0, max(0, min(farthest, FARTHEST) - rows))
    return places + offset * (places >= anchors)


def moved_keys(cached: CachedRows, positions: Tensor, frequencies: Tensor) -> CachedRows:
    """The keys of `cached`, which were counted from 0, as if their tokens stood at `positions` (tokens,)."""
    places = torch.arange(len(positions), device=positions.device)
    angles = (positions - places)[:, None] * frequencies
    keys = rotated(cached.keys.to(frequencies.dtype), angles.cos(), angles.sin())
    return CachedRows(keys.to(cached.keys.dtype), cached.values)


def rotary_frequencies(model: Any, head_width: int) -> Tensor:
    """(head width / 2,): how fast the keys of a model turn with their positions."""
    named: list[Tensor] = [buffer for name, buffer in model.named_buffers() if name.rpartition(".")[2] == "inv_freq"]
    if len(named) != 1 or len(named[0]) != head_width // 2:
        raise UsageError(
            f"The keys of {type(model).__name__} do not turn with their positions in one way and as a whole, which "
            "cross-attention to them needs; train a head of another --form."
        )
    return named[0].detach().float().cpu()
