"""The best shape of a tree, computed from how often children are accepted and what passes cost.

Chen et al., "Sequoia: Scalable, Robust, and Hardware-aware Speculative Decoding" (arXiv 2402.12374). It assumes that
the i-th child of an accepted node is accepted equally often wherever it stands:

    rate    a_i, how often the i-th child is accepted where those before it were rejected
    share   a_i (1 - a_1) … (1 - a_{i-1}), how often it is the accepted child; shares sum to at most 1
    worth   of a shape: the tokens that a step is expected to emit, 1 + the sum over its nodes of the product of the
            shares on its path

The rates are counted on real text with `rrs`, which tries siblings one after the other, as the model above does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from branchwise.backends.base import Needs, Prefill, Scored, TargetInfo
from branchwise.core.sampling import SamplingParams
from branchwise.core.sequence import SequenceState
from branchwise.core.tree import DraftTree, Draw
from branchwise.draft.base import Budget, Drafter
from branchwise.engine import Request
from branchwise.errors import PairingError, UsageError
from branchwise.progress import Progress, silent
from branchwise.tune.drafters import write
from branchwise.verify import Verdict, Verdicts

if TYPE_CHECKING:
    from branchwise.llm import LLM


# Shapes


@dataclass(frozen=True)
class Shape:
    parents: tuple[int, ...]
    """each node's parent, in level order, and within a level ordered by parent"""
    worth: float
    """tokens that a step is expected to emit, the target's own token included"""


def shares(rates: Sequence[float]) -> list[float]:
    """How often each child is the accepted one."""
    found, left = [], 1.0
    for rate in rates:
        found.append(left * rate)
        left *= 1 - rate
    return found


class Shapes:
    """The best shapes of all sizes up to a limit, by one dynamic programme.

    worth[d][b][m] is the most that a tree of at most m nodes (the root counts here) and d levels below the root can be
    worth, if its root has exactly b children: the best way to leave some of the nodes to the b-th child and the rest to
    the root with its first b - 1 children.
    """

    def __init__(self, rates: Sequence[float], nodes: int, depth: int) -> None:
        if nodes < 1 or depth < 1:
            raise UsageError(f"A shape needs nodes and depth of at least 1, not {nodes} and {depth}.")
        if not rates or not all(0 <= rate <= 1 for rate in rates):
            raise UsageError(f"Rates of acceptance lie between 0 and 1, and there is at least one, not {list(rates)}.")
        self.shares = shares(rates)
        self.nodes, self.depth = nodes, depth
        size = nodes + 2
        alone = np.full((len(rates) + 1, size), -np.inf)
        alone[0, 1:] = 1.0
        self._worth = [alone]
        for _ in range(depth):
            below = self._worth[-1].max(axis=0)  # the best of every size that is one level less deep
            worth = alone.copy()
            for child, share in enumerate(self.shares, start=1):
                for whole in range(child + 1, size):
                    rest = np.arange(1, whole)  # `rest` nodes go to the others, the remaining ones to the child
                    worth[child, whole] = np.max(worth[child - 1, rest] + share * below[whole - rest])
            self._worth.append(worth)

    def worth(self, nodes: int, depth: int) -> float:
        return float(self._worth[depth][:, nodes + 1].max())

    def best(self, nodes: int, depth: int) -> Shape:
        """The shape of the greatest worth within these limits below the root, without nodes that are worth nothing."""
        parents, subtrees = [-1], [(nodes + 1, depth)]
        for node, subtree in enumerate(subtrees):  # which grows while it is read
            children = self._children(*subtree)
            parents += [node] * len(children)
            subtrees += children
        return Shape(tuple(parents), self.worth(nodes, depth))

    def _children(self, whole: int, depth: int) -> list[tuple[int, int]]:
        """(nodes, levels) that each child of a root gets, the first child first; of equal ways the fewest children."""
        worth, below = self._worth[depth], self._worth[depth - 1].max(axis=0)
        found = []
        for child in range(int(worth[:, whole].argmax()), 0, -1):
            rest = np.arange(1, whole)
            kept = int(rest[(worth[child - 1, rest] + self.shares[child - 1] * below[whole - rest]).argmax()])
            found.append((whole - kept, depth - 1))
            whole = kept
        return found[::-1]


# Size


@dataclass(frozen=True)
class Size:
    nodes: int
    """nodes below the root"""
    depth: int
    worth: float
    seconds: float
    """seconds per token"""
    plain: float
    """seconds per token without a draft"""


def best_size(shapes: Shapes, target_seconds: Callable[[int], float], draft_seconds: float) -> Size:
    """The size with the least time for a token: a pass of the target over n nodes, the root included, takes
    `target_seconds(n)`, and every level of the tree one pass of the draft."""
    sizes = [
        Size(nodes, depth, worth, (target_seconds(nodes + 1) + depth * draft_seconds) / worth, target_seconds(1))
        for depth in range(1, shapes.depth + 1)
        for nodes in range(depth, shapes.nodes + 1)
        for worth in [shapes.worth(nodes, depth)]
    ]
    return min(sizes, key=lambda size: size.seconds)


# Acceptance


@dataclass(frozen=True)
class Acceptance:
    """Accepted and rejected children of accepted nodes, by the order in which they were drawn."""

    accepted: tuple[int, ...]
    tried: tuple[int, ...]
    """how often the i-th child was judged, which means that those before it had been rejected"""

    @property
    def rates(self) -> list[float]:
        return [accepted / tried if tried else 0.0 for accepted, tried in zip(self.accepted, self.tried, strict=True)]


def measure_acceptance(
    llm: LLM,
    drafter: Drafter,
    prompts_ids: Sequence[Sequence[int]],
    *,
    width: int,
    temperature: float = 1.0,
    max_new_tokens: int = 64,
    seed: int = 0,
    progress: Progress = silent,
) -> Acceptance:
    """Run a drafter whose nodes have `width` children on real text, and count which of them are accepted."""
    if not prompts_ids:
        raise UsageError("There is no prompt to draft for; give at least one.")
    if drafter.draw is not Draw.WITHOUT_REPLACEMENT:
        raise PairingError(
            f"Drafter {drafter.name!r} draws no siblings one after the other, so there is no i-th child to count; "
            "use one that draws from distributions, such as a draft model."
        )
    witness = Witness(drafter, width)
    engine = llm.with_drafter(witness, verify="rrs").engine
    for number, ids in enumerate(prompts_ids):
        sampling = SamplingParams(temperature=temperature, seed=seed + number)
        write(engine, Request(tuple(ids), sampling, max_new_tokens, llm.stop_tokens))
        progress("counting accepted children", number + 1, len(prompts_ids))
    return Acceptance(tuple(witness.accepted), tuple(witness.tried))


class Witness(Drafter):
    """A drafter that counts which nodes of its trees were judged, and which were accepted."""

    def __init__(self, drafter: Drafter, width: int) -> None:
        self.drafter = drafter
        self.name, self.draw, self.learns = drafter.name, drafter.draw, drafter.learns
        self.accepted, self.tried = [0] * width, [0] * width
        self._trees: list[DraftTree] = []

    @property
    def source(self) -> str:
        return self.drafter.source

    @property
    def needs(self) -> Needs:
        return self.drafter.needs

    def bind(self, target: TargetInfo) -> None:
        self.drafter.bind(target)

    def start(self, sequence: SequenceState, prefill: Prefill) -> None:
        self.drafter.start(sequence, prefill)

    def finish(self, sequence: SequenceState) -> None:
        self.drafter.finish(sequence)

    def assign(self, sequence: SequenceState, task: str) -> None:
        self.drafter.assign(sequence, task)

    def let_foresee(self, allowed: bool) -> None:
        self.drafter.let_foresee(allowed)

    def reusable(self, source: SequenceState, sequence: SequenceState, rows: int) -> int:
        return self.drafter.reusable(source, sequence, rows)

    def inherit(self, source: SequenceState, sequence: SequenceState, rows: int, *, moved: bool) -> None:
        self.drafter.inherit(source, sequence, rows, moved=moved)

    def retire(self, sequence: SequenceState) -> None:
        self.drafter.retire(sequence)

    def drop(self, sequence: SequenceState) -> None:
        self.drafter.drop(sequence)

    def forget(self) -> None:
        self.drafter.forget()

    def reasons(self, batch: int) -> list[str]:
        return self.drafter.reasons(batch)

    def derive_seed(self, sequence: SequenceState) -> int:
        return self.drafter.derive_seed(sequence)

    def update_on_device(self, scored: Scored, verdicts: Verdicts) -> None:
        self.drafter.update_on_device(scored, verdicts)

    def follow_on_device(self, scored: Scored, verdicts: Verdicts) -> None:
        self.drafter.follow_on_device(scored, verdicts)

    def draft_next(self, budgets: Sequence[Budget]) -> list[DraftTree] | None:
        return self.drafter.draft_next(budgets)

    def draft(self, sequences: Sequence[SequenceState], budgets: Sequence[Budget]) -> list[DraftTree]:
        self._trees = self.drafter.draft(sequences, budgets)
        return self._trees

    def rest(self, sequences: Sequence[SequenceState]) -> list[DraftTree]:
        self._trees = self.drafter.rest(sequences)
        return self._trees

    def follow(self, sequences: Sequence[SequenceState], scored: Scored, verdicts: Sequence[Verdict]) -> None:
        self.drafter.follow(sequences, scored, verdicts)

    def update(self, sequences: Sequence[SequenceState], scored: Scored, verdicts: Sequence[Verdict]) -> None:
        self.drafter.update(sequences, scored, verdicts)
        for tree, verdict in zip(self._trees, verdicts, strict=True):
            for node, kept in pairwise((*verdict.path, None)):
                assert node is not None
                for turn, child in enumerate(tree.children[node]):
                    self.tried[turn] += 1
                    if child == kept:
                        self.accepted[turn] += 1
                        break
