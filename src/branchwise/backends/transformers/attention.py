"""Attention of tree nodes to the prefix and the tree in a slot, and the masks for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional


@dataclass(frozen=True)
class Window:
    """What a layer gets instead of an attention mask: the number of positions back that it sees, None for all. It is no
    tensor, so that a model which computes with its mask fails at once instead of being wrong."""

    size: int | None


def tree_mask(
    lengths: Tensor,
    depths: Tensor,
    ancestors: Tensor,
    keys: int,
    window: int | None,
    dtype: torch.dtype,
    key_depths: Tensor | None = None,
) -> Tensor:
    """(batch, 1, nodes, keys) additive mask: 0 where a node sees a key, -inf elsewhere.

    Key rows below `lengths` (batch,) hold the prefix; their index is their position. The rows after that hold the tree,
    row i at position length + key_depths[i]. A node at `depths` (batch, nodes) sees the prefix and its `ancestors`
    (batch, nodes, rows of the tree), within the last `window` positions if the layer has a window. `key_depths` (batch,
    rows) defaults to `depths`, for a pass over the whole tree.
    """
    batch, nodes, columns = ancestors.shape
    batch = max(batch, len(depths))
    key_depths = depths if key_depths is None else key_depths
    row = torch.arange(keys, device=lengths.device)
    behind = row - lengths[:, None]  # (batch, keys): index within the tree; negative in the prefix
    in_tree = (behind >= 0) & (behind < columns)
    column = behind.clamp(0, columns - 1)
    seen = ancestors.expand(batch, -1, -1).gather(2, column[:, None].expand(batch, nodes, keys))
    seen = torch.where(in_tree[:, None], seen, (behind < 0)[:, None])
    if window is not None:
        # In positions relative to the root: prefix rows are at behind < 0, tree nodes at their depth.
        key_position = torch.where(in_tree, key_depths.gather(1, column), behind)
        seen = seen & (key_position[:, None] > depths[:, :, None] - window)
    mask = torch.zeros(batch, 1, nodes, keys, dtype=dtype, device=lengths.device)
    return mask.masked_fill_(~seen[:, None], -torch.inf)


def attend(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *, causal: bool, scale: float, softcap: float | None
) -> Tensor:
    """(batch, heads, nodes, width); key and value may have fewer heads, each shared by a group of query heads."""
    if softcap is None:
        return functional.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=True
        )
    # Fused kernels have no soft cap, so scores are computed explicitly. Heads of a group are adjacent.
    batch, heads, nodes, width = query.shape
    grouped = query.reshape(batch, key.shape[1], -1, nodes, width)
    scores = grouped @ key[:, :, None].transpose(-1, -2)
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32)) * scale
    scores = softcap * torch.tanh(scores / softcap)
    if causal:
        mask = torch.full((nodes, nodes), -torch.inf, device=query.device).triu_(1)
    if mask is not None:
        scores = scores + (mask if causal else mask[:, None])
    weights = scores.softmax(dim=-1).to(value.dtype)
    return (weights @ value[:, :, None]).reshape(batch, heads, nodes, -1)


LONG_PREFIX = 1024
"""the length of a prefix from which on a host attends to it separately from the tree, without a mask"""

_flash: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


def attend_apart(
    query: Tensor, key: Tensor, value: Tensor, prefixes: Sequence[int], masks: Sequence[Tensor], scale: float
) -> Tensor:
    """(batch, heads, nodes, width) on a host: attention to the prefix, which every node sees whole, merged with
    attention to the rows after it, under one mask for each text: (heads of a group · nodes, rows), as `masks_behind`
    makes them.

    The merge weighs the two outputs by their shares of the softmax, which is exact. So no mask is as long as the
    prefix, texts of a batch read no padding, and the adjacent heads of a group read their keys once.
    """
    found = torch.empty_like(query)
    for row, (length, mask) in enumerate(zip(prefixes, masks, strict=True)):
        heads = query[row, None].reshape(1, key.shape[1], -1, query.shape[3])
        before, behind = slice(0, length), slice(length, length + mask.shape[1])
        near, near_weight = _flash(heads, key[row, None, :, before], value[row, None, :, before], scale=scale)
        tree, tree_weight = _flash(
            heads, key[row, None, :, behind], value[row, None, :, behind], attn_mask=mask[None, None], scale=scale
        )
        share = torch.sigmoid(near_weight - tree_weight)[..., None].to(near.dtype)
        found[row] = torch.lerp(tree, near, share).view(query.shape[1:])
    return found


def masks_behind(prefixes: Sequence[int], seen: Tensor, keys: int, group: int, dtype: torch.dtype) -> list[Tensor]:
    """Additive masks of the rows after each prefix, up to row `keys`, repeated for every head of a group. `seen` (batch
    or 1, nodes, rows) marks the rows that a node sees."""
    found = []
    for row, length in enumerate(prefixes):
        hidden = ~seen[row if len(seen) > 1 else 0, :, : keys - length]
        found.append(torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, -torch.inf).repeat(group, 1))
    return found
