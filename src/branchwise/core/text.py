"""Decodes tokens to text as they arrive. Characters are never split, and stop strings are found across tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence

Decode = Callable[[Sequence[int]], str]

BROKEN = "\ufffd"
"""what a tokenizer shows for bytes that are not, or not yet, a character"""
LONGEST = 4
"""the most bytes of a character in UTF-8; a token has at least one byte, so a character spans at most this many
tokens"""


class TextStream:
    """Text of a growing output. `push` returns what can be shown now; `finish` what was held back."""

    def __init__(self, decode: Decode, stop: Sequence[str] = ()) -> None:
        self._decode = decode
        self._stop = tuple(stop)
        self._tokens: list[int] = []
        # Some tokenizers decode the first token of a text differently, so new tokens are decoded with the piece
        # before them.
        self._start = 0  # where that piece begins; earlier tokens are not needed any more
        self._piece = 0  # where the new tokens begin
        self._known = 0  # characters after `_start` that no later token can change
        self._waits = 0  # how many tokens in a row left the text broken
        self._held = ""  # final characters that may be the beginning of a stop string
        self.text = ""
        """everything shown so far; never holds a stop string"""
        self.stopped = False

    @property
    def may_stop(self) -> bool:
        """Whether stop strings are given, so that every token must be read before the next one is requested."""
        return bool(self._stop)

    def push(self, token: int) -> str:
        """Add a token; afterwards `stopped` tells whether it completed a stop string."""
        assert not self.stopped, "tokens arrived after a stop string"
        self._tokens.append(token)
        return self._show(self._decoded(final=False), final=False)

    def finish(self) -> str:
        """Return the rest of the text, since no more tokens will come; incomplete characters become U+FFFD."""
        return "" if self.stopped else self._show(self._decoded(final=True), final=True)

    def _decoded(self, final: bool) -> str:
        """The characters that no later token can change and that were not returned before."""
        text = self._decode(self._tokens[self._start :])
        self._waits = self._waits + 1 if text.endswith(BROKEN) else 0
        spoilt = self._waits >= LONGEST
        if final:
            sure = len(text)
        elif spoilt:
            sure = len(text.removesuffix(BROKEN))  # only the last one can still become a character
        else:
            sure = len(text.rstrip(BROKEN))  # some tokenizers show one for each byte of a character
        new = text[self._known : sure]
        self._known = max(self._known, sure)
        if new and (spoilt or sure == len(text)):
            self._start, self._piece = self._piece, len(self._tokens)
            self._known = len(self._decode(self._tokens[self._start :])) - (len(text) - sure)
        return new

    def _show(self, new: str, final: bool) -> str:
        waiting = self._held + new
        # As if the text came character by character: the stop string that is complete first ends it, the longest of
        # several.
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
