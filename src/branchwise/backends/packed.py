"""Matrix products over a few rows on a CPU, with weights stored in the order in which they are read.

A product over one row reads its weights once, as they are. For more rows a library first brings them into blocks, at
every call, which on some machines takes longer than the product itself. Weights that were packed once save that. They
are a copy, so nothing is packed where memory is short, and nothing where a short trial finds that it does not pay.
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

ROWS = 4
"""of the trial"""
GAIN = 0.9
"""the share of the time from which on packing pays"""
TRIALS = 7
TOLERANCE = 1e-2
"""of the largest number, within which two products are the same, bfloat16 included"""
SMALL = 1 << 16
"""weights of a matrix below which nothing is gained"""
SHARE = 0.5
"""of the free memory that packed weights may take"""

Product = Callable[[Tensor, Tensor | None], Tensor]
"""of rows (…, in) and a bias (out,), if there is one"""


class PackedMatrix:
    """A matrix (out, in) in both orders."""

    def __init__(self, weight: Tensor) -> None:
        self._weight, self._version = weight, weight._version
        self._packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), ROWS)

    def __call__(self, rows: Tensor, bias: Tensor | None = None) -> Tensor:
        single = rows.numel() == rows.shape[-1]
        if single or self._weight._version != self._version or rows.dtype != self._weight.dtype:
            return functional.linear(rows, self._weight, bias)
        found: Tensor = torch.ops.mkldnn._linear_pointwise(rows, self._packed, bias, "none", [], "")
        return found


def matrix(weight: Tensor) -> Product:
    """The product with a matrix, packed if that pays."""
    if worth_packing([weight])[0]:
        return PackedMatrix(weight)

    def product(rows: Tensor, bias: Tensor | None) -> Tensor:
        return functional.linear(rows, weight, bias)

    return product


class PackedLayers:
    """The linear layers of a model on a CPU; as a context it lends the model its products."""

    def __init__(self, model: nn.Module) -> None:
        layers = [layer for layer in model.modules() if type(layer) is nn.Linear]
        chosen = worth_packing([layer.weight for layer in layers])
        self._forwards = [(layer, _forward(layer)) for layer, worth in zip(layers, chosen, strict=True) if worth]

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


def _forward(layer: nn.Linear) -> Callable[[Tensor], Tensor]:
    product = PackedMatrix(layer.weight)
    return lambda rows: product(rows, layer.bias)


def worth_packing(weights: Sequence[Tensor]) -> list[bool]:
    """Whose products are faster if they are packed, as far as there is room for all of these."""
    if not torch.backends.mkldnn.is_available():
        return [False] * len(weights)
    faster: dict[tuple[torch.Size, torch.dtype], bool] = {}
    for weight in weights:
        kind = weight.shape, weight.dtype
        if kind not in faster:
            usable = weight.device.type == "cpu" and not weight.is_inference() and weight.numel() >= SMALL
            faster[kind] = usable and _faster(weight.detach())
    chosen = [faster[weight.shape, weight.dtype] for weight in weights]
    wanted = sum(weight.nbytes for weight, worth in zip(weights, chosen, strict=True) if worth)
    return chosen if wanted <= SHARE * free_memory() else [False] * len(weights)


@torch.inference_mode()
def _faster(weight: Tensor) -> bool:
    rows = torch.linspace(-1, 1, ROWS * weight.shape[1], dtype=weight.dtype).view(ROWS, -1)
    try:
        packed = torch.ops.mkldnn._reorder_linear_weight(weight, ROWS)
        ways: list[Callable[[], Tensor]] = [
            lambda: functional.linear(rows, weight),
            lambda: torch.ops.mkldnn._linear_pointwise(rows, packed, None, "none", [], ""),
        ]
        wanted, found = (way().float() for way in ways)
    except RuntimeError:  # no such product for this type on this CPU
        return False
    if not torch.allclose(wanted, found, atol=TOLERANCE * float(wanted.abs().max())):
        return False
    times = [min(_seconds(way) for _ in range(TRIALS)) for way in ways]
    return times[1] < GAIN * times[0]


def _seconds(way: Callable[[], Tensor]) -> float:
    start = time.perf_counter()
    way()
    return time.perf_counter() - start


def free_memory() -> float:
    """Bytes of memory that could be taken; where the system does not tell, as much as one may wish."""
    try:
        known = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        return 1024 * float(known["MemAvailable"].removesuffix("kB"))
    except (OSError, KeyError, ValueError):
        return math.inf
