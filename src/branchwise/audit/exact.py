"""The exact audit: the distribution that a verifier emits, over every draft and every coin, against the target's.

A verifier is lossless iff its tokens, continued by the target itself, have the target's distribution. On a small
instance that distribution can be computed: all drafts that can be drawn, all decisions that the verifier can take
(`enumeration`), the tokens it emits, and after them the target's own. A linear programme gives the optimum that no
verifier can exceed on these drafts.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from branchwise.audit.enumeration import Enumerator, outcomes
from branchwise.audit.instances import DRAWS, Drafts, ExactProbs, Instance
from branchwise.verify import Verdicts, Verifier

TOLERANCE = 1e-9
"""how far from the target's distribution the emitted one may be, for rounding"""


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
    vocabulary, depth = drafts.instance.vocabulary, drafts.instance.depth
    p, codes = drafts.p, drafts.codes
    ended = [torch.zeros(vocabulary ** (level + 1), dtype=torch.float64) for level in range(depth + 1)]
    """by level: the mass of verdicts that emit exactly these tokens, coded like prefixes"""

    def verify(rows: Tensor, chance: Enumerator) -> Verdicts:
        return verifier(drafts.batch.take(rows), ExactProbs(p[rows], lazy=lazy), chance)

    for found in outcomes(verify, len(drafts.trees)):
        kept = (found.verdicts.paths >= 0).sum(dim=1) - 1
        last = found.verdicts.paths.gather(1, kept[:, None])[:, 0]
        emitted_codes = codes[found.rows, last] * vocabulary + found.verdicts.tokens
        weights = drafts.weights[found.rows] * found.weights
        for level in range(depth + 1):
            at_level = kept == level
            ended[level].index_add_(0, emitted_codes[at_level], weights[at_level])

    probs = target = torch.ones(1, dtype=torch.float64)
    probs = torch.zeros(1, dtype=torch.float64)
    efficiency = 0.0
    for level in range(depth + 1):
        rows = torch.from_numpy(drafts.instance.p[level])
        target = (target[:, None] * rows).flatten()
        probs = (probs[:, None] * rows).flatten() + ended[level]
        efficiency += (level + 1) * float(ended[level].sum())
    return 0.5 * float((probs - target).abs().sum()), efficiency


def lp_optimum(drafts: Drafts) -> float:
    """The highest block efficiency of any verifier on these drafts.

    A verifier hands the mass of each drafted tree to nodes of it. With A(u) the mass handed to u and below, it can be
    lossless iff A(uy) <= A(u) p(y|u), and its block efficiency is the sum of all A.
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

    # A variable for every node of every tree: how much of the tree's mass is handed to it.
    tree_of = np.repeat(np.arange(len(masses)), [len(nodes) for nodes in masses])
    prefix_of = np.concatenate([np.array(nodes) for nodes in masses])
    variables = np.arange(len(prefix_of))
    whole = csr_matrix((np.ones(len(variables)), (tree_of, variables)))
    within, counted, above = [], [], prefix_of
    for _ in range(depth + 1):  # each counts in A(u) for its own prefix u and all those above it
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
