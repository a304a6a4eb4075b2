"""A model whose linear layers hold weights of 8 or 4 bits (`int8.py`).

The quantised model is a model of its own, and it is the target: lossless means the distribution of this model. Layers
that read the same input, such as queries, keys and values, are computed as one product.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from branchwise.backends.exact import Shape, Trial, tried
from branchwise.backends.int8 import GROUP, Bytes, Numbers, Way, stacked
from branchwise.backends.native import byte_product
from branchwise.backends.native.layer import InMemory, Matrix
from branchwise.backends.packed import Lent, PackedLayers, Product
from branchwise.backends.packed import matrix as packed_matrix
from branchwise.errors import UnsupportedModel, UsageError
from branchwise.registry import check_known

BITS = {"int8": 8, "int4": 4}
"""name of a scheme -> bits of a weight. In `int4` the output embeddings have 8 bits: they decide between tokens of
about equal probability, and no later layers average out their errors"""
FLOAT, AUTO = "float", "auto"
WEIGHTS = (FLOAT, AUTO, *BITS)
"""the values of `--weights`"""
FORMAT = 1
"""the version of converted models in the cache; raise it if a conversion would come out differently"""
PAYS = 1.25
"""how many times as fast as floating point products with 8 bits must be for `auto` to choose them"""
LARGE = 1 << 20
"""the number of weights from which on a model exceeds the caches and is read from memory"""


def choose_weights(weights: str, dtype: str | torch.dtype, device: str) -> str:
    """Check `weights`, which must be one of `WEIGHTS`, against device and dtype. `auto` stays `auto` on a CPU in
    float32, where a trial decides; otherwise it becomes `float`."""
    check_known("weights", weights, WEIGHTS)
    full = str(dtype).removeprefix("torch.") in ("auto", "float32")
    if weights == AUTO:
        return AUTO if device == "cpu" and full else FLOAT
    if weights != FLOAT and device != "cpu":
        raise UsageError(f"--weights {weights} is for CPUs; add --device cpu, or leave out --weights on a GPU.")
    if weights != FLOAT and not full:
        raise UsageError(f"With --weights {weights} all else is computed in float32; leave out --dtype.")
    return weights


class Distance(NamedTuple):
    """How far the quantised model is from the model in float32, on a fixed text."""

    kl: float
    """mean Kullback-Leibler divergence of the next token, in nats"""
    equal: float
    """the share of positions at which both models have the same most probable token"""
    tokens: int

    def __str__(self) -> str:
        return (
            f"mean KL divergence {self.kl:.4f} from the float model, the same most probable token in {self.equal:.1%} "
            f"of {self.tokens} places"
        )


@dataclass(frozen=True)
class Conversion:
    """How a model was quantised, and from which weights."""

    scheme: str
    """a key of `BITS`"""
    way: str
    """the name of the way in which products are computed here"""
    weights: str
    """the fingerprint of the weights in float32 (`TargetInfo.weights`)"""
    distance: Distance


def conversion_of(model: nn.Module) -> Conversion | None:
    """How a model was quantised; None for a model in floating point."""
    found: Conversion | None = vars(model).get("_conversion")
    return found


class Joined:
    """One product for layers that read the same input."""

    def __init__(self, parts: Sequence[Numbers], way: type[Way]) -> None:
        self._sizes = [len(part.numbers) for part in parts]
        self.product = way(stacked(parts))
        self._rows: Tensor | None = None
        self._found: tuple[Tensor, ...] = ()

    def __len__(self) -> int:
        return len(self._sizes)

    def __call__(self, rows: Tensor, number: int) -> Tensor:
        """The outputs of layer `number`. The first layer that is given these rows computes the outputs of all."""
        if rows is not self._rows:
            flat = rows.reshape(-1, rows.shape[-1]).float().contiguous()
            found = self.product(flat).view(*rows.shape[:-1], -1)
            self._rows, self._found = rows, found.to(rows.dtype).split(self._sizes, dim=-1)
        part = self._found[number]
        if number == len(self._sizes) - 1:
            self._rows, self._found = None, ()
        return part.contiguous()  # torch rounds some functions differently if rows are not adjacent


class QuantizedLinear(nn.Module):
    """A quantised linear layer. Its numbers are no parameters, so that no change of dtype touches them."""

    weight: Tensor | None
    """(out, in) in floating point, kept for output embeddings alone, because heads read their rows"""

    def __init__(self, matrix: Numbers, bias: Tensor | None, weight: Tensor | None = None) -> None:
        super().__init__()
        self.out_features, self.in_features = matrix.numbers.shape
        self.bias, self.weight = bias, weight
        self.nbytes = matrix.nbytes
        self._joined: Joined | None = None
        self._number = 0

    def join(self, joined: Joined, number: int) -> None:
        self._joined, self._number = joined, number

    def forward(self, rows: Tensor) -> Tensor:
        assert self._joined is not None, "a layer has no product yet"
        found = self._joined(rows, self._number)
        return found if self.bias is None else found + self.bias


def common_product(layers: Sequence[QuantizedLinear]) -> Way | None:
    """The one product of which these layers, in their order, are all the parts; None if there is none."""
    joined = layers[0]._joined
    if joined is None or any(layer._joined is not joined for layer in layers):
        return None
    return joined.product if [layer._number for layer in layers] == list(range(len(joined))) else None


def linear_layers(model: nn.Module) -> dict[str, nn.Linear]:
    """Name -> linear layer. Refuses a model with matrices outside linear layers: they would stay in floating point."""
    layers = {name: layer for name, layer in model.named_modules() if type(layer) is nn.Linear}
    if not layers:
        raise UnsupportedModel(f"{type(model).__name__} has no linear layers to quantise; leave out --weights.")
    owned = {id(layer.weight) for layer in layers.values()}
    for name, module in model.named_modules():
        for kind, parameter in module.named_parameters(recurse=False):
            if parameter.ndim > 1 and id(parameter) not in owned and not isinstance(module, nn.Embedding):
                raise UnsupportedModel(
                    f"{type(model).__name__} keeps the weights {name}.{kind} outside linear layers "
                    f"({type(module).__name__}), which cannot be quantised; leave out --weights."
                )
    return layers


def quantised(model: nn.Module, scheme: str) -> dict[str, Numbers]:
    """Name -> quantised matrix, for every linear layer."""
    output: Any = model.get_output_embeddings()  # type: ignore[operator]
    return {
        name: Numbers.of(layer.weight, 8 if layer is output or layer.in_features % GROUP else BITS[scheme])
        for name, layer in linear_layers(model).items()
    }


def install(model: nn.Module, numbers: Mapping[str, Numbers], groups: Sequence[Sequence[str]]) -> str:
    """Replace linear layers by quantised ones with these numbers; the layers of a group become one product. Returns the
    name of the way in which products are computed."""
    output: Any = model.get_output_embeddings()  # type: ignore[operator]
    given: Any = model.get_input_embeddings()  # type: ignore[operator]
    made: dict[str, QuantizedLinear] = {}
    for name, matrix in numbers.items():
        parent, _, last = name.rpartition(".")
        owner: Any = model.get_submodule(parent)
        layer = owner._modules[last]
        kept = None
        if layer is output:
            kept = given.weight if layer.weight is given.weight else matrix.weight
        made[name] = owner._modules[last] = QuantizedLinear(matrix, layer.bias, kept)
    joined = [list(group) for group in groups]
    joined += [[name] for name in made if not any(name in group for group in groups)]
    shapes: dict[int, list[Shape]] = {}
    for group in joined:
        (_, width), bits = numbers[group[0]].numbers.shape, numbers[group[0]].bits
        shapes.setdefault(bits, []).append((sum(len(numbers[name].numbers) for name in group), width))
    ways = {bits: best_way(found, bits) for bits, found in shapes.items()}
    for group in joined:
        product = Joined([numbers[name] for name in group], ways[numbers[group[0]].bits])
        for number, name in enumerate(group):
            made[name].join(product, number)
    return ways[min(ways)].name


def best_way(shapes: Iterable[Shape], bits: int) -> type[Way]:
    """The fastest way to multiply with matrices of these shapes and this many bits."""
    found = tried(shapes, bits).best
    if found is None:
        raise UsageError(f"torch has no fast exact product with {bits} bits for this CPU; use --weights int8 or float.")
    return found


def in_eight_bits(weights: Sequence[Tensor], way: type[Way] | None = None) -> list[Product]:
    """Products with matrices (out, in) that are quantised to 8 bits, for drafters; by default in the fastest way."""
    way = way or best_way([(len(weight), weight.shape[1]) for weight in weights], 8)
    return [InEightBits(way(Numbers.of(weight)), weight.shape[1]) for weight in weights]


class InEightBits(InMemory):
    """A product of rows (…, width) with a quantised matrix, for any number of leading axes."""

    def __init__(self, way: Way, width: int) -> None:
        self._way, self._width = way, width

    def __call__(self, rows: Tensor, bias: Tensor | None = None) -> Tensor:
        found = self._way(rows.reshape(-1, self._width).contiguous()).view(*rows.shape[:-1], -1)
        return found if bias is None else found.add_(bias)

    def matrix(self, bias: Tensor | None) -> Matrix | None:
        return self._way.matrix(bias) if isinstance(self._way, InMemory) else None


class Installed(NamedTuple):
    """How a drafter multiplies."""

    product_of: Callable[[Tensor], Product]
    """a function that makes the product with another matrix of the drafter"""
    bytes: float
    """the size of a stored weight, as a share of the size of a parameter"""


def install_products(model: nn.Module, quantised: str) -> Installed:
    """Quantise the linear layers of a drafter to 8 bits, if its target is `int8` (`TargetInfo.quantised`) or if our own
    product with 8 bits works here: that reads a quarter of the bytes and changes no text. Otherwise pack them."""
    layers = [layer for layer in model.modules() if type(layer) is nn.Linear]
    plain = all(layer.weight.device.type == "cpu" and layer.weight.dtype == torch.float32 for layer in layers)
    large = sum(layer.weight.numel() for layer in layers) >= LARGE
    way = Bytes if plain and large and byte_product() is not None else None
    if quantised != "int8" and way is None:
        PackedLayers(model, at_once=True).install()
        return Installed(packed_matrix, 1.0)
    for layer, product in zip(layers, in_eight_bits([layer.weight for layer in layers], way), strict=True):
        layer.__dict__["forward"] = Lent(product, layer)
    return Installed(lambda weight: in_eight_bits([weight], way)[0], 1 / layers[0].weight.itemsize)


def is_large(model: nn.Module) -> bool:
    """Whether a pass reads the weights of a model from memory."""
    return sum(layer.weight.numel() for layer in linear_layers(model).values()) >= LARGE


def trial(model: nn.Module, dtype: torch.dtype) -> Trial:
    """Time the products of a model in 8 bits and in `dtype`."""
    return tried([(layer.out_features, layer.in_features) for layer in linear_layers(model).values()], 8, dtype)


@torch.no_grad()
def layers_of_one_input(model: nn.Module, tokens: Tensor) -> list[list[str]]:
    """Groups of names of linear layers that are given the very same rows, one call after the other, found by watching a
    pass. Nothing may write to the rows in between; torch counts such writes, except in inference mode."""
    calls: list[tuple[str, Tensor, int]] = []
    with ExitStack() as undo:
        for name, layer in linear_layers(model).items():

            def see(module: nn.Module, rows: tuple[Tensor, ...], name: str = name) -> None:
                calls.append((name, rows[0], rows[0]._version))

            undo.callback(layer.register_forward_pre_hook(see).remove)
        model(input_ids=tokens, use_cache=False)
    names = [name for name, _, _ in calls]
    groups: list[list[str]] = []
    last: tuple[Tensor, int] | None = None
    for name, rows, version in calls:
        if names.count(name) > 1:  # called more than once in a pass: the group would be ambiguous
            last = None
        elif last is not None and rows is last[0] and version == last[1]:
            groups[-1].append(name)
        else:
            groups.append([name])
            last = rows, version
    return [group for group in groups if len(group) > 1]


def rest_of(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Everything else that a file must hold: parameters and persistent buffers outside of linear layers, and biases."""
    weights = {f"{name}.weight" for name in linear_layers(model)}
    for name, tensor in model.state_dict().items():
        if name not in weights:
            yield name, tensor
