"""How long products take in a pass, where their weights come from memory: since a layer was computed last, others have
taken the caches."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from torch import Tensor

CACHES = 1 << 26
"""bytes of weights that no cache holds, or of which little is left in it"""


def copies(nbytes: int, count: int) -> int:
    """How many of `count` matrices of so many bytes must take turns, so that none is in a cache when its turn comes."""
    return min(count, -(-CACHES // nbytes))


def seconds(products: Sequence[Callable[[Tensor], object]], rows: Tensor) -> float:
    """Of one of these products, which are computed one after the other."""
    start = time.perf_counter()
    for product in products:
        product(rows)
    return (time.perf_counter() - start) / len(products)
