"""STAND: n-grams with the distributions behind them, not only the tokens.

Song et al., "Accelerated Test-Time Scaling with Model-Free Speculative Sampling" (arXiv 2506.04708). Several answers to
one question follow the same thoughts in other words. So every n-gram on the way keeps the best tokens of the target's
distributions behind it, averaged over all its occurrences, and the next text with that n-gram finds what the target may
write there, also tokens that it did not write before. The probabilities are those of the model at temperature 1, before
any warping, so a tree can be drawn from them.

It is for many texts of a kind, and keeps what it learned from one request to the next.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from branchwise.backends.base import Needs, Prefill, Scored
from branchwise.core.sequence import SequenceState
from branchwise.draft.base import LearningDrafter
from branchwise.draft.builder import Candidate, TreePolicy, new
from branchwise.draft.lookup.base import LookupDrafter
from branchwise.draft.policies.topk import TopK
from branchwise.draft.recycle.topk import HostTopTokens, ReportedTopTokens, host_top_tokens, top_tokens_at
from branchwise.errors import UsageError
from branchwise.verify import Verdict

Gram = tuple[int, ...]
PREFILL = 64
"""distributions of a prompt that are learned from, the last ones"""
MOST_READ = 1024
"""lines that are kept as they were read"""


class Stand(LookupDrafter, LearningDrafter):
    """`stand:max=4,min=2,k=10,ngrams=100000`: the candidates of the longest known n-gram, `max` down to `min` tokens.

    It has k tokens and their average probabilities. The (c + 1)-th distribution behind an n-gram has the weight 1 /
    (c + 1) in the average, and a token that is not among the k best of a distribution counts as impossible there. So
    many n-grams are kept; the one whose last occurrence is the oldest is forgotten first.
    """

    name = "stand"

    def __init__(
        self, max: int = 4, min: int = 2, k: int = 10, ngrams: int = 100_000, tree: TreePolicy | None = None
    ) -> None:
        if not 1 <= min <= max or k < 1 or ngrams < 1:
            raise UsageError("Drafter 'stand' needs 1 <= min <= max, and k and ngrams of at least 1.")
        super().__init__(tree or TopK(64, depth=12, width=k))
        self.max, self.min, self.k, self.ngrams = max, min, k, ngrams
        self._lines: OrderedDict[Gram, int] = OrderedDict()
        """n-gram -> its line in the arrays, the one with the oldest last occurrence first"""
        self._tokens = np.zeros((ngrams, k), dtype=np.int32)  # pages that were never written to take no memory
        self._masses = np.zeros((ngrams, k), dtype=np.float32)
        self._counts = np.zeros(ngrams, dtype=np.int32)
        self._read: dict[int, list[tuple[int, float]]] = {}
        """tokens and masses of lines as lists, until they are written again"""

    def __len__(self) -> int:
        return len(self._lines)

    @property
    def needs(self) -> Needs:
        return replace(super().needs, prefill_logits=PREFILL, topk=self.k)

    def locate(self, sequence: SequenceState) -> Gram:
        return tuple(sequence.tokens[-self.max :])

    def candidates(self, cursor: Gram | None) -> list[Candidate]:
        if cursor is None or (line := self._longest(cursor)) is None:
            return []
        behind = cursor[1:] if len(cursor) == self.max else cursor
        return [new(Candidate, (token, mass, (*behind, token), "")) for token, mass in self._words(line)]

    def advance(self, cursor: Gram | None, token: int) -> Gram:
        return (*(cursor or ()), token)[-self.max :]

    def start(self, sequence: SequenceState, prefill: Prefill) -> None:
        if not (rows := len(prefill.logits)):
            return
        ends = range(len(sequence.tokens) - rows, len(sequence.tokens))
        grams = [tuple(sequence.tokens[max(end - self.max, 0) : end]) for end in ends]
        self._learn(grams, host_top_tokens(prefill.logits, self.k))

    def learn(self, sequences: Sequence[SequenceState], scored: Scored, verdicts: Sequence[Verdict]) -> None:
        wide = scored.logits.shape[1]
        grams: list[Gram] = []
        rows: list[int] = []
        for text, (sequence, tree, verdict) in enumerate(zip(sequences, self._drafted, verdicts, strict=True)):
            gram = tuple(sequence.tokens[-self.max :])
            accepted = tree.tokens.tolist()
            for node in verdict.path:
                gram = self.advance(gram, accepted[node]) if node else gram
                grams.append(gram)
                rows.append(text * wide + node)
        self._learn(grams, top_tokens_at(scored, rows, self.k))

    def save(self) -> dict[str, Tensor]:
        lines = list(self._lines.values())
        grams = [(-1,) * (self.max - len(gram)) + gram for gram in self._lines]
        return {
            "grams": torch.tensor(grams, dtype=torch.int32).view(-1, self.max),
            "counts": torch.from_numpy(self._counts[lines]),
            "tokens": torch.from_numpy(self._tokens[lines]),
            "masses": torch.from_numpy(self._masses[lines]),
        }

    def restore(self, tensors: dict[str, Tensor]) -> None:
        grams = self._checked(tensors)[-self.ngrams :]
        first = len(tensors["grams"]) - len(grams)  # if there are too many, the oldest are left out
        self._lines = OrderedDict((gram, line) for line, gram in enumerate(grams))
        self._read.clear()
        self._counts[: len(grams)] = tensors["counts"][first:].numpy()
        self._tokens[: len(grams)] = tensors["tokens"][first:].numpy()
        self._masses[: len(grams)] = tensors["masses"][first:].numpy()

    def _words(self, line: int) -> list[tuple[int, float]]:
        """The tokens of a line and their masses, best first."""
        words = self._read.get(line)
        if words is None:
            stored = zip(self._tokens[line].tolist(), self._masses[line].tolist(), strict=True)
            if len(self._read) >= MOST_READ:
                self._read.clear()
            words = self._read[line] = [word for word in stored if word[1] > 0]
        return words

    def _longest(self, cursor: Gram) -> int | None:
        for size in range(min(self.max, len(cursor)), self.min - 1, -1):
            line = self._lines.get(cursor[-size:])
            if line is not None:
                return line
        return None

    def _learn(self, grams: Sequence[Gram], found: HostTopTokens | ReportedTopTokens) -> None:
        """Learn the distributions after n-grams, in their order."""
        for gram, tokens, masses in zip(grams, found.tokens.tolist(), found.masses.tolist(), strict=True):
            best = dict(zip(tokens, masses, strict=True))
            for size in range(self.min, len(gram) + 1):
                self._mix(gram[-size:], best)

    def _mix(self, gram: Gram, probs: dict[int, float]) -> None:
        line = self._lines.get(gram)
        if line is None:
            line, count, mixed = self._new_line(), 0, probs
            self._lines[gram] = line
        else:
            self._lines.move_to_end(gram)
            count = int(self._counts[line])
            weight = 1 / (count + 1)
            mixed = {token: mass * count * weight for token, mass in self._words(line)}
            for token, mass in probs.items():
                mixed[token] = mixed.get(token, 0.0) + mass * weight
        best = sorted(mixed.items(), key=lambda pair: (-pair[1], pair[0]))[: self.k]
        best += [(0, 0.0)] * (self.k - len(best))
        self._tokens[line] = [token for token, _ in best]
        self._masses[line] = [mass for _, mass in best]
        self._counts[line] = count + 1
        self._read.pop(line, None)

    def _new_line(self) -> int:
        if len(self._lines) < self.ngrams:
            return len(self._lines)
        return self._lines.popitem(last=False)[1]

    def _checked(self, tensors: dict[str, Tensor]) -> list[Gram]:
        """The n-grams of a stored state that fits."""

        def refuse(why: str) -> UsageError:
            return UsageError(f"This is no state of 'stand' for this model: {why}; leave it out and start afresh.")

        kinds = {"grams": torch.int32, "counts": torch.int32, "tokens": torch.int32, "masses": torch.float32}
        if {name: tensor.dtype for name, tensor in tensors.items()} != kinds:
            raise refuse(f"it should hold {', '.join(kinds)}")
        grams, counts, tokens, masses = (tensors[name] for name in kinds)
        shapes = [(len(grams), self.max), (len(grams),), (len(grams), self.k), (len(grams), self.k)]
        if [tuple(tensor.shape) for tensor in (grams, counts, tokens, masses)] != shapes:
            raise refuse(f"it is not about n-grams of {self.max} tokens and {self.k} behind each")
        if not len(grams):
            return []
        most = sys.maxsize if self.target is None else self.target.vocabulary
        empty = (grams == -1).sum(dim=1)
        known = (grams >= 0) & (grams < most)
        if bool((known.sum(dim=1) + empty != self.max).any()) or not 0 <= int(tokens.min()) <= int(tokens.max()) < most:
            raise refuse("a token is outside the vocabulary")
        if bool((grams[:, 1:].lt(0) & grams[:, :-1].ge(0)).any()) or int(empty.max()) > self.max - self.min:
            raise refuse(f"an n-gram has fewer than {self.min} tokens")
        if int(counts.min()) < 1 or not bool(
            ((masses >= 0).all(dim=1) & (masses.double().sum(dim=1) <= 1 + 1e-5)).all()
        ):
            raise refuse("its masses are not averages of probabilities")
        lines = torch.where(masses > 0, tokens, -1 - torch.arange(self.k)).tolist()
        if any(len(set(line)) < self.k for line in lines):
            raise refuse("an n-gram has the same token twice behind it")
        if any(more > less for line in masses.tolist() for less, more in pairwise(line)):
            raise refuse("its tokens are not in order")
        found = [tuple(token for token in gram if token >= 0) for gram in grams.tolist()]
        if len(set(found)) < len(found):
            raise refuse("an n-gram comes twice")
        return found
