"""A trained head as a drafter: it computes what training computed, whatever the engine does with its texts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM

from branchwise.backends.base import Prefill, Scored, TargetInfo
from branchwise.backends.transformers.target import TransformersTarget
from branchwise.core.rows import unpack_bits
from branchwise.core.sampling import SamplingParams
from branchwise.core.sequence import SequenceState
from branchwise.core.tree import DraftTree, LaidTree
from branchwise.draft import build_drafter, build_policy
from branchwise.draft.base import Budget
from branchwise.draft.builder import NodeProbs
from branchwise.draft.head.drafter import HeadDrafter
from branchwise.draft.head.file import TrainedHead
from branchwise.draft.head.network import Head, HeadConfig
from branchwise.draft.head.ranks import RankedDraft
from branchwise.draft.tree_drafter import ExpandRequest
from branchwise.engine import Engine, Request
from branchwise.testing import ToyTarget
from branchwise.train.head.learn import Watched
from branchwise.train.head.unroll import unroll
from branchwise.verify import VERIFIERS, Verdict
from tests.heads import random_head
from tests.test_head_training import FORMS

AUTOREGRESSIVE = [form for form in FORMS if "parallel" not in form]
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
    head = Head(HeadConfig(**sizes, **FORMS[form]), 1 / 100 ** (torch.arange(3) / 3))
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
    watched = Watched(model, TAPS, drafter._table)
    tokens = torch.tensor([[*text, *path]])
    hidden, _ = watched(tokens)
    features = drafter.head.features([state[:, :-1] for state in hidden])
    embeddings = watched.embeddings[tokens[:, 1:]]
    predict = unroll(drafter.head, features, embeddings, len(path) + 1)[len(path)][0, -1]
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
    heat = sampling.temperature or 1.0
    for text, path, probs, extra in drafter.seen[::3]:
        wanted = torch.zeros(VOCABULARY)
        logits = expected(drafter, model, text, path)
        known = torch.cat([drafter._table, extra])
        assert set(probs.nonzero().flatten().tolist()) <= set(known.tolist())
        wanted[drafter._table] = (logits / heat).softmax(0)
        found = probs[drafter._table] / probs[drafter._table].sum()
        torch.testing.assert_close(found, wanted[drafter._table], atol=2e-5, rtol=1e-3)


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
@pytest.mark.parametrize(
    ("form", "shape", "kernels"),
    [
        *((form, shape, False) for form in AUTOREGRESSIVE for shape in BEST),
        ("fspad", "topk:5,depth=3,width=2", True),
        ("carry", "topk:5,depth=3,width=2", True),
        ("eagle", FEW, True),
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
        for place in ("drafter", "device"):
            monkeypatch.setattr(f"branchwise.draft.head.{place}.have_kernels", lambda device: True)
    model = model_of()
    target = TransformersTarget(model, slots=3, context=128, max_nodes=32, kernels=kernels)
    drafter = HeadDrafter(trained(target, form), tree=build_policy(shape))
    other = HeadDrafter(trained(target, form), tree=build_policy(shape))
    engine = Engine(target, drafter, VERIFIERS.build("match"))
    other.bind(target.info)
    assert drafter._ahead is not None
    assert ("Fused" in type(drafter._ahead._draft).__name__) == (kernels and form in ("carry", "eagle"))
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
    texts = [engine.submit(Request(prompt, max_new_tokens=length + 3 * n)) for n, prompt in enumerate(prompts)]
    while engine.busy:
        engine.step()
    assert compared > (1 if few else 10)
    plain = Engine(target, build_drafter("none"), VERIFIERS.build("match"))
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
