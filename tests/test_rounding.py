"""A fused layer is told apart from a wrong one: what rounding does passes, planted faults do not."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from transformers import LlamaConfig

from branchwise.backends.transformers.target import TransformersTarget
from branchwise.core.batch import TreeBatch
from branchwise.core.sequence import SequenceState
from branchwise.core.tree import DraftTree
from branchwise.cuda.layers.rounding import beyond_rounding
from tests.conformance.architectures import COMMON, build

WIDTH, HEADS, INNER = 64, 4, 160
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
WIDER = {torch.float32: torch.float64, torch.bfloat16: torch.float32, torch.float16: torch.float32}

Weights = dict[str, Tensor]
Stacks = list[tuple[Tensor, None]]


def decoder_layer(weights: Weights, stacks: Stacks, tensors: list[Tensor], scale: float = 1.0) -> tuple[Tensor]:
    """A pre-norm layer with causal attention, as transformers computes it: every operation rounds."""
    (hidden,) = tensors
    batch, nodes, _ = hidden.shape
    stacked = F.linear(F.rms_norm(hidden, (WIDTH,)), stacks[0][0])
    query, key, value = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in stacked.chunk(3, -1))
    scores = query @ key.transpose(-1, -2) * (scale * (WIDTH // HEADS) ** -0.5)
    later = torch.ones(nodes, nodes, dtype=torch.bool, device=hidden.device).triu(1)
    attended = scores.masked_fill(later, -torch.inf).softmax(-1) @ value
    hidden = hidden + F.linear(attended.transpose(1, 2).reshape(batch, nodes, WIDTH), weights["o"])
    gate, up = F.linear(F.rms_norm(hidden, (WIDTH,)), stacks[1][0]).chunk(2, -1)
    return (hidden + F.linear(F.silu(gate) * up, weights["down"]),)


def compiled_layer(weights: Weights, stacks: Stacks, tensors: list[Tensor], scale: float = 1.0) -> tuple[Tensor]:
    """The same layer as compilers fuse it: rounded only at its end."""
    dtype = tensors[0].dtype
    wide = WIDER[dtype]
    (found,) = decoder_layer(
        {name: weight.to(wide) for name, weight in weights.items()},
        [(stack.to(wide), None) for stack, _ in stacks],
        [tensor.to(wide) for tensor in tensors],
        scale,
    )
    return (found.to(dtype),)


def a_layer(dtype: torch.dtype, seed: int = 0, stream: float = 1.0, nodes: int = 8) -> tuple[Weights, Stacks, Any]:
    """Weights and hidden states of `stream` times the size of what the layer adds to them, roughly."""
    generator = torch.Generator().manual_seed(seed)

    def draw(rows: int, columns: int) -> Tensor:
        return (torch.randn(rows, columns, generator=generator) * 1.3 * columns**-0.5).to(dtype)

    weights = {"o": draw(WIDTH, WIDTH), "down": draw(WIDTH, INNER)}
    stacks: Stacks = [(draw(3 * WIDTH, WIDTH), None), (draw(2 * INNER, WIDTH), None)]
    hidden = stream * torch.randn(2, nodes, WIDTH, generator=generator)
    return weights, stacks, [hidden.to(dtype)]


@pytest.mark.parametrize("nodes", [1, 8])
@pytest.mark.parametrize("stream", [0.01, 1.0, 5000.0])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rounding_alone_is_no_fault_however_large_the_residual_stream(
    dtype: torch.dtype, stream: float, nodes: int
) -> None:
    for seed in range(8):
        inputs = a_layer(dtype, seed, stream, nodes)
        assert beyond_rounding(decoder_layer, compiled_layer, inputs) is None
        assert beyond_rounding(decoder_layer, decoder_layer, inputs) is None


@pytest.mark.parametrize(("roundings", "passes"), [(1, True), (8, False)])
def test_a_column_of_large_numbers_may_be_off_by_a_rounding_of_these(roundings: int, passes: bool) -> None:
    """Where the model's own result lies on the exact one, it does not tell what rounding does there."""
    large = 8.0

    def layer(weights: Weights, stacks: Stacks, tensors: list[Tensor]) -> tuple[Tensor]:
        found = 1.37 * tensors[0]
        found[..., 7] = large
        return (found,)

    def fused(*inputs: Any) -> tuple[Tensor]:
        (found,) = layer(*inputs)
        found[..., 7] += large * roundings * torch.finfo(torch.bfloat16).eps
        return (found,)

    inputs: Any = ({}, [], [torch.randn(1, 1, 4096, dtype=torch.bfloat16)])
    assert (beyond_rounding(layer, fused, inputs) is None) is passes


def test_only_nodes_that_tell_something_count() -> None:
    """Most of a padded pass attends to nothing: medians over all of it would not see a fault in the rest."""

    def faulty(*inputs: Any) -> tuple[Tensor]:
        (found,) = compiled_layer(*inputs)
        found[0, :2] *= 1.1
        return (found,)

    inputs = a_layer(torch.float32)
    telling = torch.arange(inputs[2][0].shape[0] * inputs[2][0].shape[1]) < 2
    assert beyond_rounding(decoder_layer, faulty, inputs) is None
    assert beyond_rounding(decoder_layer, faulty, inputs, telling) is not None
    assert beyond_rounding(decoder_layer, compiled_layer, inputs, telling) is None


def test_a_layer_that_returns_something_of_another_form_is_another_layer() -> None:
    def bare(*inputs: Any) -> Tensor:
        return compiled_layer(*inputs)[0]

    assert beyond_rounding(decoder_layer, bare, a_layer(torch.float32)) == "it returns something of another form"


def test_a_few_nodes_that_are_routed_to_other_experts_are_no_fault() -> None:
    inputs = a_layer(torch.bfloat16)

    def rerouted(*inputs: Any) -> tuple[Tensor]:
        (found,) = compiled_layer(*inputs)
        found[0, 3] += 0.3 * found[0, 4]
        return (found,)

    assert beyond_rounding(decoder_layer, rerouted, inputs) is None


def zero(stack: Tensor, row: int) -> Tensor:
    stack = stack.clone()
    stack[row] = 0
    return stack


def of_another_layer(weights: Weights, stacks: Stacks, tensors: list[Tensor]) -> tuple[Tensor]:
    others = a_layer(tensors[0].dtype, seed=99)[1]
    return compiled_layer(weights, [others[0], stacks[1]], tensors)


def swapped(*inputs: Any) -> tuple[Tensor]:
    (found,) = compiled_layer(*inputs)
    return (found[..., [1, 0, *range(2, WIDTH)]],)


FAULTS: dict[str, Callable[..., tuple[Tensor]]] = {
    "a row of the values": lambda w, s, t: compiled_layer(w, [(zero(s[0][0], -1), None), s[1]], t),
    "a row of the gate": lambda w, s, t: compiled_layer(w, [s[0], (zero(s[1][0], 0), None)], t),
    "a row of the output": lambda w, s, t: compiled_layer(w | {"o": zero(w["o"], 5)}, s, t),
    "a row of the last map": lambda w, s, t: compiled_layer(w | {"down": zero(w["down"], 5)}, s, t),
    "a scale that is too large": lambda w, s, t: compiled_layer(w, s, t, scale=1.1),
    "a scale that is too small": lambda w, s, t: compiled_layer(w, s, t, scale=0.9),
    "the stack of another layer": of_another_layer,
    "a swapped column": swapped,
    "no layer at all": lambda w, s, t: (t[0],),
    "not a number": lambda w, s, t: (t[0] * torch.nan,),
}


IN_ROUNDING = {("a row of the gate", torch.bfloat16)}
"""one of 160 inner channels adds no more than bfloat16 rounds away: no comparison of results can find it"""


@pytest.mark.parametrize("stream", [1.0, 5000.0])
@pytest.mark.parametrize(
    ("fault", "dtype"), [(fault, dtype) for fault in FAULTS for dtype in DTYPES if (fault, dtype) not in IN_ROUNDING]
)
def test_a_planted_fault_is_found(fault: str, dtype: torch.dtype, stream: float) -> None:
    """Also where the residual stream of the text would hide it."""
    for seed in range(3):
        assert beyond_rounding(decoder_layer, FAULTS[fault], a_layer(dtype, seed, stream))


# Layers of a model, through the fused passes of a target


class Unrounded(torch.fx.Interpreter):
    """A traced layer as compilers run it, without rounding between its operations."""

    def __init__(self, graph: torch.fx.GraphModule, dtype: torch.dtype, scale: float = 1.0) -> None:
        super().__init__(graph)
        self.dtype, self.scale = dtype, scale

    def widened(self, value: Any) -> Any:
        if isinstance(value, Tensor) and value.dtype == self.dtype:
            return value.to(WIDER[self.dtype])
        return WIDER[self.dtype] if value is self.dtype else value

    def placeholder(self, target: Any, args: Any, kwargs: Any) -> Any:
        return self.widened(super().placeholder(target, args, kwargs))

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target is torch.ops.branchwise.attend_here.default:
            args = (*args[:4], args[4] * self.scale, *args[5:])
        return super().call_function(target, args, {name: self.widened(value) for name, value in kwargs.items()})

    def output(self, target: Any, args: Any, kwargs: Any) -> Any:
        return torch.utils._pytree.tree_map_only(
            Tensor, lambda found: found.to(self.dtype), super().output(target, args, kwargs)
        )


def uncompiled_layers(
    dtype: torch.dtype,
    embedding: float,
    scale: float,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> tuple[list[str], float]:
    """What is said about layers that run uncompiled, and how many times larger the residual stream is than what the
    last layer adds to it."""
    pytest.importorskip("triton", reason="needs Triton's interpreter")

    def program(graph: torch.fx.GraphModule) -> Callable[..., Any]:
        return lambda *inputs: Unrounded(graph, dtype, scale).run(*inputs)

    monkeypatch.setattr("branchwise.cuda.layers.fuse.compiled", program)
    model = build(LlamaConfig(**(COMMON | {"hidden_size": 64, "num_hidden_layers": 2})), dtype)
    model.get_input_embeddings().weight.mul_(embedding)
    target = TransformersTarget(model, slots=1, context=16, max_nodes=8, kernels=True, compile=True)
    text = SequenceState([5, 6, 7, 8, 9, 10, 11, 12, 13, 14])
    target.open(text)
    seen: list[Tensor] = []
    last = model.model.layers[-1]
    last.register_forward_hook(lambda module, given, found: seen.extend((given[0], found)))
    with caplog.at_level(logging.WARNING, "branchwise.cuda.layers.fuse"):
        target.score([text], TreeBatch([DraftTree(torch.tensor([14, 1, 2, 3, 4]), (-1, 0, 0, 1, 3))]))
    stream, added = (value.float().norm() for value in (seen[-2], seen[-1] - seen[-2]))
    return [
        record.getMessage() for record in caplog.records if "does not run compiled" in record.getMessage()
    ], stream / added


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layers_of_a_large_residual_stream_run_compiled(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    said, larger = uncompiled_layers(dtype, 5e4, 1.0, monkeypatch, caplog)
    assert larger > 1000
    assert said == []


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layers_whose_program_attends_with_another_scale_run_uncompiled(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    said, _ = uncompiled_layers(dtype, 5e4, 1.5, monkeypatch, caplog)
    assert [words.split(":")[0] for words in said] == [f"Layer {layer} does not run compiled" for layer in range(2)]
