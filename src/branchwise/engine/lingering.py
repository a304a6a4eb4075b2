"""Texts that have ended and whose rows stay in the batch for a while.

On a device the next pass is enqueued before the host knows that a text ends with this one. It was made for the whole
batch, and counts for nothing if a row is missing from it. So the row of a text that ended stays: it is written on,
nobody sees what, and the others have their pass. In a batch that is padded to a few sizes such a row costs little: its
keys and values are read. It leaves when somebody comes, when the next pass is not enqueued, when a smaller size holds
the others, or when all such rows hold half as many tokens as these.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from branchwise.engine.request import FinishReason, Generation


@dataclass(eq=False)
class Lingering(Generation):
    """The row of a text that has ended. What it is written on is no part of the text."""

    text_tokens: list[int] = field(default_factory=list)
    """of the text, as long as it was"""

    @classmethod
    def of(cls, generation: Generation, behind: Sequence[int]) -> Lingering:
        """The row of a generation, in which these tokens stand `behind` its last one. The generation keeps its text,
        and the row the sequence that drafter and target know it by."""
        row = generation.sequence
        generation.sequence = copy.copy(row)
        row.tokens = [*row.tokens, *behind]
        nothing_reported = replace(
            generation.request,
            max_new_tokens=sys.maxsize,
            stop_tokens=frozenset(),
            stop_when=None,
            logprobs=False,
            top_logprobs=0,
            prompt_logprobs=False,
            trace=False,
        )
        return cls(nothing_reported, row, finish_reason=FinishReason.STOP, text_tokens=generation.sequence.tokens)

    def restore(self) -> None:
        """Let the sequence be that of the text again: whoever begins like it may begin with its rows."""
        self.sequence.tokens = list(self.text_tokens)
