"""The simplest policy: one path.

Leviathan et al. and Chen et al. (2023) draft so; block verification accepts most of it.
"""

from __future__ import annotations

from branchwise.core.topology import branched, plant
from branchwise.draft.policies.paths import Paths
from branchwise.errors import UsageError


class Chain(Paths):
    """`chain:L`: at most L tokens, one after the other. For `ngram`, which draws nothing, it is the length to copy."""

    def __init__(self, length: int = 8) -> None:
        if length < 1:
            raise UsageError(f"A chain has at least 1 token, not {length}.")
        super().__init__(f"1x{length}")
        plant(branched([1] * length))
