"""Copies in the tree of a head: the tokens that followed an earlier occurrence of the last tokens of a text.

Models quote their prompt, and themselves. The branch that is copied from an earlier place (Saxena, "Prompt Lookup
Decoding", 2023) competes by its probability with the nodes that the head proposes. So it is long if many tokens agree,
and the tree is the head's alone if none do. The branch needs no pass, so it may be deeper than the head drafts.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

HITS = (0.2, 0.5, 0.6, 0.7, 0.75, 0.8, 0.85, 0.85, 0.9, 0.9, 0.9, 0.95)
"""Assumed probabilities of the next token of a copy, by the number of tokens before it that agree (1, 2, …); the last
one is for longer agreements too. They decide which nodes are tried, and never what a text says."""
REACH = len(HITS)
NOTHING = -1.0e30
"""the value of a missing node"""


class Copy(NamedTuple):
    """A copied branch for each text, (batch, tokens) each."""

    tokens: Tensor
    values: Tensor
    """log-probabilities of its paths"""


Nodes = tuple[Tensor, Tensor, Tensor]
"""all proposed nodes of trees, (batch, nodes) each: log-probabilities of their paths, tokens, and parents, which are
indices of other proposed nodes or -1 for the root"""


def copied(history: Tensor, lengths: Tensor, count: int) -> Copy:
    """The `count` tokens after an earlier occurrence of the end of each text. The first `lengths` tokens of `history`
    (batch, cells) are the texts. The place with the longest agreement is copied, of several the last one. A copy that
    reaches the end of its text continues with its own first tokens."""
    device, cells = history.device, history.shape[1]
    places, back, steps = (torch.arange(number, device=device) for number in (cells, REACH, count))
    end = lengths[:, None].long() - 1
    lately = history.gather(1, (end - back).clamp_min(0))  # the last token first; nothing agrees beyond the first token
    earlier = functional.pad(history, (REACH - 1, 0), value=-2).unfold(1, REACH, 1).flip(2)
    agreeing = (earlier == lately[:, None]).cumprod(dim=2).sum(dim=2)
    agreeing = torch.where(places < end, agreeing, 0)
    best = (agreeing * cells + places).argmax(dim=1, keepdim=True)
    agreed = agreeing.gather(1, best)
    tokens = history.gather(1, (best + 1 + steps % (end - best).clamp_min(1)).clamp_max(cells - 1))
    hits = log_hits(device)[(agreed + steps).clamp_max(REACH)]
    return Copy(tokens, torch.where(agreed > 0, hits.cumsum(dim=1), NOTHING))


def with_copy(proposed: Nodes, copy: Copy, depth: int) -> Nodes:
    """The proposed nodes, at most `depth` deep, and after them those of a copy. If a node of the copy is proposed
    already, it gets the higher of both values, and the copy's own node is missing."""
    values, tokens, parents = proposed
    count, device = copy.tokens.shape[1], values.device
    own_values = copy.values.clone()
    own_parents = (values.shape[1] - 1 + torch.arange(count, device=device)).repeat(len(values), 1)
    at = torch.full_like(parents[:, :1], -1)  # the last node of the copy that is proposed already
    shared = torch.ones_like(at, dtype=torch.bool)  # whether all nodes of the copy so far are proposed already
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
    """(1 + reach,): the logarithms of `HITS`, by the number of tokens that agree, from 0 on."""
    return torch.tensor([1.0, *HITS], device=device).log()
