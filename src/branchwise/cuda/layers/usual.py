"""Decoder layers of the common kind as a few kernels each: a norm and attention, then a norm and a gated MLP.

A layer is recognised by its parts. The kernels are checked by their results: in every pass that is recorded a layer is
compared with the model's own (`cuda.layers.fuse`).
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from transformers.activations import SiLUActivation

from branchwise.backends.transformers.attention import Window
from branchwise.cuda.inputs import PassTensors
from branchwise.cuda.layers.rows import Goal, Norm, Rows, Turn, add, gate_up, read

log = logging.getLogger(__name__)

LAYER = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}
HEAD_NORMS = "self_attn.q_norm", "self_attn.k_norm"
MLP = {"gate_proj", "up_proj", "down_proj", "act_fn"}
"""the names of the parts in Llama, Mistral, Qwen 2 and 3, SmolLM and others"""
READ_BY_ATTENTION = {"hidden_states", "position_embeddings", "attention_mask", "past_key_values", "cache_position"}
"""the arguments of an attention whose positions are rotary alone; Ministral 3 also scales later queries"""
READS, GATES = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")
"""the names of linear layers that read the same rows"""

Stack = tuple[Tensor | None, Tensor | None]
"""the stacked weights and biases of layers that read the same rows"""


class Handed:
    """Carries rows from one part of a pass to the next, besides the hidden states."""

    def __init__(self) -> None:
        self._last: tuple[Tensor, Tensor | None, Rows] | None = None
        """the last hidden states, the norm for which they were prepared, and the rows that a layer with this norm
        reads"""

    def put(self, states: Tensor, norm: Tensor | None, rows: Rows) -> None:
        self._last = states, norm, rows

    def rows(self, states: Tensor, norm: Tensor) -> Rows:
        """Hidden states (batch, nodes, width) in the form that a layer beginning with this norm reads."""
        if self._last is not None and self._last[0] is states and self._last[1] is norm:
            return self._last[2]
        return Rows.of(states.reshape(-1, states.shape[2]).contiguous(), norm)

    def forget(self) -> None:
        """Forget the last rows, at the end of a pass."""
        self._last = None


class UsualLayer:
    """The structure of a decoder layer. Its weights are arguments of every call."""

    def __init__(self, layer: nn.Module, groups: Sequence[Sequence[nn.Linear]]) -> None:
        """`groups` are linear maps of the layer that are stacked. Raises a KeyError, an AttributeError or a ValueError
        if the layer is of another kind."""
        parts: Any = layer
        attention, mlp = parts.self_attn, parts.mlp
        names, head_norms = {name for name, _ in attention.named_children()}, {"q_norm", "k_norm"}
        if {name for name, _ in layer.named_children()} != LAYER or names - head_norms != ATTENTION:
            raise ValueError("it has other parts")
        if {name for name, _ in mlp.named_children()} != MLP:
            raise ValueError("its MLP has other parts")
        if not isinstance(mlp.act_fn, nn.SiLU | SiLUActivation) or mlp.gate_proj.bias is not None:
            raise ValueError("its MLP has another gate")
        self._reads = _place(groups, attention, READS)
        self._gates = _place(groups, mlp, GATES)
        read = inspect.signature(attention.forward).parameters.values()
        if extra := {one.name for one in read if one.kind is not one.VAR_KEYWORD} - READ_BY_ATTENTION:
            raise ValueError(f"its attention also reads {', '.join(sorted(extra))}")
        self._scale = float(attention.scaling)
        self._epsilons = {name: epsilon_of(module) for name, module in layer.named_modules() if name.endswith("norm")}
        self._head_norms = bool(names & head_norms)
        self._turns = bool(vars(attention).get("use_rope", True))  # SmolLM3 has layers that know no positions

    def __call__(
        self,
        inputs: PassTensors,
        cache: tuple[Tensor, Tensor],
        following: Tensor | None,
        handed: Handed,
        weights: Mapping[str, Tensor],
        stacks: Sequence[Stack],
        hidden: Tensor,
        *,
        attention_mask: Window,
        position_embeddings: tuple[Tensor, Tensor],
        **kwargs: Any,
    ) -> Tensor:
        """(batch, nodes, width): the output of the layer with these weights for hidden states, in a pass with these
        `inputs` whose keys and values go to the `cache`, (slots, heads, rows, width) each. `handed` carries the rows
        from the previous layer; `following` are the weights of the next layer's norm, for the rows that this one hands
        on."""
        batch, nodes, width = hidden.shape
        (weight, bias), (gates, _) = stacks[self._reads], stacks[self._gates]
        out, down = weights["self_attn.o_proj.weight"], weights["mlp.down_proj.weight"]
        assert weight is not None, "weights are stacked before they are used"
        assert gates is not None, "weights are stacked before they are used"
        norm, inner_norm = weights["input_layernorm.weight"], weights["post_attention_layernorm.weight"]
        rows = handed.rows(hidden, norm)
        query = read(
            rows, self._epsilons["input_layernorm"], weight, bias, Turn(*position_embeddings) if self._turns else None,
            Goal(*cache, inputs.slots, inputs.starts), nodes=nodes, head_norms=self._of_heads(weights),
        )  # fmt: skip
        found = inputs.attend(query.transpose(1, 2), *cache, attention_mask.size, self._scale, None)
        found = found.view(len(rows.states), -1)
        attended = add(found, out, weights.get("self_attn.o_proj.bias"), rows.states, inner_norm)
        inner = gate_up(attended, self._epsilons["post_attention_layernorm"], gates)
        next_norm = norm if following is None else following  # behind the last layer nobody reads what is weighted
        made = add(inner, down, weights.get("mlp.down_proj.bias"), attended.states, next_norm)
        state = made.states.view(batch, nodes, width)
        handed.put(state, following, made)
        return state

    def _of_heads(self, weights: Mapping[str, Tensor]) -> tuple[Norm, Norm] | None:
        if not self._head_norms:
            return None
        query, key = ((weights[f"{name}.weight"], self._epsilons[name]) for name in HEAD_NORMS)
        return query, key


def _place(groups: Sequence[Sequence[nn.Linear]], parent: nn.Module, names: Sequence[str]) -> int:
    """The index of the stack that has these parts, in this order."""
    wanted = [parent.get_submodule(name) for name in names]
    for number, group in enumerate(groups):
        if len(group) == len(wanted) and all(one is other for one, other in zip(group, wanted, strict=True)):
            return number
    raise ValueError("its products are not stacked")


def epsilon_of(norm: nn.Module) -> float:
    values = vars(norm)
    if [name for name, _ in norm.named_parameters()] != ["weight"] or isinstance(norm, nn.LayerNorm):
        raise ValueError("its norms are of another kind")
    return float(values["variance_epsilon"] if "variance_epsilon" in values else values["eps"])


def usual_layer(layer: nn.Module, groups: Sequence[Sequence[nn.Linear]]) -> UsualLayer | None:
    """The kernels of a layer, if its parts are those of the common kind; else None."""
    try:
        return UsualLayer(layer, groups)
    except (KeyError, AttributeError, ValueError) as error:
        log.info("A %s is not computed in few kernels: %s", type(layer).__name__, error)
        return None
