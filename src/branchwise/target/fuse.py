"""Fewer and larger kernels in a recorded pass, whatever the model class.

A pass over a few nodes of a small model is bound by the number of its kernels. Two things help, and neither writes a
model by hand. Linear maps that read the same input are one product over their stacked weights. And a decoder layer is
traced and compiled, once for all layers of its kind: weights are inputs of what is compiled, and attention is one
opaque operation that looks up by itself which layer's keys it works on.

All of it happens inside recordings alone; outside the model computes as it always did.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from branchwise.target.sheet import Sheet

log = logging.getLogger(__name__)

MOST_OFF = 0.05
"""how far, relative to what the layer itself finds, rounding may move what its fused form finds"""


# Linear maps of one input


@contextmanager
def joined(groups: list[list[nn.Linear]]) -> Iterator[None]:
    """Let each group, whose maps read the same input, be computed by the first of them."""
    with ExitStack() as undo:
        for first, *others in groups:
            found: dict[str, Any] = {}
            first.__dict__["forward"] = _lead(first, others, found)
            undo.callback(first.__dict__.pop, "forward")
            for number, other in enumerate(others):
                other.__dict__["forward"] = _follow(other, number, found)
                undo.callback(other.__dict__.pop, "forward")
        yield


def _lead(first: nn.Linear, others: list[nn.Linear], found: dict[str, Any]) -> Callable[[Tensor], Tensor]:
    sizes = [one.out_features for one in (first, *others)]

    def forward(given: Tensor) -> Tensor:
        # What was stacked is a buffer of the module, so that a traced layer takes that of the layer it runs for.
        whole = nn.functional.linear(given, first.stacked_weight, first.stacked_bias)  # type: ignore[arg-type]
        parts: tuple[Tensor, ...] = whole.split(sizes, dim=-1)
        found.update(given=given, rest=parts[1:])
        return parts[0]

    return forward


def _follow(other: nn.Linear, number: int, found: dict[str, Any]) -> Callable[[Tensor], Tensor]:
    def forward(given: Tensor) -> Tensor:
        if found.get("given") is given:
            part: Tensor = found["rest"][number]
            return part
        return nn.functional.linear(given, other.weight, other.bias)

    return forward


def same_inputs(model: nn.Module, run: Callable[[], object]) -> list[list[nn.Linear]]:
    """The linear maps that read the very same tensor in a pass, by sibling modules; their weights are stacked."""
    readers: dict[tuple[int, int], list[nn.Linear]] = {}
    kept: list[Tensor] = []  # or another tensor could take the place of one that is gone
    handles = []
    for parent in model.modules():
        for child in parent.children():
            if type(child) is nn.Linear and "forward" not in child.__dict__:  # somebody else wants to be in between

                def see(module: nn.Module, given: tuple[Any, ...], parent: nn.Module = parent) -> None:
                    kept.append(given[0])
                    readers.setdefault((id(parent), id(given[0])), []).append(module)  # type: ignore[arg-type]

                handles.append(child.register_forward_pre_hook(see))
    try:
        run()
    finally:
        for handle in handles:
            handle.remove()
    groups = [group for group in readers.values() if len(set(group)) == len(group) > 1 and _alike(group)]
    for group in groups:
        stack(group)
    return groups


def _alike(group: list[nn.Linear]) -> bool:
    first = group[0]
    return all(
        (one.weight.dtype, one.weight.device, one.bias is None)
        == (first.weight.dtype, first.weight.device, first.bias is None)
        for one in group
    )


def stack(group: list[nn.Linear]) -> None:
    """Put the weights of a group one behind the other in memory; each map keeps its own as a view."""
    first = group[0]
    if hasattr(first, "stacked_weight"):
        return
    for name in ("weight", "bias"):
        parts = [getattr(one, name) for one in group]
        if parts[0] is None:
            first.register_buffer(f"stacked_{name}", None, persistent=False)
            continue
        whole = torch.cat([part.detach() for part in parts])
        for part, place in zip(parts, whole.split([len(part) for part in parts]), strict=True):
            part.data = place
        first.register_buffer(f"stacked_{name}", whole, persistent=False)


# Layers


@dataclass
class Here:
    """The layer that an opaque attention works on."""

    sheet: Sheet
    keys: Tensor
    values: Tensor


_here: list[Here] = []


@torch.library.custom_op("branchwise::attend_here", mutates_args=())
def attend_here(
    query: Tensor, key: Tensor, value: Tensor, window: int | None, scale: float, softcap: float | None
) -> Tensor:
    """Write the keys and values of new nodes to the layer at hand, and attend to all that they see."""
    here = _here[-1]
    here.sheet.write(here.keys, here.values, key, value)
    return here.sheet.attend(query, here.keys, here.values, window, scale, softcap)


@attend_here.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, window: int | None, scale: float, softcap: float | None) -> Tensor:
    batch, heads, nodes, _ = query.shape
    return query.new_empty(batch, nodes, heads, value.shape[3])


class Opaque:
    """A pass whose attention a compiler does not look into."""

    def write(self, keys: Tensor, values: Tensor, new_keys: Tensor, new_values: Tensor) -> tuple[Tensor, Tensor]:
        return new_keys, new_values

    def attend(
        self, query: Tensor, keys: Tensor, values: Tensor, window: int | None, scale: float, softcap: float | None
    ) -> Tensor:
        found: Tensor = attend_here(query, keys, values, window, scale, softcap)
        return found


class Fusion:
    """The layers of a model in their fused form, for passes over one store."""

    def __init__(self, model: nn.Module, store: Any, groups: list[list[nn.Linear]], *, compile: bool) -> None:
        self._store = store
        self._groups = groups
        self._layers = decoder_layers(model, len(store.layers_keys)) if compile else []
        self._programs: dict[Any, Callable[..., Any] | None] = {}

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Within, the model computes in its fused form."""
        with joined(self._groups), ExitStack() as undo:
            for index, layer in enumerate(self._layers):
                layer.__dict__["forward"] = self._fused(index, layer)
                undo.callback(layer.__dict__.pop, "forward", None)
            yield

    def _fused(self, index: int, layer: nn.Module) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            sheet = self._store.current
            weights = {**dict(layer.named_parameters()), **dict(layer.named_buffers())}
            given, spec = pytree.tree_flatten((args, kwargs))
            places = [place for place, one in enumerate(given) if isinstance(one, Tensor)]
            tensors = [given[place] for place in places]
            constants = [None if isinstance(one, Tensor) else one for one in given]

            def run(weights: dict[str, Tensor], tensors: list[Tensor]) -> Any:
                whole = list(constants)
                for place, tensor in zip(places, tensors, strict=True):
                    whole[place] = tensor
                args, kwargs = pytree.tree_unflatten(whole, spec)
                patched = layer.__dict__.pop("forward")
                try:
                    return torch.func.functional_call(layer, weights, args, kwargs)
                finally:
                    layer.__dict__["forward"] = patched

            key = (
                type(layer),
                *((name, weight.shape, weight.dtype) for name, weight in weights.items()),
                *((tensor.shape, tensor.stride(), tensor.dtype) for tensor in tensors),
                *(one if isinstance(one, int | float | str | bool | None) else repr(type(one)) for one in constants),
                *(repr(one) for one in constants if hasattr(one, "size") and not isinstance(one, Tensor)),
            )
            if (key, index) not in self._programs:
                self._programs[key, index] = self._checked(key, index, run, weights, tensors, sheet)
            program = self._programs[key, index]
            if program is None:
                return run(weights, tensors)
            with self._at(index, sheet):
                return program(weights, tensors)

        return forward

    def _checked(
        self, key: Any, index: int, run: Any, weights: dict[str, Tensor], tensors: list[Tensor], sheet: Sheet
    ) -> Callable[..., Any] | None:
        """The program of a layer; None where it does not compute what the layer does, as where a layer's number counts.

        The first layer of a kind is traced and compiled, the others are tried with its program.
        """
        try:
            if key not in self._programs:
                self._programs[key] = compiled(self._traced(run, weights, tensors))
            program = self._programs[key]
            assert program is not None
            own = run(weights, tensors)
            with self._at(index, sheet), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # compilers give advice
                found = program(weights, tensors)
            off = max(
                float((one.float() - other.float()).norm() / one.float().norm().clamp_min(1e-9))
                for one, other in zip(pytree.tree_leaves(own), pytree.tree_leaves(found), strict=True)
                if isinstance(one, Tensor)
            )
            if off < MOST_OFF:
                return program
            reason = f"it is off by {off:.1%}"
        except Exception as error:
            reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        log.warning("Layer %d runs uncompiled: %s", index, reason)
        return None

    def _traced(self, run: Any, weights: dict[str, Tensor], tensors: list[Tensor]) -> Any:
        from torch.fx.experimental.proxy_tensor import make_fx

        current, self._store.current = self._store.current, Opaque()
        try:
            with torch.no_grad(), self._at(0, current):
                return make_fx(run)(weights, tensors)
        finally:
            self._store.current = current

    @contextmanager
    def _at(self, index: int, sheet: Sheet) -> Iterator[None]:
        _here.append(Here(sheet, self._store.layers_keys[index], self._store.layers_values[index]))
        try:
            yield
        finally:
            _here.pop()


def compiled(graph: torch.fx.GraphModule) -> Callable[..., Any]:
    return torch.compile(graph, fullgraph=True, dynamic=False, options={"assert_indirect_indexing": False})


def decoder_layers(model: nn.Module, count: int) -> list[nn.Module]:
    """The layers that attend, one for each that keeps keys."""
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return [] if any("forward" in layer.__dict__ for layer in module) else list(module)
    return []
