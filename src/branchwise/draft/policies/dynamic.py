"""Dynamic trees (DySpec): each token is drawn where one is most likely to be accepted.

Xiong et al., "DySpec: Faster Speculative Decoding with Dynamic Token Tree Structure" (arXiv 2410.11744). A slot is a
place where a next token can be drawn. Its value estimates how probable it is that the target comes to ask for it: a
token with the share R of what was left is assumed to be accepted with probability R. So a draw in a slot of value v
leaves two behind it, one below the new node with v R, and one for its next sibling with v (1 - R). Values only fall,
and the best slots are found in order.

The best slot is chosen before its token is drawn, and every node joins as the last of its siblings, without children.
That is all that `rrs` and `traversal` ask for. Both emit on average the same distribution with such a node as without
it, whatever else is in the tree; so it does not matter which nodes decided where it joined.
"""

from __future__ import annotations

import heapq

from branchwise.core.tree import Draw
from branchwise.draft.base import Budget
from branchwise.draft.builder import TreeBuilder, TreeCoroutine, TreePolicy
from branchwise.draft.no_replacement import FIRST_TURNS, NoReplacementSampler, no_replacement_samplers
from branchwise.draft.sampler import DraftSampler
from branchwise.errors import UsageError


class Dynamic(TreePolicy):
    """`dynamic:N`: N nodes below the root, or as many as the budget allows.

    A pass of the drafter is made when the best slot is below a node that has no distribution yet, and then for every
    such node that could still get a child. So a tree takes at least as many passes as it is deep, and at most as many
    as it has nodes: a chain takes that many, a bushy tree about its depth.
    """

    draw = Draw.WITHOUT_REPLACEMENT

    def __init__(self, nodes: int = 24) -> None:
        if nodes < 1:
            raise UsageError(f"A dynamic tree has at least 1 node, such as dynamic:24, not {nodes}.")
        self.nodes = nodes

    def grow(self, root: int, budget: Budget, sampler: DraftSampler) -> TreeCoroutine:
        tree, remaining = TreeBuilder([root]), dict[int, NoReplacementSampler]()
        slots = [(-1.0, 0, 0)] if budget.depth > 0 else []  # (-value, tie-breaker, the node that gets a child)
        for room in range(min(self.nodes, budget.nodes - 1), 0, -1):
            if not slots:
                break
            if slots[0][-1] not in remaining:
                # Values only fall: of the slots that there are, no more than the best `room` will ever be drawn in.
                bare = sorted(node for *_, node in heapq.nsmallest(room, slots) if node not in remaining)
                found = yield tree, bare
                probs = found.drawable
                tree.probs.update(zip(bare, probs, strict=True))
                remaining.update((yield from no_replacement_samplers(probs, bare, sampler, FIRST_TURNS)))
            value, _, parent = heapq.heappop(slots)
            token, share, rest = remaining[parent].draw(sampler, len(tree))
            child = tree.add(parent, token)
            if tree.depths[child] < budget.depth:
                heapq.heappush(slots, (value * share, 2 * child, child))
            if rest > 0:
                heapq.heappush(slots, (value * rest, 2 * child + 1, parent))
        return tree.finish(self.draw)
