"""What followed the longest end of the text that occurred before, in this text or in earlier answers.

Hu et al., "SAM-Decoding: Speculative Decoding via Suffix Automaton" (arXiv 2411.10666): an automaton reads prompt and
output, and always knows the longest end of the text that occurred before, however long that is. Oliaro et al.,
"SuffixDecoding" (arXiv 2411.04975): earlier answers are searched as well, and how often a continuation was seen decides
how much of it is drafted.

A longer match is trusted more, and so is a token that followed it more often. Of continuations seen equally often the
most recent comes first. If the longest match leaves mass over, the next shorter ones are asked. At the end of the text
the match goes round, so that a repetition is continued for as long as it is wanted.
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
"""follows every answer that is kept"""
REACH = 32
"""tokens of a text that are searched for in earlier answers"""
LEAD = 8
"""tokens of the prompt that are kept before its answer, so that its beginning can be found"""
CONTEXTS = 6
"""matches that are asked, the longest first"""
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
    """A suffix automaton: every substring of a growing text, in memory that grows with the text (Blumer et al., 1985).

    A state stands for all substrings that end at the same positions. The suffixes of its longest one are in the state
    too, down to a length at which a shorter one occurs elsewhere as well: that is in the state of the suffix link.
    Reading a token is amortised constant work. Counts and an order of recency are added here, so that several
    continuations of a substring can be weighed against each other.
    """

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
        """(token, how often it followed) of the few that followed last, the most recent first."""
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


Match = tuple[Automaton, int, int]
"""in one automaton: the state, and how many tokens match"""


class Suffix(LookupDrafter, LearningDrafter):
    """`suffix:keep=N,min=M`: matches of at least M tokens in this text and in the last N tokens of earlier answers.

    A cursor is the matches in every automaton, and a token behind them.
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
        """candidates of this step; drafts of one text come back to the same matches"""

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
    """The last answers, together at most so many tokens. An automaton cannot forget, so there are two of half the size
    each, and when the younger is full the older goes."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.generations: list[Automaton] = []
        """the younger first"""

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
        """All of them, the oldest first, with END after every answer."""
        return [token for answers in reversed(self.generations) for token in answers.tokens]


def _resolve(cursor: Cursor) -> tuple[Match, ...]:
    """The matches of a cursor after its token is read."""
    matches, token = cursor
    if token is None:
        return matches  # type: ignore[no-any-return]
    return tuple([(known, *known.follow(state, length, token)) for known, state, length in matches])
