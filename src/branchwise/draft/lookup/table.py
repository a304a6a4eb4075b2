"""A table of tri-grams: which tokens followed two tokens in a corpus, and how often.

Liu et al., "Adaptive Draft-Verification for LLM Decoding" (ADED, arXiv 2407.12021), start from such counts, cut to the
best successors of every pair. `branchwise index trigrams` counts them; `trigram:table=FILE` starts from them. Pairs are
sorted numbers in one array, so that a table of millions takes no more memory than its file and is searched by
bisection.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from branchwise.backends.base import TargetInfo
from branchwise.draft.state import Format
from branchwise.errors import ModelError, PairingError, UsageError
from branchwise.index import fingerprint

FORMAT = Format("tri-gram table", "count one with: branchwise index trigrams FILES --out FILE", ModelError)
AT_ONCE = 1 << 22
"""number of tri-grams that are counted together"""
SUCCESSORS = 12
"""most successors of a pair that are kept, the most frequent; the number of the paper"""
WEIGHT = 16
"""most that the count of a pair's most frequent successor starts from: about this many occurrences in the text outweigh
the corpus"""
Pair = tuple[int, int]
Numbers = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class TrigramTable:
    model: str
    """name of the model whose tokenizer cut the corpus into tokens"""
    tokenizer: str
    """fingerprint of the tokenizer's vocabulary"""
    vocabulary: int
    read: int
    """number of tokens of the corpus"""
    pairs: Numbers
    """(pairs,): first * vocabulary + second, ascending"""
    starts: Numbers
    """(pairs + 1,): where the successors of each pair start in `tokens` and `counts`"""
    tokens: Numbers
    """(successors,): the successors pair by pair, the most frequent of a pair first"""
    counts: Numbers
    """(successors,): how often each successor followed its pair"""

    def __len__(self) -> int:
        return len(self.pairs)

    def after(self, pair: Pair, most: int) -> dict[int, int]:
        """At most `most` successors of a pair and how often they were seen, scaled down to `WEIGHT`. The rarest comes
        first, as `Trigram` orders a row that it learns."""
        key = pair[0] * self.vocabulary + pair[1]
        place = int(self.pairs.searchsorted(key))
        if place == len(self.pairs) or self.pairs[place] != key:
            return {}
        part = slice(int(self.starts[place]), min(int(self.starts[place + 1]), int(self.starts[place]) + most))
        tokens, counts = self.tokens[part].tolist(), self.counts[part].tolist()
        scale = min(1.0, WEIGHT / counts[0])
        return {token: max(round(count * scale), 1) for token, count in zip(tokens[::-1], counts[::-1], strict=True)}

    def check(self, target: TargetInfo, file: str) -> None:
        """Refuse a target with another tokenizer."""
        own = target.tokenizer
        if not (fingerprint(own) == self.tokenizer if own else self.vocabulary <= target.vocabulary):
            raise PairingError(
                f"The tri-gram table {file} was counted with the tokenizer of {self.model}, and the target has "
                "another; count one with: branchwise index trigrams FILES --model MODEL --out FILE"
            )

    def write(self, file: Path) -> None:
        known = {"model": self.model, "tokenizer": self.tokenizer, "vocabulary": self.vocabulary, "read": self.read}
        arrays = {"pairs": self.pairs, "starts": self.starts, "tokens": self.tokens, "counts": self.counts}
        narrow = {name: array if name == "pairs" else array.astype(np.int32) for name, array in arrays.items()}
        FORMAT.write(file, known, {name: torch.from_numpy(array) for name, array in narrow.items()})

    @classmethod
    def load(cls, file: Path) -> TrigramTable:
        if not file.is_file():
            raise ModelError(f"There is no tri-gram table {file}; {FORMAT.remedy}.")
        return FORMAT.read(file, cls._of)

    @classmethod
    def _of(cls, known: dict[str, Any], tensors: dict[str, Tensor]) -> TrigramTable:
        arrays = [tensors[name].numpy().astype(np.int64) for name in ("pairs", "starts", "tokens", "counts")]
        vocabulary = int(known["vocabulary"])
        found = cls(str(known["model"]), str(known["tokenizer"]), vocabulary, int(known["read"]), *arrays)
        pairs, starts, tokens, counts = arrays
        fits = (
            len(starts) == len(pairs) + 1
            and (starts[0], starts[-1]) == (0, len(tokens))
            and len(tokens) == len(counts)
            and bool((np.diff(starts) > 0).all() and (np.diff(pairs) > 0).all())
            and all(
                not len(part) or (part.min() >= least and part.max() < end)
                for part, least, end in ((pairs, 0, vocabulary**2), (tokens, 0, vocabulary), (counts, 1, 1 << 31))
            )
        )
        if not fits:
            raise ValueError("its numbers do not fit together")
        return found


class Counting:
    """Counts tri-grams of documents, `AT_ONCE` at a time, so that a corpus may be of any size."""

    def __init__(self, vocabulary: int, most: int = 1 << 24) -> None:
        """At most `most` tri-grams are kept between two rounds: the rarest are dropped, and count from 0 if they come
        again."""
        if vocabulary**3 >= 1 << 63:
            raise UsageError(f"Tri-grams over a vocabulary of {vocabulary} tokens cannot be counted here.")
        self.vocabulary, self.most, self.read = vocabulary, most, 0
        self._keys, self._counts = np.zeros(0, np.int64), np.zeros(0, np.int64)
        self._waiting: list[Numbers] = []
        self._held = 0
        self._document: list[int] = []

    def extend(self, tokens: Iterable[int]) -> None:
        self._document += tokens
        if len(self._document) > AT_ONCE:
            self._take(keep=2)

    def end_document(self) -> None:
        """No tri-gram crosses from one document into the next."""
        self._take(keep=0)

    def _take(self, keep: int) -> None:
        tokens = np.array(self._document, dtype=np.int64)
        self.read += max(len(tokens) - keep, 0)
        if len(tokens) > 2:
            self._waiting.append((tokens[:-2] * self.vocabulary + tokens[1:-1]) * self.vocabulary + tokens[2:])
            self._held += len(tokens) - 2
        self._document = self._document[-keep:] if keep else []
        if self._held > AT_ONCE:
            self._merge()

    def _merge(self) -> None:
        keys, counts = np.unique(np.concatenate([*self._waiting, np.zeros(0, np.int64)]), return_counts=True)
        every = np.concatenate([self._keys, keys])
        self._keys, places = np.unique(every, return_inverse=True)
        weights = np.concatenate([self._counts, counts])
        self._counts = np.bincount(places, weights, len(self._keys)).astype(np.int64)
        if len(self._keys) > self.most:
            kept = np.sort(np.argsort(-self._counts, kind="stable")[: self.most])
            self._keys, self._counts = self._keys[kept], self._counts[kept]
        self._waiting, self._held = [], 0

    def table(self, model: str, tokenizer: str, successors: int = SUCCESSORS, size: int | None = None) -> TrigramTable:
        """The table of the `successors` best successors of every pair, or of the `size` most frequent pairs."""
        self._take(keep=0)
        self._merge()
        pairs, tokens = np.divmod(self._keys, self.vocabulary)
        order = np.lexsort((tokens, -self._counts, pairs))
        pairs, tokens, counts = pairs[order], tokens[order], self._counts[order]
        keys, first, lengths = np.unique(pairs, return_index=True, return_counts=True)
        rank = np.arange(len(pairs)) - np.repeat(first, lengths)
        kept = rank < successors
        if size is not None and len(keys) > size:
            totals = np.add.reduceat(counts, first)
            frequent = np.zeros(len(keys), dtype=np.bool_)
            frequent[np.argsort(-totals, kind="stable")[:size]] = True
            kept &= np.repeat(frequent, lengths)
        keys, lengths = np.unique(pairs[kept], return_counts=True)
        starts = np.concatenate([[0], np.cumsum(lengths)])
        return TrigramTable(model, tokenizer, self.vocabulary, self.read, keys, starts, tokens[kept], counts[kept])
