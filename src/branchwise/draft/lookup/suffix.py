"""What followed the longest end of the text that has been there before, in this text or in earlier answers.

Hu et al., "SAM-Decoding: Speculative Decoding via Suffix Automaton" (arXiv 2411.10666): an automaton reads prompt and
output, and always knows the longest end of the text that occurred before, however long that is. Oliaro et al.,
"SuffixDecoding" (arXiv 2411.04975): earlier answers are searched as well, and how often a continuation was seen decides
how much of it is drafted.

A longer match is trusted more, and so is what followed it more often. Of continuations seen equally often the most
recent comes first. Where the longest match leaves something open, the next shorter ones are asked, so a place has
alternatives. A drafted token makes the match one longer, or where it came from a shorter match, one longer than that;
at the end of the text it goes round, so that a repetition is continued for as long as it is wanted.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from branchwise.core.sequence import SequenceState
from branchwise.draft.builder import TreePolicy
from branchwise.draft.lookup.automaton import Automaton
from branchwise.draft.lookup.base import Candidate, Cursor, LookupDrafter, new
from branchwise.draft.lookup.ppm import CERTAIN, WIDTH, ranked, share
from branchwise.draft.policies.topk import TopK
from branchwise.errors import UsageError

END = -1
"""stands behind every answer that is kept"""
REACH = 32
"""so many tokens of a text are searched for in earlier answers"""
LEAD = 8
"""so many tokens of the prompt are kept before its answer, so that its beginning can be found"""
CONTEXTS = 6
"""so many matches, the longest first, are asked what followed"""

Matched = tuple[Automaton, int, int]
"""a match in one automaton: the state, and how many tokens match"""


class Suffix(LookupDrafter):
    """`suffix:keep=N,min=M`: matches of at least M tokens in this text and in the last N tokens of earlier answers.

    A place is where the matches stand in every automaton, and a token behind them.
    """

    name = "suffix"

    def __init__(self, keep: int = 0, min: int = 2, tree: TreePolicy | None = None) -> None:
        if keep < 0 or min < 1:
            raise UsageError(
                f"Drafter 'suffix' keeps 0 or more tokens and matches at least 1, not keep={keep}, min={min}."
            )
        super().__init__(tree or TopK(16, depth=16, width=4))
        self.min = min
        self.learns = self.learns or keep > 0
        self._texts: WeakKeyDictionary[SequenceState, Automaton] = WeakKeyDictionary()
        self._answers = Answers(keep)
        self._said: dict[tuple[Matched, ...], Sequence[Candidate]] = {}
        """what was said in this step; drafts of one text come back to the same matches"""

    def find(self, sequence: SequenceState) -> Cursor:
        text = self._texts.get(sequence)
        if text is None:
            text = self._texts[sequence] = Automaton()
        text.read(sequence.tokens[len(text) :])
        self._said.clear()
        recent = sequence.tokens[-REACH:]
        stands = [(text, *text.match), *((answers, *answers.find(recent)) for answers in self._answers.generations)]
        stands = [stand for stand in stands if stand[2] >= self.min]
        return (tuple(stands), None) if stands else None

    def after(self, place: Cursor) -> Sequence[Candidate]:
        if place is None:
            return []
        stands = _arrived(place)
        if (said := self._said.get(stands)) is None:
            said = self._said[stands] = self._weighed(stands)
        return said

    def _weighed(self, stands: tuple[Matched, ...]) -> Sequence[Candidate]:
        believed: dict[int, float] = {}
        left, waiting = 1.0, list(stands)
        for _ in range(CONTEXTS):
            longest = 0 if len(waiting) == 1 else max(range(len(waiting)), key=lambda one: waiting[one][2])
            known, state, length = waiting[longest]
            if length < self.min:
                break
            left = share(believed, left, known.continuations(state), length, known.followed[state])
            if left < CERTAIN or len(believed) >= WIDTH:
                break
            shorter = known.link[state]
            waiting[longest] = known, shorter, known.length[shorter]
        return [new(Candidate, (token, believed[token], (stands, token), "")) for token in ranked(believed)]

    def step(self, place: Cursor, token: int) -> Cursor:
        return None if place is None else (_arrived(place), token)

    def close(self, sequence: SequenceState) -> None:
        super().close(sequence)
        self._texts.pop(sequence, None)
        self._said.clear()
        self._answers.keep(sequence.tokens[max(sequence.prompt_length - LEAD, 0) :])

    def save(self) -> dict[str, Tensor]:
        return {"answers": torch.tensor(self._answers.tokens, dtype=torch.int32)}

    def restore(self, tensors: dict[str, Tensor]) -> None:
        kept = tensors.get("answers")
        most = None if self.target is None else self.target.vocabulary
        if kept is None or kept.ndim != 1 or kept.dtype != torch.int32:
            raise UsageError("The state is not one of drafter 'suffix', which is a row of tokens; start a new one.")
        tokens = kept.tolist()
        if tokens and (min(tokens) < END or (most is not None and max(tokens) >= most)):
            raise UsageError("The state of drafter 'suffix' holds tokens outside the vocabulary; start a new one.")
        self._answers = Answers(self._answers.most)
        for ends, answer in groupby(tokens, key=END.__eq__):
            if not ends:
                self._answers.keep(list(answer))


class Answers:
    """The last answers, together at most so many tokens.

    An automaton cannot forget. So there are two of half the size each, and when the younger is full the older goes.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self.generations: list[Automaton] = []
        """the younger first"""

    def keep(self, answer: list[int]) -> None:
        room = self.most // 2
        if room < 2:
            return
        answer = [*answer[1 - room :], END]
        if not self.generations or len(self.generations[0]) + len(answer) > room:
            self.generations = [Automaton(), *self.generations[:1]]
        self.generations[0].read(answer)

    @property
    def tokens(self) -> list[int]:
        """All of them, the oldest first, with END behind every answer."""
        return [token for answers in reversed(self.generations) for token in answers.tokens]


def _arrived(place: Cursor) -> tuple[Matched, ...]:
    """Where the matches stand once the token behind them is read."""
    stands, token = place
    if token is None:
        return stands  # type: ignore[no-any-return]
    return tuple([(known, *known.follow(state, length, token)) for known, state, length in stands])
