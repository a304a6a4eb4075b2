"""A batch in which nothing is drafted is what any other batch of the same trees is."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from branchwise.core.batch import PadShape, TreeBatch
from branchwise.core.tree import DraftTree
from branchwise.engine.bare import BareBatch, all_bare

TABLES = [name for name, value in vars(TreeBatch).items() if type(value).__name__ == "Table"]


@given(roots=st.lists(st.integers(0, 400), min_size=1, max_size=9), nodes=st.integers(0, 5))
def test_a_bare_batch_has_the_tables_of_its_trees(roots: list[int], nodes: int) -> None:
    trees = [DraftTree.root(token) for token in roots]
    assert all_bare(trees)
    wanted, found = (kind(trees, "cpu", PadShape(nodes=nodes), roots) for kind in (TreeBatch, BareBatch))
    assert (len(found), found.nodes, found.depth, found.trees) == (len(wanted), wanted.nodes, 0, wanted.trees)
    assert torch.equal(found.tokens, wanted.tokens)
    assert (found.host_tokens == wanted.host_tokens).all()
    assert found.laid is wanted.laid is None
    assert len(TABLES) > 3
    for name in TABLES:
        assert torch.equal(getattr(found, name), getattr(wanted, name)), name


def test_roots_stand_in_the_place_of_those_of_trees() -> None:
    assert BareBatch([DraftTree.root(0)] * 2, "cpu", PadShape(), [5, 6]).tokens.tolist() == [[5], [6]]
    assert not all_bare([DraftTree.root(1), DraftTree.chain([1, 2])])
