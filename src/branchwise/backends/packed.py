"""Matrix products over a few rows on a CPU, with weights packed once into the order in which they are read.

A product over one row reads its weights once, as they are. For more rows a library first packs them into blocks, at
every call, which on some machines takes longer than the product itself. Weights that are packed at load save that, for
a library or for a function of our own. They are a copy, so nothing is packed if memory is short or if a short trial
finds that it does not pay.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from branchwise.backends.native import PANEL, float_product, panels
from branchwise.backends.native.layer import InMemory, Matrix
from branchwise.backends.trials import Times, copies, remembered, seconds

ROWS = 4
"""the number of rows in a trial, besides a single row"""
GAIN = 0.9
"""packing pays if a product over several rows takes less than this share of the library's time"""
SPARED = 1.25
"""how many times as long as the library's our own product with a single row may take, if it makes a layer one call:
that saves the overhead between its products"""
MANY = 128
"""the number of rows from which on packing weights at every call hardly counts"""
TRIALS = 5
"""repetitions of a trial, of which the fastest counts: other processes may have taken the core in the others"""
TRIAL_OUT = 2048
"""the most outputs of a trial; the time of larger matrices is extrapolated in proportion"""
TOLERANCE = 1e-2
"""the difference, relative to the largest number, up to which two products count as the same, bfloat16 included"""
SMALL = 1 << 16
"""the number of weights of a matrix below which packing gains nothing"""
SHARE = 0.5
"""the share of the free memory that packed weights may take"""

Product = Callable[[Tensor, Tensor | None], Tensor]
"""a function of rows (…, in) and a bias (out,) or None"""


def stacked(weights: Sequence[Tensor]) -> Tensor:
    return weights[0] if len(weights) == 1 else torch.cat(tuple(weights))


def linear(rows: Tensor, weights: Sequence[Tensor], bias: Tensor | None = None) -> Tensor:
    """(…, outputs of all weights side by side)."""
    if len(weights) == 1:
        return functional.linear(rows, weights[0], bias)
    found = torch.cat([functional.linear(rows, weight) for weight in weights], dim=-1)
    return found if bias is None else found.add_(bias)


class PackedMatrix:
    """A matrix (out, in), or several stacked, kept plain for a single row and packed by oneDNN for several."""

    def __init__(self, *weights: Tensor) -> None:
        self._weights, self._versions = weights, [weight._version for weight in weights]
        self._packed = self.pack(stacked([weight.detach() for weight in weights]))

    def pack(self, weight: Tensor) -> Tensor:
        found: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, ROWS)
        return found

    def __call__(self, rows: Tensor, bias: Tensor | None = None) -> Tensor:
        changed = any(one._version != before for one, before in zip(self._weights, self._versions, strict=True))
        return self.plain(rows, bias) if changed or rows.dtype != self._weights[0].dtype else self.multiply(rows, bias)

    def plain(self, rows: Tensor, bias: Tensor | None = None) -> Tensor:
        """The product with the plain weights."""
        return linear(rows, self._weights, bias)

    def multiply(self, rows: Tensor, bias: Tensor | None) -> Tensor:
        if rows.numel() == rows.shape[-1]:
            return self.plain(rows, bias)
        found: Tensor = torch.ops.mkldnn._linear_pointwise(rows, self._packed, bias, "none", [], "")
        return found


class PanelMatrix(PackedMatrix, InMemory):
    """A matrix packed for our own function. A row gives the same bits alone and among up to `MANY`, if the compiler
    rounds sums alike however many rows there are (`native.ALIKE`)."""

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
            return self.plain(rows, bias)
        rows = rows.contiguous()
        found = rows.new_empty((*rows.shape[:-1], self._room))
        places = rows.data_ptr(), self._packed.data_ptr(), found.data_ptr()
        self._product(*places, count, self._width, self._room)
        if self._room > self._size:
            found = found[..., : self._size].contiguous()
        return found if bias is None else found.add_(bias)

    def matrix(self, bias: Tensor | None) -> Matrix | None:
        if self._room > self._size or type(self) is not PanelMatrix:
            return None
        added = None if bias is None else bias.data_ptr()
        return Matrix(panels=self._packed.data_ptr(), bias=added, width=self._width, size=self._size)


class PanelsForSeveral(PanelMatrix):
    """A matrix packed for our own function, for several rows only: the library is faster with a single row."""

    def multiply(self, rows: Tensor, bias: Tensor | None) -> Tensor:
        if rows.numel() == rows.shape[-1]:
            return self.plain(rows, bias)
        return super().multiply(rows, bias)


WAYS = PanelMatrix, PackedMatrix
Way = type[PackedMatrix]
PLAIN = "plain"
"""the name of the plain matrix among the times of ways"""


def matrix(weight: Tensor) -> Product:
    """The product with a matrix, packed if that pays."""
    if way := ways_to_pack([weight])[0]:
        return way(weight)

    def product(rows: Tensor, bias: Tensor | None) -> Tensor:
        return functional.linear(rows, weight, bias)

    return product


class Stack(InMemory):
    """The weights of layers that read the same rows, multiplied as one: (rows, in) to (rows, all outputs)."""

    def __init__(self, weights: Sequence[Tensor]) -> None:
        self.weights = tuple(weights)
        self._product: Callable[[Tensor], Tensor] = partial(linear, weights=self.weights)

    def __call__(self, rows: Tensor) -> Tensor:
        return self._product(rows)

    def pack(self, way: Way) -> None:
        self._product = way(*self.weights)

    def matrix(self, bias: Tensor | None) -> Matrix | None:
        return self._product.matrix(bias) if isinstance(self._product, InMemory) else None


class PackedLayers:
    """The linear layers of a model on a CPU, and `stacks` of some of them. Inside the context that a call returns, the
    layers use the packed products; stacks use theirs from the start."""

    def __init__(self, model: nn.Module, stacks: Sequence[Stack] = (), *, at_once: bool = False) -> None:
        """`at_once`: our own products of the layers are part of one call, as those of stacks are."""
        apart = {id(weight) for stack in stacks for weight in stack.weights}
        layers = [one for one in model.modules() if type(one) is nn.Linear and id(one.weight) not in apart]
        first: dict[tuple[torch.Size, ...], Tensor] = {}
        for stack in stacks:
            shapes = tuple(weight.shape for weight in stack.weights)
            if shapes not in first:
                first[shapes] = stacked([weight.detach() for weight in stack.weights])
        examples = [first[tuple(weight.shape for weight in stack.weights)] for stack in stacks]
        ways = ways_to_pack(
            [*(layer.weight for layer in layers), *examples], [*[at_once] * len(layers), *[True] * len(stacks)]
        )
        self._forwards = [
            (layer, Lent(way(layer.weight), layer)) for layer, way in zip(layers, ways, strict=False) if way
        ]
        for stack, way in zip(stacks, ways[len(layers) :], strict=True):
            if way and not any(weight.is_inference() for weight in stack.weights):
                stack.pack(way)

    def install(self) -> None:
        """Let the layers use the packed products from now on."""
        for layer, forward in self._forwards:
            layer.__dict__["forward"] = forward  # found before the class's method; Module.__setattr__ is slow

    @contextmanager
    def __call__(self) -> Iterator[None]:
        self.install()
        try:
            yield
        finally:
            for layer, _ in self._forwards:
                layer.__dict__.pop("forward", None)


@dataclass(frozen=True, slots=True, eq=False)
class Lent:
    """The forward function that replaces that of a linear layer."""

    product: Product
    layer: nn.Linear

    def __call__(self, rows: Tensor) -> Tensor:
        return self.product(rows, self.layer.bias)


def ways_to_pack(weights: Sequence[Tensor], at_once: Sequence[bool] = ()) -> list[Way | None]:
    """How each matrix is packed: in the way that is fastest for all of them together; None if that way cannot pack it,
    does not pay, or memory is short. Our own products `at_once` are part of one call."""
    usable = [one.device.type == "cpu" and not one.is_inference() and one.numel() >= SMALL for one in weights]
    kinds = [(weight.shape, weight.dtype) for weight in weights]
    first = {kind: weight for kind, weight, can in zip(kinds, weights, usable, strict=True) if can}
    tried = {kind: _times(weight.detach(), kinds.count(kind)) for kind, weight in first.items()}
    totals = {way: [0.0, 0.0] for way in (None, *WAYS)}
    for kind, can in zip(kinds, usable, strict=True):
        for way, total in totals.items() if can else ():
            times = tried[kind].get(way, tried[kind][None])
            total[:] = map(sum, zip(total, times, strict=True))
    best = min(WAYS, key=lambda way: totals[way][1])
    pays = totals[best][1] < GAIN * totals[None][1]
    works = [can and pays and best in tried[kind] for kind, can in zip(kinds, usable, strict=True)]
    chosen: list[Way | None] = [best if can else None for can in works]
    for number, spares in enumerate(at_once or [False] * len(weights)):
        if chosen[number] is PanelMatrix and totals[best][0] > (SPARED if spares else 1.0) * totals[None][0]:
            chosen[number] = PanelsForSeveral
    wanted = sum(weight.nbytes for weight, way in zip(weights, chosen, strict=True) if way)
    return chosen if wanted <= SHARE * free_memory() else [None] * len(weights)


def _times(weight: Tensor, count: int) -> dict[Way | None, list[float]]:
    """Way -> seconds of a product with one of `count` such matrices, over a single row and over several. None stands
    for the plain matrix; ways that do not work for it are left out."""
    names = {PLAIN: None} | {way.__name__: way for way in WAYS}
    about = "packed", *weight.shape, str(weight.dtype), count, *names

    def measure() -> Times:
        return {PLAIN if way is None else way.__name__: times for way, times in _tried(weight, count).items()}

    found = {names[name]: times for name, times in remembered(about, measure).items()}
    return {way: times for way, times in found.items() if way is None or _works(way, weight)}


@torch.no_grad()
def _works(way: Way, weight: Tensor) -> bool:
    """Whether products with a matrix that is packed so are those of the plain one on this CPU."""
    weight = weight[:TRIAL_OUT]
    rows = _rows(weight)
    wanted = functional.linear(rows, weight)
    try:
        found = way(weight)(rows)
    except (RuntimeError, AttributeError):  # no such product for this type
        return False
    return torch.allclose(wanted.float(), found.float(), atol=TOLERANCE * float(wanted.abs().max()))


def _rows(weight: Tensor) -> Tensor:
    return torch.linspace(-1, 1, ROWS * weight.shape[1], dtype=weight.dtype).view(ROWS, -1)


@torch.no_grad()
def _tried(weight: Tensor, count: int) -> dict[Way | None, list[float]]:
    scale, weight = len(weight) / min(len(weight), TRIAL_OUT), weight[:TRIAL_OUT]
    rows, others = _rows(weight), range(copies(weight.nbytes, count))
    products: dict[Way | None, list[Callable[[Tensor], Tensor]]] = {
        None: [partial(functional.linear, weight=weight.clone()) for _ in others]
    }
    products |= {way: [way(weight.clone()) for _ in others] for way in WAYS if _works(way, weight)}
    spent = {way: [math.inf, math.inf] for way in products}
    for _ in range(TRIALS):
        for number, given in enumerate((rows[:1], rows)):
            for key, several in products.items():  # in turn, so that other load hinders all alike
                spent[key][number] = min(spent[key][number], scale * seconds(several, given))
    return spent


def free_memory() -> float:
    """The bytes of memory that are available; infinite if the system does not tell."""
    try:
        known = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        return 1024 * float(known["MemAvailable"].removesuffix("kB"))
    except (OSError, KeyError, ValueError):
        return math.inf
