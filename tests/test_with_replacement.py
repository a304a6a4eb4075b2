"""Independent draws below every node, repeats merged: all that accept them are exact, and `mss` is the paper's rule.

The truth here is written down again, for one tree at a time: a tree is what was drawn below each prefix, in draw order.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings

from branchwise.audit.exact import TOLERANCE, emitted, lp_optimum
from branchwise.audit.instances import Drafts, Instance
from branchwise.audit.policies import grown_trees
from branchwise.core.batch import TreeBatch
from branchwise.core.sampling import SamplingParams
from branchwise.core.tree import DraftTree, Draw
from branchwise.draft import build_drafter, build_policy
from branchwise.draft.base import Budget
from branchwise.draft.policies.iid import Independent
from branchwise.draft.sampler import GreedySampler, SeededSampler
from branchwise.engine import Engine, Request
from branchwise.errors import PairingError, UsageError
from branchwise.testing import ToyTarget
from branchwise.verify import VERIFIERS
from tests.conformance.test_verifiers import verdict_law
from tests.slow_truth import Prefix, Row, residual
from tests.strategies import as_truth, grown, random_rule, tokens_to, worlds

FITTING = [name for name in VERIFIERS if Draw.WITH_REPLACEMENT in VERIFIERS.find(name).accepts]
Drawn = dict[Prefix, tuple[int, ...]]


def drawn_in(tree: DraftTree) -> Drawn:
    """What was drawn below each prefix of a tree."""
    tokens = tree.tokens.tolist()
    return {
        tuple(tokens_to(tree, node)): tuple(tokens[child] for child in below)
        for node, below in enumerate(tree.candidates)
        if below
    }


def all_drawn(instance: Instance, draws: tuple[int, ...], u: Prefix = ()) -> Iterator[tuple[float, Drawn]]:
    """Everything that can be drawn below a prefix, with its probability."""
    if len(u) == len(draws):
        yield 1.0, {}
        return
    row = instance.draft_probs(u).numpy()
    for tokens in itertools.product(np.flatnonzero(row).tolist(), repeat=draws[len(u)]):
        weight = float(np.prod(row[list(tokens)]))
        for below in itertools.product(*(list(all_drawn(instance, draws, (*u, t))) for t in dict.fromkeys(tokens))):
            yield (
                weight * float(np.prod([w for w, _ in below])),
                {u: tokens} | {prefix: found for _, part in below for prefix, found in part.items()},
            )


def mss(
    p: Callable[[Prefix], Row], q: Callable[[Prefix], Row], drawn: Drawn, u: Prefix = ()
) -> Iterator[tuple[float, Prefix, int]]:
    """The paper's rule: every draw is tried, also one that repeats; what is left of p after each is normalised."""
    wanted, mass = p(u), 1.0
    for token in drawn.get(u, ()):
        odds = min(1.0, wanted[token] / q(u)[token])
        for weight, prefix, last in mss(p, q, drawn, (*u, token)) if odds * mass > 0 else ():
            yield mass * odds * weight, prefix, last
        mass *= 1 - odds
        if mass <= 0:
            return
        wanted = residual(wanted, q(u))
    for token in np.flatnonzero(wanted):
        yield mass * float(wanted[token]), u, int(token)


DRAFTERS = {
    "no skill": lambda p, q: np.full_like(p, 1 / p.shape[1]),
    "truth": lambda p, q: p,
    "adversarial": lambda p, q: (1 / p) / (1 / p).sum(axis=1, keepdims=True),
    "random": lambda p, q: q,
    "certain of one token": lambda p, q: np.eye(p.shape[1])[p.argmin(axis=1)],
}
SHAPES = [(2, (2, 2)), (2, (1, 2, 1)), (4, (2,)), (3, (3,)), (3, (2, 2))]


def laws(draft: str, vocabulary: int, depth: int, seed: int = 0) -> Instance:
    instance = Instance.random(vocabulary, depth, 1, sigma=1.0, seed=(seed,))
    return replace(instance, q=tuple(map(DRAFTERS[draft], instance.p, instance.q)))


def policy_of(draws: tuple[int, ...]) -> Independent:
    return Independent(*draws)


@pytest.mark.parametrize(("vocabulary", "draws"), SHAPES, ids=["wide", "deep", "flat", "three", "large"])
@pytest.mark.parametrize("draft", DRAFTERS)
def test_every_rule_that_accepts_them_keeps_the_law(draft: str, vocabulary: int, draws: tuple[int, ...]) -> None:
    drafts = Drafts.grown(policy_of(draws), laws(draft, vocabulary, len(draws)))
    assert float(drafts.weights.sum()) == pytest.approx(1, abs=1e-12)
    optimum = lp_optimum(drafts)
    for name, lazy in itertools.product(FITTING, (True, False)):
        distance, efficiency = emitted(VERIFIERS.build(name), drafts, lazy=lazy)
        assert distance < TOLERANCE, name
        assert 1 - TOLERANCE <= efficiency <= optimum + 1e-7, name


def test_which_rules_these_are() -> None:
    assert set(FITTING) == {"auto", "match", "mss", "rrs", "traversal", "k-seq"}
    for name in ("block", "cascade", "gbv", "token"):
        with pytest.raises(PairingError, match=r"drawn with-replacement\. Verifiers that fit: auto, match, mss"):
            Engine(ToyTarget(5), build_drafter("disturbed", "iid:2,2"), VERIFIERS.build(name))


@settings(max_examples=8)
@given(worlds(max_vocabulary=3, max_depth=2))
def test_laws_with_ties_and_zeros_are_kept_too(world: Instance) -> None:
    drafts = Drafts.grown(policy_of((2,) * world.depth), world)
    for name in ("mss", "k-seq", "rrs", "traversal"):
        assert emitted(VERIFIERS.build(name), drafts)[0] < TOLERANCE, name


@pytest.mark.parametrize(("vocabulary", "draws"), SHAPES[:4])
def test_the_trees_are_all_draws_with_their_probabilities(vocabulary: int, draws: tuple[int, ...]) -> None:
    instance = laws("random", vocabulary, len(draws))
    expected: dict[tuple[object, ...], float] = defaultdict(float)
    for weight, drawn in all_drawn(instance, draws):
        expected[tuple(sorted(drawn.items()))] += weight
    found: dict[tuple[object, ...], float] = defaultdict(float)
    for weight, tree in grown_trees(policy_of(draws), instance.draft_probs, Budget(99, len(draws))):
        found[tuple(sorted(drawn_in(tree).items()))] += weight
    assert found == pytest.approx(expected, abs=1e-15)


@pytest.mark.parametrize("lazy", [True, False])
@pytest.mark.parametrize("draft", ["no skill", "adversarial", "random"])
def test_every_verdict_of_mss_has_the_probability_that_the_paper_gives_it(draft: str, lazy: bool) -> None:
    instance = laws(draft, 3, 2)
    truth = as_truth(instance)
    weighed = grown_trees(policy_of((2, 2)), instance.draft_probs, Budget(99, 2))
    for _, tree in weighed[::40]:
        drafts = Drafts(instance, [tree], torch.ones(1, dtype=torch.float64))
        expected: dict[tuple[Prefix, int], float] = defaultdict(float)
        for weight, prefix, token in mss(truth.p.__getitem__, truth.q.__getitem__, drawn_in(tree)):
            expected[prefix, token] += weight
        found: dict[tuple[Prefix, int], float] = defaultdict(float)
        for (_, prefix, token), weight in verdict_law(VERIFIERS.build("mss"), drafts, lazy=lazy).items():
            found[prefix, token] += weight
        for key in {*found, *expected}:
            assert found[key] == pytest.approx(expected[key], abs=1e-12), key


def test_more_draws_are_accepted_more_often_and_repeats_count() -> None:
    instance = laws("random", 3, 1)
    gains = [emitted(VERIFIERS.build("mss"), Drafts.grown(policy_of((k,)), instance))[1] for k in (1, 2, 3, 4)]
    assert gains == sorted(gains)
    assert gains[0] < gains[-1]
    drafts = Drafts.grown(policy_of((3,)), instance)
    forgotten = [replace(tree, draws=tuple(range(1, len(tree)))) for tree in drafts.trees]
    assert emitted(VERIFIERS.build("mss"), replace(drafts, trees=forgotten))[0] > 1e-3, "repeats are draws"


def test_a_budget_that_cuts_it_short_keeps_it_exact() -> None:
    instance = laws("random", 2, 3)
    for nodes, depth in ((1, 3), (3, 3), (4, 3), (6, 3), (7, 2), (99, 1)):
        drafts = Drafts.grown(policy_of((2, 2, 1)), instance, Budget(nodes, depth))
        assert drafts.batch.nodes <= nodes
        for name in ("mss", "k-seq", "traversal"):
            assert emitted(VERIFIERS.build(name), drafts)[0] < TOLERANCE, (name, nodes, depth)


def test_repeats_are_one_node_and_all_draws_are_kept() -> None:
    shapes = set()
    for seed in range(30):
        tree = grown("iid:3,2", random_rule(3, 5, spread=1.0), SeededSampler(seed, 0))
        assert tree.draw is Draw.WITH_REPLACEMENT
        assert [len(below) for below in tree.candidates] == [
            {0: 3, 1: 2, 2: 0}[depth] for depth in tree.topology.depths
        ]
        assert all(
            tuple(dict.fromkeys(drawn)) == below for drawn, below in zip(tree.candidates, tree.children, strict=True)
        )
        shapes.add(tree.parents)
        padded = TreeBatch([tree], pad_shape=build_policy("iid:3,2").pad_shape)
        assert padded.nodes == 10
        assert padded.candidates.shape == (1, 10, 3)
    assert len(shapes) > 3


def test_a_greedy_text_is_drafted_with_its_best_tokens() -> None:
    tree = grown("iid:3,1", random_rule(5, 2), GreedySampler())
    assert len(tree) == 7
    assert len(set(tree.tokens.tolist()[1:4])) == 3


def test_texts_are_those_of_plain_decoding_and_do_not_depend_on_each_other() -> None:
    def texts(tree: str | None, verifier: str, temperature: float, slots: int) -> list[list[int]]:
        drafter = build_drafter("none" if tree is None else "disturbed:1", tree)
        engine = Engine(ToyTarget(6, slots=slots), drafter, VERIFIERS.build(verifier))
        params = [SamplingParams(temperature=temperature, seed=n) for n in range(4)]
        found = [engine.submit(Request((n, 2), p, max_new_tokens=9 + n)) for n, p in enumerate(params)]
        while engine.busy:
            engine.step()
        return [text.token_ids for text in found]

    for temperature in (0.0, 0.9):
        assert texts("iid:2,2,1", "match", temperature, 4) == texts(None, "match", temperature, 2)
    assert texts("iid:2,2,1", "mss", 0.0, 4) == texts(None, "match", 0.0, 2)
    assert texts("iid:2,2,1", "mss", 1.0, 4) == texts("iid:2,2,1", "mss", 1.0, 1)


@pytest.mark.parametrize("spec", ["iid:", "iid:0", "iid:2,0", "iid:-1"])
def test_what_draws_nothing_is_refused(spec: str) -> None:
    with pytest.raises(UsageError, match="such as iid:4,2,1"):
        build_policy(spec)


def test_draws_belong_to_a_tree_drawn_with_replacement() -> None:
    q = torch.full((1, 4), 0.25)
    DraftTree(torch.tensor([0, 1, 2]), (-1, 0, 0), Draw.WITH_REPLACEMENT, q, draws=(1, 2, 1))
    for draw, draws in (
        (Draw.WITH_REPLACEMENT, (1, 1)),
        (Draw.WITH_REPLACEMENT, ()),
        (Draw.WITHOUT_REPLACEMENT, (1, 2)),
    ):
        with pytest.raises(UsageError, match="lead to every node below its root"):
            DraftTree(torch.tensor([0, 1, 2]), (-1, 0, 0), draw, q, draws=draws)
