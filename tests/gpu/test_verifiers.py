"""Verdicts on a device: the same as on the host, without a sync, and from a captured graph."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from branchwise.core.batch import PadShape, TreeBatch
from branchwise.core.rng import SeededChance
from branchwise.core.sampling import SamplingParams
from branchwise.core.sequence import SequenceState
from branchwise.core.target_probs import WarpedProbs
from branchwise.core.tree import DraftTree, Draw
from branchwise.cuda.choices import Choices
from branchwise.cuda.counts import counted, since
from branchwise.cuda.verify_graph import CapturedVerifier, GraphInputs, compiled_or_not, trace
from branchwise.draft import TREES
from branchwise.draft.base import Budget
from branchwise.draft.builder import NodeProbs, grow_with
from branchwise.draft.sampler import SeededSampler
from branchwise.verify import VERIFIERS, Verdicts
from branchwise.verify.order import Order

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

VOCABULARY = 3000
BATCH = 3
PAIRS = [
    (name, tree)
    for name in VERIFIERS
    for tree, draw in (
        ("paths:3x4", Draw.PATHS),
        ("rsd-c:3,2,1", Draw.WITHOUT_REPLACEMENT),
        ("iid:3,2,1", Draw.WITH_REPLACEMENT),
    )
    if draw in VERIFIERS.find(name).accepts
]


def random_laws(count: int, generator: torch.Generator) -> torch.Tensor:
    return (3 * torch.randn(count, VOCABULARY, generator=generator)).softmax(dim=-1)


def draft(tree: str, seed: int) -> tuple[list[DraftTree], torch.Tensor]:
    """Trees of a batch, and the target's logits over them."""
    generator = torch.Generator().manual_seed(seed)
    trees, logits = [], []
    for row in range(BATCH):
        growing = TREES.build(tree).grow(1, Budget(64, 4), SeededSampler(seed * 8 + row, 3))
        trees.append(grow_with(growing, lambda _, nodes: NodeProbs(random_laws(len(nodes), generator))))
        noise = torch.randn(len(trees[-1]), VOCABULARY, generator=generator)
        logits.append(2 * noise)
        rows = len(trees[-1].q)
        logits[-1][:rows] += trees[-1].q.log()
    return trees, torch.nn.utils.rnn.pad_sequence(logits, batch_first=True)


def verdicts(name: str, trees: list[DraftTree], logits: torch.Tensor, seed: int, device: str, capture: object = None):  # type: ignore[no-untyped-def]
    probs = [None if tree.q is None else tree.q.to(device) for tree in trees]
    moved = [
        DraftTree(tree.tokens.to(device), tree.parents, tree.draw, q, tree.leaves, tree.draws)
        for tree, q in zip(trees, probs, strict=True)
    ]
    room = PadShape.for_paths(3, 4) if any(tree.leaves for tree in trees) or len(trees[0]) == 1 else PadShape()
    batch = TreeBatch(moved, device, room)
    logits = torch.nn.functional.pad(logits, (0, 0, 0, batch.nodes - logits.shape[1])).to(device)
    sequences = [SequenceState([0, 1, 2, 1], SamplingParams(temperature=1.0, seed=seed + row)) for row in range(BATCH)]
    seeds = torch.tensor([sequence.seed for sequence in sequences], device=device)
    probs, chance = WarpedProbs(logits, batch, sequences), SeededChance(seeds, torch.full_like(seeds, 3))
    verifier = capture or VERIFIERS.build(name)
    return lambda: verifier(batch, probs, chance)


@pytest.mark.parametrize(("name", "tree"), PAIRS)
def test_a_device_gives_the_verdicts_of_the_host(name: str, tree: str) -> None:
    for seed in range(5):
        trees, logits = draft(tree, seed)
        here = verdicts(name, trees, logits, seed, "cpu")().read()
        assert verdicts(name, trees, logits, seed, "cuda")().read() == here


@pytest.mark.parametrize(("name", "tree"), PAIRS)
def test_a_verdict_waits_for_the_device_only_when_it_is_read(name: str, tree: str) -> None:
    trees, logits = draft(tree, 0)
    verdicts(name, trees, logits, 0, "cuda")().read()  # tables are looked up, libraries loaded
    run = verdicts(name, trees, logits, 1, "cuda")
    run()  # the tables of this batch of trees go over once
    with no_sync():
        found = run()
    assert len(found.read()) == BATCH


@contextmanager
def no_sync() -> Iterator[None]:
    """Whatever waits for the device meanwhile is an error."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the mode is a prototype
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_tokens_are_counted_without_waiting_for_the_device() -> None:
    choices = Choices(4, VOCABULARY, torch.device("cuda"))
    texts = [SequenceState([1, 2, 3], SamplingParams(frequency_penalty=0.5, seed=row)) for row in range(3)]
    choices.bring(texts)
    with no_sync():
        for text in texts:
            text.tokens += [4, 4, 5]
        choices.bring([*texts, SequenceState([6], SamplingParams(repetition_penalty=1.1))])
    assert choices.counts.table[:, 4].tolist().count(2) == 3


@pytest.mark.parametrize("name", ["match", "block", "cascade", "rrs", "traversal", "k-seq"])
@pytest.mark.parametrize("compile", [False, True])
def test_a_captured_verdict_is_the_eager_one(name: str, compile: bool) -> None:
    capture = CapturedVerifier(VERIFIERS.build(name), compile=compile)
    for seed in range(4):
        trees, logits = draft("paths:3x4", seed)
        eager = verdicts(name, trees, logits, seed, "cuda")().read()
        assert verdicts(name, trees, logits, seed, "cuda", capture)().read() == eager
    assert len(capture._graphs) == 1


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_captured_verdict_with_penalties_is_that_of_the_host(temperature: float) -> None:
    """Texts that grow and change places, in one graph for all."""
    params = SamplingParams(
        temperature, repetition_penalty=1.2, presence_penalty=0.5, frequency_penalty=0.3, logit_bias={1: 2.0}, seed=1
    )
    texts = [
        SequenceState([0, 1, 2, 1], params if row else SamplingParams(temperature, seed=1)) for row in range(BATCH)
    ]
    capture, match = CapturedVerifier(VERIFIERS.build("match")), VERIFIERS.build("match")
    kept, before = 0, counted()
    for seed in range(6):
        trees, logits = draft("paths:3x4", seed)
        for row, tree in zip(logits, trees, strict=True):
            row[list(tree.parents[1:]), tree.tokens[1:]] = 2.0  # a draft that is often right
        seeds, roots = torch.full((BATCH,), seed), torch.tensor([len(text.tokens) - 1 for text in texts])
        batch = TreeBatch(trees, pad_shape=PadShape.for_paths(3, 4))
        logits = torch.nn.functional.pad(logits, (0, 0, 0, batch.nodes - logits.shape[1]))
        wanted = match(batch, WarpedProbs(logits, batch, texts), SeededChance(seeds, roots)).read()
        there = TreeBatch(trees, "cuda", PadShape.for_paths(3, 4))
        probs = WarpedProbs(logits.cuda(), there, texts)
        chance = SeededChance(seeds, roots, device=torch.device("cuda"))
        assert capture(there, probs, chance).read() == wanted
        for text, tree, verdict in zip(texts, trees, wanted, strict=True):
            text.tokens += [*tree.tokens[list(verdict.path[1:])].tolist(), verdict.token]
            kept += len(verdict.path) - 1
        texts = [*texts[1:], texts[0]]
    assert kept > 6
    assert len(capture._graphs) == 1
    assert "eager" not in since(before)


@pytest.mark.parametrize("name", ["token", "block", "gbv", "cascade", "rrs", "traversal", "k-seq", "auto"])
@pytest.mark.parametrize("compile", [False, True])
def test_a_captured_verdict_on_bare_roots_is_the_eager_one(name: str, compile: bool) -> None:
    """Alone, and beside trees that were drawn."""
    capture = CapturedVerifier(VERIFIERS.build(name), compile=compile)
    for seed in range(8):
        trees, logits = draft("paths:3x4", seed)
        for row in range(BATCH):
            if seed % 2 or row == seed // 2 % BATCH:
                trees[row] = DraftTree(torch.tensor([1]), (-1,))
        eager = verdicts(name, trees, logits, seed, "cuda")().read()
        assert verdicts(name, trees, logits, seed, "cuda", capture)().read() == eager
    assert len(capture._graphs) == 2


@pytest.mark.parametrize("name", ["block", "cascade", "traversal", "k-seq"])
def test_a_verdict_on_what_was_written_where_its_graph_reads_is_the_eager_one(name: str) -> None:
    capture = CapturedVerifier(VERIFIERS.build(name), compile=False)

    def placed(batch: TreeBatch, probs: WarpedProbs, chance: SeededChance) -> Verdicts:
        capture(batch, probs, chance)
        [recording], same = capture._graphs.values(), copy.copy(batch)
        inputs = recording.inputs
        q = inputs.q[:, : batch.q.shape[1]]
        same.__dict__["q"] = q.copy_(batch.q[:, : q.shape[1]])
        probs = probs.over(inputs.logits.copy_(probs.logits), same)
        capture(same, probs, chance)  # a program that writes to its inputs would judge others the second time
        return capture(same, probs, chance)

    for seed in range(4):
        trees, logits = draft("paths:3x4", seed)
        eager = verdicts(name, trees, logits, seed, "cuda")().read()
        assert verdicts(name, trees, logits, seed, "cuda", placed)().read() == eager


@pytest.mark.parametrize("vocabulary", [VOCABULARY, 3072])
def test_a_compiled_order_ranks_the_tokens_of_the_last_block_too(vocabulary: int) -> None:
    # On the host torch 2.13 compiles this into nonsense there, which a verdict shows once in a thousand tokens.
    generator = torch.Generator().manual_seed(0)
    p, q = (3 * torch.randn(2, 2, 3, vocabulary, generator=generator)).softmax(dim=-1).cuda()

    def program(p: torch.Tensor, q: torch.Tensor, _: object) -> torch.Tensor:
        return Order(p, q, lazy=False).below()

    inputs = GraphInputs(p, q, q)
    torch.testing.assert_close(compiled_or_not(trace(program, inputs), inputs)(*inputs.flat), program(*inputs.flat))
