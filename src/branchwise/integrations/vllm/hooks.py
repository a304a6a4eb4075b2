"""What Branchwise uses and wraps in vLLM, by name and signature. Nothing is replaced in a version that was not tested.

    GPUModelRunner._update_states            closes the texts of finished requests
    GPUModelRunner._sample                   shows the logits of a pass, and says who verifies
    GPUModelRunner.propose_draft_token_ids   names the requests, and keeps q
    rejection_sample                         verification, while a runner with our proposer or with `block` samples

Everything else stays vLLM's. If a name or a parameter is missing, nothing is replaced, and one warning says so.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any

from branchwise.integrations.vllm import running
from branchwise.integrations.vllm.running import log

TESTED = ("0.32",)
"""tested versions of vLLM, without the last number"""
RUNNER = "vllm.v1.worker.gpu_model_runner"
SAMPLER = "vllm.v1.sample.rejection_sampler"

HOOKED = {
    f"{RUNNER}:GPUModelRunner._update_states": ("self", "scheduler_output"),
    f"{RUNNER}:GPUModelRunner._sample": ("self", "logits", "spec_decode_metadata"),
    f"{RUNNER}:GPUModelRunner.propose_draft_token_ids": (
        "self", "scheduler_output", "sampled_token_ids", "sampling_metadata", "hidden_states", "sample_hidden_states",
        "aux_hidden_states", "spec_decode_metadata", "common_attn_metadata", "slot_mappings",
    ),
    f"{SAMPLER}:rejection_sample": (
        "draft_token_ids", "num_draft_tokens", "max_spec_len", "cu_num_draft_tokens", "draft_probs", "target_logits",
        "bonus_token_ids", "sampling_metadata", "synthetic_mode", "synthetic_conditional_rates", "use_fp64_gumbel",
    ),
    f"{SAMPLER}:expand_batch_to_tokens": ("x", "cu_num_tokens", "num_tokens", "replace_from", "replace_to"),
    f"{SAMPLER}:apply_sampling_constraints": ("logits", "cu_num_draft_tokens", "sampling_metadata"),
}  # fmt: skip
"""the functions that are wrapped or replaced, and their parameters"""
WRAPPERS: dict[str, Callable[..., Any]] = {
    "_update_states": running.update_states,
    "_sample": running.sample,
    "propose_draft_token_ids": running.propose,
    "rejection_sample": running.rejection_sample,
    "expand_batch_to_tokens": running.expand_batch_to_tokens,
    "apply_sampling_constraints": running.apply_sampling_constraints,
}
"""the wrappers, which get the original as their first argument"""
READ = {
    "vllm.v1.sample.metadata:SamplingMetadata": ("temperature", "all_greedy", "all_random", "generators"),
    "vllm.v1.spec_decode.metadata:SpecDecodeMetadata": ("draft_token_ids", "num_draft_tokens"),
    "vllm.v1.worker.gpu_input_batch:CachedRequestState": ("sampling_params", "prompt_token_ids", "output_token_ids"),
}
"""dataclasses of vLLM, and the fields that are read"""

_installed: bool | None = None
"""whether the hooks are in place; None before the first `install`"""


def find(name: str) -> Any:
    """The object that `module:Class.attribute` names."""
    module, _, path = name.partition(":")
    found = importlib.import_module(module)
    for part in path.split("."):
        found = getattr(found, part)
    return found


def why_not() -> str | None:
    """Why this vLLM is left alone; None if it is a tested version."""
    version = str(importlib.import_module("vllm").__version__)
    if version.split("+")[0].rsplit(".", 1)[0] not in TESTED:
        return f"vLLM {version} was not tested with Branchwise, which knows {', '.join(TESTED)}"
    for name, parameters in HOOKED.items():
        try:
            found = tuple(inspect.signature(find(name)).parameters)
        except (ImportError, AttributeError, TypeError, ValueError) as error:
            return f"vLLM {version} has no {name} ({error})"
        if found != parameters:
            return f"{name} of vLLM {version} has the parameters {', '.join(found)}, not {', '.join(parameters)}"
    for name, wanted in READ.items():
        try:
            missing = set(wanted) - set(find(name).__dataclass_fields__)
        except (ImportError, AttributeError) as error:
            return f"vLLM {version} has no {name} ({error})"
        if missing:
            return f"{name} of vLLM {version} has no {', '.join(sorted(missing))}"
    return None


def install() -> bool:
    """Put the hooks in place, once in a process; returns whether they are."""
    global _installed
    if _installed is None:
        reason = why_not()
        _installed = reason is None
        if reason is None:
            _wrap_all()
        else:
            log.warning("%s: nothing of it is replaced. Drafts come from tokens alone, and vLLM verifies them.", reason)
    return _installed


def _wrap_all() -> None:
    for name in HOOKED:
        module, _, path = name.partition(":")
        *owners, attribute = path.split(".")
        owner = find(f"{module}:{owners[0]}") if owners else importlib.import_module(module)
        setattr(owner, attribute, _around(getattr(owner, attribute), WRAPPERS[attribute]))


def _around(original: Callable[..., Any], wrapper: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return wrapper(original, *args, **kwargs)

    return wrapped
