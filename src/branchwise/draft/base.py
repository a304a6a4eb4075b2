"""Drafters: what proposes the trees.

To add a drafter, subclass `Drafter` in a file of its own and add a line to `DRAFTERS`; see docs/add-a-drafter.md.
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
    """number of nodes that the pass may score, the root included"""
    depth: int
    """number of levels below the root; deeper nodes could not be emitted"""


NOTHING = Budget(nodes=1, depth=0)
"""the budget of a step in which nothing is drafted"""


class Drafter(ABC):
    """A drafter that needs nothing, keeps nothing and learns nothing; a subclass overrides what it does beyond that.

    The engine calls `bind` once, and `start` when the prompt of a sequence is in the cache. In every step it calls
    `draft` or `rest`, and then `update`; if another drafter drafted in the step, it calls `follow` alone. When the
    sequence ends, it calls `finish`. If cached rows outlive their sequences, it calls `retire` instead of `finish`, and
    `drop` later; a sequence that begins with such rows gets `inherit` before `start`.
    """

    name: str
    draw: Draw = Draw.FIXED
    """how the trees of this drafter are drawn, which decides the verifiers that fit"""
    learns: bool = False
    """whether the drafter keeps something from one request to the next"""
    passes: int = 0
    """number of passes of a draft model so far"""
    cost: float | None = None
    """bytes that a pass of the draft model reads, as a share of the bytes that a pass of the target reads"""
    members: Sequence[Drafter] = ()
    """the drafters that this one combines"""
    paces: bool = False
    """whether the drafter itself decides to draft nothing if drafting would be slower; if not, the engine may let it
    rest. Read after `bind`."""
    largest: int = 0
    """number of nodes below the root of its largest tree; 0 if only the budget bounds it"""
    sources: Sequence[Drafter] = ()
    """drafters that replace this one: in every step the engine lets one of them draft, or none. Read after `bind`."""

    foresees: bool = False
    """whether its trees may depend on what the target will draw; `match` alone allows that (`draft.foresight`)"""
    tasks: Sequence[str] = ()
    """the tasks that a request may name, if several specialists draft"""

    @property
    def source(self) -> str:
        """The name of the drafter of a node, if its tree does not record one; read after `bind`."""
        return self.name

    @property
    def needs(self) -> Needs:
        """What the drafter needs from the target's passes; read after `bind`, and the pad shape at every step."""
        return NO_NEEDS

    def bind(self, target: TargetInfo) -> None:
        """Prepare for a target. Called before anything else, and again for another target."""

    def let_foresee(self, allowed: bool) -> None:
        """Set `foresees`. Called after `bind`; a drafter that combines others passes it on to them."""
        self.foresees = allowed

    def assign(self, sequence: SequenceState, task: str) -> None:
        """Name the task, one of `tasks`, of a sequence that has not started yet."""

    def start(self, sequence: SequenceState, prefill: Prefill) -> None:
        """Called when a prompt is in the cache. `prefill` holds the logits and hidden states that `needs` asks for,
        except those of inherited rows."""

    @abstractmethod
    def draft(self, sequences: Sequence[SequenceState], budgets: Sequence[Budget]) -> list[DraftTree]:
        """One tree for every sequence, within its budget, its root the last token of the sequence."""

    def rest(self, sequences: Sequence[SequenceState]) -> list[DraftTree]:
        """Bare roots. Called instead of `draft` in a step in which nothing is drafted, so it must take next to no time.
        Tokens that the drafter misses here are read when it drafts again."""
        return self.draft(sequences, [NOTHING] * len(sequences))

    def update(self, sequences: Sequence[SequenceState], scored: Scored, verdicts: Sequence[Verdict]) -> None:
        """Learn from a step; called before its tokens join the sequences."""

    def follow(self, sequences: Sequence[SequenceState], scored: Scored, verdicts: Sequence[Verdict]) -> None:
        """Called instead of `update` after a step in which another drafter drafted, or none: keep what could not be
        read later. It must take next to no time."""

    def finish(self, sequence: SequenceState) -> None:
        """A sequence has ended."""

    # Texts that begin alike (engine/prefixes.py)

    def reusable(self, source: SequenceState, sequence: SequenceState, rows: int) -> int:
        """How many of `rows` cached rows the drafter can do without logits and hidden states for.

        The prompt of `sequence` begins with the first `rows` cached rows of `source`. The rows that it inherits are not
        prefilled, so the target computes neither for them. By default none for a drafter that needs hidden states, and
        all for others."""
        return 0 if self.needs.hidden_layers else rows

    def inherit(self, source: SequenceState, sequence: SequenceState, rows: int, *, moved: bool) -> None:
        """The prompt of `sequence` begins with the first `rows` rows of `source`, which is running or retired. If the
        rows were `moved`, `source` is gone from now on. `start` follows, with the results for the tokens after them."""

    def retire(self, sequence: SequenceState) -> None:
        """Called instead of `finish` if the rows of an ended sequence stay in the cache of the target: other sequences
        may inherit them until it is dropped. By default the drafter keeps nothing for them."""
        self.finish(sequence)

    def drop(self, sequence: SequenceState) -> None:
        """The rows of a retired sequence are gone."""

    def forget(self) -> None:
        """Forget statistics about the sequences so far: they were for warming up, and say nothing about later ones.
        What a learning drafter has learned is restored separately."""

    def reasons(self, batch: int) -> list[str]:
        """Sentences that say what the drafter would choose for `batch` sequences, and by which numbers."""
        return []

    def derive_seed(self, sequence: SequenceState) -> int:
        """The seed that the draws of a sequence come from. Sequences with the same seed share their draws. A drafter
        that draws from what it learned from one of them would know something of the draws that judge it, so it must
        give every sequence a seed of its own."""
        return sequence.seed

    # On a device, before the verdict has reached the host

    def update_on_device(self, scored: Scored, verdicts: Verdicts) -> None:
        """Learn from a step without the host. The next pass may overwrite `scored` before `update` is called."""

    def follow_on_device(self, scored: Scored, verdicts: Verdicts) -> None:
        """Called instead of `update_on_device` in a step of another drafter."""

    def draft_next(self, budgets: Sequence[Budget]) -> list[DraftTree] | None:
        """The next trees of the same sequences, computed on the device after the verdict; None if the drafter cannot.
        The root tokens of these trees mean nothing. The next `draft` returns these very trees: its budgets will be
        these or larger."""
        return None


class LearningDrafter(Drafter):
    """A drafter whose knowledge outlives a request and can be put into a file (draft/state.py)."""

    learns: bool = True
    texts: int = 0
    """number of sequences that the drafter may have learned from"""

    @abstractmethod
    def save(self) -> dict[str, Tensor]:
        """What the drafter has learned, without what its members have learned."""

    @abstractmethod
    def restore(self, tensors: dict[str, Tensor]) -> None:
        """Continue from what `save` returned; raises a UsageError that says why if it cannot."""


def reusable_by_all(drafters: Sequence[Drafter], source: SequenceState, sequence: SequenceState, rows: int) -> int:
    """The number of rows that all of several drafters accept (`Drafter.reusable`). Repeat until all agree: a drafter
    may accept 100 rows but not 90."""
    while (fewest := min(drafter.reusable(source, sequence, rows) for drafter in drafters)) < rows:
        rows = fewest
    return rows


def not_a_state(name: str, why: str) -> UsageError:
    """The error for tensors that a drafter cannot have saved."""
    return UsageError(f"This is no state of {name!r} for this model: {why}; leave it out and start afresh.")


class NoDrafter(Drafter):
    """Plain decoding through the same loop, the baseline of every comparison."""

    name = "none"
    paces = True

    def draft(self, sequences: Sequence[SequenceState], budgets: Sequence[Budget]) -> list[DraftTree]:
        return [DraftTree.root(sequence.root) for sequence in sequences]

    def draft_next(self, budgets: Sequence[Budget]) -> list[DraftTree]:
        return [DraftTree.root(0)] * len(budgets)
