"""Batches: a sequence gets in a batch what it gets alone, in both forms of the code, and traced for a device."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from branchwise.audit.instances import ExactProbs
from branchwise.core.batch import PadShape, TreeBatch
from branchwise.core.rng import SeededChance
from branchwise.core.sampling import SamplingParams
from branchwise.core.sequence import SequenceState
from branchwise.core.target_probs import WarpedProbs
from branchwise.core.tree import DraftTree, Draw
from branchwise.cuda.verify_graph import CapturedVerifier, GraphInputs, Numbers, as_program, trace
from branchwise.draft.base import Budget
from branchwise.draft.sampler import SeededSampler
from branchwise.verify import VERIFIERS, Verdict, Verdicts
from branchwise.verify.match import Match
from tests.strategies import Rule, grown, random_rule, tokens_to

DRAWN = [name for name in VERIFIERS if name != "match"]
SHAPES = {
    Draw.PATHS: ["paths:4x3", "paths:1x5", "paths:3x1", "nothing", "paths:2x4", "paths:4x3"],
    Draw.WITHOUT_REPLACEMENT: ["rsd-c:3,2,1", "rsd-c:1,1,1,1,1", "rsd-c:4", "nothing", "rsd-c:2,2,2", "rsd-c:3,2,1"],
}
"""trees of different depth, number of paths and number of nodes in one batch, and one that drafts nothing"""
NOTHING = {Draw.PATHS: "paths:4x9", Draw.WITHOUT_REPLACEMENT: "rsd-c:9"}
PAIRS = [(name, draw) for name in DRAWN for draw in SHAPES if draw in VERIFIERS.find(name).accepts]
pairs = pytest.mark.parametrize(("name", "draw"), PAIRS, ids=[f"{name} on {draw.value}" for name, draw in PAIRS])

SAMPLING = [
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.8, top_k=3),
    SamplingParams(temperature=1.0, top_p=0.8),
    SamplingParams(temperature=1.2),
    SamplingParams(temperature=1.0, min_p=0.1),
    SamplingParams(temperature=1.0),
]


def target(seed: int, vocabulary: int) -> Rule:
    return random_rule(vocabulary, seed, spread=1.5)


@cache
def tree_of(spec: str, seed: int, vocabulary: int) -> DraftTree:
    if spec == "nothing":
        return DraftTree.root(0)
    if spec in NOTHING.values():  # what is left of these trees where the budget is spent
        return grown(spec, target(seed, vocabulary), SeededSampler(0, 0), Budget(1, 0))
    rule = random_rule(vocabulary, -seed - 1, near=target(seed, vocabulary), far=0.7)
    return grown(spec, rule, SeededSampler(seed, 0), Budget(nodes=64, depth=9))


class Batch:
    """Sequences, their trees and what a target found for them; padding holds nonsense."""

    def __init__(
        self, specs: Sequence[str], seed: int, vocabulary: int = 5, sampling: Sequence[SamplingParams] = SAMPLING
    ) -> None:
        self.seeds = [1000 * seed + row for row in range(len(specs))]
        self.trees = [tree_of(spec, s, vocabulary) for spec, s in zip(specs, self.seeds, strict=True)]
        params = [replace(p, seed=s) for p, s in zip(sampling, self.seeds, strict=False)]
        self.sequences = [SequenceState([0], p) for p in params[: len(specs)]]
        self.vocabulary = vocabulary

    def logits(self, nodes: int) -> Tensor:
        logits = torch.full((len(self.trees), nodes, self.vocabulary), float("nan"))
        for row, (tree, seed) in enumerate(zip(self.trees, self.seeds, strict=True)):
            rule = target(seed, self.vocabulary)
            for node in range(len(tree)):
                logits[row, node] = rule(tuple(tokens_to(tree, node))).log()
        return logits

    def verdicts(
        self, name: str, *, lazy: bool = True, together: bool = True, room: PadShape | None = None
    ) -> list[Verdict]:
        batch = TreeBatch(self.trees, pad_shape=room)
        probs = WarpedProbs(self.logits(batch.nodes), batch, self.sequences)
        probs.lazy, probs.together = lazy, together
        return VERIFIERS.build(name)(batch, probs, self.chance()).read()

    def chance(self) -> SeededChance:
        return SeededChance(torch.tensor(self.seeds), torch.tensor(self.seeds) % 7 + 3)

    def alone(self, row: int) -> Batch:
        one = copy.copy(self)
        one.seeds, one.trees, one.sequences = [self.seeds[row]], [self.trees[row]], [self.sequences[row]]
        return one


def assert_alone_as_together(batch: Batch, name: str, lazy: bool) -> None:
    together = batch.verdicts(name, lazy=lazy)
    alone = [batch.alone(row).verdicts(name, lazy=lazy)[0] for row in range(len(batch.trees))]
    assert together == alone


@pytest.mark.parametrize("lazy", [True, False], ids=["host", "device"])
@pairs
def test_a_batch_gives_each_sequence_what_it_gets_alone(name: str, draw: Draw, lazy: bool) -> None:
    # Trees of one shape: what every step but the last of a text looks like.
    for seed in range(12):
        assert_alone_as_together(Batch([SHAPES[draw][0]] * 4, seed), name, lazy)


@pytest.mark.parametrize("lazy", [True, False], ids=["host", "device"])
@pairs
def test_a_tree_gets_the_same_verdict_beside_deeper_and_wider_ones(name: str, draw: Draw, lazy: bool) -> None:
    # Catches coins that are numbered by the sizes of the batch: then a text depends on who is beside it.
    specs = [spec for spec in SHAPES[draw] if spec != "nothing"]
    if name == "auto":  # which rule it picks is for the whole batch, and one drafter draws one number of paths
        specs = ["paths:3x1", "paths:3x4", "paths:3x2"] if draw is Draw.PATHS else specs
    for seed in range(12):
        assert_alone_as_together(Batch(specs, seed), name, lazy)


@pytest.mark.parametrize("lazy", [True, False], ids=["host", "device"])
@pairs
def test_a_sequence_without_a_draft_gets_the_same_token_beside_others(name: str, draw: Draw, lazy: bool) -> None:
    # Catches a root that draws with one noise alone and with another in a batch.
    nothing = NOTHING[draw] if name == "auto" else "nothing"  # by which it tells that the others are drawn
    for seed in range(12):
        assert_alone_as_together(Batch([nothing, SHAPES[draw][0], nothing], seed), name, lazy)


@pytest.mark.parametrize("lazy", [True, False], ids=["host", "device"])
@pairs
def test_a_tree_that_asked_for_its_laws_and_drew_nothing_is_a_root(name: str, draw: Draw, lazy: bool) -> None:
    q = torch.full((1, 5), 0.2)
    tree = DraftTree(torch.tensor([0]), (-1,), draw, q, leaves=(0, 0) if draw is Draw.PATHS else ())
    for size in (1, 2):
        batch = Batch(["nothing"] * size, seed=1)
        plain = batch.verdicts("block" if name == "auto" else name, lazy=lazy)
        batch.trees = [tree] * size
        assert batch.verdicts(name, lazy=lazy) == plain
        assert all(verdict.path == (0,) for verdict in plain)


@pairs
def test_host_and_device_give_the_same_verdicts(name: str, draw: Draw) -> None:
    for seed in range(12):
        batch = Batch(SHAPES[draw], seed)
        host = batch.verdicts(name, lazy=True)
        assert host == batch.verdicts(name, lazy=False) == batch.verdicts(name, lazy=False, together=False)


@pairs
def test_host_and_device_give_the_same_verdicts_in_a_large_vocabulary(name: str, draw: Draw) -> None:
    # Beyond `RANKED` tokens the host sorts what carries mass row by row, and a device compares all pairs.
    for seed in range(3):
        batch = Batch(SHAPES[draw], seed, vocabulary=1500)
        host = batch.verdicts(name, lazy=True)
        assert host == batch.verdicts(name, lazy=False) == batch.verdicts(name, lazy=False, together=False)


@pytest.mark.parametrize("lazy", [True, False], ids=["host", "device"])
@pairs
def test_room_for_more_changes_nothing(name: str, draw: Draw, lazy: bool) -> None:
    room = PadShape(nodes=20, children=5, width=6, forks=4)
    for seed in range(6):
        batch = Batch(SHAPES[draw], seed)
        assert batch.verdicts(name, lazy=lazy, room=room) == batch.verdicts(name, lazy=lazy)


def test_the_verdicts_compared_here_are_of_every_length() -> None:
    lengths = {len(v.path) for seed in range(6) for v in Batch(SHAPES[Draw.PATHS], seed).verdicts("cascade")}
    assert lengths >= {1, 2, 3, 4}


# Coins


class Watched(SeededChance):
    """Seeded chance that refuses to decide two things with one coin."""

    def __init__(self, rows: int) -> None:
        super().__init__(torch.arange(rows), torch.arange(rows))
        self.tossed: dict[int, Tensor] = {}

    def first(self, odds: Tensor, draw: int) -> Tensor:
        assert draw >= 0
        for coin, column in enumerate(odds.unbind(dim=1), start=draw):
            decides = (column > 0) & (column < 1)
            assert not (self.tossed.get(coin, torch.tensor(False)) & decides).any(), f"coin {coin} decides twice"
            self.tossed[coin] = self.tossed.get(coin, torch.tensor(False)) | decides
        return super().first(odds, draw)


@pytest.mark.parametrize("lazy", [True, False], ids=["host", "device"])
@pytest.mark.parametrize(
    ("spec", "names"),
    [
        ("paths:1x200", ["token", "block", "gbv", "cascade", "mss", "traversal", "k-seq"]),
        ("paths:2x140", ["gbv", "lambda-gbv", "cascade"]),
        ("paths:140x2", ["gbv", "lambda-gbv", "cascade", "mss", "rrs", "k-seq"]),
        ("rsd-c:140,1", ["rrs", "traversal"]),
    ],
)
def test_no_coin_decides_twice_in_trees_of_any_size(spec: str, names: list[str], lazy: bool) -> None:
    # Catches coins that are numbered as if no tree were larger than some.
    target = random_rule(150, 1, spread=1.0)
    draft = random_rule(150, 2, near=target, far=0.3)
    tree = grown(spec, draft, SeededSampler(1, 0), Budget(nodes=999, depth=999))
    p = torch.stack([target(tuple(tokens_to(tree, node))) for node in range(len(tree))]).expand(3, -1, -1)
    for name in names:
        found = VERIFIERS.build(name)(TreeBatch([tree] * 3), ExactProbs(p, lazy=lazy), Watched(3)).read()
        assert all(tree.topology.path(verdict.path[-1]) == list(verdict.path) for verdict in found)


# Greedy rows


@pairs
def test_a_greedy_row_among_sampled_ones_is_decided_by_no_coin(name: str, draw: Draw) -> None:
    # p is certain and q is not: whatever is drawn, the longest drafted path that greedy decoding writes is kept.
    mixed = [SamplingParams() if row % 2 else params for row, params in enumerate(SAMPLING)]
    for seed in range(6):
        batch = Batch(SHAPES[draw], seed, sampling=mixed)
        truth = batch.verdicts("match")
        for lazy in (True, False):
            found = batch.verdicts(name, lazy=lazy)
            for row in range(1, len(mixed), 2):
                tree = batch.trees[row]
                written = [*tokens_to(tree, truth[row].path[-1]), truth[row].token]
                emitted = [*tokens_to(tree, found[row].path[-1]), found[row].token]
                if name in ("token", "block"):  # which see the first path only
                    first = tree.paths[0]
                    kept = [node for node in first if node in truth[row].path]
                    assert list(found[row].path) == kept
                    assert emitted == written[: len(emitted)]
                else:
                    assert found[row] == truth[row]


def test_a_batch_of_greedy_rows_asks_chance_for_nothing() -> None:
    for name, draw in PAIRS:
        batch = Batch(SHAPES[draw], 0, sampling=[SamplingParams()] * 6)
        tree_batch = TreeBatch(batch.trees)
        probs = WarpedProbs(batch.logits(tree_batch.nodes), tree_batch, batch.sequences)
        found = VERIFIERS.build(name)(tree_batch, probs, chance=None).read()
        assert found == Match()(tree_batch, probs, chance=None).read()  # type: ignore[arg-type]


# Traced


TABLES = ("tokens", "parents", "depths", "lengths", "paths", "children", "levels", "postorder", "forks", "q")
ROOMY = {
    Draw.PATHS: (["paths:3x3"] * 3, PadShape.for_paths(3, 3)),
    Draw.WITHOUT_REPLACEMENT: (["rsd-c:3,2,1"] * 3, PadShape(nodes=16, children=3, width=6, forks=4)),
}


def inputs(batch: Batch, tree_batch: TreeBatch, reads: Sequence[str]) -> GraphInputs:
    assert tree_batch.q is not None
    q = torch.nn.functional.pad(tree_batch.q, (0, 0, 0, tree_batch.nodes - tree_batch.q.shape[1]))
    numbers = Numbers(tree_batch, batch.chance(), reads, torch.device("cpu")).on_device
    return GraphInputs(numbers, batch.logits(tree_batch.nodes).nan_to_num(0.0), q)


@pytest.mark.parametrize("together", [True, False], ids=["all rows", "rows on the walk"])
@pairs
def test_a_verifier_traced_on_one_batch_serves_every_batch_of_the_same_shapes(
    name: str, draw: Draw, together: bool
) -> None:
    # Catches Python that looks at values: a trace remembers the answer that it got. And rules that read more than they
    # say: a batch of trees that is traced has no other tables.
    specs, room = ROOMY[draw]
    verifier = VERIFIERS.build(name)
    reads = verifier.reads
    sampling = [SamplingParams(temperature=0.9, seed=1)] * 3
    first = Batch(specs, 0, sampling=sampling)
    tree_batch = TreeBatch(first.trees, pad_shape=room)
    probs = WarpedProbs(first.logits(tree_batch.nodes), tree_batch, first.sequences)
    probs.lazy, probs.together = False, together
    traced = trace(as_program(verifier, tree_batch, probs, reads), inputs(first, tree_batch, reads))
    seen = set()
    for seed in range(8):
        batch = Batch(specs, seed, sampling=sampling)
        other = TreeBatch(batch.trees, pad_shape=room)
        found = Verdicts.written(traced(*inputs(batch, other, reads).flat)).read()
        assert found == batch.verdicts(name, lazy=True)
        seen |= {len(verdict.path) for verdict in found}
    assert len(seen) > 1


def test_a_traced_verdict_reads_tables_where_they_were_drafted() -> None:
    """Caught here: a trace whose arguments were other ones than the program's, which ended a sampled text."""
    verifier, sampling = VERIFIERS.build("match"), [SamplingParams(temperature=0.9, seed=1)] * 2
    reads, room, seen = verifier.reads, PadShape(nodes=16), set()

    def given(seed: int) -> tuple[Batch, TreeBatch, GraphInputs]:
        batch = Batch(["rsd-c:3,2,1"] * 2, seed, sampling=sampling)
        trees = TreeBatch(batch.trees, pad_shape=room)
        numbers = Numbers(trees, batch.chance(), (), torch.device("cpu")).on_device
        tables = tuple(trees.host(name) for name in reads)
        return batch, trees, GraphInputs(numbers, batch.logits(trees.nodes).nan_to_num(0.0), None, tables)

    first, trees, inputs = given(0)
    probs = WarpedProbs(inputs.logits, trees, first.sequences)
    probs.lazy = False
    program = as_program(verifier, trees, probs, reads, reads)
    traced = trace(program, inputs)
    for seed in range(8):
        batch, _, inputs = given(seed)
        found = Verdicts.written(traced(*inputs.flat)).read()
        assert found == Verdicts.written(program(*inputs.flat)).read() == batch.verdicts("match")
        seen |= {len(verdict.path) for verdict in found}
    assert len(seen) > 1


# Recorded


class Launching:
    """A pool as it is where there is no device: what it records it runs again."""

    def __init__(self, device: torch.device) -> None:
        pass

    def record(self, run: Callable[[], Tensor]) -> tuple[SimpleNamespace, Tensor]:
        found = run()
        return SimpleNamespace(replay=lambda: found.copy_(run())), found


def recorded(capture: CapturedVerifier, batch: Batch, room: PadShape) -> list[Verdict]:
    tree_batch = TreeBatch(batch.trees, pad_shape=room)
    probs = WarpedProbs(batch.logits(tree_batch.nodes).nan_to_num(0.0), tree_batch, batch.sequences)
    probs.lazy = False
    return capture(tree_batch, probs, batch.chance()).read()


@pairs
def test_a_batch_that_drafts_nothing_is_recorded_too(name: str, draw: Draw, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once, however the roots came about; only `auto`, which asks how trees are drawn, tells two kinds apart."""
    monkeypatch.setattr("branchwise.cuda.verify_graph.Pool", Launching)
    capture = CapturedVerifier(VERIFIERS.build(name), compile=False)
    sampling = [SamplingParams(temperature=0.9)] * 3
    for seed in range(6):
        batch = Batch([["nothing", NOTHING[draw]][seed % 2]] * 3, seed, sampling=sampling)
        assert recorded(capture, batch, ROOMY[draw][1]) == batch.verdicts(name)
    assert len(capture._graphs) == (2 if name == "auto" else 1)


@pairs
def test_bare_roots_beside_trees_are_judged_by_the_same_graph(
    name: str, draw: Draw, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("branchwise.cuda.verify_graph.Pool", Launching)
    capture = CapturedVerifier(VERIFIERS.build(name), compile=False)
    (spec, *_), room = ROOMY[draw]
    sampling = [SamplingParams(temperature=0.9)] * 3
    for seed in range(12):
        specs = [spec if seed % 3 == row or seed & 1 << row else "nothing" for row in range(3)]
        batch = Batch(specs, seed, sampling=sampling)
        assert recorded(capture, batch, room) == batch.verdicts(name)
    assert len(capture._graphs) == 1


@pytest.mark.parametrize("name", ["rrs", "traversal"])
def test_a_graph_with_room_for_few_laws_does_not_judge_trees_with_more(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Caught here: q cut to the rows of the first tree of a shape, as where two drafters share a verifier."""
    monkeypatch.setattr("branchwise.cuda.verify_graph.Pool", Launching)
    capture = CapturedVerifier(VERIFIERS.build(name), compile=False)
    sampling = [SamplingParams(temperature=0.9)] * 3
    room = PadShape(nodes=16, children=3, width=6, forks=4)
    for seed in range(6):
        few, many = (Batch([spec] * 3, seed, sampling=sampling) for spec in ("rsd-c:1,1,1", "rsd-c:3,2,1"))
        assert recorded(capture, few, replace(room, inner=3)) == few.verdicts(name)
        assert recorded(capture, many, room) == many.verdicts(name)


@pairs
def test_greedy_laws_are_recorded_without_q(name: str, draw: Draw, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("branchwise.cuda.verify_graph.Pool", Launching)
    capture = CapturedVerifier(VERIFIERS.build(name), compile=False)
    for seed, spec in enumerate([SHAPES[draw][0], "nothing"] * 3):
        batch = Batch([spec] * 3, seed, sampling=[SamplingParams()] * 3)
        assert recorded(capture, batch, ROOMY[draw][1]) == batch.verdicts("match")
    assert all(recording.inputs.q is None for recording in capture._graphs.values())
    assert capture._graphs


def test_numbers_that_rows_depend_on_are_worked_out_once() -> None:
    # Catches strides that are not those of the numbers: then every row gets the numbers of another.
    def program(numbers: Tensor, logits: Tensor, q: Tensor) -> Tensor:
        shares = torch.stack([numbers[:, 2] / 3, numbers[:, 0] + 1, numbers[:, 1]], dim=1)
        turned = numbers.T.contiguous().T
        return logits.softmax(dim=-1) * shares[:, 1:, None].to(q.dtype) + q * turned[:, :2, None].to(q.dtype)

    generator = torch.Generator().manual_seed(1)
    numbers = torch.rand(2, 3, dtype=torch.float64, generator=generator)
    inputs = GraphInputs(numbers, *torch.rand(2, 2, 2, 600, generator=generator).unbind())
    traced = trace(program, inputs)
    targets = [node.target for node in traced.graph.nodes]
    assert targets.count(torch.ops.aten.as_strided.default) == 2
    assert torch.allclose(traced(*inputs.flat), program(*inputs.flat))


def test_numbers_follow_the_shapes_of_the_trees() -> None:
    """Caught here: tables of the last batch of trees, left because they were told once."""

    def batch(*shapes: tuple[int, ...]) -> TreeBatch:
        return TreeBatch([DraftTree(torch.arange(1, 4), shape) for shape in shapes], pad_shape=PadShape(nodes=4))

    chance, reads = (
        SeededChance(torch.tensor([3, 4]), torch.tensor([5, 6])),
        ("tokens", "parents", "depths", "ancestor_bits"),
    )
    a, b = batch((-1, 0, 0), (-1, 0, 1)), batch((-1, 0, 1), (-1, 0, 0))
    numbers = Numbers(a, chance, reads, torch.device("cpu"))
    for one in (a, b, b, a):
        assert torch.equal(numbers.bring(one, chance), Numbers(one, chance, reads, torch.device("cpu")).on_device)


def test_verdicts_carry_the_tokens_of_their_paths() -> None:
    found = Verdicts(torch.tensor([[0, 2, -1], [0, -1, -1], [0, 1, 3]]), torch.tensor([7, 8, 9]))
    tokens = torch.tensor([[10, 11, 12, 13], [20, 21, 22, 23], [30, 31, 32, 33]])
    with_tokens = found.with_tokens(tokens)
    read = with_tokens.read()
    assert with_tokens.with_tokens(tokens) is with_tokens
    assert [(one.path, one.tokens, one.token) for one in read] == [
        ((0, 2), (12,), 7),
        ((0,), (), 8),
        ((0, 1, 3), (31, 33), 9),
    ]
