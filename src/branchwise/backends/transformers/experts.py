"""The experts of a mixture as transformers lays them out, and how many of them a pass reads.

A layer of experts has its matrices in two tensors, (experts, …) each, beside a router with one row for each expert.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

ACTIVE = "num_experts_per_tok"
"""the key of a config that holds the number of experts a token is routed to"""
INPUTS, OUTPUTS = "gate_up_proj", "down_proj"
"""the names of the matrices of experts: (experts, 2 * inner, width), gate above up, and (experts, width, inner)"""


@dataclass(frozen=True, eq=False)
class ExpertLayer:
    """The experts of one layer."""

    name: str
    """the name of the module that holds experts and router"""
    experts: nn.Module
    router: nn.Module | None
    """the router, if it is plain: a single weight (experts, width) and no buffers; else None"""

    @property
    def count(self) -> int:
        return len(self.experts.get_parameter(INPUTS))

    @property
    def rows(self) -> Tensor:
        """(experts, width): the rows of the router."""
        assert self.router is not None
        return self.router.get_parameter("weight")

    def output(self, expert: int, hidden: Tensor) -> Tensor:
        """The output of an expert for hidden states (tokens, width)."""
        inputs, outputs = (self.experts.get_parameter(name)[expert] for name in (INPUTS, OUTPUTS))
        gate, up = nn.functional.linear(hidden, inputs).chunk(2, dim=-1)
        activation: nn.Module = self.experts.get_submodule("act_fn")
        return nn.functional.linear(activation(gate) * up, outputs)


def expert_layers(model: nn.Module) -> Iterator[ExpertLayer]:
    """The layers of experts of a model, first layer first; none of a dense model."""
    for name, module in model.named_modules():
        children = dict(module.named_children())
        experts = children.get("experts")
        if experts is None or {INPUTS, OUTPUTS} - {key for key, _ in experts.named_parameters(recurse=False)}:
            continue
        router = children.get("gate")
        plain = router is not None and [key for key, _ in router.named_parameters()] == ["weight"]
        plain = plain and not any(True for _ in router.named_buffers())  # type: ignore[union-attr]
        yield ExpertLayer(name, experts, router if plain else None)


def active_experts(config: PreTrainedConfig) -> int | None:
    """The number of experts of a layer that a token is routed to, if the config says it."""
    found = config.get_text_config().to_dict().get(ACTIVE)
    return found if isinstance(found, int) else None


def experts_read(count: int, active: int, rows: int) -> float:
    """The expected number of different experts of a layer that a pass over this many rows reads, if every row is routed
    uniformly and independently. Rows of one text share more experts, so they read fewer."""
    return count * (1 - (1 - min(active, count) / count) ** rows)


def unread_bytes(model: nn.Module, config: PreTrainedConfig, rows: int) -> int:
    """The expected bytes of experts that a pass over this many rows does not read."""
    active = active_experts(config)
    if active is None:
        return 0
    layers = (
        (layer.count, sum(weight.nbytes for weight in layer.experts.parameters())) for layer in expert_layers(model)
    )
    return round(sum(size * (1 - experts_read(count, active, rows) / count) for count, size in layers))


@torch.no_grad()
def distances(layer: ExpertLayer, hidden: Tensor) -> Tensor:
    """(experts, experts) on the CPU: the distance between the outputs of every two experts for the same hidden states
    (tokens, width), 0 for equal outputs and 1 for orthogonal ones."""
    found = torch.stack([layer.output(expert, hidden).flatten().float() for expert in range(layer.count)])
    squares = found.square().sum(dim=1)
    between = (squares[:, None] + squares - 2 * found @ found.T).clamp_min(0)
    return (between / (squares[:, None] + squares).clamp_min(torch.finfo(torch.float32).tiny)).sqrt().cpu()
