"""What tests draw from: hypothesis strategies for shapes, trees and distributions, with the awkward cases made likely,
and worlds small enough to enumerate."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from itertools import islice
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

from branchwise.audit.instances import DRAWS, Drafts, Instance
from branchwise.core.tree import DraftTree, Draw
from branchwise.draft import TREES
from branchwise.draft.base import Budget
from branchwise.draft.builder import Candidates, NodeProbs, TreeBuilder, TreePolicy, grow_with
from branchwise.draft.policies.topk import grow_best_first
from branchwise.draft.sampler import DraftSampler
from tests import slow_truth


@st.composite
def topologies(draw: st.DrawFn, max_depth: int = 4, max_width: int = 4) -> tuple[int, ...]:
    """Parents in level order; within a level the parents come in any order, not only sorted."""
    parents, level = [-1], [0]
    for _ in range(draw(st.integers(0, max_depth))):
        width = draw(st.integers(1, max_width))
        parents += draw(st.lists(st.sampled_from(level), min_size=width, max_size=width))
        level = list(range(len(parents) - width, len(parents)))
    return tuple(parents)


@st.composite
def trees(draw: st.DrawFn, vocabulary: int = 4, max_depth: int = 4, max_width: int = 4) -> DraftTree:
    """Fixed trees of any shape; siblings may carry the same token."""
    parents = draw(topologies(max_depth, max_width))
    token = st.integers(0, vocabulary - 1)
    tokens = draw(st.lists(token, min_size=len(parents), max_size=len(parents)))
    return DraftTree(torch.tensor(tokens), parents)


@st.composite
def path_trees(draw: st.DrawFn, vocabulary: int = 3, max_depth: int = 3, max_paths: int = 4) -> DraftTree:
    """K paths of one depth, merged where they agree, with their leaves in draw order."""
    depth = draw(st.integers(1, max_depth))
    path = st.tuples(*[st.integers(0, vocabulary - 1)] * depth)
    paths = draw(st.lists(path, min_size=1, max_size=max_paths))
    prefixes = sorted({p[:n] for p in paths for n in range(depth + 1)}, key=lambda prefix: (len(prefix), prefix))
    index = {prefix: node for node, prefix in enumerate(prefixes)}
    return DraftTree(
        tokens=torch.tensor([prefix[-1] if prefix else 0 for prefix in prefixes]),
        parents=tuple(index[prefix[:-1]] if prefix else -1 for prefix in prefixes),
        draw=Draw.PATHS,
        q=torch.full((len(prefixes), vocabulary), 1 / vocabulary),
        leaves=tuple(index[p] for p in paths),
    )


@st.composite
def probs(draw: st.DrawFn, min_vocabulary: int = 1, max_vocabulary: int = 12, scale: float | None = None) -> Tensor:
    """(vocabulary,) float32 with mass: ties and zeros from small whole weights, one-hots, any size.

    Normalised unless a `scale` is given, which the total then is not tied to.
    """
    size = draw(st.integers(min_vocabulary, max_vocabulary))
    tied = st.lists(st.integers(0, 3), min_size=size, max_size=size).map(lambda row: [float(w) for w in row])
    uneven = st.lists(st.integers(-20, 0), min_size=size, max_size=size).map(lambda row: [10.0**w for w in row])
    certain = st.integers(0, size - 1).map(lambda token: [float(i == token) for i in range(size)])
    weights = draw(st.one_of(tied, uneven, certain).filter(any))
    probs = torch.tensor(weights, dtype=torch.float64)
    return (probs / probs.sum() if scale is None else probs * scale).float()


# Small worlds: all distributions of a target and a drafter, to enumerate; and trees drawn from distributions of any
# size


@st.composite
def worlds(draw: st.DrawFn, max_vocabulary: int = 3, max_depth: int = 2, max_paths: int = 3) -> Instance:
    """Distributions of every prefix. Rows of p and q are awkward each in its own way, or equal, or certain of other
    tokens."""
    vocabulary, depth = draw(st.integers(2, max_vocabulary)), draw(st.integers(1, max_depth))
    row = st.one_of(
        st.lists(st.integers(0, 3), min_size=vocabulary, max_size=vocabulary).filter(any),  # ties and zeros
        st.lists(st.floats(0.01, 1), min_size=vocabulary, max_size=vocabulary),
        st.lists(st.integers(-20, 0).map(lambda w: 10.0**w), min_size=vocabulary, max_size=vocabulary),
        st.integers(0, vocabulary - 1).map(lambda token: np.eye(vocabulary)[token]),
    ).map(lambda weights: np.array(weights, dtype=np.float64) / np.sum(weights))

    def table(level: int) -> np.ndarray:
        return np.array([draw(row) for _ in range(vocabulary**level)])

    p = tuple(table(level) for level in range(depth + 1))
    same = [np.array([draw(st.booleans()) for _ in probs])[:, None] for probs in p[:-1]]
    q = tuple(
        np.where(alike, probs, table(level)) for level, (alike, probs) in enumerate(zip(same, p[:-1], strict=True))
    )
    return Instance(p, q, draw(st.integers(1, max_paths)))


def world(truth: slow_truth.Instance) -> Instance:
    """An instance of the slow truth as one of the audit."""

    def tables(probs: dict[tuple[int, ...], np.ndarray], levels: int) -> tuple[np.ndarray, ...]:
        prefixes = [itertools.product(range(truth.V), repeat=level) for level in range(levels)]
        return tuple(np.array([probs[prefix] for prefix in level]) for level in prefixes)

    return Instance(tables(truth.p, truth.L + 1), tables(truth.q, truth.L), truth.K)


def as_truth(instance: Instance) -> slow_truth.Instance:
    """An instance of the audit as one of the slow truth."""

    def probs(tables: tuple[np.ndarray, ...]) -> dict[tuple[int, ...], np.ndarray]:
        found = {}
        for level, table in enumerate(tables):
            found |= zip(itertools.product(range(instance.vocabulary), repeat=level), table, strict=True)
        return found

    return slow_truth.Instance(
        instance.vocabulary, instance.depth, instance.paths, probs(instance.p), probs(instance.q)
    )


def drafts_of(truth: slow_truth.Instance, drawn: slow_truth.Drafts, kind: str, *, by_token: bool = False) -> Drafts:
    """Drafts of the slow truth as those of the audit: K paths of kind "paths", or trees of any shape.

    The nodes of a level stand in the order in which they were drawn, or by token, which must not matter to paths.
    """
    trees, weights = [], []
    for draft, weight in slow_truth.merged(drawn).items():
        longest = max(map(len, draft))
        nodes = list(dict.fromkeys(x[:n] for n in range(longest + 1) for x in draft if n <= len(x)))
        if by_token:
            nodes.sort(key=lambda u: (len(u), u))
        index = {u: node for node, u in enumerate(nodes)}
        rows = [truth.q[u] if len(u) < truth.L else np.zeros(truth.V) for u in nodes]
        tree = DraftTree(
            tokens=torch.tensor([u[-1] if u else 0 for u in nodes]),
            parents=tuple(index[u[:-1]] if u else -1 for u in nodes),
            draw=DRAWS[kind],
            q=torch.from_numpy(np.array(rows)),
            leaves=tuple(index[x] for x in draft) if kind == "paths" else (),
        )
        trees.append(tree)
        weights.append(weight)
    return Drafts(world(truth), trees, torch.tensor(weights, dtype=torch.float64))


Rule = Callable[[tuple[int, ...]], Tensor]
"""the distribution (vocabulary,) after the tokens below the root"""


def grown(
    spec: str | TreePolicy,
    probs: Rule,
    sampler: DraftSampler,
    budget: Budget | None = None,
    root: int = 0,
    asked: list[list[int]] | None = None,
) -> DraftTree:
    """The tree that a growth, or that of a spec such as `paths:4x3`, draws from these distributions.

    `asked` collects the nodes of every wish.
    """
    policy = TREES.build(spec) if isinstance(spec, str) else spec

    def look(tree: TreeBuilder, nodes: list[int]) -> NodeProbs:
        if asked is not None:
            asked.append(list(nodes))
        return NodeProbs(torch.stack([probs(tuple(tree.path(node))) for node in nodes]))

    return grow_with(policy.grow(root, budget or Budget(nodes=999, depth=99), sampler), look)


def tokens_to(tree: TreeBuilder | DraftTree, node: int) -> list[int]:
    """The tokens from below the root to a node."""
    tokens = []
    while node > 0:
        tokens.append(int(tree.tokens[node]))
        node = tree.parents[node]
    return tokens[::-1]


def random_rule(vocabulary: int, seed: int, spread: float = 2.0, near: Rule | None = None, far: float = 1.0) -> Rule:
    """A distribution for every prefix: softmax of normal logits of this spread, or of those of another rule,
    disturbed."""

    def probs(prefix: tuple[int, ...]) -> Tensor:
        noise = torch.randn(vocabulary, generator=torch.Generator().manual_seed(hash((seed, *prefix)) % (1 << 62)))
        return torch.softmax(spread * noise if near is None else near(prefix).log() + far * noise, dim=-1)

    return probs


def best_first(root: int, cursor: Any, candidates: Candidates, *, nodes: int, **limits: Any) -> tuple[Any, list[float]]:
    """At most `nodes` nodes below the root in falling order, and how probable the path to each is, the root's first."""
    tree = TreeBuilder([root])
    return tree, [1.0, *islice(grow_best_first(tree, cursor, candidates, **limits), nodes)]
