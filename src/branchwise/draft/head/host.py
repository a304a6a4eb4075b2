"""A head on a CPU, without the small operations between its products.

A level of a draft has a few rows, of which torch takes longer between the products than in them. What stands between
them here is the functions in C of the target's own layers (`backends/native.py`), and the most probable tokens of rows
are found in one call. The network says what is to be computed; a test compares the two for every form of a head.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from branchwise.backends.native import LANES, Attention, RowFunctions, Turning, row_functions
from branchwise.draft.head.cache import HeadCache
from branchwise.draft.head.network import Block, Gate, Head, Norm, Rows
from branchwise.draft.head.trees.attention import Behind


class Jobs(NamedTuple):
    """What the blocks of a pass hand to functions in C, but for the places that are those of one block."""

    turning: Turning
    attention: Attention
    kept: tuple[Tensor, ...]
    """as long as these may be read"""


class HostHead:
    def __init__(self, head: Head, cache: HeadCache, functions: RowFunctions) -> None:
        self._head, self._cache, self._functions = head, cache, functions
        self._frequencies = head.frequencies.repeat(2)

    @classmethod
    def of(cls, head: Head, cache: HeadCache) -> HostHead | None:
        """None where a head is computed otherwise: in another precision, without a compiler, or if it attends to the
        keys and values of its target."""
        functions = row_functions() if cache.store.device.type == "cpu" else None
        plain = head.dtype == cache.store.dtype == torch.float32 and not head.config.cross
        return cls(head, cache, functions) if functions is not None and plain else None

    def read(self, slots: Tensor, lengths: Tensor, features: Tensor | None, embeddings: Tensor, behind: Behind) -> Rows:
        """What `Head.forward` finds for rows behind texts of so many rows, (batch, rows, width) all."""
        head, (batch, rows, width) = self._head, embeddings.shape
        embedded = self._normed(embeddings.reshape(-1, width), head.embedding_norm)
        if features is None:
            state, read = head.join.forward(embedded), None
        else:
            state = self._selected(features.reshape(-1, width), embedded)
            normed = self._normed(state, head.feature_norm)
            read = torch.cat([normed, embedded], dim=1)
            if head.config.norm_before_residual:
                state = normed
        jobs = self._jobs(slots, lengths, behind)
        for number, block in enumerate(head.blocks):
            assert isinstance(block, Block)
            state = self._through(number, block, state, None if number else read, jobs)
        found = state.view(batch, rows, -1)
        if head.config.carry:
            return Rows(*found.chunk(2, dim=-1))
        if head.config.carry_normed:
            return Rows(found, self._normed(state, head.output_norm).view(found.shape))
        return Rows(found, found)

    def output(self, predict: Tensor) -> Tensor:
        """What `Head.output` finds where no token stands before."""
        return self._normed(predict.reshape(-1, predict.shape[-1]), self._head.output_norm).view(predict.shape)

    def best(self, logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """The logarithms of the chances of the most probable tokens of rows (batch, rows, tokens), and their places;
        what is found leaves the logits."""
        values, places = self._functions.most_likely(logits.view(-1, logits.shape[-1]), count)
        shape = *logits.shape[:-1], count
        return values.view(shape), places.view(shape)

    def _normed(self, rows: Tensor, norm: Norm) -> Tensor:
        return self._functions.add_norm(rows.contiguous(), None, norm.weight, norm.eps)

    def _selected(self, features: Tensor, embedded: Tensor) -> Tensor:
        """What the gate lets through of the features, in memory of its own."""
        gate = self._head.gate
        if gate is None:
            return features.clone(memory_format=torch.contiguous_format)
        if not gate.full:
            found: Tensor = gate(features, embedded)
            return found
        return self._sampled(gate, features, embedded)

    def _sampled(self, gate: Gate, features: Tensor, embedded: Tensor) -> Tensor:
        mixed: Tensor = gate.mix.forward(torch.cat([embedded, features], dim=1))
        select: Tensor = gate.select.forward(embedded)
        up: Tensor = gate.up.forward(self._normed(mixed, gate.norm))
        return mixed.add_(gate.down.forward(functional.silu(select, inplace=True).mul_(up)))

    def _through(self, number: int, block: Block, state: Tensor, read: Tensor | None, jobs: Jobs) -> Tensor:
        """(rows, outputs times width): what a block makes of a state, which is overwritten."""
        functions, (turning, attention, _) = self._functions, jobs
        mixed: Tensor = block.qkv.forward(self._normed(state, block.input_norm) if read is None else read)
        keys, values = self._cache.store[0, number], self._cache.store[1, number]
        turning.given = attention.queries = mixed.data_ptr()
        turning.keys = attention.keys = keys.data_ptr()
        turning.values = attention.values = values.data_ptr()
        if self._head.config.query_norm:
            turning.query_norm, turning.key_norm = (
                norm.weight.data_ptr() for norm in (block.query_norm, block.key_norm)
            )
        functions.turn(turning)
        found = mixed.new_empty(len(mixed), block.out.in_features)
        attention.out = found.data_ptr()
        functions.attend(attention)
        normed = functions.add_norm(state, block.out.forward(found), block.mlp_norm.weight, block.mlp_norm.eps)
        more: Tensor = block.down.forward(functions.gated(block.gate_up.forward(normed)))
        more.view(len(state), block.outputs, -1).add_(state[:, None])
        return more

    def _jobs(self, slots: Tensor, lengths: Tensor, behind: Behind) -> Jobs:
        config, cache = self._head.config, self._cache
        first, own, depths, cell_depths = behind
        batch, rows, columns = own.shape
        ends = cache.ends(slots, lengths, columns).contiguous()
        places = (ends[:, None] + first + torch.arange(rows)).contiguous()
        angles = (lengths[:, None] + depths).view(-1, 1) * self._frequencies
        seen, depths, cell_depths = (part.contiguous() for part in (own, depths, cell_depths))
        most = int(ends.max()) + columns
        cos, sin = angles.cos(), angles.sin()
        room = cos.new_empty(torch.get_num_threads(), 2 * config.head_width + most, LANES)
        numbers: dict[str, Any] = {
            "texts": batch, "nodes": rows, "heads": config.heads, "kv_heads": config.kv_heads,
            "width": config.head_width, "cached": cache.store.shape[4], "slots": slots.data_ptr(),
        }  # fmt: skip
        turning = Turning(
            cos=cos.data_ptr(), sin=sin.data_ptr(), places=places.data_ptr(), epsilon=config.epsilon, **numbers
        )
        attention = Attention(
            lengths=ends.data_ptr(), depths=depths.data_ptr(), seen=seen.data_ptr(),
            column_depths=cell_depths.data_ptr(), room=room.data_ptr(), columns=columns,
            stride=(config.heads + 2 * config.kv_heads) * config.head_width, own=True, most=most,
            window=config.window, scale=config.head_width**-0.5, **numbers,
        )  # fmt: skip
        return Jobs(turning, attention, (ends, places, seen, depths, cell_depths, cos, sin, room, slots))
