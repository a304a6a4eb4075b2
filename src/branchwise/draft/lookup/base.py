"""Drafting without a model: what could follow is looked up in tables, not computed.

A lookup drafter finds its position after a text, and gives the candidates at any position, each with its estimated
probability and the position after it. The position (`Cursor`) in an adjacency table is a token, in an automaton a
state, in an index a range of its suffixes; trees grow over all of them in the same way. A new drafter of this kind is a
subclass of `LookupDrafter` with these methods, in a file of its own.

    locate(sequence)         the cursor after the last token of a text; reads the new tokens of the text first
    candidates(cursor)       the tokens that may come after a cursor
    advance(cursor, token)   the cursor after one more token

Trees that are laid over candidates, without draws, are fixed, and `match` is exact for them. A drawn tree is drawn from
the estimated probabilities of the candidates, which are its q, so it needs a verifier that reads q.
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
    """number of sequences that the drafter may have learned from"""

    def __init__(self, tree: TreePolicy) -> None:
        super().__init__(tree)
        self._cursors: dict[SequenceState, Cursor] = {}
        """sequence of the current step -> the cursor after it; empty if the drafter rests"""
        self._expanded: dict[SequenceState, dict[int, tuple[Cursor, Sequence[Candidate]]]] = {}
        """sequence -> node of its tree -> the cursor of the node, and the candidates after it"""

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
        """The cursor after the last token of a text; called once a step for every sequence."""

    @abstractmethod
    def candidates(self, cursor: Cursor) -> Sequence[Candidate]:
        """The tokens that may come next, most probable first, each token once; empty if nothing is known."""

    def advance(self, cursor: Cursor, token: int) -> Cursor:
        """The cursor after one more token that is not among the candidates; None if nothing is known after it."""
        return None

    def allowed(self, cursor: Cursor) -> Sequence[Candidate]:
        """The candidates, restricted by the grammar of the text if it has one; a forced token is the only candidate."""
        if not isinstance(cursor, GrammarCursor):
            return self.candidates(cursor)
        return allowed_candidates(cursor, self.candidates, self._behind, self.name)

    def _behind(self, cursor: Cursor, token: int) -> Cursor:
        """The cursor after one more token, whether or not it is among the candidates."""
        if isinstance(cursor, GrammarCursor):
            return GrammarCursor(self._behind(cursor.own, token), cursor.place.after(token))
        expected = next((found.cursor for found in self.candidates(cursor) if found.token == token), None)
        return self.advance(cursor, token) if expected is None and cursor is not None else expected

    def learn(self, sequences: Sequence[SequenceState], scored: Scored, verdicts: Sequence[Verdict]) -> None:
        """Learn from a step; called before its tokens join the sequences."""

    def resume(self, cursors: Mapping[SequenceState, Cursor], trees: Sequence[DraftTree]) -> None:
        """Say which trees, after which cursors, the next call of `update` or `learn` is about. For engines other than
        ours, which may change the batch or cut the trees after they were laid."""
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
        if self.paces:  # the policy times this step too
            return Drafter.rest(self, sequences)
        self._cursors = {}
        return super().rest(sequences)

    def look(self, requests: Sequence[ExpandRequest]) -> list[NodeProbs]:
        """The candidates of the nodes as distributions, without a pass of any model."""
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
        """The cursor of a node and its candidates, or if it has none the candidates of its nearest ancestor with some:
        any distribution is lossless, as long as the children are drawn from it."""
        known = self._expanded[request.sequence]
        if node not in known:
            token = request.tree.tokens[node]
            cursor, above = self._expand(request, request.tree.parents[node])
            cursor = self._behind(cursor, token)
            known[node] = cursor, self.allowed(cursor) or above
        return known[node]


def own_seed(drafter: LookupDrafter | LearningDrafter, sequence: SequenceState) -> int:
    """The seed for the draws of a sequence (`Drafter.derive_seed`): its own for the first sequence, another one for
    every later sequence. If nothing is learned or nothing is drawn, always its own."""
    if not drafter.learns or drafter.draw is Draw.FIXED:
        return sequence.seed
    drafter.texts += 1
    return sequence.seed if drafter.texts == 1 else mix_seed(sequence.seed, drafter.texts)


def mix_seed(seed: int, number: int) -> int:
    """A seed that is a hash of a seed and a number."""
    digest = hashlib.blake2b(f"{seed}/{number}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def _root_only(root: int) -> TreeCoroutine:
    """The coroutine of a tree without a node below its root; it asks for nothing."""
    yield from ()
    return DraftTree.root(root)


# From counts to probabilities

DOUBT = 4.0
"""The doubt about a context of one token, in occurrences. If a context of n tokens occurred c times, the mass of seen
tokens = c / (c + DOUBT / n ** 1.5), here c / (c + 4 / n ** 1.5). So a token that was seen once is expected again one
time in five after a context of one token (1 / 5), and nine times in ten after one of ten (1 / 1.13)."""
CERTAIN = 0.02
"""If less mass than this is left, shorter contexts are not looked up."""
WIDTH = 8
"""Most candidates at one position."""


def ppm_backoff(
    masses: dict[int, float], left: float, counts: Collection[tuple[int, int]], length: int, total: int = 0
) -> float:
    """Assign tokens their part of the mass that longer contexts left; returns the mass that this context leaves.

    Cleary and Witten, "Data Compression Using Adaptive Coding and Partial String Matching" (1984): the longest context
    assigns first, and leaves more the shorter it is and the less often it was seen. `counts` says which tokens followed
    a context of `length` tokens, and how often; `total` says how often any token followed it, if that is more. The
    context assigns nothing to tokens that have a mass already.
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
    """The most probable tokens, best first; equally probable ones in the order in which they were found."""
    return sorted(masses, key=masses.__getitem__, reverse=True)[:WIDTH]
