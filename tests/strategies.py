"""Hypothesis strategies shared by the tests: shapes, trees and laws, with the awkward cases made likely."""

from __future__ import annotations

import torch
from hypothesis import strategies as st
from torch import Tensor

from branchwise.tree import DraftTree, Draw


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
def laws(draw: st.DrawFn, min_vocabulary: int = 1, max_vocabulary: int = 12, scale: float | None = None) -> Tensor:
    """(vocabulary,) float32 with mass: ties and zeros from small whole weights, one-hots, any size.

    Normalised unless a `scale` is given, which the total then is not tied to.
    """
    size = draw(st.integers(min_vocabulary, max_vocabulary))
    tied = st.lists(st.integers(0, 3), min_size=size, max_size=size).map(lambda row: [float(w) for w in row])
    uneven = st.lists(st.integers(-20, 0), min_size=size, max_size=size).map(lambda row: [10.0**w for w in row])
    certain = st.integers(0, size - 1).map(lambda token: [float(i == token) for i in range(size)])
    weights = draw(st.one_of(tied, uneven, certain).filter(any))
    law = torch.tensor(weights, dtype=torch.float64)
    return (law / law.sum() if scale is None else law * scale).float()
