"""Stopping early: texts keep their distribution, whatever a rule says of the distributions it sees; a rule that sees
more is caught."""

from __future__ import annotations

import inspect
import itertools
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from safetensors.torch import load_file, save_file
from torch import Tensor

from branchwise.audit.exact import TOLERANCE, RootedFork, emitted, emitted_by_forks
from branchwise.audit.instances import Drafts, Instance
from branchwise.audit.policies import grow
from branchwise.core.sampling import SamplingParams
from branchwise.core.topology import branched, topology
from branchwise.core.tree import DraftTree, Draw
from branchwise.draft import STOPS, TREES, build_drafter, build_policy
from branchwise.draft.base import Budget
from branchwise.draft.builder import NodeProbs, TreeBuilder, TreeCoroutine, TreePolicy, WrappedPolicy
from branchwise.draft.policies.stop import (
    FORMAT,
    Confidence,
    Entropy,
    Learned,
    Scorer,
    Stop,
    Stopping,
    features,
    file_for,
    network_of,
    read_scorer,
    widths_of,
    write_scorer,
)
from branchwise.draft.sampler import DraftSampler, SampleRequest, SeededSampler
from branchwise.engine import Engine, Request
from branchwise.errors import BranchwiseError, ModelError, PairingError, UnknownName, UsageError
from branchwise.testing import ToyTarget
from branchwise.verify import VERIFIERS
from tests.strategies import random_rule, worlds


class Whim(Stop):
    """Any function of the distributions will do, also one that makes no sense."""

    def enough(self, found: NodeProbs, depth: int) -> bool:
        return bool((found.probs[:, 0] * 7.3 % 1 > 0.4).any())


class Never(Stop):
    def enough(self, found: NodeProbs, depth: int) -> bool:
        return False


class Always(Stop):
    def __init__(self) -> None:
        self.asked: list[int] = []

    def enough(self, found: NodeProbs, depth: int) -> bool:
        self.asked.append(depth)
        return True


def stopping(spec: str, stop: Stop) -> Stopping:
    return Stopping(TREES.build(spec), stop, spec)


# Exactness, by enumeration of the policy that runs and the verifier that runs


EXACT = [
    *(("chain:3", 2, 3, name) for name in ("token", "block", "match")),
    *(("chain:2", 3, 2, name) for name in ("token", "block", "match")),
    *(("paths:1x3", 2, 3, name) for name in ("gbv", "lambda-gbv", "cascade", "mss")),
    *(("iid:2,2,1", 2, 3, name) for name in ("mss", "k-seq", "rrs", "traversal")),
    *(("rsd-c:2,2", 3, 2, name) for name in ("rrs", "traversal", "match")),
    *(("rsd-c:2,2,1", 2, 3, name) for name in ("rrs", "traversal")),
    *(("paths:2x3@1", 2, 3, name) for name in ("rrs", "traversal")),
    *(("rsd-s:2x3", 2, 3, name) for name in ("rrs", "traversal")),
    *(("template:SHAPE", 2, 3, name) for name in ("rrs", "traversal")),
]


@pytest.mark.parametrize(("spec", "vocabulary", "depth", "verifier"), EXACT)
def test_a_tree_that_stops_early_keeps_the_law(
    spec: str, vocabulary: int, depth: int, verifier: str, tmp_path: Path
) -> None:
    shape = tmp_path / "shape.json"
    shape.write_text(json.dumps({"branchwise": "template", "version": 1, "parents": [-1, 0, 0, 1, 1, 2, 3]}))
    spec = spec.replace("SHAPE", str(shape))
    depths: set[int] = set()
    for seed, stop in itertools.product(range(2), (Confidence(0.65), Entropy(0.55), Whim())):
        instance = Instance.random(vocabulary, depth, 2, sigma=1.0, seed=(seed,))
        drafts = Drafts.grown(stopping(spec, stop), instance)
        depths |= {tree.depth for tree in drafts.trees}
        distance, _ = emitted(VERIFIERS.build(verifier), drafts)
        assert distance < TOLERANCE
    assert {1, depth} <= depths, "the rules must stop sometimes, and sometimes not"


@given(worlds(max_vocabulary=3, max_depth=2))
@settings(max_examples=25)
def test_laws_with_ties_and_zeros_are_kept_too(world: Instance) -> None:
    for spec, verifiers in (("chain:2", ("token", "block")), ("rsd-c:2,1", ("rrs", "traversal"))):
        drafts = Drafts.grown(stopping(spec, Whim()), world)
        for verifier in verifiers:
            assert emitted(VERIFIERS.build(verifier), drafts)[0] < TOLERANCE


def test_every_growth_that_may_stop_is_met_here() -> None:
    examples = {"paths": "2x3@1", "rsd-c": "2", "rsd-s": "2x2", "template": "sequoia-24", "topk": "4", "dynamic": "4"}
    examples |= {
        "threshold": "0.1,4",
        "graph": "4",
        "chain": "2",
        "fork-lossy": "2x2",
        "iid": "2,2",
        "puct": "4",
        "ranks": "mcsd",
        "paced": "4",
        "paced-ranks": "mcsd",
    }
    built = {name: TREES.build(f"{name}:{examples[name]}") for name in TREES}
    stoppable = {name for name, policy in built.items() if policy.stoppable}
    assert stoppable == {spec.partition(":")[0] for spec, _, _, _ in EXACT} | {"fork-lossy"}


FORKS = [(draft, known) for draft in ("no skill", "truth", "adversarial", "random") for known in (True, False)]


def laws(draft: str, seed: int) -> Instance:
    """A target over 2 tokens and 3 levels, and a drafter that is one of a kind."""
    instance = Instance.random(2, 3, 1, sigma=1.0, seed=(seed,))
    kinds = {
        "no skill": lambda p, q: np.full_like(p, 0.5),
        "truth": lambda p, q: p,
        "adversarial": lambda p, q: p[:, ::-1].copy(),
        "random": lambda p, q: q,
    }
    return replace(instance, q=tuple(map(kinds[draft], instance.p, instance.q)))


@pytest.mark.parametrize(("draft", "known"), FORKS)
def test_a_fork_of_one_branch_that_stops_early_keeps_the_law(draft: str, known: bool) -> None:
    shorter = False
    for seed, stop in itertools.product(range(3), (Confidence(0.65), Entropy(0.55), Whim(), Always())):
        instance = laws(draft, seed)
        distance, efficiency = emitted_by_forks(instance, 1, known=known, stop=stop)
        assert distance < TOLERANCE
        shorter |= efficiency < emitted_by_forks(instance, 1, known=known)[1] - 1e-9
    assert shorter, "the rules must stop sometimes"


def test_a_stopped_fork_stays_what_it_is() -> None:
    rule = random_rule(4, 5, spread=1.0)
    known = torch.tensor([0.1, 0.2, 0.3, 0.4])
    asked = Always()
    for begun, depth in ((known, 2), (None, 1)):
        tree = grow(stopping_fork(begun, asked), rule, Budget(99, 9), SeededSampler(0, 0))
        assert (tree.draw, tree.trusted, tree.depth) == (Draw.FORK, begun is not None, depth)
    assert asked.asked == [2, 1], "what the target begins costs no draft, and is no level of the drafter's"


def stopping_fork(known: Tensor | None, stop: Stop) -> TreePolicy:
    return stop.applied_to(RootedFork(2, 4, known))


def test_a_stopped_fork_carries_over_what_the_target_wants() -> None:
    engine = Engine(
        ToyTarget(6),
        build_drafter("disturbed:1", "fork-lossy:3x4,stop=confidence:0.3"),
        VERIFIERS.build("lossy-longest"),
    )
    trusted: list[bool] = []
    draft = engine.drafter.draft

    def watched(*given: Any) -> list[DraftTree]:
        trees = draft(*given)
        trusted.extend(tree.trusted for tree in trees)
        return trees

    engine.drafter.draft = watched  # type: ignore[method-assign]
    engine.submit(Request((1, 2), SamplingParams(temperature=1.0, seed=1), max_new_tokens=30))
    while engine.busy:
        engine.step()
    assert not trusted[0]
    assert sum(trusted) > len(trusted) / 2


def test_masks_of_stopped_forks_are_slices_of_the_whole_one() -> None:
    build_policy("fork-lossy:5x7,stop=entropy:2")
    whole = topology(branched([5, 1, 1, 1, 1, 1, 1]))
    for level in whole.levels[1:-1]:
        part = topology(whole.parents[: level[-1] + 1])
        assert part.ancestors.data_ptr() == whole.ancestors.data_ptr()


# What stands for another policy


def test_a_wrapper_passes_on_every_part_of_a_policy() -> None:
    """Whatever `TreePolicy` names, today or later, a wrapper passes on."""
    calls: list[str] = []

    class Other(TreePolicy):
        draw = Draw.FORK
        learns = needs_hidden = stoppable = lays = True

        def grow(self, *given: Any) -> Any: ...

    parts = {name: part for name, part in vars(TreePolicy).items() if not name.startswith("_")}
    methods = {name: inspect.signature(part) for name, part in parts.items() if inspect.isfunction(part)}
    for name in methods:
        setattr(Other, name, lambda self, *given, name=name: calls.append(name))
    properties = {name for name, part in parts.items() if isinstance(part, property)}
    for name in properties:
        setattr(Other, name, property(lambda self, name=name: calls.append(name)))
    Other.__abstractmethods__ = frozenset()  # type: ignore[attr-defined]
    wrapper = WrappedPolicy(Other())
    for name, signature in methods.items():
        getattr(wrapper, name)(*[None] * (len(signature.parameters) - 1))
    for name in properties:
        getattr(wrapper, name)
    assert sorted(calls) == sorted({*methods, *properties})
    fields = set(TreePolicy.__annotations__)
    assert fields | set(methods) | properties >= set(parts)
    for name in fields:
        assert getattr(wrapper, name) == getattr(Other, name)
        assert getattr(wrapper, name) != getattr(TreePolicy, name, None)


def test_a_learned_stop_without_a_file_is_that_of_the_pair_or_a_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BRANCHWISE_CACHE", str(tmp_path))
    policy, info = build_policy("rsd-c:2,1,stop=learned"), ToyTarget(5).info
    sure, torn = found([0.7, 0.3]), found([0.4, 0.3, 0.3])
    for _ in range(2):  # unbound, and bound where nothing was trained
        assert not policy.needs_hidden
        assert not policy.stop.enough(sure, 1)
        assert policy.stop.enough(torn, 1)
        policy.bind(info, lambda: "draft")
    assert not build_policy("chain:4,stop=learned:threshold=0.3").stop.enough(torn, 1)
    file = file_for(info, "draft")
    write_scorer(scorer("soft", 2), file)
    assert tmp_path in file.parents
    policy.bind(info, lambda: "draft")
    assert policy.needs_hidden
    with pytest.raises(PairingError, match="looks at hidden states"):
        policy.stop.enough(sure, 1)
    policy.bind(info, lambda: "another draft")
    assert not policy.needs_hidden
    assert policy.stop.enough(torn, 1)


def test_a_learned_stop_keeps_the_law(tmp_path: Path) -> None:
    some, instance = scorer("hard"), Instance.random(3, 2, 2, sigma=1.0, seed=(1,))
    write_scorer(some, tmp_path / "stop")
    _, second, first = some.scores(features("hard", NodeProbs(torch.from_numpy(instance.q[1]).float()))).sort().values
    policy = build_policy(f"rsd-c:2,1,stop=learned:{tmp_path / 'stop'},threshold={float(first + second) / 2}")
    drafts = Drafts.grown(policy, instance)
    assert {tree.depth for tree in drafts.trees} == {1, 2}
    assert emitted(VERIFIERS.build("traversal"), drafts)[0] < TOLERANCE


class Peeking(Stopping):
    """Draws the next level first and takes it back where its tokens are unlikely."""

    def grow(self, root: int, budget: Budget, sampler: DraftSampler) -> TreeCoroutine:
        growing, found, before = self.policy.grow(root, budget, sampler), None, TreeBuilder([root])
        while True:
            try:
                asked = growing.send(found)
            except StopIteration as end:
                whole: DraftTree = end.value
                last = whole.topology.levels[-1]
                assert whole.q is not None
                drawn = [float(whole.q[whole.parents[node], whole.tokens[node]]) for node in last]
                if whole.depth < 2 or max(drawn) > 0.5:
                    return whole
                return before.finish(self.draw, (len(before) - 1,) if self.draw is Draw.PATHS else ())
            if not isinstance(asked, SampleRequest):
                tree, _ = asked
                before = TreeBuilder(list(tree.tokens), list(tree.parents), list(tree.depths), dict(tree.probs))
            found = yield asked


@pytest.mark.parametrize(
    ("spec", "verifier"), [("chain:2", "token"), ("chain:2", "block"), ("rsd-c:2,1", "rrs"), ("rsd-c:2,1", "traversal")]
)
def test_a_stop_that_peeks_at_the_token_it_admits_is_caught(spec: str, verifier: str) -> None:
    instance = Instance.random(3, 2, 2, sigma=1.0, seed=(0,))
    drafts = Drafts.grown(Peeking(TREES.build(spec), Never()), instance)
    assert {tree.depth for tree in drafts.trees} == {1, 2}
    assert emitted(VERIFIERS.build(verifier), drafts)[0] > 1e-3


class StoppedPaths(TreePolicy):
    """Two paths whose depth both of them decide: what `Stopping` refuses."""

    draw = Draw.PATHS

    def grow(self, root: int, budget: Budget, sampler: DraftSampler) -> TreeCoroutine:
        tree, ends = TreeBuilder([root]), [0, 0]
        for level in range(budget.depth):
            nodes = sorted(set(ends))
            found = yield tree, nodes
            if level > 0 and Confidence(0.7).enough(found, level):
                break
            children: dict[tuple[int, int], int] = {}
            for path, end in enumerate(ends):
                tree.probs[end] = found.probs[nodes.index(end)]
                [token] = sampler.picks(tree.probs[end], [2 * level + path])
                if (end, token) not in children:
                    children[end, token] = tree.add(end, token)
                ends[path] = children[end, token]
        return tree.finish(self.draw, tuple(ends))


def test_why_several_paths_may_not_stop_together() -> None:
    instance = Instance.random(3, 2, 2, sigma=1.0, seed=(0,))
    drafts = Drafts.grown(StoppedPaths(), instance)
    assert {tree.depth for tree in drafts.trees} == {1, 2}
    distance = {
        name: emitted(VERIFIERS.build(name), drafts)[0]
        for name in ("gbv", "lambda-gbv", "cascade", "mss", "rrs", "match")
    }
    assert min(distance[name] for name in ("gbv", "lambda-gbv", "cascade")) > 1e-3
    assert max(distance[name] for name in ("mss", "rrs", "match")) < TOLERANCE
    with pytest.raises(PairingError, match="'paths:2x2' may not stop early"):
        build_policy("paths:2x2,stop=confidence:0.4")


# What a stopped tree is


def drawn(policy: TreePolicy, seed: int = 0, budget: Budget | None = None) -> DraftTree:
    return grow(policy, random_rule(4, seed, spread=1.5), budget or Budget(99, 9), SeededSampler(seed, 0))


@pytest.mark.parametrize(("spec", "sure"), [("chain:5", 0.5), ("rsd-c:3,2,2,1", 0.7), ("rsd-s:3x4", 0.6)])
def test_a_stopped_tree_is_the_first_levels_of_the_whole_one(spec: str, sure: float) -> None:
    depths = set()
    for seed in range(30):
        whole, part = drawn(TREES.build(spec), seed), drawn(stopping(spec, Confidence(sure)), seed)
        depths.add(part.depth)
        assert part.draw is whole.draw
        assert part.parents == whole.parents[: len(part)]
        assert part.tokens.tolist() == whole.tokens[: len(part)].tolist()
        assert len(part) == sum(depth <= part.depth for depth in whole.topology.depths)
        assert part.q is not None
        assert whole.q is not None
        assert torch.equal(part.q, whole.q[: len(part.q)])
    assert len(depths) > 2


@pytest.mark.parametrize("spec", ["chain:4", "rsd-c:2,2,1"])
def test_a_rule_that_never_stops_changes_nothing(spec: str) -> None:
    for nodes, depth in itertools.product(range(1, 9), range(5)):
        budget = Budget(nodes, depth)
        whole, same = drawn(TREES.build(spec), 5, budget), drawn(stopping(spec, Never()), 5, budget)
        assert same.tokens.tolist() == whole.tokens.tolist()
        assert (same.parents, same.leaves) == (whole.parents, whole.leaves)


@pytest.mark.parametrize("spec", ["chain:4", "rsd-c:2,2,1"])
def test_one_level_is_always_drafted(spec: str) -> None:
    stop = Always()
    tree = drawn(stopping(spec, stop))
    assert tree.depth == 1
    assert stop.asked == [1]


def test_a_rule_is_asked_about_every_level_that_would_get_children() -> None:
    seen: list[tuple[int, int]] = []

    class Watching(Stop):
        def enough(self, found: NodeProbs, depth: int) -> bool:
            seen.append((depth, len(found.probs)))
            return depth == 3

    tree = drawn(stopping("rsd-c:3,2,1,1,1", Watching()))
    assert tree.depth == 3
    assert seen == [(1, 3), (2, 6), (3, 6)]


def test_a_stop_spares_the_passes_below_it() -> None:
    target = ToyTarget(5, slots=3)
    drafter = build_drafter("disturbed", "chain:9,stop=confidence:0.999")
    engine = Engine(target, drafter, VERIFIERS.build("token"))
    for n in range(3):
        engine.submit(Request((n,), SamplingParams(temperature=1.0, seed=n), max_new_tokens=30))
    engine.step()
    assert drafter.passes == 2


# Rules


def found(*rows: list[float], hidden: Tensor | None = None) -> NodeProbs:
    return NodeProbs(torch.tensor(rows), hidden)


def test_confidence_goes_on_while_any_node_is_sure() -> None:
    sure, torn = [0.7, 0.2, 0.1], [0.4, 0.3, 0.3]
    assert not Confidence(0.5).enough(found(torn, sure), 1)
    assert Confidence(0.5).enough(found(torn, torn), 1)
    assert Confidence(0.75).enough(found(torn, sure), 1)
    assert Confidence(0.5).enough(found([0.5, 0.5, 0.0]), 1), "the threshold itself is not above it"


def test_entropy_is_in_nats_and_every_node_must_be_torn() -> None:
    sure, torn = [1.0, 0.0, 0.0, 0.0], [0.25] * 4  # 0 and log 4 = 1.386
    assert Entropy(1.38).enough(found(torn, torn), 1)
    assert not Entropy(1.39).enough(found(torn, torn), 1)
    assert not Entropy(1.38).enough(found(torn, sure), 1)


@pytest.mark.parametrize("spec", ["confidence:0", "confidence:1", "confidence:1.5", "confidence:nan"])
def test_a_confidence_that_is_none_is_refused(spec: str) -> None:
    with pytest.raises(UsageError, match=r"between 0 and 1, such as 0\.4"):
        STOPS.build(spec)


@pytest.mark.parametrize("spec", ["entropy:0", "entropy:-1", "entropy:inf", "entropy:nan"])
def test_an_entropy_that_is_none_is_refused(spec: str) -> None:
    with pytest.raises(UsageError, match="positive number of nats"):
        STOPS.build(spec)


# Specs


def test_a_stop_is_part_of_the_spec_of_a_tree(tmp_path: Path) -> None:
    policy = build_policy("chain:12,stop=confidence:0.4")
    assert isinstance(policy, Stopping)
    assert (policy.draw, policy.needs_hidden) == (Draw.PATHS, False)
    assert policy.policy.length == 12  # type: ignore[attr-defined]
    assert policy.stop.threshold == 0.4  # type: ignore[attr-defined]
    assert build_policy("rsd-c:4,2,1,stop=entropy:2").policy.branching == (4, 2, 1)
    assert build_policy("chain:stop=entropy:2").policy.length == 8
    write_scorer(scorer("soft", 6), tmp_path / "stop")
    policy = build_policy(f"chain:4, stop=learned:{tmp_path / 'stop'},threshold=0.7")
    assert policy.needs_hidden
    assert policy.stop.threshold == 0.7
    assert build_policy(f"chain:4,stop=learned:{tmp_path / 'stop'}").stop.threshold == 0.4
    drafter = build_drafter("disturbed", "chain:12,stop=confidence:0.4")
    assert drafter.draw is Draw.PATHS
    assert not isinstance(build_policy("chain:12"), Stopping)


@pytest.mark.parametrize(
    ("draft", "tree", "error", "words"),
    [
        ("disturbed", "chain:4,stop=confidense:0.4", UnknownName, "Did you mean 'confidence'"),
        ("disturbed", "chain:4,stop=", UnknownName, "Known: confidence, entropy, learned"),
        ("disturbed", "chain:4,stop=confidence", UsageError, "needs 'threshold', as in confidence:THRESHOLD"),
        ("disturbed", "chain:4,stop=confidence:high", UsageError, "takes threshold as float"),
        ("disturbed", "chain:4,stop=confidence:0.4,8", UsageError, "takes at most 1 values"),
        ("disturbed", "paths:4x6,stop=confidence:0.4", PairingError, "'paths:4x6' may not stop early"),
        ("disturbed", "chain:4,stop=learned:nothing.safetensors", ModelError, "There is no stop nothing.safetensors"),
    ],
)
def test_what_cannot_stop_is_one_sentence(draft: str, tree: str, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words) as raised:
        build_drafter(draft, tree)
    assert "\n" not in str(raised.value)


# Through the engine


@pytest.mark.parametrize("spec", ["chain:6,stop=confidence:0.5", "rsd-c:3,2,1,stop=entropy:1.2"])
def test_texts_are_those_of_plain_decoding(spec: str) -> None:
    def texts(draft: str, tree: str | None, verifier: str, temperature: float, slots: int) -> list[list[int]]:
        engine = Engine(ToyTarget(6, slots=slots), build_drafter(draft, tree), VERIFIERS.build(verifier))
        generations = [
            engine.submit(Request((n, 2), SamplingParams(temperature=temperature, seed=n), max_new_tokens=12 + n))
            for n in range(4)
        ]
        while engine.busy:
            engine.step()
        return [generation.token_ids for generation in generations]

    for verifier in ("match", "block", "traversal"):
        if build_policy(spec).draw in VERIFIERS.find(verifier).accepts:
            for temperature in (0.0, 0.9) if verifier == "match" else (0.0,):
                plain = texts("none", None, "match", temperature, 2)
                assert texts("disturbed:1", spec, verifier, temperature, 3) == plain
            alone, together = (texts("disturbed:1", spec, verifier, 1.0, slots) for slots in (1, 4))
            assert alone == together


# Learned stops and their files


def scorer(kind: str, hidden: int = 0, threshold: float = 0.4) -> Scorer:
    return Scorer(kind, network_of(widths_of(kind, hidden)), threshold, "model:small", {"samples": 80})


def test_the_networks_are_those_of_the_paper() -> None:
    assert widths_of("soft", 768) == (768, 512, 256, 1)
    assert widths_of("hard", 768) == (11, 44, 1)
    assert [type(layer).__name__ for layer in network_of((11, 44, 1))] == ["Linear", "ReLU", "Linear"]


def test_features_are_entropy_and_the_ten_largest_probabilities_or_hidden_states() -> None:
    probs = torch.softmax(torch.arange(12.0), dim=0)[torch.randperm(12)]
    seen = features("hard", NodeProbs(probs[None]))
    assert seen.shape == (1, 11)
    assert seen[0, 0].item() == pytest.approx(float(-(probs * probs.log()).sum()), rel=1e-5)
    assert seen[0, 1:].tolist() == probs.sort(descending=True).values[:10].tolist()
    few = features("hard", found([0.0, 1.0, 0.0]))
    assert few[0].tolist() == [0.0, 1.0] + [0.0] * 9
    hidden = torch.randn(1, 5)
    assert torch.equal(features("soft", found([1.0], hidden=hidden)), hidden)


@pytest.mark.parametrize(("kind", "width"), [("hard", 11), ("soft", 7)])
def test_a_file_gives_back_the_same_scores(kind: str, width: int, tmp_path: Path) -> None:
    before, seen = scorer(kind, 7, threshold=0.55), torch.randn(20, width)
    write_scorer(before, tmp_path / "stop.safetensors")
    after = read_scorer(tmp_path / "stop.safetensors")
    assert torch.equal(after.scores(seen), before.scores(seen))
    assert (after.kind, after.threshold, after.draft, after.notes) == (kind, 0.55, "model:small", {"samples": 80})
    assert after.widths == before.widths
    assert [path.name for path in tmp_path.iterdir()] == ["stop.safetensors"]


def test_it_goes_on_while_any_node_scores_above_the_threshold(tmp_path: Path) -> None:
    network = network_of(widths_of("soft", 2))
    for layer in network[::2]:  # type: ignore[misc]
        torch.nn.init.zeros_(layer.weight)
        torch.nn.init.zeros_(layer.bias)
        layer.weight.data[0, 0] = 1.0  # the score is the sigmoid of the first number, if that is positive
    write_scorer(Scorer("soft", network, 0.6, "", {}), tmp_path / "stop")
    stop = Learned(str(tmp_path / "stop"))
    low, high = [0.0, 9.0], [1.0, 0.0]  # scores 0.5 and 0.73
    probs = ([1.0], [1.0])
    assert stop.enough(found(*probs, hidden=torch.tensor([low, low])), 1)
    assert not stop.enough(found(*probs, hidden=torch.tensor([low, high])), 1)
    assert Learned(str(tmp_path / "stop"), threshold=0.75).enough(found(*probs, hidden=torch.tensor([low, high])), 1)


def test_a_soft_stop_needs_hidden_states_of_its_width(tmp_path: Path) -> None:
    write_scorer(scorer("soft", 4), tmp_path / "stop")
    stop = Learned(str(tmp_path / "stop"))
    with pytest.raises(PairingError, match="has none; use a draft model, or train a stop with --kind hard"):
        stop.enough(found([1.0, 0.0]), 1)
    with pytest.raises(PairingError, match="model:small, whose hidden states have 4 numbers, and these have 5"):
        stop.enough(found([1.0, 0.0], hidden=torch.randn(1, 5)), 1)
    engine = Engine(
        ToyTarget(5), build_drafter("disturbed", f"chain:3,stop=learned:{tmp_path / 'stop'}"), VERIFIERS.build("token")
    )
    engine.submit(Request((1,)))
    with pytest.raises(PairingError, match="this drafter has none"):
        engine.step()


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-100])


def tamper(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1] + bytes([file.read_bytes()[-1] ^ 1]))


Change = Callable[[dict[str, Tensor], dict[str, Any]], object]


def rewrite(change: Change) -> Callable[[Path], None]:
    """Change the weights or their description, with a digest that fits."""

    def damage(file: Path) -> None:
        known, tensors = FORMAT.read(file, lambda known, tensors: (known, tensors))
        change(tensors, known)
        FORMAT.write(file, known, tensors)

    return damage


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing": (lambda file: file.unlink(), "There is no stop"),
    "a folder": (lambda file: (file.unlink(), file.mkdir()), "There is no stop"),
    "cut": (cut, "is damaged"),
    "text": (lambda file: file.write_text("hello, this is a text"), "is damaged"),
    "empty": (lambda file: file.write_bytes(b""), "is damaged"),
    "a changed byte": (tamper, "is damaged .its contents are not those that were written"),
    "no metadata": (lambda file: save_file(load_file(file), file), "is no stop; train one"),
    "of a newer version": (rewrite(lambda tensors, known: known.update(version=2)), "of a newer Branchwise"),
    "no threshold": (rewrite(lambda tensors, known: known.pop("threshold")), "is damaged"),
    "a threshold of 7": (rewrite(lambda tensors, known: known.update(threshold=7)), "is damaged"),
    "another kind": (rewrite(lambda tensors, known: known.update(kind="soft")), "is damaged"),
    "an unknown kind": (rewrite(lambda tensors, known: known.update(kind="firm")), "is damaged"),
    "no widths": (rewrite(lambda tensors, known: known.update(widths=[])), "is damaged"),
    "widths that are words": (rewrite(lambda tensors, known: known.update(widths="wide")), "is damaged"),
    "a weight is missing": (rewrite(lambda tensors, known: tensors.pop("2.weight")), "is damaged"),
    "a weight too many": (rewrite(lambda tensors, known: tensors.update(more=torch.ones(1))), "is damaged"),
    "a weight is no number": (rewrite(lambda tensors, known: tensors["0.bias"].fill_(torch.nan)), "are not finite"),
    "another shape": (rewrite(lambda tensors, known: tensors.update({"2.bias": torch.ones(3)})), "is damaged"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_one_sentence(damage: str, tmp_path: Path) -> None:
    file = tmp_path / "stop.safetensors"
    write_scorer(scorer("hard"), file)
    STOPS.build(f"learned:{file}")
    spoil, words = DAMAGES[damage]
    spoil(file)
    with pytest.raises(ModelError, match=words) as raised:
        STOPS.build(f"learned:{file}")
    assert "\n" not in str(raised.value)


def test_a_file_is_whole_or_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "stop.safetensors"
    write_scorer(scorer("hard"), file)
    before = file.read_bytes()

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("os.replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_scorer(scorer("hard"), file)
    assert file.read_bytes() == before
    assert list(tmp_path.iterdir()) == [file]
    monkeypatch.undo()
    with pytest.raises(BranchwiseError, match="cannot be written"):
        write_scorer(scorer("hard"), tmp_path / "nowhere" / "stop")
