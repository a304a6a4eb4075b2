"""A batch whose trees lie side by side on a device reads as the same trees stacked would."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from branchwise.core.batch import TreeBatch
from branchwise.core.tree import DeviceShape, DraftTree, LaidTree
from branchwise.cuda.laid import LaidBatch, LaidTrees, lie_still
from tests.strategies import trees


@given(drafted=st.lists(trees(), min_size=1, max_size=4), padding=st.integers(0, 2))
def test_tables_are_those_of_the_stacked_trees(drafted: list[DraftTree], padding: int) -> None:
    whole = TreeBatch([*drafted, *[DraftTree.root(0)] * padding])
    shape = DeviceShape(whole.parents, whole.depths, whole.ancestor_bits)
    rows = [DeviceShape(*(part[row] for part in shape)) for row in range(len(drafted))]
    depth = max(tree.depth for tree in drafted)
    laid = [
        LaidTree.of(tokens, row, min(depth, whole.nodes - 1))
        for tokens, row in zip(whole.tokens[: len(drafted)], rows, strict=True)
    ]
    batch = LaidBatch(LaidTrees(laid, whole.tokens, shape), "cpu")
    assert lie_still(batch)
    assert len(batch) == len(whole)
    assert batch.nodes == whole.nodes
    assert batch.depth >= whole.depth
    assert batch.host_tokens is None
    assert batch.drafted.data_ptr() == whole.tokens.data_ptr(), "nothing is copied"
    for name in ("tokens", "parents", "depths", "ancestor_bits"):
        assert torch.equal(getattr(batch, name), getattr(whole, name)), name
        assert torch.equal(batch.host(name), whole.host(name)), name


def test_trees_that_are_stacked_anew_do_not_lie_still() -> None:
    assert lie_still(TreeBatch([DraftTree.root(1)]))
    assert not lie_still(TreeBatch([DraftTree.root(1), DraftTree.root(2)]))
