"""Timing of products as they run in a pass: with weights that come from memory, because other layers have filled the
caches since."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from torch import Tensor

CACHES = 1 << 26
"""bytes of weights that exceed the caches, so that little of them stays cached"""


def copies(nbytes: int, count: int) -> int:
    """How many of `count` matrices of `nbytes` bytes must take turns, so that none is cached when its turn comes."""
    return min(count, -(-CACHES // nbytes))


def seconds(products: Sequence[Callable[[Tensor], object]], rows: Tensor) -> float:
    """The mean seconds of these products, computed one after the other."""
    start = time.perf_counter()
    for product in products:
        product(rows)
    return (time.perf_counter() - start) / len(products)
