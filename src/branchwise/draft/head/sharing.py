"""What a text of a head can have of another that it begins like: rows of its cache, and states that are unread.

What the target prefills of such a text is behind the rows that it inherits, so of these there are no hidden states.
"""

from __future__ import annotations

import torch

from branchwise.core.sequence import SequenceState
from branchwise.draft.builder import TreePolicy
from branchwise.draft.head.cache import HeadCache
from branchwise.draft.head.following import Following, Unread
from branchwise.draft.tree_drafter import TreeDrafter


class SharingDrafter(TreeDrafter):
    """A drafter with a cache of its own, whose rows read hidden states of the target."""

    _cache: HeadCache
    _window: int
    """rows that a row sees, itself included; 0 for all before it"""
    _reach: int
    """in a window: as many rows, the last one included, as the last one depends on"""

    def __init__(self, tree: TreePolicy) -> None:
        super().__init__(tree)
        self._texts: dict[SequenceState, Following] = {}

    def unseen(self, sequence: SequenceState) -> int:
        """How many of the first rows of a prompt its last one does not depend on."""
        return max(0, len(sequence.tokens) - 1 - self._reach) if self._window else 0

    def knows(self, sequence: SequenceState) -> bool:
        """Whether there are states of all tokens before the root, and of one at least."""
        return self._texts[sequence].misses_nothing(sequence, self._cache.lengths) and len(sequence.tokens) > 1

    def reusable(self, source: SequenceState, sequence: SequenceState, rows: int) -> int:
        rows = min(rows, len(sequence.tokens) - 2)  # the last row is read: what it predicts is kept for no other text
        return max(self._known(source, rows), min(rows, self.unseen(sequence)))

    def _known(self, source: SequenceState, rows: int) -> int:
        """How many of so many first rows of a text can be shared: all up to there are in the cache or can be read, or
        in a window those that the next one sees."""
        text = self._texts.get(source)
        if text is None:
            return 0
        known = self._cache.lengths[source] + len(text.unread)
        if not text.whole or known < len(source.tokens) - 1:  # from where it stood aside nothing is in its place
            known = min(known, source.prompt_length - 1)
        rows, gone = min(rows, known), self._cache.first[source]
        return rows if not gone or gone <= rows - (self._window - 1) else 0

    @torch.inference_mode()
    def inherit(self, source: SequenceState, sequence: SequenceState, rows: int, *, moved: bool) -> None:
        if self._known(source, rows) == rows:
            read = min(rows, self._cache.lengths[source])
            self._texts[sequence] = Following(Unread(self._texts[source].unread.first(rows - read)))
            self._cache.inherit(source, sequence, rows, moved=moved)
        if moved:
            self.finish(source)

    def retire(self, sequence: SequenceState) -> None:
        """Its rows stay, and so do states that are unread."""

    def drop(self, sequence: SequenceState) -> None:
        self.finish(sequence)

    def finish(self, sequence: SequenceState) -> None:
        self._cache.close(sequence)
        self._texts.pop(sequence, None)
