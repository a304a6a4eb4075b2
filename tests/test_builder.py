"""Growing trees by drawing: paths are independent, siblings are distinct, q is what was drawn from, and texts keep
their distribution.

Statistical tests run on fixed seeds, so they always give the same answer. `FALSE_ALARM` is how often each would have
failed for a sound drafter had the seeds been fresh.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor

from branchwise.backends.base import Scored
from branchwise.core.batch import TreeBatch
from branchwise.core.rng import SeededChance
from branchwise.core.sampling import SamplingParams
from branchwise.core.sequence import SequenceState as Text
from branchwise.core.tree import DraftTree, Draw
from branchwise.draft import TREES, build_drafter
from branchwise.draft.base import Budget, Drafter
from branchwise.draft.builder import NodeProbs, TreeBuilder, grow_with
from branchwise.draft.noisy_target import NoisyTarget
from branchwise.draft.sampler import SeededSampler
from branchwise.engine import Engine, Request
from branchwise.errors import PairingError, UsageError
from branchwise.testing import ToyTarget
from branchwise.verify import VERIFIERS
from tests.slow_truth import without_replacement
from tests.strategies import Rule, grown, random_rule, tokens_to

FALSE_ALARM = 1e-4
MANY = 1500
TEXTS = 800


def chance(seed: int, root: int = 0) -> SeededSampler:
    return SeededSampler(seed, root)


def remembered(rule: Rule) -> Rule:
    return cache(rule)


def assert_law(counts: Counter[tuple[int, ...]], probs: dict[tuple[int, ...], float]) -> None:
    """Chi-square; cells with less than five expected draws are pooled."""
    total = sum(counts.values())
    assert not set(counts) - {cell for cell, mass in probs.items() if mass > 0}, "something impossible was drawn"
    large = [cell for cell, mass in probs.items() if mass * total >= 5]
    found = [counts[cell] for cell in large] + [total - sum(counts[cell] for cell in large)]
    goal = np.array([probs[cell] * total for cell in large] + [total - sum(probs[cell] * total for cell in large)])
    if goal[-1] < 5:  # too rare for a cell of its own
        goal[-2] += goal[-1]
        found[-2:] = [found[-2] + found[-1]]
        goal = goal[:-1]
    assert stats.chisquare(found, goal * (sum(found) / goal.sum())).pvalue > FALSE_ALARM


# Paths


def test_paths_are_independent_draws_of_full_depth() -> None:
    rule = remembered(random_rule(3, 5, spread=1.0))
    counts: Counter[tuple[int, ...]] = Counter()
    for seed in range(MANY):
        tree = grown("paths:2x2", rule, chance(seed))
        counts[tuple(token for leaf in tree.leaves for token in tokens_to(tree, leaf))] += 1
    one = {(s, t): float(rule(())[s] * rule((s,))[t]) for s, t in itertools.product(range(3), repeat=2)}
    both = {x + y: mass * other for (x, mass), (y, other) in itertools.product(one.items(), repeat=2)}
    assert_law(counts, both)


@given(st.integers(1, 5), st.integers(1, 4), st.integers(0, 500))
def test_paths_are_merged_where_they_agree_and_keep_their_draws(count: int, length: int, seed: int) -> None:
    tree = grown(f"paths:{count}x{length}", random_rule(2, seed, spread=1.0), chance(seed))
    assert tree.draw is Draw.PATHS
    assert len(tree.leaves) == count
    assert tree.depth == length
    prefixes = [tuple(tokens_to(tree, node)) for node in range(len(tree))]
    assert len(set(prefixes)) == len(tree)
    drawn = [tuple(tokens_to(tree, leaf)) for leaf in tree.leaves]
    assert set(prefixes) == {path[:n] for path in drawn for n in range(length + 1)}
    for node, children in enumerate(tree.children):  # in the order in which paths first reach them
        through = [path[: len(prefixes[node]) + 1] for path in drawn if path[: len(prefixes[node])] == prefixes[node]]
        assert [prefixes[child] for child in children] == [u for u in dict.fromkeys(through) if u != prefixes[node]]


@pytest.mark.parametrize(
    "spec",
    [
        "paths:3x3",
        "paths:1x4",
        "paths:3x3@1",
        "rsd-c:3,2,1",
        "rsd-c:1,1,1",
        "rsd-s:3x3",
        "dynamic:9",
        "threshold:0.05,9",
    ],
)
def test_q_is_the_very_law_that_the_children_of_a_node_were_drawn_from(spec: str) -> None:
    for seed in range(10):
        rule = remembered(random_rule(4, seed))
        tree = grown(spec, rule, chance(seed))
        assert tree.q is not None
        for node, children in enumerate(tree.children):
            if children:
                assert torch.equal(tree.q[node], rule(tuple(tokens_to(tree, node))))


@pytest.mark.parametrize("spec", ["paths:4x3", "paths:4x3@1", "rsd-c:3,2,1", "threshold:0.04,99"])
def test_every_node_is_expanded_once_and_level_by_level(spec: str) -> None:
    rule, growing = random_rule(3, 1), TREES.build(spec).grow(0, Budget(99, 9), chance(1))
    asked: list[int] = []

    def look(sapling: TreeBuilder, nodes: list[int]) -> NodeProbs:
        assert all(node < len(sapling) for node in nodes)
        asked.extend(nodes)
        return NodeProbs(torch.stack([rule(tuple(tokens_to(sapling, node))) for node in nodes]))

    tree = grow_with(growing, look)
    assert asked == sorted(set(asked))
    assert asked == [node for node, children in enumerate(tree.children) if children]


# Siblings


def test_siblings_come_in_the_order_of_draws_without_replacement() -> None:
    rule = remembered(random_rule(4, 9, spread=1.0))
    counts: Counter[tuple[int, ...]] = Counter()
    for seed in range(MANY):
        tree = grown("rsd-c:2,1", rule, chance(seed))
        first = [int(tree.tokens[child]) for child in tree.children[0]]
        below = [int(tree.tokens[tree.children[child][0]]) for child in tree.children[0]]
        counts[(*first, *below)] += 1
    probs = {}
    for mass, (s, t) in without_replacement(rule(()).double().numpy(), 2):
        for x, y in itertools.product(range(4), repeat=2):
            probs[s, t, x, y] = mass * float(rule((s,))[x] * rule((t,))[y])
    assert_law(counts, probs)


@given(st.lists(st.integers(1, 4), min_size=1, max_size=3), st.integers(0, 500))
def test_siblings_are_distinct_and_as_many_as_asked_for_or_as_can_be_drawn(branching: list[int], seed: int) -> None:
    def rule(prefix: tuple[int, ...]) -> Tensor:  # of three tokens one may be impossible
        probs = random_rule(3, seed)(prefix)
        return probs * torch.tensor([1.0, 1.0, float(len(prefix) % 2)])

    tree = grown("rsd-c:" + ",".join(map(str, branching)), rule, chance(seed))
    assert tree.draw is Draw.WITHOUT_REPLACEMENT
    for node, children in enumerate(tree.children):
        depth = tree.topology.depths[node]
        tokens = [int(tree.tokens[child]) for child in children]
        possible = int((rule(tuple(tokens_to(tree, node))) > 0).sum())
        assert len(tokens) == len(set(tokens)) == (min(branching[depth], possible) if depth < len(branching) else 0)
        assert all(rule(tuple(tokens_to(tree, node)))[token] > 0 for token in tokens)


def test_a_sibling_is_never_drawn_from_masses_that_float32_cannot_divide_by() -> None:
    # Once the certain token is drawn, the rest of a very peaked distribution is all there is. A verifier divides by its
    # sum, and 1 / 1e-39 is too large for float32. What is not drawn must not be in q either.
    probs = torch.tensor([1.0, 2e-39, 1e-39, 1e-25, 0.0])
    tree = grown("rsd-c:4", lambda prefix: probs, chance(0))
    assert tree.tokens[1:].tolist() == [0, 3]
    assert tree.q is not None
    assert tree.q[0, [0, 3]].tolist() == probs[[0, 3]].tolist()
    assert tree.q[0, [1, 2, 4]].tolist() == [0, 0, 0]


# Budgets


@pytest.mark.parametrize(
    "spec",
    [
        "paths:1x4",
        "paths:3x2",
        "paths:4x6",
        "paths:3x5@2",
        "rsd-c:4",
        "rsd-c:2,2,1",
        "rsd-c:1,1,1,1",
        "rsd-s:3x4",
        "rsd-s:1x6",
        "dynamic:12",
        "threshold:0.02,12",
    ],
)
def test_every_budget_is_kept(spec: str) -> None:
    policy, rule = TREES.build(spec), remembered(random_rule(3, 2))
    for nodes, depth in itertools.product(range(1, 30), range(7)):
        tree = grown(spec, rule, chance(nodes + depth), Budget(nodes, depth), root=2)
        assert len(tree) <= nodes
        assert tree.depth <= depth
        assert int(tree.tokens[0]) == 2
        assert tree.draw is policy.draw
        if policy.draw is Draw.PATHS and len(tree) > 1:
            assert len(tree.leaves) == policy.count, "how many paths there are never depends on the budget"


def test_how_deep_paths_are_depends_on_the_budget_alone() -> None:
    # Not on how many nodes merged: stopping when the draws have enough distinct nodes would make them no draws.
    rule = remembered(random_rule(2, 3, spread=3.0))
    for nodes, depth in ((7, 9), (9, 9), (99, 2)):
        depths = {grown("paths:3x4", rule, chance(seed), Budget(nodes, depth)).depth for seed in range(40)}
        assert depths == {min(4, depth, (nodes - 1) // 3)}


@pytest.mark.parametrize("spec", ["paths:0x3", "paths:3x0", "paths:3", "paths:x", "paths:-1x2", "paths:2x3x4"])
def test_a_shape_of_paths_that_is_none_is_refused(spec: str) -> None:
    with pytest.raises(UsageError, match=r"paths:KxL, such as paths:4x6"):
        TREES.build(spec)


@pytest.mark.parametrize("spec", ["rsd-c", "rsd-c:0", "rsd-c:2,0,1", "rsd-c:-1"])
def test_branching_that_is_none_is_refused(spec: str) -> None:
    with pytest.raises(UsageError, match="such as rsd-c:4,2,1"):
        TREES.build(spec)


# The disturbed target


class Remembered(ToyTarget):
    """A toy target that works out each distribution once."""

    def __init__(self, vocabulary: int, **options: int) -> None:
        super().__init__(vocabulary, **options)
        self.logits = cache(lambda tokens: ToyTarget.logits(self, tokens))  # type: ignore[method-assign]

    def score(self, sequences: Sequence[Text], batch: TreeBatch) -> Scored:
        logits, self.logits = self.logits, lambda tokens: logits(tuple(tokens))  # type: ignore[method-assign]
        try:
            return super().score(sequences, batch)
        finally:
            self.logits = logits  # type: ignore[method-assign]


def drafted(drafter: Drafter, texts: Sequence[Text], budget: Budget | None = None) -> list[DraftTree]:
    target = ToyTarget(5, slots=len(texts))
    drafter.bind(target.info)
    for text in texts:
        target.open(text)
    return drafter.draft(texts, [budget or Budget(64, 9)] * len(texts))


@pytest.mark.parametrize("tree", ["paths:3x3", "rsd-c:3,2"])
def test_undisturbed_it_draws_from_the_target_s_own_law(tree: str) -> None:
    drafter = build_drafter("disturbed:0", tree)
    for temperature in (1.0, 0.5):
        text = Text([1, 2], SamplingParams(temperature=temperature, seed=3))
        [found] = drafted(drafter, [text])
        assert found.q is not None
        for node, children in enumerate(found.children):
            if children:
                logits = ToyTarget(5).logits([1, 2, *tokens_to(found, node)])
                assert torch.allclose(found.q[node], torch.softmax(logits / temperature, dim=-1), atol=1e-7)


def test_the_more_it_is_disturbed_the_farther_q_is_from_p() -> None:
    def distance(sigma: float) -> float:
        texts = [Text([1, n % 5, n // 5], SamplingParams(temperature=1.0, seed=n)) for n in range(20)]
        trees = drafted(build_drafter(f"disturbed:{sigma}", "paths:1x1"), texts)
        probs = [torch.softmax(ToyTarget(5).logits(text.tokens), dim=-1) for text in texts]
        return float(np.mean([(tree.q[0] - p).abs().sum() / 2 for tree, p in zip(trees, probs, strict=True)]))  # type: ignore[index]

    assert distance(0) < 1e-6
    assert distance(0.3) < distance(1) < distance(3)


def test_what_disturbs_a_law_belongs_to_the_text_before_it() -> None:
    # Not to the step, the tree or the seed: else the distribution of a prefix would depend on how it was reached.
    texts = [Text([1, 2, 3], SamplingParams(temperature=1.0, seed=seed)) for seed in range(30)]
    probs: dict[tuple[int, ...], Tensor] = {}
    for tree in drafted(build_drafter("disturbed:1", "paths:2x2"), texts):
        for node, children in enumerate(tree.children):
            if children:
                row = tree.q[node]  # type: ignore[index]
                assert torch.equal(probs.setdefault(tuple(tokens_to(tree, node)), row), row)
    assert len(probs) > 3
    noises = [row.log() - ToyTarget(5).logits([1, 2, 3, *prefix]).log_softmax(-1) for prefix, row in probs.items()]
    centred = [noise - noise.mean() for noise in noises]
    for n, noise in enumerate(centred):
        assert not any(torch.allclose(noise, other, atol=1e-3) for other in centred[:n])


def test_sequences_are_drafted_for_together_as_alone() -> None:
    texts = [Text([1 + n, 2], SamplingParams(temperature=1.0, seed=n)) for n in range(3)]
    for spec in ("paths:3x3", "rsd-c:3,2,1"):
        together = drafted(build_drafter("disturbed", spec), texts)
        for text, tree in zip(texts, together, strict=True):
            [alone] = drafted(build_drafter("disturbed", spec), [text])
            assert torch.equal(alone.tokens, tree.tokens)
            assert (alone.parents, alone.leaves) == (tree.parents, tree.leaves)
            assert torch.equal(alone.q, tree.q)  # type: ignore[arg-type]


def test_sequences_with_different_budgets_are_drafted_for_together() -> None:
    target = ToyTarget(5, slots=3)
    texts = [Text([n, 2], SamplingParams(temperature=1.0, seed=n)) for n in range(3)]
    drafter = build_drafter("disturbed", "paths:2x3")
    drafter.bind(target.info)
    for text in texts:
        target.open(text)
    trees = drafter.draft(texts, [Budget(64, 3), Budget(1, 0), Budget(64, 1)])
    assert [tree.depth for tree in trees] == [3, 0, 1]
    assert [int(tree.tokens[0]) for tree in trees] == [2, 2, 2]


def test_a_step_costs_a_pass_for_every_level_of_the_draft() -> None:
    target = ToyTarget(5, slots=4)
    drafter = build_drafter("disturbed", "paths:3x4")
    drafter.bind(target.info)
    texts = [Text([n, 2], SamplingParams(temperature=1.0, seed=n)) for n in range(4)]
    for text in texts:
        target.open(text)
    drafter.draft(texts, [Budget(64, 9)] * 4)
    assert target.passes == 4


def test_it_draws_paths_unless_told_otherwise() -> None:
    drafter = build_drafter("disturbed")
    assert isinstance(drafter, NoisyTarget)
    assert (drafter.draw, drafter.sigma) == (Draw.PATHS, 1.0)
    assert build_drafter("disturbed:2", "rsd-c:2").draw is Draw.WITHOUT_REPLACEMENT


def test_what_cannot_draw_is_refused() -> None:
    with pytest.raises(PairingError, match="'none' grows no tree; leave out --tree"):
        build_drafter("none", "paths:2x2")
    with pytest.raises(UsageError, match="sigma of at least 0, not -1"):
        build_drafter("disturbed:-1")
    with pytest.raises(PairingError, match="'block' is not exact"):
        Engine(ToyTarget(5), build_drafter("disturbed", "rsd-c:2"), VERIFIERS.build("block"))


# Through the engine


VOCABULARY, LENGTH, PROMPT = 3, 3, (1, 0)
PAIRS = [
    (name, spec)
    for name in VERIFIERS
    for spec in ("paths:2x2", "rsd-c:2,1")
    if TREES.build(spec).draw in VERIFIERS.find(name).accepts
] + [("rrs", "paths:2x2@1"), ("traversal", "rsd-s:2x2"), ("rrs", "dynamic:3"), ("traversal", "threshold:0.2,3")]
DEEP = {
    "paths:2x2": "paths:3x4",
    "paths:2x2@1": "paths:3x4@1",
    "rsd-c:2,1": "rsd-c:3,2,1,1",
    "rsd-s:2x2": "rsd-s:3x4",
    "dynamic:3": "dynamic:9",
    "threshold:0.2,3": "threshold:0.05,9",
}
"""for each a larger one"""
pairs = pytest.mark.parametrize(("name", "spec"), PAIRS, ids=[f"{name} on {spec}" for name, spec in PAIRS])


def texts(
    name: str, spec: str, requests: Sequence[Request], slots: int, vocabulary: int = VOCABULARY
) -> list[list[int]]:
    engine = Engine(
        Remembered(vocabulary, slots=slots),
        build_drafter("disturbed:1", spec) if spec != "none" else build_drafter("none"),
        VERIFIERS.build(name),
    )
    generations = [engine.submit(request) for request in requests]
    while engine.busy:
        engine.step()
    return [generation.token_ids for generation in generations]


def sampled(seeds: Sequence[int], length: int = LENGTH, temperature: float = 1.0) -> list[Request]:
    params = (SamplingParams(temperature=temperature, seed=seed) for seed in seeds)
    return [Request(PROMPT, p, max_new_tokens=length) for p in params]


@cache
def target_law() -> dict[tuple[int, ...], float]:
    probs, target = {}, ToyTarget(VOCABULARY)
    for text in itertools.product(range(VOCABULARY), repeat=LENGTH):
        rows = [torch.softmax(target.logits((*PROMPT, *text[:n])).double(), dim=-1) for n in range(LENGTH)]
        probs[text] = float(np.prod([row[token] for row, token in zip(rows, text, strict=True)]))
    return probs


@pairs
def test_short_texts_have_the_law_of_the_target(name: str, spec: str) -> None:
    found = texts(name, spec, sampled(range(TEXTS)), slots=200)
    assert_law(Counter(map(tuple, found)), target_law())


def test_the_law_of_short_texts_would_show_a_bias() -> None:
    # The same test on texts of another temperature: what it can tell apart, it does.
    found = texts("block", "paths:2x2", sampled(range(TEXTS), temperature=1.3), slots=200)
    with pytest.raises(AssertionError):
        assert_law(Counter(map(tuple, found)), target_law())


@pairs
def test_greedy_texts_are_those_of_plain_decoding(name: str, spec: str) -> None:
    prompts = [(1, 2, 3), (4,), (0, 0)]
    requests = [Request(prompt, SamplingParams(), max_new_tokens=25) for prompt in prompts]
    plain = texts("match", "none", requests, slots=2, vocabulary=6)
    assert texts(name, spec, requests, slots=2, vocabulary=6) == plain


@pairs
def test_a_greedy_text_is_that_of_plain_decoding_beside_sampled_ones(name: str, spec: str) -> None:
    requests = [
        Request((1, 2, n), SamplingParams(temperature=0.0 if n % 2 else 1.0, seed=n), max_new_tokens=20)
        for n in range(5)
    ]
    plain = texts("match", "none", requests[1::2], slots=4, vocabulary=6)
    assert texts(name, spec, requests, slots=4, vocabulary=6)[1::2] == plain


@pytest.mark.parametrize(("name", "spec"), [(name, spec) for name, spec in PAIRS if spec in DEEP])
def test_a_text_does_not_depend_on_the_texts_beside_it(name: str, spec: str) -> None:
    # They differ in length, so that near their ends budgets do, and with them the depth of their trees.
    deep = DEEP[spec]
    requests = [Request((1, n % 3), SamplingParams(temperature=1.0, seed=n), max_new_tokens=5 + n) for n in range(8)]
    alone = [texts(name, deep, [request], slots=1)[0] for request in requests]
    assert texts(name, deep, requests, slots=4) == alone


@pytest.mark.parametrize("spec", ["paths:3x3", "paths:3x3@1", "rsd-c:3,2", "rsd-s:3x3", "dynamic:6", "threshold:0.1,6"])
def test_with_match_sampled_texts_are_those_of_plain_decoding_seed_for_seed(spec: str) -> None:
    requests = sampled(range(8), length=20)
    assert texts("match", spec, requests, slots=4) == texts("match", "none", requests, slots=4)


@pytest.mark.parametrize(
    ("name", "spec"), [("block", "paths:1x4"), ("mss", "paths:3x4"), ("traversal", "rsd-c:3,1,1,1")]
)
def test_an_undisturbed_drafter_is_accepted_to_the_last_token(name: str, spec: str) -> None:
    engine = Engine(Remembered(4, slots=4), build_drafter("disturbed:0", spec), VERIFIERS.build(name))
    generations = [engine.submit(request) for request in sampled(range(4), length=40)]
    while engine.busy:
        engine.step()
    for generation in generations:
        assert generation.stats.steps == 40 // 5


MET = {"chain", "paths", "rsd-c", "rsd-s", "dynamic", "threshold"}
ELSEWHERE = {
    "topk": "test_topk.py",
    "template": "test_template.py",
    "graph": "test_graph.py",
    "ranks": "test_ranks.py",
    "fork-lossy": "*.py",
    "iid": "test_with_replacement.py",
    "puct": "test_puct.py",
    "paced": "test_adaptive_size.py",
    "paced-ranks": "test_adaptive_ranks.py",
}


def test_growths_of_the_registry_are_all_met_here() -> None:
    assert set(TREES) == MET | set(ELSEWHERE)
    for name, file in ELSEWHERE.items():
        pages = Path(__file__).parent.glob(file)
        assert any(f"{name}:" in page.read_text() for page in pages if page.name != Path(__file__).name), name


def test_the_noise_of_a_draft_is_not_that_of_its_verdict() -> None:
    # Catches a drafter that draws with the verifier's keys: then the verdict would know what was drafted.
    rng = random.Random(1)
    probs = torch.softmax(torch.tensor([rng.gauss(0, 1) for _ in range(64)]), dim=0)
    same = 0
    for seed in range(300):
        tree = grown("paths:1x1", lambda prefix: probs, chance(seed, root=4))
        same += int(SeededChance(torch.tensor([seed]), torch.tensor([4])).pick(probs[None]) == tree.tokens[1])
    expected = float((probs**2).sum())
    assert stats.binomtest(same, 300, expected).pvalue > FALSE_ALARM
