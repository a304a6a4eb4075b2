"""Instances in which everything can be enumerated: a target and a drafter over few tokens and levels.

A prefix of tokens is coded as a number in base V, so the distributions of a level are one table (V^level, V).
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from branchwise.audit.policies import Weighed, grown_trees
from branchwise.core.batch import TreeBatch
from branchwise.core.rows import gather_rows
from branchwise.core.tree import DraftTree, Draw
from branchwise.draft.base import Budget
from branchwise.draft.builder import TreePolicy
from branchwise.errors import UsageError

Table = NDArray[np.float64]
SIMILARITIES = {"close": 0.3, "medium": 1.0, "far": 2.0}
"""the standard deviation of the noise between log q and log p"""


@dataclass(frozen=True, eq=False)
class Instance:
    """Target distributions p at levels 0..L, draft distributions q at levels 0..L-1, and the number of paths."""

    p: tuple[Table, ...]
    q: tuple[Table, ...]
    paths: int

    @property
    def vocabulary(self) -> int:
        return int(self.p[0].shape[1])

    @property
    def depth(self) -> int:
        return len(self.q)

    def draft_probs(self, prefix: Sequence[int]) -> Tensor:
        """(vocabulary,): the distribution q after the tokens of a prefix."""
        assert len(prefix) < self.depth, "the budget of a tree is as deep as the distributions of the instance"
        return torch.from_numpy(_row(self, prefix))

    @classmethod
    def random(cls, vocabulary: int, depth: int, paths: int, sigma: float, seed: Sequence[int]) -> Instance:
        """Distributions p from a flat Dirichlet distribution, and q = softmax(log p + sigma noise)."""
        noise = np.random.default_rng(seed)
        p = tuple(noise.dirichlet(np.ones(vocabulary), size=vocabulary**level) for level in range(depth + 1))
        blurred = [np.log(table) + sigma * noise.standard_normal(table.shape) for table in p[:-1]]
        weights = [np.exp(table - table.max(axis=1, keepdims=True)) for table in blurred]
        return cls(p, tuple(table / table.sum(axis=1, keepdims=True) for table in weights), paths)

    @classmethod
    def from_case(cls, case: dict[str, Any]) -> Instance:
        """Distributions by prefix: {"V", "L", "K", "p": {"": row, "0": row, "0,1": row, …}, "q": …}."""
        vocabulary, depth = int(case["V"]), int(case["L"])

        def table(probs: dict[str, list[float]], level: int) -> Table:
            prefixes = itertools.product(range(vocabulary), repeat=level)
            return np.array([probs[",".join(map(str, prefix))] for prefix in prefixes], dtype=np.float64)

        p = tuple(table(case["p"], level) for level in range(depth + 1))
        q = tuple(table(case["q"], level) for level in range(depth))
        instance = cls(p, q, int(case["K"]))
        for row in (*p, *q):
            if row.shape[1] != vocabulary or (row < 0).any() or not np.allclose(row.sum(axis=1), 1, atol=1e-9):
                raise ValueError("a row is not a distribution over the vocabulary")
        return instance


def read_cases(file: Path) -> list[Instance]:
    """The instances of a JSON file {"cases": […]}."""
    try:
        cases = json.loads(file.read_text())["cases"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f'{file} cannot be read as {{"cases": […]}}: {error}.') from None
    instances = []
    for number, case in enumerate(cases):
        try:
            instances.append(Instance.from_case(case))
        except (KeyError, TypeError, ValueError) as error:
            raise UsageError(f"Case {number} of {file} is not complete: {error}.") from None
    return instances


@dataclass(frozen=True, eq=False)
class Drafts:
    """All trees that a drafter can draw, with their probabilities."""

    instance: Instance
    trees: list[DraftTree]
    weights: Tensor
    """(trees,) float64: the probability of each tree"""

    @classmethod
    def of(cls, kind: str, instance: Instance) -> Drafts:
        weights, trees = zip(*DRAFTS[kind](instance), strict=True)
        return cls(instance, list(trees), torch.tensor(weights, dtype=torch.float64))

    @classmethod
    def grown(cls, policy: TreePolicy, instance: Instance, budget: Budget | None = None) -> Drafts:
        """All trees that a tree policy can draw from the distributions q, no deeper than the instance."""
        most = budget or Budget(nodes=1 << 16, depth=instance.depth)
        found = grown_trees(policy, instance.draft_probs, Budget(most.nodes, min(most.depth, instance.depth)))
        return cls(instance, [tree for _, tree in found], torch.tensor([w for w, _ in found], dtype=torch.float64))

    @cached_property
    def batch(self) -> TreeBatch:
        return TreeBatch(self.trees)

    @cached_property
    def codes(self) -> Tensor:
        """(trees, nodes): the code of the prefix of each node"""
        tokens, parents = self.batch.tokens, self.batch.parents.clamp_min(0)
        codes = torch.zeros_like(tokens)
        for node in range(1, self.batch.nodes):  # parents come before their children
            codes[:, node] = codes.gather(1, parents[:, node, None])[:, 0] * self.instance.vocabulary + tokens[:, node]
        return codes

    @cached_property
    def p(self) -> Tensor:
        """(trees, nodes, vocabulary): the target's distribution after every node."""
        tables = [torch.from_numpy(table) for table in self.instance.p]
        starts = torch.tensor([0, *itertools.accumulate(len(table) for table in tables)])
        return torch.cat(tables)[starts[self.batch.depths] + self.codes]


class ExactProbs:
    """The target's distributions as given rows, in float64."""

    greedy = False

    def __init__(self, p: Tensor, *, lazy: bool = True) -> None:
        """`p` (batch, nodes, vocabulary); `lazy` as on the host; not lazy as on a device."""
        self.p = p
        self.lazy = lazy
        self.together = True

    def at(self, nodes: Tensor) -> Tensor:
        return gather_rows(self.p, nodes)

    def best(self, nodes: Tensor) -> Tensor:
        return self.at(nodes).argmax(dim=-1)


Prefix = tuple[int, ...]


def _iid_paths(instance: Instance) -> Iterator[Weighed]:
    """K independent paths, merged where they agree."""
    paths = itertools.product(range(instance.vocabulary), repeat=instance.depth)
    possible = [(mass, path) for path in paths if (mass := _mass(instance, path)) > 0]
    for drawn in itertools.product(possible, repeat=instance.paths):
        yield Weighed(math.prod(mass for mass, _ in drawn), _tree([path for _, path in drawn], instance, Draw.PATHS))


def _rsd_c(instance: Instance) -> Iterator[Weighed]:
    """Branching K, 1, …, 1: distinct first tokens drawn without replacement, and one path below each."""
    root = instance.q[0][0]
    support = [token for token in range(instance.vocabulary) if root[token] > 0]
    tails = list(itertools.product(range(instance.vocabulary), repeat=instance.depth - 1))
    for firsts in itertools.permutations(support, min(instance.paths, len(support))):
        mass, left = 1.0, list(support)
        for token in firsts:
            mass *= root[token] / math.fsum(root[other] for other in left)
            left.remove(token)
        for below in itertools.product(tails, repeat=len(firsts)):
            leaves = [(first, *tail) for first, tail in zip(firsts, below, strict=True)]
            weight = mass * math.prod(_mass(instance, leaf, start=1) for leaf in leaves)
            if weight > 0:
                yield Weighed(weight, _tree(leaves, instance, Draw.WITHOUT_REPLACEMENT))


DRAFTS = {"paths": _iid_paths, "rsd-c": _rsd_c}
DRAWS = {"paths": Draw.PATHS, "rsd-c": Draw.WITHOUT_REPLACEMENT}


def _mass(instance: Instance, path: Prefix, start: int = 0) -> float:
    return math.prod(float(_row(instance, path[:level])[path[level]]) for level in range(start, len(path)))


def _tree(paths: list[Prefix], instance: Instance, draw: Draw) -> DraftTree:
    """The paths as a tree, its nodes in level order and draw order."""
    prefixes = list(dict.fromkeys(path[:level] for level in range(instance.depth + 1) for path in paths))
    index = {prefix: node for node, prefix in enumerate(prefixes)}
    q = [_row(instance, prefix) for prefix in prefixes if len(prefix) < instance.depth]
    return DraftTree(
        tokens=torch.tensor([prefix[-1] if prefix else 0 for prefix in prefixes]),
        parents=tuple(index[prefix[:-1]] if prefix else -1 for prefix in prefixes),
        draw=draw,
        q=torch.from_numpy(np.array(q)),
        leaves=tuple(index[path] for path in paths) if draw is Draw.PATHS else (),
    )


def _row(instance: Instance, prefix: Sequence[int]) -> Table:
    """The distribution q after a prefix."""
    code = 0
    for token in prefix:
        code = code * instance.vocabulary + token
    row: Table = instance.q[len(prefix)][code]
    return row
