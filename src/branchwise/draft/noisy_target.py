"""The target as its own drafter, with noise on its logits: a drafter of any quality for any model, to test verifiers.

It makes nothing faster, but q can be as close to p as a test needs: q = softmax(logits / temperature + sigma noise),
where the noise is a function of the text up to a node. sigma = 1 is a fair draft model, 3 a bad one.
"""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Sequence

import torch
from torch import Tensor

from branchwise.backends.base import TargetInfo
from branchwise.core.batch import TreeBatch
from branchwise.core.rows import row_sum
from branchwise.core.sequence import SequenceState
from branchwise.core.tree import Draw
from branchwise.draft.builder import NodeProbs, TreeBuilder, TreePolicy
from branchwise.draft.policies.paths import Paths
from branchwise.draft.recall import TargetProbsMixer
from branchwise.draft.tree_drafter import ExpandRequest, TreeDrafter
from branchwise.errors import PairingError, UsageError


class NoisyTarget(TreeDrafter):
    name = "disturbed"
    cost = 1.0

    def __init__(self, sigma: float = 1.0, recall: float | None = None, tree: TreePolicy | None = None) -> None:
        if sigma < 0:
            raise UsageError(f"Drafter 'disturbed' needs a sigma of at least 0, not {sigma}.")
        super().__init__(tree or Paths("2x3"))
        self.sigma = sigma
        self.recall = None if recall is None else TargetProbsMixer(recall)

    def bind(self, target: TargetInfo) -> None:
        if target.score is None:
            raise PairingError(f"Drafter 'disturbed' drafts with passes of its target, and {target.name} lends none.")
        super().bind(target)

    def look(self, requests: Sequence[ExpandRequest]) -> list[NodeProbs]:
        assert self.target is not None
        assert self.target.score is not None
        # Every request is scored from the root: the cache rows of one level are gone before the next is requested.
        batch = TreeBatch([request.tree.finish(Draw.FIXED) for request in requests], self.target.device)
        logits = self.target.score([request.sequence for request in requests], batch).logits
        self.passes += 1
        return [NodeProbs(self._probs(request, rows)) for request, rows in zip(requests, logits, strict=True)]

    def _probs(self, request: ExpandRequest, logits: Tensor) -> Tensor:
        """(nodes, vocabulary), given the target's logits in level order."""
        sequence, tree, places = request.sequence, request.tree, request.tree.places
        probs = torch.stack([self._row(sequence, tree, node, logits[places[node]]) for node in request.nodes])
        return self._mixed(request, probs)

    def _row(self, sequence: SequenceState, tree: TreeBuilder, node: int, logits: Tensor) -> Tensor:
        """(vocabulary,): the target's distribution after a node, with noise that depends only on the text up to it."""
        text = zlib.crc32(array("q", [*sequence.tokens, *tree.path(node)]).tobytes())
        noise = torch.randn(len(logits), generator=torch.Generator().manual_seed(text)).to(logits.device)
        temperature = sequence.sampling.temperature or 1.0
        probs = torch.softmax(logits.float() / temperature + self.sigma * noise, dim=-1)
        return probs / row_sum(probs).to(probs.dtype)
