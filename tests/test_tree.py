"""The drafted tree: rules that the constructor names, masks, cuts, and padding that nothing reaches."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from branchwise.errors import UsageError
from branchwise.tree import DraftTree, Draw, Forest, Topology, topology
from tests.strategies import path_trees, topologies, trees


def ancestors_by_hand(parents: tuple[int, ...]) -> list[list[bool]]:
    """The slow truth: climb from every node."""
    rows = []
    for node in range(len(parents)):
        seen, at = set(), node
        while at >= 0:
            seen.add(at)
            at = parents[at]
        rows.append([column in seen for column in range(len(parents))])
    return rows


@pytest.mark.parametrize(
    ("parents", "rule"),
    [
        ((), "starts with its root"),
        ((0,), "starts with its root"),
        ((0, -1), "starts with its root"),
        ((-1, -1), r"parent of node 1 must be an earlier node, not -1"),
        ((-1, 1), r"parent of node 1 must be an earlier node, not 1"),
        ((-1, 0, 3, 0), r"parent of node 2 must be an earlier node, not 3"),
        ((-1, 0, 1, 0), r"level order; node 3 is less deep than node 2"),
    ],
)
def test_a_broken_shape_is_named(parents: tuple[int, ...], rule: str) -> None:
    with pytest.raises(UsageError, match=rule):
        Topology(parents)


TOKENS, PARENTS, Q = torch.tensor([5, 6, 7]), (-1, 0, 0), torch.full((3, 4), 0.25)


@pytest.mark.parametrize(
    ("values", "rule"),
    [
        ({"tokens": TOKENS[:2]}, r"3 nodes needs that many tokens, not \(2,\)"),
        ({"tokens": TOKENS[None]}, r"not \(1, 3\)"),
        ({"parents": (-1, 2, 0)}, "earlier node"),
        ({"q": Q}, "fixed tree has no q"),
        ({"draw": Draw.WITHOUT_REPLACEMENT}, "without-replacement must carry q"),
        ({"draw": Draw.PATHS, "leaves": (1, 2)}, "paths must carry q"),
        ({"draw": Draw.WITHOUT_REPLACEMENT, "q": Q[:0]}, r"every node with children, not the shape \(0, 4\)"),
        ({"draw": Draw.WITHOUT_REPLACEMENT, "q": Q[0]}, r"every node with children, not the shape \(4,\)"),
        ({"draw": Draw.WITHOUT_REPLACEMENT, "q": Q, "leaves": (1,)}, "Leaves belong to a tree of paths"),
        ({"leaves": (1,)}, "Leaves belong to a tree of paths"),
        ({"draw": Draw.PATHS, "q": Q}, "a tree of paths has at least one"),
        ({"draw": Draw.PATHS, "q": Q, "leaves": (1, 3)}, "full depth 1"),
        ({"draw": Draw.PATHS, "q": Q, "leaves": (1, -1)}, "full depth 1"),
        ({"draw": Draw.PATHS, "q": Q, "leaves": (1, 2, 0)}, "full depth 1"),
        ({"draw": Draw.PATHS, "q": Q, "leaves": (1, 1)}, "must lie on one of them"),
    ],
)
def test_a_broken_tree_is_named(values: dict[str, Any], rule: str) -> None:
    with pytest.raises(UsageError, match=rule):
        DraftTree(**{"tokens": TOKENS, "parents": PARENTS} | values)


def test_a_path_that_ends_early_is_no_tree_of_paths() -> None:
    # Node 1 is a leaf at depth 1 of a tree of depth 2: a cut path, whose law is not that of a draw.
    with pytest.raises(UsageError, match="must lie on one of them"):
        DraftTree(torch.tensor([0, 1, 2, 3]), (-1, 0, 0, 2), Draw.PATHS, torch.ones(4, 4), leaves=(3,))


@given(path_trees())
def test_merged_paths_are_a_tree_and_keep_their_draws(tree: DraftTree) -> None:
    assert all(tree.topology.depths[leaf] == tree.depth for leaf in tree.leaves)
    on_a_path = {node for leaf in tree.leaves for node in tree.topology.path(leaf)}
    assert on_a_path == set(range(len(tree)))


def test_a_root_alone_needs_no_q_however_it_is_drawn() -> None:
    assert len(DraftTree(torch.tensor([3]), (-1,), Draw.WITHOUT_REPLACEMENT)) == 1
    assert DraftTree(torch.tensor([3]), (-1,), Draw.PATHS, leaves=(0, 0)).leaves == (0, 0)


def test_building_a_tree_never_looks_at_values_on_a_device() -> None:
    # A meta tensor has a shape and no values: whoever looks at one fails.
    tokens, q = torch.empty(3, dtype=torch.long, device="meta"), torch.empty(3, 9, device="meta")
    assert DraftTree(tokens, PARENTS, Draw.WITHOUT_REPLACEMENT, q).depth == 1
    assert len(DraftTree(tokens, PARENTS).cut(nodes=2, depth=1)) == 2


def test_a_tree_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        DraftTree.root(1).parents = (-1, 0)  # type: ignore[misc]


@given(topologies())
def test_ancestors_are_the_nodes_met_on_the_climb_to_the_root(parents: tuple[int, ...]) -> None:
    assert Topology(parents).ancestors.tolist() == ancestors_by_hand(parents)


@given(topologies())
def test_depth_counts_ancestors_and_path_lists_them_root_first(parents: tuple[int, ...]) -> None:
    shape = Topology(parents)
    for node, row in enumerate(ancestors_by_hand(parents)):
        path = [at for at, seen in enumerate(row) if seen]
        assert shape.path(node) == path
        assert shape.depths[node] == len(path) - 1
    assert shape.depth == max(shape.depths)


@given(topologies())
def test_mask_of_the_first_levels_is_the_leading_block(parents: tuple[int, ...]) -> None:
    whole = Topology(parents)
    for depth in range(whole.depth + 1):
        size = sum(level <= depth for level in whole.depths)
        assert max(whole.depths[:size]) == depth
        assert torch.equal(topology(parents[:size]).ancestors, whole.ancestors[:size, :size])
        assert not whole.ancestors[:size, size:].any()


def test_trees_of_one_shape_share_their_topology() -> None:
    assert DraftTree.chain([1, 2, 3]).topology is DraftTree(torch.tensor([7, 8, 9]), (-1, 0, 1)).topology


def test_a_root_drafts_nothing() -> None:
    tree = DraftTree.root(42)
    assert (tree.tokens.tolist(), tree.parents, tree.depth, len(tree)) == ([42], (-1,), 0, 1)


@given(st.lists(st.integers(0, 9), min_size=1, max_size=12))
def test_a_chain_is_one_path(tokens: list[int]) -> None:
    tree = DraftTree.chain(tokens)
    assert tree.tokens.tolist() == tokens
    assert tree.topology.path(len(tokens) - 1) == list(range(len(tokens)))
    assert tree.depth == len(tree) - 1


def test_an_empty_chain_is_refused() -> None:
    with pytest.raises(UsageError, match="root"):
        DraftTree.chain([])


@given(trees(), st.integers(1, 20), st.integers(0, 5))
def test_a_cut_is_the_largest_leading_part_within_both_limits(tree: DraftTree, nodes: int, depth: int) -> None:
    cut = tree.cut(nodes=nodes, depth=depth)
    size = len(cut)
    assert size <= nodes
    assert cut.depth <= depth
    assert torch.equal(cut.tokens, tree.tokens[:size])
    assert cut.parents == tree.parents[:size]
    if size < len(tree):
        assert size == nodes or tree.topology.depths[size] > depth
    else:
        assert cut is tree


def test_a_drawn_tree_is_never_cut() -> None:
    tree = DraftTree(TOKENS, PARENTS, Draw.WITHOUT_REPLACEMENT, Q)
    assert tree.cut(nodes=3, depth=1) is tree
    with pytest.raises(UsageError, match="without-replacement cannot be cut"):
        tree.cut(nodes=2, depth=1)
    with pytest.raises(UsageError, match="cannot be cut"):
        tree.cut(nodes=3, depth=0)


@given(st.lists(trees(vocabulary=3), min_size=1, max_size=4), st.data())
def test_padding_is_never_a_child(batch: list[DraftTree], data: st.DataObject) -> None:
    forest = Forest(batch)
    nodes = [data.draw(st.integers(0, len(tree) - 1)) for tree in batch]
    for token in range(3):  # 0 is the token of padding
        children, found = forest.children_of(torch.tensor(nodes), torch.full((len(batch),), token))
        for row, (tree, node) in enumerate(zip(batch, nodes, strict=True)):
            fitting = [i for i, p in enumerate(tree.parents) if p == node and tree.tokens[i] == token]
            assert bool(found[row]) == bool(fitting)
            if fitting:
                assert children[row] == fitting[0]


@given(st.lists(trees(), min_size=1, max_size=4))
def test_a_forest_holds_each_tree_unchanged_and_pads_the_rest(batch: list[DraftTree]) -> None:
    forest = Forest(batch)
    assert len(forest) == len(batch)
    assert forest.nodes == max(len(tree) for tree in batch)
    assert forest.depth == max(tree.depth for tree in batch)
    for row, tree in enumerate(batch):
        size, pad = len(tree), forest.nodes - len(tree)
        assert forest.tokens[row].tolist() == tree.tokens.tolist() + [0] * pad
        assert forest.parents[row].tolist() == [*tree.parents] + [-1] * pad
        assert forest.depths[row].tolist() == [*tree.topology.depths] + [0] * pad
        assert forest.parents[row, 1:size].ge(0).all()
