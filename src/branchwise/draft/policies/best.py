"""The best nodes over a memory, one after the other: a heap of what may come next.

Where a look costs nothing, the tree of the most probable paths needs no levels and no passes. Probabilities only fall
along a path, so the best node of all is always on top of the heap, and whatever the size, the tree is the best of that
size if the memory is right about itself.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING

from branchwise.draft.builder import TreeBuilder

if TYPE_CHECKING:
    from branchwise.draft.lookup.base import Candidate, Cursor

Look = Callable[["Cursor"], Sequence["Candidate"]]
"""what may come next at a place"""


def best_first(
    root: int, place: Cursor, after: Look, *, nodes: int, depth: int, width: int = 64, least: float = 0.0
) -> tuple[TreeBuilder, list[float]]:
    """At most `nodes` nodes below the root in falling order, and how probable the path to each is, the root's first."""
    tree = TreeBuilder([root])
    reach = list(islice(falling(tree, place, after, depth=depth, width=width, least=least), max(nodes, 0)))
    return tree, [1.0, *reach]


def falling(
    tree: TreeBuilder, place: Cursor, after: Look, *, depth: int, width: int = 64, least: float = 0.0
) -> Iterator[float]:
    """Add the next best node to a tree and say how probable its path is, again and again for as long as there is one.

    Of every node the `width` best children are thought of, and none whose path is less probable than `least`. Only the
    best of siblings that has not joined waits in the heap: the others cannot come before it. Of equal paths the one
    below the older parent comes first.
    """
    # (-probability of the path, parent, rank, the node, all siblings)
    slots: list[tuple[float, int, int, Candidate, Sequence[Candidate]]] = []
    reach = [1.0]

    def offer(parent: int, rank: int, siblings: Sequence[Candidate]) -> None:
        if rank < width and rank < len(siblings):
            best = siblings[rank]
            value = reach[parent] * min(best.mass, 1.0)
            if value >= least:
                heapq.heappush(slots, (-value, parent, rank, best, siblings))

    newest = 0
    while True:
        if tree.depths[newest] < depth:
            offer(newest, 0, after(place))
        if not slots:
            return
        value, parent, rank, (token, _, place, source), siblings = heapq.heappop(slots)
        offer(parent, rank + 1, siblings)
        newest = tree.add(parent, token)
        reach.append(-value)
        if source:
            tree.sources[newest] = source
        yield -value
