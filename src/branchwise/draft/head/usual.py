"""The default tree of a head: what pays on the device that it runs on.

On a host every row of a pass and every level of a draft takes time. So the tree is narrow, and as many of its nodes are
kept as pay (`paced.py`). On a GPU a wide tree costs little for one text, and copies of earlier text cost next to
nothing; for many texts together smaller trees pay (`control.ladder`). On a GPU a level costs as much as many nodes, so
trees are wider than deep: the fewer drafted tokens are accepted, as in sampled texts, the flatter is the tree that
pays.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from branchwise.draft.policies.topk import TopK
from branchwise.errors import UsageError


class Usual(NamedTuple):
    tree: TopK
    table: int
    """number of tokens that can be proposed besides those of the prompt: their rows take half of a level's time"""
    copies: int
    """most tokens of a tree that are copied from earlier text"""
    smaller: tuple[TopK, ...] = ()
    """smaller trees that may pay better than `tree`, the smallest first"""


SMALLER = TopK(7, depth=2, width=4), TopK(15, depth=2, width=6), TopK(31, depth=3, width=8)

HOST = Usual(TopK(8, depth=5, width=2), table=8192, copies=0)
DEVICE = Usual(TopK(63, depth=5, width=8), table=16_384, copies=15, smaller=SMALLER)


def usual_on(device: torch.device) -> Usual:
    return HOST if device.type == "cpu" else DEVICE


def check_options(table: int | None, trim: int | None, temperature: float | None, copies: int | None) -> None:
    """Refuse options of a head that make no sense."""
    if copies is not None and copies < 0:
        raise UsageError(f"A head copies 0 tokens or more, not copies={copies}.")
    if table is not None and trim is not None:
        raise UsageError("table=N takes tokens in the order of the head, trim=N as they were counted; name one.")
    for name, count in (("table", table), ("trim", trim)):
        if count is not None and count < 1:
            raise UsageError(f"A head proposes at least 1 token, not {name}={count}.")
    if temperature is not None and not temperature > 0:
        raise UsageError(f"A head draws at a temperature above 0, not {temperature}.")
