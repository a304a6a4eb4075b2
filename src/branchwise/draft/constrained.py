"""Drafting under a grammar: tokens that it forbids are never drafted, and tokens that it forces are drafted for free.

The target's own distribution gives a forbidden token no mass either, so a drafter that ignored grammars would waste
nodes but stay exact. Here candidates and distributions are masked before a tree is laid or drawn. So a tree is what it
would be over a source that knows the grammar, q is the distribution that tokens are really drawn from, and any policy
and any verifier work. If the grammar allows only one token, the token has mass 1, so that a run of such tokens is
drafted as far as the tree goes.
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
"""the source of a token that the grammar forces"""


def place_of(sequence: SequenceState) -> Place | None:
    """The place of a text in its grammar, if it has one."""
    constraint = constraint_of(sequence.sampling)
    return None if constraint is None else constraint.find(sequence.tokens)


# Over tables


class GrammarCursor(NamedTuple):
    """A cursor of a lookup drafter, and the place in the grammar after the same tokens."""

    own: Cursor
    place: Place


def under_grammar(sequence: SequenceState, cursor: Cursor) -> Cursor:
    """The cursor after a text, together with the text's place in its grammar if it has one."""
    place = place_of(sequence)
    return cursor if place is None else GrammarCursor(cursor, place)


def allowed_candidates(
    cursor: GrammarCursor, candidates: Candidates, behind: Callable[[Cursor, int], Cursor], name: str
) -> Sequence[Candidate]:
    """The candidates that the grammar allows; they share the mass of the others. `name` is that of the drafter, and
    `behind` gives the cursor after one more token."""
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
    """A chain of at most `length` tokens: `tokens` as far as they are allowed, with forced tokens in between."""
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
    """The distributions after nodes of a tree, restricted to allowed tokens. If a distribution gives no allowed token
    any mass, the uniform one over them replaces it. Sparse distributions were masked as candidates already."""
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
    """The places of the nodes of a level in their grammars, for trees of a batch that grow level by level on the
    host."""

    def __init__(self, roots: Sequence[Place | None]) -> None:
        """`roots` are the places of the roots, None for a text without a grammar."""
        self._places: list[list[Place | None]] = [[root] for root in roots]

    @classmethod
    def of(cls, sequences: Sequence[SequenceState], size: int) -> GrammarLevels | None:
        """The level of the roots of these texts, padded to `size` texts; None if no text has a grammar."""
        roots = [place_of(sequence) for sequence in sequences]
        return cls([*roots, *[None] * (size - len(roots))]) if any(roots) else None

    def allowed(self, vocabulary: int) -> Tensor:
        """(batch, rows, vocabulary) bool: what may follow each node."""
        anything = torch.ones(vocabulary, dtype=torch.bool)
        masks = [[None if place is None else place.mask(vocabulary) for place in row] for row in self._places]
        return torch.stack([torch.stack([anything if mask is None else mask for mask in row]) for row in masks])

    def forced(self) -> list[tuple[int, int, int]]:
        """(text, row, token) of every node after which the grammar allows only this token."""
        rows = [(text, row, place) for text, places in enumerate(self._places) for row, place in enumerate(places)]
        return [(text, row, place.forced) for text, row, place in rows if place and place.forced is not None]

    def descend(self, above: Tensor, tokens: Tensor) -> None:
        """Go to the next level: `above` (batch, rows) are the rows of the parents in this level, `tokens` (batch, rows)
        the tokens of the next."""
        self._places = [
            [None if (place := places[parent]) is None else place.after(token) for parent, token in pairs]
            for places, pairs in zip(self._places, torch.stack([above, tokens], dim=-1).tolist(), strict=True)
        ]
