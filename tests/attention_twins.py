"""The kernels of a packed pass in torch: stand-ins in tests of what is built upon them, where Triton's interpreter
would take a hundred times as long. `test_attention.py` compares the kernels themselves with the same truth."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from branchwise.backends.transformers import kv_cache
from branchwise.backends.transformers.attention import attend as plain_attend
from branchwise.backends.transformers.attention import tree_mask
from branchwise.core.rows import unpack_bits
from branchwise.cuda.inputs import PassTensors


def write(
    self: PassTensors, keys: Tensor, values: Tensor, new_keys: Tensor, new_values: Tensor
) -> tuple[Tensor, Tensor]:
    for slot, start, key, value in zip(self.slots.tolist(), self.starts.tolist(), new_keys, new_values, strict=True):
        if slot >= 0:
            end = min(start + key.shape[1], keys.shape[2])
            keys[slot, :, start:end], values[slot, :, start:end] = key[:, : end - start], value[:, : end - start]
    return keys, values


def attend(
    self: PassTensors,
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    window: int | None,
    scale: float,
    softcap: float | None,
) -> Tensor:
    columns = self.key_depths.shape[1]
    seen = unpack_bits(self.ancestor_bits, columns)
    found = torch.zeros(*query.shape[:3], values.shape[3], dtype=query.dtype)
    for row, slot in enumerate(self.slots.tolist()):
        if slot >= 0:
            end = min(int(self.lengths[row]) + columns, keys.shape[2])
            one = slice(row, row + 1)
            depths = self.depths[one].long(), self.key_depths[one].long()
            mask = tree_mask(self.lengths[one].long(), depths[0], seen[one], end, window, query.dtype, depths[1])
            rows = keys[slot, None, :, :end], values[slot, None, :, :end]
            found[row] = plain_attend(query[one], *rows, mask, causal=False, scale=scale, softcap=softcap)[0]
    return found.nan_to_num(0.0).transpose(1, 2).contiguous()  # a node that sees nothing finds zeros


def move(*inputs: Tensor) -> None:
    *tensors, slots, lengths, paths = inputs
    for slot, length, path in zip(slots.tolist(), lengths.tolist(), paths.tolist(), strict=True):
        kept = [node for node in path if node >= 0]
        if slot >= 0:
            for tensor in tensors:
                tensor[:, slot, :, length : length + len(kept)] = tensor[:, slot, :, [length + node for node in kept]]


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on passes by kernels are made in torch; targets are to be made afterwards."""
    monkeypatch.setattr(PassTensors, "write", write)
    monkeypatch.setattr(PassTensors, "attend", attend)
    monkeypatch.setattr(kv_cache, "move", move)
