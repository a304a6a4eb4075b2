"""Decoder layers of the common kind on a CPU, without the small operations between their matrix products.

In a pass over few nodes of a small model, transformers spends as much time between the products as in them: some fifty
operations a layer, each of which is called, checked and given memory of its own. Here they are a few functions in C
(`backends/native`), and layers that read the same rows are one product. With quantised weights, whose products are
exact, a row gets the same bits in a tree, in a batch and alone. If all products of a layer are our own, the layer is
one call of one function (`layer.c`).

A layer is recognised by its parts, and checked by its results: at load each one is compared with the model's own in
small passes. A layer that changes after that is computed by the model again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn

from branchwise.backends.native import RowFunctions, row_functions
from branchwise.backends.native.layer import Jobs, Norm, Whole, jobs_of, room_for, whole_of
from branchwise.backends.packed import MANY, Stack
from branchwise.backends.quantized import QuantizedLinear, common_product
from branchwise.backends.transformers.attention import Window
from branchwise.backends.transformers.kv_cache import HostPass, KVCache, Layout, Pass

log = logging.getLogger(__name__)

LAYER = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}
HEAD_NORMS = {"q_norm", "k_norm"}
MLP = {"gate_proj", "up_proj", "down_proj", "act_fn"}
"""the names of the parts in Llama, Mistral, Qwen 2 and 3, SmolLM and others"""
AGREES = 1e-4
"""the difference, relative to what a layer adds to a row, up to which two ways to compute it agree"""

TRIAL_ROWS = 32
"""the rows of the cache in which layers are compared"""

Product = Callable[[Tensor], Tensor]
Turn = tuple[Tensor, Tensor]
"""the rotary cosines and sines (batch or 1, nodes, head width) of positions"""


def _multiplied(layers: Sequence[nn.Module]) -> tuple[Product, Tensor | None]:
    """One product for layers that read the same rows, and their biases side by side."""
    known: list[Tensor | None] = [layer.bias for layer in layers]  # type: ignore[misc]
    biases = [bias.detach() for bias in known if bias is not None]
    if biases and len(biases) < len(layers):
        raise ValueError("some layers of one input have a bias and some have none")
    bias = torch.cat(biases) if biases else None
    if all(type(layer) is nn.Linear for layer in layers):
        return Stack([layer.weight for layer in layers]), bias  # type: ignore[misc]
    quantised = [layer for layer in layers if isinstance(layer, QuantizedLinear)]
    product = common_product(quantised) if len(quantised) == len(layers) else None
    if product is None:
        raise ValueError("layers of one input are not one product")
    return product, bias


class Linear:
    """Linear layers that read the same rows: (rows, in) to (rows, all outputs side by side)."""

    def __init__(self, *layers: nn.Module) -> None:
        self.product, self.bias = _multiplied(layers)

    def __call__(self, rows: Tensor) -> Tensor:
        found = self.product(rows)
        return found if self.bias is None else found.add_(self.bias)


def _norm(module: nn.Module) -> Norm:
    """The weight of a norm and its epsilon."""
    values: Any = vars(module)
    weight: Any = module.weight
    if not weight.is_contiguous():
        raise ValueError("its norms do not lie in one piece")
    return weight.detach(), float(values["variance_epsilon"] if "variance_epsilon" in values else values["eps"])


class HostLayer:
    """A decoder layer: a norm and attention, then a norm and a gated MLP."""

    def __init__(self, layer: nn.Module, functions: RowFunctions) -> None:
        """Raises a KeyError, an AttributeError, a TypeError or a ValueError if the layer is of another kind."""
        parts: Any = layer
        attention, mlp = parts.self_attn, parts.mlp
        names = {name for name, _ in attention.named_children()}
        if names - HEAD_NORMS != ATTENTION or {name for name, _ in mlp.named_children()} != MLP:
            raise ValueError("it has other parts")
        self._functions = functions
        self._input_norm, self._norm = _norm(parts.input_layernorm), _norm(parts.post_attention_layernorm)
        self._head_norms: list[Tensor] = []
        self._epsilon = 0.0
        if names & HEAD_NORMS:
            (query_norm, self._epsilon), (key_norm, _) = _norm(attention.q_norm), _norm(attention.k_norm)
            self._head_norms = [query_norm, key_norm]
        self._number, self._width, self._scale = attention.layer_idx, attention.head_dim, attention.scaling
        self._heads = attention.q_proj.out_features // self._width
        self._kv_heads = attention.k_proj.out_features // self._width
        self._check_sizes(attention, mlp)
        self._qkv = Linear(attention.q_proj, attention.k_proj, attention.v_proj)
        self._out = Linear(attention.o_proj)
        self._gate_up = Linear(mlp.gate_proj, mlp.up_proj)
        self._down = Linear(mlp.down_proj)
        linear = self._qkv, self._out, self._gate_up, self._down
        self.products = [part.product for part in linear]
        self._parts = [(part.product, part.bias) for part in linear]
        self._whole: Whole | None = None
        self._seal = Seal(layer)

    def _check_sizes(self, attention: Any, mlp: Any) -> None:
        queries, keys = self._heads * self._width, self._kv_heads * self._width
        sizes = attention.q_proj.out_features, attention.k_proj.out_features, attention.v_proj.out_features
        fits = sizes == (queries, keys, keys) and attention.o_proj.in_features == queries
        fits &= self._heads % self._kv_heads == 0 and self._width % 2 == 0
        fits &= mlp.gate_proj.out_features == mlp.up_proj.out_features == mlp.down_proj.in_features
        if not fits or any(len(norm) != self._width for norm in self._head_norms):
            raise ValueError("its parts have other sizes")

    @property
    def unchanged(self) -> bool:
        return self._seal.whole

    def __call__(self, hidden: Tensor, cache: KVCache, current: HostPass, turn: Turn, window: int | None) -> Tensor:
        """The output for hidden states that `fits` has approved."""
        functions = self._functions
        if self._whole is None and (matrices := whole_of(self._parts)):
            self._whole = Whole(matrices, self._input_norm, self._norm)
        if self._whole is not None:
            return self._at_once(self._whole, hidden, cache, current, turn, window)
        state = hidden.reshape(-1, hidden.shape[-1]).clone(memory_format=torch.contiguous_format)
        mixed = self._qkv(functions.add_norm(state, None, *self._input_norm))
        keys, values = cache.layers_keys[self._number], cache.layers_values[self._number]
        jobs = self._jobs(current, turn, window, keys, values)
        # Rotate queries and keys to their positions, and write keys and values to the cache.
        jobs.turning.given = mixed.data_ptr()
        functions.turn(jobs.turning)
        found = mixed.new_empty(mixed.shape[0], self._heads * self._width)
        jobs.attention.queries, jobs.attention.out = mixed.data_ptr(), found.data_ptr()
        functions.attend(jobs.attention)
        normed = functions.add_norm(state, self._out(found), *self._norm)
        return state.add_(self._down(functions.gated(self._gate_up(normed)))).view(hidden.shape)

    def _at_once(
        self, whole: Whole, hidden: Tensor, cache: KVCache, current: HostPass, turn: Turn, window: int | None
    ) -> Tensor:
        keys, values = cache.layers_keys[self._number], cache.layers_values[self._number]
        jobs, hidden = self._jobs(current, turn, window, keys, values), hidden.contiguous()
        out = torch.empty_like(hidden)
        if whole.room not in current.jobs:
            current.jobs[whole.room] = room_for(current.rows.numel(), *whole.room)
        whole.compute(self._functions.layer, hidden, out, current.jobs[whole.room], jobs)
        return out

    def fits(self, hidden: Tensor, cache: KVCache, turn: Turn) -> bool:
        """Whether functions in C can read these tensors: float32 on the CPU, of the expected width."""
        tensors = hidden, cache.layers_keys[self._number], *turn
        plain = all(one.dtype == torch.float32 and one.device.type == "cpu" for one in tensors)
        return plain and turn[0].shape[-1] == turn[1].shape[-1] == self._width

    def _jobs(self, current: HostPass, turn: Turn, window: int | None, keys: Tensor, values: Tensor) -> Jobs:
        """The arguments of the functions in C for this layer's part of the cache. The caller adds the addresses of
        queries and output."""
        jobs = self._shared_jobs(current, turn, window, keys.shape[2])
        if self._head_norms:
            jobs.turning.query_norm, jobs.turning.key_norm = (norm.data_ptr() for norm in self._head_norms)
        jobs.turning.keys = jobs.attention.keys = keys.data_ptr()
        jobs.turning.values = jobs.attention.values = values.data_ptr()
        return jobs

    def _shared_jobs(self, current: HostPass, turn: Turn, window: int | None, cached: int) -> Jobs:
        shape = self._heads, self._kv_heads, self._width, window, self._scale, self._epsilon
        if shape not in current.jobs:
            cos, sin = (part.expand(*current.rows.shape, -1).contiguous() for part in turn)
            current.jobs[shape] = jobs_of(
                (cos, sin), current.slots, current.lengths, current.rows, current.depths, current.seen,
                current.column_depths, most=current.most, cached=cached, heads=self._heads, kv_heads=self._kv_heads,
                width=self._width, window=window or 0, scale=self._scale, epsilon=self._epsilon,
            )  # fmt: skip
        found: Jobs = current.jobs[shape]
        return found


class Seal:
    """Tells whether a layer is unchanged: the same parts with the same weights, and no hooks on them. It is asked in
    every pass, so the places to check are collected once."""

    def __init__(self, layer: nn.Module) -> None:
        inside = [*layer.modules()][1:]
        self._owners = [part for module in (layer, *inside) for part in (module._modules, module._parameters)]
        self._sizes = [*map(len, self._owners)]
        self._parts = [(owner, [*owner], [*owner.values()]) for owner in self._owners if owner]
        self._weights: list[Tensor] = [*layer.parameters()]
        self._values = self._places()
        self._watchers = [hooks for module in inside for hooks in (module._forward_hooks, module._forward_pre_hooks)]
        self._attributes = [vars(module) for module in inside]

    def _places(self) -> list[tuple[int, int]]:
        return [(weight.data_ptr(), weight._version) for weight in self._weights]

    @property
    def whole(self) -> bool:
        same = [*map(len, self._owners)] == self._sizes
        for owner, names, parts in self._parts:
            same = same and [*owner] == names and all(map(is_, owner.values(), parts))
        watched = any(self._watchers) or any("forward" in attributes for attributes in self._attributes)
        return same and not watched and self._places() == self._values


class HostLayers:
    """The layers of a model that are computed here. Inside the context that a call returns, the model uses them."""

    def __init__(self, model: nn.Module) -> None:
        self.layers = dict(recognised(model))
        self.complete = False
        """whether these are all decoder layers of the model, so that no attention is computed elsewhere"""
        self._quantised = any(isinstance(module, QuantizedLinear) for module in model.modules())

    def __bool__(self) -> bool:
        return bool(self.layers)

    @property
    def stacks(self) -> list[Stack]:
        """The products whose weights are still to be packed."""
        return [one for layer in self.layers.values() for one in layer.products if isinstance(one, Stack)]

    @property
    def unchanged(self) -> bool:
        return all(own.unchanged for own in self.layers.values())

    @contextmanager
    def __call__(self) -> Iterator[None]:
        with self._lent(self._computed, [layer for layer, own in self.layers.items() if own.unchanged]):
            yield

    def check(self, layout: Layout, run: Callable[[KVCache], object]) -> None:
        """Keep the layers that agree with the model's own in all passes of `run` over a cache."""
        agreed, refused = set[nn.Module](), set[nn.Module]()
        with self._lent(partial(self._compared, agreed, refused), list(self.layers)):
            run(KVCache(layout, 2, TRIAL_ROWS, torch.float32, torch.device("cpu")))
        self.layers = {layer: own for layer, own in self.layers.items() if layer in agreed - refused}
        if self._quantised and len(self.layers) < len(layout.keys):
            self.layers = {}  # the model's own layers need a cache in another precision, and all layers share one
        self.complete = len(self.layers) == len(layout.keys)
        log.info("%d of %d layers are computed in few calls.", len(self.layers), len(layout.keys))

    @contextmanager
    def _lent(self, forward: Callable[..., Tensor], layers: Sequence[nn.Module]) -> Iterator[None]:
        with ExitStack() as undo:
            for layer in layers:
                if "forward" not in vars(layer):  # else another library has replaced it
                    layer.__dict__["forward"] = partial(forward, layer)
                    undo.callback(layer.__dict__.pop, "forward", None)
            yield

    def _computed(self, layer: nn.Module, hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        found = None if args else self._own(layer, hidden, **kwargs)
        return type(layer).forward(layer, hidden, *args, **kwargs) if found is None else found

    def _own(
        self,
        layer: nn.Module,
        hidden: Tensor,
        *,
        past_key_values: Any = None,
        attention_mask: Any = None,
        position_embeddings: Turn | None = None,
        **kwargs: Any,
    ) -> Tensor | None:
        """The output of a layer, computed here; None if the model must compute it. In passes over many rows the library
        is faster, so only quantised layers, which must give the same bits in all passes, are computed here then."""
        cache, own = past_key_values, self.layers[layer]
        if not isinstance(cache, KVCache) or position_embeddings is None or not isinstance(attention_mask, Window):
            return None
        current, many = cache.current, hidden.shape[0] * hidden.shape[1] > MANY and not self._quantised
        if type(current) is not Pass or many or not own.fits(hidden, cache, position_embeddings):
            return None
        return own(hidden, cache, current.on_host, position_embeddings, attention_mask.size)

    def _compared(
        self,
        agreed: set[nn.Module],
        refused: set[nn.Module],
        layer: nn.Module,
        hidden: Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        found: Any = type(layer).forward(layer, hidden, *args, **kwargs)
        own = None if args else self._own(layer, hidden, **kwargs)
        agrees = own is not None and isinstance(found, Tensor) and self._agree(found - hidden, own - hidden)
        (agreed if agrees else refused).add(layer)
        return found

    def _agree(self, found: Tensor, own: Tensor) -> bool:
        farther = (found - own).norm(dim=-1) / found.norm(dim=-1)
        # With 8 bits a number of some row may be rounded to the next level, which is half a percent off.
        return bool((farther.median() if self._quantised else farther.max()) <= AGREES)


def recognised(model: nn.Module) -> Iterator[tuple[nn.Module, HostLayer]]:
    """Decoder layers whose parts are those of the common kind, if they are in float32 on a CPU and a C compiler
    exists."""
    parameters = list(model.parameters())
    if any(one.dtype != torch.float32 or one.device.type != "cpu" or one.is_inference() for one in parameters):
        return
    for module in model.modules():
        if {name for name, _ in module.named_children()} == LAYER and "forward" not in vars(module):
            functions = row_functions()
            if functions is None:
                return
            try:
                yield module, HostLayer(module, functions)
            except (KeyError, AttributeError, TypeError, ValueError) as error:
                log.info("A %s is computed as transformers does: %s", type(module).__name__, error)
