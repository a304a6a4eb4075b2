"""The prefix cache: a prompt that begins like another text takes its keys and values, and only the rest is prefilled.

The next turn of a conversation begins with all that was said before, and many prompts begin with the same instructions.
A running text lends its committed rows; an ended text lends its rows until another text needs the slot. Rows depend on
the tokens up to their own alone, so rows of any text would do. But the time that a prompt takes could tell one user
what another has asked, so texts lend rows within their `Request.scope` only.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import NamedTuple

import torch

from branchwise.backends.base import Target
from branchwise.core.sequence import SequenceState
from branchwise.draft.base import Drafter
from branchwise.engine.request import Generation
from branchwise.errors import UsageError

WORTHWHILE = 16
"""the fewest rows that are reused: fewer are prefilled in the pass that writes the rest"""
BLOCK = 256
"""how many tokens of two texts are compared at once"""


class Beginning(NamedTuple):
    """A text that begins like a prompt."""

    source: SequenceState
    rows: int
    """how many of its cached rows the prompt can take"""


class Prefixes:
    """Finds the texts whose rows a prompt can begin with, and keeps ended texts for that."""

    def __init__(self, target: Target, drafter: Drafter, most: int) -> None:
        """At `most` this many ended texts are kept, and never more than there are free slots."""
        if most < 1:
            raise UsageError(f"A prefix cache keeps at least 1 text, not {most}; leave it out to keep none.")
        if not target.keeps_rows:
            raise UsageError(f"{target.info.name} keeps no rows of texts that have ended; leave out prefix_cache.")
        self.most = most
        self._target, self._drafter = target, drafter
        self._kept: dict[SequenceState, Hashable] = {}  # ended texts with their scopes, least recently used first

    def __len__(self) -> int:
        return len(self._kept)

    def find(self, generation: Generation, running: Iterable[Generation]) -> Beginning | None:
        """The best text for a prompt to take rows from, if any is worthwhile."""
        self.sync()
        if generation.request.prompt_logprobs:
            return None
        prompt, scope = generation.sequence, generation.request.scope
        lending = [(other.sequence, other.request.scope) for other in running]
        best: Beginning | None = None
        # Of equals the last one wins: an ended text, and of those the latest, which can often be taken over as it is.
        for source, whose in (*lending, *self._kept.items()):
            if whose != scope:
                continue
            least = WORTHWHILE if best is None else best.rows
            # The token after a row has to be the same too: a head reads both.
            rows = common(source.tokens, prompt.tokens) - 1
            if rows >= least and (rows := self._drafter.reusable(source, prompt, rows)) >= least:
                best = Beginning(source, rows)
        return best

    def is_coming(
        self, generation: Generation, prefilling: Iterable[Generation], running: Iterable[Generation]
    ) -> bool:
        """Whether a prompt that is being prefilled will soon have more rows for this one than any text has now."""
        if generation.request.prompt_logprobs:
            return False
        coming = 0
        for other in prefilling:
            if other.request.scope == generation.request.scope:
                rows = common(other.sequence.tokens, generation.sequence.tokens) - 1
                left = len(other.sequence.tokens) - 1 - other.prefilled
                coming = max(coming, rows if left <= 2 * rows else 0)  # a longer prefill is not worth the wait
        if coming < WORTHWHILE:
            return False
        found = self.find(generation, running)
        return coming >= WORTHWHILE + (0 if found is None else found.rows)

    def begin(self, beginning: Beginning, sequence: SequenceState) -> None:
        """Reserve a slot for a sequence that takes the rows of this beginning."""
        source, rows = beginning
        ended = source in self._kept
        # Rows move without a copy if the prompt continues the whole text, or if the text would lose its slot anyhow.
        moved = ended and (rows == len(source.tokens) - 1 or self._target.free_slots == 1)
        self._target.inherit(source, sequence, rows, moved=moved)
        if ended:
            scope = self._kept.pop(source)
            if not moved:
                self._kept[source] = scope
        self.sync()
        try:
            self._drafter.inherit(source, sequence, rows, moved=moved)
        except BaseException:
            self._target.close(sequence)
            self._drafter.finish(sequence)
            if moved:
                self._drafter.drop(source)
            raise

    def keep(self, generation: Generation) -> None:
        """Keep the rows of a generation that has ended, for prompts that begin like it."""
        self.sync()
        sequence = generation.sequence
        try:
            self._target.retire(sequence)
        except torch.OutOfMemoryError:  # there is no memory to let it change places with another text
            self._target.close(sequence)
            self._drafter.finish(sequence)
            return
        self._drafter.retire(sequence)
        self._kept[sequence] = scope = generation.request.scope
        for other, whose in list(self._kept.items()):
            # A kept text that is a beginning of this one is of no further use.
            if other is not sequence and whose == scope and common(other.tokens, sequence.tokens) == len(other.tokens):
                self._target.close(other)
        self.sync()
        while len(self._kept) > self.most:
            self._target.close(next(iter(self._kept)))
            self.sync()

    def sync(self) -> None:
        """Let the drafter drop the texts that the target has dropped."""
        for sequence in [sequence for sequence in self._kept if not self._target.holds(sequence)]:
            del self._kept[sequence]
            self._drafter.drop(sequence)

    def clear(self) -> None:
        """Drop all ended texts."""
        self.sync()
        for sequence in self._kept:
            self._target.close(sequence)
        self.sync()


def common(one: Sequence[int], other: Sequence[int]) -> int:
    """The length of the common beginning of two texts, in tokens."""
    most = min(len(one), len(other))
    for first in range(0, most, BLOCK):
        end = min(first + BLOCK, most)
        if one[first:end] != other[first:end]:
            return next(place for place in range(first, end) if one[place] != other[place])
    return most
