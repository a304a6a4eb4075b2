"""The parts of a transformers decoder: its layers, the norm between the last layer and the head, and copies with fewer
layers."""

from __future__ import annotations

import copy
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
    """The numbers of layers after which a draft may leave, from the config of a nested model; empty for other
    models."""
    return tuple(config.get_text_config().to_dict().get("exits") or ())


def first_layers(model: Any, count: int) -> Any:
    """The same model with its first `count` layers only, and its embeddings, norm and head; no weight is copied."""
    name, _ = layers_of(model)
    *path, last = name.split(".")
    found = part = shallow(model)
    parts = [found]
    for step in path:
        part._modules[step] = part = shallow(part._modules[step])
        parts.append(part)
    part._modules[last] = nn.ModuleList(part._modules[last][:count])
    config = config_of_layers(model.config, 0, count)
    for part in parts:
        part.config = config
    return found


def shallow(module: Any) -> Any:
    """A copy that shares its children, but can replace them without changing the original."""
    found = copy.copy(module)
    found._modules = dict(module._modules)  # `copy.copy` shares the dict of children
    return found


def config_of_layers(config: Any, first: int, last: int) -> Any:
    """The config of a model with the layers from `first` to before `last` only."""
    found = copy.deepcopy(config)
    text = found.get_text_config()
    text.num_hidden_layers = last - first
    if kinds := text.to_dict().get("layer_types"):
        text.layer_types = kinds[first:last]
    return found
