"""Fewer and larger kernels in a recorded pass, whatever the model class.

A pass over a few nodes of a small model is bound by the number of its kernels. Two things help, and neither writes a
model by hand. Linear maps that read the same input are one product over their stacked weights. And a decoder layer is
traced and compiled, once for all layers of its kind: weights are inputs of what is compiled, and attention is one
opaque operation that looks up by itself which layer's keys it works on.

All of it happens within passes over a sheet, recorded or not; outside the model computes as it always did.
"""

from __future__ import annotations

import logging
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from branchwise.backends.transformers.attention import Window
from branchwise.cuda.inputs import PassInputs
from branchwise.cuda.rounding import beyond_rounding
from branchwise.errors import first_line

log = logging.getLogger(__name__)

SCALARS = int | float | str | bool | None


# Linear maps of one input


@dataclass(eq=False)
class Group:
    """Linear maps that read the same input, and their weights one behind the other."""

    maps: list[nn.Linear]
    weight: Tensor | None = None
    bias: Tensor | None = None

    @property
    def free(self) -> bool:
        """Whether nobody else wants to be in between."""
        return not any("forward" in one.__dict__ for one in self.maps)

    def refresh(self) -> None:
        """Let each map hold its weights as a view of the stack; where one has got others, all are stacked anew."""
        for name in ("weight", "bias"):
            parts, whole = [getattr(one, name) for one in self.maps], getattr(self, name)
            if parts[0] is None:
                continue
            sizes = [len(part) for part in parts]
            if whole is None or any(
                part.data_ptr() != place.data_ptr() for part, place in zip(parts, whole.split(sizes), strict=True)
            ):
                whole = torch.cat([part.detach() for part in parts])
                setattr(self, name, whole)
                for part, place in zip(parts, whole.split(sizes), strict=True):
                    part.data = place


@contextmanager
def joined(groups: list[Group]) -> Iterator[None]:
    """Let each group be computed by the first of its maps."""
    with ExitStack() as undo:
        for group in groups:
            group.refresh()
            found: dict[str, Any] = {}
            first, *others = group.maps
            first.__dict__["forward"] = _lead(group, found)
            undo.callback(first.__dict__.pop, "forward", None)
            for number, other in enumerate(others):
                other.__dict__["forward"] = _follow(other, number, found)
                undo.callback(other.__dict__.pop, "forward", None)
        yield


def _lead(group: Group, found: dict[str, Any]) -> Callable[[Tensor], Tensor]:
    sizes = [one.out_features for one in group.maps]

    def forward(given: Tensor) -> Tensor:
        # From the group: a traced layer puts the weights of the layer that it runs for there.
        assert group.weight is not None, "weights are stacked before they are used"
        parts = nn.functional.linear(given, group.weight, group.bias).split(sizes, dim=-1)
        found.update(given=given, rest=parts[1:])
        mine: Tensor = parts[0]
        return mine

    return forward


def _follow(other: nn.Linear, number: int, found: dict[str, Any]) -> Callable[[Tensor], Tensor]:
    def forward(given: Tensor) -> Tensor:
        if found.get("given") is given:
            part: Tensor = found["rest"][number]
            return part
        return nn.functional.linear(given, other.weight, other.bias)

    return forward


_joined: weakref.WeakKeyDictionary[nn.Module, list[weakref.ref[Group]]] = weakref.WeakKeyDictionary()
"""The groups of a model: all its targets read one stack of their weights, which goes with the last of them. Were they
stacked anew for one target, what another has recorded would read memory that is gone."""


def groups_of(model: nn.Module, run: Callable[[], object]) -> list[Group]:
    """The linear maps of a model that can be joined, found once by watching a pass, which nobody else may run then.

    All targets get them in one order: what is compiled for one layer reads the stacks of another in it.
    """
    groups = [group for known in _joined.get(model, ()) if (group := known())]
    if not groups:
        groups = same_inputs(model, run)
        _joined[model] = [weakref.ref(group) for group in groups]
    return [group for group in groups if group.free]


def same_inputs(model: nn.Module, run: Callable[[], object]) -> list[Group]:
    """The linear maps of one module that read the very same tensor in a pass."""
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
    found = {tuple(map(id, maps)): maps for maps in readers.values()}
    return [Group(maps) for maps in found.values() if len(set(maps)) == len(maps) > 1 and _alike(maps)]


def _alike(maps: list[nn.Linear]) -> bool:
    first, *others = ((one.weight.dtype, one.weight.device, one.bias is None) for one in maps)
    return all(other == first for other in others)


# Layers


@dataclass
class Here:
    """The layer that an opaque attention works on."""

    inputs: PassInputs
    keys: Tensor
    values: Tensor


class _Places(threading.local):
    """Where this thread is."""

    def __init__(self) -> None:
        self.stack: list[Here] = []


_places = _Places()


@torch.library.custom_op("branchwise::attend_here", mutates_args=())
def attend_here(
    query: Tensor, key: Tensor, value: Tensor, window: int | None, scale: float, softcap: float | None
) -> Tensor:
    """Write the keys and values of new nodes to the layer at hand, and attend to all that they see."""
    here = _places.stack[-1]
    here.inputs.write(here.keys, here.values, key, value)
    return here.inputs.attend(query, here.keys, here.values, window, scale, softcap)


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

    def __init__(self, model: nn.Module, store: Any, groups: list[Group], *, compile: bool) -> None:
        self._store = store
        self._groups = groups
        self._layers = decoder_layers(model, len(store.layers_keys)) if compile else []
        self._programs: dict[Any, Callable[..., Any] | None] = {}

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Within, the model computes in its fused form; nobody else may run it meanwhile."""
        with joined(self._groups), ExitStack() as undo:
            for index, layer in enumerate(self._layers):
                layer.__dict__["forward"] = self._fused(index, layer)
                undo.callback(layer.__dict__.pop, "forward", None)
            yield

    def _fused(self, index: int, layer: nn.Module) -> Callable[..., Any]:
        inside = set(layer.modules())
        groups = [group for group in self._groups if group.maps[0] in inside]

        def forward(*args: Any, **kwargs: Any) -> Any:
            pass_inputs = self._store.current
            weights = {**dict(layer.named_parameters()), **dict(layer.named_buffers())}
            stacks = [(group.weight, group.bias) for group in groups]
            given, spec = pytree.tree_flatten((args, kwargs))
            places = [place for place, one in enumerate(given) if isinstance(one, Tensor)]
            tensors = [given[place] for place in places]
            constants = [None if isinstance(one, Tensor) else one for one in given]

            def run(weights: dict[str, Tensor], stacks: list[Any], tensors: list[Tensor]) -> Any:
                whole = list(constants)
                for place, tensor in zip(places, tensors, strict=True):
                    whole[place] = tensor
                args, kwargs = pytree.tree_unflatten(whole, spec)
                patched = layer.__dict__.pop("forward")
                own = [(group.weight, group.bias) for group in groups]
                for group, (weight, bias) in zip(groups, stacks, strict=True):
                    group.weight, group.bias = weight, bias
                try:
                    return torch.func.functional_call(layer, weights, args, kwargs)
                finally:
                    layer.__dict__["forward"] = patched
                    for group, (weight, bias) in zip(groups, own, strict=True):
                        group.weight, group.bias = weight, bias

            key = (
                type(layer),
                *((name, weight.shape, weight.dtype) for name, weight in weights.items()),
                *((tensor.shape, tensor.stride(), tensor.dtype) for tensor in tensors),
                *(one if isinstance(one, Window | SCALARS) else type(one).__name__ for one in constants),
                *_settings(layer),
            )
            inputs = weights, stacks, tensors
            if (key, index) not in self._programs:
                self._programs[key, index] = self._checked(key, index, run, inputs, pass_inputs)
            program = self._programs[key, index]
            if program is None:
                return run(*inputs)
            with self._at(index, pass_inputs):
                return program(*inputs)

        return forward

    def _checked(
        self, key: Any, index: int, run: Any, inputs: Any, pass_inputs: PassInputs
    ) -> Callable[..., Any] | None:
        """The program of a layer; None if it computes something else than the layer.

        The first layer of a kind is traced and compiled; the others are tried with its program.
        """
        try:
            if key not in self._programs:
                self._programs[key] = compiled(self._traced(run, inputs, index))
            program = self._programs[key]
            assert program is not None

            def fused(*inputs: Any) -> Any:
                with self._at(index, pass_inputs), warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # compilers give advice
                    return program(*inputs)

            reason = beyond_rounding(run, fused, inputs)
            if reason is None:
                return program
        except Exception as error:
            reason = first_line(error)
        log.warning("Layer %d runs uncompiled: %s", index, reason)
        return None

    def _traced(self, run: Any, inputs: Any, index: int) -> Any:
        from torch.fx.experimental.proxy_tensor import make_fx

        current, self._store.current = self._store.current, Opaque()
        try:
            with torch.no_grad(), self._at(index, current):
                return make_fx(run)(*inputs)
        finally:
            self._store.current = current

    @contextmanager
    def _at(self, index: int, inputs: PassInputs) -> Iterator[None]:
        _places.stack.append(Here(inputs, self._store.layers_keys[index], self._store.layers_values[index]))
        try:
            yield
        finally:
            _places.stack.pop()


def _settings(layer: nn.Module) -> list[tuple[str, str, SCALARS]]:
    """All that the modules of a layer are told in numbers and words, but which layer they are."""
    return [
        (path, name, value)
        for path, module in layer.named_modules()
        for name, value in vars(module).items()
        if isinstance(value, SCALARS) and name not in ("layer_idx", "training")
    ]


def compiled(graph: torch.fx.GraphModule) -> Callable[..., Any]:
    return torch.compile(graph, fullgraph=True, dynamic=False, options={"assert_indirect_indexing": False})


def decoder_layers(model: nn.Module, count: int) -> list[nn.Module]:
    """The layers that attend, one for each that keeps keys."""
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return [] if any("forward" in layer.__dict__ for layer in module) else list(module)
    return []
