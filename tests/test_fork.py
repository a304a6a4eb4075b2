"""Forks: the target begins the branches, the draft continues them, and what the target wants is carried from step to
step. With one branch whole texts keep the target's distribution; with more they do not, and these tests can tell.

Statistical tests run on fixed seeds. `FALSE_ALARM` of test_growth.py is how often each would fail had they been fresh.
"""

from __future__ import annotations

import gc
import itertools
from collections import Counter
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from branchwise.audit.exact import RootedFork
from branchwise.audit.policies import ScriptedSampler, grown_trees
from branchwise.core.sampling import SamplingParams
from branchwise.core.sequence import SequenceState as Text
from branchwise.core.tree import DraftTree, Draw
from branchwise.draft import build_drafter
from branchwise.draft.base import Budget
from branchwise.draft.builder import Judged, NodeProbs, TreeBuilder, grow_with
from branchwise.draft.policies.paths import Fork
from branchwise.draft.sampler import GreedySampler, SeededSampler
from branchwise.engine import Engine, Generation, Request
from branchwise.errors import PairingError, UsageError
from branchwise.testing import ToyTarget
from branchwise.verify import VERIFIERS, Verdict
from tests.slow_truth import without_replacement
from tests.strategies import Rule, grown, random_rule, tokens_to
from tests.test_builder import TEXTS, Remembered, assert_law, sampled, target_law

KNOWN = torch.tensor([0.1, 0.2, 0.3, 0.4])


def grow(spec: str, rule: Rule, known: Tensor | None, seed: int = 0, budget: Budget | None = None) -> DraftTree:
    def look(tree: TreeBuilder, nodes: list[int]) -> NodeProbs:
        return NodeProbs(torch.stack([rule(tuple(tree.path(node))) for node in nodes]))

    return grow_with(Fork(spec).grow(3, budget or Budget(99, 9), SeededSampler(seed, 0), known), look)


# Drawing


@pytest.mark.parametrize("known", [True, False], ids=["distribution known", "distribution unknown"])
def test_first_tokens_are_drawn_without_replacement_and_chains_from_the_draft(known: bool) -> None:
    def rule(prefix: tuple[int, ...]) -> Tensor:
        return random_rule(3, 5, spread=1.0)(prefix).double()

    probs = torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64)
    trees = grown_trees(RootedFork(2, 2, probs if known else None), rule, Budget(99, 9))
    expected = {
        (s, t, x, y): mass * float(rule((s,))[x] * rule((t,))[y])
        for mass, (s, t) in without_replacement((probs if known else rule(())).numpy(), 2)
        for x, y in itertools.product(range(3), repeat=2)
    }
    assert {tuple(tree.tokens.tolist()[1:]): weight for weight, tree in trees} == pytest.approx(expected)
    for _, tree in trees:
        assert (tree.draw, tree.trusted, tree.parents) == (Draw.FORK, known, (-1, 0, 0, 1, 2))
        assert tree.q is not None
        assert torch.equal(tree.q[0], probs if known else rule(()))
        for node in (1, 2):
            assert torch.equal(tree.q[node], rule(tuple(tokens_to(tree, node))))


def test_production_dice_draw_the_same_law() -> None:
    rule = random_rule(4, 5, spread=1.0)
    counts = Counter(tuple(grow("2x1", rule, KNOWN, seed).tokens.tolist()[1:]) for seed in range(800))
    assert_law(counts, {pair: mass for mass, pair in without_replacement(KNOWN.double().numpy(), 2)})


def test_a_greedy_fork_begins_with_the_most_probable_tokens() -> None:
    growing = Fork("3x1").grow(0, Budget(9, 9), GreedySampler(), KNOWN)
    tree = grow_with(growing, lambda tree, nodes: NodeProbs(torch.full((1, 4), 0.25)))
    assert tree.tokens.tolist() == [0, 3, 2, 1]


def test_no_draw_is_made_twice_in_a_deep_fork() -> None:
    tree = grown("fork-lossy:2x4", random_rule(4, 5), ScriptedSampler([]))  # which refuse a number that they know
    assert tree.depth == 4


@pytest.mark.parametrize("known", [KNOWN, None], ids=["distribution known", "distribution unknown"])
def test_every_budget_is_kept(known: Tensor | None) -> None:
    rule = random_rule(4, 2)
    for nodes, depth in itertools.product(range(1, 16), range(5)):
        tree = grow("3x4", rule, known, nodes + depth, Budget(nodes, depth))
        assert len(tree) <= nodes
        assert tree.depth == (0 if nodes == 1 else min(4, depth, (nodes - 1) // min(3, nodes - 1)))
        assert int(tree.tokens[0]) == 3
        assert (tree.draw, tree.trusted) == (Draw.FORK, known is not None)


def test_without_room_for_a_branch_the_token_to_write_is_drawn_from_the_known_law() -> None:
    trees = [grow("3x4", random_rule(4, 2), KNOWN, seed, Budget(9, 0)) for seed in range(800)]
    assert all(tree.q is not None and float(tree.q.sum()) == 1 for tree in trees)
    counts = Counter((int(tree.q.argmax()),) for tree in trees)  # type: ignore[union-attr]
    assert_law(counts, {(token,): float(mass) for token, mass in enumerate(KNOWN)})


@pytest.mark.parametrize(
    "spec", ["fork-lossy:4", "fork-lossy:0x3", "fork-lossy:3x0", "fork-lossy:x", "fork-lossy:2x3x4"]
)
def test_what_is_no_fork_is_refused(spec: str) -> None:
    with pytest.raises(UsageError, match=r"fork-lossy:WxD, such as fork-lossy:4x5"):
        build_drafter("disturbed", spec)


def test_only_the_lossy_rule_takes_it() -> None:
    for name in ("match", "auto", "rrs"):
        with pytest.raises(PairingError, match=r"drawn fork-lossy. Verifiers that fit: lossy-longest\."):
            Engine(ToyTarget(5), build_drafter("disturbed", "fork-lossy:2x2"), VERIFIERS.build(name))


# What is carried over


Q = torch.tensor([[0.25] * 4, [0.4, 0.3, 0.2, 0.1], [0.1, 0.1, 0.1, 0.7]])
TREE = DraftTree(torch.tensor([3, 0, 1, 2, 2]), (-1, 0, 0, 1, 2), Draw.FORK, Q)


def next_tree(verdict: Verdict, logits: Tensor, sampling: SamplingParams) -> DraftTree:
    """The tree after a step that ended like this."""
    policy, text = Fork("2x1"), Text([1, 3], sampling)
    policy.update([Judged(text, TREE, logits, verdict)])
    text.tokens += [*TREE.tokens[list(verdict.path[1:])].tolist(), verdict.token]
    growing = policy.grow_for(text, Budget(9, 9), SeededSampler(1, 2))
    return grow_with(growing, lambda tree, nodes: NodeProbs(torch.full((1, 4), 0.25)))


LOGITS = torch.randn(5, 4, generator=torch.Generator().manual_seed(1))
WARM = SamplingParams(temperature=0.8)


def test_after_a_rejection_the_next_first_level_comes_from_what_is_left_of_p() -> None:
    tree = next_tree(Verdict((0,), 1), LOGITS, WARM)  # node 2 is the last; its child was rejected
    left = ((LOGITS[2] / 0.8).softmax(dim=-1) - Q[2]).clamp_min(0)
    assert tree.trusted
    assert tree.q is not None
    assert torch.allclose(tree.q[0], left / left.sum(), atol=1e-6)


def test_behind_a_whole_branch_it_comes_from_p() -> None:
    tree = next_tree(Verdict((0, 2), 2), LOGITS, WARM)  # node 4 is the last, and has no child
    assert tree.trusted
    assert tree.q is not None
    assert torch.allclose(tree.q[0], (LOGITS[4] / 0.8).softmax(dim=-1), atol=1e-6)


def test_a_greedy_text_keeps_the_ranks_of_all_tokens() -> None:
    tree = next_tree(Verdict((0,), 1), LOGITS, SamplingParams())
    assert tree.q is not None
    assert torch.allclose(tree.q[0], LOGITS[2].softmax(dim=-1), atol=1e-6)


def test_what_follows_a_token_that_was_not_drafted_is_not_known() -> None:
    tree = next_tree(Verdict((0,), 3), LOGITS, WARM)
    assert not tree.trusted
    assert tree.q is not None
    assert tree.q[0].tolist() == [0.25] * 4


def test_a_law_is_not_used_for_a_text_that_went_on_without_it_and_is_forgotten_with_its_text() -> None:
    policy, text = Fork("2x1"), Text([1, 3], WARM)
    policy.update([Judged(text, TREE, LOGITS, Verdict((0,), 1))])
    assert len(policy._known) == 1
    text.tokens += [1, 2]
    growing = policy.grow_for(text, Budget(1, 0), SeededSampler(1, 2))
    with pytest.raises(StopIteration) as end:
        next(growing)
    assert not end.value.value.trusted
    del text, growing, end
    gc.collect()
    assert len(policy._known) == 0


# Whole texts


def run(spec: str, requests: Sequence[Request], slots: int, vocabulary: int = 3, sigma: float = 1) -> list[Generation]:
    plain = spec == "none"
    drafter = build_drafter("none") if plain else build_drafter(f"disturbed:{sigma}", spec)
    verifier = VERIFIERS.build("match" if plain else "lossy-longest")
    engine = Engine(Remembered(vocabulary, slots=slots), drafter, verifier)
    generations = [engine.submit(request) for request in requests]
    while engine.busy:
        engine.step()
    return generations


def texts(*args, **options) -> list[list[int]]:  # type: ignore[no-untyped-def]
    return [generation.token_ids for generation in run(*args, **options)]


@pytest.mark.parametrize("spec", ["fork-lossy:1x1", "fork-lossy:1x2"])
def test_with_one_branch_short_texts_have_the_law_of_the_target(spec: str) -> None:
    assert_law(Counter(map(tuple, texts(spec, sampled(range(TEXTS)), slots=200))), target_law())


def test_with_more_they_have_not() -> None:
    found = Counter(map(tuple, texts("fork-lossy:3x2", sampled(range(TEXTS // 2)), slots=200, sigma=2)))
    with pytest.raises(AssertionError):
        assert_law(found, target_law())


PROMPTS = [(1, 2, 3), (4,), (0, 0)]


@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(repetition_penalty=1.5, logit_bias={2: 1.0})])
def test_with_one_branch_greedy_texts_are_those_of_plain_decoding(params: SamplingParams) -> None:
    requests = [Request(prompt, params, max_new_tokens=25) for prompt in PROMPTS]
    plain = texts("none", requests, slots=2, vocabulary=6)
    for spec in ("fork-lossy:1x1", "fork-lossy:1x3"):
        assert texts(spec, requests, slots=2, vocabulary=6) == plain


def test_with_more_a_greedy_text_takes_runner_ups_that_the_draft_continues_well() -> None:
    requests = [Request(prompt, SamplingParams(), max_new_tokens=40) for prompt in PROMPTS]
    plain, forked = (texts(spec, requests, slots=3, vocabulary=6) for spec in ("none", "fork-lossy:3x3"))
    assert plain != forked
    target = ToyTarget(6)
    for prompt, text in zip(PROMPTS, forked, strict=True):
        for n, token in enumerate(text):  # but none that is not among the first three
            assert token in target.logits((*prompt, *text[:n])).topk(3).indices


def test_a_text_does_not_depend_on_the_texts_beside_it() -> None:
    requests = [
        Request((1, n % 3), SamplingParams(temperature=float(n % 4 > 0), seed=n), max_new_tokens=5 + n)
        for n in range(8)
    ]
    alone = [texts("fork-lossy:3x3", [request], slots=1)[0] for request in requests]
    assert texts("fork-lossy:3x3", requests, slots=4) == alone


def test_what_a_perfect_draft_proposes_is_kept_to_the_last_token() -> None:
    # All but the last token of the text; that one finds no room for a branch.
    for generation in run("fork-lossy:2x4", sampled(range(4), length=41), slots=4, vocabulary=4, sigma=0):
        assert generation.stats.steps == 11
        assert len(generation.token_ids) == 41


def test_the_registry_builds_it_over_any_source() -> None:
    tree = grown("fork-lossy:2x3", random_rule(4, 1), SeededSampler(1, 0))
    assert (len(tree), tree.depth, tree.trusted) == (7, 3, False)
