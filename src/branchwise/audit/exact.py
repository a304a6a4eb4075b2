"""The exact audit: the distribution that a verifier emits, over every draft and every coin, against the target's.

A verifier is lossless iff its tokens, continued by the target itself, have the target's distribution. On a small
instance that distribution can be computed: all drafts that can be drawn, all decisions that the verifier can take
(`enumeration`), the tokens it emits, and after them the target's own. A linear programme gives the optimum that no
verifier can exceed on these drafts.

A step of the lossy rule ends at an accepted node, and the next step begins with the distribution that the rule wants
after it. So the emitted tokens of a fork are continued by that distribution, and then by the target's own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from branchwise.audit.enumeration import Enumerator, Outcomes, outcomes
from branchwise.audit.instances import DRAWS, Drafts, ExactProbs, Instance
from branchwise.core.rows import gather_rows, row_sum
from branchwise.core.tree import Draw
from branchwise.draft.base import Budget
from branchwise.draft.builder import TreeCoroutine, TreePolicy
from branchwise.draft.policies.paths import Fork
from branchwise.draft.policies.stop import Stop
from branchwise.draft.sampler import DraftSampler
from branchwise.verify import Verdicts, Verifier
from branchwise.verify.longest import Longest, after_stop

TOLERANCE = 1e-9
"""the largest distance from the target's distribution that rounding explains"""


@dataclass(frozen=True)
class Audited:
    """What one verifier does on one kind of drafts of one instance."""

    case: int
    verifier: str
    drafts: str
    tv: float
    """total-variation distance of the emitted distribution from the target's"""
    block_efficiency: float
    """expected tokens per step, exactly"""
    lp: float
    """the highest block efficiency that any verifier could reach on these drafts"""

    @property
    def lossless(self) -> bool:
        return self.tv < TOLERANCE

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def audit_instance(instance: Instance, verifiers: list[Verifier], case: int = 0) -> list[Audited]:
    """Every verifier on every kind of drafts that it accepts."""
    found = []
    for kind, draw in DRAWS.items():
        fitting = [verifier for verifier in verifiers if draw in verifier.accepts]
        if not fitting:
            continue
        drafts = Drafts.of(kind, instance)
        optimum = lp_optimum(drafts)
        for verifier in fitting:
            tv, efficiency = emitted(verifier, drafts)
            found.append(Audited(case, verifier.name, kind, tv, efficiency, optimum))
    return found


def emitted(verifier: Verifier, drafts: Drafts, *, lazy: bool = True) -> tuple[float, float]:
    """Total-variation distance from the target's distribution, and block efficiency."""
    ended = [torch.zeros(table.size, dtype=torch.float64) for table in drafts.instance.p]
    """for each level the mass of verdicts that emit exactly these tokens, coded like prefixes"""
    for found in _outcomes(verifier, drafts, lazy):
        kept, _, codes, weights = _emitted_by(found, drafts)
        for level, mass in enumerate(ended):
            at_level = kept == level
            mass.index_add_(0, codes[at_level], weights[at_level])
    efficiency = sum((level + 1) * float(mass.sum()) for level, mass in enumerate(ended))
    return _distance(ended, drafts.instance), efficiency


def _outcomes(verifier: Verifier, drafts: Drafts, lazy: bool) -> Iterator[Outcomes]:
    def verify(rows: Tensor, chance: Enumerator) -> Verdicts:
        return verifier(drafts.batch.take(rows), ExactProbs(drafts.p[rows], lazy=lazy), chance)

    return outcomes(verify, len(drafts.trees))


def _emitted_by(found: Outcomes, drafts: Drafts) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """For each outcome the accepted levels, the last accepted node, the code of all emitted tokens, and its weight."""
    kept = (found.verdicts.paths >= 0).sum(dim=1) - 1
    last = found.verdicts.paths.gather(1, kept[:, None])[:, 0]
    codes = drafts.codes[found.rows, last] * drafts.instance.vocabulary + found.verdicts.tokens
    return kept, last, codes, drafts.weights[found.rows] * found.weights


def _distance(written: list[Tensor], instance: Instance) -> float:
    """Total variation between the target's own texts and texts that begin with emitted tokens, whose masses are
    `written` (by level and code), and are continued by the target."""
    target, probs = torch.ones(1, dtype=torch.float64), torch.zeros(1, dtype=torch.float64)
    for table, begun in zip(instance.p, written, strict=True):
        rows = torch.from_numpy(table)
        target = (target[:, None] * rows).flatten()
        probs = (probs[:, None] * rows).flatten() + begun
    return 0.5 * float((probs - target).abs().sum())


class RootedFork(TreePolicy):
    """A fork of W branches, with the target's distribution at its root or without."""

    draw = Draw.FORK
    stoppable = True

    def __init__(self, width: int, depth: int, known: Tensor | None) -> None:
        self.fork = Fork(f"{width}x{depth}")
        self.known = known

    def grow(self, root: int, budget: Budget, sampler: DraftSampler) -> TreeCoroutine:
        return self.fork.grow(root, budget, sampler, self.known)


def emitted_by_forks(
    instance: Instance, width: int, *, known: bool = True, stop: Stop | None = None, lazy: bool = True
) -> tuple[float, float]:
    """The two numbers of `emitted`, for the lossy rule on forks of `width` branches; with one branch the distance is 0.

    If `known`, the target's distribution begins the fork, as in every step of a text but the first. `stop` may end
    forks early.
    """
    fork = RootedFork(width, instance.depth, torch.from_numpy(instance.p[0][0]) if known else None)
    drafts = Drafts.grown(fork if stop is None else stop.applied_to(fork), instance)
    probs = [torch.from_numpy(table) for table in instance.p]
    begun = [torch.zeros_like(table) for table in probs]
    """for each level the mass of steps that emit exactly these tokens, coded like prefixes, and of the token after
    them"""
    efficiency = 0.0
    for found in _outcomes(Longest(), drafts, lazy):
        kept, last, codes, weights = _emitted_by(found, drafts)
        trees = drafts.batch.take(found.rows)
        end, drafted = trees.children_of(last, found.verdicts.tokens)
        tested = (trees.parents == end[:, None]).any(dim=1)
        wanted = after_stop(gather_rows(drafts.p[found.rows], end), trees.q_rows(end), tested)
        wanted /= row_sum(wanted)[:, None]
        for level in range(instance.depth):
            here = kept == level
            # A token that was not drafted is followed by the target's distribution: nothing was tested after it.
            row = torch.where(drafted[here, None], wanted[here], probs[level + 1][codes[here]])
            begun[level + 1].index_add_(0, codes[here], row * weights[here, None])
        efficiency += float((weights * (kept + 1)).sum())
    return _distance([mass.flatten() for mass in begun], instance), efficiency


def lp_optimum(drafts: Drafts) -> float:
    """The highest block efficiency of any verifier on these drafts.

    A verifier distributes the mass of each drafted tree over its nodes, at which accepted paths end. With A(u) as the
    mass at u and below, a verifier can be lossless iff A(uy) <= A(u) p(y|u), and its block efficiency is the sum of all
    A.
    """
    from scipy.optimize import linprog  # type: ignore[import-untyped]
    from scipy.sparse import csr_matrix, diags  # type: ignore[import-untyped]

    vocabulary, depth = drafts.instance.vocabulary, drafts.instance.depth
    # Prefixes are numbered level by level, so prefix n has the children 1 + V n, …, V + V n.
    starts = np.cumsum([0, *(vocabulary**level for level in range(depth + 1))])
    prefixes = starts[drafts.batch.depths.numpy()] + drafts.codes.numpy()
    masses: dict[tuple[int, ...], float] = {}
    for row, tree in enumerate(drafts.trees):
        nodes = tuple(sorted(prefixes[row, : len(tree)].tolist()))
        masses[nodes] = masses.get(nodes, 0.0) + float(drafts.weights[row])

    # A variable for every node of every tree: how much of the tree's mass it gets.
    tree_of = np.repeat(np.arange(len(masses)), [len(nodes) for nodes in masses])
    prefix_of = np.concatenate([np.array(nodes) for nodes in masses])
    variables = np.arange(len(prefix_of))
    whole = csr_matrix((np.ones(len(variables)), (tree_of, variables)))
    within, counted, above = [], [], prefix_of
    for _ in range(depth + 1):  # a variable counts in A(u) for its own prefix u and for all above
        within.append(above[above >= 0])
        counted.append(variables[above >= 0])
        above = np.where(above > 0, (above - 1) // vocabulary, -1)
    rows, columns = np.concatenate(within), np.concatenate(counted)
    retained = csr_matrix((np.ones(len(rows)), (rows, columns)), shape=(starts[-1], len(variables)))

    below = np.arange(1, starts[-1])
    probs = np.concatenate([table.ravel() for table in drafts.instance.p[:-1]])
    limits = retained[below] - diags(probs) @ retained[(below - 1) // vocabulary]
    gain = np.asarray(retained.sum(axis=0)).ravel()
    solved = linprog(-gain, A_ub=limits, b_ub=np.zeros(len(below)), A_eq=whole, b_eq=list(masses.values()))
    assert solved.success, solved.message
    return -float(solved.fun)
