"""Match: draw the next token from the target and walk while the tree holds it.

SpecInfer (Miao et al., 2024) calls it naive sampling. The emitted token is always the target's own draw, so it is
exact for any tree whatsoever, however the tree was made; for a fixed tree no verifier accepts more. Its noise is
keyed by position, so with the same seed the output equals plain decoding token for token.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import TypeVar

import torch

from branchwise.chance import Chance
from branchwise.laws import Laws, settled
from branchwise.tree import Draw, Forest
from branchwise.verify import Verdicts


class Match:
    name = "match"
    accepts = frozenset(Draw) - {Draw.FORK}

    def __call__(self, forest: Forest, laws: Laws, chance: Chance) -> Verdicts:
        device = forest.tokens.device
        node = torch.zeros(len(forest), dtype=torch.long, device=device)
        done = torch.zeros(len(forest), dtype=torch.bool, device=device)
        paths = torch.full((len(forest), forest.depth + 1), -1, device=device)
        paths[:, 0].zero_()
        token = self._draw(laws, node, chance, 0)
        for depth in range(1, forest.depth + 1):
            child, found = forest.children_of(node, token)
            done = done | ~found
            if settled(laws, done):
                break
            node = torch.where(done, node, child)
            paths[:, depth] = torch.where(done, -1, child)
            # A tree that is done keeps its token; its row is drawn again only to keep the batch in one shape.
            token = torch.where(done, token, self._draw(laws, node, chance, depth))
        return Verdicts(paths, token)

    @staticmethod
    def _draw(laws: Laws, node: torch.Tensor, chance: Chance, depth: int) -> torch.Tensor:
        if laws.greedy:
            return laws.best(node)
        return chance.token(laws.rows(node), depth)


Self = TypeVar("Self")
Rule = Callable[[Self, Forest, Laws, Chance], Verdicts]


def or_match(rule: Rule[Self]) -> Rule[Self]:
    """Leave greedy laws to `match`, on which all verifiers agree, and draw a token where nothing was drafted."""

    @wraps(rule)
    def verify(self: Self, forest: Forest, laws: Laws, chance: Chance) -> Verdicts:
        if laws.greedy:
            return Match()(forest, laws, chance)
        if forest.depth == 0:
            root = torch.zeros(len(forest), dtype=torch.long, device=forest.device)
            return Verdicts(root[:, None], chance.pick(laws.rows(root)))
        return rule(self, forest, laws, chance)

    return verify
