"""Drafters: what proposes the trees.

A drafter sees the sequences of a batch and a budget for each, and returns one tree per sequence. A tree of one node,
the root, proposes nothing. After the step it may learn from what the target found and what was kept.

Adding one is a file with a class of this shape and a line in `DRAFTERS`; see docs/add-a-drafter.md.
"""

from __future__ import annotations

from collections.abc import Sequence as Rows
from dataclasses import dataclass
from typing import Any, Protocol

from branchwise.errors import PairingError
from branchwise.registry import Registry, split_spec
from branchwise.sequence import Sequence
from branchwise.target import Scored
from branchwise.tree import DraftTree, Draw
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
    each text has `close(sequence)`, called when it ends. One that runs a model counts
    its passes in `passes`, and says in `cost` how many times the target's bytes one reads. One that learns across
    requests says so with `learns = True`. One that can use laws of the prompt says in `wants_prefill` for how many of
    its last tokens, and is told by `begin(sequence, logits)`: the last row is what follows the token before the root.
    One that learns on a device has `heed(scored, found)`, called while the verdicts are still there: nobody waits then.
    One that knows there what it will draft next has `foresee(budgets)`, called behind that: the next trees of the same
    texts, or None. Their roots mean nothing. Budgets will be these or larger, and `draft` then returns these trees. The
    pass over them may begin at once, and what lies in `scored` be gone when `observe` is called: such a drafter learns
    in `heed`.
    """

    name: str
    draw: Draw
    """how its trees are drawn, which decides the verifiers that fit"""

    def draft(self, sequences: Rows[Sequence], budgets: Rows[Budget]) -> list[DraftTree]: ...

    def observe(self, sequences: Rows[Sequence], scored: Scored, verdicts: Rows[Verdict]) -> None:
        """Learn from a step; called before its verdicts are committed and their tokens join the sequences."""


DRAFTERS = Registry(
    "drafter",
    {
        "disturbed": "branchwise.draft.disturbed:Disturbed",
        "fused": "branchwise.draft.fused:Fused",
        "memories": "branchwise.draft.memories:Memories",
        "model": "branchwise.draft.model:ModelDrafter",
        "ngram": "branchwise.draft.ngram:NGram",
        "none": "branchwise.draft.none:Nothing",
        "recycle": "branchwise.draft.recycle:Recycle",
        "retrieval": "branchwise.draft.retrieval:Retrieval",
        "stand": "branchwise.draft.stand:Stand",
        "suffix": "branchwise.draft.suffix:Suffix",
        "trigram": "branchwise.draft.trigram:Trigram",
    },
)

TREES = Registry(
    "tree",
    {
        "chain": "branchwise.draft.chain:Chain",
        "fork-lossy": "branchwise.draft.fork:Fork",
        "paths": "branchwise.draft.paths:Paths",
        "ranks": "branchwise.draft.ranks:Ranks",
        "rsd-c": "branchwise.draft.rsd:Branching",
        "rsd-s": "branchwise.draft.beam:Beam",
        "dynamic": "branchwise.draft.dynamic:Dynamic",
        "threshold": "branchwise.draft.threshold:Threshold",
        "graph": "branchwise.draft.graph:Graph",
        "paced": "branchwise.draft.pace:Paced",
        "paced-ranks": "branchwise.draft.paced_ranks:PacedRanks",
        "puct": "branchwise.draft.puct:Puct",
        "template": "branchwise.draft.template:Template",
        "topk": "branchwise.draft.topk:TopK",
    },
)


STOPS = Registry(
    "stop",
    {
        "confidence": "branchwise.draft.stop:Confidence",
        "entropy": "branchwise.draft.stop:Entropy",
        "learned": "branchwise.draft.stop:Learned",
    },
)


def build_growth(tree: str) -> Any:
    """The growth of a spec such as `chain:8`, or of one that may stop early: `chain:12,stop=confidence:0.4`."""
    import re

    shape, *stops = re.split(r"[:,]\s*stop=", tree, maxsplit=1)  # all that follows is of the stop, commas included
    growth = TREES.build(shape)
    if not stops:
        return growth
    from branchwise.draft.stop import Stopping

    return Stopping(growth, STOPS.build(stops[0]), shape)


def build_drafter(draft: str, tree: str | None = None) -> Drafter:
    """The drafter of a spec such as `ngram:max=4`, growing the tree of a spec such as `chain:8`."""
    import inspect

    growth = None if tree is None else build_growth(tree)
    name, _, _ = split_spec(draft)
    if growth is not None and "tree" not in inspect.signature(DRAFTERS.find(name)).parameters:
        raise PairingError(f"Drafter {name!r} grows no tree; leave out --tree {tree}.")
    drafter: Any = DRAFTERS.build(draft, tree=growth)
    return drafter  # type: ignore[no-any-return]
