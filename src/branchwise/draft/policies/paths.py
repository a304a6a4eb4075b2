"""K independent paths, merged where they agree, for block verifiers of several paths; one path is the plain chain.

Near the root a drafter is most often right, so the first tokens of paths mostly agree. Delayed branching draws them
once for all paths. Paths with a common beginning are not independent, so such a tree counts as siblings drawn without
replacement: of repeated draws only the first counts, and it follows q on the tokens not drawn before.

In a fork the target begins the paths, and the draft model continues them (Lu et al., "Improving Multi-candidate
Speculative Decoding", arXiv 2409.10644): the pass that accepted a node has scored what follows it, so the first
level of the next tree is drawn from the target itself. This is lossy; its rule is in `verify/longest.py`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from branchwise.core.batch import PadShape
from branchwise.core.rows import row_sum
from branchwise.core.sampling import Context, adjust, one_hot, warp
from branchwise.core.sequence import SequenceState
from branchwise.core.topology import branched, plant
from branchwise.core.tree import DraftTree, Draw
from branchwise.draft.base import Budget
from branchwise.draft.builder import Judged, TreeBuilder, TreeCoroutine, TreePolicy
from branchwise.draft.sampler import DraftSampler, SampleRequest
from branchwise.draft.sparse import alone
from branchwise.errors import UsageError
from branchwise.verify.longest import after_stop


class Paths(TreePolicy):
    """`paths:KxL`: K paths of L tokens, shorter if the budget is small; their length never depends on what was drawn.

    `paths:KxL@d`: the first d tokens are common to all.
    """

    def __init__(self, shape: str) -> None:
        found = re.fullmatch(r"(\d+)x(\d+)(?:@(\d+))?", shape)
        if not found or not int(found[1]) or not int(found[2]):
            raise UsageError(f"Paths are given as paths:KxL, such as paths:4x6, not paths:{shape}.")
        self.count, self.length, self.common = int(found[1]), int(found[2]), int(found[3] or 0)
        if self.common >= self.length:
            raise UsageError(f"Of {self.length} tokens at most {self.length - 1} can be common, not {self.common}.")
        independent = self.common == 0 or self.count == 1
        self.draw = Draw.PATHS if independent else Draw.WITHOUT_REPLACEMENT
        # Several independent paths that decide on a depth together would depend on each other.
        self.stoppable = self.count == 1 or not independent

    @property
    def pad_shape(self) -> PadShape:
        """Where paths merge is random: a shape that holds all outcomes is the same at every step."""
        return PadShape.for_paths(self.count, self.length)

    @property
    def largest(self) -> int:
        return self.common + self.count * (self.length - self.common)

    def within(self, budget: Budget) -> int:
        """The length of the paths within a budget."""
        nodes = budget.nodes - 1
        fits = nodes if nodes <= self.common else self.common + (nodes - self.common) // self.count
        return max(min(self.length, budget.depth, fits), 0)

    def grow(self, root: int, budget: Budget, sampler: DraftSampler) -> TreeCoroutine:
        tree = TreeBuilder([root])
        ends = [0] * self.count
        for level in range(self.within(budget)):
            nodes = sorted(set(ends))
            probs = yield from tree.expand(nodes)
            paths = sorted(range(self.count), key=ends.__getitem__)
            drawing = paths if level >= self.common else paths[:1]
            draws = [(nodes.index(ends[path]), level * self.count + path) for path in drawing]
            drawn = yield SampleRequest(sampler, probs, draws)
            tokens = drawn * (self.count // len(drawing))
            children: dict[tuple[int, int], int] = {}
            for path, token in zip(paths, tokens, strict=True):
                step = ends[path], token
                if step not in children:
                    children[step] = tree.add(*step)
                ends[path] = children[step]
        return tree.finish(self.draw, tuple(ends) if self.draw is Draw.PATHS else ())


class Chain(Paths):
    """`chain:L`: at most L tokens, one after the other. For `ngram`, which draws nothing, L is the length to copy."""

    def __init__(self, length: int = 8) -> None:
        if length < 1:
            raise UsageError(f"A chain has at least 1 token, not {length}.")
        super().__init__(f"1x{length}")
        plant(branched([1] * length))


class Fork(TreePolicy):
    """`fork-lossy:WxD`: W branches of D tokens; their first tokens are the target's if its distribution is known."""

    draw = Draw.FORK
    stoppable = True

    def __init__(self, shape: str) -> None:
        found = re.fullmatch(r"(\d+)x(\d+)", shape)
        if not found or not int(found[1]) or not int(found[2]):
            raise UsageError(f"A fork is given as fork-lossy:WxD, such as fork-lossy:4x5, not fork-lossy:{shape}.")
        self.width, self.depth = int(found[1]), int(found[2])
        plant(branched([self.width, *[1] * (self.depth - 1)]))
        self._known: WeakKeyDictionary[SequenceState, tuple[int, Tensor]] = WeakKeyDictionary()
        """for each sequence its length, and the distribution of the token after it"""

    @property
    def largest(self) -> int:
        return self.width * self.depth

    def grow_for(self, sequence: SequenceState, budget: Budget, sampler: DraftSampler) -> TreeCoroutine:
        length, probs = self._known.get(sequence, (0, None))
        return self.grow(sequence.root, budget, sampler, probs if length == len(sequence.tokens) else None)

    def grow(self, root: int, budget: Budget, sampler: DraftSampler, known: Tensor | None = None) -> TreeCoroutine:
        """`known` (vocabulary,) is the target's distribution after the root."""
        width = min(self.width, budget.nodes - 1)
        depth = min(self.depth, budget.depth, (budget.nodes - 1) // max(width, 1))
        tree = TreeBuilder([root], trusted=known is not None)
        if depth < 1:
            return self._bare(root, sampler, known)
        found = yield tree, [0]  # always: a source reads the sequence up to the root before nodes below it
        tree.probs[0] = found.drawable[0] if known is None else known
        [first] = yield SampleRequest(sampler, alone(tree.probs[0]), [(0, 0)], [width])
        level = [tree.add(0, token) for token in first]
        for step in range(1, depth):
            probs = yield from tree.expand(level)
            draws = [(branch, step * self.width + branch) for branch in range(len(level))]
            tokens = yield SampleRequest(sampler, probs, draws)
            level = [tree.add(node, token) for node, token in zip(level, tokens, strict=True)]
        return tree.finish(self.draw)

    def _bare(self, root: int, sampler: DraftSampler, known: Tensor | None) -> DraftTree:
        """The tree if no branch fits. The token that the step emits is drawn here, and q is certain of it: a verifier
        does not know the distribution `known`."""
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
                continue  # nothing was accepted, and the emitted token was not scored
            written = [*sequence.tokens, *(tokens[node] for node in verdict.path[1:]), verdict.token]
            tested = None if tree.q is None or not below[stop] else tree.q[stop]
            context = Context(written, sequence.prompt_length)
            self._known[sequence] = len(written), wanted(logits[stop], sequence, context, tested)


def wanted(logits: Tensor, sequence: SequenceState, context: Context, q: Tensor | None) -> Tensor:
    """(vocabulary,): the distribution of the token after a node; q is the distribution of a token that was rejected
    there, if one was. For a greedy sequence all tokens keep their ranks, because its branches begin with the most
    probable tokens."""
    if sequence.sampling.greedy:
        return adjust(logits[None], [sequence.sampling], [context])[0].softmax(dim=-1)
    probs = warp(logits[None], [sequence.sampling], [context])[0]
    if q is not None:
        probs = after_stop(probs, q.to(probs.dtype), torch.ones((), dtype=torch.bool, device=probs.device))
    return probs / row_sum(probs).to(probs.dtype)
