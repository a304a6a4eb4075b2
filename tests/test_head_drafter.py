"""A trained head as a drafter: it computes what training computed, whatever the engine does with its texts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM

from branchwise.backends.base import Needs, Prefill, Scored, TargetInfo
from branchwise.backends.toy import ToyTarget
from branchwise.backends.transformers.target import TransformersTarget
from branchwise.core.rows import unpack_bits, words_for
from branchwise.core.sampling import SamplingParams
from branchwise.core.sequence import SequenceState
from branchwise.core.tree import DraftTree, LaidTree
from branchwise.draft import build_drafter, build_policy
from branchwise.draft.base import Budget
from branchwise.draft.builder import NodeProbs
from branchwise.draft.head import prompt as prompt_module
from branchwise.draft.head.cache import HeadCache
from branchwise.draft.head.drafter import HeadDrafter
from branchwise.draft.head.file import TrainedHead
from branchwise.draft.head.network import Head, HeadConfig
from branchwise.draft.head.prompt import MOST_ROWS, MOST_TOGETHER, joined, read_prompts, together, usual
from branchwise.draft.head.trees.ranks import RankedDraft
from branchwise.draft.tree_drafter import ExpandRequest
from branchwise.engine import Engine, Request
from branchwise.errors import ModelError, UsageError
from branchwise.train.head.learn import Watched
from branchwise.train.head.unroll import unroll
from branchwise.verify import VERIFIERS, Verdict
from tests.heads import random_head
from tests.test_head_training import FORMS

AUTOREGRESSIVE = [form for form, options in FORMS.items() if not options.keys() & {"masks", "window", "cross"}]
LONG = ["window", "cross", "longspec", "longspec with states", "parallel longspec"]
VOCABULARY, WIDTH, LAYERS = 40, 24, 3
TAPS = ("model.layers.0", "model.layers.2")


def model_of(seed: int = 0, **options: Any) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    sizes = {
        "vocab_size": VOCABULARY, "hidden_size": WIDTH, "intermediate_size": 48, "num_hidden_layers": LAYERS,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256,
    }  # fmt: skip
    model = LlamaForCausalLM(LlamaConfig(**sizes | options)).eval().requires_grad_(False)
    for weight in model.parameters():
        if weight.ndim == 2:
            torch.nn.init.normal_(weight, std=0.25)
    return model


def trained(target: TransformersTarget, form: str, table: int = 30) -> TrainedHead:
    torch.manual_seed(1)
    sizes = {"width": WIDTH, "taps": TAPS, "heads": 4, "kv_heads": 2, "head_width": 6, "mlp": 32}
    head = Head(HeadConfig(**sizes | FORMS[form]), 1 / 100 ** (torch.arange(3) / 3))
    for weight in head.parameters():
        if weight.ndim == 2:
            torch.nn.init.normal_(weight, std=0.3)
    tokens = torch.randperm(VOCABULARY)[:table]
    return TrainedHead(head.eval().requires_grad_(False), tokens, target.info.name, target.info.weights)


class Watching(HeadDrafter):
    """Notes what it predicts after every node, with the text that leads there; level by level on the host."""

    def bind(self, target: TargetInfo) -> None:
        super().bind(target)
        self._ahead = None

    def look(self, requests: list[ExpandRequest]) -> list[NodeProbs]:  # type: ignore[override]
        self.seen = getattr(self, "seen", [])
        found = super().look(requests)
        for request, probs in zip(requests, found, strict=True):
            for row, node in enumerate(request.nodes):
                text = tuple(request.sequence.tokens), tuple(request.tree.path(node))
                self.seen.append((*text, probs.probs[row].clone(), self._extra(request)))
        return found

    def _extra(self, request: ExpandRequest) -> Tensor:
        known = self._cache.extra_tokens[self._cache.slot[request.sequence]]
        return known[known >= 0]


def expected(drafter: HeadDrafter, model: LlamaForCausalLM, text: tuple[int, ...], path: tuple[int, ...]) -> Tensor:
    """The logits of training after the last token of a branch, over the table."""
    config = drafter.head.config
    watched = Watched(model, config.taps, drafter._table, config.cross)
    tokens = torch.tensor([[*text, *path]])
    hidden, _, cached = watched(tokens)
    features = drafter.head.features([state[:, :-1] for state in hidden])
    embeddings = watched.embeddings[tokens[:, 1:]]
    predict = unroll(drafter.head, features, embeddings, len(path) + 1, cached)[len(path)][0, -1]
    previous = watched.embeddings[tokens[0, -1]] if drafter.head.config.bias else None
    return drafter.head.logits(predict, watched.rows, previous)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("shape", ["chain:4", "topk:12,depth=4,width=3", "paths:2x3"])
@torch.no_grad()
def test_a_tree_is_predicted_as_in_training(form: str, shape: str) -> None:
    """After commits, in batches of texts of different lengths, with prompts in chunks."""
    model = model_of()
    target = TransformersTarget(model, slots=3, context=128, max_nodes=32)
    target.prefill_chunk = 5
    drafter = Watching(trained(target, form), tree=build_policy(shape))
    verifier = VERIFIERS.build("match" if "paths" not in shape else "block")
    engine = Engine(target, drafter, verifier)
    sampling = SamplingParams(temperature=0.7 if "paths" in shape else 0.0, seed=4)
    for prompt in [(1, 2, 3), (5,), tuple(range(20))]:
        engine.submit(Request(prompt, sampling, max_new_tokens=12))
    while engine.busy:
        engine.step()
    assert len(drafter.seen) > 30
    assert_as_in_training(drafter, model, sampling.temperature or 1.0)


@pytest.mark.parametrize("form", ["carry", "two layers"])
@pytest.mark.parametrize("most", [1, 7, 19])
@torch.no_grad()
def test_a_prompt_longer_than_one_pass_is_read_as_in_training(
    form: str, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("branchwise.draft.head.prompt.MOST", most)
    model = model_of()
    target = TransformersTarget(model, slots=2, context=128, max_nodes=32)
    drafter = Watching(trained(target, form), tree=build_policy("topk:6,depth=3,width=2"))
    engine = Engine(target, drafter, VERIFIERS.build("match"))
    for prompt in [tuple(range(20)), tuple(range(20, 0, -2))]:
        engine.submit(Request(prompt, max_new_tokens=6))
    while engine.busy:
        engine.step()
    assert_as_in_training(drafter, model)


@pytest.mark.parametrize("form", AUTOREGRESSIVE)
@torch.inference_mode()
def test_prompts_that_are_read_together_are_read_as_alone(form: str) -> None:
    target = TransformersTarget(model_of(), slots=3, max_nodes=8)
    head = trained(target, form).head
    texts = [SequenceState([3, 1, 4, 1, 5, 9, 2]), SequenceState([2, 7]), SequenceState([1, 6, 1, 8, 0])]
    features = [torch.randn(len(text.tokens) - 1, WIDTH) for text in texts]
    embeddings = torch.randn(VOCABULARY, WIDTH)
    found = []
    for groups in ([[0, 1, 2]], [[0], [1], [2]]):
        cache = HeadCache(head.config, 3, torch.device("cpu"), torch.float32)
        for text in texts:
            cache.open(text)
        for group in groups:
            own = [features[i] for i in group]
            read_prompts(head, cache, embeddings, [texts[i] for i in group], torch.cat(own), [*map(len, own)])
        slots = [cache.slot[text] for text in texts]
        rows = [cache.store[:, :, slot, :, : len(part)] for slot, part in zip(slots, features, strict=True)]
        found.append([cache.predicted[slots], cache.carried[slots], *rows])
    for joint, alone in zip(*found, strict=True):
        torch.testing.assert_close(joint, alone)


@torch.inference_mode()
def test_prompts_that_are_padded_are_read_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a device, whose passes have few sizes; more cells are not asked for."""
    target = TransformersTarget(model_of(), slots=3, max_nodes=8)
    head = trained(target, "eagle").head
    texts = [SequenceState([3, 1, 4, 1, 5, 9, 2]), SequenceState([2, 7])]
    features = [torch.randn(len(text.tokens) - 1, WIDTH) for text in texts]
    embeddings = torch.randn(VOCABULARY, WIDTH)
    found = []
    for padded in (False, True):
        if padded:
            monkeypatch.setattr(prompt_module, "usual", lambda rows, device: 16)
        cache = HeadCache(head.config, 3, torch.device("cpu"), torch.float32)
        cells = cache.store.shape[4]
        for text in texts:
            cache.open(text)
        read_prompts(head, cache, embeddings, texts, joined(features), [*map(len, features)])
        assert cache.store.shape[4] == max(cells, 8)
        slots = [cache.slot[text] for text in texts]
        rows = [cache.store[:, :, slot, :, : len(part)] for slot, part in zip(slots, features, strict=True)]
        found.append([cache.predicted[slots], cache.carried[slots], *rows, cache.tokens[slots, :6]])
    assert len(joined(features)) == 16
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("lengths", [[5], [70] * 7, [300] * 40, [5000, 10, 10], [10, 4000, 10, 10], [60] * 16])
def test_prompts_come_in_few_sizes_on_a_device(lengths: list[int]) -> None:
    texts = [SequenceState([1] * length) for length in lengths]
    groups = together(texts, torch.device("cuda"))
    assert [text for group in groups for text in group] == texts
    for group in groups:
        rows = len(group) * usual(max(len(text.tokens) for text in group), torch.device("cuda"))
        assert rows.bit_count() == 1
        assert rows <= MOST_ROWS
        assert len(group) <= MOST_TOGETHER
    assert len(together(texts, torch.device("cpu"))) == len(texts)
    if lengths == [60] * 16:
        assert len(groups) == 1


def assert_as_in_training(drafter: Watching, model: LlamaForCausalLM, heat: float = 1.0) -> None:
    for text, path, probs, extra in drafter.seen[::3]:
        wanted = torch.zeros(VOCABULARY)
        logits = expected(drafter, model, text, path)
        known = torch.cat([drafter._table, extra])
        assert set(probs.nonzero().flatten().tolist()) <= set(known.tolist())
        wanted[drafter._table] = (logits / heat).softmax(0)
        found = probs[drafter._table] / probs[drafter._table].sum()
        torch.testing.assert_close(found, wanted[drafter._table], atol=2e-5, rtol=1e-3)


@pytest.mark.parametrize("form", LONG)
@torch.no_grad()
def test_forks_and_texts_that_come_and_go_are_predicted_as_in_training(form: str) -> None:
    """Slots move when a text ends, in the target's cache and in the head's, and a fork starts from copied rows."""
    model = model_of()
    target = TransformersTarget(model, slots=4, context=128, max_nodes=32)
    drafter = Watching(trained(target, form), tree=build_policy("topk:6,depth=3,width=2"))
    engine = Engine(target, drafter, VERIFIERS.build("match"), prefill_tokens=3)
    source = SequenceState(list(range(15)))
    target.open(source)
    asked = [Request((7, number, 2), max_new_tokens=length) for number, length in enumerate((4, 25, 9))]
    forks = [Request(tuple(source.tokens), max_new_tokens=length) for length in (5, 30)]
    texts = [engine.submit(request) for request in asked]
    texts += [engine.submit(request, like=source) for request in forks]
    texts.append(engine.submit(Request(tuple(range(30, 8, -1)), max_new_tokens=20)))
    while engine.busy:
        engine.step()
    target.close(source)
    assert_as_in_training(drafter, model)
    plain = Engine(target, build_drafter("none"), VERIFIERS.build("match"))
    for text in texts:
        alone = plain.submit(text.request)
        while plain.busy:
            plain.step()
        assert text.token_ids == alone.token_ids


@pytest.mark.usefixtures("interpreter")
@torch.no_grad()
def test_rows_that_a_device_has_committed_are_read_as_in_training() -> None:
    """By kernels, where accepted rows are moved before the host knows of them."""
    pytest.importorskip("triton", reason="needs Triton's interpreter")
    model = model_of()
    target = TransformersTarget(model, slots=2, context=128, max_nodes=16, kernels=True)
    drafter = Watching(trained(target, "longspec with states"), tree=build_policy("topk:5,depth=3,width=2"))
    engine = Engine(target, drafter, VERIFIERS.build("match"))
    assert engine.pipelined
    for prompt in [(1, 2, 3), tuple(range(20))]:
        engine.submit(Request(prompt, max_new_tokens=5))
    while engine.busy:
        engine.step()
    assert_as_in_training(drafter, model)


@pytest.mark.parametrize("form", LONG)
def test_a_cache_with_a_window_does_not_grow_with_the_text(form: str) -> None:
    model = model_of(max_position_embeddings=2048)
    target = TransformersTarget(model, slots=1, context=2048, max_nodes=32)
    drafter = HeadDrafter(trained(target, form), tree=build_policy("chain:2"))
    engine = Engine(target, drafter, VERIFIERS.build("match"))
    sizes = []
    for length in (40, 400, 1200):
        engine.submit(Request(tuple(number % VOCABULARY for number in range(length)), max_new_tokens=60))
        while engine.busy:
            engine.step()
            for sequence, rows in drafter._cache.lengths.items():
                held = rows - drafter._cache.first[sequence]
                assert held <= 2 * drafter.head.config.window or not drafter.head.config.window
        sizes.append(drafter._cache.bytes)
    assert (sizes[0] == sizes[2]) == bool(drafter.head.config.window)


def test_cached_keys_and_values_are_views_of_committed_tokens() -> None:
    """As many tokens as the longest text has committed, in the order that was asked for, and those of the model."""
    model = model_of()
    target = TransformersTarget(model, slots=3, context=64)
    cached = target.info.cached
    assert cached is not None
    assert [part.shape for part in cached("model.layers.1", ())] == [(0, 2, 0, 6)] * 2
    texts = [SequenceState(list(range(start, start + 5 + start))) for start in range(3)]
    for text in texts:
        target.open(text)
    for asked in (texts, texts[1:], texts[::-1], [texts[2], texts[0]]):
        keys, values = cached("model.layers.1", asked)
        assert keys.shape == values.shape == (len(asked), 2, max(len(text.tokens) for text in asked) - 1, 6)
        assert (keys.data_ptr() == target.store.layers_keys[1][asked[0].tokens[0]].data_ptr()) == (
            asked[0] in texts[:2]
        )
        for row, text in enumerate(asked):
            count = len(text.tokens) - 1
            watched = Watched(model, (), torch.arange(VOCABULARY), "model.layers.1")
            own = watched(torch.tensor([text.tokens[:-1]])).cached
            assert own is not None
            torch.testing.assert_close(keys[row, :, :count], own.keys[0])
            torch.testing.assert_close(values[row, :, :count], own.values[0])
    with pytest.raises(UsageError, match=r"no layer 'model.norm' with keys"):
        target.require(Needs(cached_layer="model.norm"))


def test_positions_are_exact_in_a_head_of_half_precision() -> None:
    """Frequencies that were rounded with the weights would turn queries by whole circles at large positions."""
    target = TransformersTarget(model_of(), slots=1, context=64)
    drafter = HeadDrafter(trained(target, "longspec"))
    exact = drafter.trained.head.frequencies.clone()
    for _ in range(2):
        drafter.bind(replace(target.info, dtype=torch.bfloat16))
        assert drafter.head.dtype == torch.bfloat16
        assert torch.equal(drafter.head.frequencies, exact)


def test_a_head_refuses_a_target_whose_keys_it_cannot_read() -> None:
    target = TransformersTarget(model_of(), slots=1, context=64)
    head = trained(target, "longspec")
    other = TransformersTarget(model_of(num_key_value_heads=4), slots=1, context=64)
    with pytest.raises(ModelError, match="attends to 2 heads of width 6, and LlamaForCausalLM has 4"):
        Engine(other, HeadDrafter(replace(head, weights=other.info.weights)), VERIFIERS.build("match"))
    with pytest.raises(ModelError, match="shows no keys and values"):
        HeadDrafter(head).bind(replace(target.info, cached=None))
    with pytest.raises(UsageError, match="has no layer 'attention'"):
        ToyTarget().require(Needs(cached_layer="attention"))


@pytest.mark.parametrize("form", AUTOREGRESSIVE)
@pytest.mark.parametrize("shape", ["mcsd", "fork", "recycling-80"])
@torch.no_grad()
def test_a_tree_of_ranks_is_drafted_on_the_device_as_on_the_host(form: str, shape: str) -> None:
    """The functions that a device records, called at every step beside the host's own way."""
    model = model_of()
    target = TransformersTarget(model, slots=3, context=128, max_nodes=128)
    policy = build_policy(f"ranks:{shape}")
    drafter = HeadDrafter(trained(target, form), tree=policy)
    other = HeadDrafter(trained(target, form), tree=policy)
    engine = Engine(target, drafter, VERIFIERS.build("match"))
    drafter._ahead = None
    other.bind(target.info)
    other._cache.hold(200)
    ranked = RankedDraft(policy, other.head, other._cache, other._embeddings, other._output, other._table)
    compared = 0

    def start(sequence: SequenceState, prefill: Prefill) -> None:
        HeadDrafter.start(drafter, sequence, prefill)
        HeadDrafter.start(other, sequence, prefill)

    def draft(sequences: Sequence[SequenceState], budgets: Sequence[Budget]) -> list[DraftTree]:
        nonlocal compared
        trees = HeadDrafter.draft(drafter, sequences, budgets)
        other._propose(sequences)
        for sequence in sequences:
            if len(other._texts[sequence].unread):
                other._roots([sequence])
        slots = torch.tensor([other._cache.slot[sequence] for sequence in sequences])
        lengths = torch.tensor([other._cache.lengths[sequence] for sequence in sequences])
        (found,) = ranked.grow(slots, lengths, torch.tensor([sequence.root for sequence in sequences]))
        for tree, tokens, length in zip(trees, found, lengths, strict=True):
            if length > 0 and len(tree) == len(ranked.shape):
                assert tree.parents == ranked.shape.parents
                assert tree.tokens.tolist() == tokens.tolist()
                compared += 1
        return trees

    def update(sequences: Sequence[SequenceState], scored: Scored, verdicts: Sequence[Verdict]) -> None:
        HeadDrafter.update(drafter, sequences, scored, verdicts)
        size = max(len(verdict.path) for verdict in verdicts) + 1
        paths = torch.tensor([[*verdict.path, *[-1] * (size - len(verdict.path))] for verdict in verdicts])
        slots = torch.tensor([other._cache.slot[sequence] for sequence in sequences])
        lengths = torch.tensor([other._cache.lengths[sequence] for sequence in sequences])
        tokens = torch.stack([functional.pad(t.tokens, (0, 128 - len(t))) for t in drafter._drafted])
        following = torch.tensor([verdict.token for verdict in verdicts])
        hidden = [functional.pad(scored.hidden[tap], (0, 0, 0, 128 - scored.hidden[tap].shape[1])) for tap in TAPS]
        after = ranked.catch_up(slots, lengths, tokens, paths, following, *hidden)
        for sequence, length in zip(sequences, after.tolist(), strict=True):
            other._cache.lengths[sequence] = length

    drafter.start, drafter.draft, drafter.update = start, draft, update  # type: ignore[method-assign]
    for prompt in [(1, 2, 3), (5,), tuple(range(20))]:
        engine.submit(Request(prompt, max_new_tokens=24))
    while engine.busy:
        engine.step()
    assert compared > 10


FEW = "topk:2,depth=2,width=2"
"""of which a few passes are made, since kernels are slow in Triton's interpreter"""
BEST = ["topk:7,depth=4,width=3", "topk:30,depth=3,width=6", "topk:2,depth=5,width=2"]


@pytest.mark.usefixtures("interpreter")
def test_a_tree_that_is_cut_at_the_end_of_a_text_names_no_more_ancestors_than_it_has_nodes() -> None:
    target = TransformersTarget(model_of(), slots=1, context=128, max_nodes=64)
    drafter = HeadDrafter(trained(target, "carry"), tree=build_policy("topk:40,depth=2,width=7"))
    engine = Engine(target, drafter, VERIFIERS.build("match"))
    words = set()
    for count in (6, 1):
        text = engine.submit(Request((5, 6, 7), max_new_tokens=count))
        while engine.busy:
            engine.step()
            [tree] = drafter._drafted
            assert isinstance(tree, LaidTree)
            assert tree.shape.ancestor_bits.shape == (len(tree), words_for(len(tree)))
            words.add(words_for(len(tree)))
        assert text.finished
    assert words == {1, 2}


@pytest.mark.parametrize(
    ("form", "shape", "kernels"),
    [
        *((form, shape, False) for form in FORMS for shape in BEST),
        ("low gate", "topk:5,depth=3,width=2", True),
        ("fspad", "topk:5,depth=3,width=2", True),
        ("carry", "topk:5,depth=3,width=2", True),
        ("eagle", FEW, True),
        ("parallel with bias", FEW, True),
        ("longspec", "topk:5,depth=3,width=2", True),
        ("parallel longspec", FEW, True),
    ],
)
@torch.no_grad()
def test_the_best_trees_are_laid_on_the_device_as_on_the_host(
    form: str, shape: str, kernels: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In batches, after verdicts, at the end of texts; the same trees, node by node, and the same texts. By kernels
    also with passes that are enqueued ahead."""
    if kernels:
        pytest.importorskip("triton", reason="needs Triton's interpreter")
        for place in ("trees.ahead", "trees.device"):
            monkeypatch.setattr(f"branchwise.draft.head.{place}.have_kernels", lambda device: True)
    model = model_of()
    target = TransformersTarget(model, slots=3, context=128, max_nodes=32, kernels=kernels)
    drafter = HeadDrafter(trained(target, form), tree=build_policy(shape))
    other = HeadDrafter(trained(target, form), tree=build_policy(shape))
    engine = Engine(target, drafter, VERIFIERS.build("match"))
    other.bind(target.info)
    assert drafter._ahead is not None
    fused = kernels and form in AUTOREGRESSIVE and form != "low gate"
    assert ("Fused" in type(drafter._ahead._draft).__name__) == fused
    other._ahead = None
    compared = 0

    def start(sequence: SequenceState, prefill: Prefill) -> None:
        HeadDrafter.start(drafter, sequence, prefill)
        HeadDrafter.start(other, sequence, prefill)

    def draft(sequences: Sequence[SequenceState], budgets: Sequence[Budget]) -> list[DraftTree]:
        nonlocal compared
        trees = HeadDrafter.draft(drafter, sequences, budgets)
        for sequence, budget, tree in zip(sequences, budgets, trees, strict=True):
            assert isinstance(tree, LaidTree)
            if budget.depth == 0 or len(sequence.tokens) == 1:
                continue
            [expected] = HeadDrafter.draft(other, [sequence], [budget])
            real = (tree.shape.parents >= 0).nonzero().flatten().tolist()
            found = {tuple(tree.tokens[tree.path(node)[1:]].tolist()) for node in real}
            wanted = {tuple(expected.tokens[expected.path(n)[1:]].tolist()) for n in range(1, len(expected))}
            # Near the end of a text what lies too deep is left out, and nothing takes its place.
            assert found == wanted if budget.depth >= drafter.tree.depth else found <= wanted
            assert len(found) == len(real)
            assert tree.shape.depths[real].tolist() == [len(tree.path(node)) - 1 for node in real]
            assert tree.depth >= expected.depth
            marks = unpack_bits(tree.shape.ancestor_bits, len(tree))
            assert [row.nonzero().flatten().tolist() for row in marks[real]] == [tree.path(node) for node in real]
            compared += 1
        return trees

    def update(sequences: Sequence[SequenceState], scored: Scored, verdicts: Sequence[Verdict]) -> None:
        HeadDrafter.update(drafter, sequences, scored, verdicts)
        other._drafted = drafter._drafted
        HeadDrafter.update(other, sequences, scored, verdicts)

    def finish(sequence: SequenceState) -> None:
        HeadDrafter.finish(drafter, sequence)
        HeadDrafter.finish(other, sequence)

    drafter.start, drafter.draft = start, draft  # type: ignore[method-assign]
    drafter.update, drafter.finish = update, finish  # type: ignore[method-assign]
    few = shape == FEW
    length = 2 if few else 4 if kernels else 24
    prompts = [(1, 2, 3), (5,), tuple(range(20)), (8, 9)][: 2 if few else 4]
    texts = [
        engine.submit(Request(prompt, max_new_tokens=length + (1 if few else 3) * n))
        for n, prompt in enumerate(prompts)
    ]
    while engine.busy:
        engine.step()
    assert compared > (1 if few else 10)
    unaided = TransformersTarget(model, slots=3, context=128, max_nodes=32)
    plain = Engine(unaided, build_drafter("none"), VERIFIERS.build("match"))
    for text, prompt in zip(texts, prompts, strict=True):
        alone = plain.submit(Request(prompt, max_new_tokens=len(text.token_ids)))
        while plain.busy:
            plain.step()
        assert text.token_ids == alone.token_ids


class Interrupted(Exception):
    pass


@pytest.mark.parametrize("form", ["carry", "parallelspec"])
@pytest.mark.parametrize("shape", ["paths:2x3", "topk:7,depth=4,width=3"])
@pytest.mark.parametrize("place", ["score", "commit"])
def test_a_step_that_was_interrupted_is_drafted_again_as_if_nothing_had_been(form: str, shape: str, place: str) -> None:
    """Before the head has learned from the step, or after; both texts go on with the trees that they would have had."""
    found: list[dict[tuple[int, ...], list[int]]] = []
    for interrupted in (False, True):
        target = ToyTarget(VOCABULARY, slots=2)
        drafter = HeadDrafter(random_head(target.info, form), tree=build_policy(shape))
        engine = Engine(target, drafter, VERIFIERS.build("match"))
        trees: dict[tuple[int, ...], list[int]] = {}
        draft, work, steps = drafter.draft, getattr(target, place), 0

        def drafted(sequences: Any, budgets: Any, draft: Any = draft, trees: Any = trees) -> list[DraftTree]:
            made: list[DraftTree] = draft(sequences, budgets)
            for sequence, tree in zip(sequences, made, strict=True):
                tokens = trees.setdefault(tuple(sequence.tokens), tree.tokens.tolist())
                assert tokens == tree.tokens.tolist(), "what is drafted again is another tree"
            return made

        def failing(*given: Any, work: Any = work, interrupted: bool = interrupted) -> Any:
            nonlocal steps
            steps += 1
            if interrupted and steps in (1, 4):
                raise Interrupted
            return work(*given)

        drafter.draft = drafted  # type: ignore[method-assign]
        setattr(target, place, failing)
        for prompt in [(1, 2, 3), (5,)]:
            engine.submit(Request(prompt, SamplingParams(1.0, seed=3), max_new_tokens=12))
        interrupts = 0
        while engine.busy:
            try:
                engine.step()
            except Interrupted:
                interrupts += 1
        assert interrupts == 2 * interrupted
        found.append(trees)
    assert found[0] == found[1]
    assert max(len(tokens) for tokens in found[0].values()) > 1


def test_a_step_that_left_no_memory_to_learn_ends_the_drafts_of_its_text_and_not_the_text() -> None:
    target = ToyTarget(VOCABULARY, slots=2)
    drafter = HeadDrafter(random_head(target.info), tree=build_policy("paths:2x3"))
    engine = Engine(target, drafter, VERIFIERS.build("match"))
    text = engine.submit(Request((1, 2, 3), max_new_tokens=12))
    engine.step()
    update = drafter.update

    def without_memory(*given: Any) -> None:
        drafter.update = update  # type: ignore[method-assign]
        raise torch.OutOfMemoryError("CUDA out of memory")

    drafter.update = without_memory  # type: ignore[method-assign]
    engine.step()
    before = text.stats.drafted_tokens
    while engine.busy:
        engine.step()
    assert len(text.token_ids) == 12
    assert text.stats.drafted_tokens == before > 0


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@torch.no_grad()
def test_a_head_and_memories_propose_in_one_tree(tmp_path: Path, temperature: float) -> None:
    """Texts are those of plain decoding, both kinds of member are in the trees, and the head reads what it would read
    alone."""
    model = model_of()
    target = TransformersTarget(model, slots=3, context=128, max_nodes=32)
    trained(target, "carry").save(tmp_path / "head.safetensors", int8=False)
    drafter = build_drafter(f"fused:head({tmp_path / 'head.safetensors'})+suffix(min=1)", "topk:12,depth=4,width=4")
    engine = Engine(target, drafter, VERIFIERS.build("match"))
    sampling = SamplingParams(temperature=temperature, seed=4)
    prompts = [(1, 2, 3, 1, 2, 3, 1), (5,), tuple(range(20))]
    texts = [engine.submit(Request(prompt, sampling, max_new_tokens=20)) for prompt in prompts]
    member = drafter.members[0]._drafter
    seen: set[str] = set()
    while engine.busy:
        engine.step()
        seen |= {source for tree in drafter._drafted for source in tree.sources}
        for text in texts:
            if not text.finished and (sequence := text.sequence) in member._cache.lengths:
                read = member._cache.lengths[sequence] + len(member._texts[sequence].unread)
                assert read == len(sequence.tokens) - 1
    assert {"head", "suffix"} <= seen
    plain = Engine(target, build_drafter("none"), VERIFIERS.build("match"))
    for text, prompt in zip(texts, prompts, strict=True):
        alone = plain.submit(Request(prompt, sampling, max_new_tokens=20))
        while plain.busy:
            plain.step()
        assert text.token_ids == alone.token_ids
