"""Prompt lookup: what followed the last few tokens at their earlier occurrences in this text.

Saxena, "Prompt Lookup Decoding" (2023). No model and no training; it pays if the answer repeats its prompt or itself:
editing, summaries, code, questions about a document.

If the tree is one chain, it copies the continuation of the longest n-gram at its most recent occurrence. In any other
tree, every n-gram that the text ends with proposes the tokens that followed its last occurrences. A longer n-gram gets
more mass, and so does a token that followed more often; of tokens that followed equally often the most recent comes
first.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Sequence
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

from branchwise.core.sequence import SequenceState
from branchwise.core.tree import DraftTree, Draw
from branchwise.draft.base import Budget
from branchwise.draft.builder import Candidate, Cursor, TreePolicy, new
from branchwise.draft.constrained import allowed_chain, place_of
from branchwise.draft.lookup.base import WIDTH, LookupDrafter, ppm_backoff, ranked
from branchwise.draft.policies.paths import Chain
from branchwise.errors import UsageError

PLACES = 8
"""most occurrences of an n-gram that are counted, the most recent first"""


class NGram(LookupDrafter):
    """Continue the longest n-grams, `max` down to `min` tokens, from their most recent earlier occurrences.

    A cursor is the index of a text, and the last tokens of the text with the drafted ones.
    """

    name = "ngram"
    copied = 0
    """the length of the chain that the drafter copies; 0 if it grows another tree"""

    def __init__(self, max: int = 4, min: int = 2, tree: TreePolicy | None = None) -> None:
        if not 1 <= min <= max:
            raise UsageError(f"Drafter 'ngram' needs 1 <= min <= max, not min={min}, max={max}.")
        super().__init__(tree or Chain())
        self.sizes = range(max, min - 1, -1)
        if isinstance(self.tree, Chain):
            self.copied, self.draw = self.tree.length, Draw.FIXED
        self._indexes: WeakKeyDictionary[SequenceState, Index] = WeakKeyDictionary()

    def draft(self, sequences: Sequence[SequenceState], budgets: Sequence[Budget]) -> list[DraftTree]:
        if not self.copied:
            return super().draft(sequences, budgets)
        self._drafted = [self._copy(sequence, budget) for sequence, budget in zip(sequences, budgets, strict=True)]
        return self._drafted

    def locate(self, sequence: SequenceState) -> Cursor:
        index = self._indexes.setdefault(sequence, Index(self.sizes))
        index.read(sequence.tokens)
        return index, tuple(sequence.tokens[-self.sizes.start :])

    def candidates(self, cursor: Cursor) -> Sequence[Candidate]:
        if cursor is None:
            return []
        index, end = cursor
        masses: dict[int, float] = {}
        left = 1.0
        for size in self.sizes:
            position = index.places.get(end[-size:]) if size <= len(end) else None
            if position is not None and (fresh := index.followers(size, position, masses)):
                left = ppm_backoff(masses, left, fresh.items(), size)
                if len(masses) >= WIDTH:
                    break
        end = end[1 - self.sizes.start :] if self.sizes.start > 1 else ()
        return [new(Candidate, (token, masses[token], (index, (*end, token)), "")) for token in ranked(masses)]

    def advance(self, cursor: Cursor, token: int) -> Cursor:
        index, end = cursor
        return index, (*end, token)[-self.sizes.start :]

    def finish(self, sequence: SequenceState) -> None:
        super().finish(sequence)
        self._indexes.pop(sequence, None)

    def _copy(self, sequence: SequenceState, budget: Budget) -> DraftTree:
        tokens = sequence.tokens
        length = min(self.copied, budget.depth, budget.nodes - 1)
        found = self._indexes.setdefault(sequence, Index(self.sizes)).find(tokens)
        # An occurrence close to the end runs out of text; starting over from it continues the repetition.
        period = 0 if found is None else len(tokens) - found
        copy = [] if found is None else [tokens[found + i % period] for i in range(length)]
        if (place := place_of(sequence)) is not None:
            copy = allowed_chain(place, copy, length)
        return DraftTree.chain([sequence.root, *copy]) if copy else DraftTree.root(sequence.root)


@dataclass
class Index:
    """For every n-gram of a growing text the positions of the tokens that followed it, the most recent first."""

    sizes: range
    tokens: list[int] = field(default_factory=list)
    places: dict[tuple[int, ...], int] = field(default_factory=dict)
    """n-gram -> the most recent position of a token that followed it"""
    earlier: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    """size -> for every position of a token after an n-gram, the previous such position of the same n-gram; 0 if there
    is none"""

    def read(self, tokens: list[int]) -> None:
        start = len(self.tokens)
        self.tokens += tokens[start:]
        places = self.places
        for size in self.sizes:
            earlier = self.earlier[size]
            for position in range(start, len(tokens)):
                if size <= position:
                    gram = tuple(tokens[position - size : position])
                    earlier.append(places.get(gram, 0))
                    places[gram] = position
                else:
                    earlier.append(0)

    def find(self, tokens: list[int]) -> int | None:
        """The position after the most recent earlier occurrence of the longest n-gram that the text ends with."""
        self.read(tokens)
        for size in self.sizes:
            if (place := self.places.get(tuple(tokens[-size:]))) is not None:
                return place
        return None

    def followers(self, size: int, place: int, known: Container[int] = ()) -> dict[int, int]:
        """How often each token followed an n-gram at its last occurrences, without the `known` tokens; the most recent
        first. `place` is the most recent position after the n-gram."""
        tokens, earlier = self.tokens, self.earlier[size]
        found: dict[int, int] = {}
        for _ in range(PLACES):
            token = tokens[place]
            if token not in known:
                found[token] = found.get(token, 0) + 1
            place = earlier[place]
            if not place:
                break
        return found
