"""The target itself as its drafter, disturbed: a drafter of any skill for any model, to test verifiers with.

It drafts with passes of the target, so it makes nothing faster. Its use is that q is as close to p as one likes:
q = softmax(logits / temperature + sigma noise), where the noise belongs to the text before a node. sigma = 0 draws from
the target's own law, 1 is a fair draft model, 3 a bad one.
"""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Sequence as Rows

import torch
from torch import Tensor

from branchwise.draft.grown import Grown, Wish
from branchwise.draft.growth import Found, Growth, Sapling
from branchwise.draft.paths import Paths
from branchwise.draft.recall import Recall
from branchwise.errors import UsageError
from branchwise.forest import Forest
from branchwise.rows import total
from branchwise.sequence import Sequence
from branchwise.tree import Draw


class Disturbed(Grown):
    name = "disturbed"
    cost = 1.0

    def __init__(self, sigma: float = 1.0, recall: float | None = None, tree: Growth | None = None) -> None:
        if sigma < 0:
            raise UsageError(f"Drafter 'disturbed' needs a sigma of at least 0, not {sigma}.")
        super().__init__(tree or Paths("2x3"))
        self.sigma = sigma
        self.recall = None if recall is None else Recall(recall)

    def look(self, wishes: Rows[Wish]) -> list[Found]:
        assert self.target is not None
        # Scored from the root on every time: the rows of a level are gone when the next one is asked for.
        forest = Forest([wish.tree.finish(Draw.FIXED) for wish in wishes], self.target.device)
        logits = self.target.score([wish.sequence for wish in wishes], forest).logits
        self.passes += 1
        return [Found(self._laws(wish, rows)) for wish, rows in zip(wishes, logits, strict=True)]

    def _laws(self, wish: Wish, logits: Tensor) -> Tensor:
        """(nodes, vocabulary), given the target's logits in level order."""
        sequence, tree, places = wish.sequence, wish.tree, wish.tree.places
        laws = torch.stack([self._law(sequence, tree, node, logits[places[node]]) for node in wish.nodes])
        return laws if self.recall is None else self.recall.mix(sequence, tree, wish.nodes, laws)

    def _law(self, sequence: Sequence, tree: Sapling, node: int, logits: Tensor) -> Tensor:
        """(vocabulary,): the target's law after a node, disturbed in a way that only the text before it decides."""
        text = zlib.crc32(array("q", [*sequence.tokens, *tree.path(node)]).tobytes())
        noise = torch.randn(len(logits), generator=torch.Generator().manual_seed(text)).to(logits.device)
        temperature = sequence.sampling.temperature or 1.0
        law = torch.softmax(logits.float() / temperature + self.sigma * noise, dim=-1)
        return law / total(law).to(law.dtype)
