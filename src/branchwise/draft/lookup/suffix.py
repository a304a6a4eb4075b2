"""What followed the longest end of the text that occurred before, in this text or in earlier answers.

Hu et al., "SAM-Decoding: Speculative Decoding via Suffix Automaton" (arXiv 2411.10666): an automaton reads prompt and
output, and always knows the longest end of the text that occurred before, however long that is. Oliaro et al.,
"SuffixDecoding" (arXiv 2411.04975): earlier answers are searched as well, and how often a continuation was seen decides
how much of it is drafted.

A longer match is trusted more, and so is a token that followed it more often. Of continuations seen equally often the
most recent comes first. If the longest match leaves mass over, the next shorter ones are asked, so a cursor has
alternatives. A drafted token makes the match one longer, or, if it came from a shorter match, one longer than that; at
the end of the text the match goes round, so that a repetition is continued for as long as it is wanted.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from branchwise.core.sequence import SequenceState
from branchwise.draft.base import LearningDrafter
from branchwise.draft.builder import Candidate, Cursor, TreePolicy, new
from branchwise.draft.lookup.automaton import Automaton
from branchwise.draft.lookup.base import LookupDrafter
from branchwise.draft.lookup.ppm import CERTAIN, WIDTH, ppm_backoff, ranked
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

Match = tuple[Automaton, int, int]
"""in one automaton: the state, and how many tokens match"""


class Suffix(LookupDrafter, LearningDrafter):
    """`suffix:keep=N,min=M`: matches of at least M tokens in this text and in the last N tokens of earlier answers.

    A cursor is the matches in every automaton, and a token behind them.
    """

    name = "suffix"

    def __init__(self, keep: int = 0, min: int = 2, tree: TreePolicy | None = None) -> None:
        if keep < 0 or min < 1:
            raise UsageError(
                f"Drafter 'suffix' keeps 0 or more tokens and matches at least 1, not keep={keep}, min={min}."
            )
        super().__init__(tree or TopK(16, depth=16, width=4))
        self.min = min
        self.learns = self.tree.learns or keep > 0
        self._texts: WeakKeyDictionary[SequenceState, Automaton] = WeakKeyDictionary()
        self._answers = Answers(keep)
        self._cached: dict[tuple[Match, ...], Sequence[Candidate]] = {}
        """candidates of this step; drafts of one text come back to the same matches"""

    def locate(self, sequence: SequenceState) -> Cursor:
        text = self._texts.get(sequence)
        if text is None:
            text = self._texts[sequence] = Automaton()
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
