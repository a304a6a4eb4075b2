"""Drafters that grow their trees: a source of laws, and a growth policy that asks it.

A source is a subclass with a method `look`. It answers the wishes of all sequences at once, so that one pass of a model
serves a whole level of a whole batch.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence as Rows
from dataclasses import dataclass
from typing import Any

from branchwise.draft import Budget
from branchwise.draft.dice import Races, Throw, dice_of, thrown
from branchwise.draft.growth import Found, Growing, Growth, Sapling
from branchwise.draft.recall import Recall
from branchwise.forest import Room
from branchwise.sequence import Sequence
from branchwise.target import Scored, Target
from branchwise.tree import DraftTree
from branchwise.verify import Verdict


@dataclass(frozen=True, eq=False)
class Wish:
    """What a policy wants to know about the tree of one sequence."""

    sequence: Sequence
    tree: Sapling
    nodes: list[int]
    """at least one, all different; the laws of their ancestors were asked for before"""


class Grown:
    """What every drafter of this kind has in common."""

    name: str
    recall: Recall | None = None
    """remembers laws of the target for a source that mixes them into its own"""

    def __init__(self, tree: Growth) -> None:
        self.tree = tree
        self.draw = tree.draw
        self.learns = bool(getattr(tree, "learns", False))
        self.passes = 0
        self.target: Target | None = None
        self._races = Races()
        self._drafted: list[DraftTree] = []

    def bind(self, target: Target) -> None:
        if self.target is None or self.target.device != target.device:
            self._races = Races(target.device, capture=getattr(target, "graphs", True))
        self.target = target

    @property
    def room(self) -> Room | None:
        """What every tree has room for on a device, where a policy says so: recorded verdicts want one shape."""
        on_host = self.target is None or self.target.device.type == "cpu"
        return None if on_host else getattr(self.tree, "room", None)

    @abstractmethod
    def look(self, wishes: Rows[Wish]) -> list[Found]:
        """What could follow the nodes of every wish, in one pass."""

    def draft(self, sequences: Rows[Sequence], budgets: Rows[Budget]) -> list[DraftTree]:
        growing = [self._plant(sequence, budget) for sequence, budget in zip(sequences, budgets, strict=True)]
        trees: dict[int, DraftTree] = {}
        wishes: dict[int, Wish] = {}
        throws: dict[int, Throw] = {}

        def advance(row: int, answer: Any) -> None:
            """Let a tree grow to its next wish or throw, or to its end."""
            try:
                asked = growing[row].send(answer)
            except StopIteration as end:
                trees[row] = end.value
                return
            if isinstance(asked, Throw):
                throws[row] = asked
            else:
                wishes[row] = Wish(sequences[row], *asked)

        for row in range(len(growing)):
            advance(row, None)
        while wishes or throws:  # all throws first: then the trees of a batch ask for a level together
            waiting = dict(throws or wishes)
            answers = thrown(list(throws.values())) if throws else self.look(list(wishes.values()))
            (throws or wishes).clear()
            for row, answer in zip(waiting, answers, strict=True):
                advance(row, answer)
        self._drafted = [trees[row] for row in range(len(growing))]
        return self._drafted

    def observe(self, sequences: Rows[Sequence], scored: Scored, verdicts: Rows[Verdict]) -> None:
        if self.recall is not None:
            self.recall.learn(sequences, self._drafted, scored, verdicts)
        if hasattr(self.tree, "observe"):
            self.tree.observe(sequences, self._drafted, scored, verdicts)

    def _plant(self, sequence: Sequence, budget: Budget) -> Growing:
        dice = dice_of(sequence, self._races)
        if hasattr(self.tree, "plant"):
            growing: Growing = self.tree.plant(sequence, budget, dice)
            return growing
        return self.tree.grow(sequence.root, budget, dice)
