"""Tri-grams: what has followed two tokens so far, in this text and in those before it.

Liu et al., "Adaptive Draft-Verification for LLM Decoding" (ADED, arXiv 2407.12021): a map from two tokens to a few
successors stands for the target, and keeps learning from what the target writes. The map starts from the counts of a
corpus if the user gives a table (`table.py`), and empty if not. The paper's code credits the last tokens again at every
step; here each occurrence counts once.
"""

from __future__ import annotations

from itertools import islice
from operator import itemgetter
from pathlib import Path
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from branchwise.backends.base import TargetInfo
from branchwise.core.sequence import SequenceState
from branchwise.draft.base import LearningDrafter, not_a_state
from branchwise.draft.builder import Candidate, Cursor, TreePolicy
from branchwise.draft.lookup.base import LookupDrafter
from branchwise.draft.lookup.table import SUCCESSORS, Pair, TrigramTable
from branchwise.draft.policies.topk import TopK
from branchwise.errors import UsageError

MOST = 64
"""the largest count of a successor; if it is exceeded, all counts of the pair are halved, so that new ones can rise"""
LOOKED_UP = 1024
"""most pairs whose candidates are cached"""


class Trigram(LookupDrafter, LearningDrafter):
    """`trigram:size=65536,successors=12,table=FILE`: up to `size` pairs of tokens, and `successors` successors of each.

    The pair that was not seen for longest is forgotten first. A new successor replaces the successor with the lowest
    count, of several the oldest. If a pair occurred n times with k different successors, a successor with the count c
    has the mass c / (n + k), after Witten and Bell: each of the k was unknown once. A pair of the table starts from its
    counts in the table, scaled down, so that what the target writes soon outweighs them.
    """

    name = "trigram"

    def __init__(
        self, size: int = 65536, successors: int = SUCCESSORS, table: str = "", tree: TreePolicy | None = None
    ) -> None:
        if size < 1 or successors < 1:
            raise UsageError("Drafter 'trigram' keeps at least 1 pair of tokens and 1 successor of each.")
        super().__init__(tree or TopK(24, depth=6, width=8))
        self.size, self.successors = size, successors
        self.file, self.table = table, TrigramTable.load(Path(table).expanduser()) if table else None
        self._rows: dict[Pair, dict[int, int]] = {}
        """pair -> successor -> its count; both in the order in which they were last seen"""
        self._looked_up: dict[Pair, list[Candidate]] = {}
        """pair -> its candidates, while these are valid: successive trees look up many of the same pairs"""
        self._read: WeakKeyDictionary[SequenceState, int] = WeakKeyDictionary()

    def bind(self, target: TargetInfo) -> None:
        if self.table is not None:
            self.table.check(target, self.file)
        super().bind(target)

    def locate(self, sequence: SequenceState) -> Cursor:
        """The last two tokens of the text."""
        self._learn(sequence)
        return tuple(sequence.tokens[-2:]) if len(sequence.tokens) > 1 else None

    def candidates(self, cursor: Cursor) -> list[Candidate]:
        if cursor in self._looked_up:
            return self._looked_up[cursor]
        row = self._rows.get(cursor) or (self._counted(cursor) if cursor else None)
        if not row:
            return []
        whole = sum(row.values()) + len(row)
        # The sort is stable, so after the reversal the successor seen last comes first among equals.
        ranked = sorted(row.items(), key=itemgetter(1))[::-1]
        if len(self._looked_up) == LOOKED_UP:
            self._looked_up.clear()
        found = [Candidate(token, count / whole, (cursor[1], token)) for token, count in ranked]
        return self._looked_up.setdefault(cursor, found)

    def advance(self, cursor: Cursor, token: int) -> Cursor:
        return None if cursor is None else (cursor[1], token)

    def finish(self, sequence: SequenceState) -> None:
        """Learn the last tokens of a text too, although nothing was drafted after them."""
        super().finish(sequence)
        self._learn(sequence)
        self._read.pop(sequence, None)

    def save(self) -> dict[str, Tensor]:
        followers = [item for row in self._rows.values() for item in row.items()]
        return {
            "pairs": torch.tensor(list(self._rows), dtype=torch.int32).reshape(-1, 2),
            "successors": torch.tensor([len(row) for row in self._rows.values()], dtype=torch.int32),
            "tokens": torch.tensor([token for token, _ in followers], dtype=torch.int32),
            "counts": torch.tensor([count for _, count in followers], dtype=torch.int32),
        }

    def restore(self, tensors: dict[str, Tensor]) -> None:
        """Replace what is known; if this table is smaller, rows that do not fit are forgotten as usual."""
        try:
            saved = _rows_of(tensors, None if self.target is None else self.target.vocabulary)
        except (LookupError, TypeError, ValueError, RuntimeError):
            raise not_a_state(self.name, "these are no tri-grams of its vocabulary") from None
        self._rows, self._looked_up = {}, {}
        for pair, row in saved:
            while len(row) > self.successors:
                del row[min(row, key=row.__getitem__)]
            self._keep(pair, row)

    def _learn(self, sequence: SequenceState) -> None:
        """Credit every tri-gram that ends in a token that was not read yet."""
        tokens = sequence.tokens
        for end in range(max(2, self._read.get(sequence, 0)), len(tokens)):
            self._credit((tokens[end - 2], tokens[end - 1]), tokens[end])
        self._read[sequence] = len(tokens)

    def _credit(self, pair: Pair, token: int) -> None:
        self._looked_up.pop(pair, None)
        known = self._rows.pop(pair, None)
        row = self._counted(pair) if known is None else known
        count = row.pop(token, 0) + 1
        if count > MOST:
            row, count = {other: half for other, seen in row.items() if (half := seen // 2)}, count // 2
        elif len(row) == self.successors:
            del row[min(row, key=row.__getitem__)]
        row[token] = count
        self._keep(pair, row)

    def _counted(self, pair: Pair) -> dict[int, int]:
        """The successors of a pair in the table of the corpus, and their counts."""
        return {} if self.table is None else self.table.after(pair, self.successors)

    def _keep(self, pair: Pair, row: dict[int, int]) -> None:
        self._rows[pair] = row
        if len(self._rows) > self.size:
            oldest = next(iter(self._rows))
            del self._rows[oldest]
            self._looked_up.pop(oldest, None)


def _rows_of(tensors: dict[str, Tensor], vocabulary: int | None) -> list[tuple[Pair, dict[int, int]]]:
    """The rows that `save` wrote, the oldest pair first; anything else raises some error."""
    parts = pairs, lengths, tokens, counts = [tensors[name] for name in ("pairs", "successors", "tokens", "counts")]
    numbers = torch.cat([pairs.flatten(), tokens])
    ranges = ((lengths, 1, None), (counts, 1, MOST + 1), (numbers, 0, vocabulary))
    inside = all(least <= n and (end is None or n < end) for part, least, end in ranges for n in part.tolist())
    items = iter(zip(tokens.tolist(), counts.tolist(), strict=True))
    rows = [dict(islice(items, length)) for length in lengths.tolist()]
    keys: list[Pair] = [(first, second) for first, second in pairs.tolist()]
    # A pair or a successor that was written twice is one here, and a missing one is missing.
    whole = len(set(keys)) == len(keys) and [len(row) for row in rows] == lengths.tolist() and not list(items)
    if not inside or not whole or any(part.dtype != torch.int32 for part in parts):
        raise ValueError("not of our making")
    return list(zip(keys, rows, strict=True))
