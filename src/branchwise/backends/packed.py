"""Matrix products over a few rows on a CPU, with weights stored in the order in which they are read.

A product over one row reads its weights once, as they are. For more rows a library first brings them into blocks, at
every call, which on some machines takes longer than the product itself. Weights that were packed once save that, for a
library or for a function of our own. They are a copy, so nothing is packed where memory is short, and nothing where a
short trial finds that it does not pay.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from branchwise.backends.native import PANEL, float_product, panels

ROWS = 4
"""of the trial, beside a single one"""
GAIN = 0.9
"""the share of the time of several rows from which on packing pays"""
MANY = 128
"""rows from which on bringing weights into blocks at a call hardly counts"""
TRIALS = 7
TRIAL_SECONDS = 0.1
"""of a matrix at least: turns of other processes on a core are shorter"""
TRIAL_OUT = 2048
"""outputs of the trial at most: what larger matrices take grows with them"""
TOLERANCE = 1e-2
"""of the largest number, within which two products are the same, bfloat16 included"""
SMALL = 1 << 16
"""weights of a matrix below which nothing is gained"""
SHARE = 0.5
"""of the free memory that packed weights may take"""

Product = Callable[[Tensor, Tensor | None], Tensor]
"""of rows (…, in) and a bias (out,), if there is one"""


class PackedMatrix:
    """A matrix (out, in) in both orders: oneDNN's for several rows."""

    def __init__(self, weight: Tensor) -> None:
        self._weight, self._version = weight, weight._version
        self._packed = self.pack(weight.detach())

    def pack(self, weight: Tensor) -> Tensor:
        found: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, ROWS)
        return found

    def __call__(self, rows: Tensor, bias: Tensor | None = None) -> Tensor:
        if self._weight._version != self._version or rows.dtype != self._weight.dtype:
            return functional.linear(rows, self._weight, bias)
        return self.multiply(rows, bias)

    def multiply(self, rows: Tensor, bias: Tensor | None) -> Tensor:
        if rows.numel() == rows.shape[-1]:
            return functional.linear(rows, self._weight, bias)
        found: Tensor = torch.ops.mkldnn._linear_pointwise(rows, self._packed, bias, "none", [], "")
        return found


class PanelMatrix(PackedMatrix):
    """The same for a function of our own, in which a row gives the same bits alone and among up to `MANY`."""

    def pack(self, weight: Tensor) -> Tensor:
        product = float_product()
        if product is None or weight.dtype != torch.float32:
            raise RuntimeError("There is no such product on this machine.")
        self._product, found = product, panels(weight)
        (self._size, self._width), self._room = weight.shape, len(found) * PANEL
        return found

    def multiply(self, rows: Tensor, bias: Tensor | None) -> Tensor:
        count = rows.numel() // self._width
        if count > MANY:
            return functional.linear(rows, self._weight, bias)
        rows = rows.contiguous()
        found = rows.new_empty((*rows.shape[:-1], self._room))
        places = rows.data_ptr(), self._packed.data_ptr(), found.data_ptr()
        self._product(*places, count, self._width, self._room)
        if self._room > self._size:
            found = found[..., : self._size].contiguous()
        return found if bias is None else found.add_(bias)


class PanelsForSeveral(PanelMatrix):
    """The same for several rows alone, where a library is faster with a single one."""

    def multiply(self, rows: Tensor, bias: Tensor | None) -> Tensor:
        if rows.numel() == rows.shape[-1]:
            return functional.linear(rows, self._weight, bias)
        return super().multiply(rows, bias)


WAYS = PanelMatrix, PackedMatrix
Way = type[PackedMatrix]


def matrix(weight: Tensor) -> Product:
    """The product with a matrix, packed if that pays."""
    if way := ways_to_pack([weight])[0]:
        return way(weight)

    def product(rows: Tensor, bias: Tensor | None) -> Tensor:
        return functional.linear(rows, weight, bias)

    return product


class PackedLayers:
    """The linear layers of a model on a CPU; as a context it lends the model its products."""

    def __init__(self, model: nn.Module) -> None:
        layers = [layer for layer in model.modules() if type(layer) is nn.Linear]
        ways = ways_to_pack([layer.weight for layer in layers])
        self._forwards = [(layer, _forward(layer, way)) for layer, way in zip(layers, ways, strict=True) if way]

    def install(self) -> None:
        """Lend the products for good."""
        for layer, forward in self._forwards:
            layer.__dict__["forward"] = forward  # found before the class's own; as an attribute it would take long

    @contextmanager
    def __call__(self) -> Iterator[None]:
        self.install()
        try:
            yield
        finally:
            for layer, _ in self._forwards:
                layer.__dict__.pop("forward", None)


def _forward(layer: nn.Linear, way: Way) -> Callable[[Tensor], Tensor]:
    product = way(layer.weight)
    return lambda rows: product(rows, layer.bias)


def ways_to_pack(weights: Sequence[Tensor]) -> list[Way | None]:
    """How each is packed: all in the way in which products with all of them are fastest, if there is room for them and
    this way can do it; None if not."""
    usable = [one.device.type == "cpu" and not one.is_inference() and one.numel() >= SMALL for one in weights]
    kinds = [(weight.shape, weight.dtype) for weight in weights]
    first = {kind: weight for kind, weight, can in zip(kinds, weights, usable, strict=True) if can}
    tried = {kind: _tried(weight.detach()) for kind, weight in first.items()}
    totals = {way: [0.0, 0.0] for way in (None, *WAYS)}
    for kind, can in zip(kinds, usable, strict=True):
        for way, total in totals.items() if can else ():
            times = tried[kind].get(way, tried[kind][None])
            total[:] = map(sum, zip(total, times, strict=True))
    best = min(WAYS, key=lambda way: totals[way][1])
    pays = totals[best][1] < GAIN * totals[None][1]
    works = [can and pays and best in tried[kind] for kind, can in zip(kinds, usable, strict=True)]
    if best is PanelMatrix and totals[best][0] > totals[None][0]:
        best = PanelsForSeveral
    chosen = [best if can else None for can in works]
    wanted = sum(weight.nbytes for weight, way in zip(weights, chosen, strict=True) if way)
    return chosen if wanted <= SHARE * free_memory() else [None] * len(weights)


@torch.inference_mode()
def _tried(weight: Tensor) -> dict[Way | None, list[float]]:
    """Seconds of products with a matrix over a single row and over several, as it is and packed in every way that works
    for it."""
    scale, weight = len(weight) / min(len(weight), TRIAL_OUT), weight[:TRIAL_OUT]
    rows = torch.linspace(-1, 1, ROWS * weight.shape[1], dtype=weight.dtype).view(ROWS, -1)
    wanted = functional.linear(rows, weight)
    products: dict[Way | None, Product] = {None: lambda rows, bias: functional.linear(rows, weight, bias)}
    for way in WAYS:
        try:
            packed = way(weight)
            found = packed(rows, None)
        except (RuntimeError, AttributeError):  # no such product for this type on this CPU
            continue
        if torch.allclose(wanted.float(), found.float(), atol=TOLERANCE * float(wanted.abs().max())):
            products[way] = packed
    seconds = {way: [math.inf, math.inf] for way in products}
    turns, end = 0, time.perf_counter() + TRIAL_SECONDS
    while turns < TRIALS or time.perf_counter() < end:
        turns += 1
        for number, given in enumerate((rows[:1], rows)):
            for key, product in products.items():  # in turn, so that what else runs meanwhile hinders all
                seconds[key][number] = min(seconds[key][number], scale * _seconds(product, given))
    return seconds


def _seconds(product: Product, rows: Tensor) -> float:
    start = time.perf_counter()
    product(rows, None)
    return time.perf_counter() - start


def free_memory() -> float:
    """Bytes of memory that could be taken; where the system does not tell, as much as one may wish."""
    try:
        known = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        return 1024 * float(known["MemAvailable"].removesuffix("kB"))
    except (OSError, KeyError, ValueError):
        return math.inf
