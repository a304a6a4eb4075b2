"""Drafting without a model: what could follow is looked up in tables, not computed.

A lookup drafter finds its position behind a text, and gives the candidates at any position, each with its estimated
probability and the position after it. The position (`Cursor`) of an adjacency table is a token, that of an automaton a
state, that of an index a range of its suffixes: the tree that grows over them is the same. A new drafter of this kind
is a subclass of `LookupDrafter` with these verbs, in a file of its own.

    locate(sequence)         the cursor behind the last token of a text, after reading what is new in it
    candidates(cursor)       what may come next there
    advance(cursor, token)   the cursor behind one more token

Trees that are laid over candidates alone are fixed, and `match` is exact for them. If a tree is drawn, it is drawn from
the estimates of the candidates, and the verifiers that read q take it.
"""

from __future__ import annotations

import hashlib
from abc import abstractmethod
from collections.abc import Collection, Mapping, Sequence
from math import sqrt

from branchwise.backends.base import Scored, TargetInfo
from branchwise.core.sequence import SequenceState
from branchwise.core.tree import DraftTree, Draw
from branchwise.draft.base import Budget, Drafter, LearningDrafter
from branchwise.draft.builder import Candidate, Cursor, NodeProbs, TreeCoroutine, TreePolicy
from branchwise.draft.constrained import GrammarCursor, allowed_candidates, under_grammar
from branchwise.draft.policies.adaptive import AdaptiveRanks, AdaptiveSize
from branchwise.draft.sparse import SparseProbs
from branchwise.draft.tree_drafter import ExpandRequest, TreeDrafter
from branchwise.errors import UsageError
from branchwise.verify import Verdict


class LookupDrafter(TreeDrafter):
    """A drafter over tables."""

    texts: int = 0
    """sequences that it may have learned from"""

    def __init__(self, tree: TreePolicy) -> None:
        super().__init__(tree)
        self._cursors: dict[SequenceState, Cursor] = {}
        """of the sequences of the current step; none if it rests"""
        self._expanded: dict[SequenceState, dict[int, tuple[Cursor, Sequence[Candidate]]]] = {}
        """sequence -> node of its tree -> the cursor there, and the candidates"""

    def bind(self, target: TargetInfo) -> None:
        if self.learns and self.target is not None and self.target.vocabulary != target.vocabulary:
            raise UsageError(
                f"Drafter {self.name!r} has learned for a model with {self.target.vocabulary} tokens, and this one has "
                f"{target.vocabulary}; build a new one for it."
            )
        super().bind(target)
        self.paces = isinstance(self.tree, (AdaptiveSize, AdaptiveRanks))

    def derive_seed(self, sequence: SequenceState) -> int:
        return own_seed(self, sequence)

    @abstractmethod
    def locate(self, sequence: SequenceState) -> Cursor:
        """The cursor behind the last token of a text; called once a step for every sequence."""

    @abstractmethod
    def candidates(self, cursor: Cursor) -> Sequence[Candidate]:
        """What may come next, most probable first, every token once; empty if nothing is known."""

    def advance(self, cursor: Cursor, token: int) -> Cursor:
        """The cursor behind one more token that is not among the candidates; None if nothing is known of it."""
        return None

    def allowed(self, cursor: Cursor) -> Sequence[Candidate]:
        """The candidates that the grammar of a text allows, if it has one; where only one token may come, that one."""
        if not isinstance(cursor, GrammarCursor):
            return self.candidates(cursor)
        return allowed_candidates(cursor, self.candidates, self._behind, self.name)

    def _behind(self, cursor: Cursor, token: int) -> Cursor:
        """The cursor behind one more token, whether or not it is among the candidates."""
        if isinstance(cursor, GrammarCursor):
            return GrammarCursor(self._behind(cursor.own, token), cursor.place.after(token))
        expected = next((found.cursor for found in self.candidates(cursor) if found.token == token), None)
        return self.advance(cursor, token) if expected is None and cursor is not None else expected

    def learn(self, sequences: Sequence[SequenceState], scored: Scored, verdicts: Sequence[Verdict]) -> None:
        """Learn from a step; called before its tokens join the sequences."""

    def resume(self, cursors: Mapping[SequenceState, Cursor], trees: Sequence[DraftTree]) -> None:
        """The step that is learned from next is about these trees, which stand behind these cursors: another engine
        than ours may have changed the batch since they were laid, or cut them."""
        self._cursors, self._drafted = dict(cursors), list(trees)

    def finish(self, sequence: SequenceState) -> None:
        self._cursors.pop(sequence, None)
        self._expanded.pop(sequence, None)

    def draft(self, sequences: Sequence[SequenceState], budgets: Sequence[Budget]) -> list[DraftTree]:
        self._cursors = {sequence: self.locate(sequence) for sequence in sequences}
        if not self.tree.lays:
            return super().draft(sequences, budgets)
        self.tree.begin_batch(len(sequences), self.target)
        roots = [sequence.root for sequence in sequences]
        cursors = [under_grammar(*pair) for pair in self._cursors.items()]
        trees = self.tree.lay_all(roots, cursors, self.allowed, budgets)
        self._drafted = [tree.finish(Draw.FIXED) for tree in trees]
        self.tree.drafted()
        return self._drafted

    def rest(self, sequences: Sequence[SequenceState]) -> list[DraftTree]:
        if self.paces:  # its policy times this step too
            return Drafter.rest(self, sequences)
        self._cursors = {}
        return super().rest(sequences)

    def look(self, requests: Sequence[ExpandRequest]) -> list[NodeProbs]:
        """The candidates of the nodes as distributions. None of this is a pass of a model."""
        assert self.target is not None
        form = self.target.vocabulary, self.target.device
        found = [[self._expand(request, node)[1] for node in request.nodes] for request in requests]
        return [NodeProbs([SparseProbs.of({c.token: c.mass for c in row}, *form) for row in rows]) for rows in found]

    def update(self, sequences: Sequence[SequenceState], scored: Scored, verdicts: Sequence[Verdict]) -> None:
        super().update(sequences, scored, verdicts)
        self.learn(sequences, scored, verdicts)

    def _grow(self, sequence: SequenceState, budget: Budget) -> TreeCoroutine:
        cursor = under_grammar(sequence, self._cursors[sequence])
        candidates = self.allowed(cursor)
        if not candidates:
            return _root_only(sequence.root)
        self._expanded[sequence] = {0: (cursor, candidates)}
        return super()._grow(sequence, budget)

    def _expand(self, request: ExpandRequest, node: int) -> tuple[Cursor, Sequence[Candidate]]:
        """The cursor of a node and its candidates; if it has none, those of its nearest ancestor that has some: any
        distribution will do, as long as it is the one that is drawn from."""
        known = self._expanded[request.sequence]
        if node not in known:
            token = request.tree.tokens[node]
            cursor, above = self._expand(request, request.tree.parents[node])
            cursor = self._behind(cursor, token)
            known[node] = cursor, self.allowed(cursor) or above
        return known[node]


def own_seed(drafter: LookupDrafter | LearningDrafter, sequence: SequenceState) -> int:
    """The seed of the sequence for the first one, and another for every later one, unless nothing is drawn."""
    if not drafter.learns or drafter.draw is Draw.FIXED:
        return sequence.seed
    drafter.texts += 1
    return sequence.seed if drafter.texts == 1 else mix_seed(sequence.seed, drafter.texts)


def mix_seed(seed: int, number: int) -> int:
    """Another seed, far from those of other seeds and numbers."""
    digest = hashlib.blake2b(f"{seed}/{number}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def _root_only(root: int) -> TreeCoroutine:
    """A tree without a node below its root, which asks for nothing."""
    yield from ()
    return DraftTree.root(root)


# From counts to probabilities

DOUBT = 4.0
"""How many occurrences make a context of one token half certain; one of n tokens needs n ** 1.5 times fewer. So a token
that was seen once is expected again one time in five behind one token, and nine times in ten behind ten."""
CERTAIN = 0.02
"""if less mass than this is left, shorter contexts need not be asked"""
WIDTH = 8
"""candidates at one position"""


def ppm_backoff(
    masses: dict[int, float], left: float, counts: Collection[tuple[int, int]], length: int, total: int = 0
) -> float:
    """Assign tokens their part of the mass that longer contexts left; returns what this context leaves.

    Cleary and Witten, "Data Compression Using Adaptive Coding and Partial String Matching" (1984): the longest context
    assigns first, and leaves more the shorter it is and the less often it was seen. A context of `length` tokens was
    followed by these tokens so often in `counts`, and by any token `total` times, if that is more. It assigns nothing
    to tokens that have a mass already.
    """
    fresh: list[tuple[int, int]] = []
    counted = 0
    for pair in counts:
        if pair[0] in masses:
            total -= pair[1]
        else:
            fresh.append(pair)
            counted += pair[1]
    if not fresh:
        return left
    doubt = DOUBT / (length * sqrt(length))
    whole = (total if total > counted else counted) + doubt
    for token, count in fresh:
        masses[token] = left * count / whole
    return left * doubt / whole


def ranked(masses: dict[int, float]) -> list[int]:
    """The most probable tokens, best first; of equally probable ones the first that was found."""
    return sorted(masses, key=masses.__getitem__, reverse=True)[:WIDTH]
