"""Reduces a mixture: experts that a task does not use are dropped, and experts that are alike become one.

Ways to reduce the E experts of a layer to K, given how a task uses them (`usage.py`):

    drop     the K most used experts stay as they are
    cluster  the K groups of experts whose outputs are nearest are found, and the most used expert of each group stays
    merge    the same groups, each of them averaged by use, with its rows of the router

The groups are those of HC-SMoE (arXiv 2410.08589). Every layer keeps the same number of experts, because the config of
a model has one number for all layers, and other programs read it there.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from branchwise.backends.transformers.experts import INPUTS, OUTPUTS, active_experts, expert_layers
from branchwise.errors import UnsupportedModel, UsageError
from branchwise.train.experts.usage import Usage

WAYS = "drop", "cluster", "merge"
FAMILIES = "mixtral", "qwen2_moe", "qwen3_moe", "olmoe"
"""model types whose routers and experts have the layout that is expected here"""
UNUSED = 1e-3
"""the least use of an expert, as a share of an even one; an expert below it is dropped before groups are made"""

Groups = list[list[int]]
"""groups of experts, each with the expert that stays and those that it replaces, the most used first"""


def check_mixture(model: Any, name: str) -> int:
    """The number of experts in each layer of a mixture; refuses a mixture that cannot be reduced."""
    layers = list(expert_layers(model))
    kind = model.config.get_text_config().model_type
    if not layers:
        raise UnsupportedModel(f"{name} is dense: it has no experts to keep or to drop; give a mixture of experts.")
    if kind not in FAMILIES or any(layer.router is None for layer in layers) or active_experts(model.config) is None:
        raise UnsupportedModel(f"Experts of a {kind} cannot be reduced, only those of {', '.join(FAMILIES)}.")
    return layers[0].count


def check_sizes(experts: int, active: int, keep: int, sent: int | None) -> None:
    if not 1 <= keep <= experts:
        raise UsageError(f"--keep must be at least 1 and at most the {experts} experts of a layer, not {keep}.")
    if sent is not None and not 1 <= sent <= min(keep, active):
        raise UsageError(f"--active must be at least 1 and at most {min(keep, active)} here, not {sent}.")


def grouped(usage: Usage, keep: int, way: str) -> Groups:
    """Groups of the experts of a layer, of each of which one expert stays; in the order of the layer."""
    ranked = usage.share.argsort(descending=True, stable=True).tolist()
    if way == "drop":
        return [[expert] for expert in sorted(ranked[:keep])]
    least = UNUSED / len(ranked)
    used = [expert for rank, expert in enumerate(ranked) if rank < keep or usage.share[expert] >= least]
    groups = [[expert] for expert in used]
    while len(groups) > keep:
        first, second = _nearest(groups, usage.distance)
        groups[first] = sorted(groups[first] + groups.pop(second), key=ranked.index)
    return sorted(groups)


def _nearest(groups: Groups, distance: Tensor) -> tuple[int, int]:
    """Two groups whose members are nearest to each other in the mean (average linkage)."""
    count = len(groups)
    member = torch.zeros(count, len(distance))
    for number, group in enumerate(groups):
        member[number, group] = 1 / len(group)
    mean = member @ distance.float() @ member.T
    mean[torch.ones(count, count).tril().bool()] = torch.inf
    first, second = divmod(int(mean.argmin()), count)
    return first, second


def reduced(model: Any, usages: Sequence[Usage], groups: Sequence[Groups], way: str, active: int | None = None) -> Any:
    """A mixture with one expert for every group. All other weights are shared with the model."""
    from transformers import AutoModelForCausalLM
    from transformers.initialization import no_init_weights

    auto: Any = AutoModelForCausalLM
    config = copy.deepcopy(model.config)
    keep = len(groups[0])
    config.num_experts = keep
    config.num_experts_per_tok = active or min(keep, active_experts(model.config) or keep)
    with no_init_weights(), torch.device("meta"):
        found = auto.from_config(config, dtype=model.dtype)
    state = model.state_dict()
    for usage, group in zip(usages, groups, strict=True):
        for key in (
            f"{usage.layer}.gate.weight",
            f"{usage.layer}.experts.{INPUTS}",
            f"{usage.layer}.experts.{OUTPUTS}",
        ):
            state[key] = _joined(state[key], usage.share, group, way)
    found.load_state_dict(state, assign=True)
    _bring_buffers(found, model)
    found.tie_weights()
    found.generation_config = copy.deepcopy(model.generation_config)
    return found.eval().requires_grad_(False)


def _joined(weight: Tensor, share: Tensor, groups: Groups, way: str) -> Tensor:
    """(groups, …), given (experts, …)."""
    if way != "merge":
        return weight[[group[0] for group in groups]]
    rows = []
    for group in groups:
        own = share[group].to(weight.device)
        own = own / own.sum() if own.sum() > 0 else torch.full_like(own, 1 / len(group))
        rows.append(torch.tensordot(own.float(), weight[group].float(), dims=1).to(weight.dtype))
    return torch.stack(rows)


def _bring_buffers(found: Any, model: Any) -> None:
    """Copy buffers that no state dict holds, such as rotary frequencies, from the model."""
    known = dict(model.named_buffers())
    for name, _ in list(found.named_buffers()):
        place, _, own = name.rpartition(".")
        found.get_submodule(place).register_buffer(own, known[name].clone(), persistent=False)


def told(usage: Usage, groups: Groups, way: str) -> dict[str, Any]:
    """A report of a layer; `share` is that of the experts whose weights are still in it."""
    stays = [expert for group in groups for expert in (group if way == "merge" else group[:1])]
    return {
        "layer": usage.layer,
        "kept": [group[0] for group in groups],
        "stand for": {group[0]: group[1:] for group in groups if len(group) > 1},
        "share": round(float(usage.share[stays].sum()), 6),
        "used": int((usage.share > UNUSED / len(usage.share)).sum()),
    }
