"""Decoder layers of the usual kind, computed by a few kernels, are those of the model."""

from __future__ import annotations

import logging
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor, nn
from torch.nn import functional

from branchwise.backends.base import Needs
from branchwise.backends.transformers.target import TransformersTarget
from branchwise.core.batch import PadShape, TreeBatch
from branchwise.core.sequence import SequenceState
from branchwise.core.tree import DraftTree
from branchwise.verify import Verdict
from tests.conformance.architectures import COMMON, VOCABULARY, build, served
from tests.conformance.test_target import assert_scores_equal_own_forward, random_tree
from tests.hopper import Compiled, as_on_hopper, compiled_by, interpreted

pytestmark = pytest.mark.usefixtures("interpreter")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SERVED = served()
USUAL = ("llama", "llama-wide-heads", "qwen2", "qwen2-window", "qwen3", "mistral", "mistral-narrow", "smollm3")
OTHERS = ("gemma2", "phi", "mixtral", "deepseek-v3", "gpt2")


def of_kernels(model: nn.Module, **options: int) -> TransformersTarget:
    """Its context is short, so that attention need not be split: Triton's interpreter takes seconds for the parts."""
    pytest.importorskip("triton", reason="needs Triton's interpreter")
    usual = {"slots": 4, "max_nodes": 12, "context": 48}
    return TransformersTarget(model, kernels=True, layers=True, **usual | options)


def opened(target: TransformersTarget, rng: random.Random, *lengths: int) -> list[SequenceState]:
    texts = [SequenceState([rng.randrange(VOCABULARY) for _ in range(length)]) for length in lengths]
    for text in texts:
        target.open(text)
    return texts


@pytest.mark.parametrize("family", USUAL)
def test_passes_of_usual_layers_score_as_the_model_does(family: str, caplog: pytest.LogCaptureFixture) -> None:
    """Biases, norms of heads, windows, layers without positions; passes of several sizes, and rows kept between."""
    model, rng = build(SERVED[family]), random.Random(family)
    target = of_kernels(model)
    assert target.info.execution.layers
    texts = opened(target, rng, 23, 1)
    with caplog.at_level(logging.WARNING, "branchwise.cuda.layers.fuse"):
        for size in (4, 1):
            trees = [random_tree(rng, text.root, size) for text in texts]
            assert_scores_equal_own_forward(model, target, texts, trees)
            paths = [tuple(tree.topology.path(len(tree) - 1)) for tree in trees]
            target.commit(texts, [Verdict(path, 7) for path in paths])
            for text, tree, path in zip(texts, trees, paths, strict=True):
                text.tokens += [*tree.tokens[list(path[1:])].tolist(), 7]
    assert not caplog.records, "a layer was refused"
    assert not any("forward" in module.__dict__ for module in model.modules())


@pytest.mark.parametrize("slices", [2, 8])
def test_products_find_the_same_in_slices(
    slices: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As few rows of two bytes a number are multiplied on a device; the last slices are partly or wholly empty."""
    rows = pytest.importorskip("branchwise.cuda.layers.rows")
    whole = rows.tiling
    cut = {"slices": slices, "piece": 16}
    monkeypatch.setattr(rows, "tiling", lambda *given, **kinds: replace(whole(*given, **kinds), **cut))
    test_passes_of_usual_layers_score_as_the_model_does("qwen2", caplog)


AROUND = ("embed", "look_up", "normed")


def around(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often each of the kernels around the layers is called from now on."""
    ends, calls = (
        pytest.importorskip("branchwise.cuda.layers.ends", reason="needs Triton's interpreter"),
        Counter[str](),
    )

    def counting(name: str, own: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any) -> Any:
            calls[name] += 1
            return own(*given)

        return call

    for name in AROUND:
        monkeypatch.setattr(ends, name, counting(name, getattr(ends, name)))
    return calls


@pytest.mark.parametrize(("family", "dtype"), [("llama", torch.bfloat16), ("qwen3", torch.float32)])
def test_what_stands_around_the_layers_is_one_kernel_each(
    family: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, rng = build(SERVED[family]).to(dtype), random.Random(family)
    calls = around(monkeypatch)
    target = of_kernels(model)
    texts = opened(target, rng, 23, 1)
    calls.clear()
    trees = [random_tree(rng, text.root, 5) for text in texts]
    if dtype == torch.float32:
        assert_scores_equal_own_forward(model, target, texts, trees)
    else:
        target.score(texts, TreeBatch(trees))
    assert calls == dict.fromkeys(AROUND, 1)


@pytest.mark.parametrize(
    ("scaling", "looked_up"),
    [
        ({"rope_type": "default"}, True),
        ({"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 32}, True),
        ({"rope_type": "longrope", "factor": 4.0, "short_factor": [1.0] * 4, "long_factor": [3.0] * 4}, False),
    ],
)
def test_positions_that_depend_on_the_others_are_not_looked_up(
    scaling: dict[str, Any], looked_up: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some turn all positions otherwise once a text is long."""
    longest = {"original_max_position_embeddings": 32} if scaling["rope_type"] == "longrope" else {}
    config = hf.LlamaConfig(**COMMON, **longest, rope_parameters={"rope_theta": 10_000.0, **scaling, **longest})
    model, calls = build(config), around(monkeypatch)
    target = of_kernels(model, context=32)
    texts = opened(target, random.Random(3), 9)
    calls.clear()
    assert_scores_equal_own_forward(model, target, texts, [random_tree(random.Random(5), texts[0].root, 4)])
    assert calls["look_up"] == looked_up
    assert calls["embed"] == calls["normed"] == 1


def tripled(module: nn.Module, given: Any, found: Tensor) -> Tensor:
    """A hook that writes to what it is shown."""
    return found.mul_(3.0)


@pytest.mark.parametrize("change", ["norm", "embeddings", "embeddings later", "hook", "hook later"])
def test_what_is_changed_around_the_layers_counts(change: str) -> None:
    """Another epsilon in the last norm alone, and embeddings that somebody makes in another way or writes to."""
    model, rng = build(SERVED["llama"]), random.Random(change)
    embeddings = model.model.embed_tokens

    def alter() -> None:
        if change == "norm":
            model.model.norm.variance_epsilon = 0.5
        elif change.startswith("hook"):
            embeddings.register_forward_hook(tripled)
        else:
            embeddings.forward = lambda ids: 3.0 * functional.embedding(ids, embeddings.weight)

    if not change.endswith("later"):
        alter()
    target = of_kernels(model)
    if change.endswith("later"):
        alter()
    texts = opened(target, rng, 9)
    for _ in range(2):
        assert_scores_equal_own_forward(model, target, texts, [random_tree(rng, texts[0].root, 4)])
    assert ("forward" in vars(embeddings)) == change.startswith("embeddings")


def test_positions_of_a_model_that_sees_images_are_its_own() -> None:
    """It has three for every token."""
    text = {key: value for key, value in COMMON.items() if not key.endswith("token_id")}
    sections = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [2, 1, 1]}
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32}
    config = hf.Qwen3VLConfig(
        text_config={**text, "head_dim": 8, "rope_parameters": sections},
        vision_config={**vision, "deepstack_visual_indexes": [0]},
    )
    torch.manual_seed(0)
    model, rng = hf.Qwen3VLForConditionalGeneration(config).eval().requires_grad_(False), random.Random(1)
    target = of_kernels(model)
    texts = opened(target, rng, 9)
    assert_scores_equal_own_forward(model, target, texts, [random_tree(rng, texts[0].root, 4)])


@pytest.mark.parametrize("family", ["qwen2-window", "qwen3"])
def test_layers_with_large_matrices_leave_products_to_the_library(
    family: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    kernels = pytest.importorskip("branchwise.cuda.layers.rows", reason="needs Triton's interpreter")
    monkeypatch.setattr(kernels, "LARGE", 1)
    model, rng = build(SERVED[family]), random.Random(family)
    target = of_kernels(model)
    texts = opened(target, rng, 9, 4)
    with caplog.at_level(logging.WARNING, "branchwise.cuda.layers.fuse"):
        assert_scores_equal_own_forward(model, target, texts, [random_tree(rng, text.root, 5) for text in texts])
    assert not caplog.records, "a layer was refused"


@pytest.mark.parametrize("family", OTHERS)
def test_other_layers_are_left_alone(family: str, caplog: pytest.LogCaptureFixture) -> None:
    model, rng = build(SERVED[family]), random.Random(family)
    with caplog.at_level(logging.WARNING):
        target = of_kernels(model)
        texts = opened(target, rng, 9, 4)
        assert_scores_equal_own_forward(model, target, texts, [random_tree(rng, text.root, 5) for text in texts])
    assert not target.info.execution.layers
    assert not caplog.records


def test_a_layer_that_computes_something_else_runs_as_it_is(caplog: pytest.LogCaptureFixture) -> None:
    """One whose looks deceive: it is seen by what it computes, and the others are in few kernels still."""
    model, rng = build(SERVED["llama"]), random.Random(3)
    model.model.layers[1].mlp.act_fn.forward = lambda values: torch.nn.functional.silu(1.1 * values)
    target = of_kernels(model)
    texts = opened(target, rng, 9, 4)
    with caplog.at_level(logging.WARNING, "branchwise.cuda.layers.fuse"):
        assert_scores_equal_own_forward(model, target, texts, [random_tree(rng, text.root, 5) for text in texts])
    said = [record.getMessage().split(":")[0] for record in caplog.records]
    assert said == ["Layer 1 does not run in few kernels"]


def test_a_layer_with_other_positions_is_seen_in_a_pass_that_is_mostly_padding(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Parts as Llama's, by name: but neighbours turn against each other, and not halves."""
    model, rng = build(hf.Ernie4_5Config(**COMMON, head_dim=8)), random.Random(5)
    target = of_kernels(model, max_nodes=32)
    texts = opened(target, rng, 1)
    batch = TreeBatch([random_tree(rng, texts[0].root, 9)], pad_shape=PadShape(nodes=32))
    with caplog.at_level(logging.WARNING, "branchwise.cuda.layers.fuse"):
        target.score(texts, batch)
    said = [record.getMessage().split(":")[0] for record in caplog.records]
    assert said == [f"Layer {layer} does not run in few kernels" for layer in range(3)]


def test_layers_whose_queries_depend_on_more_than_a_rotation_are_left_alone() -> None:
    """Ministral 3 makes them larger far into a text, where nothing compares them."""
    config = hf.Ministral3Config(**COMMON, head_dim=8)
    assert not of_kernels(build(config)).info.execution.layers


def test_each_layer_is_compared_until_one_agrees_in_a_pass_of_this_size(monkeypatch: pytest.MonkeyPatch) -> None:
    target = of_kernels(build(SERVED["llama"]))
    texts = opened(target, random.Random(4), 5)
    answers: list[str | None] = []
    monkeypatch.setattr("branchwise.cuda.layers.fuse.beyond_rounding", lambda *given: answers.pop(0))
    for nodes, planned in ((4, [None] * 3), (2, ["planted", None]), (1, ["planted"] * 3), (4, [])):
        answers += planned
        target.score(texts, TreeBatch([DraftTree.chain([texts[0].root, *[7] * (nodes - 1)])]))
        assert not answers


def test_whoever_watches_parts_of_a_layer_sees_them() -> None:
    model, seen = build(SERVED["llama"]), []
    target = of_kernels(model)
    texts = opened(target, random.Random(6), 5)
    hook = model.model.layers[1].mlp.register_forward_hook(lambda *given: seen.append(given))
    target.score(texts, TreeBatch([DraftTree.chain([texts[0].root, 7])]))
    assert seen
    hook.remove()
    target.require(Needs(hidden_layers=("model.layers.2.mlp",)))
    scored = target.score(texts, TreeBatch([DraftTree.chain([texts[0].root, 7])]))
    assert scored.hidden["model.layers.2.mlp"].shape == (1, 2, 32)


def test_slots_that_a_padded_pass_does_not_name_stay_as_they_are() -> None:
    model = build(SERVED["qwen2"])
    target = of_kernels(model, slots=3, max_nodes=16)
    texts = opened(target, random.Random(1), 3, 4)
    tree = DraftTree(torch.tensor([texts[0].root, 1, 2, 3]), (-1, 0, 0, 1))
    alone = target.score(texts[:1], TreeBatch([tree])).logits[0, :4].clone()
    others = [tensor[:, 1:].clone() for tensor in target.store._tensors.values()]
    together = target.score(texts[:1], TreeBatch([tree] * 3, pad_shape=PadShape(nodes=8))).logits
    torch.testing.assert_close(together[0, :4], alone, rtol=1e-5, atol=1e-5)
    for tensor, before in zip(target.store._tensors.values(), others, strict=True):
        assert torch.equal(tensor[:, 1:], before)


def test_a_tree_at_the_end_of_its_slot_is_written_although_its_padding_has_no_rows() -> None:
    model = build(SERVED["llama"])
    target = of_kernels(model, slots=2, context=16, max_nodes=5)
    texts = opened(target, random.Random(2), 16)
    assert_scores_equal_own_forward(model, target, texts, [DraftTree.chain([texts[0].root, 4, 5, 6, 7])])


# Kernel by kernel, against the same in torch


def drawn(rng: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=rng).to(DEVICE)


def normed(states: Tensor, norm: Tensor, epsilon: float) -> Tensor:
    return states * torch.rsqrt(states.square().mean(-1, keepdim=True) + epsilon) * norm


@pytest.mark.parametrize("by_library", [False, True])
@pytest.mark.parametrize(("rows", "width", "inner"), [(1, 24, 40), (17, 24, 100), (70, 150, 20)])
@pytest.mark.parametrize("biased", [False, True])
def test_products_hand_on_what_the_next_norm_reads(
    rows: int, width: int, inner: int, biased: bool, by_library: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels = pytest.importorskip("branchwise.cuda.layers.rows", reason="needs Triton's interpreter")
    if by_library:
        monkeypatch.setattr(kernels, "LARGE", 1)
    rng = torch.Generator().manual_seed(rows)
    states, given, norm = drawn(rng, rows, width), drawn(rng, rows, inner), drawn(rng, width)
    weight, bias = drawn(rng, width, inner), drawn(rng, width) if biased else None
    found = kernels.add(given, weight, bias, states, norm)
    wanted = states + torch.nn.functional.linear(given, weight, bias)
    torch.testing.assert_close(found.states, wanted, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found.weighted, wanted * norm, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found.squares.sum(1), wanted.square().sum(1), rtol=1e-4, atol=1e-4)
    gates = drawn(rng, 2 * inner, width)
    gate, up = torch.nn.functional.linear(normed(wanted, norm, 0.25), gates).chunk(2, dim=-1)
    torch.testing.assert_close(
        kernels.gate_up(found, 0.25, gates), torch.nn.functional.silu(gate) * up, rtol=1e-4, atol=1e-4
    )


def test_rows_that_come_from_elsewhere_are_weighted_and_summed() -> None:
    kernels = pytest.importorskip("branchwise.cuda.layers.rows", reason="needs Triton's interpreter")
    states, norm = torch.tensor([[3.0, 4.0], [1.0, 0.0]]), torch.tensor([2.0, -1.0])
    rows = kernels.Rows.of(states, norm)
    assert rows.weighted.tolist() == [[6.0, -4.0], [2.0, 0.0]]
    assert rows.squares.tolist() == [[25.0], [1.0]]
    wide, every = torch.ones(2, 48), torch.ones(48)
    made = kernels.add(wide, torch.zeros(48, 48), None, wide, every)
    assert torch.equal(kernels.Rows.of(wide, every).squares, made.squares), "another kernel for the first layer"


# The interpreter takes much that the compiler does not.


@interpreted
def test_the_kernels_compile_for_a_hopper_gpu(tmp_path: Path) -> None:
    layer = ["_read", "_add", "_gate_up", "_add"]
    around_layers = ["_embed", "_look_up", "_norm"]
    assert compiled_by("tests.test_layer_kernels", tmp_path) == 7 * layer + 2 * around_layers


def compile_all() -> None:
    """Layers in the sizes of Qwen3-0.6B, SmolLM2 and Qwen2.5-Coder-1.5B, over few and many rows."""
    from branchwise.cuda.layers import rows as kernels

    for name in ("_read", "_add", "_gate_up"):
        setattr(kernels, name, Compiled(getattr(kernels, name)))
    vars(kernels)["early"] = as_on_hopper
    compile_layer(8, 1024, heads=16, kv_heads=8, head_width=128, inner=3072, biased=False)
    for rows in (8, 512, 513):
        compile_layer(rows, 576, heads=9, kv_heads=3, head_width=64, inner=1536, biased=False)
        compile_layer(rows, 1536, heads=12, kv_heads=2, head_width=128, inner=8960, biased=True)
    compile_ends()


def compile_ends() -> None:
    from branchwise.cuda.layers import ends

    for name in ("_embed", "_look_up", "_norm"):
        setattr(ends, name, Compiled(getattr(ends, name)))
    vars(ends)["early"] = as_on_hopper
    for rows in (8, 600):
        numbers, table = torch.zeros(rows, dtype=torch.int32), torch.zeros(50, 576, dtype=torch.bfloat16)
        ends.embed(numbers, table, table[0])
        ends.look_up(numbers, torch.zeros(50, 2, 64, dtype=torch.bfloat16))
        ends.normed(torch.zeros(1, rows, 576, dtype=torch.bfloat16), table[0], 1e-6)


def compile_layer(
    rows: int, width: int, *, heads: int, kv_heads: int, head_width: int, inner: int, biased: bool
) -> None:
    from branchwise.cuda.layers.rows import Goal, Rows, Turn, add, gate_up, read

    def zeros(*shape: int) -> Tensor:
        return torch.zeros(*shape, dtype=torch.bfloat16)

    states, norm, one = zeros(rows, width), zeros(width), torch.zeros(1, dtype=torch.int32)
    every = (heads + 2 * kv_heads) * head_width
    cache, turn = zeros(1, kv_heads, 2 * rows, head_width), Turn(zeros(1, rows, head_width), zeros(1, rows, head_width))
    bias, norms = (zeros(every), None) if biased else (None, ((zeros(head_width), 1e-6), (zeros(head_width), 1e-6)))
    goal, known = Goal(cache, cache, one, one), Rows.of(states, norm)
    query = read(known, 1e-6, zeros(every, width), bias, turn, goal, nodes=rows, head_norms=norms)
    attended = add(query.view(rows, -1), zeros(width, heads * head_width), None, states, norm)
    add(gate_up(attended, 1e-6, zeros(2 * inner, width)), zeros(width, inner), None, states, norm)
