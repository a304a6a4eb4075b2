"""A head over a whole text in training, as it will draft: from every token on, several tokens deep.

A row is (place, depth). At depth 0 it reads the target's hidden states at its place. At depth j it stands for a token
that was drafted j tokens after the last place that the target has seen, its anchor = place - depth. So it may look at
hidden states, keys and values of the target up to its anchor and at the drafted rows of the same anchor, and at nothing
else. The drafted tokens are those of the text. This is the training-time test of EAGLE-3 (arXiv 2503.01840) and, with
mask tokens in place of what rows carry on, the group-wise mask of ParallelSpec (arXiv 2410.05589). For cross-attention
it is exact, whereas LongSpec (arXiv 2502.17421) draws one distance to the anchor for a whole batch.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from branchwise.backends.base import CachedRows
from branchwise.draft.head.network import Head, Look


def visible(rows: Tensor, depths: Tensor, key_rows: Tensor, key_depths: Tensor) -> Tensor:
    """(rows, keys): which keys a row may attend to."""
    anchors = (rows - depths)[:, None]
    own = (key_rows - key_depths == anchors) & (key_depths <= depths[:, None])
    return torch.where(key_depths == 0, key_rows <= anchors, own)


def unroll(
    head: Head,
    features: Tensor | None,
    embeddings: Tensor,
    depth: int,
    cached: CachedRows | None = None,
    positions: Tensor | None = None,
) -> list[Tensor]:
    """For every depth below `depth` the predictions of all rows, (batch, rows, width).

    `features` (batch, rows, width) come from `head.features`; `embeddings` are of the token after each row. Row t
    predicts the token two places on; at depth j the first j rows have no anchor and mean nothing. `cached` (batch,
    heads, tokens, width) are the keys and values of the target that a head with cross-attention reads. `positions`
    (rows,) are used in place of the places, if they differ from them.
    """
    places = torch.arange(embeddings.shape[1], device=embeddings.device)
    positions = places if positions is None else positions
    way = _parallel if head.config.masks else _by_steps
    return way(head, features, embeddings, depth, cached, positions)


def _by_steps(
    head: Head, features: Tensor | None, embeddings: Tensor, depth: int, cached: CachedRows | None, positions: Tensor
) -> list[Tensor]:
    batch, rows, _ = embeddings.shape
    places = torch.arange(rows, device=embeddings.device)
    kept: list[list[tuple[Tensor, Tensor]]] = [[] for _ in range(head.config.layers)]
    found, read = [], features
    for step in range(depth):
        depths = torch.full_like(places, step)
        key_depths = torch.arange(step + 1, device=places.device).repeat_interleave(rows)
        mask = visible(places, depths, places.repeat(step + 1), key_depths)
        mask &= _within(head, positions, positions.repeat(step + 1))

        def attend(layer: int, query: Tensor, key: Tensor, value: Tensor, mask: Tensor = mask) -> Tensor:
            kept[layer].append((key, value))
            keys, values = (torch.cat(parts, dim=2) for parts in zip(*kept[layer], strict=True))
            return attention(query, keys, values, mask)

        look = _look(cached, places - step)
        predict, carry = head(read, embeddings, positions.expand(batch, rows), attend, look)
        found.append(predict)
        read = functional.pad(carry[:, :-1], (0, 0, 1, 0))  # row t reads what row t - 1 carried
    return found


def _parallel(
    head: Head, features: Tensor | None, embeddings: Tensor, depth: int, cached: CachedRows | None, positions: Tensor
) -> list[Tensor]:
    assert features is not None, "a parallel head reads hidden states"
    batch, rows, width = features.shape
    depth = min(depth, head.config.masks + 1)
    places = torch.arange(rows, device=features.device).repeat(depth)
    depths = torch.arange(depth, device=features.device).repeat_interleave(rows)
    positions = positions.repeat(depth)
    mask = visible(places, depths, places, depths) & _within(head, positions, positions)
    blank = head.mask_feature.expand(batch, (depth - 1) * rows, width)
    masks = head.mask_embeddings[: depth - 1].repeat_interleave(rows, dim=0).expand(batch, -1, width)
    read = torch.cat([features, blank.to(features.dtype)], dim=1)
    tokens = torch.cat([embeddings, masks.to(embeddings.dtype)], dim=1)
    look = _look(cached, places - depths)
    predict, _ = head(read, tokens, positions.expand(batch, -1), lambda _, q, k, v: attention(q, k, v, mask), look)
    return list(predict.split(rows, dim=1))


def _within(head: Head, positions: Tensor, key_positions: Tensor) -> Tensor:
    """(rows, keys): which keys lie within the window of a row."""
    distances = positions[:, None] - key_positions
    return distances < head.config.window if head.config.window else torch.ones_like(distances, dtype=torch.bool)


def _look(cached: CachedRows | None, anchors: Tensor) -> Look | None:
    """Attention to keys and values of the target up to the anchor of each row. Rows without an anchor see the first
    token, so that they stay finite."""
    if cached is None:
        return None
    keys, values = cached
    mask = torch.arange(keys.shape[2], device=anchors.device) <= anchors[:, None].clamp_min(0)
    return lambda query: attention(query, keys, values, mask)


def attention(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    """Attention under a mask. Key heads are repeated explicitly, because fused kernels with a mask do not support
    groups of query heads."""
    groups = query.shape[1] // keys.shape[1]
    keys, values = keys.repeat_interleave(groups, dim=1), values.repeat_interleave(groups, dim=1)
    return functional.scaled_dot_product_attention(query, keys, values, attn_mask=mask)
