"""The exact audit: the law that a verifier emits, over every draft and every coin, against the target's.

A verifier is lossless iff its tokens, continued by the target itself, have the target's law. On a small instance that
law can be written down: all drafts that can be drawn, all decisions that the verifier can take (`enumeration`), the
tokens it emits, and behind them the target's own. Beside it stands the optimum that no verifier can pass on these
drafts, from a linear programme.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from branchwise.audit.enumeration import Enumerator, outcomes
from branchwise.audit.instances import DRAWS, Drafts, ExactLaws, Instance
from branchwise.verify import Verdicts, Verifier

TOLERANCE = 1e-9
"""how far from the target's law the emitted one may be, for rounding"""


@dataclass(frozen=True)
class Audited:
    """What one verifier does on one kind of drafts of one instance."""

    case: int
    verifier: str
    drafts: str
    tv: float
    """total-variation distance of the emitted law from the target's"""
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
    """Total-variation distance from the target's law, and block efficiency."""
    vocabulary, depth = drafts.instance.vocabulary, drafts.instance.depth
    p, codes = drafts.p, drafts.codes
    ended = [torch.zeros(vocabulary ** (level + 1), dtype=torch.float64) for level in range(depth + 1)]
    """by level: the mass of verdicts that emit exactly these tokens, coded like prefixes"""

    def verify(rows: Tensor, chance: Enumerator) -> Verdicts:
        return verifier(drafts.forest.take(rows), ExactLaws(p[rows], lazy=lazy), chance)

    for found in outcomes(verify, len(drafts.trees)):
        kept = (found.verdicts.paths >= 0).sum(dim=1) - 1
        last = found.verdicts.paths.gather(1, kept[:, None])[:, 0]
        emitted_codes = codes[found.rows, last] * vocabulary + found.verdicts.tokens
        weights = drafts.weights[found.rows] * found.weights
        for level in range(depth + 1):
            at_level = kept == level
            ended[level].index_add_(0, emitted_codes[at_level], weights[at_level])

    law = target = torch.ones(1, dtype=torch.float64)
    law = torch.zeros(1, dtype=torch.float64)
    efficiency = 0.0
    for level in range(depth + 1):
        rows = torch.from_numpy(drafts.instance.p[level])
        target = (target[:, None] * rows).flatten()
        law = (law[:, None] * rows).flatten() + ended[level]
        efficiency += (level + 1) * float(ended[level].sum())
    return 0.5 * float((law - target).abs().sum()), efficiency


def lp_optimum(drafts: Drafts) -> float:
    """The highest block efficiency of any verifier on these drafts.

    A verifier hands the mass of each drafted tree to nodes of it. With A(u) the mass handed to u and below, it can be
    lossless iff A(uy) <= A(u) p(y|u), and its block efficiency is the sum of all A.
    """
    from scipy.optimize import linprog
    from scipy.sparse import coo_matrix

    vocabulary, depth = drafts.instance.vocabulary, drafts.instance.depth
    starts = np.cumsum([0, *(vocabulary**level for level in range(depth + 1))])
    names = starts[drafts.forest.depths.numpy()] + drafts.codes.numpy()
    masses: dict[frozenset[int], float] = {}
    for row, tree in enumerate(drafts.trees):
        nodes = frozenset(names[row, : len(tree)].tolist())
        masses[nodes] = masses.get(nodes, 0.0) + float(drafts.weights[row])

    # A variable for every (tree, node): how much of the tree's mass is handed to the node.
    owner = np.repeat(np.arange(len(masses)), [len(nodes) for nodes in masses])
    node = np.concatenate([sorted(nodes) for nodes in masses])
    level = np.searchsorted(starts, node, side="right") - 1
    columns = np.arange(len(node))
    whole = coo_matrix((np.ones(len(node)), (owner, columns)))
    rows, places, values = [], [], []
    above = node.copy()
    for _ in range(depth):
        # A variable counts in A(v) for its node and all nodes above; v = uy gives one constraint, A(v) - p A(u) <= 0.
        inner = level > 0
        own, own_level = above[inner], level[inner]
        code = own - starts[own_level]
        parent = starts[own_level - 1] + code // vocabulary
        rows.append(own - 1)
        places.append(columns[inner])
        values.append(np.ones(inner.sum()))
        above, level = np.where(inner, _with(above, inner, parent), above), np.where(inner, level - 1, level)
    members = coo_matrix(
        (np.concatenate(values), (np.concatenate(rows), np.concatenate(places))), shape=(starts[-1] - 1, len(node))
    ).tocsr()
    total = coo_matrix((np.ones(len(node)), (np.zeros(len(node), dtype=int), columns)), shape=(1, len(node))).tocsr()
    from scipy.sparse import diags, vstack

    every = vstack([total, members]).tocsr()  # row v: which variables count in A(v), the root first
    children = np.arange(1, starts[-1])
    child_level = np.searchsorted(starts, children, side="right") - 1
    child_code = children - starts[child_level]
    parents = starts[child_level - 1] + child_code // vocabulary
    laws = np.concatenate([table.ravel() for table in drafts.instance.p[:-1]])
    limits = members - diags(laws) @ every[parents]
    gain = -np.asarray(every.sum(axis=0)).ravel()
    solved = linprog(
        gain, A_ub=limits, b_ub=np.zeros(len(children)), A_eq=whole, b_eq=list(masses.values()), method="highs"
    )
    assert solved.success, solved.message
    return -float(solved.fun)


def _with(values: np.ndarray, mask: np.ndarray, new: np.ndarray) -> np.ndarray:
    values = values.copy()
    values[mask] = new
    return values
