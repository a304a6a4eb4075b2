"""The drafted tree: rules that the constructor names, masks, cuts, and padding that nothing reaches."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from branchwise.core import topology as shapes_module
from branchwise.core.batch import PadShape, TreeBatch
from branchwise.core.topology import Topology, branched, plant, topology
from branchwise.core.tree import DraftTree, Draw
from branchwise.errors import UsageError
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
    # Node 1 is a leaf at depth 1 of a tree of depth 2: a cut path, whose distribution is not that of a draw.
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


@given(topologies(), st.data())
def test_the_mask_of_a_leading_part_is_a_view_and_equals_a_rebuilt_one(
    parents: tuple[int, ...], data: st.DataObject
) -> None:
    whole = Topology(parents)
    part = whole.leading(data.draw(st.integers(1, len(parents))))
    assert part.parents == parents[: len(part)]
    assert part.ancestors.tolist() == ancestors_by_hand(part.parents)
    assert part.ancestors.data_ptr() == whole.ancestors.data_ptr()
    assert (part.depths, part.children) == (Topology(part.parents).depths, Topology(part.parents).children)
    again = part.leading(data.draw(st.integers(1, len(part))))
    assert again.ancestors.data_ptr() == whole.ancestors.data_ptr()
    assert again.ancestors.tolist() == ancestors_by_hand(again.parents)


def test_bare_roots_have_one_shape_whatever_was_planted_between_them() -> None:
    """Or every step of plain decoding would tell a device anew how its one node lies."""
    one = DraftTree.root(811)
    plant(branched([3, 2]))
    assert DraftTree.root(812).topology is one.topology


def test_a_shape_that_stops_early_finds_its_mask_where_it_was_planted() -> None:
    parents = branched([3, 2, 2])
    stale = topology(parents[:4])  # built before by itself
    whole = plant(parents)
    assert topology(parents) is whole
    for nodes in (1, 4, 10):
        tree = DraftTree(torch.arange(nodes), parents[:nodes])
        assert tree.topology.ancestors.data_ptr() == whole.ancestors.data_ptr()
        assert tree.topology.ancestors.tolist() == ancestors_by_hand(parents[:nodes])
        assert TreeBatch([tree]).tokens.shape == (1, nodes)
    assert topology(parents[:4]) is not stale
    assert topology(parents[:5]).ancestors.data_ptr() != whole.ancestors.data_ptr()  # part of a level is not planted


def test_shapes_are_kept_as_long_as_they_are_used_and_no_more_than_so_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shapes_module, "_shapes", type(shapes_module._shapes)())
    monkeypatch.setattr(shapes_module, "MOST_SHAPES", 20)
    used, forgotten = topology((-1, 0, 0)), topology((-1, 0, 1))
    for width in range(3, 30):
        topology((-1, *[0] * width))
        assert topology((-1, 0, 0)) is used
    assert len(shapes_module._shapes) == 20
    assert topology((-1, 0, 1)) is not forgotten
    whole = plant(branched([1] * 40))  # more slices than are kept: the last ones stay, and those before are built anew
    assert len(shapes_module._shapes) == 20
    assert topology(branched([1] * 39)).ancestors.data_ptr() == whole.ancestors.data_ptr()
    assert topology(branched([1] * 9)).ancestors.data_ptr() != whole.ancestors.data_ptr()


def test_a_broken_shape_is_not_kept() -> None:
    for _ in range(2):
        with pytest.raises(UsageError, match="earlier node"):
            topology((-1, 5))


def test_branched_has_whole_levels_of_equal_families() -> None:
    assert branched([]) == (-1,)
    assert branched([3]) == (-1, 0, 0, 0)
    assert branched([2, 2, 1]) == (-1, 0, 0, 1, 1, 2, 2, 3, 4, 5, 6)
    assert branched([2, 2, 1], most=10) == (-1, 0, 0, 1, 1, 2, 2)
    assert len(branched([1] * 9999)) == 512


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
    tree_batch = TreeBatch(batch)
    nodes = [data.draw(st.integers(0, len(tree) - 1)) for tree in batch]
    for token in range(3):  # 0 is the token of padding
        children, found = tree_batch.children_of(torch.tensor(nodes), torch.full((len(batch),), token))
        for row, (tree, node) in enumerate(zip(batch, nodes, strict=True)):
            fitting = [i for i, p in enumerate(tree.parents) if p == node and tree.tokens[i] == token]
            assert bool(found[row]) == bool(fitting)
            if fitting:
                assert children[row] == fitting[0]


@given(st.lists(trees(), min_size=1, max_size=4))
def test_a_forest_holds_each_tree_unchanged_and_pads_the_rest(batch: list[DraftTree]) -> None:
    tree_batch = TreeBatch(batch)
    assert len(tree_batch) == len(batch)
    assert tree_batch.nodes == max(len(tree) for tree in batch)
    assert tree_batch.depth == max(tree.depth for tree in batch)
    for row, tree in enumerate(batch):
        size, pad = len(tree), tree_batch.nodes - len(tree)
        assert tree_batch.tokens[row].tolist() == tree.tokens.tolist() + [0] * pad
        assert tree_batch.parents[row].tolist() == [*tree.parents] + [-1] * pad
        assert tree_batch.depths[row].tolist() == [*tree.topology.depths] + [0] * pad
        assert tree_batch.parents[row, 1:size].ge(0).all()


# The tables that verifiers look up


def slow_children(tree: DraftTree) -> list[list[int]]:
    """In node order; for paths, in the order in which they first come by."""
    found: list[list[int]] = [[] for _ in range(len(tree))]
    ends = [tree.topology.path(leaf) for leaf in tree.leaves] or [tree.topology.path(node) for node in range(len(tree))]
    for path in ends:
        for parent, child in itertools.pairwise(path):
            if child not in found[parent]:
                found[parent].append(child)
    return found


def slow_postorder(children: list[list[int]], node: int = 0) -> list[int]:
    return [below for child in children[node] for below in slow_postorder(children, child)] + [node]


def filled(table: torch.Tensor) -> list[Any]:
    """A table as nested lists, without its padding."""
    if table.ndim == 0:
        return table.item()  # type: ignore[return-value]
    return [filled(row) for row in table if row.ndim or row >= 0]


any_batch = st.one_of(
    st.lists(trees(), min_size=1, max_size=4), st.lists(st.one_of(path_trees(), trees()), min_size=1, max_size=4)
)
ROOM = PadShape(nodes=30, children=9, width=10, forks=8)


@given(any_batch, st.sampled_from([None, ROOM]))
def test_tables_hold_what_the_trees_say_and_are_filled_with_minus_one(
    batch: list[DraftTree], room: PadShape | None
) -> None:
    tree_batch = TreeBatch(batch, pad_shape=room)
    assert tree_batch.lengths.tolist() == [tree.depth for tree in batch]
    for row, tree in enumerate(batch):
        children = slow_children(tree)
        assert [list(below) for below in tree.children] == children
        assert filled(tree_batch.children[row])[: len(tree)] == children
        assert (tree_batch.children[row, len(tree) :] == -1).all()
        assert filled(tree_batch.postorder[row]) == tree.postorder == slow_postorder(children)
        levels = [[n for n, depth in enumerate(tree.topology.depths) if depth == d] for d in range(tree.depth + 1)]
        assert filled(tree_batch.levels[row])[: tree.depth + 1] == levels
        assert (tree_batch.levels[row, tree.depth + 1 :] == -1).all()
        assert filled(tree_batch.forks[row]) == [node for node, below in enumerate(children) if len(below) > 1]
        paths = [path for path in filled(tree_batch.paths[row]) if path]
        assert paths == [tree.topology.path(leaf) for leaf in tree.leaves or (0,)]
    widest = [max((len(b) for t in batch for n, b in enumerate(t.children) if t.topology.depths[n] == d), default=0)
              for d in range(tree_batch.depth)]  # fmt: skip
    assert tree_batch.widths == [max(width, room.children if room else 0) for width in widest]


@given(any_batch)
def test_with_the_same_room_the_tables_of_any_batch_have_the_same_shapes(batch: list[DraftTree]) -> None:
    tree_batch = TreeBatch(batch, pad_shape=ROOM)
    size = len(batch)
    assert (
        tree_batch.tokens.shape
        == tree_batch.parents.shape
        == tree_batch.depths.shape
        == tree_batch.postorder.shape
        == (size, 30)
    )
    assert tree_batch.children.shape == (size, 30, 9)
    assert tree_batch.levels.shape == (size, tree_batch.depth + 1, 10)
    assert tree_batch.forks.shape == (size, 8)
    plain = TreeBatch(batch)
    assert torch.equal(tree_batch.tokens[:, : plain.nodes], plain.tokens)
    assert torch.equal(tree_batch.parents[:, : plain.nodes], plain.parents)
    assert (tree_batch.parents[:, plain.nodes :] == -1).all()


@given(st.integers(1, 4), st.integers(1, 4), st.data())
def test_the_room_for_paths_holds_whatever_of_them_agrees(count: int, length: int, data: st.DataObject) -> None:
    path = st.tuples(*[st.integers(0, 2)] * length)
    paths = data.draw(st.lists(path, min_size=count, max_size=count))
    nodes = sorted({p[:n] for p in paths for n in range(length + 1)}, key=lambda u: (len(u), u))
    parents = tuple(nodes.index(u[:-1]) if u else -1 for u in nodes)
    tree = DraftTree(
        torch.tensor([u[-1] if u else 0 for u in nodes]),
        parents,
        Draw.PATHS,
        torch.full((len(nodes), 3), 1 / 3),
        tuple(map(nodes.index, paths)),
    )
    room = PadShape.for_paths(count, length)
    batch = TreeBatch([tree], pad_shape=room)
    assert batch.nodes == room.nodes
    assert batch.children.shape[2] == room.children
    assert batch.levels.shape[2] == room.width
    assert batch.forks.shape[1] == room.forks


@given(any_batch, st.data())
def test_trees_taken_from_a_forest_keep_all_that_was_looked_up(batch: list[DraftTree], data: st.DataObject) -> None:
    tree_batch = TreeBatch(batch)
    rows = torch.tensor(data.draw(st.lists(st.integers(0, len(batch) - 1), min_size=1, max_size=6)))
    if data.draw(st.booleans()):
        assert tree_batch.children is tree_batch.children  # looked up before or after, it is the same
    taken = tree_batch.take(rows)
    assert len(taken) == len(rows)
    for name in ("tokens", "parents", "depths", "lengths", "paths", "children", "levels", "postorder", "forks"):
        assert torch.equal(getattr(taken, name), getattr(tree_batch, name)[rows]), name
    assert (taken.widths, taken.depth, taken.nodes) == (tree_batch.widths, tree_batch.depth, tree_batch.nodes)
    if tree_batch.q is None:
        assert taken.q is None
    else:
        assert torch.equal(taken.q, tree_batch.q[rows])


def test_q_is_that_of_each_tree_and_nothing_where_nothing_was_drawn() -> None:
    one = DraftTree(TOKENS, PARENTS, Draw.WITHOUT_REPLACEMENT, torch.tensor([[0.1, 0.2, 0.3, 0.4]]))
    other = DraftTree(torch.tensor([5, 6, 7]), (-1, 0, 1), Draw.WITHOUT_REPLACEMENT, Q[:2])
    batch = TreeBatch([one, DraftTree.root(5), other])
    assert batch.q is not None
    assert batch.q.shape == (3, 2, 4)
    assert torch.equal(batch.q[0, 0], one.q[0])  # type: ignore[index]
    assert torch.equal(batch.q[2], Q[:2])
    assert (batch.q[1] == 0).all()
    # A node without children has no distribution: whatever row it gets, asking for it is no error.
    assert torch.equal(batch.q_rows(torch.tensor([0, 0, 1])), torch.stack([one.q[0], 0 * Q[0], Q[1]]))  # type: ignore[index]
    assert batch.q_rows(torch.tensor([[0, 2], [0, 0], [1, 2]])).shape == (3, 2, 4)
    assert TreeBatch([DraftTree.root(1), DraftTree.chain([1, 2])]).q is None


def test_the_laws_of_a_single_tree_are_not_copied() -> None:
    tree = DraftTree(TOKENS, PARENTS, Draw.WITHOUT_REPLACEMENT, Q)
    batch = TreeBatch([tree])
    assert batch.q is not None
    assert batch.q.data_ptr() == Q.data_ptr()
    assert batch.q_rows(torch.tensor([0])).data_ptr() == Q.data_ptr()


def test_children_of_paths_come_in_the_order_of_the_draws_and_not_of_their_nodes() -> None:
    # Nodes stand by token; the first path takes token 2, the second token 1.
    tree = DraftTree(torch.tensor([0, 1, 2]), (-1, 0, 0), Draw.PATHS, Q[:1], leaves=(2, 1, 2))
    assert tree.children == ((2, 1), (), ())
    assert tree.postorder == [2, 1, 0]
    assert tree.paths == [[0, 2], [0, 1], [0, 2]]
    assert TreeBatch([tree]).children[0, 0].tolist() == [2, 1]


def test_what_a_verifier_writes_into_its_forest_is_not_the_next_ones() -> None:
    trees = [DraftTree(torch.tensor([1, 2, 3]), (-1, 0, 0))]
    TreeBatch(trees).parents.clamp_min_(0)
    assert TreeBatch(trees).parents.tolist() == [[-1, 0, 0]]
