"""Passes as a device makes them: sheets, padding and kernels, run here in Triton's interpreter and without a graph."""

from __future__ import annotations

import gc
import random
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from branchwise.backends.transformers.kv_cache import KVCache, Layout, PartialTree
from branchwise.backends.transformers.target import TransformersTarget
from branchwise.core.batch import PadShape, TreeBatch, lay_out
from branchwise.core.rng import SeededChance
from branchwise.core.sampling import SamplingParams
from branchwise.core.sequence import SequenceState
from branchwise.core.target_probs import WarpedProbs
from branchwise.core.topology import chain_topology, topology
from branchwise.core.tree import DraftTree
from branchwise.cuda.advance import advance_inputs
from branchwise.cuda.graphs import GraphedFunction, Pool
from branchwise.cuda.inputs import BATCHES, NODES, PassInputs, Size, fitting, size_for
from branchwise.cuda.layers.groups import Group, groups_of, joined
from branchwise.cuda.verify_graph import bring
from branchwise.draft import build_drafter
from branchwise.engine import Engine, Request
from branchwise.testing import RandomDrafter, ToyTarget
from branchwise.verify import VERIFIERS, Verdict, Verdicts
from tests.conformance.architectures import VOCABULARY, build, served
from tests.conformance.test_target import assert_scores_equal_own_forward, random_tree

pytestmark = pytest.mark.usefixtures("interpreter")

SERVED = served()
FAMILIES = ("llama", "gemma2", "mistral-narrow", "deepseek-v3")
"""grouped heads; soft caps with windows; a window shorter than a tree; values narrower than keys"""


@pytest.mark.parametrize("there", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_pass_by_kernels_scores_trees_as_the_model_does(family: str, there: bool) -> None:
    """Whether the host says which rows are kept, or they move where the verdicts lie."""
    pytest.importorskip("triton", reason="needs Triton's interpreter")
    model = build(SERVED[family])
    target = TransformersTarget(model, slots=4, max_nodes=12, kernels=True)
    rng = random.Random(family)
    sequences = [SequenceState([rng.randrange(VOCABULARY) for _ in range(length)]) for length in (23, 1, 12)]
    for sequence in sequences:
        target.open(sequence)
    for _ in range(2):
        trees = [random_tree(rng, sequence.root, rng.randint(2, 9)) for sequence in sequences]
        assert_scores_equal_own_forward(model, target, sequences, trees)
        paths = [tuple(tree.topology.path(len(tree) - 1)) for tree in trees]
        if there:
            scored = target.score(sequences, TreeBatch(trees))
            target.commit_on_device(scored, Verdicts(padded(paths), torch.full((len(paths),), 7)))
        target.commit(sequences, [Verdict(path, 7) for path in paths])
        for sequence, tree, path in zip(sequences, trees, paths, strict=True):
            sequence.tokens += [*tree.tokens[list(path[1:])].tolist(), 7]
    target.close(sequences.pop(0))
    trees = [random_tree(rng, sequence.root, 5) for sequence in sequences]
    assert_scores_equal_own_forward(model, target, sequences, trees)


def padded(paths: Sequence[tuple[int, ...]]) -> torch.Tensor:
    longest = max(map(len, paths)) + 1
    return torch.tensor([[*path, *[-1] * (longest - len(path))] for path in paths])


def test_trees_without_a_text_change_nothing_for_the_others() -> None:
    """A sheet has room for more: neither what fills it up nor the slots that it does not name may be touched."""
    pytest.importorskip("triton", reason="needs Triton's interpreter")
    target = TransformersTarget(build(SERVED["llama"]), slots=3, max_nodes=16, kernels=True)
    texts = [SequenceState([5, 6, 7]), SequenceState([9, 8, 7, 6])]
    for text in texts:
        target.open(text)
    tree = DraftTree(torch.tensor([7, 1, 2, 3]), (-1, 0, 0, 1))
    alone = target.score(texts[:1], TreeBatch([tree])).logits[0, :4].clone()
    others = [tensor[:, 1:].clone() for tensor in target.store._tensors.values()]
    batch, nodes = target.bucket(1, 5)
    tree_batch = TreeBatch([tree] * 3, pad_shape=PadShape(nodes=nodes))
    assert (batch, nodes) == (1, 8)
    together = target.score(texts[:1], tree_batch).logits
    assert together.shape[:2] == (3, 8)
    torch.testing.assert_close(together[0, :4], alone, rtol=1e-5, atol=1e-5)
    for tensor, before in zip(target.store._tensors.values(), others, strict=True):
        assert torch.equal(tensor[:, 1:], before)


def test_a_tree_at_the_end_of_its_slot_is_scored_although_its_padding_has_no_rows() -> None:
    pytest.importorskip("triton", reason="needs Triton's interpreter")
    model = build(SERVED["llama"])
    target = TransformersTarget(model, slots=2, context=16, max_nodes=5, kernels=True)
    text = SequenceState(list(range(3, 19)))
    target.open(text)
    assert_scores_equal_own_forward(model, target, [text], [DraftTree.chain([text.root, 4, 5, 6, 7])])


def test_levels_of_a_tree_that_grows_are_scored_by_kernels_as_without() -> None:
    """Each level is written behind the rows of those before, and sees some of them."""
    pytest.importorskip("triton", reason="needs Triton's interpreter")
    model = build(SERVED["llama"])
    texts = [SequenceState([5, 6, 7]), SequenceState([9, 8, 7, 6, 5])]
    first, second = np.array([[1, 2], [3, 4]]), np.array([[5, 6], [7, 8]])
    flat, below = np.zeros((2, 2), dtype=np.int64), np.ones((2, 2), dtype=np.int64)
    own = np.tile(np.eye(2, dtype=np.bool_), (2, 1, 1))
    branch = np.array([[[1, 0, 1, 0], [0, 1, 0, 1]], [[0, 1, 1, 0], [1, 0, 0, 1]]], dtype=np.bool_)
    written = PartialTree([2, 2], np.concatenate([flat, below], axis=1))
    found = []
    for kernels in (False, True):
        target = TransformersTarget(model, slots=2, max_nodes=8, kernels=kernels)
        for text in texts:
            target.open(text)
        levels = target.sprout(texts, first, flat, own), target.sprout(texts, second, below, branch, written)
        found.append([level[:, :2].clone() for level in levels])
    for without, by_kernels in zip(*found, strict=True):
        torch.testing.assert_close(by_kernels, without, rtol=1e-4, atol=1e-5)


def test_drafting_with_a_model_by_kernels_writes_the_same_texts() -> None:
    """Levels of growing trees, texts that are caught up with, and the words of rows that earlier levels wrote."""
    pytest.importorskip("triton", reason="needs Triton's interpreter")
    config = SERVED["llama"].__class__(
        **SERVED["llama"].to_dict() | {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
    )
    model = build(config)

    def write(kernels: bool) -> list[list[int]]:
        from branchwise.draft.model.draft_model import Weights
        from branchwise.draft.model.drafter import ModelDrafter
        from branchwise.draft.policies.topk import TopK

        target = TransformersTarget(model, slots=2, context=64, kernels=kernels)
        blurred = build(config)
        for parameter in blurred.parameters():
            parameter += 0.1 * parameter.std() * torch.randn_like(parameter)
        drafter = ModelDrafter(Weights("draft", blurred, None), tree=TopK(5, depth=3, width=2))
        engine = Engine(target, drafter, VERIFIERS.build("match"))
        assert (drafter.weights._idle[0][1]._graphs is not None) == kernels
        asked = [engine.submit(Request(prompt, max_new_tokens=6)) for prompt in ((5, 6, 7), (9, 4))]
        while engine.busy:
            engine.step()
        assert 0 < sum(one.stats.accepted_tokens for one in asked) < sum(one.stats.drafted_tokens for one in asked)
        return [one.token_ids for one in asked]

    assert write(True) == write(False)


def test_sizes_are_few_and_hold_what_is_asked() -> None:
    for batch in range(1, 130):
        for nodes in (1, 3, 17, 64, 65, 128, 129, 500):
            size = size_for(batch, nodes, nodes + 40)
            assert size.batch >= batch
            assert size.nodes >= nodes
            assert size.words * 32 >= nodes + 40
            assert size == size_for(*size[:2], size.words * 32)
    assert fitting(3, NODES) == 4
    assert fitting(129, NODES) == 256
    assert fitting(65, BATCHES) == 128


def test_bits_are_those_of_the_ancestors() -> None:
    rng = random.Random(0)
    for nodes in (1, 31, 32, 33, 70):
        tree = random_tree(rng, 1, nodes)
        ancestors = tree.topology.ancestors.numpy()
        found = np.unpackbits(tree.topology.bits.view(np.uint8), axis=-1, bitorder="little")
        assert np.array_equal(found[:, :nodes].astype(bool), ancestors)
        assert not found[:, nodes:].any()


def test_a_sheet_forgets_what_it_was_told_before() -> None:
    inputs = PassInputs(Size(2, 4, 1), torch.device("cpu"))
    whole = np.array([[0, 1, 2, 3]] * 2)
    inputs.fill([3, 1], [10, 20], whole + 5, whole, np.full((2, 4, 1), 15, dtype=np.int32))
    inputs.fill([2], [7], np.array([[9, 8]]), np.array([[0, 1]]), np.array([[[1], [3]]], dtype=np.int32))
    assert inputs.slots.tolist() == [2, -1]
    assert inputs.lengths.tolist() == inputs.starts.tolist() == [7, 0]
    assert inputs.tokens.tolist() == [[9, 8, 0, 0], [0, 0, 0, 0]]
    assert inputs.positions[0, :2].tolist() == [7, 8]
    assert inputs.ancestor_bits[..., 0].tolist() == [[1, 3, 0, 0], [0, 0, 0, 0]]


def test_tokens_of_a_device_are_copied_there_and_roots_are_told_from_the_host() -> None:
    """Caught here: a drafter's root in the place of the text's, and shapes that are told once and then forgotten."""
    inputs = PassInputs(Size(2, 4, 1), torch.device("cpu"))
    layout = lay_out((chain_topology(3), chain_topology(2)), 4)
    for turn in (1, 2):
        drafted = torch.tensor([[99, 2, 3], [99, 4, 0]]) * turn
        inputs.fill([0, 1], [5, 6 * turn], drafted, layout.depths, layout.ancestor_bits, roots=[7, 8], layout=layout)
        advance_inputs(inputs, 2, drafted, None, None)
        assert inputs.tokens.tolist() == [[7, 2 * turn, 3 * turn, 0], [8, 4 * turn, 0, 0]]
        assert inputs.positions[:, :3].tolist() == [[5, 6, 7], [6 * turn, 6 * turn + 1, 6 * turn]]
        assert inputs.ancestor_bits[..., 0].tolist() == [[1, 3, 7, 0], [1, 3, 0, 0]]
    other = lay_out((chain_topology(1), chain_topology(1)), 4)
    inputs.fill([0], [5], np.array([[7, 0, 0, 0]] * 2), other.depths, other.ancestor_bits, layout=other)
    assert inputs.ancestor_bits[..., 0].tolist() == [[1, 0, 0, 0], [1, 0, 0, 0]]
    assert inputs.depths.count_nonzero() == 0


def test_a_sheet_that_was_interrupted_is_told_anew() -> None:
    inputs, tokens = PassInputs(Size(1, 4, 1), torch.device("cpu")), np.array([[1, 2, 3, 4]])
    a, b = (lay_out((shape,), 4) for shape in (topology((-1, 0, 0, 0)), chain_topology(4)))
    inputs.fill([0], [5], tokens, a.depths, a.ancestor_bits, layout=a)
    with pytest.raises(ValueError, match="broadcast"):
        inputs.fill([0], [5], tokens, b.depths, np.zeros((1, 9, 9), np.int32), layout=b)
    inputs.fill([0], [5], tokens, a.depths, a.ancestor_bits, layout=a)
    assert inputs.depths.tolist() == a.depths.tolist()


def test_moves_name_only_the_texts_of_this_step() -> None:
    layout = Layout(((1, 1),), ((1, 1),))
    cache = KVCache(layout, 2, 8, torch.float32, torch.device("cpu"), by_kernels=True)
    cache._packed([0, 1, 2], [3, 5, 7], [(0, 2, 3), (0, 4), (0, 1)])
    slots, lengths, paths = cache._packed([1, 0, 2], [9, 4, 2], [(0, 2, 3), (0, 2), (0, 3)])
    assert (slots.tolist(), lengths.tolist()) == ([1, 0, 2, -1], [9, 4, 2, -1])
    assert paths.tolist() == [[0, 2, 3, -1], [0, 2, -1, -1], [0, 3, -1, -1], [-1] * 4]


def test_nothing_moves_while_moves_are_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Caught here: a recording that moves rows, which the replay behind it then moves once more."""
    named: list[list[int]] = []

    def record(self: Pool, run: Callable[[], None]) -> tuple[object, None]:
        run()
        return SimpleNamespace(replay=run), None

    monkeypatch.setattr(Pool, "record", record)
    monkeypatch.setattr(
        "branchwise.backends.transformers.kv_cache.move", lambda *inputs: named.append(inputs[-3].tolist())
    )
    layout = Layout(((1, 1),), ((1, 1),))
    store = KVCache(layout, 2, 8, torch.float32, torch.device("cpu"), by_kernels=True)
    store.move.captures = True  # as on a device
    slots, lengths, paths = torch.tensor([1, 0]), torch.tensor([3, 3]), torch.tensor([[0, 2], [0, 2]])
    for _ in range(3):
        store.move(slots, lengths, paths)
    # launched, recorded and replayed, replayed
    assert named == [[1, 0], [-1, -1], [1, 0], [1, 0]]
    assert slots.tolist() == [1, 0]


def test_what_cannot_be_recorded_runs_on_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Caught here: a kernel launched on the current device, over tensors of another."""
    there: list[torch.device] = []

    @contextmanager
    def on(device: torch.device) -> Iterator[None]:
        there.append(device)
        yield
        there.pop()

    monkeypatch.setattr("branchwise.cuda.graphs.on", on)
    second = torch.device("cuda", 1)
    assert GraphedFunction(lambda: list(there), second, capture=False)() == [second]


def foretelling(rng: random.Random) -> DraftTree:
    """A random tree whose siblings differ; small tokens are many, so that it is often right."""
    shape = random_tree(rng, 1, rng.randint(1, 40)).topology
    tokens = [1] * len(shape)
    for below in shape.children:
        for rank, child in enumerate(below):
            tokens[child] = rank
    return DraftTree(torch.tensor(tokens), shape.parents)


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_without_a_walk_match_says_the_same(temperature: float) -> None:
    """On a device all nodes are drawn behind at once; on the host the walk draws behind those it comes to."""
    rng = random.Random(4)
    accepted = 0
    for case in range(60):
        trees = [foretelling(rng) for _ in range(3)]
        texts = [SequenceState([1] * (4 + row), SamplingParams(temperature, seed=case + row)) for row in range(3)]
        batch = TreeBatch(trees, pad_shape=PadShape(nodes=rng.choice([0, 48])))
        logits = torch.randn(3, batch.nodes, 6, generator=torch.Generator().manual_seed(case)) * 2
        probs = WarpedProbs(logits - torch.arange(6), batch, texts)
        found = []
        for lazy in (True, False):
            probs.lazy = lazy
            chance = SeededChance(torch.tensor([text.seed for text in texts]), torch.tensor([3, 4, 5]))
            found.append(VERIFIERS.build("match")(batch, probs, chance).read())
        assert found[0] == found[1]
        accepted += sum(len(verdict.path) - 1 for verdict in found[0])
    assert accepted > 100


@pytest.mark.parametrize("family", ["llama", "qwen2-window", "gpt2", "smollm3"])
def test_a_fused_pass_scores_as_the_model_does(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stacked maps with and without biases, and layers run by the trace of the first of their kind."""
    pytest.importorskip("triton", reason="needs Triton's interpreter")
    ran = []

    def as_it_is(graph: torch.fx.GraphModule) -> Callable[..., object]:
        def run(*inputs: object) -> object:
            ran.append(graph)
            return graph(*inputs)

        return run

    monkeypatch.setattr("branchwise.cuda.layers.fuse.compiled", as_it_is)
    model = build(SERVED[family])
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    target = TransformersTarget(model, slots=1, max_nodes=8, kernels=True, compile=True)
    text = SequenceState([5, 6, 7, 8, 9, 10, 11, 12, 13, 14])
    target.open(text)
    assert_scores_equal_own_forward(model, target, [text], [DraftTree(torch.tensor([14, 1, 2, 3]), (-1, 0, 0, 1))])
    assert len(ran) >= 6, "three layers, checked and used"
    # Windows make two kinds of layers, and so do those that know no positions.
    assert len(set(map(id, ran))) == (2 if family in ("qwen2-window", "smollm3") else 1), "one trace for every kind"
    after = model.state_dict()
    assert after.keys() == before.keys()
    assert all(torch.equal(tensor, before[name]) for name, tensor in after.items())
    assert not any("forward" in module.__dict__ for module in model.modules())


def test_weights_that_are_replaced_are_stacked_anew() -> None:
    """A model that went to another device and back has weights of its own again, and may have been trained."""
    maps = [torch.nn.Linear(4, size, bias=bias) for size, bias in ((3, True), (2, True))]
    group, given = Group(maps), torch.randn(5, 4)
    for _ in range(2):
        expected = [one(given) for one in maps]
        with joined([group]):
            found = [one(given) for one in maps]
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other)
        assert group.weight is not None
        assert maps[1].weight.data_ptr() == group.weight[3:].data_ptr()
        maps[1].weight.data = torch.randn(2, 4)
    with joined([group]):
        maps[0](given)
        torch.testing.assert_close(
            maps[1](other_given := torch.randn(1, 4)), other_given @ maps[1].weight.T + maps[1].bias
        )
    assert not any("forward" in one.__dict__ for one in maps)


def test_all_targets_of_a_model_read_one_stack_of_its_weights() -> None:
    """What one of them recorded reads it for as long as it lives, whatever the others do."""
    pytest.importorskip("triton", reason="needs Triton's interpreter")
    model = build(SERVED["qwen2"])
    places = []
    for _ in range(2):
        target = TransformersTarget(model, slots=2, max_nodes=8, kernels=True)
        text = SequenceState([5, 6, 7])
        target.open(text)
        target.score([text], TreeBatch([DraftTree.chain([7, 1])]))
        places.append([one.weight.data_ptr() for one in model.modules() if isinstance(one, torch.nn.Linear)])
    assert places[0] == places[1]


def test_joined_maps_come_in_one_order_to_all_that_ask() -> None:
    """A program that is compiled for one layer reads the stacks of all others in it."""

    class Pair(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.other = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)

        def forward(self, given: torch.Tensor) -> torch.Tensor:
            return self.one(given) + self.other(given)  # type: ignore[no-any-return]

    model = torch.nn.Sequential(*(Pair() for _ in range(12)))
    first, second = (groups_of(model, lambda: model(torch.zeros(1, 4))) for _ in range(2))
    assert [group.maps[0] for group in first] == [pair.one for pair in model]
    assert second == first


def test_a_target_goes_when_nobody_holds_it() -> None:
    """Its slots are most of a device's memory: they must not wait for a collector."""
    pytest.importorskip("triton", reason="needs Triton's interpreter")
    target = TransformersTarget(build(SERVED["llama"]), slots=1, max_nodes=8, kernels=True)
    Engine(target, build_drafter("none"), VERIFIERS.build("match"))
    gone = weakref.ref(target)
    gc.disable()
    try:
        del target
        assert gone() is None
    finally:
        gc.enable()


def test_logits_are_brought_to_where_a_pass_once_wrote_them() -> None:
    """A pass that is recorded again writes elsewhere; the place of a recorded verdict is what the first one wrote."""
    with torch.inference_mode():
        place = torch.zeros(2, 3)
    values = torch.ones(2, 3)
    bring(values, place)
    assert torch.equal(place, values)


@pytest.mark.parametrize("verifier", ["match", "rrs"])
def test_padding_of_a_batch_changes_no_text(verifier: str) -> None:
    def write(padded: bool) -> list[list[int]]:
        target = ToyTarget(8, padded=padded)
        drafter = RandomDrafter(8, nodes=6) if verifier == "match" else build_drafter("disturbed", tree="rsd-c:2,2")
        engine = Engine(target, drafter, VERIFIERS.build(verifier))
        requests = [
            Request((1, 2, 3 + n), SamplingParams(temperature=n % 2, seed=n), max_new_tokens=6 + n) for n in range(5)
        ]
        asked = [engine.submit(request) for request in requests]
        while engine.busy:
            engine.step()
        return [one.token_ids for one in asked]

    assert write(True) == write(False)
