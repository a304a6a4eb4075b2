"""STAND: n-grams with the distributions after them, not only the tokens.

Song et al., "Accelerated Test-Time Scaling with Model-Free Speculative Sampling" (arXiv 2506.04708). Several answers to
one question follow the same thoughts in other words. So every n-gram keeps the best tokens of the target's
distributions after it, averaged over all its occurrences, and the next text with that n-gram also finds tokens that the
target did not write before. The probabilities are those of the model at temperature 1, before any warping.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from branchwise.backends.base import Needs, Prefill, Scored
from branchwise.core.sequence import SequenceState
from branchwise.draft.base import LearningDrafter, not_a_state
from branchwise.draft.builder import Candidate, TreePolicy, new
from branchwise.draft.lookup.base import LookupDrafter
from branchwise.draft.policies.topk import TopK
from branchwise.draft.recycle.topk import HostTopTokens, ReportedTopTokens, host_top_tokens, top_tokens_at
from branchwise.draft.sparse import flaw_of
from branchwise.errors import UsageError
from branchwise.verify import Verdict

Gram = tuple[int, ...]
PREFILL = 64
"""number of distributions of a prompt that are learned from, the last ones"""
MOST_READ = 1024
"""most lines of the arrays that are cached as lists"""


class Stand(LookupDrafter, LearningDrafter):
    """`stand:max=4,min=2,k=10,ngrams=100000`: the candidates of the longest known n-gram, `max` down to `min` tokens.

    An n-gram has k tokens and their average probabilities. The (c + 1)-th distribution after an n-gram has the weight
    1 / (c + 1) in the average, and a token that is not among the k best of a distribution counts as 0 in it. At most
    `ngrams` n-grams are kept; the n-gram whose last occurrence is the oldest is forgotten first.
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
        """n-gram -> its line in the arrays; the n-gram whose last occurrence is the oldest comes first"""
        self._tokens = np.zeros((ngrams, k), dtype=np.int32)  # pages that were never written to take no memory
        self._masses = np.zeros((ngrams, k), dtype=np.float32)
        self._counts = np.zeros(ngrams, dtype=np.int32)
        self._read: dict[int, list[tuple[int, float]]] = {}
        """line -> its tokens and masses as a list, until the line is written again"""

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
        if (words := self._read.get(line)) is None:
            stored = zip(self._tokens[line].tolist(), self._masses[line].tolist(), strict=True)
            if len(self._read) >= MOST_READ:
                self._read.clear()
            words = self._read[line] = [word for word in stored if word[1] > 0]
        return words

    def _longest(self, cursor: Gram) -> int | None:
        for size in range(min(self.max, len(cursor)), self.min - 1, -1):
            if (line := self._lines.get(cursor[-size:])) is not None:
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
            full = len(self._lines) == self.ngrams
            line = self._lines.popitem(last=False)[1] if full else len(self._lines)
            self._lines[gram], count, mixed = line, 0, probs
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

    def _checked(self, tensors: dict[str, Tensor]) -> list[Gram]:
        """The n-grams of a stored state; raises a UsageError if the state does not fit."""
        kinds = {"grams": torch.int32, "counts": torch.int32, "tokens": torch.int32, "masses": torch.float32}
        if {name: tensor.dtype for name, tensor in tensors.items()} != kinds:
            raise not_a_state(self.name, f"it should hold {', '.join(kinds)}")
        grams, counts, tokens, masses = (tensors[name] for name in kinds)
        shapes = [(len(grams), self.max), (len(grams),), (len(grams), self.k), (len(grams), self.k)]
        if [tuple(tensor.shape) for tensor in (grams, counts, tokens, masses)] != shapes:
            raise not_a_state(self.name, f"it is not about n-grams of {self.max} tokens and {self.k} behind each")
        most = sys.maxsize if self.target is None else self.target.vocabulary
        if flaw := flaw_of(tokens, masses, most):
            raise not_a_state(self.name, flaw)
        found = [tuple(token for token in gram if token != -1) for gram in grams.tolist()]
        if not all(0 <= token < most for gram in found for token in gram):
            raise not_a_state(self.name, "a token is outside the vocabulary")
        if bool((grams[:, 1:].lt(0) & grams[:, :-1].ge(0)).any()) or any(len(gram) < self.min for gram in found):
            raise not_a_state(self.name, f"an n-gram has fewer than {self.min} tokens")
        if len(set(found)) < len(found) or bool((counts < 1).any()):
            raise not_a_state(self.name, "an n-gram comes twice or never")
        return found
