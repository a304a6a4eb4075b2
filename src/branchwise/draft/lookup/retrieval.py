"""Retrieval: what followed the last few tokens in a corpus.

He et al., "REST: Retrieval-Based Speculative Decoding" (arXiv 2311.08252), looks up the longest suffix of the text in a
suffix array and drafts the most frequent continuations; RASD (arXiv 2503.03434) joins them to the tree of a model. It
pays if the corpus is like the text to be written: the code of a project, the manuals that answers are about.

An index is built once with `branchwise index build`; see docs/retrieval.md. Nothing is learned while drafting.
"""

from __future__ import annotations

from branchwise.backends.base import TargetInfo
from branchwise.core.sequence import SequenceState
from branchwise.draft.builder import Candidate, TreePolicy
from branchwise.draft.lookup.base import LookupDrafter
from branchwise.draft.policies.topk import TopK
from branchwise.errors import PairingError, UsageError
from branchwise.index import HITS, Index, Place, fingerprint

CHILDREN = 8
"""most candidates of a cursor; further ones are too improbable to get a node of a tree"""


class Retrieval(LookupDrafter):
    """`retrieval:FOLDER,max=16,min=2`: what followed the longest suffix of the text, `max` down to `min` tokens.

    Continuations are counted at no more than `hits` places, so that frequent words take no longer than rare ones.
    """

    name = "retrieval"

    def __init__(
        self, folder: str, max: int = 16, min: int = 2, hits: int = HITS, tree: TreePolicy | None = None
    ) -> None:
        if not 1 <= min <= max or hits < 1:
            raise UsageError(f"Drafter 'retrieval' needs 1 <= min <= max and 1 <= hits, not {min=}, {max=}, {hits=}.")
        super().__init__(tree or TopK(24, depth=12, width=8))
        self.index = Index(folder)
        self.max, self.min, self.hits = max, min, hits

    def bind(self, target: TargetInfo) -> None:
        super().bind(target)
        about, tokenizer = self.index.about, target.tokenizer
        same = fingerprint(tokenizer) == about.fingerprint if tokenizer else about.vocabulary <= target.vocabulary
        if not same:
            raise PairingError(
                f"The index {self.index.folder} was built with the tokenizer of {about.model}, and the target has "
                "another; build one for it with: branchwise index build FILES --model MODEL --out DIR"
            )

    def locate(self, sequence: SequenceState) -> Place | None:
        return self.index.find(sequence.tokens, self.max, self.min)

    def candidates(self, cursor: Place | None) -> list[Candidate]:
        if cursor is None:
            return []
        found = self.index.after(cursor, self.hits, CHILDREN)
        weight = trust(found.length, found.hits) / found.hits if found.hits else 0.0
        return [Candidate(token, weight * count, behind) for token, count, behind in found.counts]


def trust(length: int, hits: int) -> float:
    """The probability that the next token is one of those that followed the last `length` tokens at `hits` places.

    Fitted on code that was not in the index, over an index of other code: a token that followed two tokens once follows
    them again every seventh time, a token that followed seven tokens more often than not.
    """
    return length / (length + 3) * hits / (hits + 8 / length**2)
