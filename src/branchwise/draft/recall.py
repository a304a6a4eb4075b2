"""Recall: earlier distributions of the target, mixed into those of a draft model."""

from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from branchwise.core.sequence import SequenceState
from branchwise.core.tree import DraftTree
from branchwise.draft.builder import Judged, TreeBuilder
from branchwise.errors import UsageError
from branchwise.verify import Verdict

KEPT = 32
"""number of tokens of a distribution that are kept, the most probable ones"""
ROWS = 16
"""most distributions that are kept of one tree, those of its accepted path first: each takes a search through the
vocabulary"""
PAIRS = 4096
"""most pairs of tokens that are kept of one text; the oldest are dropped"""

Pair = tuple[int, int]
Remembered = tuple[Tensor, Tensor]
"""what followed two tokens: tokens (kept,) and logits (kept,) float32, whose softmax is the distribution"""


class TargetProbsMixer:
    """q' = (1 - share) q + share p, where p is the target's last distribution after the same two tokens.

    Improved MCSD (Lu et al., arXiv 2409.10644) starts trees with tokens of known distributions of the target, which
    changes what is written. Mixed into q, the same knowledge is lossless. Each text has its own memory: texts with the
    same seed share their noise, so the tokens of one text would predict those of another.
    """

    def __init__(self, share: float) -> None:
        if not 0 < share < 1:
            raise UsageError(f"Recall needs a share between 0 and 1, such as recall=0.3, not {share}.")
        self.share = share
        self._memories: WeakKeyDictionary[SequenceState, dict[Pair, Remembered]] = WeakKeyDictionary()

    def learn(self, judged: Sequence[Judged]) -> None:
        """Keep distributions that a pass found; called before the tokens of a step are appended to the sequences."""
        for sequence, tree, rows, verdict in judged:
            nodes = worth_reading(tree, verdict)
            tokens = tree.tokens.tolist()
            logits, found = rows[nodes].topk(min(KEPT, rows.shape[-1]), dim=-1)
            memory = self._memories.setdefault(sequence, {})
            # In reverse, so that accepted nodes are the newest.
            for node, best, scores in reversed(list(zip(nodes, found, logits.float(), strict=True))):
                if (pair := last_two(sequence, tokens, tree.parents, node)) is not None:
                    memory.pop(pair, None)
                    memory[pair] = best, scores
            while len(memory) > PAIRS:
                del memory[next(iter(memory))]

    def mix(self, sequence: SequenceState, tree: TreeBuilder, nodes: Sequence[int], probs: Tensor) -> Tensor:
        """Distributions (nodes, vocabulary) to draw from after these nodes, given those of the draft."""
        memory = self._memories.get(sequence, {})
        pairs = [last_two(sequence, tree.tokens, tree.parents, node) for node in nodes]
        known = [(row, memory[pair]) for row, pair in enumerate(pairs) if pair in memory]
        if not known:
            return probs
        left = torch.ones(len(nodes), 1, dtype=probs.dtype)
        left[[row for row, _ in known]] -= self.share
        mixed = probs * left.to(probs.device)
        temperature = sequence.sampling.temperature or 1.0
        for row, (tokens, logits) in known:
            remembered = (logits.to(probs.dtype) / temperature).softmax(dim=-1)
            mixed[row].index_add_(0, tokens, self.share * remembered)
        return mixed


def worth_reading(tree: DraftTree, verdict: Verdict) -> list[int]:
    """The accepted nodes, then the rejected children of accepted nodes."""
    below = [child for node in verdict.path for child in tree.topology.children[node] if child not in verdict.path]
    return [*verdict.path, *below][:ROWS]


def last_two(sequence: SequenceState, tokens: Sequence[int], parents: Sequence[int], node: int) -> Pair | None:
    """The last two tokens of the text up to a node; None if the text has only one."""
    if node > 0:
        return tokens[parents[node]], tokens[node]
    return None if len(sequence.tokens) < 2 else (sequence.tokens[-2], sequence.tokens[-1])
