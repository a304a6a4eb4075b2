"""Requests, and generations: requests on their way through the engine."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property
from typing import NamedTuple, SupportsIndex

from branchwise.backends.base import Prefill
from branchwise.constrain import Constraint, constraint_of
from branchwise.core.sampling import SamplingParams
from branchwise.core.sequence import SequenceState
from branchwise.core.text import TextStream
from branchwise.draft.base import Budget
from branchwise.engine.stats import Stats, Stopwatch
from branchwise.engine.trace import StepTrace
from branchwise.errors import ModelError, UsageError

MOST_TOP = 20
"""the most alternatives that can be reported for one token"""
Top = list[tuple[int, float]]
"""the most probable tokens at a place under the unwarped model, best first, with their log-probabilities"""


class TokenScore(NamedTuple):
    """How probable a token of a prompt is under the unwarped model."""

    logprob: float
    top: Top
    """the most probable tokens in its place"""


class FinishReason(StrEnum):
    STOP = "stop"
    """a stop token or stop string"""
    LENGTH = "length"
    """the wanted length or the end of the context"""
    CANCELLED = "cancelled"
    ERROR = "error"
    """the device had no memory for the text, or its grammar could not be followed to the end"""


@dataclass(frozen=True)
class Request:
    """What is to be written."""

    prompt: tuple[int, ...]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    max_new_tokens: int = 256
    stop_tokens: frozenset[int] = frozenset()
    stop_when: Callable[[Sequence[int]], bool] | None = None
    """called after every emitted token with all tokens so far"""
    logprobs: bool = False
    """report the log-probability of each emitted token under the unwarped model"""
    top_logprobs: int = 0
    """report this many of the most probable tokens in the place of each emitted token, with their log-probabilities"""
    prompt_logprobs: bool = False
    """report the same of all tokens of the prompt but the first; such a prompt takes no rows from another text"""
    trace: bool = False
    """report what every step looked like, in `Generation.traces`"""
    scope: Hashable = None
    """the owner of the text: a prompt takes cached rows from texts of an equal scope alone (engine/prefixes.py)"""
    task: str | None = None
    """one of the drafter's `tasks`, whose specialist drafts for the text"""

    def __post_init__(self) -> None:
        if not self.prompt:
            raise UsageError("The prompt is empty; there is nothing to continue.")
        if not isinstance(self.max_new_tokens, SupportsIndex):
            raise UsageError(f"max_new_tokens must be a whole number, not {self.max_new_tokens!r}.")
        if self.max_new_tokens < (0 if self.prompt_logprobs else 1):
            raise UsageError(f"max_new_tokens must be at least 1, not {self.max_new_tokens}.")
        if not 0 <= self.top_logprobs <= MOST_TOP:
            raise UsageError(f"top_logprobs must be at least 0 and at most {MOST_TOP}, not {self.top_logprobs}.")


@dataclass(frozen=True)
class Piece:
    """One emitted token."""

    token: int
    text: str
    """what the token adds to the text; empty while a character or a stop string is incomplete"""
    drafted: bool
    """whether the token was accepted from the draft; otherwise it is the target's own"""
    logprob: float | None
    source: str = ""
    """the drafter, or its member, that proposed the token"""
    top: Top = field(default_factory=list)
    """the most probable tokens in its place, if the request asks for them"""


class Pending(NamedTuple):
    """An emitted token that is not detokenized yet."""

    token: int
    source: str
    logprob: float | None
    top: Top


@dataclass(eq=False)
class Generation:
    """A request on its way through the engine."""

    request: Request
    sequence: SequenceState
    text: TextStream | None = None
    """detokenizes the output, if the output is streamed or stop strings may end it"""
    on_output: Callable[[Generation, list[Piece]], None] | None = None
    """called on the engine's thread with the pieces that a step added; with none if the text ends and nothing came"""
    like: SequenceState | None = None
    """an open sequence of the same tokens, whose cache rows are copied in place of a prefill"""
    pieces: list[Piece] = field(default_factory=list)
    pending: list[Pending] = field(default_factory=list)
    """emitted tokens that are not detokenized yet: on a GPU that happens while the next step runs"""
    prefilled: int = 0
    """prompt tokens in the KV cache"""
    prefill: list[Prefill] = field(default_factory=list)
    """what the chunks of the prefill found, until the drafter gets it"""
    prompt_scores: list[TokenScore] = field(default_factory=list)
    """scores of the prompt's tokens from the second on, if the request asks for them"""
    stats: Stats = field(default_factory=Stats)
    traces: list[StepTrace] = field(default_factory=list)
    """a record of every step, if the request asks for it; readers may take them out"""
    prefill_clock: Stopwatch | None = None
    """runs until the prefill is known to be over"""
    began: float | None = None
    """when the prefill began, by the clock of the host"""
    finish_reason: FinishReason | None = None
    error: str | None = None
    """what happened and what helps, if the text ended with an error"""
    _reported: int = 0

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    @cached_property
    def constraint(self) -> Constraint | None:
        """The grammar that the text follows, if any."""
        return constraint_of(self.request.sampling)

    @property
    def token_ids(self) -> list[int]:
        return self.sequence.output

    def stop_clock(self) -> None:
        """The text has ended: its wall time is over."""
        if self.began is not None:
            self.stats.wall_seconds = time.perf_counter() - self.began

    def check(self) -> None:
        """Raise the error with which the text ended, if any."""
        if self.error is not None:
            raise ModelError(self.error)

    @property
    def wanted(self) -> int:
        """How many tokens may still come."""
        return self.request.max_new_tokens - (len(self.sequence.tokens) - self.sequence.prompt_length)

    @property
    def ends_soon(self) -> bool:
        """Whether the current step is likely to be the last: if it adds as many tokens as the steps before did."""
        return self.wanted * self.stats.steps <= self.stats.emitted_tokens if self.stats.steps else self.wanted == 1

    @property
    def may_linger(self) -> bool:
        """Whether its row may linger in the batch after the text has ended. With processors it may not: nothing follows
        the end of a grammar, and a user's processor may not expect tokens after the end either."""
        return not self.request.sampling.processors

    def budget(self, most: Budget, context: int, further: int = 0, *, beyond: bool = False) -> Budget:
        """The bound of the next tree, when the text is `further` tokens longer: no node lies past the context, nor past
        the wanted length, unless the tree may reach `beyond` that length."""
        room = context - len(self.sequence.tokens)
        if not beyond:
            room = min(room, self.wanted)
        depth = room - further - 1
        return most if depth >= most.depth else Budget(most.nodes, depth)

    # Text

    def detokenize(self, *, last: bool = False) -> None:
        """Turn pending tokens into pieces; another thread may read each piece as soon as it is appended."""
        while self.pending:
            token, source, logprob, top = self.pending.pop(0)
            silent = self.text is None or token in self.request.stop_tokens
            shown = "" if silent else self.text.push(token)  # type: ignore[union-attr]
            shown += self._held() if last and not self.pending else ""
            self.pieces.append(Piece(token, shown, bool(source), logprob, source, top))

    def flush(self) -> None:
        """The text has ended: release characters that were held back, with the last piece if there is one."""
        self.detokenize(last=True)
        held = self._held()
        if held and self.pieces:
            self.pieces[-1] = replace(self.pieces[-1], text=self.pieces[-1].text + held)

    def report(self) -> None:
        """Hand new pieces to the callback."""
        if self.on_output is not None and (self.finished or len(self.pieces) > self._reported):
            new, self._reported = self.pieces[self._reported :], len(self.pieces)
            self.on_output(self, new)

    def _held(self) -> str:
        return "" if self.text is None else self.text.finish()
