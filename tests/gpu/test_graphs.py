"""Recorded passes: the same as those that are not, for any text, and recorded once for a size."""

from __future__ import annotations

import logging
import random
import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig

from branchwise.backends.base import Scored
from branchwise.backends.transformers.target import TransformersTarget
from branchwise.core.batch import PadShape, TreeBatch
from branchwise.core.sampling import SamplingParams
from branchwise.core.sequence import SequenceState
from branchwise.core.tree import DraftTree
from branchwise.cuda.graphs import Pool
from branchwise.cuda.inputs import PassInputs
from branchwise.draft import build_drafter
from branchwise.engine import Engine, Request
from branchwise.testing import RandomDrafter
from branchwise.verify import VERIFIERS, Verdict, Verdicts
from tests.conformance.architectures import VOCABULARY, build, served
from tests.conformance.test_target import assert_scores_equal_own_forward, random_tree
from tests.test_inflight import Watched

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

SERVED = served()


def scores(target: TransformersTarget, seed: int) -> list[Tensor]:
    """Six steps of three texts with random trees and random accepted paths, which move where the verdicts lie, in the
    same place every time, or as the host says."""
    rng = random.Random(seed)
    texts = [SequenceState([rng.randrange(VOCABULARY) for _ in range(length)]) for length in (23, 1, 12)]
    for text in texts:
        target.open(text)
    found = []
    judged = torch.zeros(3, 9, dtype=torch.int64, device="cuda")
    for step in range(6):
        trees = [random_tree(rng, text.root, rng.randint(1, 9)) for text in texts]
        scored = target.score(texts, TreeBatch(trees, "cuda", PadShape(nodes=9)))
        logits = scored.logits
        found += [logits[row, : len(tree)].clone() for row, tree in enumerate(trees)]
        paths = [tuple(tree.topology.path(rng.randrange(len(tree)))) for tree in trees]
        if step < 4:
            judged.copy_(torch.tensor([[*path, *[-1] * (9 - len(path))] for path in paths]))
            target.commit_on_device(scored, Verdicts(judged, judged[:, 0]))
        target.commit(texts, [Verdict(path, rng.randrange(VOCABULARY)) for path in paths])
        for text, tree, path in zip(texts, trees, paths, strict=True):
            text.tokens += [*tree.tokens[list(path[1:])].tolist(), rng.randrange(VOCABULARY)]
    for text in texts:
        target.close(text)
    return found


@pytest.mark.parametrize("family", SERVED)
def test_a_recorded_pass_finds_what_the_same_kernels_find_one_by_one(family: str) -> None:
    model = build(SERVED[family], device="cuda")
    recorded = TransformersTarget(model, slots=3, max_nodes=12)
    launched = TransformersTarget(model, slots=3, max_nodes=12, graphs=False)
    for seed in range(2):  # the second time everything is replayed
        for one, other in zip(scores(recorded, seed), scores(launched, seed), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen2-window", "gemma2", "gpt2"])
def test_a_compiled_pass_scores_as_the_model_does(family: str, caplog: pytest.LogCaptureFixture) -> None:
    model = build(SERVED[family], device="cuda")
    target = TransformersTarget(model, slots=2, max_nodes=12, compile=True, layers=False)
    rng = random.Random(family)
    texts = [SequenceState([rng.randrange(VOCABULARY) for _ in range(length)]) for length in (23, 7)]
    for text in texts:
        target.open(text)
    with caplog.at_level(logging.WARNING):
        trees = [random_tree(rng, text.root, 7) for text in texts]
        assert_scores_equal_own_forward(model, target, texts, trees)
        assert_scores_equal_own_forward(model, target, texts, trees)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]  # tests of others log more


@pytest.mark.parametrize("nodes", [1, 8, 48])
@pytest.mark.parametrize(
    ("dtype", "layers"),
    [
        (torch.bfloat16, True),
        (torch.float16, True),
        *((kind, False) for kind in (torch.bfloat16, torch.float16, torch.float32)),
    ],
)
def test_every_layer_of_a_large_residual_stream_runs_in_few_kernels_or_compiled(
    dtype: torch.dtype, nodes: int, layers: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """In the widths of SmolLM2, with a stream hundreds of times larger than what a layer adds."""
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=6,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=128,
    )
    model = build(config, dtype, "cuda")
    model.get_input_embeddings().weight.mul_(1e4)
    target = TransformersTarget(model, slots=1, max_nodes=64, compile=not layers, layers=layers)
    text = SequenceState(list(range(40)))
    target.open(text)
    with caplog.at_level(logging.WARNING, "branchwise.cuda.layers.fuse"):
        target.score([text], TreeBatch([DraftTree.chain([39, *[7] * (nodes - 1)])], "cuda"))
    ours = [record for record in caplog.records if record.name.startswith("branchwise.")]  # compilers write much more
    assert [record.getMessage() for record in ours] == []


def test_a_recording_that_breaks_off_at_its_end_leaves_nothing_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where another graph ends in the middle of it: what was recorded before, and what is launched, goes on."""
    model = build(SERVED["qwen2"], device="cuda")
    target = TransformersTarget(model, slots=3, max_nodes=12)
    launched = TransformersTarget(model, slots=3, max_nodes=12, graphs=False)
    scores(target, 0)
    other, _ = Pool(target.device).record(lambda: torch.zeros(3, device="cuda") + 1)
    own, here = target.run_packed, torch.cuda.current_stream()

    def breaking(inputs: PassInputs) -> Scored:
        found = own(inputs)
        if torch.cuda.is_current_stream_capturing():
            other.reset()
        return found

    monkeypatch.setattr(target, "run_packed", breaking)
    target._graphs._ready.popitem()  # type: ignore[union-attr]  # that of these trees, the last one used
    for seed in (1, 2):
        for one, another in zip(scores(target, seed), scores(launched, seed), strict=True):
            torch.testing.assert_close(one, another, rtol=1e-5, atol=1e-5)
    assert torch.cuda.current_stream() == here
    assert not target._graphs.captures  # type: ignore[union-attr]


def test_targets_of_one_model_record_in_turn_and_read_weights_that_are_still_there() -> None:
    """As drafters with different heads do. Maps that were stacked anew for each would leave the graphs of the others
    with memory that is given back to the device when somebody records next."""
    model = build(SERVED["qwen2"], device="cuda")
    one, other = (TransformersTarget(model, slots=3, max_nodes=12) for _ in range(2))
    expected = scores(one, 0)
    for target in (other, one):
        text = SequenceState([3, 4, 5])
        target.open(text)
        target.score([text], TreeBatch([DraftTree.chain([5, 6, 7])], "cuda"))  # a size of its own
        target.close(text)
        torch.cuda.empty_cache()
    for found, value in zip(scores(one, 0), expected, strict=True):
        torch.testing.assert_close(found, value)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("verifier", ["match", "traversal"])
def test_texts_join_and_leave_without_a_new_recording(temperature: float, verifier: str) -> None:
    """And each is the text that it would be alone, on the host."""
    requests = [Request((5, 6, 7 + n), SamplingParams(temperature, seed=n), max_new_tokens=5 + 3 * n) for n in range(9)]

    def drafter() -> object:
        return RandomDrafter(VOCABULARY, nodes=6) if verifier == "match" else build_drafter("disturbed", "rsd-c:2,2")

    host = TransformersTarget(build(SERVED["llama"]), slots=1)
    alone = []
    for request in requests:
        engine = Engine(host, drafter(), VERIFIERS.build(verifier))  # type: ignore[arg-type]
        text = engine.submit(request)
        while engine.busy:
            engine.step()
        alone.append(text.token_ids)
    target = TransformersTarget(build(SERVED["llama"], device="cuda"), slots=4)
    engine = Engine(target, drafter(), VERIFIERS.build(verifier))  # type: ignore[arg-type]
    texts = [engine.submit(request) for request in requests]
    while engine.busy:
        engine.step()
    assert [text.token_ids for text in texts] == alone
    assert target._graphs is not None
    assert {size.batch for size in target._graphs._ready} <= {1, 2, 4}
    assert all(recorded.graph is not None for recorded in target._graphs._ready.values())


def test_a_model_that_cannot_be_recorded_is_served_without_and_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    model = build(SERVED["llama"], device="cuda")
    norm = model.model.norm.forward

    def looks(hidden: Tensor) -> Tensor:
        assert hidden.isfinite().all()  # a look at the device, which no graph can hold
        return norm(hidden)

    model.model.norm.forward = looks
    with caplog.at_level(logging.WARNING):
        target = TransformersTarget(model, slots=3, max_nodes=12)
        found = scores(target, 0)
    assert len(caplog.records) == 1
    assert "cannot be captured" in caplog.text
    plain = TransformersTarget(build(SERVED["llama"], device="cuda"), slots=3, max_nodes=12, graphs=False)
    for one, other in zip(found, scores(plain, 0), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def test_a_step_looks_at_the_device_once() -> None:
    """Whatever waits for the device besides the reading of the verdicts would raise here."""
    target = TransformersTarget(build(SERVED["llama"], device="cuda"), slots=2)
    engine = Engine(target, build_drafter("ngram"), VERIFIERS.build("match"))
    texts = [engine.submit(Request((5, 6, 5, 6, 5, 6), max_new_tokens=40)) for _ in range(2)]
    for _ in range(6):
        engine.step()  # sizes are recorded
    read = []

    def reading(self):  # type: ignore[no-untyped-def]
        torch.cuda.set_sync_debug_mode("default")
        read.append(1)
        try:
            return own(self)
        finally:
            torch.cuda.set_sync_debug_mode("error")

    from branchwise.verify import Verdicts

    own = Verdicts.read
    Verdicts.read = reading  # type: ignore[method-assign]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that the mode is a prototype
            torch.cuda.set_sync_debug_mode("error")
        for _ in range(3):
            engine.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
        Verdicts.read = own  # type: ignore[method-assign]
    assert len(read) == 3
    assert all(len(text.token_ids) > 8 for text in texts)


def test_a_pass_that_is_recorded_again_serves_verdicts_recorded_before() -> None:
    """A drafter that wants the best tokens told makes all sizes be recorded anew, at other places."""
    target = TransformersTarget(build(SERVED["llama"], device="cuda"), slots=2)
    request = Request((5, 6, 7), max_new_tokens=12, logprobs=True)
    texts = []
    for drafter in ("none", "recycle", "none"):
        engine = Engine(target, build_drafter(drafter), VERIFIERS.build("match"))
        text = engine.submit(request)
        while engine.busy:
            engine.step()
        texts.append([(piece.token, round(piece.logprob or 0.0, 3)) for piece in text.pieces])
    assert texts[0] == texts[1] == texts[2]


def test_models_in_two_threads_write_what_each_writes_alone() -> None:
    requests = [Request((5, 6, 7 + n), SamplingParams(0.8, seed=n), max_new_tokens=30) for n in range(4)]

    def write(target: TransformersTarget) -> list[list[int]]:
        engine = Engine(target, RandomDrafter(VOCABULARY, nodes=6), VERIFIERS.build("match"))
        texts = [engine.submit(request) for request in requests]
        while engine.busy:
            engine.step()
        return [text.token_ids for text in texts]

    model = build(SERVED["llama"], device="cuda")
    targets = [TransformersTarget(model, slots=4), TransformersTarget(build(SERVED["qwen2"], device="cuda"), slots=4)]
    alone = [write(target) for target in targets]
    fresh = [TransformersTarget(target.model, slots=4) for target in targets]
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(write, fresh)) == alone


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("draft", ["none", "memories"])
def test_most_passes_begin_before_the_host_has_read_what_they_stand_behind(
    draft: str, temperature: float, batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the texts are those of passes that waited."""
    model, texts = build(SERVED["llama"], device="cuda"), []
    for waits in (True, False):
        target = Watched(model, slots=3)
        if waits:
            monkeypatch.setattr(target, "launch", lambda *given: None)
        engine = Engine(target, build_drafter(draft), VERIFIERS.build("match"))
        sampling = SamplingParams(temperature=temperature, seed=4)
        asked = [
            engine.submit(Request(prompt, sampling, max_new_tokens=60 + 7 * len(prompt)))
            for prompt in ((5, 6, 7), (9,), (30, 31))[:batch]
        ]
        steps = 0
        while engine.busy:
            engine.step()
            steps += 1
        texts.append([one.token_ids for one in asked])
        assert target.served == 0 if waits else target.served > steps / 3
    assert texts[0] == texts[1]
