"""Growth policies that draw: each with every verifier that accepts its draw, through every tree and every coin.

The policy is run by the enumerating audit, so what is proven is the code that drafts. Statistical tests use
`assert_law` of test_growth.py on fixed seeds; with fresh ones each would fail a sound policy once in 10,000 times.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from branchwise.audit.exact import TOLERANCE, emitted, lp_optimum
from branchwise.audit.instances import Drafts, Instance
from branchwise.audit.policies import ScriptedSampler, arrivals, grown_trees
from branchwise.core.batch import TreeBatch
from branchwise.core.tree import DraftTree, Draw
from branchwise.draft import TREES, build_policy
from branchwise.draft.base import Budget
from branchwise.draft.builder import TreeBuilder, TreeCoroutine, TreePolicy
from branchwise.draft.policies.dynamic import LEAST, MOST, Threshold
from branchwise.draft.sampler import DraftSampler, GreedySampler, NoReplacementSampler, SeededSampler
from branchwise.draft.sparse import SparseProbs
from branchwise.errors import UsageError
from branchwise.verify import VERIFIERS
from tests import slow_truth
from tests.strategies import Rule, as_truth, drafts_of, grown, random_rule, tokens_to, world
from tests.test_builder import assert_law

KINDS = ("plain", "ties", "zeros", "one-hot", "end")
WORLDS = {
    f"{kind}, V={V}, L={L}": world(slow_truth.Instance.random(V, L, 2, sigma=1.0, seed=seed, kind=kind))
    for (V, L), kind, seed in itertools.product([(3, 2), (2, 3)], KINDS, [7])
} | {"far, V=3, L=2": Instance.random(3, 2, 2, sigma=2.0, seed=(3,))}
POLICIES = [
    "chain:2",
    "paths:2x2",
    "paths:3x2@1",
    "paths:2x3@1",
    "iid:2,2",
    "iid:1,2,2",
    "rsd-c:2,2",
    "rsd-c:2,1,2",
    "rsd-s:2x3",
    "rsd-s:3x2",
    "dynamic:2",
    "dynamic:4",
    "dynamic:5",
    "threshold:0.3,5",
    "threshold:0.1,4",
    "threshold:0.01,6",
]
PLAIN = WORLDS["plain, V=3, L=2"]


def verifiers_for(draw: Draw) -> list[str]:
    """The lossless rules for a draw; `auto` is one of the others."""
    fitting = [name for name in VERIFIERS if draw in VERIFIERS.find(name).accepts]
    return [name for name in fitting if name != "auto" and getattr(VERIFIERS.find(name), "lossless", True)]


# Exactness


@pytest.mark.parametrize("where", WORLDS)
@pytest.mark.parametrize("spec", POLICIES)
def test_policy_and_verifier_together_keep_the_law_of_the_target(spec: str, where: str) -> None:
    policy = TREES.build(spec)
    drafts = Drafts.grown(policy, WORLDS[where])
    assert float(drafts.weights.sum()) == pytest.approx(1, abs=1e-12)
    names = verifiers_for(policy.draw)
    assert {"match", "rrs", "traversal"} <= set(names)
    for name in names:
        distance, efficiency = emitted(VERIFIERS.build(name), drafts)
        assert distance < TOLERANCE, name
        assert efficiency > 1 - 1e-12


@pytest.mark.parametrize("spec", ["paths:2x3@1", "rsd-s:2x3", "dynamic:6", "threshold:0.05,6"])
def test_a_budget_that_cuts_a_policy_short_keeps_it_exact(spec: str) -> None:
    instance = WORLDS["plain, V=2, L=3"]
    for nodes, depth in ((1, 3), (3, 3), (4, 3), (5, 2), (6, 3), (99, 1)):
        drafts = Drafts.grown(TREES.build(spec), instance, Budget(nodes, depth))
        assert drafts.batch.nodes <= nodes
        for name in ("rrs", "traversal"):
            assert emitted(VERIFIERS.build(name), drafts)[0] < TOLERANCE, (name, nodes, depth)


def test_no_verifier_passes_the_optimum_of_the_trees_of_a_policy() -> None:
    for spec in ("rsd-s:2x2", "dynamic:4", "threshold:0.1,4"):
        drafts = Drafts.grown(TREES.build(spec), PLAIN)
        best = max(emitted(VERIFIERS.build(name), drafts)[1] for name in ("match", "rrs", "traversal"))
        assert 1 < best <= lp_optimum(drafts) + 1e-7


@pytest.mark.parametrize("rule", [slow_truth.rrs, slow_truth.traversal])
@pytest.mark.parametrize("kind", ["plain", "ties"])
def test_a_leaf_drawn_from_what_is_left_changes_nothing_on_average(rule: slow_truth.Verifier, kind: str) -> None:
    # Why every policy that does not peek is exact, heaps and beams included: whatever tree there is, with one more leaf
    # behind its siblings the emitted text has on average the distribution that it has without. On given trees, so both
    # distributions are far from the target's.
    instance = slow_truth.Instance.random(3, 2, 1, sigma=1.0, seed=5, kind=kind)
    tree = ((1, 0), (2, 1))

    def probs(draft: slow_truth.Draft) -> np.ndarray:
        return np.array(list(slow_truth.emitted_probs(instance, rule, [(1.0, draft)]).probs.values()))

    for parent in ((), (1,), (2,)):
        left = instance.q[parent].copy()
        left[[prefix[len(parent)] for prefix in tree if prefix[: len(parent)] == parent]] = 0.0
        if left.any():
            more = sum(
                mass / left.sum() * probs((*tree, (*parent, token))) for token, mass in enumerate(left) if mass > 0
            )
            assert np.abs(more - probs(tree)).sum() < 1e-12


# Policies that peek


class Choosy(TreePolicy):
    """`rsd-c:2,1` that draws an unlikely token again: it looks at the token that it admits."""

    draw = Draw.WITHOUT_REPLACEMENT

    def grow(self, root: int, budget: Budget, sampler: DraftSampler) -> TreeCoroutine:
        tree, level = TreeBuilder([root]), [0]
        for _ in range(budget.depth):
            found = yield tree, level
            below = []
            for node, probs in zip(level, found.probs, strict=True):
                tree.probs[node] = probs
                first, second, *_ = sampler.order(probs, 3, node)
                likely = second if probs[first] < 0.25 else first
                below.append(tree.add(node, likely))
            level = below
        return tree.finish(self.draw)


class Reranked(TreePolicy):
    """Draws two children of every node, then keeps the two of a level that are most probable."""

    draw = Draw.WITHOUT_REPLACEMENT

    def grow(self, root: int, budget: Budget, sampler: DraftSampler) -> TreeCoroutine:
        tree, level, mass = TreeBuilder([root]), [0], {0: 1.0}
        for _ in range(budget.depth):
            found = yield tree, level
            drawn = []
            for node, probs in zip(level, found.probs, strict=True):
                tree.probs[node] = probs
                drawn += [(mass[node] * float(probs[token]), node, token) for token in sampler.order(probs, 2, node)]
            level = []
            for value, node, token in sorted(drawn, reverse=True)[:2]:
                level.append(tree.add(node, token))
                mass[level[-1]] = value
        return tree.finish(self.draw)


class Sorted(TreePolicy):
    """Draws as it should, and then puts the most probable sibling first."""

    draw = Draw.WITHOUT_REPLACEMENT

    def grow(self, root: int, budget: Budget, sampler: DraftSampler) -> TreeCoroutine:
        tree = TreeBuilder([root])
        found = yield tree, [0]
        tree.probs[0] = found.probs[0]
        for token in sorted(sampler.order(found.probs[0], 2, 0), key=lambda token: -float(found.probs[0][token])):
            tree.add(0, token)
        return tree.finish(self.draw)


class UntilTwo(TreePolicy):
    """Draws paths of one token until two of them differ, four at the most, and calls them independent."""

    draw = Draw.PATHS

    def grow(self, root: int, budget: Budget, sampler: DraftSampler) -> TreeCoroutine:
        tree, nodes, leaves = TreeBuilder([root]), dict[int, int](), list[int]()
        found = yield tree, [0]
        tree.probs[0] = found.probs[0]
        for turn in range(4):
            [token] = sampler.picks(found.probs[0], [turn])
            if token not in nodes:
                nodes[token] = tree.add(0, token)
            leaves.append(nodes[token])
            if len(nodes) == 2:
                break
        return tree.finish(self.draw, tuple(leaves))


@pytest.mark.parametrize(
    ("peeking", "name"),
    [
        (Choosy, "rrs"),
        (Choosy, "traversal"),
        (Reranked, "rrs"),
        (Reranked, "traversal"),
        (Sorted, "rrs"),
        (Sorted, "traversal"),
        (UntilTwo, "gbv"),
        (UntilTwo, "cascade"),
        (UntilTwo, "k-seq"),
    ],
)
def test_a_policy_that_peeks_at_the_token_it_admits_is_caught(peeking: type[TreePolicy], name: str) -> None:
    distances = []
    for seed in range(3):
        drafts = Drafts.grown(peeking(), Instance.random(3, 2, 2, sigma=1.0, seed=(seed,)))
        assert float(drafts.weights.sum()) == pytest.approx(1, abs=1e-12)
        distances.append(emitted(VERIFIERS.build(name), drafts)[0])
        assert emitted(VERIFIERS.build("match"), drafts)[0] < TOLERANCE, "match is exact for any tree"
    assert max(distances) > 1e-3


# The enumerator


def law_of(drafts: Drafts) -> dict[tuple[object, ...], float]:
    """How probable each tree is: the prefixes of its nodes, siblings in draw order, and the ends of its paths."""
    probs: Counter[tuple[object, ...]] = Counter()
    for tree, weight in zip(drafts.trees, drafts.weights.tolist(), strict=True):
        prefixes = [tuple(tokens_to(tree, node)) for node in range(len(tree))]
        below = tuple(sorted((prefixes[n], tuple(prefixes[c] for c in kids)) for n, kids in enumerate(tree.children)))
        probs[below, tuple(prefixes[leaf] for leaf in tree.leaves)] += weight
    return dict(probs)


@pytest.mark.parametrize("where", ["plain, V=3, L=2", "zeros, V=2, L=3", "one-hot, V=3, L=2"])
def test_the_trees_of_a_policy_have_the_law_that_drafts_are_written_down_with(where: str) -> None:
    instance, tail = WORLDS[where], ",1" * (WORLDS[where].depth - 1)
    for spec, kind in ((f"paths:2x{instance.depth}", "paths"), (f"rsd-c:2{tail}", "rsd-c")):
        assert law_of(Drafts.grown(TREES.build(spec), instance)) == pytest.approx(law_of(Drafts.of(kind, instance)))


@pytest.mark.parametrize("where", WORLDS)
@pytest.mark.parametrize("width", [1, 2, 3])
def test_beams_have_the_law_of_the_first_prefixes_of_a_permutation(where: str, width: int) -> None:
    truth = as_truth(WORLDS[where])
    truth = slow_truth.Instance(truth.V, truth.L, width, truth.p, truth.q)
    found = Drafts.grown(TREES.build(f"rsd-s:{width}x{truth.L}"), WORLDS[where])
    assert law_of(found) == pytest.approx(law_of(drafts_of(truth, slow_truth.rsd_s(truth), "rsd-c")))


def test_the_order_of_arrivals_is_that_of_all_leaves_drawn_without_replacement() -> None:
    # By brute force: every permutation of the nine leaves, and who is met first in it.
    expected: Counter[tuple[object, ...]] = Counter()
    leaves = list(itertools.product(range(3), repeat=2))
    masses = [float(PLAIN.draft_probs(())[s] * PLAIN.draft_probs((s,))[t]) for s, t in leaves]
    for order in itertools.permutations(range(9), 5):  # of five leaves two begin differently
        weight, left = 1.0, 1.0
        for leaf in order:
            weight, left = weight * masses[leaf] / left, left - masses[leaf]
        met = [leaves[leaf] for leaf in order]
        expected[tuple(dict.fromkeys(u[:1] for u in met))[:2], tuple(met[:2])] += weight
    found: Counter[tuple[object, ...]] = Counter()
    for weight, order in arrivals(PLAIN.draft_probs, 2, 2):
        found[tuple(dict.fromkeys(u[:1] for u in order))[:2], tuple(u for u in order if len(u) == 2)] += weight
    assert dict(found) == pytest.approx(dict(expected))


def test_a_policy_without_chance_has_one_tree() -> None:
    class Best(TreePolicy):
        draw = Draw.FIXED

        def grow(self, root: int, budget: Budget, sampler: DraftSampler) -> TreeCoroutine:
            tree = TreeBuilder([root])
            found = yield tree, [0]
            tree.add(0, int(found.probs[0].argmax()))
            return tree.finish(self.draw)

    drafts = Drafts.grown(Best(), PLAIN)
    assert drafts.weights.tolist() == [1.0]
    assert emitted(VERIFIERS.build("match"), drafts)[0] < TOLERANCE


def test_what_a_policy_learns_from_one_tree_does_not_reach_the_next() -> None:
    policy = Threshold(0.05, 3)
    drafts = Drafts.grown(policy, PLAIN)
    assert policy.threshold == 0.05
    assert law_of(drafts) == pytest.approx(law_of(Drafts.grown(Threshold(0.05, 3), PLAIN)))


def test_the_enumerator_refuses_what_it_cannot_follow() -> None:
    class Waiting(TreePolicy):
        draw = Draw.WITHOUT_REPLACEMENT

        def grow(self, root: int, budget: Budget, sampler: DraftSampler) -> TreeCoroutine:
            sampler.wait(0)
            yield TreeBuilder([root]), [0]
            raise AssertionError

    with pytest.raises(NotImplementedError, match="too many outcomes"):
        grown_trees(Waiting(), PLAIN.draft_probs, Budget(9, 2))
    with pytest.raises(AssertionError, match="asked twice for pick 3"):
        ScriptedSampler([]).picks(PLAIN.draft_probs(()), [3, 3])


# Stochastic beam search


@pytest.mark.parametrize(("where", "width"), [("plain, V=3, L=2", 2), ("plain, V=2, L=3", 3)])
def test_beams_that_are_drawn_have_the_law_of_the_brute_force(where: str, width: int) -> None:
    instance = WORLDS[where]
    spec = f"rsd-s:{width}x{instance.depth}"
    policy, rule = TREES.build(spec), cache(lambda prefix: instance.draft_probs(prefix).float())
    probs = {key: weight for (key, _), weight in law_of(Drafts.grown(policy, instance)).items()}
    names = {key: (number,) for number, key in enumerate(probs)}
    counts: Counter[tuple[int, ...]] = Counter()
    known: dict[tuple[object, ...], tuple[int, ...]] = {}  # of few trees, each is looked at once
    for seed in range(1000):
        tree = grown(policy, rule, SeededSampler(seed, 1))
        shape = tuple(tree.tokens.tolist()), tree.parents
        if shape not in known:
            [(key, _)] = law_of(one(tree, instance))
            known[shape] = names[key]
        counts[known[shape]] += 1
    assert_law(counts, {names[key]: weight for key, weight in probs.items()})


def one(tree: DraftTree, instance: Instance) -> Drafts:
    return Drafts(instance, [tree], torch.ones(1, dtype=torch.float64))


@pytest.mark.parametrize("sampler", [SeededSampler(3, 0), GreedySampler()])
def test_every_level_of_a_beam_is_full_and_costs_one_pass(sampler: DraftSampler) -> None:
    asked: list[list[int]] = []
    tree = grown("rsd-s:4x5", random_rule(6, 1), sampler, asked=asked)
    assert [len(level) for level in tree.topology.levels] == [1, 4, 4, 4, 4, 4]
    assert asked == tree.topology.levels[:-1], "one pass a level, for all of it"
    small = grown("rsd-s:4x3", random_rule(3, 1), sampler)  # three tokens can follow the root
    assert [len(level) for level in small.topology.levels] == [1, 3, 4, 4]


def test_a_smaller_budget_takes_levels_from_a_beam_and_never_nodes() -> None:
    for nodes, depth in itertools.product(range(1, 20), range(5)):
        tree = grown("rsd-s:3x4", random_rule(8, 2), SeededSampler(nodes, 0), Budget(nodes, depth))
        assert [len(level) for level in tree.topology.levels[1:]] == [3] * min(4, depth, (nodes - 1) // 3)


def test_beams_are_sound_where_masses_are_far_beyond_what_a_sum_can_tell() -> None:
    # The likeliest token has all but 1e-12 to 1e-30 of the mass: 1 - q would be 0, and all times infinite or equal.
    probs = torch.tensor([1.0, 1e-12, 2e-12, 1e-30, 0.0])
    seconds: Counter[int] = Counter()
    for seed in range(150):
        tree = grown("rsd-s:3x3", lambda prefix: probs, SeededSampler(seed, 0))
        assert [len(level) for level in tree.topology.levels] == [1, 3, 3, 3]
        assert tree.tokens[tree.topology.levels[1]].tolist()[0] == 0
        assert 4 not in tree.tokens[1:].tolist()
        seconds[int(tree.tokens[2])] += 1
    assert_law(Counter({(t,): n for t, n in seconds.items()}), {(1,): 1 / 3, (2,): 2 / 3, (3,): 0.0})


def test_a_sure_beam_begins_with_the_most_probable_path() -> None:
    rule = random_rule(6, 4)
    tree, path = grown("rsd-s:3x3", rule, GreedySampler()), list[int]()
    for _ in range(3):
        path.append(int(rule(tuple(path)).argmax()))
    assert path in [tokens_to(tree, node) for node in tree.topology.levels[3]]


# Dynamic trees


def slots_of(tree: DraftTree, rule: Rule) -> list[list[float]]:
    """For every node the values of the slots below it: those that its children were drawn in, and one still open."""
    values, slots = {0: 1.0}, []
    for node, children in enumerate(tree.children):
        probs, own = rule(tuple(tokens_to(tree, node))).double(), [values[node]]
        for child in children:
            share = float(probs[tree.tokens[child]] / probs.sum())
            values[child] = own[-1] * share
            own.append(own[-1] * (1 - share))
            probs[tree.tokens[child]] = 0.0
        slots.append(own)
    return slots


def drawn_and_open(tree: DraftTree, rule: Rule, nodes: list[int]) -> tuple[list[float], list[float]]:
    slots = slots_of(tree, rule)
    return [value for node in nodes for value in slots[node][:-1]], [slots[node][-1] for node in nodes]


@pytest.mark.parametrize("seed", range(8))
def test_a_dynamic_tree_draws_in_the_most_valuable_slots(seed: int) -> None:
    rule = cache(random_rule(5, seed))
    for depth in (2, 99):
        tree = grown("dynamic:12", rule, SeededSampler(seed, 0), Budget(99, depth))
        assert len(tree) == 13
        inner = [node for node, level in enumerate(tree.topology.depths) if level < depth]
        drawn, still = drawn_and_open(tree, rule, inner)
        assert len(drawn) == 12
        assert min(drawn) >= max(still) - 1e-12


def test_a_dynamic_tree_has_as_many_nodes_as_wanted_or_as_fit() -> None:
    rule = cache(random_rule(7, 3))
    for nodes, depth in itertools.product(range(1, 14), range(4)):
        tree = grown("dynamic:9", rule, SeededSampler(nodes, 0), Budget(nodes, depth))
        room = sum(7**level for level in range(1, depth + 1))
        assert len(tree) - 1 == min(9, nodes - 1, room)


@pytest.mark.parametrize("seed", range(8))
def test_a_dynamic_tree_asks_for_each_law_once_and_for_many_in_a_pass(seed: int) -> None:
    asked: list[list[int]] = []
    tree = grown("dynamic:24", random_rule(5, seed, spread=1.5), SeededSampler(seed, 0), asked=asked)
    every = [node for nodes in asked for node in nodes]
    assert len(set(every)) == len(every) <= 24
    assert tree.depth <= len(asked) < 24
    assert max(map(len, asked)) > 1
    assert len(asked) <= 2.5 * tree.depth


def test_a_sure_chain_takes_a_pass_for_every_node() -> None:
    asked: list[list[int]] = []
    tree = grown("dynamic:6", lambda prefix: torch.tensor([0.0, 1.0]), SeededSampler(0, 0), asked=asked)
    assert tree.depth == 6
    assert asked == [[0], [1], [2], [3], [4], [5]]


def test_slots_of_equal_value_are_served_in_the_order_in_which_they_came() -> None:
    # A coin toss leaves two slots of one value: below the new node, and beside it. The one below is the elder.
    tree = grown("dynamic:2", lambda prefix: torch.tensor([0.5, 0.5]), SeededSampler(1, 0))
    assert tree.parents == (-1, 0, 1)


# Thresholds


@pytest.mark.parametrize("seed", range(8))
def test_exactly_the_slots_of_enough_value_are_drawn_in(seed: int) -> None:
    rule, asked = cache(random_rule(5, seed)), list[list[int]]()
    tree = grown("threshold:0.04,999", rule, SeededSampler(seed, 0), Budget(9999, 99), asked=asked)
    drawn, still = drawn_and_open(tree, rule, list(range(len(tree))))
    assert min(drawn) >= 0.04 > max(still)
    assert len(asked) == sum(any(tree.children[node] for node in level) for level in tree.topology.levels)


def test_a_cap_leaves_out_what_is_least_valuable_in_its_layer() -> None:
    rule, cut = cache(random_rule(6, 3, spread=0.5)), 0
    for seed in range(10):
        tree = grown("threshold:0.02,12", rule, SeededSampler(seed, 0))
        assert len(tree) == 13
        drawn, still = drawn_and_open(tree, rule, tree.topology.levels[1])
        cut += len(drawn) > 2 and max(still) > 0.02
        if drawn:
            assert min(drawn) > max(still) or max(still) < 0.02
    assert cut > 3, "the cap has to fall into a layer, or nothing was tested"


def test_the_threshold_falls_when_trees_are_small_and_rises_when_they_are_cut() -> None:
    sure = torch.tensor([1.0, 0.0])
    policy = Threshold(0.25, 8)
    grown(policy, lambda prefix: torch.full((4,), 0.25), SeededSampler(0, 0))
    # Four slots of value 1, 3/4, 1/2 and 1/4 at the root, and of 1/4 below each of its children: eight nodes.
    assert policy.threshold == 0.25
    policy = Threshold(0.3, 12)
    grown(policy, lambda prefix: torch.full((4,), 0.25), SeededSampler(0, 0))
    assert policy.threshold == pytest.approx(0.3 * math.sqrt(3 / 12))
    policy = Threshold(0.25, 6)
    grown(policy, lambda prefix: torch.full((4,), 0.25), SeededSampler(0, 0))
    assert policy.threshold == pytest.approx(0.25 * math.sqrt(8 / 6)), "two slots were left unserved"
    policy = Threshold(MOST, 1)
    grown(policy, lambda prefix: sure, SeededSampler(0, 0))
    assert policy.threshold == MOST
    policy = Threshold(LEAST * 1.5, 999)
    grown(policy, lambda prefix: torch.tensor([0.5, 0.5]) if not prefix else sure, SeededSampler(0, 0), Budget(9999, 9))
    assert policy.threshold == LEAST * 1.5, "a tree that the depth cut says nothing"


def test_a_tree_that_its_budget_cut_short_does_not_steer() -> None:
    for budget in (Budget(5, 99), Budget(1, 99), Budget(99, 1), Budget(99, 0)):
        policy = Threshold(0.05, 12)
        grown(policy, random_rule(5, 1), SeededSampler(0, 0), budget)
        assert policy.threshold == 0.05


def test_a_tree_is_begun_and_ended_with_one_threshold() -> None:
    # Texts share the growth: one that ends must not change what another is in the middle of.
    policy, rule = Threshold(0.1, 30), random_rule(5, 2)

    def meanwhile(prefix: tuple[int, ...]) -> Tensor:
        policy.threshold = 0.9
        return rule(prefix)

    alone = grown(Threshold(0.1, 30), rule, SeededSampler(5, 0))
    assert alone.depth > 1
    assert torch.equal(grown(policy, meanwhile, SeededSampler(5, 0)).tokens, alone.tokens)


def test_the_controller_steers_to_the_wanted_size() -> None:
    for start in (0.5, 1e-4):
        policy = Threshold(start, 24)
        sizes = [len(grown(policy, random_rule(12, seed), SeededSampler(seed, 0))) - 1 for seed in range(60)]
        assert 16 < np.mean(sizes[20:]) <= 24
        assert 0.002 < policy.threshold < 0.2


# Delayed branching


@pytest.mark.parametrize("seed", range(5))
def test_delayed_paths_have_one_beginning_and_k_ends(seed: int) -> None:
    tree = grown("paths:4x5@2", random_rule(30, seed, spread=0.5), SeededSampler(seed, 0))
    assert tree.draw is Draw.WITHOUT_REPLACEMENT
    assert not tree.leaves
    widths = [len(level) for level in tree.topology.levels]
    assert widths[:3] == [1, 1, 1]
    assert 1 < widths[3] <= 4
    assert widths[3] <= widths[4] <= widths[5] <= 4
    assert len(tree) <= 1 + 2 + 4 * 3


def test_how_deep_delayed_paths_are_depends_on_the_budget_alone() -> None:
    rule = cache(random_rule(3, 3))
    for nodes, depth, deep in (
        (3, 9, 2),
        (2, 9, 1),
        (5, 9, 2),
        (6, 9, 3),
        (8, 9, 3),
        (9, 9, 4),
        (99, 3, 3),
        (99, 9, 5),
    ):
        depths = {grown("paths:3x5@2", rule, SeededSampler(seed, 0), Budget(nodes, depth)).depth for seed in range(20)}
        assert depths == {deep}


def test_one_path_is_a_chain_wherever_it_would_branch() -> None:
    tree = grown("paths:1x4@2", random_rule(5, 1), SeededSampler(0, 0))
    assert tree.draw is Draw.PATHS
    assert len(tree.leaves) == 1
    chain = grown("chain:4", random_rule(5, 1), SeededSampler(0, 0))
    assert torch.equal(tree.tokens, chain.tokens)


# Urns


@pytest.mark.parametrize("few", [False, True])
def test_what_is_left_in_an_urn_is_summed_and_not_subtracted(few: bool) -> None:
    masses = {0: 1.0, 1: 3e-20, 2: 1e-20}
    probs = SparseProbs(masses, 3, torch.device("cpu")) if few else torch.tensor(list(masses.values()))
    urn, tiny = NoReplacementSampler(probs, 0), pytest.approx(4e-20, rel=1e-6, abs=0)
    assert urn.draw(GreedySampler(), 0) == (0, 1.0, tiny)
    assert urn.mass == tiny
    token, share, rest = urn.draw(GreedySampler(), 1)
    assert (token, share, rest) == (1, pytest.approx(0.75), pytest.approx(0.25))
    assert urn.draw(GreedySampler(), 2)[2] == 0.0
    kept = list(probs.masses.values()) if isinstance(probs, SparseProbs) else probs.tolist()
    assert kept == pytest.approx([1.0, 3e-20, 1e-20], rel=1e-6, abs=0), "the distribution itself is the q of the tree"


@pytest.mark.parametrize("sampler", [SeededSampler(3, 5), GreedySampler()], ids=["sampled", "greedy"])
@pytest.mark.parametrize("turns", [1, 2, 6])
def test_an_urn_that_was_opened_gives_what_one_gives_that_is_drawn_from_turn_by_turn(
    sampler: DraftSampler, turns: int
) -> None:
    """Also behind the turns made beforehand. Caught here: noise of another turn, and tokens that come twice."""
    probs = torch.rand(2, 700, generator=torch.Generator().manual_seed(turns)) ** 8
    probs[1, 5:] = 0.0
    for row, node, opening in zip(probs, (4, 9), sampler.openings(probs, turns, [4, 9]), strict=True):
        urn, told = NoReplacementSampler(row, node), NoReplacementSampler(row, node, opening)
        for number in range(5):
            token, share, rest = urn.draw(sampler, number)
            found = told.draw(sampler, number)
            assert found.token == token
            assert found == (token, pytest.approx(share, rel=1e-12), pytest.approx(rest, rel=1e-12))
            assert told.mass == pytest.approx(urn.mass, rel=1e-12)
        assert (told.mass == 0) == (node == 9), "five tokens are all that the second distribution has"


@given(st.integers(1, 5), st.integers(1, 4), st.integers(0, 99))
def test_the_pad_shape_of_a_beam_holds_whatever_it_draws(width: int, length: int, seed: int) -> None:
    policy = build_policy(f"rsd-s:{width}x{length}")
    tree = grown(f"rsd-s:{width}x{length}", random_rule(9, seed), SeededSampler(seed, 1), Budget(99, 9))
    shape = policy.pad_shape
    batch = TreeBatch([tree], pad_shape=shape)
    assert batch.nodes == shape.nodes
    assert batch.q is not None
    assert max(batch.q.shape[1], shape.inner) == shape.inner
    assert batch.children.shape[2] == shape.children
    assert batch.levels.shape[2] == shape.width
    assert batch.forks.shape[1] == shape.forks


# Specs


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("rsd-s:0x3", "such as rsd-s:4x6, not rsd-s:0x3"),
        ("rsd-s:3x0", "such as rsd-s:4x6, not rsd-s:3x0"),
        ("rsd-s:4", "such as rsd-s:4x6, not rsd-s:4"),
        ("rsd-s", "needs 'shape'"),
        ("dynamic:0", "at least 1 node, such as dynamic:24, not 0"),
        ("dynamic:x", "takes nodes as int, not 'x'"),
        ("threshold:2,8", "between 0 and 1"),
        ("threshold:0,8", "between 0 and 1"),
        ("threshold:0.1,0", "1 node or more"),
        ("paths:4", "such as paths:4x6, not paths:4"),
        ("paths:2x3@3", "at most 2 can be common, not 3"),
        ("paths:2x3@", "such as paths:4x6"),
    ],
)
def test_a_spec_that_makes_no_tree_is_refused_in_one_sentence(spec: str, said: str) -> None:
    with pytest.raises(UsageError, match=said) as refused:
        TREES.build(spec)
    assert str(refused.value).count(". ") == 0
    assert str(refused.value).endswith(".")
