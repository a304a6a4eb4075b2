"""Graphs of hypotheses: what is the same is drafted once, and unrolled it is a tree like any other."""

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
from branchwise.core.tree import Draw
from branchwise.draft import TREES, build_drafter
from branchwise.draft.base import Budget
from branchwise.draft.sampler import GreedySampler, SeededSampler
from branchwise.errors import UsageError
from branchwise.verify import VERIFIERS
from tests.conformance.test_drafters import assert_writes_like_plain_decoding
from tests.strategies import Rule, grown, random_rule
from tests.test_topk import Path, paths_of, requests

ALL = "sibling=0,leaf=0"


def markov(vocabulary: int, seed: int, memory: int) -> Rule:
    """Distributions that depend on the last tokens alone; the root is token 0."""
    rule = cache(random_rule(vocabulary, seed))
    return lambda path: rule((0, *path)[-memory:])


def by_table(table: dict[str, dict[str, float]], words: str = "abcd") -> Rule:
    """Distributions by the last token, given as letters; '' is the root's."""

    def probs(path: Path) -> Tensor:
        masses = table.get(words[path[-1]] if path else "", {})
        return torch.tensor([masses.get(word, 0.0) for word in words])

    return probs


def spelled(paths: list[Path], words: str = "abcd") -> list[str]:
    return ["".join(words[token] for token in path) for path in paths]


@given(st.integers(1, 40), st.integers(1, 4), st.integers(1, 4), st.integers(0, 99))
def test_without_merging_it_holds_the_most_probable_paths_of_all(nodes: int, depth: int, width: int, seed: int) -> None:
    rule = cache(random_rule(4, seed))

    def probability(path: Path) -> float:
        return math.prod(float(rule(path[:n])[token]) for n, token in enumerate(path))

    level, every = [()], []
    for _ in range(depth):
        level = [(*path, token) for path in level for token in rule(path).topk(width).indices.tolist()]
        every += level
    tree = grown(f"graph:{nodes},width={width},depth={depth},repeat=-1,{ALL}", rule, GreedySampler())
    assert set(paths_of(tree)[1:]) == set(sorted(every, key=probability, reverse=True)[:nodes])
    assert tree.draw is Draw.FIXED
    assert tree.q is None


@given(st.integers(1, 2), st.integers(1, 4), st.integers(1, 3), st.integers(0, 99))
def test_where_laws_depend_on_the_last_tokens_merging_changes_nothing(
    memory: int, depth: int, width: int, seed: int
) -> None:
    # With room for every node the unrolled graph is the tree that would have been drafted without merging.
    rule = markov(3, seed, memory)
    shape = f"graph:999,width={width},depth={depth},{ALL}"
    merged = grown(f"{shape},repeat={memory - 1}", rule, GreedySampler())
    plain = grown(f"{shape},repeat=-1", rule, GreedySampler())
    assert sorted(paths_of(merged)) == sorted(paths_of(plain))


def test_nodes_that_were_taken_over_say_so() -> None:
    rule = markov(3, 4, memory=1)
    shape = "24,width=3,depth=6"
    merged = grown(f"graph:{shape},repeat=0,{ALL}", rule, GreedySampler())
    plain = grown(f"graph:{shape},repeat=-1,{ALL}", rule, GreedySampler())
    assert set(plain.sources[1:]) == {"graph"}
    assert set(merged.sources[1:]) == {"graph", "merged"}
    for node, parent in enumerate(merged.parents[1:], start=1):  # and so is all below such a node
        assert merged.sources[parent] != "merged" or merged.sources[node] == "merged"


def sent(spec: str, rule: Rule) -> int:
    """How many nodes go through the draft."""
    return sum(len(level) for level in requests(spec, rule)[0])


def test_what_repeats_is_drafted_once() -> None:
    rule = markov(3, 4, memory=1)
    shape = "24,width=3,depth=6"
    merged, plain = sent(f"graph:{shape},repeat=0,{ALL}", rule), sent(f"graph:{shape},repeat=-1,{ALL}", rule)
    # After a token the distribution is that of the token: one node for each is enough, but for those below themselves.
    assert merged < plain / 2
    assert merged < sent(f"topk:{shape}", rule)
    assert len(grown(f"graph:{shape},repeat=0,{ALL}", rule, GreedySampler())) == 25


def test_the_longer_the_endings_that_must_agree_the_more_is_drafted() -> None:
    rule = markov(3, 1, memory=3)
    counts = [sent(f"graph:60,width=3,depth=5,repeat={repeat},{ALL}", rule) for repeat in (0, 1, 2, 3, 4, -1)]
    assert counts == sorted(counts)
    assert counts[0] < counts[1] < counts[-1]
    assert counts[-2] == counts[-1]  # five tokens in a row are the whole path


def test_a_copy_has_the_children_of_its_original_with_their_probabilities() -> None:
    # "ab" and "cb" end alike, and "ab" is more probable: after "cb" the distribution of "ab" is taken, and never asked
    # for.
    def probs(path: Path) -> Tensor:
        table = {(): [0.6, 0, 0.4, 0], (0,): [0, 1, 0, 0], (2,): [0, 1, 0, 0], (0, 1): [0, 0, 0.3, 0.7]}
        return torch.tensor(table.get(path, [1.0, 0, 0, 0]), dtype=torch.float32)

    asked, _, tree = requests(f"graph:99,width=2,depth=3,repeat=0,{ALL}", probs)
    assert [spelled(level) for level in asked] == [[""], ["a", "c"], ["ab"]]
    assert spelled(paths_of(tree)) == ["", "a", "c", "ab", "cb", "abd", "cbd", "abc", "cbc"]
    asked, _, tree = requests(f"graph:99,width=2,depth=3,repeat=1,{ALL}", probs)
    assert [spelled(level) for level in asked] == [[""], ["a", "c"], ["ab", "cb"]]
    assert spelled(paths_of(tree)) == ["", "a", "c", "ab", "cb", "abd", "cba", "abc"]


def test_below_a_copy_the_probability_of_a_path_is_that_of_the_copy() -> None:
    def probs(path: Path) -> Tensor:
        table = {(): [0.65, 0, 0.2, 0.15], (0,): [0, 1, 0, 0], (2,): [0, 1, 0, 0], (0, 1): [0, 0, 0.3, 0.7]}
        return torch.tensor(table.get(path, [0.0, 0, 0, 0]), dtype=torch.float32)

    # "abd" has 0.455, "abc" 0.195, "d" 0.15 and "cbd", the child of a copy, 0.14.
    tree = grown(f"graph:7,depth=3,repeat=0,{ALL}", probs, GreedySampler())
    assert spelled(paths_of(tree)) == ["", "a", "c", "d", "ab", "cb", "abd", "abc"]
    tree = grown(f"graph:8,depth=3,repeat=0,{ALL}", probs, GreedySampler())
    assert spelled(paths_of(tree))[-1] == "cbd"


def test_a_pass_that_could_change_nothing_is_not_asked_for() -> None:
    probs = by_table({"": {"a": 0.5, "b": 0.3}, "a": {"c": 0.5}, "b": {"c": 0.5}})
    assert requests(f"graph:1,depth=3,{ALL}", probs)[0] == [[()]]
    assert requests(f"graph:2,depth=3,{ALL}", probs)[0] == [[()], [(0,)]]


def test_no_node_is_a_copy_of_its_own_ancestor() -> None:
    again = by_table({"": {"a": 0.9}, "a": {"a": 0.9}})
    asked, _, tree = requests(f"graph:9,depth=4,repeat=0,{ALL}", again)
    assert [spelled(level) for level in asked] == [[""], ["a"], ["aa"], ["aaa"]]
    assert spelled(paths_of(tree)) == ["", "a", "aa", "aaa", "aaaa"]


def test_links_in_a_circle_end_with_the_depth_and_the_nodes() -> None:
    # "ab" is a copy of "b" and "ba" one of "a": below both the graph goes round for ever.
    circle = by_table({"": {"a": 0.5, "b": 0.5}, "a": {"b": 1.0}, "b": {"a": 1.0}})
    asked, _, tree = requests(f"graph:99,depth=5,repeat=0,{ALL}", circle)
    assert [spelled(level) for level in asked] == [[""], ["a", "b"]]
    assert {"ababa", "babab"} == {path for path in spelled(paths_of(tree)) if len(path) == 5}
    assert len(tree) == 11
    assert len(grown(f"graph:7,depth=50,repeat=0,{ALL}", circle, GreedySampler())) == 8


def test_siblings_far_behind_the_best_are_dropped() -> None:
    probs = by_table({"": {"a": 0.5, "b": 0.25, "c": 0.15, "d": 0.1}})
    for sibling, kept in ((0.0, 4), (0.2, 4), (0.21, 3), (0.3, 3), (0.31, 2), (0.5, 2), (0.51, 1), (1.0, 1)):
        assert len(grown(f"graph:9,depth=1,sibling={sibling}", probs, GreedySampler())) == kept + 1
    assert len(grown("graph:9,depth=1,width=2,sibling=0", probs, GreedySampler())) == 3


def test_an_improbable_node_is_kept_and_not_expanded_and_nothing_is_a_copy_of_it() -> None:
    probs = by_table({"": {"a": 0.9, "b": 0.1}, "a": {"b": 1.0}, "b": {"c": 1.0}})
    asked, _, tree = requests("graph:9,depth=3,repeat=0,sibling=0,leaf=0.1001", probs)
    assert [spelled(level) for level in asked] == [[""], ["a"], ["ab"]]
    assert spelled(paths_of(tree)) == ["", "a", "b", "ab", "abc"]
    # It is the step that must be probable, not the path.
    asked, _, _ = requests("graph:9,depth=3,repeat=0,sibling=0,leaf=0.0999", probs)
    assert [spelled(level) for level in asked] == [[""], ["a", "b"], ["bc"]]


def test_an_improbable_copy_is_linked_all_the_same() -> None:
    probs = by_table({"": {"b": 0.6, "a": 0.4}, "a": {"d": 0.95, "b": 0.05}, "b": {"c": 1.0}})
    tree = grown("graph:9,depth=3,repeat=0,sibling=0,leaf=0.3", probs, GreedySampler())
    assert "abc" in spelled(paths_of(tree))


@pytest.mark.parametrize("repeat", [-1, 0, 1])
def test_a_level_is_one_pass_and_shows_the_source_nothing_else(repeat: int) -> None:
    for seed in range(20):
        rule = cache(random_rule(4, seed))
        asked, sapling, tree = requests(f"graph:20,depth=5,repeat={repeat}", rule)
        assert len(asked) <= 5
        for level, paths in enumerate(asked):
            assert {len(path) for path in paths} == {level}
            assert len(paths) <= 20
        every = [path for paths in asked for path in paths]
        assert len(sapling) == len(every) == len(set(every))
        assert len(tree) <= 21
        assert len(set(paths_of(tree))) == len(tree)


# Budgets, bad specs, texts


@pytest.mark.parametrize("repeat", [-1, 0, 1])
def test_every_budget_is_kept(repeat: int) -> None:
    rule = cache(random_rule(3, 2))
    spec = f"graph:24,width=3,depth=5,repeat={repeat},{ALL}"
    for nodes, depth in itertools.product(range(1, 30), range(7)):
        tree = grown(spec, rule, GreedySampler(), Budget(nodes, depth), root=2)
        full = sum(3**level for level in range(min(depth, 5) + 1))
        assert len(tree) == min(nodes, 25, full) if repeat < 0 or depth < 2 else len(tree) <= min(nodes, 25)
        assert tree.depth <= min(depth, 5)
        assert int(tree.tokens[0]) == 2
    asked, _, tree = requests(spec, rule, Budget(1, 9))
    assert asked == []
    assert len(tree) == 1


def test_nothing_is_left_to_chance() -> None:
    rule = cache(random_rule(5, 3))
    trees = [grown("graph:12", rule, SeededSampler(seed, 0)) for seed in range(3)]
    for tree in trees[1:]:
        assert torch.equal(tree.tokens, trees[0].tokens)
        assert tree.parents == trees[0].parents


@pytest.mark.parametrize(
    "spec",
    ["graph:0", "graph:8,width=0", "graph:8,depth=0", "graph:8,repeat=-2", "graph:8,sibling=2", "graph:8,leaf=-0.1"],
)
def test_a_graph_that_is_none_is_a_sentence(spec: str) -> None:
    with pytest.raises(UsageError, match="as in graph:24,width=4,depth=6"):
        TREES.build(spec)


@pytest.mark.parametrize("sigma", [0, 2])
@pytest.mark.parametrize("spec", ["graph:12,depth=4,repeat=0", "graph:8"])
def test_texts_are_those_of_plain_decoding(spec: str, sigma: int) -> None:
    assert_writes_like_plain_decoding(lambda truth: build_drafter(f"disturbed:{sigma}", spec), VERIFIERS.build("match"))


def test_its_one_tree_keeps_the_law_of_the_target() -> None:
    for seed in range(3):
        drafts = Drafts.grown(TREES.build(f"graph:5,repeat=0,{ALL}"), Instance.random(3, 2, 2, 1.0, (seed,)))
        assert len(drafts.trees) == 1
        distance, efficiency = emitted(VERIFIERS.build("match"), drafts)
        assert distance < 1e-9
        assert efficiency > 1
