"""Dynamic trees layer by layer (DySpec with a threshold): draw wherever acceptance is likely enough.

Xiong et al., "DySpec: Faster Speculative Decoding with Dynamic Token Tree Structure" (arXiv 2410.11744), the form for
slow drafters. Slots have the values of `dynamic`; here not only the best slot but every slot with a value of at least t
gets its token. So all nodes of a layer are known together, and a layer costs one pass.

How large such a tree becomes depends on the text, so a controller steers t. It looks at finished trees alone: t is
fixed before a tree is begun, and a token can change it only for the trees after its own.
"""

from __future__ import annotations

import heapq
import math
from weakref import WeakKeyDictionary

from branchwise.core.sequence import SequenceState
from branchwise.core.tree import Draw
from branchwise.draft.base import Budget
from branchwise.draft.builder import TreeBuilder, TreeCoroutine, TreePolicy
from branchwise.draft.no_replacement import FIRST_TURNS, no_replacement_samplers
from branchwise.draft.sampler import DraftSampler
from branchwise.errors import UsageError

LEAST, MOST = 1e-6, 0.9
"""the range of the controller"""


class Threshold(TreePolicy):
    """`threshold:T,N`: slots of value T and more, at most N nodes below the root.

    T is where the controller begins; N is also the size that it steers to. Each sequence has a controller of its own:
    sequences of one seed share their noise, so the sizes of other trees would reveal something about the next one.
    """

    draw = Draw.WITHOUT_REPLACEMENT

    def __init__(self, threshold: float = 0.02, nodes: int = 24) -> None:
        if not 0 < threshold < 1 or nodes < 1:
            raise UsageError(
                f"A tree by threshold takes a value between 0 and 1 and at least 1 node, such as threshold:0.02,24, "
                f"not threshold:{threshold:g},{nodes}."
            )
        self.threshold = threshold
        self.nodes = nodes
        self._controllers: WeakKeyDictionary[SequenceState, Threshold] = WeakKeyDictionary()

    def grow_for(self, sequence: SequenceState, budget: Budget, sampler: DraftSampler) -> TreeCoroutine:
        """By the threshold that the earlier trees of the sequence have steered."""
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
            found = yield tree, nodes
            probs = found.drawable
            tree.probs.update(zip(nodes, probs, strict=True))
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
        """Move the threshold halfway, in logarithms, to where the tree would have had the wanted size.

        Slots that the cap left unserved count as drawn: else no tree would seem too large, and t would only fall. A
        tree that the budget of its sequence cut short says nothing about t.
        """
        if unserved and drawn < self.nodes:
            return
        wished = self.threshold * math.sqrt((drawn + unserved) / self.nodes)
        self.threshold = min(max(wished, LEAST), MOST)
