"""Texts that a prompt may begin with: their keys and values are in the cache, so only the rest of it is prefilled.

The next turn of a conversation begins with all that was said, and many prompts begin with the same instructions. A text
that is running serves, with the rows that are committed, and so does one that has ended, as long as nobody needs its
slot. Rows depend on the tokens up to their own and on nothing else, so it does not matter whose they are; but how long
a prompt takes would tell one user what another has asked, so texts serve within their `Request.scope` alone.
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
"""rows that are reused at least: fewer are prefilled in the pass that writes the rest"""
BLOCK = 256
"""tokens that are compared at once"""


class Beginning(NamedTuple):
    """A text that a prompt begins like."""

    source: SequenceState
    rows: int
    """of its cache that the prompt can have"""


class Prefixes:
    """The texts whose rows prompts may begin with, and those that have ended among them."""

    def __init__(self, target: Target, drafter: Drafter, most: int) -> None:
        """At most so many texts that have ended are kept, and never more than there are slots that nobody needs."""
        if most < 1:
            raise UsageError(f"A prefix cache keeps at least 1 text, not {most}; leave it out to keep none.")
        if not target.keeps_rows:
            raise UsageError(f"{target.info.name} keeps no rows of texts that have ended; leave out prefix_cache.")
        self.most = most
        self._target, self._drafter = target, drafter
        self._kept: dict[SequenceState, Hashable] = {}  # and its scope; the one used longest ago first

    def __len__(self) -> int:
        return len(self._kept)

    def find(self, generation: Generation, running: Iterable[Generation]) -> Beginning | None:
        """Whose rows a prompt had best begin with, if anybody's."""
        self.sync()
        if generation.request.prompt_logprobs:
            return None
        prompt, scope = generation.sequence, generation.request.scope
        there = [(other.sequence, other.request.scope) for other in running]
        best: Beginning | None = None
        # Of equals a text that has ended, and of those the one used last: it can often be taken over as it is.
        for source, whose in (*there, *self._kept.items()):
            if whose != scope:
                continue
            least = WORTHWHILE if best is None else best.rows
            # The token behind a row has to be the same too: a head reads both.
            rows = common(source.tokens, prompt.tokens) - 1
            if rows >= least and (rows := self._drafter.reusable(source, prompt, rows)) >= least:
                best = Beginning(source, rows)
        return best

    def is_coming(
        self, generation: Generation, prefilling: Iterable[Generation], running: Iterable[Generation]
    ) -> bool:
        """Whether a prompt that is being prefilled will soon have rows for this one that nobody has yet."""
        if generation.request.prompt_logprobs:
            return False
        coming = 0
        for other in prefilling:
            if other.request.scope == generation.request.scope:
                rows = common(other.sequence.tokens, generation.sequence.tokens) - 1
                left = len(other.sequence.tokens) - 1 - other.prefilled
                coming = max(coming, rows if left <= 2 * rows else 0)  # longer ones are not worth the wait
        if coming < WORTHWHILE:
            return False
        found = self.find(generation, running)
        return coming >= WORTHWHILE + (0 if found is None else found.rows)

    def begin(self, beginning: Beginning, sequence: SequenceState) -> None:
        """Take a slot in which a sequence begins so."""
        source, rows = beginning
        ended = source in self._kept
        # A text that goes on needs no copy, and neither does one that would have to make room for its own.
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
        """The text of a generation has ended; others may begin with it."""
        self.sync()
        sequence = generation.sequence
        try:
            self._target.retire(sequence)
        except torch.OutOfMemoryError:  # to let it change places with another
            self._target.close(sequence)
            self._drafter.finish(sequence)
            return
        self._drafter.retire(sequence)
        self._kept[sequence] = scope = generation.request.scope
        for other, whose in list(self._kept.items()):
            # What another begins with, that one can lend.
            if other is not sequence and whose == scope and common(other.tokens, sequence.tokens) == len(other.tokens):
                self._target.close(other)
        self.sync()
        while len(self._kept) > self.most:
            self._target.close(next(iter(self._kept)))
            self.sync()

    def sync(self) -> None:
        """Let the drafter drop what the target has dropped."""
        for sequence in [sequence for sequence in self._kept if not self._target.holds(sequence)]:
            del self._kept[sequence]
            self._drafter.drop(sequence)

    def clear(self) -> None:
        """Keep none of the texts that have ended."""
        self.sync()
        for sequence in self._kept:
            self._target.close(sequence)
        self.sync()


def common(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens two texts begin with alike."""
    most = min(len(one), len(other))
    for first in range(0, most, BLOCK):
        end = min(first + BLOCK, most)
        if one[first:end] != other[first:end]:
            return next(place for place in range(first, end) if one[place] != other[place])
    return most
