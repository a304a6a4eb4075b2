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

from branchwise.chance import Chance, SeededChance
from branchwise.forest import Forest
from branchwise.laws import Laws, one_by_one, settled
from branchwise.rows import pack_bits, unpack_bits
from branchwise.tree import Draw
from branchwise.verify import Verdicts, Verifier


class Match:
    name = "match"
    accepts = frozenset(Draw) - {Draw.FORK}

    reads = ("tokens", "parents", "depths", "seen")
    """what it looks up in a forest on a device"""

    def __call__(self, forest: Forest, laws: Laws, chance: Chance) -> Verdicts:
        if not laws.lazy and isinstance(chance, SeededChance):
            return at_once(forest, laws, chance)
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


def at_once(forest: Forest, laws: Laws, chance: SeededChance) -> Verdicts:
    """The same verdict without a walk: on a device, draw behind every node and see which nodes were foretold.

    A node is accepted where its token, and that of each of its ancestors, is the one drawn behind its parent. Those
    nodes are a path, and its last one is the deepest.
    """
    nodes = torch.arange(forest.nodes, device=forest.device).expand(len(forest), -1)
    drawn = laws.best(nodes) if laws.greedy else chance.tokens(laws.rows(nodes), forest.depths)
    foretold = (drawn.gather(1, forest.parents.clamp_min(0)) == forest.tokens) & (forest.parents >= 0)
    foretold[:, 0] = True
    missed = pack_bits(~foretold[:, None])  # (batch, 1, words)
    accepted = ((forest.seen & missed) == 0).all(dim=-1) & foretold
    # Of twins, which no drafter should propose, the first.
    rank = forest.depths * forest.nodes + (forest.nodes - 1 - nodes)
    last = torch.where(accepted, rank, -1).argmax(dim=1, keepdim=True)
    above = forest.seen.gather(1, last[..., None].expand(-1, -1, forest.seen.shape[2]))
    path = unpack_bits(above, forest.nodes)[:, 0]
    paths = torch.full_like(nodes, -1).scatter_reduce(1, forest.depths, torch.where(path, nodes, -1), "amax")
    return Verdicts(paths, drawn.gather(1, last)[:, 0])


class Undrafted:
    """What a rule for drawn trees does where nothing was drafted: one token from the law behind the root."""

    name = "undrafted"
    accepts = frozenset(Draw)
    reads = ("tokens",)

    def __call__(self, forest: Forest, laws: Laws, chance: Chance) -> Verdicts:
        root = torch.zeros(len(forest), dtype=torch.long, device=forest.device)
        return Verdicts(root[:, None], chance.pick(one_by_one(laws).rows(root)))


Self = TypeVar("Self")
Rule = Callable[[Self, Forest, Laws, Chance], Verdicts]


def or_match(rule: Rule[Self]) -> Rule[Self]:
    """Leave greedy laws to `match`, on which all verifiers agree, and draw a token where nothing was drafted.

    Lossy rules need not.
    """

    @wraps(rule)
    def verify(self: Self, forest: Forest, laws: Laws, chance: Chance) -> Verdicts:
        if laws.greedy:
            return Match()(forest, laws, chance)
        if forest.depth == 0:
            return Undrafted()(forest, laws, chance)
        return rule(self, forest, laws, chance)

    verify.leaves_the_rest = True  # type: ignore[attr-defined]
    return verify


def rule_for(verifier: Verifier, forest: Forest, laws: Laws) -> Verifier:
    """Whose rule a verifier follows for these laws and trees; `or_match` says when that is not its own."""
    if not hasattr(type(verifier).__call__, "leaves_the_rest"):
        return verifier
    if laws.greedy:
        return Match()
    return verifier if forest.depth else Undrafted()
