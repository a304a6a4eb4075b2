"""Fewer and larger kernels in a recorded pass, whatever the model class.

The time of a pass over a few nodes of a small model is bound by the number of its kernels. So linear maps that read the
same input become one product over their stacked weights. A decoder layer of the common kind is a few kernels of our
own. Other layers can be traced and compiled, once for all layers of a kind: weights are arguments of the compiled
program, and attention is one opaque operation that looks up the present layer. All of this applies to packed passes
only, recorded or not; outside them the model is unchanged.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from branchwise.backends.transformers.attention import Window
from branchwise.core.rows import WORD, unpack_bits
from branchwise.cuda.counts import count
from branchwise.cuda.graphs import on
from branchwise.cuda.inputs import PassTensors
from branchwise.cuda.layers.groups import Group, joined, patch, patched
from branchwise.cuda.layers.rounding import beyond_rounding
from branchwise.errors import first_line

if TYPE_CHECKING:  # these need Triton
    from branchwise.cuda.layers.ends import Ends
    from branchwise.cuda.layers.usual import Handed, UsualLayer

log = logging.getLogger(__name__)

Program = Callable[[Any, Any, Any], Any]
"""a function that computes a layer from its weights, its stacked weights, and its tensor arguments, hidden states
first"""
MOST_ROWS = 2048
"""the most rows of a pass whose layers are computed in few kernels; with more rows a library's products are faster"""
SCALARS = int | float | str | bool | None


# Layers


class Place(NamedTuple):
    """The context of a layer in a pass: everything that is neither a weight nor an argument."""

    inputs: PassTensors
    """the inputs of the pass"""
    keys: Tensor
    values: Tensor
    following: Tensor | None
    """the weights of the next layer's norm"""


_current: ContextVar[Place] = ContextVar("branchwise_layer")
"""the layer on which the opaque attention works"""


@torch.library.custom_op("branchwise::attend_here", mutates_args=())
def attend_here(
    query: Tensor, key: Tensor, value: Tensor, window: int | None, scale: float, softcap: float | None
) -> Tensor:
    """Write the keys and values of new nodes to the present layer, and compute their attention."""
    inputs, keys, values, _ = _current.get()
    inputs.write(keys, values, key, value)
    return inputs.attend(query, keys, values, window, scale, softcap)


@attend_here.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, window: int | None, scale: float, softcap: float | None) -> Tensor:
    batch, heads, nodes, _ = query.shape
    return query.new_empty(batch, nodes, heads, value.shape[3])


OPAQUE = SimpleNamespace(write=lambda keys, values, *new: new, attend=attend_here)
"""a stand-in for a pass, with an attention that is opaque to the compiler"""


class Fusion:
    """A model in its fused form, for passes over one KV cache."""

    def __init__(
        self,
        store: Any,
        groups: list[Group],
        layers: Sequence[nn.Module] = (),
        *,
        kernels: bool = False,
        compile: bool = False,
    ) -> None:
        """`layers` are the decoder layers in order. With `kernels`, layers of the common kind are computed by few
        kernels of our own; with `compile`, the others are compiled."""
        self._handed: Handed | None = None
        self._ends: Ends | None = None
        self._store = store
        self._groups = groups
        self._layers = [] if any(map(patched, layers)) else layers
        self._usual = [self._of_kernels(layer) if kernels else None for layer in self._layers]
        self._compile = compile
        self._programs: dict[Any, Program | None] = {}
        self._agreed: set[tuple[str, Any]] = set()
        """(way, layer) and (way, kind of layer and pass) for which a program of this way agreed with the model's own"""

    @property
    def has_own_layers(self) -> bool:
        """Whether any layer is of the common kind."""
        return any(self._usual)

    def around(self, model: nn.Module, positions: int, check: Callable[[], object]) -> None:
        """If layers are of the common kind, compute the parts of the model before and after them in few kernels too,
        for up to `positions` positions, unless a `check` of whole passes then fails. Not in Triton's interpreter, which
        would take too long."""
        if not self.has_own_layers:
            return
        from branchwise.cuda.layers.ends import ends_of

        parent = next(one for one in model.modules() if self._layers[0] in _listed(one))
        device = next(model.parameters()).device
        try:
            with on(device):
                self._ends = ends_of(model, parent, positions)
            if device.type != "cpu":
                check()
        except Exception as error:
            self._ends = None
            log.warning("What is around the layers does not run in few kernels: %s", first_line(error))

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Inside this context the model computes in its fused form; no other target may run it meanwhile."""
        with joined(self._groups), ExitStack() as undo:
            for index, layer in enumerate(self._layers):
                if self._usual[index] is not None or self._compile:
                    patch(layer, self._fused(index, layer), undo)
            for module, forward in () if self._ends is None else self._ends.replaced:
                if not patched(module):  # another library has patched it since
                    patch(module, forward, undo)
            embedding = None if self._ends is None or self._usual[0] is None else self._ends.embedding
            if embedding is not None and not patched(embedding):
                patch(embedding, self._embedded, undo)
            if self._handed is not None:
                undo.callback(self._handed.forget)
            yield

    def _embedded(self, tokens: Tensor) -> Tensor:
        assert self._ends is not None
        assert self._handed is not None
        norm = self._norm_of(0)
        states, rows = self._ends.embedded(tokens, norm)
        if not self._ends.embedding._forward_hooks:  # type: ignore[union-attr]  # a hook may write to the embeddings
            self._handed.put(states, norm, rows)
        return states

    def _norm_of(self, index: int) -> Tensor:
        """The weights of the norm with which a layer begins."""
        return self._layers[index].get_parameter("input_layernorm.weight")

    def _inside(self, layer: nn.Module) -> list[Group]:
        inside = set(layer.modules())
        return [group for group in self._groups if group.maps[0] in inside]

    def _of_kernels(self, layer: nn.Module) -> UsualLayer | None:
        from branchwise.cuda.layers.usual import Handed, usual_layer

        self._handed = self._handed or Handed()
        return usual_layer(layer, [group.maps for group in self._inside(layer)])

    def _fused(self, index: int, layer: nn.Module) -> Callable[..., Any]:
        groups = self._inside(layer)

        def forward(*args: Any, **kwargs: Any) -> Any:
            weights = {**dict(layer.named_parameters()), **dict(layer.named_buffers())}
            stacks = [(group.weight, group.bias) for group in groups]
            given, spec = pytree.tree_flatten((args, kwargs))
            tensors = [one for one in given if isinstance(one, Tensor)]
            places = {number for number, one in enumerate(given) if isinstance(one, Tensor)}
            settings = [None if isinstance(one, Tensor) else one for one in given]  # programs keep them

            def with_tensors(tensors: list[Tensor]) -> Any:
                rest = iter(tensors)
                whole = [one if number not in places else next(rest) for number, one in enumerate(settings)]
                return pytree.tree_unflatten(whole, spec)

            def run(weights: dict[str, Tensor], other_stacks: list[Any], tensors: list[Tensor]) -> Any:
                args, kwargs = with_tensors(tensors)
                own = layer.__dict__.pop("forward")
                _put(groups, other_stacks)
                try:
                    return torch.func.functional_call(layer, weights, args, kwargs)
                finally:
                    layer.__dict__["forward"] = own
                    _put(groups, stacks)

            def by_kernels() -> Program | None:
                usual, handed, rows = self._usual[index], self._handed, tensors[0].shape[0] * tensors[0].shape[1]
                if usual is None or handed is None or rows > MOST_ROWS:
                    return None

                def program(weights: dict[str, Tensor], stacks: list[Any], tensors: list[Tensor]) -> Tensor:
                    args, kwargs = with_tensors(tensors)
                    inputs, keys, values, following = _current.get()
                    return usual(inputs, (keys, values), following, handed, weights, stacks, *args, **kwargs)

                return program

            def by_a_compiler() -> Program | None:
                if not self._compile:
                    return None
                count("compiled", f"layer {index}")
                return compiled(self._traced(run, inputs, index))

            key = (
                type(layer),
                *((name, weight.shape, weight.dtype) for name, weight in weights.items()),
                *map(_kind, given),
                *_settings(layer),
            )
            inputs = weights, stacks, tensors
            if _watched_inside(layer):
                return run(*inputs)
            if (key, index) not in self._programs and bool((telling := _telling(self._store.current)).any()):
                ways = {"in few kernels": by_kernels, "compiled": by_a_compiler}
                self._programs[key, index] = self._checked(key, index, ways, run, inputs, telling)
            program = self._programs.get((key, index))
            if program is None:
                return run(*inputs)
            with self._at(index, self._store.current):
                return program(*inputs)

        return forward

    def _checked(
        self,
        key: Any,
        index: int,
        ways: Mapping[str, Callable[[], Program | None]],
        run: Program,
        inputs: Any,
        telling: Tensor,
    ) -> Program | None:
        """The program of a layer, made in the first way whose program agrees with the layer at the telling nodes; None
        if no way does. The program is made for the first layer of a kind, and compared for the other layers too. For
        passes of another size only one layer is compared, because layers of a kind differ only in their weights, which
        are arguments."""
        pass_inputs = self._store.current
        for way, make in ways.items():
            try:
                if (way, key) not in self._programs:
                    self._programs[way, key] = make()
                program = self._programs[way, key]
                if program is None:
                    continue
                if {(way, index), (way, key)} <= self._agreed:
                    return program
                reason = beyond_rounding(run, partial(self._quietly, program, index, pass_inputs), inputs, telling)
                if reason is None:
                    self._agreed |= {(way, index), (way, key)}
                    return program
            except Exception as error:
                reason = first_line(error)
            log.warning("Layer %d does not run %s: %s", index, way, reason)
        return None

    def _quietly(self, program: Program, index: int, pass_inputs: PassTensors, *inputs: Any) -> Any:
        with self._at(index, pass_inputs), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # compilers give advice
            return program(*inputs)

    def _traced(self, run: Any, inputs: Any, index: int) -> Any:
        from torch.fx.experimental.proxy_tensor import make_fx

        current, self._store.current = self._store.current, OPAQUE
        try:
            with torch.no_grad(), self._at(index, current):
                return make_fx(run)(*inputs)
        finally:
            self._store.current = current

    @contextmanager
    def _at(self, index: int, inputs: PassTensors) -> Iterator[None]:
        following = None
        if index + 1 < len(self._layers) and self._usual[index + 1] is not None:
            following = self._norm_of(index + 1)
        cache = self._store.layers_keys[index], self._store.layers_values[index]
        before = _current.set(Place(inputs, *cache, following))
        try:
            yield
        finally:
            _current.reset(before)


def _listed(module: nn.Module) -> list[nn.Module]:
    """The members of lists that are parts of a module."""
    return [one for child in module.children() if isinstance(child, nn.ModuleList) for one in child]


def _watched_inside(layer: nn.Module) -> bool:
    """Whether parts of a layer have hooks, which a program would not call."""
    parts = [module for module in layer.modules() if module is not layer]
    return any(module._forward_hooks or module._forward_pre_hooks for module in parts)


def _telling(inputs: PassTensors) -> Tensor:
    """(batch * nodes,): whether the output of a node tells whether attention is right. Padding attends to nothing, and
    the first node of a text only to itself, whatever its queries and keys are."""
    own = unpack_bits(inputs.ancestor_bits, WORD * inputs.ancestor_bits.shape[2]).sum(dim=2)
    return ((inputs.slots >= 0)[:, None] & (own > 0) & (inputs.lengths[:, None] + own > 1)).flatten()


def _put(groups: list[Group], stacks: list[tuple[Tensor | None, Tensor | None]]) -> None:
    for group, (weight, bias) in zip(groups, stacks, strict=True):
        group.weight, group.bias = weight, bias


def _kind(argument: Any) -> Any:
    """The properties of an argument for which a program is compiled."""
    if isinstance(argument, Tensor):
        return argument.shape, argument.stride(), argument.dtype
    return argument if isinstance(argument, Window | SCALARS) else type(argument).__name__


def _settings(layer: nn.Module) -> list[tuple[str, str, SCALARS]]:
    """The numbers and strings that configure the modules of a layer, except the index of the layer."""
    return [
        (path, name, value)
        for path, module in layer.named_modules()
        for name, value in vars(module).items()
        if isinstance(value, SCALARS) and name not in ("layer_idx", "training")
    ]


def compiled(graph: torch.fx.GraphModule) -> Callable[..., Any]:
    return torch.compile(graph, fullgraph=True, dynamic=False, options={"assert_indirect_indexing": False})
