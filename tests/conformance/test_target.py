"""Every family of models, scored as trees in one pass, against its own plain forward."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from transformers import AttentionInterface, LlamaConfig, PreTrainedModel, T5Config, T5ForConditionalGeneration

from branchwise.backends.base import Chunk, Needs, Target
from branchwise.backends.transformers.probe import context_limit
from branchwise.backends.transformers.target import TransformersTarget
from branchwise.core.batch import TreeBatch
from branchwise.core.sampling import SamplingParams
from branchwise.core.sequence import SequenceState
from branchwise.core.tree import DraftTree
from branchwise.draft import build_drafter
from branchwise.engine import Engine, Request
from branchwise.errors import ModelError, UnsupportedModel, UsageError
from branchwise.testing import RandomDrafter, ToyTarget
from branchwise.verify import VERIFIERS, Verdict
from tests.conformance.architectures import COMMON, VOCABULARY, build, refused, served

SERVED = served()
TOLERANCE = 2e-5


def random_tree(rng: random.Random, root: int, nodes: int) -> DraftTree:
    parents = [-1]
    for node in range(1, nodes):
        parents.append(rng.randint(max(parents[-1], 0), node - 1))
    tokens = [root] + [rng.randrange(VOCABULARY) for _ in range(nodes - 1)]
    return DraftTree(torch.tensor(tokens), tuple(parents))


def own_logits(model: PreTrainedModel, tokens: list[int]) -> Tensor:
    """The model's own distribution after these tokens: one plain forward, nothing of ours."""
    with torch.inference_mode():
        return model(input_ids=torch.tensor([tokens], device=model.device)).logits[0, -1].float()


def assert_scores_equal_own_forward(
    model: PreTrainedModel, target: TransformersTarget, sequences: list[SequenceState], trees: list[DraftTree]
) -> None:
    logits = target.score(sequences, TreeBatch(trees, target.device)).logits
    for row, (sequence, tree) in enumerate(zip(sequences, trees, strict=True)):
        for node in range(len(tree)):
            path = tree.tokens[tree.topology.path(node)].tolist()
            own = own_logits(model, sequence.tokens[:-1] + path)
            error = (logits[row, node].float() - own).abs().max() / own.abs().max()
            assert error < TOLERANCE, f"sequence {row}, node {node}: relative error {error:.1e}"


@pytest.mark.parametrize("family", SERVED)
def test_tree_scores_equal_the_models_own_forward_before_and_after_commits(family: str) -> None:
    """Three sequences of different lengths, different trees, four steps with random accepted paths in between."""
    model = build(SERVED[family])
    target = TransformersTarget(model, slots=4, max_nodes=12, prefill_chunk=7)
    rng = random.Random(family)
    sequences = [SequenceState([rng.randrange(VOCABULARY) for _ in range(length)]) for length in (23, 1, 12)]
    for sequence in sequences:
        target.open(sequence)
    for step in range(4):
        trees = [random_tree(rng, sequence.root, rng.randint(1, 9)) for sequence in sequences]
        assert_scores_equal_own_forward(model, target, sequences, trees)
        verdicts = []
        for tree in trees:
            path = tree.topology.path(rng.randrange(len(tree)))
            verdicts.append(Verdict(tuple(path), rng.randrange(VOCABULARY)))
        target.commit(sequences, verdicts)
        for sequence, tree, verdict in zip(sequences, trees, verdicts, strict=True):
            sequence.tokens += [*tree.tokens[list(verdict.path[1:])].tolist(), verdict.token]
        if step == 1:  # leave from the middle: the last sequence moves into the gap
            target.close(sequences.pop(0))
            newcomer = SequenceState([rng.randrange(VOCABULARY) for _ in range(9)])
            target.open(newcomer)
            sequences.insert(rng.randrange(3), newcomer)


@pytest.mark.parametrize("family", SERVED)
def test_a_batch_scores_like_its_sequences_alone(family: str) -> None:
    model = build(SERVED[family])
    target = TransformersTarget(model, slots=3, max_nodes=12)
    rng = random.Random(family)
    sequences = [SequenceState([rng.randrange(VOCABULARY) for _ in range(length)]) for length in (5, 17, 11)]
    trees = [random_tree(rng, sequence.root, nodes) for sequence, nodes in zip(sequences, (7, 1, 4), strict=True)]
    for sequence in sequences:
        target.open(sequence)
    together = target.score(sequences, TreeBatch(trees)).logits
    for row, (sequence, tree) in enumerate(zip(sequences, trees, strict=True)):
        alone = target.score([sequence], TreeBatch([tree])).logits[0]
        torch.testing.assert_close(together[row, : len(tree)], alone, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", SERVED)
def test_a_forked_sequence_scores_exactly_as_one_that_was_opened(family: str) -> None:
    """Also after source and fork have gone different ways, and after the source has left."""
    target = TransformersTarget(build(SERVED[family]), slots=3, max_nodes=12)
    rng = random.Random(family)
    tokens = [rng.randrange(VOCABULARY) for _ in range(17)]
    source, opened, forked = (SequenceState(list(tokens)) for _ in range(3))
    target.open(source)
    tree = random_tree(rng, source.root, 6)
    path = tuple(tree.topology.path(5))
    target.score([source], TreeBatch([tree]))
    target.commit([source], [Verdict(path, 7)])
    for sequence in (source, opened, forked):
        sequence.tokens += [*tree.tokens[list(path[1:])].tolist(), 7]
    target.fork(source, forked)
    passes = [
        target.score([sequence], TreeBatch([random_tree(random.Random(1), 7, 9)])) for sequence in (source, forked)
    ]
    assert torch.equal(passes[0].logits, passes[1].logits)
    target.commit([source, forked], [Verdict((0,), 3), Verdict((0,), 4)])
    source.tokens.append(3)
    forked.tokens.append(4)
    target.close(source)  # the fork moves into its slot
    opened.tokens.append(4)
    target.open(opened)
    tree = random_tree(rng, 4, 9)
    assert_scores_equal_own_forward(target.model, target, [forked, opened], [tree, tree])


def test_a_fork_writes_nothing_into_its_source_and_runs_no_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    target = TransformersTarget(build(SERVED["llama"]), slots=2, max_nodes=8)
    source, forked = SequenceState([5, 6, 7, 8]), SequenceState([5, 6, 7, 8])
    target.open(source)
    before = [tensor[:, 0].clone() for tensor in target.store._tensors.values()]
    with monkeypatch.context() as patch:
        patch.setattr(target.runner, "run", None)
        target.fork(source, forked)
        target.close(forked)
        assert not any(tensor[:, 1].any() for tensor in target.store._tensors.values())
        target.fork(source, forked)
    assert target.free_slots == 0
    target.score([forked], TreeBatch([DraftTree.chain([8, 9, 10])]))
    target.commit([forked], [Verdict((0, 1, 2), 11)])
    for tensor, rows in zip(target.store._tensors.values(), before, strict=True):
        assert torch.equal(tensor[:, 0], rows)
    target.close(forked)
    assert not any(tensor[:, 1].any() for tensor in target.store._tensors.values())


@pytest.mark.parametrize("make", [lambda: TransformersTarget(build(SERVED["llama"]), slots=2), lambda: ToyTarget(96)])
def test_a_fork_of_other_tokens_is_refused(make: Callable[[], Target]) -> None:
    target = make()
    source = SequenceState([5, 6, 7])
    target.open(source)
    free = target.free_slots
    with pytest.raises(AssertionError, match="other tokens than its source"):
        target.fork(source, SequenceState([5, 6, 8]))
    assert target.free_slots == free


@pytest.mark.parametrize("make", [lambda: TransformersTarget(build(SERVED["llama"]), slots=3), lambda: ToyTarget(96)])
def test_texts_from_a_forked_prompt_are_those_from_an_opened_one(make: Callable[[], Target]) -> None:
    """Five texts through the free slots beside the one that holds the prompt."""
    target = make()
    engine = Engine(target, RandomDrafter(96, nodes=6), VERIFIERS.build("match"))
    requests = [
        Request((5, 6, 7, 8), max_new_tokens=5 + seed, sampling=SamplingParams(1.0, seed=seed)) for seed in range(5)
    ]
    plain = [engine.submit(request) for request in requests]
    while engine.busy:
        engine.step()
    source = SequenceState([5, 6, 7, 8])
    target.open(source)
    forked = [engine.submit(request, like=source) for request in requests]
    while engine.busy:
        engine.step()
        if isinstance(target, TransformersTarget):
            assert target.store.current is not None
            assert isinstance(target.store.current.slots, slice)
    target.close(source)
    assert [generation.token_ids for generation in forked] == [generation.token_ids for generation in plain]


def test_a_pass_reads_views_also_after_a_sequence_has_left() -> None:
    """Catches an engine whose order drifts from the slots, so that every pass would copy the whole cache."""
    target = TransformersTarget(build(SERVED["llama"]), slots=4)
    engine = Engine(target, build_drafter("none"), VERIFIERS.build("match"))
    for length in (2, 9, 5, 9):
        engine.submit(Request((5, 6, 7), max_new_tokens=length))
    while engine.busy:
        engine.step()
        assert target.store.current is not None
        assert isinstance(target.store.current.slots, slice)


def test_a_context_that_memory_cannot_hold_is_shortened_or_refused_with_numbers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = LlamaConfig(**(COMMON | {"max_position_embeddings": 1 << 17}))
    model = build(config)
    monkeypatch.setattr("branchwise.backends.transformers.probe.free_memory", lambda device: 1 << 22)
    shortened = TransformersTarget(model, slots=2).context
    assert 512 <= shortened < 1 << 17
    with pytest.raises(ModelError, match=rf"GiB are free; ask for a context of at most {shortened}"):
        TransformersTarget(model, slots=2, context=shortened + 1)


def test_a_subset_in_any_order_reads_its_own_slots() -> None:
    """Catches a view that assumes the sequences of a pass stand side by side."""
    model = build(SERVED["llama"])
    target = TransformersTarget(model, slots=4, max_nodes=8)
    rng = random.Random(1)
    sequences = [SequenceState([rng.randrange(VOCABULARY) for _ in range(6 + i)]) for i in range(4)]
    for sequence in sequences:
        target.open(sequence)
    chosen = [sequences[3], sequences[0], sequences[2]]
    trees = [random_tree(rng, sequence.root, 5) for sequence in chosen]
    assert_scores_equal_own_forward(model, target, chosen, trees)


@pytest.mark.parametrize("chunk", [1, 3, 64])
@pytest.mark.parametrize("family", ["llama", "gemma2", "gemma3", "qwen2-moe"])
def test_prefill_gives_the_same_law_in_chunks_of_any_size(family: str, chunk: int) -> None:
    model = build(SERVED[family])
    target = TransformersTarget(model, slots=2, max_nodes=8, prefill_chunk=chunk)
    tokens = [(7 * i) % VOCABULARY for i in range(30)]
    sequence = SequenceState(list(tokens))
    target.open(sequence)
    assert_scores_equal_own_forward(model, target, [sequence], [DraftTree.root(sequence.root)])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", SERVED)
def test_low_precision_stays_close_to_the_models_own_forward(family: str, dtype: torch.dtype) -> None:
    """Expert routing may flip between two experts of equal weight, so the median node is compared, not the worst."""
    model = build(SERVED[family], dtype)
    target = TransformersTarget(model, slots=2, max_nodes=12)
    rng = random.Random(3)
    sequence = SequenceState([rng.randrange(VOCABULARY) for _ in range(14)])
    tree = random_tree(rng, sequence.root, 9)
    target.open(sequence)
    logits = target.score([sequence], TreeBatch([tree])).logits[0].float()
    errors = []
    for node in range(len(tree)):
        path = tree.tokens[tree.topology.path(node)].tolist()
        own = own_logits(model, sequence.tokens[:-1] + path)
        errors.append(((logits[node] - own).norm() / own.norm()).item())
    assert sorted(errors)[len(errors) // 2] < 0.05


@pytest.mark.parametrize("family", refused())
def test_a_family_that_cannot_be_exact_is_refused_with_the_reason(family: str) -> None:
    config, reason = refused()[family]
    with pytest.raises(UnsupportedModel, match=reason) as caught:
        TransformersTarget(build(config), slots=2)
    assert "\n" not in str(caught.value)


def test_an_encoder_decoder_is_refused() -> None:
    config = T5Config(vocab_size=VOCABULARY, d_model=16, d_kv=4, d_ff=16, num_layers=1, num_heads=2)
    with pytest.raises(UnsupportedModel, match="encoder-decoder"):
        TransformersTarget(T5ForConditionalGeneration(config).eval(), slots=1)


def test_a_model_that_takes_positions_from_its_cache_is_refused() -> None:
    """Catches what no keyword shows: such a model is right for one sequence and wrong for a batch of trees."""
    model = build(SERVED["llama"])
    forward = model.forward

    def from_cache(*args: object, position_ids: Tensor | None = None, **kwargs: object) -> object:
        steps = None if position_ids is None else torch.arange(position_ids.shape[1])[None]
        return forward(*args, position_ids=steps, **kwargs)

    model.forward = from_cache  # type: ignore[method-assign, assignment]
    with pytest.raises(UnsupportedModel, match="differ from its own forward"):
        TransformersTarget(model, slots=2)


@pytest.mark.parametrize("rope_type", ["dynamic", "longrope"])
def test_rope_that_depends_on_the_longest_sequence_is_served_up_to_its_original_length(rope_type: str) -> None:
    factors = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4} if rope_type == "longrope" else {}
    rope = {"rope_type": rope_type, "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32, **factors}
    config = LlamaConfig(**COMMON, rope_parameters=rope)
    assert context_limit(config) == 32
    with pytest.raises(UsageError, match="context of 32"):
        TransformersTarget(build(config), slots=1, context=64)


def test_hidden_states_of_named_layers_come_with_every_pass() -> None:
    model = build(SERVED["llama"])
    target = TransformersTarget(model, slots=3, max_nodes=8, prefill_chunk=3)
    assert target.info.layers[1] == "model.layers.1"
    assert target.info.layers[-1] == "model.norm"
    target.require(Needs(hidden_layers=("model.layers.1",)))
    sequence, forked = SequenceState([5, 6, 7, 8, 9, 4]), SequenceState([5, 6, 7, 8, 9, 4])
    opened = target.open(sequence)
    tree = DraftTree(torch.tensor([4, 8, 9]), (-1, 0, 0))
    scored = target.score([sequence], TreeBatch([tree]))
    hidden = scored.hidden["model.layers.1"]
    assert hidden.shape == (1, 3, 32)
    assert not any(module._forward_hooks for module in model.modules())
    with torch.inference_mode():
        own = model(input_ids=torch.tensor([[5, 6, 7, 8, 9, 4, 9]]), output_hidden_states=True).hidden_states[2][0]
    torch.testing.assert_close(hidden[0, 2], own[-1], rtol=1e-4, atol=1e-5)
    prompt = opened.hidden["model.layers.1"]  # of two chunks, the root left out
    torch.testing.assert_close(prompt, own[:5], rtol=1e-4, atol=1e-5)
    assert torch.equal(target.fork(sequence, forked).hidden["model.layers.1"], prompt)
    with pytest.raises(UsageError, match=r"no layer 'model.layer.1'.*model.layers.1"):
        target.require(Needs(hidden_layers=("model.layer.1",)))


def test_several_prompts_in_one_prefill_pass_are_as_each_alone() -> None:
    model = build(SERVED["llama"])
    target = TransformersTarget(model, slots=3, max_nodes=8)
    texts = [SequenceState(list(range(start, start + length))) for start, length in ((3, 9), (20, 8), (40, 9))]
    for text in texts:
        target.reserve(text)
    chunks = [Chunk(text, text.tokens[:-1], keep) for text, keep in zip(texts, (2, 3, 0), strict=True)]
    passes = []
    own = target.runner.run
    target.runner.run = lambda *given: passes.append(1) or own(*given)  # type: ignore[method-assign,func-returns-value]
    found = target.prefill(chunks)
    assert len(passes) == 1
    assert [len(part.logits) for part in found] == [2, 3, 0]
    for text, part in zip(texts, found, strict=True):
        whole = target.own_logits(torch.tensor([text.tokens[:-1]]))[0]
        if len(part.logits):
            torch.testing.assert_close(part.logits, whole[-len(part.logits) :], rtol=1e-4, atol=1e-5)
    trees = [DraftTree.chain([text.root, 5, 6]) for text in texts]
    assert_scores_equal_own_forward(model, target, texts, trees)


def test_the_model_is_left_as_it_was_found() -> None:
    model = build(SERVED["gemma3"])
    gc.collect()
    names = set(AttentionInterface._global_mapping)
    before = model.config._attn_implementation
    target = TransformersTarget(model, slots=1)
    assert model.config._attn_implementation == before
    sequence = SequenceState([1, 2, 3])
    target.open(sequence)
    assert model.config._attn_implementation == before
    del target
    gc.collect()
    assert set(AttentionInterface._global_mapping) == names


def test_nothing_of_a_text_stays_behind_in_its_slot() -> None:
    """Catches an overflow in one text that turns the next one in its slot into NaN, through rows under a mask."""
    target = TransformersTarget(build(SERVED["llama"]), slots=3, max_nodes=8)
    first, second = SequenceState(list(range(3, 40))), SequenceState(list(range(3, 30)))
    for sequence in (first, second):
        target.open(sequence)
    for tensor in target.store._tensors.values():
        tensor[:, 0, :, 20:36] = torch.inf
    target.close(first)  # the second moves into the gap
    assert all(tensor.isfinite().all() for tensor in target.store._tensors.values())
    target.close(second)
    assert not any(tensor.any() for tensor in target.store._tensors.values())


@pytest.mark.parametrize("context", [0, -3, 7])
def test_a_context_too_short_to_be_of_use_is_refused(context: int) -> None:
    with pytest.raises(UsageError, match="at least 8 tokens"):
        TransformersTarget(build(SERVED["llama"]), slots=1, context=context)


def test_a_model_in_training_mode_is_refused() -> None:
    with pytest.raises(UsageError, match=r"model\.eval\(\)"):
        TransformersTarget(build(SERVED["gpt2"]).train(), slots=1)


def test_a_prompt_longer_than_the_context_is_refused_and_leaves_no_slot_behind() -> None:
    target = TransformersTarget(build(SERVED["gpt2"]), slots=1, context=16)
    with pytest.raises(UsageError, match="17 tokens and the context holds 16"):
        target.open(SequenceState([1] * 17))
    assert target.free_slots == 1


def test_a_prefill_that_fails_gives_its_slot_back(monkeypatch: pytest.MonkeyPatch) -> None:
    target = TransformersTarget(build(SERVED["llama"]), slots=1)

    def interrupted(*args: object, **kwargs: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(target.runner, "run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        target.open(SequenceState([1, 2, 3]))
    assert target.free_slots == 1
