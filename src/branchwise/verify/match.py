"""Match: draw the next token from the target and walk down as long as the tree holds it.

SpecInfer (Miao et al., 2024) calls it naive sampling. The emitted token is always the target's own draw, so the rule
is exact for any tree whatsoever, however the tree was made; for a fixed tree no verifier accepts more. Its noise is
keyed by position, so with the same seed the output equals plain decoding token for token.
"""

from __future__ import annotations

from functools import wraps
from typing import TypeVar

import torch

from branchwise.core.batch import TreeBatch
from branchwise.core.rng import Chance, SeededChance
from branchwise.core.rows import gather_rows, pack_bits
from branchwise.core.target_probs import TargetProbs, one_by_one, settled
from branchwise.core.tree import Draw
from branchwise.verify import Verdicts, Verifier


class Match(Verifier):
    name = "match"
    accepts = frozenset(Draw) - {Draw.FORK}
    reads = ("tokens", "parents", "depths", "ancestor_bits")

    def __call__(self, batch: TreeBatch, probs: TargetProbs, chance: Chance) -> Verdicts:
        if not probs.lazy and isinstance(chance, SeededChance):
            return at_once(batch, probs, chance)
        device = batch.tokens.device
        node = torch.zeros(len(batch), dtype=torch.long, device=device)
        paths = torch.full((len(batch), batch.depth + 1), -1, device=device)
        paths[:, 0].zero_()
        token = self._draw(probs, node, chance, 0)
        for depth in range(1, batch.depth + 1):
            child, found = batch.children_of(node, token)
            done = ~found  # and stays done: its node and its token do not change
            if settled(probs, done):
                break
            node = torch.where(done, node, child)
            paths[:, depth] = torch.where(done, -1, child)
            # A tree that is done keeps its token. A token is drawn for it too, only to keep the batch in one shape.
            token = torch.where(done, token, self._draw(probs, node, chance, depth))
        return Verdicts(paths, token)

    @staticmethod
    def _draw(probs: TargetProbs, node: torch.Tensor, chance: Chance, depth: int) -> torch.Tensor:
        return probs.best(node) if probs.greedy else chance.token(probs.at(node), depth)


def at_once(batch: TreeBatch, probs: TargetProbs, chance: SeededChance) -> Verdicts:
    """The same verdict on a device, without a walk: draw a token after every node.

    A node is accepted if its token was drawn after its parent, and the same is true of all its ancestors. The accepted
    nodes form a path, which ends at the deepest of them.
    """
    nodes = torch.arange(batch.nodes, device=batch.device).expand(len(batch), -1)
    drawn = probs.best(nodes) if probs.greedy else chance.tokens(probs.at(nodes), batch.depths)
    foretold = (drawn.gather(1, batch.parents.clamp_min(0)) == batch.tokens) & (batch.parents >= 0)
    foretold = foretold | (nodes == 0)  # writing a constant would record a copy from the host
    missed = pack_bits(~foretold[:, None])  # (batch, 1, words)
    accepted = ((batch.ancestor_bits & missed) == 0).all(dim=-1) & foretold
    # Of siblings with the same token, which no drafter should propose, the first counts.
    rank = batch.depths * batch.nodes + (batch.nodes - 1 - nodes)
    last = torch.where(accepted, rank, -1).argmax(dim=1)
    return Verdicts(batch.paths_to(last), gather_rows(drawn, last))


class Undrafted(Verifier):
    """The rule for trees without drafted nodes: one token from the distribution after the root."""

    name = "undrafted"
    accepts = frozenset(Draw)
    reads = ("tokens",)

    def __call__(self, batch: TreeBatch, probs: TargetProbs, chance: Chance) -> Verdicts:
        root = torch.zeros(len(batch), dtype=torch.long, device=batch.device)
        return Verdicts(root[:, None], chance.pick(one_by_one(probs).at(root)))


Rule = TypeVar("Rule", bound=type[Verifier])


def or_match(rule: Rule) -> Rule:
    """Leave greedy distributions to `match`, with which all verifiers agree there, and empty trees to `Undrafted`.

    A decorator for verifiers; lossy rules need not have it.
    """
    own = rule.__call__

    @wraps(own)
    def verify(self: Verifier, batch: TreeBatch, probs: TargetProbs, chance: Chance) -> Verdicts:
        chosen = rule_for(self, batch, probs)
        return own(self, batch, probs, chance) if chosen is self else chosen(batch, probs, chance)

    rule.__call__ = verify  # type: ignore[method-assign]
    rule.defers = True
    return rule


def rule_for(verifier: Verifier, batch: TreeBatch, probs: TargetProbs) -> Verifier:
    """The rule that applies to these distributions and trees: the verifier itself, unless `or_match` leaves them to
    another."""
    if not verifier.defers or (batch.depth and not probs.greedy):
        return verifier
    return Match() if probs.greedy else Undrafted()
