"""A suffix automaton: every substring of a text, in memory that grows with the text and not with the substrings.

Blumer et al., "The Smallest Automaton Recognizing the Subwords of a Text" (1985). A state stands for all substrings
that end at the same positions. The suffixes of its longest one are in the state too, down to a length at which a
shorter one occurs elsewhere as well: that is in the state of the suffix link. Reading a token is amortised constant
work.

Hu et al., "SAM-Decoding" (arXiv 2411.10666), drafts with it. What is added here are counts and an order of recency, so
that several continuations of a substring can be weighed against each other.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from itertools import islice

from branchwise.draft.lookup.ppm import WIDTH

ROOT = 0
"""the state of the empty substring, of a match of length 0"""
NOWHERE = -1
NOTHING = -2
"""no token at all; -1 is free to mark the end of a text"""

LINKS = 32
"""contexts whose counts a token updates, the longest first. In nested repetitions, such as one token over and over, the
counts of shorter contexts are too low; otherwise reading would take quadratic time."""
HOPS = 64
"""suffix links that are followed in search of a token"""


class Automaton:
    """The substrings of a text that grows."""

    def __init__(self, tokens: Iterable[int] = ()) -> None:
        self.tokens = array("i")
        # By state. Most states have one continuation; a mapping is made for a second.
        self.length = array("i")
        """of its longest substring"""
        self.link = array("i")
        """the state of the longest suffix that also occurs elsewhere"""
        self.followed = array("i")
        """how often it occurred and was followed by a token"""
        self._token = array("i")
        self._target = array("i")
        self._branches: list[dict[int, int] | None] = []
        """token -> state behind it, the most recent one last"""
        self.last = self._new(0, NOWHERE)
        """the state of the whole text"""
        self._branches[ROOT] = {}
        self.read(tokens)

    def __len__(self) -> int:
        """How many tokens were read."""
        return len(self.tokens)

    @property
    def states(self) -> int:
        return len(self.length)

    def read(self, tokens: Iterable[int]) -> None:
        for token in tokens:
            self._read(token)

    @property
    def match(self) -> tuple[int, int]:
        """(state, length) of the longest end of the text that occurred before."""
        state = self.link[self.last]
        return (ROOT, 0) if state == NOWHERE else (state, self.length[state])

    def step(self, state: int, token: int) -> int:
        """The state of a substring and one token more; NOWHERE if that never occurred."""
        branches = self._branches[state]
        if branches is None:
            return self._target[state] if self._token[state] == token else NOWHERE
        return branches.get(token, NOWHERE)

    def follow(self, state: int, length: int, token: int) -> tuple[int, int]:
        """(state, length) of the longest end of a substring that occurred with one token more, together with that."""
        for _ in range(HOPS):
            target = self.step(state, token)
            if target != NOWHERE:
                return target, length + 1
            if state == ROOT:
                break
            state = self.link[state]
            length = self.length[state]
        return ROOT, 0

    def find(self, tokens: Iterable[int]) -> tuple[int, int]:
        """(state, length) of the longest end of these tokens that occurs in the text."""
        state, length = ROOT, 0
        for token in tokens:
            state, length = self.follow(state, length, token)
        return state, length

    def continuations(self, state: int) -> list[tuple[int, int]]:
        """(token, how often it followed) of the few that followed last, the most recent first.

        Nothing has followed the very end of the text yet; its occurrence is counted as soon as something does.
        """
        followed, branches = self.followed, self._branches[state]
        if branches is None:
            token = self._token[state]
            return [(token, followed[self._target[state]] or 1)] if token >= 0 else []
        recent = islice(reversed(branches.items()), WIDTH)
        return [(token, followed[target] or 1) for token, target in recent if token >= 0]

    def _read(self, token: int) -> None:
        length, link, followed = self.length, self.link, self.followed
        self.tokens.append(token)
        new = self._new(length[self.last] + 1, ROOT)
        context = self.last
        self.last = new
        while context != NOWHERE and (known := self.step(context, token)) == NOWHERE:
            self._lead(context, token, new)
            followed[context] += 1
            context = link[context]
        if context == NOWHERE:
            return
        if length[known] == length[context] + 1:
            link[new] = known
        else:
            link[new] = self._split(known, context, token)
        for _ in range(LINKS):
            if context == ROOT:
                break
            followed[context] += 1
            branches = self._branches[context]
            if branches is not None:
                branches[token] = branches.pop(token)  # the most recent one comes last
            context = link[context]

    def _split(self, state: int, context: int, token: int) -> int:
        """A state of their own for the shorter substrings of a state, which now occur without the longer ones."""
        short = self._new(self.length[context] + 1, self.link[state])
        self.followed[short] = self.followed[state]
        self._token[short], self._target[short] = self._token[state], self._target[state]
        branches = self._branches[state]
        self._branches[short] = None if branches is None else dict(branches)
        self.link[state] = short
        while context != NOWHERE and self.step(context, token) == state:
            self._lead(context, token, short)
            context = self.link[context]
        return short

    def _lead(self, state: int, token: int, target: int) -> None:
        """Let a token lead from one state to another."""
        branches = self._branches[state]
        if branches is not None:
            branches[token] = target
        elif self._token[state] in (NOTHING, token):
            self._token[state], self._target[state] = token, target
        else:
            self._branches[state] = {self._token[state]: self._target[state], token: target}

    def _new(self, length: int, link: int) -> int:
        self.length.append(length)
        self.link.append(link)
        self.followed.append(0)
        self._token.append(NOTHING)
        self._target.append(NOWHERE)
        self._branches.append(None)
        return len(self.length) - 1
