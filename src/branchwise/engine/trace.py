"""A record of a step: the tree that was scored, what the target thought of every node, and what was kept.

It is made for requests that ask for it (`Request.trace`). Like log-probabilities, the numbers are computed on the
device and come to the host with the verdicts, so a step on a GPU never waits for them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from branchwise.core.batch import TreeBatch
from branchwise.core.tree import DraftTree
from branchwise.verify import Verdict, Verdicts

PHASE = "trace"
"""the clock's phase for tracing, whose time is no part of the traced step"""


class Node(NamedTuple):
    parent: int
    """-1 for the root"""
    token: int
    source: str
    """the drafter that proposed it; empty for the root"""
    p: float | None
    """the probability of its token after its parent, under the unwarped model; None for the root"""
    q: float | None
    """the probability with which it was drawn, if it was drawn"""


@dataclass(frozen=True)
class StepTrace:
    """One step of one text."""

    nodes: list[Node]
    path: list[int]
    """the accepted nodes, root first"""
    token: int
    """the target's own token at the end of the path"""
    p: float
    """its probability under the unwarped model"""
    emitted: int
    """tokens that the text got; fewer than were accepted if it ended"""
    seconds: Mapping[str, float]
    """seconds by phase"""
    batch: int
    """texts that took part in the step"""


class Seen(NamedTuple):
    """The trees of a batch and what the target thinks of them; on their way to the host."""

    tokens: Tensor  # (batch, nodes)
    parents: Tensor  # (batch, nodes): -1 for roots and padding
    p: Tensor  # (batch, nodes)
    q: Tensor | None
    own: Tensor  # (batch,): the probability of the verdict's token


def see(batch: TreeBatch, logits: Tensor, found: Verdicts) -> Seen:
    """`logits` (batch, nodes, vocabulary) of the unwarped model."""
    parents, tokens = batch.parents, batch.tokens
    above, rows = parents.clamp_min(0), torch.arange(len(parents), device=parents.device)
    total = logits.float().logsumexp(dim=-1)  # (batch, nodes)
    p = (logits[rows[:, None], above, tokens].float() - total.gather(1, above)).exp()
    last = found.paths.gather(1, (found.paths >= 0).sum(dim=1, keepdim=True) - 1)[:, 0]
    own = (logits[rows, last, found.tokens].float() - total[rows, last]).exp()
    q = None if batch.q is None else batch.q[rows[:, None], above.clamp_max(batch.q.shape[1] - 1), tokens]
    return Seen(host(tokens), host(parents), host(p), None if q is None else host(q), host(own))


def host(part: Tensor) -> Tensor:
    return part.to("cpu", non_blocking=True)


class TraceRow(NamedTuple):
    """One tree of `Seen`, read on the host."""

    tokens: list[int]
    parents: list[int]
    p: list[float]
    q: list[float] | None
    own: float


def read(seen: Seen) -> list[TraceRow]:
    q = seen.q.tolist() if seen.q is not None else [None] * len(seen.tokens)
    rows = zip(seen.tokens.tolist(), seen.parents.tolist(), seen.p.tolist(), q, seen.own.tolist(), strict=True)
    return [TraceRow(*row) for row in rows]


def trace_of(
    row: TraceRow,
    tree: DraftTree,
    verdict: Verdict,
    emitted: int,
    drafter: str,
    seconds: Mapping[str, float],
    batch: int,
) -> StepTrace:
    """`drafter` is the source of nodes whose tree names none. A tree that was laid out on a device may have padding
    between its nodes, which is left out."""
    kept = [0, *(node for node in range(1, len(tree)) if row.parents[node] >= 0)]
    places: dict[int, int] = {node: place for place, node in enumerate(kept)}
    sources: Sequence[str] = tree.sources or ["", *[drafter] * (len(tree) - 1)]
    nodes = [Node(-1, row.tokens[0], "", None, None)]
    for node in kept[1:]:
        q = None if row.q is None else row.q[node]
        nodes.append(Node(places[row.parents[node]], row.tokens[node], sources[node], row.p[node], q))
    path = [places[node] for node in verdict.path]
    return StepTrace(nodes, path, verdict.token, row.own, emitted, seconds, batch)
