"""Which way to multiply with few bits is exact on this CPU, and which of these is fastest."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from branchwise.backends.int8 import LEAST, WAYS, IntMM, Numbers, Way, WholeNumbers
from branchwise.backends.trials import Times, copies, remembered, seconds

log = logging.getLogger(__name__)

TRIAL_ROWS = (1, 5, 16)
"""the numbers of rows in a trial: a plain step, and trees"""
TRIALS = 3
"""repetitions of a trial, of which the fastest counts"""
TRIAL_OUT = 2048
"""the most output rows of a trial; the time of larger matrices is extrapolated in proportion"""
EXACT_OUT = 256
"""the output rows whose sums are compared with exact ones"""
HOPELESS = 4.0
"""a way that takes this many times as long as the fastest is dropped after a short trial"""
TOLERANCE = 0.03
"""the relative error of a product that 8 bits for its rows may cause"""
LAST_BIT = 1e-6
"""the relative difference that another order of the scaling may cause"""

Shape = tuple[int, int]


class Trial(NamedTuple):
    """How long products with all matrices of a model took. All its ways are exact here; ways that are far slower are
    left out."""

    seconds: dict[type[Way] | None, float]
    """way -> seconds of passes over all of `TRIAL_ROWS` together; None stands for floating point"""

    @property
    def best(self) -> type[Way] | None:
        ways = [way for way in self.seconds if way is not None]
        return min(ways, key=self.seconds.__getitem__, default=None)

    @property
    def gain(self) -> float:
        """How many times as fast as floating point the best way is."""
        return 0.0 if self.best is None else self.seconds[None] / self.seconds[self.best]


def tried(shapes: Iterable[Shape], bits: int = 8, dtype: torch.dtype = torch.float32) -> Trial:
    """The times of all ways on matrices of these shapes, and of products in `dtype`."""
    return _tried(tuple(sorted(Counter(shapes).items())), bits, dtype, torch.get_num_threads())


@cache
def _tried(counts: tuple[tuple[Shape, int], ...], bits: int, dtype: torch.dtype, threads: int) -> Trial:
    names = {name_of(way): way for way in (None, *WAYS[bits])}

    def measure() -> Times:
        return {name_of(way): [spent] for way, spent in _measured(counts, bits, dtype).items()}

    kept = remembered(("quantised", counts, bits, str(dtype)), measure)
    small = [Numbers.of(weight, bits) for weight in _drawn(counts, EXACT_OUT).values()]
    found = {names[name]: spent for name, [spent] in kept.items()}
    return Trial({way: spent for way, spent in found.items() if way is None or _works(way, small)})


def _drawn(counts: Sequence[tuple[Shape, int]], most: int) -> dict[Shape, Tensor]:
    """Weights of these shapes, with at most so many outputs."""
    draw = torch.Generator().manual_seed(0)
    return {shape: torch.randn(min(shape[0], most), shape[1], generator=draw) for shape, _ in counts}


def _works(way: type[Way], matrices: Sequence[Numbers]) -> bool:
    """Whether a way is exact on this CPU."""
    try:
        return all(is_exact(way(matrix), matrix) for matrix in matrices)
    except (RuntimeError, AttributeError, ValueError):  # no such product, or none for several rows
        return False


def _measured(counts: Sequence[tuple[Shape, int]], bits: int, dtype: torch.dtype) -> dict[type[Way] | None, float]:
    weights = _drawn(counts, TRIAL_OUT)
    matrices = {shape: Numbers.of(weight, bits) for shape, weight in weights.items()}
    small = [Numbers.of(weight[:EXACT_OUT], bits) for weight in weights.values()]
    totals: dict[type[Way] | None, float] = dict.fromkeys((None, *_exact_ways(small, bits)), 0.0)
    for shape, count in counts:
        weight, matrix = weights[shape], matrices[shape]
        several = copies(matrix.nbytes, count)
        for way in totals:
            products = [
                _Float(weight.to(dtype, copy=True)) if way is None else way(matrix.copy()) for _ in range(several)
            ]
            totals[way] += count * shape[0] / len(weight) * _seconds(products, shape[1])
    log.info("Products take %s.", {name_of(way): f"{1e3 * spent:.1f} ms" for way, spent in totals.items()})
    return totals


def _exact_ways(matrices: Sequence[Numbers], bits: int) -> list[type[Way]]:
    """The ways that this torch has and that are exact on this CPU. Left out are ways that take several times as long as
    the fastest, and ways with fewer bits if their full version is exact."""
    alone: dict[type[Way], float] = {}
    for way in WAYS[bits]:
        try:
            alone[way] = sum(_seconds([way(one)], one.numbers.shape[1], TRIAL_ROWS[:1]) for one in matrices)
        except (RuntimeError, AttributeError, ValueError) as error:  # no such product in this torch or on this CPU
            log.info("%s is not used: %s", way.name, error)
    found: list[type[Way]] = []
    for way, spent in alone.items():
        if spent > HOPELESS * min(alone.values()) and way is not IntMM:
            log.info("%s is not used: it is slow", way.name)
        elif not any(issubclass(way, other) and way.levels < other.levels for other in found):
            if _works(way, matrices):
                found.append(way)
            else:
                log.info("%s is not used: rows depend on each other, or sums overflow", way.name)
    return found


def name_of(way: type[Way] | None) -> str:
    return "floating point" if way is None else way.name


class _Float:
    def __init__(self, weight: Tensor) -> None:
        self._weight = weight

    def __call__(self, rows: Tensor) -> Tensor:
        return functional.linear(rows.to(self._weight.dtype), self._weight)


@torch.inference_mode()
def is_exact(product: Way, matrix: Numbers) -> bool:
    """Whether rows give the same bits alone and among others, and whether the result is right: bit for bit, or
    approximately if a library rounds rows in its own way. The test includes the largest possible rows, in which sums of
    too few bits overflow."""
    draw = torch.Generator().manual_seed(1)
    width = matrix.numbers.shape[1]
    rows = torch.randn(max(TRIAL_ROWS), width, generator=draw)
    rows[0], rows[1] = 1.0, -1.0  # all as large as the largest
    rows[2] = matrix.numbers[0].float().sign() + 0.0  # the largest sum
    rows[3] *= 1e-6
    found = product(rows)
    for count in range(1, len(rows)):
        if not torch.equal(product(rows[:count].clone()), found[:count]):
            return False
    if not torch.equal(torch.cat([product(row[None].clone()) for row in rows]), found):
        return False
    if isinstance(product, WholeNumbers):
        return same_sums(found, slow_product(rows, matrix, product.levels))
    wanted = rows @ matrix.weight.t()
    return bool(((found - wanted).norm(dim=1) <= TOLERANCE * wanted.norm(dim=1) + TOLERANCE * rows.norm(dim=1)).all())


def slow_product(rows: Tensor, matrix: Numbers, levels: int) -> Tensor:
    """The result that every subclass of `WholeNumbers` must give: sums of whole numbers are exact in float64."""
    scale = rows.abs().amax(dim=1, keepdim=True).clamp_min(LEAST) / levels
    sums = (rows / scale).round().double() @ matrix.numbers.double().t()
    return sums.float() * matrix.scale[:, 0] * scale


def same_sums(found: Tensor, wanted: Tensor) -> bool:
    """Whether both come from the same sums: another order of the scaling changes the last bit, an overflow more."""
    largest = wanted.abs().amax(dim=1, keepdim=True)
    return bool(((found - wanted).abs() <= LAST_BIT * largest).all())


def _seconds(products: Sequence[Any], width: int, rows_of: Sequence[int] = TRIAL_ROWS) -> float:
    total = 0.0
    for count in rows_of:
        rows = torch.linspace(-1, 1, count * width).view(count, width)
        products[0](rows.clone())
        total += min(seconds(products, rows) for _ in range(TRIALS))
    return total
