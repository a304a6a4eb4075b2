"""A draft model or a trained head as a member of a fusion: its tree of this step is looked up like a memory.

For a draft model this is RASD (arXiv 2503.03434): its distributions after the nodes that it expanded prune what other
members propose. A trained head has distributions over its table alone, so it prunes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from branchwise.backends.base import Needs, Prefill, Scored, TargetInfo
from branchwise.core.sequence import SequenceState
from branchwise.core.tree import DraftTree
from branchwise.draft.base import Budget
from branchwise.draft.builder import Candidate, Cursor
from branchwise.draft.lookup.base import LookupDrafter
from branchwise.draft.tree_drafter import TreeDrafter
from branchwise.verify import Verdict

JUDGES = {"model": True, "head": False}
"""drafter that can be such a member -> whether its distributions prune what other members propose"""


class DraftedMember(LookupDrafter):
    """A draft model or a head among lookup drafters. A cursor is the path from the root; outside its tree it proposes
    nothing."""

    def __init__(self, drafter: TreeDrafter) -> None:
        super().__init__(drafter.tree)
        self._drafter = drafter
        self.name = drafter.name
        self.judges = JUDGES[self.name]
        self._known: dict[SequenceState, Drafted] = {}

    @property
    def needs(self) -> Needs:
        return self._drafter.needs

    def bind(self, target: TargetInfo) -> None:
        super().bind(target)
        self._drafter.bind(target)
        self.cost = self._drafter.cost

    def start(self, sequence: SequenceState, prefill: Prefill) -> None:
        super().start(sequence, prefill)
        self._drafter.start(sequence, prefill)

    def finish(self, sequence: SequenceState) -> None:
        super().finish(sequence)
        self._drafter.finish(sequence)
        self._known.pop(sequence, None)

    def reusable(self, source: SequenceState, sequence: SequenceState, rows: int) -> int:
        return self._drafter.reusable(source, sequence, rows)

    def inherit(self, source: SequenceState, sequence: SequenceState, rows: int, *, moved: bool) -> None:
        self._drafter.inherit(source, sequence, rows, moved=moved)

    def retire(self, sequence: SequenceState) -> None:
        super().finish(sequence)
        self._drafter.retire(sequence)
        self._known.pop(sequence, None)

    def drop(self, sequence: SequenceState) -> None:
        self._drafter.drop(sequence)

    def draft_ahead(self, sequences: Sequence[SequenceState], budgets: Sequence[Budget]) -> None:
        """Draft for all texts together, before the fusion looks anything up."""
        probs: dict[SequenceState, dict[tuple[int, ...], Tensor]] = {}
        self._drafter.kept_probs = probs
        trees = self._drafter.draft(sequences, budgets)
        self.passes = self._drafter.passes
        for sequence, tree in zip(sequences, trees, strict=True):
            self._known[sequence] = Drafted(tree, probs.get(sequence, {}))

    def learn(self, sequences: Sequence[SequenceState], scored: Scored, verdicts: Sequence[Verdict]) -> None:
        """Let the drafter learn from the scored tree, which is the tree of the fusion."""
        self._drafter._drafted = self._drafted
        self._drafter.update(sequences, scored, verdicts)

    def forget(self) -> None:
        self._drafter.forget()

    def locate(self, sequence: SequenceState) -> Cursor:
        return self._known[sequence], ()

    def candidates(self, cursor: Cursor) -> Sequence[Candidate]:
        drafted, path = cursor
        return [Candidate(token, mass, (drafted, (*path, token))) for token, mass in drafted.below.get(path, ())]

    def probs(self, cursor: Cursor) -> Tensor | None:
        """(vocabulary,): the drafter's distribution after a path, if it expanded the node."""
        drafted, path = cursor
        found: Tensor | None = drafted.probs.get(path)
        return found


class Drafted:
    """A tree and the distributions that it was grown from, both by the path of tokens from the root."""

    def __init__(self, tree: DraftTree, probs: dict[tuple[int, ...], Tensor]) -> None:
        self.probs = probs
        self.below: dict[tuple[int, ...], list[tuple[int, float]]] = {}
        paths: list[tuple[int, ...]] = [()]
        for token, parent in zip(tree.tokens[1:].tolist(), tree.parents[1:], strict=True):
            above = paths[parent]
            paths.append((*above, token))
            self.below.setdefault(above, []).append((token, min(float(probs[above][token]), 1.0)))
