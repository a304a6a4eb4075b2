"""Contestants: plain decoding, methods and peers behind one verb.

    write(prompts, asked)   the answers to a batch of token ids, with the time they took

All count by token ids. What a contestant does not report stays None; it is never guessed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol


@dataclass(frozen=True)
class Asked:
    """Parameters of a request, the same for every contestant."""

    max_new_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    stop_tokens: frozenset[int] = frozenset()
    """empty if answers are to have the full length"""
    forbidden: frozenset[int] = frozenset()
    """tokens that must not be written: the end-of-text tokens, if answers are to have the full length"""
    seeds: tuple[int, ...] = ()
    """one for each prompt, the same for every contestant"""


@dataclass
class Answer:
    """One answer of a batch. Fields as in `records.Record`."""

    ids: list[int]
    finish_reason: str
    seconds: float
    """wall clock of the whole batch"""
    text: str | None = None
    """None: decode the ids"""
    counted_by: str = "ids"
    tokens: int | None = None
    """as counted by a server; None: as many as there are ids"""
    steps: int | None = None
    drafted: int | None = None
    accepted: int | None = None
    drafted_per_depth: Sequence[int] = ()
    accepted_per_depth: Sequence[int] = ()
    by_source: dict[str, int] = field(default_factory=dict)
    target_passes: int | None = None
    draft_passes: int | None = None
    draft_cost: float | None = None
    phases: dict[str, float] = field(default_factory=dict)


class Contestant(Protocol):
    name: str
    kind: str
    """`records.PLAIN`, METHOD or PEER"""
    comparable: bool
    """whether its sampled answers must equal the baseline's, seed for seed; greedy answers always must"""
    learns: bool
    """whether what it wrote changes how fast it writes later requests"""

    def write(self, prompts: Sequence[Sequence[int]], asked: Asked) -> list[Answer]: ...

    def forget(self) -> None:
        """Drop everything learned from earlier prompts."""
