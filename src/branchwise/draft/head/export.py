"""Writing a head in the EAGLE-3 layout of vLLM's `speculators` (`speculators.py`), so that vLLM drafts with it.

The layout has one way of carrying states from row to row, so a head with another way is refused. It needs output rows,
so those of the target are written to the file. Embeddings are left out: vLLM then reads those of the target.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from branchwise.backends.base import TargetInfo
from branchwise.draft.head.file import TrainedHead
from branchwise.draft.head.network import HeadConfig
from branchwise.draft.head.speculators import QKV, decoder_layers, stored_as, swapped
from branchwise.draft.state import Tensors
from branchwise.errors import UsageError

VERSION = "0.7.0"
"""version of speculators with this layout"""
DRAFTED = 5
"""number of tokens that vLLM drafts at a time by default: the depth that heads are trained for"""
REMEDY = "train one that can be: branchwise train head --form speculators"


@dataclass(frozen=True)
class Verifier:
    """What vLLM needs to know of the target."""

    name: str
    """hub id or folder of the model that vLLM loads"""
    architectures: tuple[str, ...] = ()
    positions: int = 4096
    """the most tokens of a text"""


def check_exportable(trained: TrainedHead) -> None:
    """Refuse a head with options that the layout does not have."""
    if trained.rows is not None:
        raise UsageError("The head is in the layout of speculators already.")
    config = trained.head.config
    options = {
        "carry, a second output for the next row": config.carry,
        "gate, which lets the embedding select among features": config.gate != "none",
        "masks, which predict several depths in one pass": config.masks > 0,
    }
    for option, present in options.items():
        if present:
            raise UsageError(f"The head has {option}, and the layout of speculators has none; {REMEDY}.")


def export_speculators(trained: TrainedHead, folder: Path, target: TargetInfo, verifier: Verifier) -> None:
    """Write the head for its target to a folder, which must be new or empty."""
    check_exportable(trained)
    trained.check(target)
    if target.embeddings is None:
        raise UsageError(f"{target.name} shows no output rows, and the layout of speculators needs them.")
    table = trained.table.sort().values  # speculators take the target's rows in the order of tokens
    tensors = _weights(trained, target.dtype)
    tensors["lm_head.weight"] = target.embeddings[1][table.to(target.device)].to("cpu", target.dtype)
    if len(table) < target.vocabulary:
        tensors["d2t"] = table - torch.arange(len(table))
        tensors["t2d"] = torch.zeros(target.vocabulary, dtype=torch.bool).index_fill_(0, table, True)
    described = json.dumps(_described(trained, target, verifier), indent=2) + "\n"
    check_folder(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors", PLAIN)
        (folder / "config.json").write_text(described)
    except OSError as error:
        raise UsageError(f"The head cannot be written to {folder}: {error.strerror or error}.") from None


PLAIN = {"format": "pt"}
"""metadata that transformers needs in a safetensors file"""


def check_folder(folder: Path) -> None:
    """Refuse a folder that is not empty, and any other file."""
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise UsageError(f"{folder} exists; name a new folder, or remove it.")


def _weights(trained: TrainedHead, dtype: torch.dtype) -> Tensors:
    config = trained.head.config
    found: Tensors = {}
    for name, weight in trained.head.state_dict().items():
        weight = swapped(weight, config) if name == QKV else weight
        names = stored_as(name, config)
        found |= zip(names, weight.to("cpu", dtype).split(list(names.values())), strict=True)
    return found


def _described(trained: TrainedHead, target: TargetInfo, verifier: Verifier) -> dict[str, Any]:
    """The content of `config.json`."""
    config = trained.head.config
    inputs, theta = _inputs(config, target), _theta(trained.head.frequencies)
    family = "qwen3" if config.query_norm else "llama"
    dtype = str(target.dtype).removeprefix("torch.")
    layer = {
        "model_type": family,
        "architectures": [{"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}[family]],
        "hidden_size": config.width,
        "intermediate_size": config.mlp,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_width,
        "vocab_size": target.vocabulary,
        "max_position_embeddings": verifier.positions,
        "rms_norm_eps": config.epsilon,
        "rope_theta": theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": theta},
        "hidden_act": "silu",
        "attention_bias": config.attention_bias,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "dtype": dtype,
    }
    if len(inputs) != 3:
        layer["num_aux_hidden_states"] = len(inputs)  # by default vLLM expects 3 for a Llama layer
    proposal = {
        "proposal_type": "greedy",
        "speculative_tokens": DRAFTED,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    return {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "speculators_version": VERSION,
        "speculators_config": {
            "algorithm": "eagle3",
            "proposal_methods": [proposal],
            "default_proposal_method": "greedy",
            "verifier": {"name_or_path": verifier.name, "architectures": list(verifier.architectures)},
        },
        "transformer_layer_config": layer,
        "draft_vocab_size": len(trained.table),
        "target_hidden_size": config.tap_width or None,
        "eagle_aux_hidden_state_layer_ids": inputs,
        "norm_before_residual": config.norm_before_residual,
        "norm_before_fc": config.tap_norms == "joined",
        "fc_norm": config.tap_norms == "each",
        "norm_output": config.carry_normed,
        "embed_requires_grad": False,
        "dtype": dtype,
    }


def _inputs(config: HeadConfig, target: TargetInfo) -> list[int]:
    """The layers, counted from 0, whose inputs are the hidden states that the head reads."""
    layers = decoder_layers(target)
    found = [layers.index(tap) + 1 if tap in layers else 0 for tap in config.taps]
    if 0 in found or found != sorted(set(found)):
        raise UsageError(
            f"The head reads {', '.join(config.taps)}, and the layout of speculators names decoder layers only, in "
            f"their order; {REMEDY}."
        )
    return found


def _theta(frequencies: Tensor) -> float:
    """The base of rotary positions."""
    count = len(frequencies)
    exact = 1e4 if count == 1 else math.exp(-math.log(float(frequencies[1])) * count)
    powers = torch.arange(count) / count
    for theta in (float(f"{exact:.4g}"), exact):  # stored frequencies are rounded, but a base is a round number
        if torch.allclose(theta**-powers, frequencies.float().cpu(), rtol=1e-5, atol=0):
            return theta
    raise UsageError(f"The rotary positions of the head are not those of one base; {REMEDY}.")
