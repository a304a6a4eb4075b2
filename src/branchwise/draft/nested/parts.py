"""The parts of a decoder of transformers: its layers, and the norm between the last of them and the head."""

from __future__ import annotations

from typing import Any

from torch import nn

from branchwise.errors import UnsupportedModel


def layers_of(model: Any) -> tuple[str, nn.ModuleList]:
    """The decoder layers, and their name in the model."""
    count = model.config.get_text_config().num_hidden_layers
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return name, module
    raise UnsupportedModel(f"{type(model).__name__} has no list of {count} decoder layers to take some from.")


def norm_of(model: Any) -> tuple[str, nn.Module]:
    """The norm after the last layer, and its name."""
    prefix = layers_of(model)[0].rpartition(".")[0]
    found = [(name, module) for name, module in model.get_submodule(prefix).named_children() if "norm" in name]
    if len(found) != 1:
        raise UnsupportedModel(f"{type(model).__name__} has {len(found)} norms after its layers; an exit needs one.")
    name, module = found[0]
    return f"{prefix}.{name}".lstrip("."), module


def exits_of(config: Any) -> tuple[int, ...]:
    """Numbers of layers after which a draft may leave, as the config of a nested model says; none for others."""
    return tuple(config.get_text_config().to_dict().get("exits") or ())
