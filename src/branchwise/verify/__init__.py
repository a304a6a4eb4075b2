"""Verifiers: rules that turn a drafted tree and the target's distributions into an accepted path and one more token.

Words used in every file here:

    root      node 0, the last emitted token
    path      nodes from the root downwards; the accepted path always holds the root
    p(.|u)    the target's distribution after node u, all warping done (`TargetProbs.at`)
    q(.|u)    the distribution that the children of u were really drawn from (`DraftTree.q`)
    residual  the distribution of the token after a rejection: max(p - q, 0), with factors before p and q that depend
              on the rule; often not normalised (`left_of`)
    coin      a random yes or no; the coins of a step are numbered and independent of each other (`Chance.first`)
    odds      the probability that a coin succeeds, between 0 and 1
    lazy      work as on the host: compute only the rows that are read, and end as soon as the verdict is known
    together  work as on a device: compute the rows of all nodes at once (`TargetProbs` says when)

A verifier emits the tokens of the accepted path below the root and one token more. It is lossless if the text that it
emits step after step has the target's own distribution. Which rule achieves that depends on how the tree was drawn, so
every verifier names the draws that it accepts, and a wrong pairing is refused before anything runs.

Verifiers are batched tensor programs: loops of fixed length, masks in place of branches on drawn values, and all
randomness from a `Chance`. So a whole batch needs one sync with the host, when the engine reads the verdicts.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from branchwise.core.batch import TABLES, TreeBatch
from branchwise.core.rng import Chance
from branchwise.core.rows import row_sum
from branchwise.core.target_probs import TargetProbs
from branchwise.core.tree import DraftTree, Draw
from branchwise.errors import PairingError
from branchwise.registry import Registry


@dataclass(frozen=True)
class Verdict:
    """What one sequence keeps of its tree."""

    path: tuple[int, ...]
    """the accepted nodes, root first: the rows of the KV cache to keep"""
    token: int
    """the token after the path, which is the next root"""
    tokens: tuple[int, ...] | None = field(default=None, compare=False)
    """the tokens of the path below the root, if only the device had them"""

    def kept_of(self, tree: DraftTree) -> list[int]:
        """The tokens of the path below the root."""
        if self.tokens is not None:
            return list(self.tokens)
        return tree.tokens[list(self.path[1:])].tolist() if len(self.path) > 1 else []


@dataclass(eq=False)
class Verdicts:
    """The verdicts of a batch while they are still on the device."""

    paths: Tensor
    """(batch, depth + 1) int64: the accepted nodes, root first, padded with -1"""
    tokens: Tensor
    """(batch,) int64"""
    _fetched: tuple[Tensor, torch.cuda.Event] | None = None

    @classmethod
    def written(cls, rows: Tensor, *, with_tokens: bool = False) -> Verdicts:
        """Verdicts from their `rows`, which may also have the tokens of the accepted nodes."""
        longest = (rows.shape[1] - 1) // (2 if with_tokens else 1)
        verdicts = cls(rows[:, :longest], rows[:, longest])
        verdicts.rows = rows
        return verdicts

    @cached_property
    def rows(self) -> Tensor:
        """(batch, depth + 2): `paths` and `tokens` side by side, so that one copy brings them to the host."""
        return torch.cat([self.paths, self.tokens[:, None]], dim=1)

    def with_tokens(self, tokens: Tensor) -> Verdicts:
        """The same verdicts with the tokens of the accepted nodes, given the tokens (batch, nodes) of the trees."""
        if self.rows.shape[1] > self.paths.shape[1] + 1:
            return self
        written = torch.cat([self.rows, tokens.gather(1, self.paths.clamp_min(0))], dim=1)
        return Verdicts.written(written, with_tokens=True)

    def fetch(self) -> None:
        """Start the copy to the host; kernels that are launched later do not delay it."""
        if self.rows.device.type == "cuda":
            on_their_way, over = self.rows.to("cpu", non_blocking=True), torch.cuda.Event()
            over.record(torch.cuda.current_stream(self.rows.device))
            self._fetched = on_their_way, over

    def read(self) -> list[Verdict]:
        """The verdicts on the host; the one sync of a step."""
        rows = self.rows
        if self._fetched is not None:
            rows, over = self._fetched
            over.synchronize()
        longest, verdicts = self.paths.shape[1], []
        for row in rows.tolist():
            path = tuple(node for node in row[:longest] if node >= 0)
            tokens = tuple(row[longest + 2 : longest + 1 + len(path)]) if len(row) > longest + 1 else None
            verdicts.append(Verdict(path, row[longest], tokens))
        return verdicts


STRIDE = 4096
"""The numbers of coins that are reserved for a level of a tree, or for the nodes of a path. A coin is numbered by its
place in the tree, never by the size of the batch, so a sequence gets the same verdict alone and in a batch."""


class Verifier(ABC):
    """A rule, and the kinds of draws for which it is lossless."""

    name: str
    accepts: frozenset[Draw]
    lossless = True
    """whether the output has the target's distribution; a rule that changes the distribution has `lossy` in its name"""
    reads: tuple[str, ...] = TABLES
    """the tables of a batch that the rule reads; a recorded verdict copies only these to the device"""
    defers = False
    """whether the rule leaves greedy distributions and trees without drafted nodes to other rules (`or_match`)"""

    @abstractmethod
    def __call__(self, batch: TreeBatch, probs: TargetProbs, chance: Chance) -> Verdicts: ...


VERIFIERS = Registry(
    "verifier",
    {
        "auto": "branchwise.verify.auto:Auto",
        "match": "branchwise.verify.match:Match",
        "token": "branchwise.verify.token:Token",
        "block": "branchwise.verify.block:Block",
        "gbv": "branchwise.verify.gbv:GBV",
        "lambda-gbv": "branchwise.verify.gbv:LambdaGBV",
        "cascade": "branchwise.verify.cascade:Cascade",
        "mss": "branchwise.verify.recursive:MSS",
        "rrs": "branchwise.verify.recursive:RRS",
        "traversal": "branchwise.verify.recursive:Traversal",
        "k-seq": "branchwise.verify.spectr:KSeq",
        "lossy-longest": "branchwise.verify.longest:Longest",
    },
)


def left_of(probs: TargetProbs, p: Tensor, q: Tensor, share: Tensor | None = None) -> Tensor:
    """The residual max(p - share q, 0) of p and q (…, vocabulary), not normalised; without a `share` (…,) it is 1.

    A row in which nothing is left becomes p itself: only rounding can lead to a draw from such a row.
    """
    left = torch.sub(p, q if share is None else q * share[..., None].to(q.dtype)).clamp_min_(0)
    empty = row_sum(left) == 0
    if probs.lazy and not bool(empty.any()):
        return left
    return torch.where(empty[..., None], p, left)


def check_pairing(verifier: Verifier, draw: Draw, drafter: str) -> None:
    """Refuse a verifier that would not be lossless for the way a drafter draws."""
    if draw in verifier.accepts:
        return
    fitting = [name for name in VERIFIERS if draw in VERIFIERS.find(name).accepts]
    raise PairingError(
        f"Verifier {verifier.name!r} is not exact for drafter {drafter!r}, whose trees are drawn {draw.value}. "
        f"Verifiers that fit: {', '.join(fitting)}."
    )
