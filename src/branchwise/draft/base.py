"""Drafters: what proposes the trees.

Adding one is a subclass of `Drafter` in a file of its own and a line in `DRAFTERS`; see docs/add-a-drafter.md.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from branchwise.backends.base import Needs, Prefill, Scored, TargetInfo
from branchwise.core.sequence import SequenceState
from branchwise.core.tree import DraftTree, Draw
from branchwise.errors import UsageError
from branchwise.verify import Verdict, Verdicts

NO_NEEDS = Needs()


@dataclass(frozen=True)
class Budget:
    """How large the next tree of a sequence may be."""

    nodes: int
    """nodes that the pass may score, the root included"""
    depth: int
    """levels below the root; what is deeper could not be emitted"""


NOTHING = Budget(nodes=1, depth=0)
"""that of a step in which nothing is drafted"""


class Drafter(ABC):
    """A drafter that needs nothing, keeps nothing and learns nothing; a subclass says what it does beyond that.

    The engine calls `bind` once, `start` when the prompt of a sequence is in the cache, then for every step `draft` or
    `rest`, and `update`, and `finish` when the sequence ends. In a step of another drafter it calls `follow` alone.
    Where cached rows outlive their texts it may be `retire`, and `drop` later; `inherit` comes before `start` then, in
    a text that begins with such rows.
    """

    name: str
    draw: Draw = Draw.FIXED
    """how its trees are drawn, which decides the verifiers that fit"""
    learns: bool = False
    """whether it keeps something from one request to the next"""
    passes: int = 0
    """passes of a draft model so far"""
    cost: float | None = None
    """bytes that such a pass reads, as a share of those that a pass of the target reads"""
    members: Sequence[Drafter] = ()
    """the drafters that it speaks for"""
    paces: bool = False
    """whether it drafts nothing by itself where that would lose; if not, the engine may let it rest. Read after `bind`.
    """
    largest: int = 0
    """nodes below the root of its largest tree; 0 if only the budget bounds it"""
    sources: Sequence[Drafter] = ()
    """drafters of which the engine lets one draft in every step, or none, in place of this one. Read after `bind`."""

    foresees: bool = False
    """whether its trees may depend on what the target will draw; `match` alone allows that (`draft.foresight`)"""
    tasks: Sequence[str] = ()
    """what a request may say that its text is about, where several specialists draft"""

    @property
    def source(self) -> str:
        """Who drafted a node, where its tree does not say it; read after `bind`."""
        return self.name

    @property
    def needs(self) -> Needs:
        """What it asks of the target's passes; read after `bind`, the pad shape at every step."""
        return NO_NEEDS

    def bind(self, target: TargetInfo) -> None:
        """Called before anything else, and again for another target."""

    def let_foresee(self, allowed: bool) -> None:
        """Called after `bind`; one that speaks for others tells them."""
        self.foresees = allowed

    def assign(self, sequence: SequenceState, task: str) -> None:
        """A sequence that is about to come is about one of the `tasks`."""

    def start(self, sequence: SequenceState, prefill: Prefill) -> None:
        """A prompt is in the cache. `prefill` holds the logits and hidden states that `needs` asks for, without those
        of rows that were inherited."""

    @abstractmethod
    def draft(self, sequences: Sequence[SequenceState], budgets: Sequence[Budget]) -> list[DraftTree]:
        """One tree for every sequence, within its budget, its root the last token of the sequence."""

    def rest(self, sequences: Sequence[SequenceState]) -> list[DraftTree]:
        """Bare roots, in place of `draft`, for a step in which nothing is drafted: it must take next to no time. What
        is missed of the texts is read when something is drafted again."""
        return self.draft(sequences, [NOTHING] * len(sequences))

    def update(self, sequences: Sequence[SequenceState], scored: Scored, verdicts: Sequence[Verdict]) -> None:
        """Learn from a step; called before its tokens join the sequences."""

    def follow(self, sequences: Sequence[SequenceState], scored: Scored, verdicts: Sequence[Verdict]) -> None:
        """In place of `update`, after a step in which another drafter drafted, or nobody: keep what could not be read
        later. It must take next to no time."""

    def finish(self, sequence: SequenceState) -> None:
        """A sequence has ended."""

    # Texts that begin alike (engine/prefixes.py)

    def reusable(self, source: SequenceState, sequence: SequenceState, rows: int) -> int:
        """How many of the first cached rows of a text the prompt of another may begin with, of so many that it could,
        if drafts are not to suffer: of these there will be no hidden states and no logits. By default none for a
        drafter that needs hidden states, and all for others."""
        return 0 if self.needs.hidden_layers else rows

    def inherit(self, source: SequenceState, sequence: SequenceState, rows: int, *, moved: bool) -> None:
        """The prompt of a sequence begins with so many rows of another one, which is running or retired, and is gone
        from now on if they were `moved`. `start` follows, with what was found for the tokens behind them."""

    def retire(self, sequence: SequenceState) -> None:
        """A sequence has ended, in place of `finish`, and its rows stay in the cache of the target: others may inherit
        them, until it is dropped. By default nothing is kept for these."""
        self.finish(sequence)

    def drop(self, sequence: SequenceState) -> None:
        """The rows of a retired sequence are gone."""

    def forget(self) -> None:
        """The texts so far were for warming up: what they said of later texts counts for nothing. What a learning
        drafter knows is restored besides."""

    def reasons(self, batch: int) -> list[str]:
        """What it would choose for so many texts, and by which numbers, in sentences."""
        return []

    def derive_seed(self, sequence: SequenceState) -> int:
        """The seed that the draws of a text come from. Texts of one seed share their draws: a drafter that draws from
        what it learned from one of them would know something of the draws that judge it, so it must give every text a
        seed of its own."""
        return sequence.seed

    # On a device, before the verdict has reached the host

    def update_on_device(self, scored: Scored, verdicts: Verdicts) -> None:
        """Learn from a step without the host. The next pass may overwrite `scored` before `update` is called."""

    def follow_on_device(self, scored: Scored, verdicts: Verdicts) -> None:
        """In place of `update_on_device`, in a step of another drafter."""

    def draft_next(self, budgets: Sequence[Budget]) -> list[DraftTree] | None:
        """The next trees of the same sequences, computed on the device after the verdict; None if it cannot. Their
        roots mean nothing. `draft` returns these very trees: the budgets of the next step will be these or larger."""
        return None


class LearningDrafter(Drafter):
    """A drafter whose knowledge outlives a request and can be put into a file (draft/state.py)."""

    learns: bool = True
    texts: int = 0
    """sequences that it may have learned from"""

    @abstractmethod
    def save(self) -> dict[str, Tensor]:
        """What it has learned; for a drafter with members, without what those have learned."""

    @abstractmethod
    def restore(self, tensors: dict[str, Tensor]) -> None:
        """Go on from what `save` returned; a UsageError says why that cannot be."""


def reusable_by_all(drafters: Sequence[Drafter], source: SequenceState, sequence: SequenceState, rows: int) -> int:
    """How many rows each of several drafters can do with. One that could do with more may not with any fewer."""
    while (fewest := min(drafter.reusable(source, sequence, rows) for drafter in drafters)) < rows:
        rows = fewest
    return rows


def not_a_state(name: str, why: str) -> UsageError:
    """The refusal to restore a drafter from tensors that it cannot have saved."""
    return UsageError(f"This is no state of {name!r} for this model: {why}; leave it out and start afresh.")


class NoDrafter(Drafter):
    """Plain decoding through the same loop, the baseline of every comparison."""

    name = "none"
    paces = True

    def draft(self, sequences: Sequence[SequenceState], budgets: Sequence[Budget]) -> list[DraftTree]:
        return [DraftTree.root(sequence.root) for sequence in sequences]

    def draft_next(self, budgets: Sequence[Budget]) -> list[DraftTree]:
        return [DraftTree.root(0)] * len(budgets)
