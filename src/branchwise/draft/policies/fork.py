"""A fork: the target begins the branches, the draft model continues them. Lossy, with the rule of `longest.py`.

Lu et al., "Improving Multi-candidate Speculative Decoding" (arXiv 2409.10644): what follows the last accepted node is
known from the pass that accepted it, so the first level of the next tree is drawn from the target itself.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from branchwise.core.rows import row_sum
from branchwise.core.sampling import Context, adjust, one_hot, warp
from branchwise.core.sequence import SequenceState
from branchwise.core.tree import DraftTree, Draw
from branchwise.draft.base import Budget
from branchwise.draft.builder import Judged, TreeBuilder, TreeCoroutine, TreePolicy
from branchwise.draft.sampler import DraftSampler, SampleRequest
from branchwise.draft.sparse import alone
from branchwise.errors import UsageError
from branchwise.verify.longest import after_stop


class Fork(TreePolicy):
    """`fork-lossy:WxD`: W branches of D tokens; their first tokens are the target's if its distribution is known."""

    draw = Draw.FORK

    def __init__(self, shape: str) -> None:
        found = re.fullmatch(r"(\d+)x(\d+)", shape)
        if not found or not int(found[1]) or not int(found[2]):
            raise UsageError(f"A fork is given as fork-lossy:WxD, such as fork-lossy:4x5, not fork-lossy:{shape}.")
        self.width, self.depth = int(found[1]), int(found[2])
        self._known: WeakKeyDictionary[SequenceState, tuple[int, Tensor]] = WeakKeyDictionary()
        """the length of a sequence, and the distribution of the token after it"""

    def grow_for(self, sequence: SequenceState, budget: Budget, sampler: DraftSampler) -> TreeCoroutine:
        length, probs = self._known.get(sequence, (0, None))
        return self.grow(sequence.root, budget, sampler, probs if length == len(sequence.tokens) else None)

    def grow(self, root: int, budget: Budget, sampler: DraftSampler, known: Tensor | None = None) -> TreeCoroutine:
        """`known` (vocabulary,) is the target's distribution after the root."""
        width = min(self.width, budget.nodes - 1)
        depth = min(self.depth, budget.depth, (budget.nodes - 1) // max(width, 1))
        tree = TreeBuilder([root])
        if depth < 1:
            return self._bare(root, sampler, known)
        found = yield tree, [0]  # in any case: a source reads the sequence up to its root before what is below
        tree.probs[0] = found.drawable[0] if known is None else known
        [first] = yield SampleRequest(sampler, alone(tree.probs[0]), [(0, 0)], [width])
        level = [tree.add(0, token) for token in first]
        for step in range(1, depth):
            found = yield tree, level
            probs = found.drawable
            tree.probs.update(zip(level, probs, strict=True))
            draws = [(branch, step * self.width + branch) for branch in range(len(level))]
            tokens = yield SampleRequest(sampler, probs, draws)
            level = [tree.add(node, token) for node, token in zip(level, tokens, strict=True)]
        return tree.finish(self.draw, trusted=known is not None)

    def _bare(self, root: int, sampler: DraftSampler, known: Tensor | None) -> DraftTree:
        """No branch fits. The one token that may be emitted is drawn here: no verifier knows its distribution."""
        if known is None:
            return DraftTree(torch.tensor([root]), (-1,), self.draw)
        token = torch.tensor(sampler.order(known, 1, 0), device=known.device)
        return DraftTree(torch.tensor([root]), (-1,), self.draw, one_hot(token, len(known)), trusted=True)

    def update(self, judged: Sequence[Judged]) -> None:
        """Keep the target's distribution after the last accepted node of every tree, which is its next root."""
        for sequence, tree, logits, verdict in judged:
            tokens = tree.tokens.tolist()
            below = tree.topology.children
            stop = next((node for node in below[verdict.path[-1]] if tokens[node] == verdict.token), None)
            if stop is None:
                continue  # nothing was accepted, and the token in its place was not scored
            written = [*sequence.tokens, *(tokens[node] for node in verdict.path[1:]), verdict.token]
            tested = None if tree.q is None or not below[stop] else tree.q[stop]
            context = Context(written, sequence.prompt_length)
            self._known[sequence] = len(written), wanted(logits[stop], sequence, context, tested)


def wanted(logits: Tensor, sequence: SequenceState, context: Context, q: Tensor | None) -> Tensor:
    """(vocabulary,): the distribution of the token after a node; q is what a rejected token after it was drawn from. A
    greedy sequence begins its branches with the most probable tokens, so the ranks of all tokens are kept for it."""
    if sequence.sampling.greedy:
        return adjust(logits[None], [sequence.sampling], [context])[0].softmax(dim=-1)
    probs = warp(logits[None], [sequence.sampling], [context])[0]
    if q is not None:
        probs = after_stop(probs, q.to(probs.dtype), torch.ones((), dtype=torch.bool, device=probs.device))
    return probs / row_sum(probs).to(probs.dtype)
