"""Traversal verification: the odds of every node before any coin is tossed, and the way to the one that succeeds."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from branchwise.audit.instances import Drafts, ExactProbs, Instance
from branchwise.core.batch import TreeBatch
from branchwise.core.tree import DraftTree, Draw
from branchwise.verify.block import Block
from branchwise.verify.recursive import Traversal, odds_of_nodes
from tests.conformance.test_verifiers import AWKWARD, WORLDS, as_draft, verdict_law
from tests.slow_truth import residual, without
from tests.strategies import topologies, trees

modes = pytest.mark.parametrize("lazy", [True, False], ids=["host", "device"])
VOCABULARY = 8


@st.composite
def drawn_trees(draw: st.DrawFn) -> tuple[DraftTree, np.ndarray]:
    """A tree of any shape with distinct siblings in any order, its q, and p (nodes, vocabulary)."""
    parents = draw(topologies(max_depth=3, max_width=4))
    rng = np.random.default_rng(draw(st.integers(0, 1 << 20)))
    p, q = (rng.dirichlet(np.full(VOCABULARY, 0.5), len(parents)) for _ in range(2))
    if draw(st.booleans()):  # distributions in which p equals q, or is certain, or forbids what was drawn
        p[::2] = q[::2]
    if draw(st.booleans()):
        p[1::3] = np.eye(VOCABULARY)[rng.integers(VOCABULARY)]
    tokens = [0] * len(parents)
    for parent in range(len(parents)):
        below = [node for node, above in enumerate(parents) if above == parent]
        for node, token in zip(below, rng.permutation(VOCABULARY), strict=False):
            tokens[node] = int(token)
    tree = DraftTree(torch.tensor(tokens), parents, Draw.WITHOUT_REPLACEMENT, torch.from_numpy(q))
    return tree, p


def odds_by_hand(tree: DraftTree, p: np.ndarray) -> tuple[dict[int, float], dict[int, np.ndarray]]:
    """By the recursion of the paper: with which odds each node is asked, and what is wanted there by then."""
    assert tree.q is not None
    odds: dict[int, float] = {}
    probs: dict[int, np.ndarray] = {}

    def visit(node: int, alpha: float) -> None:
        wanted, row, drawn = alpha, p[node], tree.q[node].numpy()  # type: ignore[index]
        for child in tree.children[node]:
            token = int(tree.tokens[child])
            visit(child, min(1.0, wanted * row[token] / drawn[token]))
            mass = np.maximum(wanted * row - drawn, 0).sum()
            row, drawn = residual(row, drawn, wanted), without(drawn, token)
            wanted = mass / (mass + 1 - wanted) if mass + 1 - wanted > 0 else 0.0
        odds[node], probs[node] = wanted, row

    visit(0, 1.0)
    return odds | {0: 1.0}, probs


@settings(max_examples=80)
@given(st.lists(drawn_trees(), min_size=1, max_size=3))
def test_the_odds_of_all_nodes_are_those_of_the_recursion(batch: list[tuple[DraftTree, np.ndarray]]) -> None:
    tree_batch = TreeBatch([tree for tree, _ in batch])
    p = torch.nn.utils.rnn.pad_sequence([torch.from_numpy(probs) for _, probs in batch], batch_first=True)
    for lazy in (True, False):
        odds, share = odds_of_nodes(tree_batch, ExactProbs(p, lazy=lazy))
        for row, (tree, probs) in enumerate(batch):
            expected, left = odds_by_hand(tree, probs)
            asked = 1.0  # the probability that a node is asked at all
            for node in tree.postorder:
                assert asked < 1e-9 or float(odds[row, node]) == pytest.approx(expected[node], abs=1e-8)
                if asked * expected[node] > 1e-6:
                    kept = np.maximum(probs[node] - float(share[row, node]) * tree.q[node].numpy(), 0)  # type: ignore[index]
                    assert kept / kept.sum() == pytest.approx(left[node], abs=1e-6)
                asked *= 1 - expected[node]


@given(st.lists(trees(), min_size=1, max_size=3), st.data())
def test_the_way_to_a_node_is_its_path_from_the_root(batch: list[DraftTree], data: st.DataObject) -> None:
    tree_batch = TreeBatch(batch)
    nodes = [data.draw(st.integers(0, len(tree) - 1)) for tree in batch]
    ways = tree_batch.paths_to(torch.tensor(nodes))
    for tree, node, way in zip(batch, nodes, ways.tolist(), strict=True):
        path = tree.topology.path(node)
        assert way == path + [-1] * (tree_batch.nodes - len(path))


@modes
@pytest.mark.parametrize("where", AWKWARD)
def test_on_a_chain_it_is_block_verification(where: str, lazy: bool) -> None:
    drafts = Drafts.of("paths", Instance(WORLDS[where].p, WORLDS[where].q, paths=1))
    one, other = (verdict_law(rule, drafts, lazy=lazy) for rule in (Traversal(), Block()))
    for verdict in {*one, *other}:
        assert one.get(verdict, 0.0) == pytest.approx(other.get(verdict, 0.0), abs=1e-12)


@modes
def test_a_child_s_subtree_succeeds_as_often_as_its_parent_wants_it_whatever_hangs_below(lazy: bool) -> None:
    # The invariant that the rule rests on, over all that can be drawn below the children.
    drafts = Drafts.of("rsd-c", WORLDS["three paths"])
    below = {as_draft(tree): weight for tree, weight in zip(drafts.trees, drafts.weights.tolist(), strict=True)}
    drawn, kept = Counter[tuple[int, ...]](), Counter[tuple[tuple[int, ...], int]]()
    for draft, weight in below.items():
        drawn[tuple(x[0] for x in draft)] += weight  # type: ignore[assignment]
    for (draft, accepted, _), weight in verdict_law(Traversal(), drafts, lazy=lazy).items():
        if accepted:
            kept[tuple(x[0] for x in draft), accepted[0]] += below[draft] * weight  # type: ignore[assignment]
    for row, tree in enumerate(drafts.trees):
        firsts = tuple(tree.tokens[1:4].tolist())
        alone = DraftTree(tree.tokens[:4], tree.parents[:4], tree.draw, tree.q[:4])  # type: ignore[index]
        odds, _ = odds_by_hand(alone, drafts.p[row, :4].numpy())
        failed = 1.0
        for child, token in enumerate(firsts, start=1):
            assert kept[firsts, token] / drawn[firsts] == pytest.approx(failed * odds[child], abs=1e-12)
            failed *= 1 - odds[child]
