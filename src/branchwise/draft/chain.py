"""The simplest growth: one path."""

from __future__ import annotations

from dataclasses import dataclass

from branchwise.errors import UsageError


@dataclass(frozen=True)
class Chain:
    """At most `length` tokens, one after the other."""

    length: int = 8

    def __post_init__(self) -> None:
        if self.length < 1:
            raise UsageError(f"A chain has at least 1 token, not {self.length}.")
