"""Drafting under a grammar: nothing that it forbids, and for free what it forces.

The target's own distribution forbids a token as well, so a drafter that knows nothing of grammars loses nodes and no
exactness. Here candidates and distributions are masked before a tree is laid or drawn: a tree is what it would be over
a source that knows the grammar, q is what tokens are really drawn from, and any policy and any verifier take it. Where
only one token may come it has mass 1, so that a run of such tokens is drafted as far as the tree goes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from branchwise.constrain import Place, constraint_of
from branchwise.core.sequence import SequenceState
from branchwise.draft.builder import Candidate, Candidates, Cursor, NodeProbs, TreeBuilder

SOURCE = "grammar"
"""who proposes a token that must come"""


def place_of(sequence: SequenceState) -> Place | None:
    """Where a text stands in its grammar, if it has one."""
    constraint = constraint_of(sequence.sampling)
    return None if constraint is None else constraint.find(sequence.tokens)


# Over tables


class GrammarCursor(NamedTuple):
    """A cursor of a lookup drafter, and the place in the grammar there."""

    own: Cursor
    place: Place


def under_grammar(sequence: SequenceState, cursor: Cursor) -> Cursor:
    place = place_of(sequence)
    return cursor if place is None else GrammarCursor(cursor, place)


def allowed_candidates(
    cursor: GrammarCursor, candidates: Candidates, behind: Callable[[Cursor, int], Cursor], name: str
) -> Sequence[Candidate]:
    """What may come next; the others leave their mass to these. `name` is that of the drafter."""
    own, place = cursor
    if place.forced is not None:
        return [Candidate(place.forced, 1.0, behind(cursor, place.forced), SOURCE)]
    found = candidates(own)
    kept = [one for one in found if place.allows(one.token)]
    if not kept:
        return []
    share = sum(one.mass for one in found) / sum(one.mass for one in kept)
    return [
        Candidate(one.token, one.mass * share, GrammarCursor(one.cursor, place.after(one.token)), one.source or name)
        for one in kept
    ]


def allowed_chain(place: Place, tokens: Sequence[int], length: int) -> list[int]:
    """A chain of at most so many tokens: these, as far as they are allowed, and those that must come among them."""
    chain: list[int] = []
    left = list(tokens[::-1])
    while len(chain) < length and not place.free:
        token = place.forced
        if token is None:
            if not left or not place.allows(left[-1]):
                break
            token = left[-1]
        left = left[:-1] if left and left[-1] == token else []
        chain.append(token)
        place = place.after(token)
    return chain


# Over distributions


def allowed_probs(here: Place, tree: TreeBuilder, nodes: Sequence[int], found: NodeProbs) -> NodeProbs:
    """The distributions after nodes of a tree, over what may come there. A draft that gives none of it any mass is
    replaced by the distribution that prefers nothing. Sparse ones are masked as candidates already."""
    if not isinstance(found.found, Tensor):
        return found
    rows = []
    for node, row in zip(nodes, found.found, strict=True):
        place = here
        for token in tree.path(node):
            place = place.after(token)
        mask = place.mask(len(row))
        if mask is not None:
            allowed = mask.to(row.device, row.dtype)
            row = row * allowed
            mass = row.sum()
            row = torch.where(mass > 0, row / mass, allowed / allowed.sum())
        rows.append(row)
    return NodeProbs(torch.stack(rows), found.hidden)


# Over levels of a batch


class GrammarLevels:
    """Where the nodes of a level stand, in trees of a batch that grow level by level on the host."""

    def __init__(self, roots: Sequence[Place | None]) -> None:
        """None stands for a text without a grammar."""
        self._places: list[list[Place | None]] = [[root] for root in roots]

    @classmethod
    def of(cls, sequences: Sequence[SequenceState], size: int) -> GrammarLevels | None:
        """Of the roots of these texts, padded to a size; None if no text has a grammar."""
        roots = [place_of(sequence) for sequence in sequences]
        return cls([*roots, *[None] * (size - len(roots))]) if any(roots) else None

    def allowed(self, vocabulary: int) -> Tensor:
        """(batch, rows, vocabulary) bool: what may follow each node."""
        anything = torch.ones(vocabulary, dtype=torch.bool)
        masks = [[None if place is None else place.mask(vocabulary) for place in row] for row in self._places]
        return torch.stack([torch.stack([anything if mask is None else mask for mask in row]) for row in masks])

    def forced(self) -> list[tuple[int, int, int]]:
        """(text, row, token) where only one token may come."""
        rows = [(text, row, place) for text, places in enumerate(self._places) for row, place in enumerate(places)]
        return [(text, row, place.forced) for text, row, place in rows if place and place.forced is not None]

    def descend(self, above: Tensor, tokens: Tensor) -> None:
        """The next level (batch, rows): below which node of this one each stands, and its token."""
        self._places = [
            [None if (place := places[parent]) is None else place.after(token) for parent, token in pairs]
            for places, pairs in zip(self._places, torch.stack([above, tokens], dim=-1).tolist(), strict=True)
        ]
