"""Heads in the EAGLE-3 layout of vLLM's `speculators`: a folder with `config.json` and `model.safetensors`.

The layer is a decoder layer of Llama or Qwen 3 whose attention reads the normed embedding and the normed features side
by side, in this order. Heads differ in:

    fc                     joins the tapped hidden states; before it, `fc_norm` norms each of them, `norm_before_fc` all
                           of them together
    norm_before_residual   the residual of the layer is the normed features
    norm_output            the next row reads the normed output (EAGLE 3.1)
    d2t                    token = row of `lm_head` + d2t[row]; without d2t, row i is token i
    embed_tokens           may be missing: then the embeddings are the target's

Hidden states are the inputs of layers of the target, counted from 0, in the order of the layers. The layout of the
authors of EAGLE-3 is the same with other names (`midlayer`), and with all settings in one level of `config.json`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from branchwise.backends.base import TargetInfo
from branchwise.draft.head.file import TrainedHead
from branchwise.draft.head.network import Head, HeadConfig
from branchwise.draft.state import Tensors
from branchwise.errors import ModelError, first_line

REMEDY = "name the folder of an EAGLE-3 head in safetensors, as vLLM's speculators store it"
USUAL = ("2", "n/2", "n-3")
"""taps of a head that names none, as in vLLM; n is the number of layers of the target"""
FAMILIES = ("llama", "qwen3")
FIXED_POSITIONS = ("default", "linear", "llama3", "yarn")
"""rotary positions whose frequencies do not depend on the length of a text"""
SETTINGS = (
    "attention_bias", "head_dim", "hidden_act", "hidden_size", "intermediate_size", "layer_types",
    "max_position_embeddings", "mlp_bias", "num_attention_heads", "num_hidden_layers", "num_key_value_heads",
    "partial_rotary_factor", "rms_norm_eps", "rope_parameters", "rope_scaling", "rope_theta", "sliding_window",
    "use_sliding_window", "vocab_size",
)  # fmt: skip
"""names of the settings of the decoder layer; a missing setting has the default of the layer's family"""
QKV = "blocks.0.qkv.weight"
"""the weight that reads features and embeddings side by side"""
OF_TRAINING = ("verifier_lm_head.weight", "verifier_norm.weight", "layers.0.self_attn.rotary_emb.inv_freq")
"""weights that some files hold and drafting does not read"""


def usual_inputs(layers: int) -> tuple[int, ...]:
    """The layers, counted from 0, whose inputs vLLM reads for a head that names none."""
    return 2, layers // 2, layers - 3


def decoder_layers(target: TargetInfo) -> tuple[str, ...]:
    return tuple(name for name in target.layers if name.rpartition(".")[2].isdigit())


@dataclass(frozen=True, eq=False)
class ForeignHead(TrainedHead):
    """A head whose file has the sizes of its target instead of a fingerprint, and layer numbers instead of names."""

    vocabulary: int = 0
    """vocabulary size of its target"""
    ranked: ClassVar[bool] = False

    def check(self, target: TargetInfo) -> None:
        config = self.head.config
        for what, wanted, found in (
            ("numbers in a hidden state", config.tap_width or config.width, target.hidden_width),
            ("tokens", self.vocabulary, target.vocabulary),
        ):
            if wanted != found:
                raise ModelError(
                    f"The head was trained for {self.target}, a model with {wanted} {what}, and cannot draft for "
                    f"{target.name}, which has {found}."
                )
        self.taps(target)

    def taps(self, target: TargetInfo) -> tuple[str, ...]:
        layers = decoder_layers(target)
        usual = dict(zip(USUAL, usual_inputs(len(layers)), strict=True))
        named = self.head.config.taps
        inputs = [usual[tap] for tap in USUAL] if named == USUAL else [int(tap) for tap in named]
        if inputs != sorted(set(inputs)) or inputs[0] < 1 or inputs[-1] > len(layers):
            raise ModelError(
                f"The head was trained for {self.target} and reads what enters its layers {', '.join(named)}; it "
                f"cannot draft for {target.name}, which has {len(layers)} layers."
            )
        return tuple(layers[number - 1] for number in inputs)


def load_speculators(folder: Path) -> ForeignHead:
    """The head in a folder; a head that is foreign, damaged or of a kind that cannot draft here is refused."""
    try:
        known = json.loads((folder / "config.json").read_text())
        files = sorted(folder.glob("*.safetensors"))
        if not files:
            raise ModelError(f"{folder} holds no safetensors; {REMEDY}.")
        stored = {name: tensor for file in files for name, tensor in load_file(file).items()}
        tensors = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in stored.items()}
        return _parsed(known, tensors)
    except Unsupported as error:
        raise ModelError(f"The head {folder} cannot draft here: {error}.") from None
    except FileNotFoundError:
        raise ModelError(f"{folder} holds no config.json; {REMEDY}.") from None
    except OSError as error:
        raise ModelError(f"The head {folder} cannot be read: {error.strerror or error}.") from None
    except DAMAGE as error:
        raise ModelError(f"The head {folder} is damaged ({first_line(error)}); {REMEDY}.") from None


DAMAGE = SafetensorError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError, RuntimeError
"""errors that parsing raises if a file is damaged"""


class Unsupported(Exception):
    """The head has something that our network does not support."""


def _parsed(known: dict[str, Any], tensors: Tensors) -> ForeignHead:
    nested = "speculators_model_type" in known
    if nested and known["speculators_model_type"] != "eagle3":
        raise Unsupported(f"it is of the kind {known['speculators_model_type']}, and only eagle3 is read")
    if not nested and "fc.weight" not in tensors:
        raise ValueError("it is no EAGLE-3 head")
    layer = _layer(known["transformer_layer_config"] if nested else known, tensors)
    eagle = {} if nested else known.get("eagle_config") or {}
    if eagle.get("use_aux_hidden_state") is False:
        raise Unsupported("it reads the last hidden state of EAGLE-1")
    inputs = known.get("eagle_aux_hidden_state_layer_ids") or eagle.get("eagle_aux_hidden_state_layer_ids")
    normed = bool(eagle.get("norm_before_fc", known.get("norm_before_fc"))), bool(known.get("fc_norm"))
    width = layer.hidden_size
    config = HeadConfig(
        width=width,
        taps=tuple(str(int(number)) for number in sorted(set(inputs))) if inputs else USUAL,
        heads=layer.num_attention_heads,
        kv_heads=layer.num_key_value_heads,
        head_width=layer.head_dim,
        mlp=layer.intermediate_size,
        layers=layer.num_hidden_layers,
        epsilon=layer.rms_norm_eps,
        tap_width=known.get("target_hidden_size") or 0,
        tap_norms={(False, False): "none", (True, False): "joined", (False, True): "each"}[normed],
        norm_before_residual=bool(known.get("norm_before_residual", nested)),  # vLLM's defaults
        carry_normed=bool(known.get("norm_output")),
        query_norm=layer.model_type == "qwen3",
        attention_bias=layer.attention_bias,
    )
    vocabulary = int(layer.vocab_size)
    embeddings, rows = tensors.pop("embed_tokens.weight", None), tensors.pop("lm_head.weight", None)
    if embeddings is None and config.tap_width not in (0, width):
        raise ValueError("it has no embeddings, and those of its target are of another width")
    proposed = known.get("draft_vocab_size") or vocabulary
    for name, found, count in (("embed_tokens", embeddings, vocabulary), ("lm_head", rows, proposed)):
        if found is not None:
            _check_weight(f"{name}.weight", found, (count, width))
    table = _table(proposed, vocabulary, tensors)
    head = _filled(config, _positions(layer), tensors)
    verifier = (known.get("speculators_config") or {}).get("verifier") or {}
    name = verifier.get("name_or_path") or "a model that it does not name"
    return ForeignHead(head, table, name, "", rows=rows, embeddings=embeddings, vocabulary=vocabulary)


def _layer(settings: Mapping[str, Any], tensors: Tensors) -> Any:
    """The settings of the decoder layer as a transformers config, because files leave out defaults of transformers."""
    from transformers import AutoConfig

    family = settings.get("model_type") or ("qwen3" if "layers.0.self_attn.q_norm.weight" in tensors else "llama")
    if family not in FAMILIES:
        raise Unsupported(f"its layer is of {family}, and only {' and '.join(FAMILIES)} are known")
    if "sliding_attention" in (settings.get("layer_types") or []):
        raise Unsupported("it attends to a sliding window")
    if settings.get("mlp_bias"):
        raise Unsupported("its MLP has biases")
    if settings.get("logit_scale", 1.0) != 1.0:
        raise Unsupported("its logits are scaled")
    given = {name: settings[name] for name in SETTINGS if settings.get(name) is not None}
    try:
        layer = AutoConfig.for_model(family, **given)
    except Exception as error:  # transformers checks values with exceptions of its own
        raise ValueError(first_line(error)) from None
    if layer.num_attention_heads % layer.num_key_value_heads:
        raise ValueError(f"{layer.num_attention_heads} heads share {layer.num_key_value_heads} keys")
    if layer.hidden_act != "silu":
        raise Unsupported(f"its MLP uses {layer.hidden_act}, and only silu is known")
    return layer


class Positions(NamedTuple):
    frequencies: Tensor
    scale: float
    """factor of queries and keys; YaRN has one for long contexts"""


def _positions(layer: Any) -> Positions:
    """The rotary positions of a layer."""
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    kind = layer.rope_parameters["rope_type"]
    if kind not in FIXED_POSITIONS:
        raise Unsupported(f"its rotary positions are of the kind {kind}")
    rotary: Any = LlamaRotaryEmbedding(layer)
    if layer.rope_parameters.get("partial_rotary_factor", 1.0) != 1.0 or 2 * len(rotary.inv_freq) != layer.head_dim:
        raise Unsupported("only a part of its heads has rotary positions")
    return Positions(rotary.inv_freq.float(), float(rotary.attention_scaling))


def _table(count: int, vocabulary: int, tensors: Tensors) -> Tensor:
    """(count,): the token of every output row."""
    offsets, listed = tensors.pop("d2t", None), tensors.pop("t2d", None)
    if offsets is None and count != vocabulary:
        raise ValueError(f"it has no d2t, and proposes {count} of {vocabulary} tokens")
    table = torch.arange(count)
    if offsets is not None:
        if offsets.shape != (count,) or offsets.is_floating_point():
            raise ValueError(f"d2t has not one whole number for each of {count} tokens")
        table = table + offsets.long()
    if int(table.min()) < 0 or int(table.max()) >= vocabulary or len(table.unique()) < count:
        raise ValueError("d2t names tokens twice, or tokens that the target does not have")
    if listed is not None and not torch.equal(listed.bool().nonzero().flatten(), table.sort().values):
        raise ValueError("d2t and t2d contradict each other")
    return table


def _filled(config: HeadConfig, positions: Positions, tensors: Tensors) -> Head:
    """A head with these weights."""
    with torch.device("meta"):
        head = Head(config, positions.frequencies)
    names = {name: stored_as(name, config) for name in head.state_dict()}
    wanted = {theirs for parts in names.values() for theirs in parts}
    if unknown := sorted(tensors.keys() - wanted - set(OF_TRAINING)):
        raise Unsupported(f"it has {unknown[0]}, which is not known")
    if missing := sorted(wanted - tensors.keys()):
        raise ValueError(f"it has no {missing[0]}")
    weights: Tensors = {}
    for name, empty in head.state_dict().items():
        for theirs, rows in names[name].items():
            _check_weight(theirs, tensors[theirs], (rows, *empty.shape[1:]))
        weights[name] = torch.cat([tensors[theirs].float() for theirs in names[name]])
    weights[QKV] = swapped(weights[QKV], config)
    for name, weight in weights.items():
        if name.endswith(("query_norm.weight", "key_norm.weight")):
            weight *= positions.scale
        elif ".qkv." in name and not config.query_norm:
            weight[: (config.heads + config.kv_heads) * config.head_width] *= positions.scale
    head.load_state_dict(weights, assign=True)
    return head.eval().requires_grad_(False)


def _check_weight(name: str, weight: Tensor, shape: tuple[int, ...]) -> None:
    if weight.shape != shape:
        raise ValueError(f"{name} is {tuple(weight.shape)}, and config.json asks for {shape}")
    if not weight.is_floating_point() or not weight.isfinite().all():
        raise ValueError(f"{name} holds what is no number")


def stored_as(name: str, config: HeadConfig) -> dict[str, int]:
    """The names of the weights of the layout that make up a weight of the network, in the order in which they are
    stacked, with their numbers of rows."""
    place, _, kind = name.rpartition(".")
    whole = {
        "join": ("fc", config.width),
        "feature_norm": ("layers.0.hidden_norm", config.width),
        "embedding_norm": ("layers.0.input_layernorm", config.width),
        "output_norm": ("norm", config.width),
    }
    if place in whole:
        theirs, rows = whole[place]
        return {f"{theirs}.{kind}": rows}
    group, number, *rest = place.split(".")
    if group == "tap_norms":
        if config.tap_norms == "joined":
            return {f"input_norm.{kind}": config.read_width}
        return {f"fc_norm.{number}.{kind}": config.tap_width or config.width}
    queries, keys = config.heads * config.head_width, config.kv_heads * config.head_width
    parts = {
        "qkv": {"self_attn.q_proj": queries, "self_attn.k_proj": keys, "self_attn.v_proj": keys},
        "query_norm": {"self_attn.q_norm": config.head_width},
        "key_norm": {"self_attn.k_norm": config.head_width},
        "out": {"self_attn.o_proj": config.width},
        "input_norm": {"input_layernorm": config.width},
        "mlp_norm": {"post_attention_layernorm": config.width},
        "gate_up": {"mlp.gate_proj": config.mlp, "mlp.up_proj": config.mlp},
        "down": {"mlp.down_proj": config.width},
    }[".".join(rest)]
    return {f"layers.{number}.{theirs}.{kind}": rows for theirs, rows in parts.items()}


def swapped(weight: Tensor, config: HeadConfig) -> Tensor:
    """The weight `QKV` with its two inputs swapped: the network has features first, the layout embeddings."""
    return torch.cat([weight[:, config.width :], weight[:, : config.width]], dim=1)


def read_head(path: Path) -> TrainedHead:
    """A head in our own format, which is a file, or a folder of `speculators`."""
    return load_speculators(path) if path.is_dir() else TrainedHead.load(path)
