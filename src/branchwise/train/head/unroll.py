"""A head over a whole text in training, as it will draft: from every token on, so many tokens deep.

A row is (place, depth). At depth 0 it reads the target's hidden states at its place. At depth j it stands for a token
that was drafted j tokens behind the last place that the target has seen, its anchor = place - depth, so it may look at
hidden states up to its anchor and at the drafted rows of the same anchor, at nothing else. What was
drafted is what the text says. This is the training-time test of EAGLE-3 (arXiv 2503.01840) and, with mask
tokens in place of what rows carry on, the group-wise mask of ParallelSpec (arXiv 2410.05589).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from branchwise.draft.head.network import Head


def visible(rows: Tensor, depths: Tensor, key_rows: Tensor, key_depths: Tensor, window: int | None = None) -> Tensor:
    """(rows, keys): which keys a row may attend to."""
    anchors = (rows - depths)[:, None]
    own = (key_rows - key_depths == anchors) & (key_depths <= depths[:, None])
    seen = torch.where(key_depths == 0, key_rows <= anchors, own)
    return seen if window is None else seen & (rows[:, None] - key_rows < window)


def unroll(head: Head, features: Tensor, embeddings: Tensor, depth: int, window: int | None = None) -> list[Tensor]:
    """For every depth below `depth` the predictions of all rows, (batch, rows, width).

    `features` (batch, rows, width) come from `head.features`; `embeddings` are of the token after each row. Row t
    predicts the token two places on; at depth j the first j rows have no anchor and mean nothing.
    """
    return (
        _parallel(head, features, embeddings, depth, window)
        if head.config.masks
        else _by_steps(head, features, embeddings, depth, window)
    )


def _by_steps(head: Head, features: Tensor, embeddings: Tensor, depth: int, window: int | None) -> list[Tensor]:
    batch, rows, _ = features.shape
    places = torch.arange(rows, device=features.device)
    positions = places.expand(batch, rows)
    kept: list[list[tuple[Tensor, Tensor]]] = [[] for _ in range(head.config.layers)]
    found, read = [], features
    for step in range(depth):
        mask = visible(
            places,
            torch.full_like(places, step),
            places.repeat(step + 1),
            torch.arange(step + 1, device=places.device).repeat_interleave(rows),
            window,
        )

        def attend(layer: int, query: Tensor, key: Tensor, value: Tensor, mask: Tensor = mask) -> Tensor:
            kept[layer].append((key, value))
            keys, values = (torch.cat(parts, dim=2) for parts in zip(*kept[layer], strict=True))
            return attention(query, keys, values, mask)

        predict, carry = head(read, embeddings, positions, attend)
        found.append(predict)
        read = functional.pad(carry[:, :-1], (0, 0, 1, 0))  # row t reads what row t - 1 carried
    return found


def _parallel(head: Head, features: Tensor, embeddings: Tensor, depth: int, window: int | None) -> list[Tensor]:
    batch, rows, width = features.shape
    depth = min(depth, head.config.masks + 1)
    places = torch.arange(rows, device=features.device).repeat(depth)
    depths = torch.arange(depth, device=features.device).repeat_interleave(rows)
    mask = visible(places, depths, places, depths, window)
    blank = head.mask_feature.expand(batch, (depth - 1) * rows, width)
    masks = head.mask_embeddings[: depth - 1].repeat_interleave(rows, dim=0).expand(batch, -1, width)
    read = torch.cat([features, blank.to(features.dtype)], dim=1)
    tokens = torch.cat([embeddings, masks.to(embeddings.dtype)], dim=1)
    predict, _ = head(read, tokens, places.expand(batch, -1), lambda _, q, k, v: attention(q, k, v, mask))
    return list(predict.split(rows, dim=1))


def attention(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    """Key heads are repeated by hand: fused kernels with a mask know no groups of query heads."""
    groups = query.shape[1] // keys.shape[1]
    keys, values = keys.repeat_interleave(groups, dim=1), values.repeat_interleave(groups, dim=1)
    return functional.scaled_dot_product_attention(query, keys, values, attn_mask=mask)
