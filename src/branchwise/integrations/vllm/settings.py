"""The settings in `--additional-config '{"branchwise": {…}}'`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from branchwise.errors import UsageError
from branchwise.registry import check_known

USUAL_BATCH = 8
"""how many requests one core drafts for in the time that speculation saves on a GPU (docs/vllm.md has the numbers)"""
CHOICES = {"chain": ("best", "drawn"), "verify": ("auto", "vllm"), "share": ("request", "tenant", "all")}


@dataclass(frozen=True)
class Settings:
    """The options of the proposer."""

    draft: str = "memories"
    """the spec of a drafter without a model, such as `suffix`, `fused:recycle+ngram` or `retrieval:FOLDER`"""
    chain: str = "best"
    """best: the chain with the most expected tokens, without chance; drawn: a chain drawn from the drafter's
    distributions q, which is verified as a block with q"""
    floor: float = 0.1
    """a chain ends before a token that is reached with less probability than this, since rows of a pass have a cost"""
    verify: str = "auto"
    """the rule of verification: auto (`block` for drawn chains and `match` for others), or vllm (its own rule)"""
    share: str = "request"
    """whose texts a drafter learns from: request, tenant or all"""
    tenants: int = 16
    """how many tenants' drafters are kept; the drafter that has been idle longest is forgotten first"""
    batch: int = -1
    """the most requests of a step that are drafted for; with more, nothing is drafted. 0 is no limit. -1 is
    `USUAL_BATCH` on a device, which does not wait for the host to draft for many, and no limit elsewhere"""

    def __post_init__(self) -> None:
        for name, known in CHOICES.items():
            check_known(f"value of {name!r}", getattr(self, name), known)
        for name, fits, rule in (
            ("floor", 0 <= self.floor < 1, "at least 0 and below 1"),
            ("tenants", self.tenants >= 1, "at least 1"),
            ("batch", self.batch >= -1, "at least -1"),
        ):
            if not fits:
                raise UsageError(f"{name!r} of Branchwise in vLLM must be {rule}, not {getattr(self, name)}.")

    def most_requests(self, device_type: str) -> int:
        """The most requests of a step that are drafted for; 0 is no limit."""
        if self.batch >= 0:
            return self.batch
        return 0 if device_type == "cpu" else USUAL_BATCH

    @classmethod
    def read(cls, additional: Any) -> Settings:
        """Read the settings from vLLM's `additional_config`; an unknown name is refused."""
        given = additional.get("branchwise", {}) if isinstance(additional, Mapping) else {}
        if not isinstance(given, Mapping):
            raise UsageError(f'Additional config is {{"branchwise": {{…}}}}, with options inside, not {given!r}.')
        types = {field.name: type(field.default) for field in fields(cls)}
        for name, value in given.items():
            check_known("option of Branchwise in vLLM", name, types)
            wanted = (int, float) if types[name] is float else types[name]
            if not isinstance(value, wanted) or isinstance(value, bool):
                raise UsageError(f"The option {name!r} of Branchwise in vLLM is of type {types[name].__name__}.")
        return cls(**given)
