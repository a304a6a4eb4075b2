"""Drafters: what proposes the trees.

A drafter sees the sequences of a batch and a budget for each, and returns one tree per sequence. A tree of one node,
the root, proposes nothing. After the step it may learn from what the target found and what was kept.

Adding one is a file with a class of this shape and a line in `DRAFTERS`; see docs/add-a-drafter.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from branchwise.backends.base import Scored
from branchwise.core.sequence import SequenceState
from branchwise.core.tree import DraftTree, Draw
from branchwise.verify import Verdict


@dataclass(frozen=True)
class Budget:
    """How large the next tree of a sequence may be."""

    nodes: int
    """nodes that the pass may score, the root included"""
    depth: int
    """levels below the root; what is deeper could not be emitted"""


class Drafter(Protocol):
    """What proposes trees.

    One that needs the target itself also has `bind(target)`, called before anything else; one that keeps something for
    each text has `close(sequence)`, called when it ends. One that runs a model counts its passes in `passes`, and says
    in `cost` how many times the target's bytes one reads. One that learns across requests says so with `learns = True`.
    One that can use distributions of the prompt says in `wants_prefill` for how many of its last tokens, and is told by
    `begin(sequence, logits)`: the last row is what follows the token before the root. One that learns on a device has
    `update_on_device(scored, found)`, called while the verdicts are still there: nobody waits then. One that knows
    there what it will draft next has `draft_next(budgets)`, called behind that: the next trees of the same texts, or
    None. Their roots mean nothing. Budgets will be these or larger, and `draft` then returns these trees. The pass over
    them may begin at once, and what lies in `scored` be gone when `update` is called: such a drafter learns in
    `update_on_device`.
    """

    name: str
    draw: Draw
    """how its trees are drawn, which decides the verifiers that fit"""

    def draft(self, sequences: Sequence[SequenceState], budgets: Sequence[Budget]) -> list[DraftTree]: ...

    def update(self, sequences: Sequence[SequenceState], scored: Scored, verdicts: Sequence[Verdict]) -> None:
        """Learn from a step; called before its verdicts are committed and their tokens join the sequences."""
