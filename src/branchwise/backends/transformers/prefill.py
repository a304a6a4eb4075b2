"""Prefill by recorded passes: prompts are scored as chains, several in one pass.

Passes are padded, so that prompts of any length and number need only a few graphs: a pass over a few thousand rows of a
small model takes hardly longer than a pass over a hundred.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from branchwise.backends.base import Chunk, Prefill, Scored
from branchwise.backends.transformers.kv_cache import KVCache
from branchwise.core.batch import TreeLayout, lay_out
from branchwise.core.sequence import SequenceState
from branchwise.core.topology import chain_topology
from branchwise.cuda.inputs import fitting

LONG_PROMPT = 2048
"""longer prompts are prefilled eagerly, in larger chunks: their kernels run longer than it takes to launch them"""
PREFILL_NODES = 64  # a pass over fewer nodes is too small to prefill with
BATCHES = (1, 4, 16)
"""the sizes to which the number of prompts in a pass is padded"""

Write = Callable[[Sequence[SequenceState], NDArray[np.int64], TreeLayout], Scored]
"""a recorded pass over chains of tokens (batch, nodes); there may be fewer sequences than chains"""


@dataclass(frozen=True)
class RecordedPrefill:
    store: KVCache
    nodes: int
    """the number of tokens of one prompt that a pass writes"""
    write: Write
    nothing: Callable[[], Prefill]
    """a function that returns the prefill of no tokens"""
    eagerly: Callable[[Sequence[Chunk]], list[Prefill]]
    """a function that prefills chunks of long prompts without a graph"""

    def __call__(self, chunks: Sequence[Chunk]) -> list[Prefill]:
        long = [self._is_long(chunk) for chunk in chunks]
        recorded = [chunk for chunk, eager in zip(chunks, long, strict=True) if not eager]
        others = [chunk for chunk, eager in zip(chunks, long, strict=True) if eager]
        found = iter(self._in_pieces(recorded) if recorded else []), iter(self.eagerly(others) if others else [])
        return [next(found[eager]) for eager in long]

    def _is_long(self, chunk: Chunk) -> bool:
        # A draft model's sequences are keys that hold no tokens, so what is in the cache counts too.
        written = self.store.length(chunk.sequence) + len(chunk.tokens)
        return max(written, len(chunk.sequence.tokens)) > LONG_PROMPT

    def _in_pieces(self, chunks: Sequence[Chunk]) -> list[Prefill]:
        pieces = [list(chunk.pieces(self.nodes)) for chunk in chunks]
        parts: list[list[Prefill]] = [[] for _ in chunks]
        for turn in range(max(map(len, pieces))):
            here = [row for row, some in enumerate(pieces) if turn < len(some)]
            for first in range(0, len(here), BATCHES[-1]):
                rows = here[first : first + BATCHES[-1]]
                found = self._together([pieces[row][turn] for row in rows])
                for row, part in zip(rows, found, strict=True):
                    parts[row].append(part)
        return [Prefill.joined(some) for some in parts]

    def _together(self, chunks: Sequence[Chunk]) -> list[Prefill]:
        """One pass over chunks of at most `nodes` tokens."""
        ends = [len(chunk.tokens) for chunk in chunks]
        if not any(ends):
            return [self.nothing() for _ in chunks]
        batch = fitting(len(chunks), BATCHES)
        lengths = [max(end, 1) for end in ends] + [1] * (batch - len(ends))
        padded = np.zeros((batch, self.nodes), dtype=np.int64)
        for row, chunk in enumerate(chunks):
            padded[row, : ends[row]] = chunk.tokens
        layout = lay_out(tuple(map(chain_topology, lengths)), self.nodes)
        found = self.write([chunk.sequence for chunk in chunks], padded, layout)
        # The next pass overwrites this output. One clone for all prompts: launches take longer than copies.
        hidden = {layer: states.clone() for layer, states in found.hidden.items()}
        parts = []
        for row, ((sequence, _, keep), end) in enumerate(zip(chunks, ends, strict=True)):
            self.store.advance(sequence, end)
            logits = found.logits[row, end - keep : end]
            own = {layer: states[row, :end] for layer, states in hidden.items()}
            parts.append(Prefill(logits.clone() if keep else logits, own))
        return parts
