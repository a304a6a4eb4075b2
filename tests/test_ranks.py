"""Trees of ranks: the shape is given, and the i-th child is the i-th most probable token."""

from __future__ import annotations

import itertools
import math
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from branchwise.audit.exact import emitted
from branchwise.audit.instances import Drafts, Instance
from branchwise.core.topology import Topology, topology
from branchwise.core.tree import Draw
from branchwise.draft import TREES
from branchwise.draft.base import Budget
from branchwise.draft.builder import Candidate
from branchwise.draft.policies.template import LEVELS, RANKED, SHAPES, Ranks, promising, write_template
from branchwise.draft.policies.topk import TopKRequest
from branchwise.draft.sampler import GreedySampler
from branchwise.errors import UnknownName, UsageError
from branchwise.verify import VERIFIERS
from tests.strategies import Rule, grown, random_rule
from tests.test_topk import paths_of

Ranked = tuple[int, ...]
NAMES = ["recycling-80", *SHAPES]


def ranks_of(shape: Topology) -> list[Ranked]:
    """The ranks on the way to every node."""
    found: list[Ranked] = [()]
    for node, parent in enumerate(shape.parents[1:], start=1):
        found.append((*found[parent], shape.children[parent].index(node)))
    return found


def layout(policy: Ranks, rule: Rule, budget: Budget, successors: int = 99) -> list[Ranked]:
    """The paths of a tree over a memory that has distributions by heart, and stands at the tokens since the root."""

    def after(place: Ranked) -> list[Candidate]:
        [likely] = TopKRequest.of(GreedySampler(), rule(place)[None], successors).alone()
        return [Candidate(token, math.exp(value), (*place, token)) for token, value in likely]

    return paths_of(policy.lay(0, (), after, budget).finish(Draw.FIXED))


# Shapes


def test_the_tree_of_token_recycling_has_the_levels_of_the_paper() -> None:
    shape = topology(RANKED["recycling-80"])
    assert tuple(map(len, shape.levels)) == (1, *LEVELS) == (1, 8, 21, 25, 15, 8, 3)
    ranks = ranks_of(shape)
    assert len(set(ranks)) == 81
    assert all(path[:-1] in ranks for path in ranks[1:])
    assert all((*path[:-1], elder) in ranks for path in ranks[1:] for elder in range(path[-1]))


def test_the_first_born_have_the_most_descendants() -> None:
    ranks = ranks_of(topology(RANKED["recycling-80"]))
    below = [sum(path[:1] == (rank,) for path in ranks) for rank in range(8)]
    assert below == sorted(below, reverse=True)
    assert below[0] > 30
    assert below[-1] == 2


def test_a_level_keeps_the_paths_with_the_least_product() -> None:
    ranks = set(ranks_of(topology(RANKED["recycling-80"])))
    for depth, most in ((2, 9), (3, 6)):  # the sizes of these levels leave no ties
        paths = itertools.product(range(8), repeat=depth)
        assert {u for u in ranks if len(u) == depth} == {u for u in paths if math.prod(r + 1 for r in u) <= most}
    # Of equal ones those stay that leave the most probable tokens last.
    assert {u for u in ranks if len(u) == 6} == {(0,) * 6, (0, 0, 0, 0, 0, 1), (0, 0, 0, 0, 1, 0)}


@pytest.mark.parametrize("name", NAMES)
def test_of_a_shape_the_most_promising_nodes_are_kept(name: str) -> None:
    policy = Ranks(name)
    ranks = ranks_of(policy.shape)
    promise = {path: math.prod(0.5 / (1 + rank) for rank in path) for path in ranks}
    for nodes, depth in itertools.product(range(1, len(ranks) + 3), (0, 1, 2, 3, 99)):
        kept = set(ranks_of(policy.within(Budget(nodes, depth))))
        allowed = [path for path in ranks if len(path) <= depth]
        assert kept <= set(allowed)
        assert len(kept) == min(nodes, len(allowed))
        left = [promise[path] for path in allowed if path not in kept]
        assert min(promise[path] for path in kept) >= max(left, default=0)


def test_promise_falls_from_parents_to_children_and_from_elder_to_younger() -> None:
    shape = topology(RANKED["recycling-80"])
    place = {node: i for i, node in enumerate(promising(shape))}
    for node, children in enumerate(shape.children):
        order = [place[node], *(place[child] for child in children)]
        assert order == sorted(order)


def test_a_narrow_memory_narrows_the_shape() -> None:
    policy = Ranks()
    narrow = set(ranks_of(policy.within(Budget(99, 99), width=2)))
    assert narrow == {path for path in ranks_of(policy.shape) if all(rank < 2 for rank in path)}


# Trees


@given(st.sampled_from(NAMES), st.integers(1, 90), st.integers(0, 8), st.integers(0, 50))
def test_the_child_of_rank_i_is_the_token_of_rank_i(name: str, nodes: int, depth: int, seed: int) -> None:
    rule, policy, budget = cache(random_rule(9, seed)), Ranks(name), Budget(nodes, depth)
    expected = []
    for ranks in ranks_of(policy.within(budget)):
        path: Ranked = ()
        for rank in ranks:
            path = (*path, int(rule(path).argsort(descending=True)[rank]))
        expected.append(path)
    tree = grown(policy, rule, GreedySampler(), budget)
    assert paths_of(tree) == expected
    assert tree.draw is Draw.FIXED
    assert layout(policy, rule, budget) == expected


def test_where_fewer_tokens_are_known_the_rest_is_left_out_with_all_below_it() -> None:
    rule, policy = cache(random_rule(9, 3)), Ranks()
    whole = layout(policy, rule, Budget(99, 99))
    few = layout(policy, rule, Budget(99, 99), successors=2)
    shape = ranks_of(policy.shape)
    assert few == [path for path, ranks in zip(whole, shape, strict=True) if all(rank < 2 for rank in ranks)]
    assert (
        paths_of(grown("ranks:mcsd", random_rule(3, 1), GreedySampler()))[1:4]
        == layout(Ranks("mcsd"), random_rule(3, 1), Budget(9, 1))[1:4]
    )
    assert len(grown("ranks:mcsd", random_rule(3, 1), GreedySampler())) == 1 + 3 + 6 + 12
    assert layout(policy, rule, Budget(99, 99), successors=0) == [()]


def test_a_level_is_one_look() -> None:
    asked: list[list[int]] = []
    tree = grown("ranks:recycling-80", random_rule(9, 1), GreedySampler(), asked=asked)
    assert len(asked) == tree.depth == 6
    assert sorted(itertools.chain(*asked)) == sorted(set(tree.parents) - {-1})


def test_who_proposed_a_node_is_kept() -> None:
    def after(place: int) -> list[Candidate]:
        return [Candidate(token, 0.1, token, source="ab"[token % 2]) for token in range(4)]

    tree = Ranks("mcsd").lay(7, 0, after, Budget(99, 1)).finish(Draw.FIXED)
    assert tree.tokens.tolist() == [7, 0, 1, 2, 3]
    assert tree.sources == ("", "a", "b", "a", "b")


def test_a_file_of_a_template_is_a_shape(tmp_path: Path) -> None:
    write_template(tmp_path / "own.json", (-1, 0, 0, 1), "for tests")
    policy = TREES.build(f"ranks:{tmp_path / 'own.json'}")
    assert layout(policy, random_rule(5, 1), Budget(99, 99))[-1][0] == int(random_rule(5, 1)(()).argmax())
    assert policy.shape.parents == (-1, 0, 0, 1)


def test_unknown_shapes_are_refused_with_a_sentence() -> None:
    with pytest.raises(UnknownName, match=r"Did you mean 'recycling-80'\? Known: .*mcsd, recycling-80"):
        Ranks("recycling")
    with pytest.raises(UsageError, match="cannot be read"):
        Ranks("no/such.json")


@pytest.mark.parametrize("spec", ["ranks:mcsd", "ranks:fork"])
def test_match_is_exact(spec: str) -> None:
    for seed in range(3):
        distance, _ = emitted(
            VERIFIERS.build("match"), Drafts.grown(TREES.build(spec), Instance.random(3, 2, 2, 1.0, (seed,)))
        )
        assert distance < 1e-12
