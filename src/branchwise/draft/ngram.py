"""Prompt lookup: what followed the last few tokens when they stood in this text before.

Saxena, "Prompt Lookup Decoding" (2023). No model and no training; it pays where the answer repeats its prompt or
itself: editing, summaries, code, questions about a document.
"""

from __future__ import annotations

from collections.abc import Sequence as Rows
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

from branchwise.draft import Budget
from branchwise.draft.chain import Chain
from branchwise.errors import UsageError
from branchwise.sequence import Sequence
from branchwise.target import Scored
from branchwise.tree import DraftTree, Draw
from branchwise.verify import Verdict


class NGram:
    """Continue the longest n-gram, `max` down to `min` tokens, from its most recent earlier place."""

    name = "ngram"
    draw = Draw.FIXED

    def __init__(self, max: int = 4, min: int = 2, tree: Chain | None = None) -> None:
        if not 1 <= min <= max:
            raise UsageError(f"Drafter 'ngram' needs 1 <= min <= max, not min={min}, max={max}.")
        self.sizes = range(max, min - 1, -1)
        self.tree = tree or Chain()
        if not isinstance(self.tree, Chain):
            raise UsageError("Drafter 'ngram' drafts one chain; use --tree chain:L.")
        self._indexes: WeakKeyDictionary[Sequence, Index] = WeakKeyDictionary()

    def draft(self, sequences: Rows[Sequence], budgets: Rows[Budget]) -> list[DraftTree]:
        return [self._draft(sequence, budget) for sequence, budget in zip(sequences, budgets, strict=True)]

    def observe(self, sequences: Rows[Sequence], scored: Scored, verdicts: Rows[Verdict]) -> None:
        pass

    def _draft(self, sequence: Sequence, budget: Budget) -> DraftTree:
        tokens = sequence.tokens
        length = min(self.tree.length, budget.depth, budget.nodes - 1)
        found = self._indexes.setdefault(sequence, Index(self.sizes)).find(tokens)
        if found is None or length < 1:
            return DraftTree.root(sequence.root)
        # A place close to the end runs out of text; going round from there continues the repetition.
        period = len(tokens) - found
        return DraftTree.chain([sequence.root, *(tokens[found + i % period] for i in range(length))])


@dataclass
class Index:
    """For every n-gram of a growing text the most recent place where it was followed by something."""

    sizes: range
    places: dict[tuple[int, ...], int] = field(default_factory=dict)
    """n-gram -> position of the token that followed it"""
    read: int = 0

    def find(self, tokens: list[int]) -> int | None:
        """Where the longest n-gram at the end of the text was continued before."""
        for position in range(self.read, len(tokens)):
            for size in self.sizes:
                if size <= position:
                    self.places[tuple(tokens[position - size : position])] = position
        self.read = len(tokens)
        for size in self.sizes:
            place = self.places.get(tuple(tokens[-size:]))
            if place is not None:
                return place
        return None
