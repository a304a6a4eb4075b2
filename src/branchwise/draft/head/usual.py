"""What a head drafts where nobody says which tree: what pays on the device that it runs on.

On a host every row makes a pass longer, and so does every level of a draft: a narrow tree, of which as many nodes are
kept as pay (`paced.py`). On a GPU a wide tree costs little for one text, and copies of what stood before cost next to
nothing; for many texts together smaller trees pay (`control.ladder`). There a level costs as much as many nodes do, so
trees are wider than deep: the less comes true, as where tokens are drawn, the flatter is the one that pays.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from branchwise.draft.policies.topk import TopK
from branchwise.errors import UsageError


class Usual(NamedTuple):
    tree: TopK
    table: int
    """tokens that may be proposed besides those of the prompt: half of a level's time goes to their rows"""
    copies: int
    smaller: tuple[TopK, ...] = ()
    """trees that may pay better than that one, the smallest first"""


SMALLER = TopK(7, depth=2, width=4), TopK(15, depth=2, width=6), TopK(31, depth=3, width=8)

HOST = Usual(TopK(8, depth=5, width=2), table=8192, copies=0)
DEVICE = Usual(TopK(63, depth=5, width=8), table=16_384, copies=15, smaller=SMALLER)


def usual_on(device: torch.device) -> Usual:
    return HOST if device.type == "cpu" else DEVICE


def check_options(table: int | None, trim: int | None, temperature: float | None, copies: int | None) -> None:
    """What a user may say of a head's drafts."""
    if copies is not None and copies < 0:
        raise UsageError(f"A head copies 0 tokens or more, not copies={copies}.")
    if table is not None and trim is not None:
        raise UsageError("table=N takes tokens in the order of the head, trim=N as they were counted; name one.")
    for name, count in (("table", table), ("trim", trim)):
        if count is not None and count < 1:
            raise UsageError(f"A head proposes at least 1 token, not {name}={count}.")
    if temperature is not None and not temperature > 0:
        raise UsageError(f"A head draws at a temperature above 0, not {temperature}.")
