"""Drafting without a model: what could follow is remembered and looked up, not computed.

A memory finds its place behind the text, and says of every place what may come next, how probable that is believed to
be, and where it stands behind that. A table of successors stands at a token, an automaton at a state, an index at a
range of its suffixes: the tree that grows over them is the same. A new memory is a subclass of `LookupDrafter` with
these two verbs, in a file of its own.

    find(sequence)   the place behind the last token of a text, once what is new in it has been read
    after(place)     what may come next there

Trees that are laid down by belief alone are fixed, and `match` is exact for them. Where a tree is to be drawn, what is
believed of a place is the distribution it is drawn from, and the verifiers that read q take it.
"""

from __future__ import annotations

import hashlib
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple

from branchwise.backends.base import Scored, Target
from branchwise.core.sequence import SequenceState
from branchwise.core.tree import DraftTree, Draw
from branchwise.draft.base import Budget
from branchwise.draft.builder import NodeProbs, TreeCoroutine, TreePolicy
from branchwise.draft.sparse import SparseProbs
from branchwise.draft.tree_drafter import ExpandRequest, TreeDrafter
from branchwise.errors import UsageError
from branchwise.verify import Verdict

Cursor = Any
"""where a memory stands; its own business, and None where it has lost the thread"""


class Candidate(NamedTuple):
    """A token that may come next."""

    token: int
    mass: float
    """how probable it is believed to be: above 0, and together with all others of its place at most 1"""
    place: Cursor
    """where the memory stands behind it"""
    source: str = ""
    """which memory says so, where several speak as one"""


new = tuple.__new__
"""`new(Next, (token, mass, place, source))` is a shorter way to one, for memories that say hundreds at a step"""


class LookupDrafter(TreeDrafter):
    """A drafter with a memory.

    One that learns from what the target found also has `learn(sequences, scored, verdicts)`, called after every step
    before its tokens join the sequences; one that can use distributions of the prompt says in `wants_prefill` for how
    many of its last tokens, and gets them by `begin(sequence, logits)`.
    """

    wants_prefill = 0

    def __init__(self, tree: TreePolicy) -> None:
        super().__init__(tree)
        self.texts = 0
        """how many this memory may have learned from"""
        self._places: dict[SequenceState, Cursor] = {}
        """of the texts that are being drafted for"""
        self._believed: dict[SequenceState, dict[int, tuple[Cursor, Sequence[Candidate]]]] = {}
        """text -> node of its tree -> the place there, and what is believed to follow"""

    def bind(self, target: Target) -> None:
        if self.learns and self.target is not None and self.target.vocabulary != target.vocabulary:
            raise UsageError(
                f"Drafter {self.name!r} has learned for a model with {self.target.vocabulary} tokens, and this one has "
                f"{target.vocabulary}; build a new one for it."
            )
        super().bind(target)

    def derive_seed(self, sequence: SequenceState) -> int:
        """Where the draws of a text are to come from.

        Texts of one seed share their draws. What a memory has learned from one tells about them; a draft that is drawn
        from that would know something of the draws that judge it. So every text gets draws of its own, the first those
        of its seed. `match` asks for none of this: its tokens do not depend on the draft.
        """
        if not self.learns or self.draw is Draw.FIXED:
            return sequence.seed
        self.texts += 1
        return sequence.seed if self.texts == 1 else mixed(sequence.seed, self.texts)

    @abstractmethod
    def find(self, sequence: SequenceState) -> Cursor:
        """The place behind the last token of a text; asked once a step for every text."""

    @abstractmethod
    def after(self, place: Cursor) -> Sequence[Candidate]:
        """What may come next, best first, every token once; nothing where nothing is known."""

    def step(self, place: Cursor, token: int) -> Cursor:
        """The place behind one more token that `after` did not give; None for a memory that has lost the thread."""
        return None

    def close(self, sequence: SequenceState) -> None:
        """A text has ended."""
        self._places.pop(sequence, None)
        self._believed.pop(sequence, None)

    def draft(self, sequences: Sequence[SequenceState], budgets: Sequence[Budget]) -> list[DraftTree]:
        self._places = {sequence: self.find(sequence) for sequence in sequences}
        if not hasattr(self.tree, "lay"):
            return super().draft(sequences, budgets)
        if hasattr(self.tree, "begin"):
            self.tree.begin(len(sequences), self.target)
        self._drafted = [
            self.tree.lay(sequence.root, self._places[sequence], self.after, budget).finish(Draw.FIXED)
            for sequence, budget in zip(sequences, budgets, strict=True)
        ]
        if hasattr(self.tree, "drafted"):
            self.tree.drafted()
        return self._drafted

    def look(self, requests: Sequence[ExpandRequest]) -> list[NodeProbs]:
        """What is believed of the nodes, as distributions. None of this is a pass of a model."""
        return [NodeProbs([self._row(request, node) for node in request.nodes]) for request in requests]

    def update(self, sequences: Sequence[SequenceState], scored: Scored, verdicts: Sequence[Verdict]) -> None:
        super().update(sequences, scored, verdicts)
        if hasattr(self, "learn"):
            self.learn(sequences, scored, verdicts)

    def _plant(self, sequence: SequenceState, budget: Budget) -> TreeCoroutine:
        place = self._places[sequence]
        believed = self.after(place)
        if not believed:
            return _nothing(sequence.root)
        self._believed[sequence] = {0: (place, believed)}
        return super()._plant(sequence, budget)

    def _row(self, request: ExpandRequest, node: int) -> SparseProbs:
        assert self.target is not None
        _, believed = self._belief(request, node)
        weights = {found.token: found.mass for found in believed}
        return SparseProbs.of(weights, self.target.vocabulary, self.target.device)

    def _belief(self, request: ExpandRequest, node: int) -> tuple[Cursor, Sequence[Candidate]]:
        """The place of a node, and what is believed to follow; where nothing is, what was at its nearest ancestor.

        Any distribution will do there, as long as it is the one that is drawn from.
        """
        known = self._believed[request.sequence]
        if node not in known:
            token = request.tree.tokens[node]
            place, before = self._belief(request, request.tree.parents[node])
            expected = next((found.place for found in self.after(place) if found.token == token), None)
            place = self.step(place, token) if expected is None and place is not None else expected
            known[node] = place, self.after(place) or before
        return known[node]


def mixed(seed: int, number: int) -> int:
    """Another seed, far from those of other seeds and numbers."""
    digest = hashlib.blake2b(f"{seed}/{number}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def _nothing(root: int) -> TreeCoroutine:
    """A tree that does not grow, and asks for nothing."""
    yield from ()
    return DraftTree.root(root)
