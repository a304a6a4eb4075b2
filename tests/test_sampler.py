"""Sampler: the draws of a level are those of its nodes one by one, on the host as at fixed places, from rows as from
few tokens; and what is few becomes the q that was drawn from.

Nothing here is left to chance: seeds are fixed or given by hypothesis. Blocks of few tokens are summed in another order
than rows are, so with other seeds a photo finish could end otherwise, about once in ten million draws.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from branchwise.audit.policies import ScriptedSampler
from branchwise.core.rng import SeededChance, key_of, mix, race, race_on, signed, wait_of
from branchwise.core.rows import BLOCK
from branchwise.core.sampling import SamplingParams
from branchwise.core.sequence import SequenceState
from branchwise.core.tree import DraftTree
from branchwise.cuda import graphs as replayed_module
from branchwise.cuda.graphs import PaddedGraphedFunction
from branchwise.draft import TREES, build_policy
from branchwise.draft import sampler as dice_module
from branchwise.draft.base import Budget
from branchwise.draft.builder import NodeProbs, TreeBuilder, TreePolicy, grow_with
from branchwise.draft.policies.paths import Paths
from branchwise.draft.policies.topk import TopKRequest
from branchwise.draft.sampler import (
    DeviceSampler,
    DraftSampler,
    GreedySampler,
    Opening,
    SampleRequest,
    SeededSampler,
    sample_batch,
    sampler_for,
)
from branchwise.draft.sparse import TINY, SparseProbs, scattered, table
from branchwise.draft.tree_drafter import ExpandRequest, TreeDrafter
from branchwise.testing import ToyTarget
from tests.strategies import Rule, tokens_to

HOST = torch.device("cpu")
SIZES = (5, BLOCK, BLOCK + 1, 4 * BLOCK, 5 * BLOCK + 77)
"""vocabularies of one block, of whole blocks, and of blocks of which the last is not full"""
int64s = st.integers(-(1 << 63), (1 << 63) - 1)


def keys_of(seed: int, root: int, purpose: str, draw: int) -> Tensor:
    """(1,): the key of a draw, made by the tensors of a verifier's chance."""
    chance = SeededChance(torch.tensor([seed]), torch.tensor([root]), role="draft")
    return chance._keys(purpose, chance.roots, draw)


def rows_of(count: int, vocabulary: int, seed: int) -> Tensor:
    return (3 * torch.randn(count, vocabulary, generator=torch.Generator().manual_seed(seed))).softmax(dim=-1)


class Overwriting:
    """What `GraphedFunction` does on a device: whoever asks again finds the answer in the same place."""

    def __init__(self, function: Callable[..., Tensor], device: torch.device, *, capture: bool = True) -> None:
        self._function = function
        self._found: dict[tuple[int, ...], Tensor] = {}

    def __call__(self, *places: Tensor) -> Tensor:
        key = tuple(place.data_ptr() for place in places)
        found = self._function(*places)
        return self._found.setdefault(key, found.clone()).copy_(found)


def pretend_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fixed places and answers that are overwritten, on the host."""

    def fixed(
        self: PaddedGraphedFunction, function: Callable[..., Tensor], device: torch.device, *, capture: bool = True
    ) -> None:
        plain(self, function, device, capture=capture)
        self.fixed = True

    plain = PaddedGraphedFunction.__init__
    monkeypatch.setattr(PaddedGraphedFunction, "__init__", fixed)
    monkeypatch.setattr(replayed_module, "GraphedFunction", Overwriting)


@pytest.fixture
def as_on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_a_device(monkeypatch)


# Keys


@given(int64s, st.integers(0, 1 << 40), st.sampled_from(["pick", "order", "wait"]), st.integers(0, (1 << 31) - 1))
def test_keys_are_those_of_the_seeded_chance(seed: int, root: int, purpose: str, draw: int) -> None:
    assert signed(key_of("draft", purpose, seed, root, draw)) == int(keys_of(seed, root, purpose, draw))


@given(int64s, st.integers(0, 1 << 40), st.integers(0, (1 << 31) - 1))
def test_waits_are_those_of_the_seeded_chance(seed: int, root: int, draw: int) -> None:
    bits = int(mix(keys_of(seed, root, "wait", draw))) % 2**64 >> 12
    waited = -math.log((bits + 0.5) / 2**52)
    assert wait_of(key_of("draft", "wait", seed, root, draw)) == pytest.approx(waited, rel=1e-14)
    assert SeededSampler(seed, root).wait(draw) == pytest.approx(waited, rel=1e-14)


# Levels of rows


def one_by_one(probs: Tensor, draws: list[tuple[int, int]], seed: int, root: int) -> list[int]:
    """The draws of a level as they always were: a race for every node."""
    return [int(race(probs[row][None], keys_of(seed, root, "pick", draw))) for row, draw in draws]


def check_levels(sampler: SeededSampler, seed: int, root: int) -> None:
    """Levels of all sizes, large ones before small ones too: places keep what lay there."""
    for vocabulary in SIZES:
        for count in (3, 1, 4, 2, 7):
            probs = rows_of(count, vocabulary, seed)
            draws = [(turn * 5 % count, 100 * count + turn) for turn in range(2 * count + 1)]
            assert sampler.picks_from(probs, draws) == one_by_one(probs, draws, seed, root)
            sizes, numbers = [1 + row % 3 for row in range(count)], list(range(40, 40 + count))
            alone = [
                [
                    token
                    for token in race_on(p[None], keys_of(seed, root, "order", draw), size)[0].tolist()
                    if token >= 0
                ]
                for p, size, draw in zip(probs, sizes, numbers, strict=True)
            ]
            assert sampler.orders(probs, sizes, numbers) == alone


@pytest.mark.parametrize("seed", range(4))
def test_the_draws_of_a_level_are_those_of_its_nodes(seed: int) -> None:
    check_levels(SeededSampler(seed, 9), seed, 9)


@pytest.mark.usefixtures("as_on_a_device")
def test_they_are_the_same_at_fixed_places() -> None:
    device_sampler = DeviceSampler()
    for seed in range(3):
        check_levels(SeededSampler(seed, 9, device_sampler), seed, 9)


def test_an_order_ends_where_its_law_does() -> None:
    probs = torch.tensor([[0.0, 0.5, 0.0, 0.5], [0.25, 0.25, 0.25, 0.25]])
    for sampler in (SeededSampler(1, 1), GreedySampler()):
        first, second = sampler.orders(probs, [3, 3], [0, 1])
        assert sorted(first) == [1, 3]
        assert len(set(second)) == 3


def test_a_greedy_text_takes_the_best_tokens_and_then_the_best_again() -> None:
    probs = torch.tensor([[0.1, 0.6, 0.3, 0.0], [0.0, 0.3, 0.0, 0.7]])
    draws = [(0, 0), (1, 1), (0, 2), (1, 3), (1, 4)]
    assert GreedySampler().picks_from(probs, draws) == [1, 3, 2, 1, 3]
    assert GreedySampler().picks_from([few_of(row) for row in probs], draws) == [1, 3, 2, 1, 3]


def test_a_greedy_text_leaves_nothing_to_chance() -> None:
    probs = torch.tensor([0.3, 0.5, 0.2])
    greedy, sampled = (SequenceState([1, 2], SamplingParams(temperature=heat, seed=4)) for heat in (0.0, 0.7))
    assert sampler_for(greedy).picks(probs, range(3)) == [1, 0, 2]
    assert sampler_for(sampled).picks(probs, range(30)) == SeededSampler(4, 1).picks(probs, range(30))


# Few tokens


def few_of(probs: Tensor) -> SparseProbs:
    """The same distribution, as a memory would tell it."""
    return SparseProbs({token: float(probs[token]) for token in probs.nonzero()[:, 0].tolist()}, len(probs), HOST)


def sparse(vocabulary: int, seed: int) -> Tensor:
    """(vocabulary,): a dozen tokens at most, some of them near each other."""
    chosen = random.Random(f"{vocabulary} {seed}")
    near = chosen.randrange(vocabulary)
    tokens = {min(near + chosen.randrange(20), vocabulary - 1) for _ in range(chosen.randrange(1, 6))}
    tokens |= {chosen.randrange(vocabulary) for _ in range(chosen.randrange(8))}
    probs = torch.zeros(vocabulary)
    probs[sorted(tokens)] = torch.tensor([chosen.random() ** 4 + 1e-6 for _ in tokens])
    return probs / probs.sum()


@pytest.mark.parametrize("vocabulary", [*SIZES, 49_152])
def test_few_tokens_are_drawn_as_a_row_is(vocabulary: int) -> None:
    for seed in range(60):
        probs = sparse(vocabulary, seed)
        draws, sampler = list(range(8)), SeededSampler(seed, 3)
        assert sampler.picks(few_of(probs), draws) == sampler.picks(probs, draws)
        assert sampler.order(few_of(probs), 5, 9) == sampler.order(probs, 5, 9)


@given(st.dictionaries(st.integers(0, 999), st.floats(1e-30, 1), min_size=1, max_size=12))
def test_what_is_drawn_from_is_what_is_recorded(weights: dict[int, float]) -> None:
    probs = SparseProbs.of(weights, 1000, HOST)
    [row] = table([probs])
    assert {token: float(row[token]) for token in row.nonzero()[:, 0].tolist()} == probs.masses
    assert probs.mass == pytest.approx(1, rel=1e-6)
    assert min(probs.masses.values()) >= TINY
    whole = sum(weights.values())
    for token, mass in probs.masses.items():
        assert mass == pytest.approx(weights[token] / whole, rel=1e-6)


def test_what_no_verifier_could_divide_by_is_left_out() -> None:
    assert SparseProbs.of({1: 1.0, 2: 1e-39, 3: 1.0}, 4, HOST).masses == {1: 0.5, 3: 0.5}


def test_a_token_that_the_target_does_not_have_is_refused() -> None:
    # In a table it would be a token of the next row.
    with pytest.raises(AssertionError, match="no such token"):
        SparseProbs.of({1: 1.0, 4: 1.0}, 4, HOST)


def test_a_table_holds_few_tokens_rows_and_nothing() -> None:
    row, few = rows_of(1, 300, 1)[0], SparseProbs.of({7: 1.0, 299: 3.0}, 300, HOST)
    quarter = torch.zeros(300)
    quarter[7], quarter[299] = 0.25, 0.75
    assert torch.equal(table([few, None, row, few]), torch.stack([quarter, torch.zeros(300), row, quarter]))
    assert torch.equal(table([row, None]), torch.stack([row, torch.zeros(300)]))


def test_a_device_makes_the_same_table_from_places_and_masses() -> None:
    masses = torch.tensor([0.25, 0.1, 0.75], dtype=torch.float64)
    told = torch.stack([torch.tensor([3, 9, 11]), masses.view(torch.int64)])
    expected = torch.zeros(3, 4)
    expected[0, 3], expected[2, 1], expected[2, 3] = masses.float()
    assert torch.equal(scattered(told, (3, 4)), expected)


# Policies


def rule(vocabulary: int) -> Rule:
    return lambda prefix: sparse(vocabulary, hash(prefix))


def grown_from(
    policy: TreePolicy, row: Callable[[tuple[int, ...]], Tensor | SparseProbs], sampler: DraftSampler
) -> DraftTree:
    def look(tree: TreeBuilder, nodes: list[int]) -> NodeProbs:
        probs = [row(tuple(tree.path(node))) for node in nodes]
        return NodeProbs(torch.stack(probs) if isinstance(probs[0], Tensor) else probs)  # type: ignore[arg-type]

    return grow_with(policy.grow(3, Budget(99, 5), sampler), look)


@pytest.mark.parametrize("common", [0, 2])
def test_every_path_is_the_one_that_its_own_draws_make(common: int) -> None:
    # Few tokens, so that paths part and meet: two that agree with another between them are still one.
    count, length = 5, 3
    for seed in range(20):
        tree = grown_from(Paths(f"{count}x{length}@{common}"), rule(4), SeededSampler(seed, 4))
        expected: list[tuple[int, ...]] = []
        for path in range(count):
            tokens: tuple[int, ...] = ()
            for level in range(length):
                number = level * count + (path if level >= common else 0)
                tokens += (int(race(rule(4)(tokens)[None], keys_of(seed, 4, "pick", number))),)
            expected.append(tokens)
        drawn = [tuple(tokens_to(tree, node)) for node in range(len(tree))]
        assert [drawn[leaf] for leaf in tree.leaves] == (expected if common == 0 else [])
        assert set(drawn) == {path[:level] for path in expected for level in range(length + 1)}


DRAWN = [
    "chain:4",
    "paths:4x3",
    "paths:3x4@2",
    "rsd-c:3,2,1",
    "rsd-s:3x3",
    "dynamic:9",
    "threshold:0.05,9",
    "template:mcsd",
    "fork-lossy:3x3",
    "chain:5,stop=confidence:0.3",
    "rsd-c:2,2,2,stop=entropy:1.0",
]
FIXED = ["topk:9", "graph:9", "ranks:mcsd", "puct:9"]


@pytest.mark.parametrize("spec", DRAWN + FIXED)
@pytest.mark.parametrize("greedy", [False, True])
def test_a_policy_grows_the_same_tree_from_few_tokens_as_from_rows(spec: str, greedy: bool) -> None:
    probs = rule(700)
    for seed in range(6):
        trees = [
            grown_from(build_policy(spec), source, GreedySampler() if greedy else SeededSampler(seed, 4))
            for source in (probs, lambda prefix: few_of(probs(prefix)))
        ]
        rows, few = trees
        assert few.tokens.tolist() == rows.tokens.tolist()
        assert (few.parents, few.leaves) == (rows.parents, rows.leaves)
        assert (few.q is None) == (rows.q is None) == (spec in FIXED)
        if rows.q is not None and few.q is not None:
            assert torch.equal(few.q, rows.q)


@pytest.mark.parametrize("spec", ["paths:2x2", "rsd-c:2,1", "dynamic:3"])
def test_the_audit_follows_few_tokens_as_it_follows_rows(spec: str) -> None:
    def weights(probs: Callable[[tuple[int, ...]], Tensor | SparseProbs]) -> dict[tuple[int, ...], float]:
        scripts, found = [list[int]()], dict[tuple[int, ...], float]()
        while scripts:
            sampler = ScriptedSampler(scripts.pop())
            tree = grown_from(TREES.build(spec), probs, sampler)
            scripts += sampler.others
            drawn = (*tree.tokens.tolist(), *tree.parents, *tree.leaves)
            found[drawn] = found.get(drawn, 0.0) + sampler.weight
        return found

    probs = rule(3)
    rows, few = weights(probs), weights(lambda prefix: few_of(probs(prefix)))
    assert few == pytest.approx(rows)
    assert sum(rows.values()) == pytest.approx(1)


@pytest.mark.usefixtures("as_on_a_device")
@pytest.mark.parametrize("spec", DRAWN)
def test_a_policy_grows_the_same_tree_at_fixed_places(spec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dice_module, "lies_on_host", lambda probs: False)
    device_sampler, row = DeviceSampler(), rule(700)
    for seed in range(3):
        here = grown_from(build_policy(spec), row, SeededSampler(seed, 4, device_sampler))
        plain = grown_from(build_policy(spec), lambda prefix: few_of(row(prefix)), SeededSampler(seed, 4))
        assert here.tokens.tolist() == plain.tokens.tolist()
        assert here.q is not None
        assert plain.q is not None
        assert torch.equal(here.q, plain.q)


# Several texts at once


@pytest.mark.parametrize("kind", ["picks", "orders", "urns", "likeliest"])
@pytest.mark.parametrize("greedy", [False, True])
def test_what_is_drawn_for_several_texts_in_one_go_is_what_each_draws_alone(
    kind: str, greedy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Caught here: keys of one text used for another, and rows of one text taken for those of the next."""
    monkeypatch.setattr(dice_module, "lies_on_host", lambda probs: False)
    device_sampler, requests = DeviceSampler(), []
    for text, count in enumerate((3, 1, 2)):
        sampler = GreedySampler(device_sampler) if greedy else SeededSampler(11 * text, 5 + text, device_sampler)
        probs, numbers = rows_of(count, 700, text), [40 + row for row in range(count)]
        if kind == "likeliest":
            requests.append(TopKRequest.of(sampler, probs, 3))
        elif kind == "picks":
            requests.append(SampleRequest(sampler, probs, [(row % count, 7 * row) for row in range(2 * count)]))
        elif kind == "orders":
            requests.append(
                SampleRequest(sampler, probs, list(enumerate(numbers)), [2 + row % 2 for row in range(count)])
            )
        else:
            requests.append(Opening(sampler, probs, list(enumerate(numbers)), [3] * count))
    alone = [request.alone() for request in requests]
    asked: list[int] = []
    own = torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda self: asked.append(1) or own(self))
    assert sample_batch(requests) == alone
    assert len(asked) == 1, "a look at the device for every text"


def test_texts_that_draw_in_different_ways_draw_by_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dice_module, "lies_on_host", lambda probs: False)
    probs = rows_of(2, 700, 1)
    requests = [
        SampleRequest(SeededSampler(1, 2), probs, [(0, 1), (1, 2)]),
        SampleRequest(GreedySampler(), probs, [(0, 1)]),
        SampleRequest(SeededSampler(1, 2), probs, [(0, 3), (1, 4)], [2, 2]),
        Opening(SeededSampler(1, 2), probs, [(0, 3), (1, 4)], [2, 2]),
        TopKRequest.of(SeededSampler(1, 2), probs, 2),
        TopKRequest.of(GreedySampler(), probs, 3),
        SampleRequest(SeededSampler(3, 2), [SparseProbs.of({5: 0.5, 9: 0.5}, 700, probs.device)], [(0, 1)]),
    ]
    for several in (*itertools.permutations(requests, 2), requests, requests[::-1]):
        assert sample_batch(list(several)) == [request.alone() for request in several]


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize(
    "spec",
    [
        "paths:3x4",
        "chain:4",
        "rsd-c:2,2",
        "template:sequoia-24",
        "paths:2x3@1",
        "rsd-s:3x3",
        "dynamic:9",
        "threshold:0.02,9",
        "topk:9,depth=3,width=3",
        "graph:9,width=3,depth=3",
        "ranks:sequoia-24",
        "fork-lossy:3x3",
    ],
)
def test_a_batch_draws_the_trees_that_its_texts_draw_alone(
    spec: str, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = ToyTarget(9)
    pretend_a_device(monkeypatch)  # where rows are padded
    sequences = [SequenceState([1 + n, 2, n], SamplingParams(temperature, seed=n)) for n in range(5)]
    looks: list[int] = []
    own = torch.Tensor.tolist

    def trees(together: bool) -> list[DraftTree]:
        monkeypatch.setattr(dice_module, "lies_on_host", lambda probs: not together)
        drafter = Tossing(build_policy(spec))
        drafter.bind(target.info)
        with monkeypatch.context() as patch:
            patch.setattr(torch.Tensor, "tolist", lambda self: looks.append(1) or own(self))
            return drafter.draft(sequences, [Budget(40, 6)] * 4 + [Budget(7, 2)])

    joint = trees(together=True)
    seen = len(looks)
    for one, other in zip(joint, trees(together=False), strict=True):
        assert one.parents == other.parents
        assert one.tokens.tolist() == other.tokens.tolist()
        if one.q is not None or other.q is not None:
            assert torch.equal(one.q, other.q)  # type: ignore[arg-type]
    # Whoever has more children than were drawn beforehand looks again for each of them.
    if not spec.startswith(("dynamic", "threshold")):
        assert seen <= max(tree.depth for tree in joint) + len(joint), "more than a look a level, and one a tree"
    assert seen < len(looks) - seen


class Tossing(TreeDrafter):
    """A drafter whose distributions are made up from the last token."""

    name = "tossing"

    def look(self, requests: Sequence[ExpandRequest]) -> list[NodeProbs]:
        return [
            NodeProbs(torch.stack([rows_of(1, 9, request.tree.tokens[node])[0] for node in request.nodes]))
            for request in requests
        ]
