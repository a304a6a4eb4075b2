"""Copies in the tree of a head: what followed the last tokens of a text where the same tokens stood before.

Models quote their prompt, and themselves. The branch that an earlier place gives (Saxena, "Prompt Lookup Decoding",
2023) competes with what the head proposes by its probability, so that it is long where many tokens agree and leaves the
tree alone where none do. It needs no pass, so it may be deeper than the head drafts.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

HITS = (0.2, 0.5, 0.6, 0.7, 0.75, 0.8, 0.85, 0.85, 0.9, 0.9, 0.9, 0.95)
"""how probable the next token of a copy is taken to be, by how many tokens before it agree; the last number is for all
that is longer. They decide which nodes are tried, and never what a text says"""
REACH = len(HITS)
NOTHING = -1.0e30
"""the value of a node that is not there"""


class Copy(NamedTuple):
    """A branch for each text, (batch, tokens) each."""

    tokens: Tensor
    values: Tensor
    """log-probabilities of its paths"""


Nodes = tuple[Tensor, Tensor, Tensor]
"""all nodes that may join a tree, (batch, nodes) each: log-probabilities of their paths, tokens, and parents, which are
numbers of other such nodes or -1 for the root"""


def copied(history: Tensor, lengths: Tensor, count: int) -> Copy:
    """So many tokens that followed the end of texts earlier. Of `history` (batch, cells) the first `lengths` count; of
    several places that agree as far as any, the last one is copied. A copy that comes to the end of its text goes on
    with itself."""
    device, cells = history.device, history.shape[1]
    places, back, steps = (torch.arange(number, device=device) for number in (cells, REACH, count))
    end = lengths[:, None].long() - 1
    lately = history.gather(1, (end - back).clamp_min(0))  # the last token first; before the first no place agrees
    earlier = functional.pad(history, (REACH - 1, 0), value=-2).unfold(1, REACH, 1).flip(2)
    agreeing = (earlier == lately[:, None]).cumprod(dim=2).sum(dim=2)
    agreeing = torch.where(places < end, agreeing, 0)
    best = (agreeing * cells + places).argmax(dim=1, keepdim=True)
    agreed = agreeing.gather(1, best)
    tokens = history.gather(1, (best + 1 + steps % (end - best).clamp_min(1)).clamp_max(cells - 1))
    hits = log_hits(device)[(agreed + steps).clamp_max(REACH)]
    return Copy(tokens, torch.where(agreed > 0, hits.cumsum(dim=1), NOTHING))


def with_copy(proposed: Nodes, copy: Copy, depth: int) -> Nodes:
    """Proposed nodes, at most `depth` deep, and behind them those of a copy. As far as these are proposed already, they
    are as probable as the likelier of both says."""
    values, tokens, parents = proposed
    count, device = copy.tokens.shape[1], values.device
    own_values = copy.values.clone()
    own_parents = (values.shape[1] - 1 + torch.arange(count, device=device)).repeat(len(values), 1)
    at = torch.full_like(parents[:, :1], -1)  # the last node of the copy that is proposed
    shared = torch.ones_like(at, dtype=torch.bool)  # whether all nodes up to here are
    for step in range(min(depth + 1, count)):
        this = slice(step, step + 1)
        same = shared & (parents == at) & (tokens == copy.tokens[:, this])
        found = same.any(dim=1, keepdim=True)
        values = torch.where(same, torch.maximum(values, copy.values[:, this]), values)
        own_parents[:, this] = torch.where(shared, at, own_parents[:, this])
        own_values[:, this] = torch.where(found, NOTHING, own_values[:, this])
        at, shared = torch.where(found, same.long().argmax(dim=1, keepdim=True), at), found
    return (
        torch.cat([values, own_values], dim=1),
        torch.cat([tokens, copy.tokens], dim=1),
        torch.cat([parents, own_parents], dim=1),
    )


@cache
def log_hits(device: torch.device) -> Tensor:
    """(1 + reach,): by how many tokens agree."""
    return torch.tensor([1.0, *HITS], device=device).log()
