"""Tokens to text while they arrive: characters never split, stop strings found across token borders."""

from __future__ import annotations

from collections.abc import Callable, Sequence

Decode = Callable[[Sequence[int]], str]

BROKEN = "\ufffd"
"""what a tokenizer shows for bytes that are no character, or none yet"""
LONGEST = 4
"""bytes of a character in UTF-8; a token has at least one, so a character spans at most so many tokens"""


class TextStream:
    """Text of a growing output. `push` returns what can be shown now; `finish` what was held back."""

    def __init__(self, decode: Decode, stop: Sequence[str] = ()) -> None:
        self._decode = decode
        self._stop = tuple(stop)
        self._tokens: list[int] = []
        # Some tokenizers treat the first token of a text apart, so new tokens are decoded behind the piece before them.
        self._start = 0  # where that piece begins; what stands before it is of no more use
        self._piece = 0  # where the new tokens begin
        self._known = 0  # characters behind `start` that were decoded for good
        self._waits = 0  # tokens in a row after which the text ended broken
        self._held = ""  # decoded for good, but it may be the beginning of a stop string
        self.text = ""
        """everything shown so far; never holds a stop string"""
        self.stopped = False

    @property
    def may_stop(self) -> bool:
        """Whether there are stop strings, so that every token has to be looked at before the next one is asked for."""
        return bool(self._stop)

    def push(self, token: int) -> str:
        """Add a token; afterwards `stopped` tells whether it completed a stop string."""
        assert not self.stopped, "tokens arrived after a stop string"
        self._tokens.append(token)
        return self._show(self._decoded(final=False), final=False)

    def finish(self) -> str:
        """No more tokens will come: release what is left, incomplete characters as U+FFFD."""
        return "" if self.stopped else self._show(self._decoded(final=True), final=True)

    def _decoded(self, final: bool) -> str:
        """The characters that no later token can change and that were not returned before."""
        text = self._decode(self._tokens[self._start :])
        self._waits = self._waits + 1 if text.endswith(BROKEN) else 0
        spoilt = self._waits >= LONGEST
        if final:
            sure = len(text)
        elif spoilt:
            sure = len(text.removesuffix(BROKEN))  # all others had their chance to become a character
        else:
            sure = len(text.rstrip(BROKEN))  # some tokenizers show every byte that waits for others
        new = text[self._known : sure]
        self._known = max(self._known, sure)
        if new and (spoilt or sure == len(text)):
            self._start, self._piece = self._piece, len(self._tokens)
            self._known = len(self._decode(self._tokens[self._start :])) - (len(text) - sure)
        return new

    def _show(self, new: str, final: bool) -> str:
        waiting = self._held + new
        # As if the text came letter by letter: the stop string that is complete first ends it, the longest of several.
        ends = [(at + len(stop), at) for stop in self._stop if (at := waiting.find(stop)) >= 0]
        self.stopped = bool(ends)
        shown = min(ends)[1] if ends else len(waiting) - (0 if final else self._possible_stop(waiting))
        self._held = waiting[shown:]
        self.text += waiting[:shown]
        return waiting[:shown]

    def _possible_stop(self, text: str) -> int:
        """How many characters at the end of `text` a stop string could begin with."""
        longest = max((len(stop) for stop in self._stop), default=1) - 1
        for size in range(min(longest, len(text)), 0, -1):
            if any(stop.startswith(text[-size:]) for stop in self._stop):
                return size
        return 0
