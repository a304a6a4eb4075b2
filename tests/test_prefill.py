"""Prompts in recorded passes: every one is written whole, in order, long ones by another way."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from branchwise.backends.base import Chunk, Prefill, Scored
from branchwise.backends.transformers import prefill
from branchwise.backends.transformers.prefill import RecordedPrefill
from branchwise.core.batch import TreeLayout
from branchwise.core.sampling import SamplingParams
from branchwise.core.sequence import SequenceState

NODES, LONG = 4, 12


class Books:
    """A cache that counts, passes that find in every row the token they read, and prompts written another way."""

    def __init__(self) -> None:
        self.written: dict[SequenceState, list[int]] = {}
        self.eager: list[SequenceState] = []

    def length(self, sequence: SequenceState) -> int:
        return len(self.written.get(sequence, []))

    def advance(self, sequence: SequenceState, tokens: int) -> None:
        own = self.written.setdefault(sequence, [])
        own.extend(sequence.tokens[len(own) : len(own) + tokens])

    def write(self, sequences: Sequence[SequenceState], tokens: NDArray[np.int64], layout: TreeLayout) -> Scored:
        assert len(tokens) in prefill.BATCHES
        assert tokens.shape[1] == NODES
        found = torch.from_numpy(tokens).float()[..., None]
        return Scored(found, {"layer": found})

    def eagerly(self, chunks: Sequence[Chunk]) -> list[Prefill]:
        found = []
        for sequence, tokens, keep in chunks:
            self.eager.append(sequence)
            self.advance(sequence, len(tokens))
            states = torch.tensor(tokens, dtype=torch.float32)[:, None]
            found.append(Prefill(states[len(tokens) - keep :], {"layer": states}))
        return found


def nothing() -> Prefill:
    return Prefill(torch.zeros(0, 1), {"layer": torch.zeros(0, 1)})


@given(st.lists(st.tuples(st.integers(0, 16), st.integers(0, 3)), min_size=1, max_size=20))
def test_every_prompt_is_written_whole_and_found_in_its_place(asked: list[tuple[int, int]]) -> None:
    books: Any = Books()
    texts = [
        SequenceState([*range(100 * n, 100 * n + length), 7], SamplingParams()) for n, (length, _) in enumerate(asked)
    ]
    chunks = [
        Chunk(text, text.tokens[:-1], min(keep, len(text.tokens) - 1))
        for text, (_, keep) in zip(texts, asked, strict=True)
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prefill, "LONG_PROMPT", LONG)
        found = RecordedPrefill(books, NODES, books.write, nothing, books.eagerly)(chunks)
    assert len(found) == len(chunks)
    for text, chunk, part in zip(texts, chunks, found, strict=True):
        assert books.written.get(text, []) == text.tokens[:-1]
        assert part.hidden["layer"].flatten().tolist() == text.tokens[:-1]
        assert part.logits.flatten().tolist() == text.tokens[len(text.tokens) - 1 - chunk.keep : -1]
        assert (text in books.eager) == (len(text.tokens) > LONG)
