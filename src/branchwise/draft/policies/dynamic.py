"""Dynamic trees (DySpec): each token is drawn where a token is most likely to be accepted.

Xiong et al., "DySpec: Faster Speculative Decoding with Dynamic Token Tree Structure" (arXiv 2410.11744). A slot is a
place in the tree where a token can be drawn. Its value estimates the probability that verification gets to that token.
A token that has the share R of the mass of q that is left is assumed to be accepted with probability R. So a draw in a
slot of value v opens two slots: one below the new node, of value v R, and one for its next sibling, of value v (1 - R).
Values only fall, so the best slots are found in order.

The best slot is chosen before its token is drawn, and every node joins as the last of its siblings, without children.
That is all that `rrs` and `traversal` require. Averaged over its token, both emit the same distribution with such a
node as without it, whatever else is in the tree; so it does not matter which nodes decided where it joined.
"""

from __future__ import annotations

import heapq
import math
from weakref import WeakKeyDictionary

from branchwise.core.sequence import SequenceState
from branchwise.core.tree import Draw
from branchwise.draft.base import Budget
from branchwise.draft.builder import TreeBuilder, TreeCoroutine, TreePolicy
from branchwise.draft.sampler import FIRST_TURNS, DraftSampler, NoReplacementSampler, no_replacement_samplers
from branchwise.errors import UsageError

LEAST, MOST = 1e-6, 0.9
"""the range within which a threshold is steered"""


class Dynamic(TreePolicy):
    """`dynamic:N`: N nodes below the root, or as many as the budget allows.

    The drafter makes a pass if the best slot is below a node that has no distribution yet. The pass covers every such
    node that could still get a child. So a tree takes at least as many passes as it is deep, at most one for each node.
    """

    draw = Draw.WITHOUT_REPLACEMENT

    def __init__(self, nodes: int = 24) -> None:
        if nodes < 1:
            raise UsageError(f"A dynamic tree has at least 1 node, such as dynamic:24, not {nodes}.")
        self.nodes = nodes

    @property
    def largest(self) -> int:
        return self.nodes

    def grow(self, root: int, budget: Budget, sampler: DraftSampler) -> TreeCoroutine:
        tree, remaining = TreeBuilder([root]), dict[int, NoReplacementSampler]()
        slots = [(-1.0, 0, 0)] if budget.depth > 0 else []  # (-value, tie-breaker, the node that gets a child)
        for room in range(min(self.nodes, budget.nodes - 1), 0, -1):
            if not slots:
                break
            if slots[0][-1] not in remaining:
                # Values only fall, so of the present slots at most the best `room` will ever be drawn in.
                bare = sorted(node for *_, node in heapq.nsmallest(room, slots) if node not in remaining)
                probs = yield from tree.expand(bare)
                remaining.update((yield from no_replacement_samplers(probs, bare, sampler, FIRST_TURNS)))
            value, _, parent = heapq.heappop(slots)
            token, share, rest = remaining[parent].draw(sampler, len(tree))
            child = tree.add(parent, token)
            if tree.depths[child] < budget.depth:
                heapq.heappush(slots, (value * share, 2 * child, child))
            if rest > 0:
                heapq.heappush(slots, (value * rest, 2 * child + 1, parent))
        return tree.finish(self.draw)


class Threshold(TreePolicy):
    """`threshold:T,N`: draw in all slots of value T or more, at most N nodes below the root; DySpec's form for slow
    drafters.

    All nodes of a layer are known together, so a layer costs one pass. How large such a tree becomes depends on the
    text, so a controller steers T, beginning with the given one, towards N nodes. It looks at finished trees alone: a
    token can change T only for the trees after its own. Each sequence has a controller of its own: sequences of one
    seed share their noise, so the sizes of trees of another sequence would reveal something about its next tree.
    """

    draw = Draw.WITHOUT_REPLACEMENT

    def __init__(self, threshold: float = 0.02, nodes: int = 24) -> None:
        if not 0 < threshold < 1 or nodes < 1:
            raise UsageError(f"Threshold takes a value between 0 and 1 and 1 node or more, not {threshold:g},{nodes}.")
        self.threshold, self.nodes = threshold, nodes
        self._controllers: WeakKeyDictionary[SequenceState, Threshold] = WeakKeyDictionary()

    @property
    def largest(self) -> int:
        return self.nodes

    def grow_for(self, sequence: SequenceState, budget: Budget, sampler: DraftSampler) -> TreeCoroutine:
        """Grow by the threshold that the earlier trees of the sequence have steered."""
        if sequence not in self._controllers:
            self._controllers[sequence] = Threshold(self.threshold, self.nodes)
        return self._controllers[sequence].grow(sequence.root, budget, sampler)

    def grow(self, root: int, budget: Budget, sampler: DraftSampler) -> TreeCoroutine:
        least, left = self.threshold, min(self.nodes, budget.nodes - 1)
        tree = TreeBuilder([root])
        layer = [(-1.0, 0)]  # (-value, the node that gets a child); the most valuable first, so the cap cuts the others
        for _ in range(budget.depth):
            if not layer or left <= 0:
                break
            nodes = [node for _, node in layer]
            probs = yield from tree.expand(nodes)
            remaining = yield from no_replacement_samplers(probs, nodes, sampler, FIRST_TURNS)
            heapq.heapify(layer)
            below = []
            while layer and left > 0:
                value, parent = heapq.heappop(layer)
                token, share, rest = remaining[parent].draw(sampler, len(tree))
                child = tree.add(parent, token)
                left -= 1
                if -value * share >= least:
                    below.append((value * share, child))
                if rest > 0 and -value * rest >= least:
                    heapq.heappush(layer, (value * rest, parent))
            layer += below
        self._steer(len(tree) - 1, len(layer))
        return tree.finish(self.draw)

    def _steer(self, drawn: int, unserved: int) -> None:
        """Move the threshold halfway, in logarithms, to where the tree would have had the wanted size. Slots that the
        cap left unserved count as drawn: else no tree would seem too large. A tree that the budget of its sequence cut
        short says nothing about the threshold."""
        if unserved and drawn < self.nodes:
            return
        wished = self.threshold * math.sqrt((drawn + unserved) / self.nodes)
        self.threshold = min(max(wished, LEAST), MOST)
