"""What is asked: the items of a benchmark."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Item:
    id: str
    """unique within a set"""
    suite: str
    category: str
    turns: tuple[str, ...]
    """what the user says, turn by turn; the model's own answers stand between"""
    raw: bool = False
    """one text to continue as it is, without the chat template"""
    check: Callable[[str], bool] | None = None
    """whether an answer to the last turn is right, where that can be said"""
