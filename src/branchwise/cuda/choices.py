"""The sampling parameters of each text of a batch, at a fixed address on the device."""

from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from branchwise.core.sampling import SamplingParams
from branchwise.core.sequence import SequenceState
from branchwise.cuda.inputs import PinnedBuffer

PARAMETERS = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "biased",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "counted",
)
"""the parameters of a text, in this order. `biased` is 1 if it has a logit bias. `counted` is the row of the table in
which its tokens are counted, -1 if no penalty needs them"""

IN_PROMPT = 1 << 30
"""the bit of a count that is set if a token is in the prompt; the bits below count its occurrences in the output"""


class Choices:
    """The sampling parameters of up to `most` texts. They are written again only if they differ from those of the last
    step. The addresses never change, because recorded kernels hold them."""

    def __init__(self, most: int, vocabulary: int, device: torch.device) -> None:
        self._buffer = PinnedBuffer(most * len(PARAMETERS), device, torch.float32)
        self.parameters: Tensor = self._buffer.device_copy.view(most, len(PARAMETERS))
        self.bias = torch.zeros(most, vocabulary, device=device)
        self.counts = TokenCounts(most, vocabulary, device)
        self._known: list[SamplingParams] = []
        self._counted: list[int] = []

    def bring(self, texts: Sequence[SequenceState]) -> None:
        """Write the parameters of these texts to the device, in this order. A repeated text is padding."""
        sampling = [text.sampling for text in texts]
        known = self._known == sampling
        if known and max(self._counted) < 0:
            return
        rows = self.counts.bring([text for text in dict.fromkeys(texts) if text.sampling.looks_back])
        counted = [rows.get(text, -1) for text in texts]
        if known and self._counted == counted:
            return
        self._known = []  # if an interrupt comes below, everything is written again
        numbers = [
            (params.temperature, params.top_k, params.top_p, params.min_p, bool(params.logit_bias),
             params.repetition_penalty, params.presence_penalty, params.frequency_penalty, row)
            for params, row in zip(sampling, counted, strict=True)
        ]  # fmt: skip
        self._buffer.host[: len(texts) * len(PARAMETERS)] = np.array(numbers, dtype=np.float32).reshape(-1)
        self._buffer.copy()
        entries = [(row, *entry) for row, params in enumerate(sampling) for entry in params.logit_bias.items()]
        if entries:
            device = self.bias.device
            places, tokens = torch.tensor([entry[:2] for entry in entries]).T.to(device, non_blocking=True)
            self.bias[: len(texts)].zero_()
            self.bias[places, tokens] = torch.tensor([entry[2] for entry in entries]).to(device, non_blocking=True)
        self._known, self._counted = sampling, counted


class TokenCounts:
    """The counts of tokens in each of up to `most` texts, on the device: only new tokens are copied there.

    A text keeps its row while other texts come and go. If all rows are taken, a new text takes the row of the least
    recently used one.
    """

    def __init__(self, most: int, vocabulary: int, device: torch.device) -> None:
        self.table = torch.zeros(most, vocabulary, dtype=torch.int32, device=device)
        self._known: WeakKeyDictionary[SequenceState, tuple[int, int]] = WeakKeyDictionary()
        """text -> its row and the number of its tokens that are counted there, least recently used first"""

    def bring(self, texts: Sequence[SequenceState]) -> dict[SequenceState, int]:
        """Count the new tokens of these texts; returns their rows."""
        if not texts:
            return {}
        # These texts are removed meanwhile: if an interrupt comes below, they are counted from the start.
        known = {text: self._known.pop(text) for text in texts if text in self._known}
        spare = self._spare(len(texts) - len(known), [row for row, _ in known.values()])
        found: dict[SequenceState, tuple[int, int]] = {}
        anew: list[int] = []
        read, written = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
        for text in texts:
            row, counted = known[text] if text in known else (spare.pop(), 0)
            if not text.prompt_length <= counted <= len(text.tokens):  # a new text, or one that was cut back
                anew.append(row)
                read.append(self._places(row, text.tokens[: text.prompt_length]))
                counted = text.prompt_length
            written.append(self._places(row, text.tokens[counted:]))
            found[text] = row, len(text.tokens)
        self._count(np.array(anew, np.int64), np.concatenate(read), np.concatenate(written))
        self._known.update(found)
        return {text: row for text, (row, _) in found.items()}

    def _spare(self, count: int, taken: Sequence[int]) -> list[int]:
        """`count` rows that are not `taken`: first free ones, then those of the least recently used texts."""
        if not count:
            return []
        held = {row: text for text, (row, _) in self._known.items()}
        free = [row for row in range(len(self.table)) if row not in held and row not in taken]
        chosen = [*free, *held][:count]
        for row in chosen:
            if row in held:
                del self._known[held[row]]
        return chosen

    def _places(self, row: int, tokens: Sequence[int]) -> NDArray[np.int64]:
        return np.array(tokens, np.int64) + row * self.table.shape[1]

    def _count(self, anew: NDArray[np.int64], read: NDArray[np.int64], written: NDArray[np.int64]) -> None:
        """Clear the rows `anew`, mark tokens of prompts and count tokens of outputs, with one copy to the device."""
        numbers = torch.from_numpy(np.concatenate([anew, read, written])).to(self.table.device, non_blocking=True)
        rows, marked, counted = numbers.split([len(anew), len(read), len(written)])
        places = self.table.view(-1)
        if len(anew):
            self.table.index_fill_(0, rows, 0)
            places.index_fill_(0, marked, IN_PROMPT)
        if len(written):
            places.index_add_(0, counted, torch.ones_like(counted, dtype=torch.int32))
