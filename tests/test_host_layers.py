"""Layers on a CPU in functions of our own: they find what the model finds, and a row has the same bits among others."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional
from transformers.models.llama import modeling_llama

from branchwise.backends import native, packed
from branchwise.backends.base import Needs
from branchwise.backends.exact import tried
from branchwise.backends.int8 import LEAST, Bytes, IntMM, Numbers
from branchwise.backends.native import PANEL, RowFunctions, byte_product, compiled, row_functions
from branchwise.backends.native.layer import LANES, Attention, Turning, room_for
from branchwise.backends.packed import MANY, PanelMatrix
from branchwise.backends.transformers import host_layers
from branchwise.backends.transformers.host_layers import HostLayer
from branchwise.backends.transformers.target import TransformersTarget
from branchwise.core.batch import TreeBatch
from branchwise.core.sequence import SequenceState
from branchwise.core.tree import DraftTree
from tests.conformance.architectures import build, served
from tests.test_int8 import quantised_model, random_tree

pytestmark = pytest.mark.skipif(row_functions() is None, reason="needs a C compiler and OpenMP")

COMPLETE = ("llama", "llama-wide-heads", "qwen2", "qwen2-window", "qwen3", "mistral", "mistral-narrow")
"""families all of whose layers are computed here"""
ELSEWHERE = ("gemma2", "gemma3", "gpt2", "gpt-neox", "opt", "phi", "phi3", "mixtral", "qwen2-moe")
"""families none of whose layers are"""


@pytest.fixture
def functions() -> RowFunctions:
    found = row_functions()
    assert found is not None
    return found


# Functions


@given(st.integers(1, 9), st.integers(1, 70), st.booleans(), st.integers(0, 2**20))
def test_rows_are_added_and_normed(rows: int, width: int, adds: bool, seed: int) -> None:
    functions, draw = row_functions(), torch.Generator().manual_seed(seed)
    assert functions is not None
    state, more, weight = (torch.randn(*size, generator=draw) for size in ((rows, width), (rows, width), (width,)))
    wanted = state + more if adds else state.clone()
    found = functions.add_norm(state, more if adds else None, weight, 1e-5)
    assert torch.equal(state, wanted)
    torch.testing.assert_close(found, functional.rms_norm(wanted, (width,), weight, 1e-5), rtol=1e-5, atol=1e-6)


@given(st.integers(1, 5), st.integers(1, 70), st.sampled_from([0.1, 3.0, 60.0, 1e4]), st.integers(0, 2**20))
def test_a_gate_lets_through_what_silu_does(rows: int, width: int, size: float, seed: int) -> None:
    functions = row_functions()
    assert functions is not None
    given = size * torch.randn(rows, 2 * width, generator=torch.Generator().manual_seed(seed))
    gate, up = given.chunk(2, dim=1)
    torch.testing.assert_close(functions.gated(given), functional.silu(gate) * up, rtol=1e-6, atol=1e-25)


@given(st.integers(1, 5), st.integers(1, 70), st.sampled_from([1e-36, 1.0, 1e6]), st.integers(0, 2**20))
def test_whole_numbers_are_those_of_torch_bit_for_bit(count: int, width: int, size: float, seed: int) -> None:
    functions = row_functions()
    assert functions is not None
    rows = size * torch.randn(count, width, generator=torch.Generator().manual_seed(seed))
    rows[seed % count] = 0
    scale = rows.abs().amax(dim=1, keepdim=True).clamp_min(LEAST) / 127
    wanted = (rows / scale).round()
    for kind, zero in ((torch.float32, 0), (torch.int8, 0), (torch.uint8, 128)):
        found, scales = functions.whole_numbers(rows, 127, LEAST, kind, zero)
        assert found.dtype == kind
        assert torch.equal(found, (wanted + zero).to(kind))
        assert torch.equal(scales, scale)
    sums, columns = torch.randint(-(2**24), 2**24, (count, width)).int(), torch.rand(width)
    assert torch.equal(functions.scaled(sums, columns, scale), sums.float() * columns * scale)


def test_a_product_is_the_same_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    product, rows = IntMM(Numbers.of(torch.randn(40, 64))), torch.randn(5, 64)
    wanted = product(rows.clone())
    monkeypatch.setattr("branchwise.backends.int8.row_functions", lambda: None)
    assert torch.equal(product(rows.clone()), wanted)


class Shown:
    """Texts in a cache, and trees behind them whose nodes attend."""

    def __init__(self, trees: list[DraftTree], lengths: list[int], width: int, group: int, seed: int) -> None:
        draw = torch.Generator().manual_seed(seed)
        self.texts, self.nodes, self.width, self.kv_heads, self.group = (
            len(trees),
            max(map(len, trees)),
            width,
            2,
            group,
        )
        self.heads, self.cached = group * self.kv_heads, max(lengths) + self.nodes + 3
        self.lengths, self.slots = torch.tensor(lengths), torch.randperm(self.texts + 1, generator=draw)[: self.texts]
        self.keys, self.values = torch.randn(2, self.texts + 1, 2, self.cached, width, generator=draw)
        self.stride = (self.heads + 2 * self.kv_heads) * width
        self.given = torch.randn(self.texts, self.nodes, self.stride, generator=draw)
        self.depths = torch.zeros(self.texts, self.nodes, dtype=torch.long)
        self.seen = torch.eye(self.nodes, dtype=torch.bool).repeat(self.texts, 1, 1)
        for row, tree in enumerate(trees):
            for node in range(len(tree)):
                path = tree.topology.path(node)
                self.depths[row, node], self.seen[row, node, list(path)] = len(path) - 1, True

    def attended(self, window: int = 0, threads: int = 2) -> Tensor:
        """(texts, nodes, heads, width)"""
        functions, out = row_functions(), torch.empty(self.texts, self.nodes, self.heads, self.width)
        assert functions is not None
        most = int(self.lengths.max()) + self.nodes
        room = torch.full((threads, 2 * self.width + most, LANES), torch.nan)
        parts = {
            "queries": self.given, "keys": self.keys, "values": self.values, "slots": self.slots, "out": out,
            "lengths": self.lengths, "depths": self.depths, "column_depths": self.depths, "seen": self.seen,
            "room": room,
        }  # fmt: skip
        numbers = {name: getattr(self, name) for name in ("texts", "nodes", "heads", "kv_heads", "width", "stride")}
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            functions.attend(
                Attention(
                    **{name: part.data_ptr() for name, part in parts.items()}, **numbers, cached=self.cached,
                    columns=self.nodes, own=True, most=most, window=window, scale=0.3,
                )
            )  # fmt: skip
        finally:
            torch.set_num_threads(before)
        return out

    def wanted(self, window: int) -> Tensor:
        found = torch.empty(self.texts, self.nodes, self.heads, self.width, dtype=torch.float64)
        for text, (slot, length) in enumerate(zip(self.slots.tolist(), self.lengths.tolist(), strict=True)):
            for node in range(self.nodes):
                behind = self.seen[text, node].nonzero()[:, 0]
                rows = torch.cat([torch.arange(length), length + behind])
                places = torch.cat([torch.arange(length), length + self.depths[text, behind]])
                rows = rows[places > length + self.depths[text, node] - window] if window else rows
                for head in range(self.heads):
                    query = self.given[text, node, head * self.width : (head + 1) * self.width].double()
                    keys, values = (part[slot, head // self.group, rows].double() for part in (self.keys, self.values))
                    found[text, node, head] = (0.3 * keys @ query).softmax(0) @ values
        return found


@given(
    st.lists(st.integers(1, 11), min_size=1, max_size=3), st.sampled_from([4, 20, 64, 128]), st.integers(1, 3),
    st.sampled_from([0, 0, 1, 3, 9]), st.integers(0, 2**20),
)  # fmt: skip
def test_nodes_find_what_they_see(sizes: list[int], width: int, group: int, window: int, seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    trees = [random_tree(0, size, 50, draw) for size in sizes]
    lengths = torch.randint(0, 30, (len(sizes),), generator=draw).tolist()
    shown = Shown(trees, lengths, width, group, seed)
    found, wanted = shown.attended(window, threads=1 + seed % 2), shown.wanted(window)
    torch.testing.assert_close(found.double(), wanted, rtol=1e-4, atol=1e-5)


@given(st.integers(2, 20), st.integers(0, 40), st.sampled_from([20, 64, 128]), st.integers(1, 3), st.integers(0, 2**20))
def test_a_node_finds_the_same_bits_in_a_tree_as_at_the_end_of_a_text(
    size: int, length: int, width: int, group: int, seed: int
) -> None:
    tree = random_tree(0, size, 50, torch.Generator().manual_seed(seed))
    both = Shown([tree, tree], [length, 7], width, group, seed)
    found = both.attended()
    leaf = size - 1
    path = list(tree.topology.path(leaf))
    for steps in range(1, len(path) + 1):
        # Everything but the last node of the path is committed, and that one is all there is to score.
        alone = Shown([DraftTree.chain([0])], [length + steps - 1], width, group, seed)
        alone.slots, alone.cached = both.slots[:1], both.cached
        alone.keys, alone.values = both.keys.clone(), both.values.clone()
        for mine, theirs in ((alone.keys, both.keys), (alone.values, both.values)):
            for place, node in enumerate(path[:steps]):
                mine[alone.slots, :, length + place] = theirs[both.slots[:1], :, length + node]
        alone.given = both.given[:1, path[steps - 1], None].contiguous()
        assert torch.equal(alone.attended(threads=1)[0, 0], found[0, path[steps - 1]])


def test_a_row_that_is_not_seen_counts_for_nothing_however_large_it_is() -> None:
    shown = Shown([DraftTree(torch.tensor([0, 1, 2]), (-1, 0, 0))], [4], 64, 1, 0)
    before = shown.attended()[0, 2].clone()
    shown.values[shown.slots, :, 4 + 1] = 3e38
    assert torch.equal(shown.attended()[0, 2], before)


def test_heads_are_turned_and_written_where_they_belong(functions: RowFunctions) -> None:
    texts, nodes, heads, kv_heads, width, cached = 2, 3, 4, 2, 8, 10
    given = torch.randn(texts * nodes, (heads + 2 * kv_heads) * width)
    keys, values = torch.zeros(2, 3, kv_heads, cached, width)
    angles = torch.rand(texts, nodes, width // 2).repeat(1, 1, 2)
    cos, sin = angles.cos(), angles.sin()
    slots, places = torch.tensor([[2], [0]]), torch.tensor([[4, 5, 6], [1, 2, 3]])
    query_norm, key_norm = torch.rand(2, width)
    query, key, value = given.clone().view(texts, nodes, -1, width).split([heads, kv_heads, kv_heads], dim=2)
    query, key = (
        functional.rms_norm(part, (width,), weight, 1e-6) for part, weight in ((query, query_norm), (key, key_norm))
    )
    query, key = modeling_llama.apply_rotary_pos_emb(query, key, cos, sin, unsqueeze_dim=2)
    pointers = {
        "given": given, "cos": cos, "sin": sin, "query_norm": query_norm, "key_norm": key_norm, "keys": keys,
        "values": values, "slots": slots, "places": places,
    }  # fmt: skip
    numbers = {"texts": texts, "nodes": nodes, "heads": heads, "kv_heads": kv_heads, "width": width, "cached": cached}
    functions.turn(Turning(**{name: part.data_ptr() for name, part in pointers.items()}, **numbers, epsilon=1e-6))
    torch.testing.assert_close(given.view(texts, nodes, -1, width)[:, :, :heads], query, rtol=1e-5, atol=1e-6)
    for part, wanted in ((keys, key), (values, value)):
        torch.testing.assert_close(part[slots, :, places], wanted, rtol=1e-5, atol=1e-6)
        assert (part != 0).any(dim=-1).sum() == texts * nodes * kv_heads, "nothing else is written"


# Layers


def target_of(model: Any, **options: Any) -> TransformersTarget:
    return TransformersTarget(model, slots=3, context=64, **options)


@pytest.mark.parametrize("family", COMPLETE)
def test_families_of_the_usual_kind_are_computed_here(family: str) -> None:
    target = target_of(build(served()[family]))
    assert target.runner.settled_layers
    assert target.store.layers_keys[0].dtype == torch.float32


@pytest.mark.parametrize("family", ELSEWHERE)
def test_other_families_are_computed_as_transformers_does(family: str) -> None:
    target = target_of(build(served()[family]))
    assert not target.runner.settled_layers
    assert not target.runner._form.layers  # type: ignore[union-attr]


def test_layers_without_rotary_positions_are_computed_elsewhere_and_the_others_here() -> None:
    target = target_of(build(served()["smollm3"]))
    assert 0 < len(target.runner._form.layers.layers) < 3  # type: ignore[union-attr]


def scores(target: TransformersTarget) -> Tensor:
    sequence = SequenceState([3, 1, 4, 1, 5])
    target.open(sequence)
    tree = random_tree(5, 6, 90, torch.Generator().manual_seed(0))
    found = target.score([sequence], TreeBatch([tree], target.device)).logits.clone()
    target.close(sequence)
    return found


@pytest.mark.parametrize("family", [*COMPLETE, "smollm3"])
def test_trees_score_as_in_layers_of_transformers(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    here = scores(target_of(build(served()[family])))
    monkeypatch.setattr("branchwise.backends.transformers.host_layers.row_functions", lambda: None)
    target = target_of(build(served()[family]))
    assert not target.runner.settled_layers
    torch.testing.assert_close(here, scores(target), rtol=1e-4, atol=1e-5)


class Louder(modeling_llama.LlamaDecoderLayer):
    """Planted: the same parts, and another sum of them."""

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Tensor:
        return hidden_states + 1.01 * (super().forward(hidden_states, **kwargs) - hidden_states)


class Deafer(modeling_llama.LlamaDecoderLayer):
    """Planted: attention of another scale than the one that it states."""

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Tensor:
        self.self_attn.scaling *= 1.1
        try:
            return super().forward(hidden_states, **kwargs)
        finally:
            self.self_attn.scaling /= 1.1


@pytest.mark.parametrize("planted", [Louder, Deafer])
@pytest.mark.parametrize("quantised", [False, True])
def test_a_layer_that_computes_something_else_is_left_alone(planted: type[nn.Module], quantised: bool) -> None:
    model = quantised_model("llama") if quantised else build(served()["llama"])
    model.model.layers[1].__class__ = planted
    layers = target_of(model).runner._form.layers.layers  # type: ignore[union-attr]
    assert model.model.layers[1] not in layers
    assert len(layers) == (0 if quantised else len(model.model.layers) - 1), "eight bits need one precision for all"


def test_a_model_is_as_it_was_outside_a_pass_and_after_an_interrupt(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build(served()["llama"])
    target = target_of(model)
    assert not any("forward" in vars(module) for module in model.modules())

    def interrupted(*args: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(RowFunctions, "gated", interrupted)
    with pytest.raises(KeyboardInterrupt):
        scores(target)
    monkeypatch.undo()
    assert not any("forward" in vars(module) for module in model.modules())
    assert torch.equal(scores(target), scores(target_of(model)))


def test_a_long_prompt_of_floats_is_left_to_a_library(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    gated, layer = RowFunctions.gated, RowFunctions.layer
    monkeypatch.setattr(RowFunctions, "gated", lambda self, rows: asked.append(len(rows)) or gated(self, rows))
    monkeypatch.setattr(RowFunctions, "layer", lambda self, job: asked.append(job.rows) or layer(self, job))
    for model, here in ((build(served()["llama"]), False), (quantised_model("llama"), True)):
        model.config.max_position_embeddings = 2 * MANY
        target = TransformersTarget(model, slots=1, prefill_chunk=2 * MANY)
        asked.clear()
        sequence = SequenceState([number % 90 for number in range(MANY + 2)])
        target.open(sequence)
        assert (MANY + 1 in asked) is here, "layers of few bits give the same bits in all passes"
        target.score([sequence], TreeBatch([DraftTree.chain([sequence.root])], target.device))
        assert 1 in asked


@pytest.mark.parametrize("family", COMPLETE)
@pytest.mark.parametrize("kind", ["bytes", "floats"])
def test_a_layer_that_is_one_function_gives_the_bits_of_its_parts(
    kind: str, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kind == "bytes" and (byte_product() is None or tried([(64, 64)], 8).best is not Bytes):
        pytest.skip("the product of this CPU is a library's")
    monkeypatch.setattr(packed, "ways_to_pack", lambda weights, at_once: [PanelMatrix] * len(weights))
    at_once: list[int] = []
    own = RowFunctions.layer
    monkeypatch.setattr(RowFunctions, "layer", lambda self, job: at_once.append(job.rows) or own(self, job))
    model = quantised_model(family) if kind == "bytes" else build(served()[family])
    together = scores(target_of(model))
    assert bool(at_once) is all_in_panels(model), "matrices fill their panels, and their layers are one function"
    at_once.clear()
    monkeypatch.setattr(host_layers, "whole_of", lambda parts: None)
    apart = scores(target_of(quantised_model(family) if kind == "bytes" else build(served()[family])))
    assert not at_once
    assert torch.equal(together, apart)


def all_in_panels(model: nn.Module) -> bool:
    layers = [module for name, module in model.named_modules() if name.rpartition(".")[2].endswith("_proj")]
    sizes: list[tuple[int, int]] = [(layer.in_features, layer.out_features) for layer in layers]  # type: ignore[misc]
    return all(inputs % 4 == outputs % PANEL == 0 for inputs, outputs in sizes)


def change_weight(layer: Any) -> None:
    layer.mlp.up_proj.weight.mul_(3)


def change_bias(layer: Any) -> None:
    layer.self_attn.v_proj.bias.add_(1)


def change_norm(layer: Any) -> None:
    layer.input_layernorm.weight.mul_(2)


def change_head_norm(layer: Any) -> None:
    layer.self_attn.q_norm.weight.mul_(5)


def replace_part(layer: Any) -> None:
    layer.mlp.up_proj = nn.Linear(layer.mlp.up_proj.in_features, layer.mlp.up_proj.out_features, bias=False)


def replace_weights(layer: Any) -> None:
    layer.load_state_dict({name: 2 * weight for name, weight in layer.state_dict().items()}, assign=True)


def watch_part(layer: Any) -> None:
    layer.mlp.register_forward_hook(lambda module, given, found: 2 * found)


CHANGES = {
    "llama": (change_weight, change_norm, replace_part, replace_weights, watch_part),
    "qwen2": (change_bias,),
    "qwen3": (change_head_norm,),
}


@pytest.mark.parametrize(("family", "change"), [(family, change) for family in CHANGES for change in CHANGES[family]])
def test_a_layer_that_was_changed_since_is_the_model_s_again(family: str, change: Callable[[Any], None]) -> None:
    model = build(served()[family])
    target = target_of(model)
    before = scores(target)
    with torch.no_grad():
        change(model.model.layers[0])
    assert not torch.allclose(scores(target), before, rtol=1e-3, atol=1e-3)
    tree, sequence = random_tree(5, 6, 90, torch.Generator().manual_seed(0)), [3, 1, 4, 1]
    path = tree.topology.path(5)
    own = target.own_logits(torch.tensor([[*sequence, 5, *tree.tokens[path[1:]].tolist()]]))[0, -1]
    torch.testing.assert_close(scores(target)[0, 5], own, rtol=1e-4, atol=1e-4)
    anew = target_of(model)
    torch.testing.assert_close(scores(anew)[0, 5], own, rtol=1e-4, atol=1e-4)
    assert anew.runner._form.layers.unchanged, "what has changed is what a new target knows"  # type: ignore[union-attr]


def test_hidden_states_of_a_part_of_a_layer_are_seen() -> None:
    target = target_of(build(served()["llama"]))
    target.require(Needs(hidden_layers=("model.layers.1.mlp", "model.layers.1")))
    sequence = SequenceState([3, 1, 4])
    target.open(sequence)
    found = target.score([sequence], TreeBatch([DraftTree.chain([4, 7])], target.device)).hidden
    assert {name: states.shape[:2] for name, states in found.items()} == {
        "model.layers.1.mlp": (1, 2), "model.layers.1": (1, 2),
    }  # fmt: skip


class Fading(modeling_llama.LlamaAttention):
    """Planted: far from the beginning queries are longer, as those of Ministral 3 are."""

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Any:
        scaling = self.scaling
        self.scaling *= 1 + 0.1 * float(kwargs["position_ids"].max() // 16)
        try:
            return super().forward(hidden_states, **kwargs)
        finally:
            self.scaling = scaling


def test_a_layer_that_is_another_one_at_later_positions_is_left_alone() -> None:
    model = build(served()["llama"])
    model.model.layers[1].self_attn.__class__ = Fading
    assert model.model.layers[1] not in target_of(model).runner._form.layers.layers  # type: ignore[union-attr]


def test_parts_of_other_sizes_are_refused_before_any_address_is_given() -> None:
    model = build(served()["llama"])
    layer: Any = model.model.layers[0]
    assert row_functions() is not None
    HostLayer(layer, row_functions())  # type: ignore[arg-type]
    layer.self_attn.v_proj = nn.Linear(32, 2 * layer.self_attn.v_proj.out_features, bias=False)
    with pytest.raises(ValueError, match="sizes"):
        HostLayer(layer, row_functions())  # type: ignore[arg-type]


def test_layers_that_no_pass_has_met_are_not_counted() -> None:
    model = quantised_model("llama")
    model.model.layers[0].__class__ = Louder
    spare = build(served()["llama"]).model.layers[0]
    model.add_module("spare", spare)
    target = target_of(model)
    assert not target.runner.settled_layers
    assert target.store.layers_keys[0].dtype == torch.float64


@pytest.mark.parametrize("compiler", ["false", "true"])
def test_without_a_compiler_layers_are_those_of_transformers(compiler: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", compiler)
    compiled._library.cache_clear()
    row_functions.cache_clear()
    try:
        assert row_functions() is None
        target = target_of(build(served()["llama"]))
        assert not target.runner.settled_layers
        assert scores(target).isfinite().all()
    finally:
        compiled._library.cache_clear()
        row_functions.cache_clear()


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[list[list[str]]]:
    """The compilers' command lines from now on, by a process whose cache is empty."""
    run: list[list[str]] = []
    own = subprocess.run
    monkeypatch.setattr(subprocess, "run", lambda command, **more: (run.append(command), own(command, **more))[1])
    monkeypatch.setenv("BRANCHWISE_CACHE", str(tmp_path))
    compiled._library.cache_clear()
    yield run
    compiled._library.cache_clear()


def compilations(commands: list[list[str]]) -> int:
    return sum("-shared" in command for command in commands)


def test_functions_that_are_compiled_beside_a_reading_are_compiled_once(commands: list[list[str]]) -> None:
    native.begin()
    first = compiled.library()
    times = compilations(commands)
    assert times in (1, 2), "a second time where the compiler does not know an option"
    assert first is compiled.library() is not None
    assert compilations(commands) == times


def test_another_process_finds_the_library_unless_it_is_damaged_or_another(
    commands: list[list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def anew() -> int:
        """How often a process compiles that has to begin."""
        compiled._library.cache_clear()
        commands.clear()
        assert compiled.library() is not None
        return compilations(commands)

    assert anew()
    [kept] = tmp_path.glob("kernels/native/*.so")
    kept.write_bytes(b"no library")  # which this process has not loaded from there
    assert anew()
    assert not anew()
    kept.chmod(0o722)  # anybody may have written it
    assert anew()
    assert kept.stat().st_mode & 0o777 == 0o700
    monkeypatch.setattr(compiled, "_lines", lambda file: ["flags : fewer"])  # a folder that several machines share
    assert anew()
    monkeypatch.setattr(compiled, "FLAGS", ("-O2", *compiled.FLAGS[1:]))
    assert anew()
    assert len(list(tmp_path.glob("kernels/native/*.so"))) == 3
    assert not list(tmp_path.glob("tmp-*"))


def test_without_a_cache_the_library_is_compiled_all_the_same(
    commands: list[list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("BRANCHWISE_CACHE", str(tmp_path / "file" / "cache"))
    assert compiled.library() is not None
    assert compilations(commands)


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float64])
def test_room_for_functions_is_of_floats_whatever_torch_takes_by_default(kind: torch.dtype) -> None:
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(kind)
        room = room_for(3, 10, 8)
    finally:
        torch.set_default_dtype(before)
    assert room.nbytes >= 3 * (4 * 10 + 2 * 8 + 4)


def test_without_a_place_for_files_a_model_is_computed_all_the_same(
    commands: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*given: Any, **more: Any) -> Any:
        raise FileNotFoundError("no usable temporary directory")

    monkeypatch.setattr(compiled.tempfile, "TemporaryDirectory", refused)
    assert compiled.library() is None
    compiled._library.cache_clear()
    monkeypatch.undo()
    monkeypatch.setenv("CC", 'gcc "')
    assert compiled.library() is None
