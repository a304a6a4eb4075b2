"""The grammar of one request, followed along every path of a tree.

One matcher serves all paths. It moves from path to path by taking tokens back and reading others, both of which cost
next to nothing. The tokens that may follow a path are computed once and kept, so siblings share all work above them.
The kept part begins at the end of the text as written, so no token of the text is ever read twice.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from branchwise.core.sampling import SamplingParams

if TYPE_CHECKING:
    from llguidance import LLMatcher

MOST_PLACES = 4096
"""the most places that are kept; more come together only if no caller says what was written"""
DRAWN = re.compile(r"\s*\d+ \| ")
"""a line of rules with its number"""
LEFT = "The text left its grammar: the sampling parameters forbid every token that the grammar allows."


class Place:
    """The place in the grammar to which a path leads. A place that the grammar does not reach, or that lies after the
    end, allows every token: no token is ever written there, but its row must be some distribution."""

    __slots__ = ("_bits", "_constraint", "_forced", "above", "below", "error", "free", "token")

    def __init__(self, constraint: Constraint, above: Place | None, token: int, *, free: bool = False) -> None:
        self.above, self.token = above, token
        self.below: dict[int, Place] = {}
        self.free = free
        """whether every token may follow, because the place is outside the grammar"""
        self.error = ""
        """why the matcher could not go on here; if set, the text can only end"""
        self._constraint = constraint
        self._bits: bytes | None = None
        self._forced: int | None = None

    @property
    def bits(self) -> bytes:
        """The tokens that may follow: bit i of these bytes is token i."""
        if self._bits is None:
            self._bits = self._constraint.look(self)
            several = int.from_bytes(self._bits, "little")
            if several.bit_count() == 1:
                self._forced = several.bit_length() - 1
            elif self._constraint.ends_only(self._bits):
                self._forced = self._constraint.ends[0]
        return self._bits

    @property
    def forced(self) -> int | None:
        """The token that must follow, if only one may; of several that would end the text, the first."""
        return None if self.free or not self.bits else self._forced

    def allows(self, token: int) -> bool:
        if self.free:
            return True
        byte = token >> 3
        return byte < len(self.bits) and bool(self.bits[byte] >> (token & 7) & 1)

    def after(self, token: int) -> Place:
        """The place after one more token."""
        if self.free:
            return self
        if token not in self.below:
            over = token in self._constraint.ends or not self.allows(token)
            self.below[token] = Place(self._constraint, self, token, free=over)
            self._constraint.places += 1
        return self.below[token]

    def mask(self, vocabulary: int) -> Tensor | None:
        """(vocabulary,) bool on the host: the tokens that may follow; None if all may."""
        if self.free:
            return None
        bits = np.unpackbits(np.frombuffer(self.bits, dtype=np.uint8), bitorder="little", count=vocabulary)
        return torch.from_numpy(bits.view(np.bool_))


class Constraint:
    """A processor (`SamplingParams.processors`) for one request, whose prompt has `prompt_length` tokens."""

    def __init__(self, matcher: LLMatcher, ends: tuple[int, ...], prompt_length: int) -> None:
        """`matcher` stands at its beginning, and `ends` are the tokens that end a text."""
        self.ends = ends
        self.prompt_length = prompt_length
        self.error: str | None = None
        """why the text as it is written cannot go on"""
        self.places = 0
        """how many places were met since the text last moved on"""
        self.here = Place(self, None, -1)
        """the place after the text as written"""
        self._start = matcher
        self._matcher = matcher.deep_copy()
        self._written: list[int] = []
        """the output up to `here`"""
        self._path: list[int] = []
        """the tokens that the matcher has read after `here`"""

    def __call__(self, tokens: Sequence[int], logits: Tensor) -> Tensor:
        allowed = self.find(tokens).mask(logits.shape[-1])
        return logits if allowed is None else logits.masked_fill_(~allowed.to(logits.device), -torch.inf)

    def find(self, tokens: Sequence[int]) -> Place:
        """The place after these tokens, the prompt included."""
        further = self._further(tokens)
        place = self.here
        for token in further:
            place = place.after(token)
        return place

    def settle(self, tokens: Sequence[int]) -> None:
        """Note that these tokens are written, and forget places on other paths."""
        further = self._further(tokens)
        place, read = self.here, list[int]()
        for token in further:
            if not place.allows(token):
                self.error = LEFT
            elif place.error:
                self.error = place.error
            below = place.after(token)
            if below.free:  # the text is over
                break
            place = below
            read.append(token)
        if self._path[: len(read)] != read:
            self._read(read)
        self._path = self._path[len(read) :]
        self._written += read
        self.here, self.places, place.above = place, 0, None

    def look(self, place: Place) -> bytes:
        """The tokens that may follow a place, as bits; if the matcher cannot tell, the tokens that end the text."""
        path, at = list[int](), place
        while at.above is not None:
            path.append(at.token)
            at = at.above
        self._read(path[::-1])
        bits = self._matcher.compute_bitmask()
        if not self._matcher.is_error():
            return bits
        place.error = f"The grammar became too complex for this text: {explained(self._matcher.get_error())}."
        self._matcher, self._path = self._start.deep_copy(), []  # a matcher does not recover
        self._matcher.consume_tokens(self._written)
        return self._end_bits

    def ends_only(self, bits: bytes) -> bool:
        return bits == self._end_bits

    def _further(self, tokens: Sequence[int]) -> Sequence[int]:
        """The part of these tokens that comes after `here`."""
        output, written = tokens[self.prompt_length :], self._written
        if list(output[: len(written)]) != written:  # the engine took a step back
            kept = _shared(output, written)
            self._matcher.rollback(len(self._path) + len(written) - kept)
            self._written, self._path, self.here = written[:kept], [], Place(self, None, -1)
        elif self.places > MOST_PLACES:
            self.places = 0
            self.here.below.clear()
        return output[len(self._written) :]

    def _read(self, path: list[int]) -> None:
        """Move the matcher after these tokens, which follow the written text."""
        shared = _shared(self._path, path)
        self._matcher.rollback(len(self._path) - shared)
        self._matcher.consume_tokens(path[shared:])
        self._path = path

    @cached_property
    def _end_bits(self) -> bytes:
        every = sum(1 << token for token in self.ends)
        return every.to_bytes(len(self._start.deep_copy().compute_bitmask()), "little")


def _shared(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens two paths share from their beginning on."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((place for place, (a, b) in pairs if a != b), min(len(one), len(other)))


def explained(message: str) -> str:
    """A message of llguidance on one line, without the drawing below it."""
    told = [line.strip() for line in message.strip().splitlines() if line.strip(" ^|") and not DRAWN.match(line)]
    return " ".join(told)[:300].rstrip(".: ")


def constraint_of(sampling: SamplingParams) -> Constraint | None:
    """The constraint among the processors of a text, if it has one."""
    return next((process for process in sampling.processors if isinstance(process, Constraint)), None)
