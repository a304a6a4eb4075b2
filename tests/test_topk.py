"""The most probable tree: the best nodes of all that were proposed, one pass a level, no pass in vain."""

from __future__ import annotations

import itertools
import math
from functools import cache

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from branchwise.audit.exact import emitted
from branchwise.audit.instances import Drafts, Instance
from branchwise.core.tree import DraftTree, Draw
from branchwise.draft import TREES, build_drafter
from branchwise.draft.base import Budget
from branchwise.draft.builder import NodeProbs, TreeBuilder, grow_with
from branchwise.draft.policies.topk import TopKRequest
from branchwise.draft.sampler import GreedySampler, SeededSampler
from branchwise.errors import UsageError
from branchwise.verify import VERIFIERS
from tests.conformance.test_drafters import assert_writes_like_plain_decoding
from tests.strategies import Rule, grown, random_rule, tokens_to

Path = tuple[int, ...]


def tied_rule(vocabulary: int, seed: int) -> Rule:
    """Distributions of few different masses, some of them 0: many paths are equally probable."""

    def probs(prefix: Path) -> Tensor:
        generator = torch.Generator().manual_seed(hash((seed, *prefix)) % (1 << 62))
        weights = torch.randint(0, 3, (vocabulary,), generator=generator).float()
        weights[seed % vocabulary] += 1
        return weights / weights.sum()

    return probs


def paths_of(tree: DraftTree) -> list[Path]:
    return [tuple(tokens_to(tree, node)) for node in range(len(tree))]


def slow_tree(rule: Rule, nodes: int, depth: int, width: int) -> set[Path]:
    """EAGLE-2 word by word: the W best of each level are expanded, whatever they are worth, and all are ranked."""
    value: dict[Path, float] = {(): 0.0}  # in order of creation
    level: list[Path] = [()]
    for _ in range(depth):
        below = []
        for path in sorted(level, key=lambda u: -value[u])[:width]:
            for token, step in TopKRequest.of(GreedySampler(), rule(path)[None], width).alone()[0]:
                value[*path, token] = value[path] + step
                below.append((*path, token))
        level = below
    return set(sorted(value, key=lambda u: -value[u])[: nodes + 1])


@given(
    st.integers(1, 30),
    st.integers(1, 4),
    st.integers(1, 4),
    st.integers(0, 99),
    st.sampled_from([random_rule, tied_rule]),
)
def test_the_best_of_all_proposed_nodes_are_kept(nodes: int, depth: int, width: int, seed: int, rules: object) -> None:
    rule = cache(rules(4, seed))  # type: ignore[operator]
    tree = grown(f"topk:{nodes},depth={depth},width={width}", rule, GreedySampler())
    assert set(paths_of(tree)) == slow_tree(rule, nodes, depth, width)
    assert len(set(paths_of(tree))) == len(tree)
    assert tree.draw is Draw.FIXED
    assert tree.q is None


def test_where_everything_may_be_expanded_no_tree_expects_more_tokens() -> None:
    rule = cache(random_rule(3, 5))

    def probability(path: Path) -> float:
        return math.prod(float(rule(path[:n])[token]) for n, token in enumerate(path))

    every = [path for length in (1, 2, 3) for path in itertools.product(range(3), repeat=length)]
    for nodes in range(1, 12):
        tree = grown(f"topk:{nodes},depth=3,width=27", rule, GreedySampler())
        best = sum(sorted(map(probability, every), reverse=True)[:nodes])
        assert sum(map(probability, paths_of(tree)[1:])) == pytest.approx(best, rel=1e-6)


def requests(spec: str, rule: Rule, budget: Budget | None = None) -> tuple[list[list[Path]], TreeBuilder, DraftTree]:
    """What is asked for pass by pass, the tree that the source was shown last, and what came of it."""
    growing = TREES.build(spec).grow(0, budget or Budget(999, 99), GreedySampler())
    asked: list[list[Path]] = []
    shown = [TreeBuilder([0])]

    def look(sapling: TreeBuilder, nodes: list[int]) -> NodeProbs:
        shown.append(sapling)
        asked.append([tuple(tokens_to(sapling, node)) for node in nodes])
        return NodeProbs(torch.stack([rule(path) for path in asked[-1]]))

    tree = grow_with(growing, look)
    return asked, shown[-1], tree


@pytest.mark.parametrize("rules", [random_rule, tied_rule])
def test_a_level_is_one_pass_over_at_most_its_width_and_the_source_sees_nothing_else(rules: object) -> None:
    for seed in range(20):
        rule = cache(rules(5, seed))  # type: ignore[operator]
        asked, sapling, tree = requests("topk:20,depth=5,width=3", rule)
        assert len(asked) <= 5
        assert asked[0] == [()]
        for level, paths in enumerate(asked):
            assert {len(path) for path in paths} == {level}
            assert len(paths) <= 3
        every = [path for paths in asked for path in paths]
        assert len(sapling) == len(every) == len(set(every))
        assert all(path[:-1] in every for path in every[1:])
        assert {path[:-1] for path in paths_of(tree)[1:]} <= set(every)


def test_a_pass_that_could_change_nothing_is_not_asked_for() -> None:
    sharp = torch.tensor([0.5, 0.3, 0.2])
    asked, _, tree = requests("topk:2,depth=9,width=3", lambda path: sharp)
    assert paths_of(tree) == [(), (0,), (1,)]
    assert asked == [[()], [(0,)]]  # below (0,) something might have beaten the 0.3 of (1,); below (1,) nothing can
    asked, _, tree = requests("topk:1,depth=9,width=3", lambda path: sharp)
    assert asked == [[()]]
    certain = torch.tensor([0.0, 1.0, 0.0])
    asked, _, tree = requests("topk:3,depth=9,width=2", lambda path: certain)
    assert paths_of(tree) == [(), (1,), (1, 1), (1, 1, 1)]
    assert len(asked) == 3


def test_rounding_above_one_puts_no_child_before_its_parent() -> None:
    probs = torch.tensor([1.0000002, 0.9999999])
    for nodes in range(1, 12):
        assert len(grown(f"topk:{nodes},depth=6,width=2", lambda path: probs, GreedySampler())) == nodes + 1
    assert TopKRequest.of(GreedySampler(), probs[None], 2).alone()[0][0] == (0, 0.0)


def test_paths_of_any_depth_are_told_apart_however_improbable() -> None:
    # The product of these masses is 0 in float64, their logarithms add up.
    probs = torch.tensor([3e-38, 2e-38, 0.0])
    tree = grown("topk:40,depth=20,width=1", lambda path: probs, GreedySampler())
    assert paths_of(tree)[-1] == (0,) * 20


def test_siblings_come_best_first_and_impossible_tokens_never() -> None:
    probs = torch.tensor([0.2, 0.0, 0.5, 0.3])
    tree = grown("topk:9,depth=1,width=4", lambda path: probs, GreedySampler())
    assert paths_of(tree) == [(), (2,), (3,), (0,)]


def test_tokens_beyond_what_float32_counts_are_kept_whole() -> None:
    probs = torch.zeros(1, (1 << 24) + 4)
    probs[0, (1 << 24) + 1] = 0.75
    probs[0, 3] = 0.25
    assert [token for token, _ in TopKRequest.of(GreedySampler(), probs, 2).alone()[0]] == [(1 << 24) + 1, 3]


# When one more level is worth too little


HALVES = torch.tensor([0.5, 0.25, 0.25])


@pytest.mark.parametrize(
    ("gain", "passes", "depth"),
    [
        (0.0, 6, 6),
        (0.1, 4, 4),  # with width 1 the levels add 0.5, 0.25, 0.125, 0.0625; the level below 0.0625 cannot add 0.1
        (0.2, 3, 3),
        (0.5, 2, 2),
        (0.6, 1, 1),
    ],
)
def test_a_tree_ends_where_a_level_adds_less_than_the_gain(gain: float, passes: int, depth: int) -> None:
    asked, _, tree = requests(f"topk:24,depth=6,width=1,gain={gain}", lambda path: HALVES)
    assert len(asked) == passes
    assert tree.depth == depth


def test_a_level_that_cannot_add_the_gain_is_not_asked_for() -> None:
    # The second level adds 1, but of its four nodes two are expanded: what is below them has 0.5 at most.
    asked, _, _ = requests("topk:24,depth=6,width=2,gain=0.6", lambda path: torch.tensor([0.5, 0.5]))
    assert len(asked) == 2


def test_with_few_nodes_a_level_gains_only_what_it_puts_in_the_place_of_worse_ones() -> None:
    # Two nodes: 0.5 and 0.25, then 0.25 ties, so the second level adds nothing, though its nodes have 0.75.
    asked, _, _ = requests("topk:2,depth=6,width=3,gain=0.01", lambda path: HALVES)
    assert len(asked) == 2


# Budgets, bad specs, texts


def test_every_budget_is_kept() -> None:
    rule = cache(random_rule(3, 2))
    for nodes, depth in itertools.product(range(1, 30), range(7)):
        tree = grown("topk:24,depth=5,width=3", rule, GreedySampler(), Budget(nodes, depth), root=2)
        assert len(tree) == (1 if depth == 0 else len(slow_tree(rule, min(24, nodes - 1), min(5, depth), 3)))
        assert len(tree) <= nodes
        assert tree.depth <= depth
        assert int(tree.tokens[0]) == 2


def test_nothing_is_left_to_chance() -> None:
    rule = cache(random_rule(5, 3))
    trees = [grown("topk:12", rule, SeededSampler(seed, 0)) for seed in range(3)]
    for tree in trees[1:]:
        assert torch.equal(tree.tokens, trees[0].tokens)
        assert tree.parents == trees[0].parents


@pytest.mark.parametrize("spec", ["topk:0", "topk:8,depth=0", "topk:8,width=0", "topk:8,gain=1", "topk:8,gain=-0.1"])
def test_a_shape_that_is_none_is_a_sentence(spec: str) -> None:
    with pytest.raises(UsageError, match="as in topk:24,depth=6,width=8"):
        TREES.build(spec)


def test_it_needs_a_number_of_nodes() -> None:
    with pytest.raises(UsageError, match="needs 'nodes', as in topk:NODES,depth=6,width=8"):
        TREES.build("topk")


@pytest.mark.parametrize("sigma", [0, 2])
@pytest.mark.parametrize("spec", ["topk:12,depth=4,width=3", "topk:8,gain=0.2"])
def test_texts_are_those_of_plain_decoding(spec: str, sigma: int) -> None:
    assert_writes_like_plain_decoding(lambda truth: build_drafter(f"disturbed:{sigma}", spec), VERIFIERS.build("match"))


def test_its_one_tree_keeps_the_law_of_the_target() -> None:
    for seed in range(3):
        drafts = Drafts.grown(TREES.build("topk:4,depth=2,width=2"), Instance.random(3, 2, 2, 1.0, (seed,)))
        assert len(drafts.trees) == 1
        distance, efficiency = emitted(VERIFIERS.build("match"), drafts)
        assert distance < 1e-9
        assert efficiency > 1
