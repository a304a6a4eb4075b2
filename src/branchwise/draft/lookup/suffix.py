"""What followed the longest suffix of the text that occurred before, in this text or in earlier answers.

Hu et al., "SAM-Decoding: Speculative Decoding via Suffix Automaton" (arXiv 2411.10666): an automaton reads prompt and
output, and always knows the longest suffix of the text that occurred before, however long it is. Oliaro et al.,
"SuffixDecoding" (arXiv 2411.04975): earlier answers are searched as well, and how often a continuation was seen decides
how much of it is drafted.

A longer match gets more mass, and so does a token that followed it more often. Of continuations seen equally often the
most recent comes first. If the longest match leaves mass over, the next shorter ones propose tokens too. A match that
reaches the end of the text starts over, so that a repetition is continued as far as the tree goes.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable, Sequence
from itertools import groupby, islice
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from branchwise.core.sequence import SequenceState
from branchwise.draft.base import LearningDrafter, not_a_state
from branchwise.draft.builder import Candidate, Cursor, TreePolicy, new
from branchwise.draft.lookup.base import CERTAIN, WIDTH, LookupDrafter, ppm_backoff, ranked
from branchwise.draft.policies.topk import TopK
from branchwise.errors import UsageError

END = -1
"""mark after every answer that is kept"""
REACH = 32
"""number of last tokens of a text that are searched for in earlier answers"""
LEAD = 8
"""number of prompt tokens that are kept before an answer, so that the beginning of the answer can be found"""
CONTEXTS = 6
"""most matches that propose tokens, the longest first"""
ROOT = 0
"""the state of the empty substring, of a match of length 0"""
NOWHERE = -1
"""no state"""
NOTHING = -2
"""no token; -1 already marks the end of an answer"""

LINKS = 32
"""Most contexts whose counts a token updates, the longest first. In nested repetitions, such as one token over and
over, the counts of shorter contexts are therefore too low; without the bound, reading would take quadratic time."""
HOPS = 64
"""Most suffix links that are followed in search of a token."""


class Automaton:
    """A suffix automaton: every substring of a growing text, in memory that grows with the text (Blumer et al., 1985).

    A state stands for all substrings that end at the same positions. These are suffixes of the longest of them, down to
    the length at which a suffix also occurs elsewhere: that suffix is in the state of the suffix link. Reading a token
    is amortised constant work. Counts and an order of recency are added here, so that several continuations of a
    substring can be weighed against each other.
    """

    def __init__(self, tokens: Iterable[int] = ()) -> None:
        self.tokens = array("i")
        # All arrays are indexed by state. Most states have one continuation (`_token`, `_target`); only a second one
        # makes a mapping in `_branches`.
        self.length = array("i")
        """length of its longest substring"""
        self.link = array("i")
        """the state of the longest suffix that also occurs elsewhere"""
        self.followed = array("i")
        """how often its substrings occurred and were followed by a token"""
        self._token = array("i")
        self._target = array("i")
        self._branches: list[dict[int, int] | None] = []
        """token -> state after it, the most recent token last; None while a state has at most one continuation"""
        self.last = self._new(0, NOWHERE)
        """the state of the whole text"""
        self._branches[ROOT] = {}
        self.read(tokens)

    def __len__(self) -> int:
        """The number of tokens read."""
        return len(self.tokens)

    def read(self, tokens: Iterable[int]) -> None:
        for token in tokens:
            self._read(token)

    @property
    def match(self) -> tuple[int, int]:
        """(state, length) of the longest suffix of the text that occurred before."""
        state = self.link[self.last]
        return (ROOT, 0) if state == NOWHERE else (state, self.length[state])

    def step(self, state: int, token: int) -> int:
        """The state of a substring and one token more; NOWHERE if that never occurred."""
        branches = self._branches[state]
        if branches is None:
            return self._target[state] if self._token[state] == token else NOWHERE
        return branches.get(token, NOWHERE)

    def follow(self, state: int, length: int, token: int) -> tuple[int, int]:
        """(state, length) of the longest suffix of a substring that occurred with `token` after it, the token
        included."""
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
        """(state, length) of the longest suffix of these tokens that occurs in the text."""
        state, length = ROOT, 0
        for token in tokens:
            state, length = self.follow(state, length, token)
        return state, length

    def continuations(self, state: int) -> list[tuple[int, int]]:
        """(token, how often it followed) of the last few tokens that followed, the most recent first."""
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
        """A new state for the shorter substrings of a state, which now occur without the longer ones."""
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
        """Let `token` lead from `state` to `target`."""
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


Match = tuple[Automaton, int, int]
"""(automaton, state in it, number of tokens that match)"""


class Suffix(LookupDrafter, LearningDrafter):
    """`suffix:keep=N,min=M`: matches of at least M tokens in this text and in the last N tokens of earlier answers.

    A cursor is a pair: the matches in all automata, and a token after them or None. The automata read the token only
    when the cursor is used.
    """

    name = "suffix"

    def __init__(self, keep: int = 0, min: int = 2, tree: TreePolicy | None = None) -> None:
        if keep < 0 or min < 1:
            raise UsageError(f"Drafter 'suffix' keeps 0 or more tokens and matches 1 or more, not {keep=}, {min=}.")
        super().__init__(tree or TopK(16, depth=16, width=4))
        self.min = min
        self.learns = self.tree.learns or keep > 0
        self._texts: WeakKeyDictionary[SequenceState, Automaton] = WeakKeyDictionary()
        self._answers = Answers(keep)
        self._cached: dict[tuple[Match, ...], Sequence[Candidate]] = {}
        """matches -> their candidates, for one text and step: nodes of one tree often have the same matches"""

    def locate(self, sequence: SequenceState) -> Cursor:
        if sequence not in self._texts:
            self._texts[sequence] = Automaton()
        text = self._texts[sequence]
        text.read(sequence.tokens[len(text) :])
        self._cached.clear()
        recent = sequence.tokens[-REACH:]
        matches = [(text, *text.match), *((answers, *answers.find(recent)) for answers in self._answers.generations)]
        matches = [match for match in matches if match[2] >= self.min]
        return (tuple(matches), None) if matches else None

    def candidates(self, cursor: Cursor) -> Sequence[Candidate]:
        if cursor is None:
            return []
        matches = _resolve(cursor)
        if (found := self._cached.get(matches)) is None:
            found = self._cached[matches] = self._weigh(matches)
        return found

    def _weigh(self, matches: tuple[Match, ...]) -> Sequence[Candidate]:
        masses: dict[int, float] = {}
        left, waiting = 1.0, list(matches)
        for _ in range(CONTEXTS):
            longest = 0 if len(waiting) == 1 else max(range(len(waiting)), key=lambda one: waiting[one][2])
            known, state, length = waiting[longest]
            if length < self.min:
                break
            left = ppm_backoff(masses, left, known.continuations(state), length, known.followed[state])
            if left < CERTAIN or len(masses) >= WIDTH:
                break
            shorter = known.link[state]
            waiting[longest] = known, shorter, known.length[shorter]
        return [new(Candidate, (token, masses[token], (matches, token), "")) for token in ranked(masses)]

    def advance(self, cursor: Cursor, token: int) -> Cursor:
        return None if cursor is None else (_resolve(cursor), token)

    def finish(self, sequence: SequenceState) -> None:
        super().finish(sequence)
        self._texts.pop(sequence, None)
        self._cached.clear()
        self._answers.keep(sequence.tokens[max(sequence.prompt_length - LEAD, 0) :])

    def save(self) -> dict[str, Tensor]:
        return {"answers": torch.tensor(self._answers.tokens, dtype=torch.int32)}

    def restore(self, tensors: dict[str, Tensor]) -> None:
        kept = tensors.get("answers")
        if kept is None or kept.ndim != 1 or kept.dtype != torch.int32:
            raise not_a_state(self.name, "it should hold a row of tokens")
        tokens = kept.tolist()
        most = sys.maxsize if self.target is None else self.target.vocabulary
        if not all(END <= token < most for token in tokens):
            raise not_a_state(self.name, "a token is outside the vocabulary")
        self._answers = Answers(self._answers.most)
        for ends, answer in groupby(tokens, key=END.__eq__):
            if not ends:
                self._answers.keep(list(answer))


class Answers:
    """The last answers, together at most `most` tokens. An automaton cannot forget tokens, so there are two of half
    the size each, and when the younger is full the older is dropped."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.generations: list[Automaton] = []
        """at most two automata, the younger first"""

    def keep(self, answer: list[int]) -> None:
        half = self.most // 2
        if half < 2:
            return
        answer = [*answer[1 - half :], END]
        if not self.generations or len(self.generations[0]) + len(answer) > half:
            self.generations = [Automaton(), *self.generations[:1]]
        self.generations[0].read(answer)

    @property
    def tokens(self) -> list[int]:
        """The tokens of all answers, the oldest first, with END after every answer."""
        return [token for answers in reversed(self.generations) for token in answers.tokens]


def _resolve(cursor: Cursor) -> tuple[Match, ...]:
    """The matches of a cursor, after its token if it has one."""
    matches, token = cursor
    if token is None:
        return matches  # type: ignore[no-any-return]
    return tuple([(known, *known.follow(state, length, token)) for known, state, length in matches])
