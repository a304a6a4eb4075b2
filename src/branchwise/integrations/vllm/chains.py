"""Chains for vLLM, which verifies one for every request: of a tree, the path with the most expected tokens.

A chain is laid over the candidates of a lookup drafter. With chance, its tokens are drawn from the candidates' masses,
which are q. Without chance, it is the path with the most expected tokens in a small tree. Both end if the next token
would be reached with little probability. The rule that ends a drawn chain sees only the tokens before the token that it
decides about, so the kept part is a chain drawn from q.
"""

from __future__ import annotations

from itertools import islice
from typing import NamedTuple

import torch

from branchwise.core.rng import key_of
from branchwise.core.sequence import SequenceState
from branchwise.core.tree import DraftTree, Draw
from branchwise.draft.builder import Cursor, TreeBuilder
from branchwise.draft.lookup.base import LookupDrafter
from branchwise.draft.policies.topk import grow_best_first
from branchwise.draft.sparse import SparseProbs

SIZE = 2
"""the nodes of the tree from which a chain is chosen, as a multiple of the length of the chain"""
WIDTH = 3
"""how many candidates of a node are considered"""
COLDEST = 0.05
"""the lowest temperature by which masses are sharpened"""


class Laid(NamedTuple):
    """A chain, and where the drafter stood before it."""

    tree: DraftTree
    cursor: Cursor

    @property
    def tokens(self) -> list[int]:
        """The tokens below the root."""
        return self.tree.tokens[1:].tolist()


def best_chain(drafter: LookupDrafter, sequence: SequenceState, length: int, floor: float) -> Laid:
    """The path with the most expected tokens, if the masses of the drafter are right."""
    cursor = drafter.locate(sequence)
    tree, reach, worth = TreeBuilder([sequence.root]), [1.0], [0.0]
    growing = grow_best_first(tree, cursor, drafter.candidates, depth=length, width=WIDTH, least=floor)
    for value in islice(growing, SIZE * length):
        reach.append(value)
        worth.append(worth[tree.parents[-1]] + value)
    best = max(range(len(worth)), key=worth.__getitem__)
    return Laid(DraftTree.chain([sequence.root, *tree.path(best)]), cursor)


def drawn_chain(drafter: LookupDrafter, sequence: SequenceState, length: int, floor: float) -> Laid:
    """Tokens drawn from the drafter's masses at the temperature of the text, with their q."""
    assert drafter.target is not None, "a drafter is bound before it drafts"
    form = drafter.target.vocabulary, drafter.target.device
    start = cursor = drafter.locate(sequence)
    sharpen = 1 / max(sequence.sampling.temperature, COLDEST)
    tree, node, reach = TreeBuilder([sequence.root]), 0, 1.0
    while node < length and (found := drafter.candidates(cursor)):
        reach *= min(sum(candidate.mass for candidate in found), 1.0)
        if reach < floor:
            break
        best = found[0].mass
        probs = SparseProbs.of({one.token: (one.mass / best) ** sharpen for one in found}, *form)
        token = probs.race(key_of("draft", "pick", sequence.rng_seed, len(sequence.tokens) - 1, node))
        cursor = next(one.cursor for one in found if one.token == token)
        tree.probs[node] = probs
        node = tree.add(node, token)
    return Laid(tree.finish(Draw.PATHS, (node,)) if node else DraftTree.root(sequence.root), start)


def chain_of(tokens: list[int], q: torch.Tensor | None = None) -> DraftTree:
    """The tree of a chain that exists already, its root first; with `q` (tokens - 1, vocabulary) it counts as drawn."""
    if q is None or len(tokens) < 2:
        return DraftTree.chain(tokens)
    last = len(tokens) - 1
    return DraftTree(torch.tensor(tokens), tuple(range(-1, last)), Draw.PATHS, q, (last,))
