"""Verifiers: rules that turn a drafted tree and the target's distributions into an accepted path and one more token.

Words used in every file here:

    root    node 0, the last emitted token
    path    nodes from the root downwards; the accepted path always holds the root
    p(.|u)  the target's distribution after node u, all warping done (`TargetProbs.at`)
    q(.|u)  the distribution that the children of u were really drawn from (`DraftTree.q`)

A verifier emits the tokens of the accepted path below the root and one token more. It is lossless when the text it
emits step after step has the target's own distribution. Which rule achieves that depends on how the tree was drawn, so
every verifier names the draws it accepts, and a wrong pairing is refused before anything runs.

Verifiers are batched tensor programs: loops of fixed length, masks in place of branches on drawn values, and all
randomness from a `Chance`. One host sync then serves a whole batch, when the engine reads the verdicts.
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
    """the accepted nodes, root first: the cache rows to keep"""
    token: int
    """the token after the path: the next root"""
    tokens: tuple[int, ...] | None = field(default=None, compare=False)
    """the tokens of the path below the root, where only the device knew them"""

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
        """Verdicts from their `rows`, which may hold the tokens of the nodes as well."""
        longest = (rows.shape[1] - 1) // (2 if with_tokens else 1)
        verdicts = cls(rows[:, :longest], rows[:, longest])
        verdicts.rows = rows
        return verdicts

    @cached_property
    def rows(self) -> Tensor:
        """(batch, depth + 2): both side by side, so that one copy brings them over."""
        return torch.cat([self.paths, self.tokens[:, None]], dim=1)

    def with_tokens(self, tokens: Tensor) -> Verdicts:
        """The same with the tokens of the nodes, given those of whole trees (batch, nodes)."""
        if self.rows.shape[1] > self.paths.shape[1] + 1:
            return self
        written = torch.cat([self.rows, tokens.gather(1, self.paths.clamp_min(0))], dim=1)
        return Verdicts.written(written, with_tokens=True)

    def fetch(self) -> None:
        """Begin to bring them to the host: what is launched from now on does not delay them."""
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
"""Coins are numbered by places in a tree, at most so many to a level or a stage, and never by the size of a batch: a
sequence gets the same verdict alone as among others."""


class Verifier(ABC):
    """A rule, and the draws for which it is lossless."""

    name: str
    accepts: frozenset[Draw]
    lossless = True
    """whether the output distribution is the target's; a rule that changes it has `lossy` in its name"""
    reads: tuple[str, ...] = TABLES
    """the tables of a batch that it reads: a recorded verdict copies no others to the device"""
    defers = False
    """whether it leaves greedy probabilities, and trees that draft nothing, to other rules; see `or_match`"""

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
    """What is still wanted of p (…, vocabulary) after it was served from q: max(p - share q, 0), not normalised.

    Where nothing is left, p itself: such a distribution is never asked for, except by rounding.
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
