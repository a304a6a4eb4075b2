"""A head on a CPU, without torch's small operations between the products.

A level of a draft has only a few rows, for which torch spends more time between the products than in them. Here a block
is one function in C, the same as for the layers of the target (`backends/native`). The gate before it is another C
function, and a third finds the most probable tokens. `network.py` defines what is computed; a test compares the two for
every form of a head.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from branchwise.backends.native import RowFunctions, row_functions
from branchwise.backends.native.layer import Gate, Jobs, Likely, Whole, jobs_of, room_for, whole_of
from branchwise.backends.packed import Lent, Product
from branchwise.core.sequence import SequenceState
from branchwise.draft.head.cache import HeadCache
from branchwise.draft.head.network import Block, Head, Norm, Rows
from branchwise.draft.head.trees.attention import Behind

FEW = 32
"""most rows of a text that are read here; for more rows a library is as fast"""


class HostHead:
    def __init__(self, head: Head, cache: HeadCache, functions: RowFunctions) -> None:
        """Raises a TypeError if a product is not in a form that the C functions can read."""
        self._head, self._cache, self._functions = head, cache, functions
        self._frequencies = head.frequencies.repeat(2)
        self._blocks = [_whole(block) for block in head.blocks]
        self._gate = None
        if head.gate is not None and head.gate.full:
            parts = head.gate.mix, head.gate.select, head.gate.up, head.gate.down
            self._matrices = _matrices(parts)
            mix, select, up, down = map(ctypes.addressof, self._matrices)
            norm: Any = head.gate.norm
            self._gate = Gate(
                norm=norm.weight.data_ptr(), mix=mix, select=select, up=up, down=down, width=head.config.width,
                epsilon=norm.eps,
            )  # fmt: skip

    @classmethod
    def of(cls, head: Head, cache: HeadCache) -> HostHead | None:
        """The head on a CPU; None if it must be computed by torch: on another device, in another precision, with
        products of a library, or if it attends to the keys and values of its target."""
        functions = row_functions() if cache.store.device.type == "cpu" else None
        plain = head.dtype == cache.store.dtype == torch.float32 and not head.config.cross
        try:
            return cls(head, cache, functions) if functions is not None and plain else None
        except TypeError:
            return None

    def read(self, slots: Tensor, lengths: Tensor, features: Tensor | None, embeddings: Tensor, behind: Behind) -> Rows:
        """The result of `Head.forward` for rows after texts of `lengths` rows; all are (batch, rows, width)."""
        head, (batch, rows, width) = self._head, embeddings.shape
        embedded = self._normed(embeddings.reshape(-1, width).float(), head.embedding_norm)
        read = None
        if features is None:
            state: Tensor = head.join(embedded)
        else:
            state = self._selected(features.reshape(-1, width).float(), embedded)
            normed = self._normed(state, head.feature_norm)
            read = torch.cat([normed, embedded], dim=1)
            if head.config.norm_before_residual:
                state = normed
        jobs = self._jobs(slots, lengths, behind)
        for number, block in enumerate(self._blocks):
            state = self._through(number, block, state, None if number else read, jobs)
        found = state.view(batch, rows, -1)
        if head.config.carry:
            return Rows(*found.chunk(2, dim=-1))
        if head.config.carry_normed:
            return Rows(found, self._normed(state, head.output_norm).view(found.shape))
        return Rows(found, found)

    def follow(self, sequences: Sequence[SequenceState], features: Tensor, embeddings: Tensor) -> Rows:
        """The result of `Head.forward` for the next rows of texts (batch, rows, width). The padding of shorter texts is
        written too, and is overwritten before any row attends to it."""
        cache, rows = self._cache, embeddings.shape[1]
        slots = torch.tensor([cache.slot[sequence] for sequence in sequences])
        lengths = torch.tensor([cache.lengths[sequence] for sequence in sequences])
        cache.hold(max(map(cache.held, sequences)) + rows + 1)
        own = torch.ones(rows, rows, dtype=torch.bool).tril_().expand(len(slots), -1, -1)
        depths = torch.arange(rows).expand(len(slots), -1)
        given = features if self._head.config.taps else None
        return self.read(slots, lengths, given, embeddings, Behind(0, own, depths, depths))

    def best(
        self, product: Product, table: Tensor, predict: Tensor, slots: Tensor, count: int
    ) -> tuple[Tensor, Tensor]:
        """The most probable tokens after rows (batch, rows, width), among those of the table, whose logits `product`
        computes, and the extra tokens of each text; and their log-probabilities. Both are (batch, rows, count)."""
        (batch, rows, width), cache = predict.shape, self._cache
        states = predict.reshape(-1, width).contiguous()
        logits = product(self._normed(states, self._head.output_norm), None)
        values = logits.new_empty(batch, rows, count)
        tokens = torch.empty_like(values, dtype=torch.int64)
        self._functions.most_likely(
            Likely(
                logits=logits.data_ptr(), states=states.data_ptr(), extra=cache.extra_rows.data_ptr(),
                known=cache.extra_tokens.data_ptr(), table=table.data_ptr(), slots=slots.data_ptr(),
                values=values.data_ptr(), tokens=tokens.data_ptr(), texts=batch, nodes=rows, size=len(table),
                width=width, most=cache.extra_tokens.shape[1], count=count, epsilon=self._head.config.epsilon,
            )
        )  # fmt: skip
        return tokens, values

    def _normed(self, rows: Tensor, norm: Norm) -> Tensor:
        return self._functions.add_norm(rows.contiguous(), None, norm.weight, norm.eps)

    def _selected(self, features: Tensor, embedded: Tensor) -> Tensor:
        """The features after the gate."""
        if self._head.gate is None:
            return features.contiguous()
        if self._gate is None:
            found: Tensor = self._head.gate(features, embedded)
            return found
        read, job = torch.cat([embedded, features], dim=1), self._gate
        out, (mix, _, up, _) = torch.empty_like(embedded), self._matrices
        room = room_for(len(read), 2 * job.width + 6 * up.size, max(mix.width, up.size))
        job.read, job.embedded, job.rows = read.data_ptr(), embedded.data_ptr(), len(read)
        job.out, job.room = out.data_ptr(), room.data_ptr()
        self._functions.gate(job)
        return out

    def _through(self, number: int, block: Whole, state: Tensor, read: Tensor | None, jobs: Jobs) -> Tensor:
        """(rows, outputs * width): the output of a block, given a state."""
        keys, values = self._cache.store[0, number], self._cache.store[1, number]
        jobs.turning.keys = jobs.attention.keys = keys.data_ptr()
        jobs.turning.values = jobs.attention.values = values.data_ptr()
        if self._head.config.query_norm:
            own: Any = self._head.blocks[number]
            jobs.turning.query_norm, jobs.turning.key_norm = (
                norm.weight.data_ptr() for norm in (own.query_norm, own.key_norm)
            )
        out = state.new_empty(len(state), block.job.outputs * block.job.width)
        block.compute(self._functions.layer, state, out, room_for(len(state), *block.room), jobs, read)
        return out

    def _jobs(self, slots: Tensor, lengths: Tensor, behind: Behind) -> Jobs:
        config, cache = self._head.config, self._cache
        first, own, depths, cell_depths = behind
        ends = cache.ends(slots, lengths, own.shape[2]).contiguous()
        places = (ends[:, None] + torch.arange(first, first + own.shape[1])).contiguous()
        angles = (lengths[:, None] + depths).view(-1, 1) * self._frequencies
        return jobs_of(
            (angles.cos(), angles.sin()), slots, ends, places, depths.contiguous(), own.contiguous(),
            cell_depths.contiguous(), most=int(ends.max()) + own.shape[2], cached=cache.store.shape[4],
            heads=config.heads, kv_heads=config.kv_heads, width=config.head_width, window=config.window,
            scale=config.head_width**-0.5, epsilon=config.epsilon,
        )  # fmt: skip


def _whole(block: nn.Module) -> Whole:
    assert isinstance(block, Block)
    norms = [
        (norm.weight.detach(), norm.eps) if isinstance(norm, Norm) else (block.mlp_norm.weight.detach(), 0.0)
        for norm in (block.input_norm, block.mlp_norm)
    ]  # a block that gets a separate input for attention has no norm before it
    return Whole(_matrices((block.qkv, block.out, block.gate_up, block.down)), *norms)


def _matrices(layers: Sequence[nn.Module]) -> list[Any]:
    lent = [vars(layer).get("forward") for layer in layers]
    found = whole_of((one.product, one.layer.bias) for one in lent if isinstance(one, Lent))
    if found is None or len(found) < len(layers):
        raise TypeError("its products are those of a library")
    return found
