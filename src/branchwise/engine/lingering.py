"""Rows of ended texts that stay in the batch for a while.

On a device the next pass is enqueued before the host knows that a text ends with this one. That pass was made for the
whole batch, and is wasted if a row is missing from it. So the row of an ended text stays: the device goes on writing
it, its tokens are dropped, and the other texts keep their pass. In a batch that is padded to a few sizes such a row
costs little more than the reading of its keys and values. It leaves if a text joins, if the next pass is not enqueued,
if a smaller size holds the others, or if all such rows together hold half as many tokens as the others do.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from branchwise.engine.request import FinishReason, Generation


@dataclass(eq=False)
class Lingering(Generation):
    """The row of an ended text. What the device still writes there is no part of the text."""

    text_tokens: list[int] = field(default_factory=list)
    """the tokens of the text"""

    @classmethod
    def of(cls, generation: Generation, behind: Sequence[int]) -> Lingering:
        """The row of a generation, in which the tokens `behind` follow its last one. The generation keeps its text, and
        the row keeps the sequence by which drafter and target know it."""
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
        """Cut the sequence back to the text, so that later prompts that begin like it can reuse its rows."""
        self.sequence.tokens = list(self.text_tokens)
