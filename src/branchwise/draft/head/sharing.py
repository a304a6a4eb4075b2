"""What a text of a head can inherit from another text with the same beginning: cache rows, and unread hidden states.

The target prefills such a text only after the rows that it inherits, so it computes no hidden states for these.
"""

from __future__ import annotations

import torch

from branchwise.backends.base import TargetInfo
from branchwise.core.sequence import SequenceState
from branchwise.draft.builder import TreePolicy
from branchwise.draft.head.cache import HeadCache
from branchwise.draft.head.following import Following, Unread
from branchwise.draft.head.network import HeadConfig
from branchwise.draft.tree_drafter import TreeDrafter


class SharingDrafter(TreeDrafter):
    """A drafter with a KV cache of its own, whose rows read hidden states of the target."""

    _cache: HeadCache
    _window: int
    """number of rows that a row attends to, itself included; 0 for all rows before it"""
    _reach: int
    """in a window: number of rows that the last row depends on through all layers, itself included"""

    def __init__(self, tree: TreePolicy) -> None:
        super().__init__(tree)
        self._texts: dict[SequenceState, Following] = {}

    def _open_cache(self, config: HeadConfig, target: TargetInfo) -> None:
        """Make a new cache for a target, and forget all texts."""
        self._cache = HeadCache(config, target.slots, target.device, target.dtype)
        self._window, self._reach = config.window, config.layers * (config.window - 1) + 1
        self._texts.clear()

    @property
    def cache_bytes(self) -> int:
        return self._cache.bytes

    def unseen(self, sequence: SequenceState) -> int:
        """The number of first rows of a prompt that its last row does not depend on."""
        return max(0, len(sequence.tokens) - 1 - self._reach) if self._window else 0

    def knows(self, sequence: SequenceState) -> bool:
        """Whether the head has read, or can read, hidden states of all tokens before the root, and of at least one."""
        return self._texts[sequence].misses_nothing(sequence, self._cache.lengths) and len(sequence.tokens) > 1

    def reusable(self, source: SequenceState, sequence: SequenceState, rows: int) -> int:
        rows = min(rows, len(sequence.tokens) - 2)  # the last row must be read: its prediction cannot be inherited
        return max(self._known(source, rows), min(rows, self.unseen(sequence)))

    def _known(self, source: SequenceState, rows: int) -> int:
        """How many of the first `rows` rows of a text another text can inherit: as far as all of them are in the cache
        or can be read, or in a window those that the next row attends to."""
        text = self._texts.get(source)
        if text is None:
            return 0
        known = self._cache.lengths[source] + len(text.unread)
        if not text.whole or known < len(source.tokens) - 1:  # states are missing, so only rows of the prompt fit
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
        """Keep the rows of the text, and its unread states."""

    def drop(self, sequence: SequenceState) -> None:
        self.finish(sequence)

    def finish(self, sequence: SequenceState) -> None:
        self._cache.close(sequence)
        self._texts.pop(sequence, None)
