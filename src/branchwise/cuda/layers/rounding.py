"""A test whether a layer in another form computes the same, except for rounding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

FARTHER = 2.0
"""the largest error of a typical node of the fused layer, in errors of the layer's own result; both are measured from
the widened result. On a CPU the error of compiled layers is 0.6 to 0.8 times as large in bfloat16 and 0.9 to 1.3 times
in float32. In a small layer in bfloat16 it is 4 to 9 times as large if the attention scale is off by a tenth, and 100
times with the weights of another layer"""
FARTHER_IN_A_COLUMN = 8.0
"""the same bound for the worst element of the output, whose error in a pass over one node is a single random draw: the
largest of thousands of such draws is 4 to 5 times the typical one. Over eight nodes the error of a wrong column is 25
times as large or more"""


def beyond_rounding(
    layer: Callable[..., Any],
    fused: Callable[..., Any],
    inputs: tuple[Any, Any, list[Tensor]],
    telling: Tensor | slice = slice(None),
) -> str | None:
    """A sentence about the error of `fused` if rounding does not explain it, else None. Both `fused` and `layer` are
    functions of weights, stacked weights and tensors, the first of which are the hidden states (…, width). Only some of
    the nodes are compared.

    The layer is run three times on the same input: as the model computes it, fused, and widened, in a precision in
    which rounding does not matter. The distance of the model's own result from the widened one is the effect of
    rounding in this layer, however large its residual stream and however many operations it has. The fused result may
    be a little farther off. It is usually closer, because a compiler leaves out roundings between operations.
    """
    hidden = inputs[2][0]
    if hidden.is_floating_point():
        inputs = _with_noise(layer, inputs)
    exact = _rows(layer(*pytree.tree_map_only(Tensor, lambda tensor: _wide(tensor, hidden.dtype), inputs)), telling)
    said, found = layer(*inputs), fused(*inputs)
    if pytree.tree_structure(said) != pytree.tree_structure(found):
        return "it returns something of another form"
    own, other = (_rows(said, telling) - exact).abs(), (_rows(found, telling) - exact).abs()
    # The median node: experts of almost equal weight may be routed differently, in a few nodes.
    one_rounding = torch.finfo(hidden.dtype).eps / 4
    allowed = torch.maximum(_size(own).median(), one_rounding * _size(exact).median())
    farther = float(_size(other).median() / allowed)
    # A column of large numbers rounds by their size, even if the model's own result lies on the exact one by luck.
    in_column = torch.maximum(own.median(0).values.clamp_min(allowed), one_rounding * exact.abs().median(0).values)
    in_a_column = float((other.median(0).values / in_column).max())
    if farther <= FARTHER and in_a_column <= FARTHER_IN_A_COLUMN:
        return None
    return f"it is {farther:.1f} times as far off as rounding, and {in_a_column:.1f} times in one column"


def _with_noise(layer: Callable[..., Any], inputs: tuple[Any, Any, list[Tensor]]) -> tuple[Any, Any, list[Tensor]]:
    """The same inputs, but with noise as hidden states, of the size of what the layer adds to them. The residual stream
    of a text may be thousands of times larger, and its rounding in bfloat16 would hide the layer and its faults."""
    weights, stacks, (hidden, *others) = inputs
    noise = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(0))
    # In memory as the hidden states are: what is compiled is compiled for their strides.
    probe = torch.empty_like(hidden).copy_(noise)
    found = pytree.tree_leaves(layer(weights, stacks, [probe, *others]))[0]
    if found.shape == probe.shape and (added := float(_size((found - probe).double().flatten()))) > 0:
        probe.mul_(added)
    return weights, stacks, [probe, *others]


def _wide(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    if tensor.dtype != dtype:
        return tensor
    return tensor.double() if dtype == torch.float32 else tensor.float()


def _rows(found: Any, telling: Tensor | slice) -> Tensor:
    """(nodes, width): the hidden states of some nodes. A layer returns hidden states alone or first in a tuple."""
    hidden: Tensor = pytree.tree_leaves(found)[0]
    return hidden.double().flatten(0, -2)[telling]


def _size(errors: Tensor) -> Tensor:
    """The root of the mean square along the last dimension."""
    return errors.square().mean(-1).sqrt()
