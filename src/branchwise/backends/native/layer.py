"""The structures that functions in C take for a decoder layer (`layer.c`) and for its logits (`likely.c`): the
addresses of weights, and the inputs of a pass."""

from __future__ import annotations

import ctypes
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from ctypes import c_float, c_int, c_ssize_t, c_void_p
from typing import NamedTuple

import torch
from torch import Tensor

LANES = 16
"""the most numbers of a register"""

Norm = tuple[Tensor, float]
"""the weight of a norm and its epsilon"""


class Turning(ctypes.Structure):
    """`turning` of `rows.c`."""

    _fields_ = [
        *((name, c_void_p) for name in ("given", "cos", "sin", "query_norm", "key_norm", "keys", "values")),
        *((name, c_void_p) for name in ("slots", "places")),
        *((name, c_ssize_t) for name in ("texts", "nodes", "heads", "kv_heads", "width", "cached")),
        ("epsilon", c_float),
    ]


class Attention(ctypes.Structure):
    """`attention` of `attention.c`."""

    _fields_ = [
        *((name, c_void_p) for name in ("queries", "keys", "values", "slots", "lengths", "depths", "column_depths")),
        *((name, c_void_p) for name in ("seen", "out", "room")),
        *((name, c_ssize_t) for name in ("texts", "nodes", "heads", "kv_heads", "width", "stride", "cached")),
        *((name, c_ssize_t) for name in ("columns", "own", "most", "window", "next", "workers")),
        ("scale", c_float),
    ]


class Matrix(ctypes.Structure):
    """`matrix` of `layer.c`."""

    _fields_ = [
        *((name, c_void_p) for name in ("panels", "columns", "bias", "zeros")),
        *((name, c_ssize_t) for name in ("width", "size")),
        *((name, c_float) for name in ("levels", "least")),
        ("zero", c_int),
    ]


class InMemory(ABC):
    """A product whose weights may be in the order in which functions in C read them."""

    @abstractmethod
    def matrix(self, bias: Tensor | None) -> Matrix | None:
        """The structure for this matrix and a bias; None if functions in C cannot read it. The caller must keep this
        product and the bias alive."""


class Layer(ctypes.Structure):
    """`layer` of `layer.c`."""

    _fields_ = [
        *((name, c_void_p) for name in ("state", "read", "input_norm", "norm", "qkv", "back", "wide", "down")),
        *((name, c_void_p) for name in ("out", "room", "turning", "attention")),
        *((name, c_ssize_t) for name in ("rows", "width", "outputs")),
        *((name, c_float) for name in ("input_epsilon", "epsilon")),
    ]


class Gate(ctypes.Structure):
    """`gate` of `layer.c`."""

    _fields_ = [
        *((name, c_void_p) for name in ("read", "embedded", "norm", "mix", "select", "up", "down", "out", "room")),
        *((name, c_ssize_t) for name in ("rows", "width")),
        ("epsilon", c_float),
    ]


class Likely(ctypes.Structure):
    """`likely` of `likely.c`."""

    _fields_ = [
        *((name, c_void_p) for name in ("logits", "states", "extra", "known", "table", "slots", "values", "tokens")),
        *((name, c_ssize_t) for name in ("texts", "nodes", "size", "width", "most", "count")),
        ("epsilon", c_float),
    ]


def room_for(rows: int, floats: int, widest: int) -> Tensor:
    """Scratch space for `floats` numbers a row, and for the quantised rows of products up to `widest` inputs wide."""
    return torch.empty(rows * (floats + widest // 2 + 1) + 1, dtype=torch.float32, device="cpu")


class Jobs(NamedTuple):
    """The arguments of functions in C that layers of one shape share in a pass."""

    turning: Turning
    attention: Attention
    kept: tuple[Tensor, ...]
    """the tensors whose addresses the arguments hold; they must stay alive"""


def jobs_of(
    turn: tuple[Tensor, Tensor],
    slots: Tensor,
    lengths: Tensor,
    places: Tensor,
    depths: Tensor,
    seen: Tensor,
    column_depths: Tensor,
    *,
    most: int,
    cached: int,
    heads: int,
    kv_heads: int,
    width: int,
    window: int,
    scale: float,
    epsilon: float,
) -> Jobs:
    """The shared arguments, without the addresses that differ by layer. The new rows (texts, nodes), with the rotary
    cosines and sines `turn`, are written to the rows `places` of a cache with `cached` rows a slot, after prefixes of
    these `lengths`, and see at most `most` rows. All tensors must be contiguous."""
    (texts, nodes), columns, (cos, sin) = places.shape, seen.shape[2], turn
    room = cos.new_empty(torch.get_num_threads(), 2 * width + most, LANES)
    numbers: dict[str, int] = {
        "texts": texts, "nodes": nodes, "heads": heads, "kv_heads": kv_heads, "width": width, "cached": cached,
        "slots": slots.data_ptr(),
    }  # fmt: skip
    turning = Turning(
        cos=cos.data_ptr(), sin=sin.data_ptr(), places=places.data_ptr(), epsilon=epsilon, **numbers
    )  # fmt: skip
    attention = Attention(
        lengths=lengths.data_ptr(), depths=depths.data_ptr(), seen=seen.data_ptr(),
        column_depths=column_depths.data_ptr(), room=room.data_ptr(), columns=columns,
        stride=(heads + 2 * kv_heads) * width, own=len(seen) > 1, most=most, window=window, scale=scale, **numbers,
    )  # fmt: skip
    return Jobs(turning, attention, (cos, sin, slots, lengths, places, depths, seen, column_depths, room))


class Whole:
    """A whole layer for the function in C that computes it in one call: everything except the inputs of a pass."""

    def __init__(self, matrices: Sequence[Matrix], input_norm: Norm, norm: Norm) -> None:
        qkv, back, wide, down = self._kept = tuple(matrices)
        (given, input_epsilon), (weight, epsilon) = self._norms = input_norm, norm
        self.job = Layer(
            input_norm=given.data_ptr(), norm=weight.data_ptr(), width=back.size, outputs=down.size // back.size,
            input_epsilon=input_epsilon, epsilon=epsilon,
            **{name: ctypes.addressof(m) for name, m in zip(("qkv", "back", "wide", "down"), matrices, strict=True)},
        )  # fmt: skip
        floats = 3 * back.size + qkv.size + back.width + wide.size + down.width
        self.room = floats, max(matrix.width for matrix in matrices)
        """the scratch numbers of a row, and the width of the widest product: arguments of `room_for`"""

    def compute(
        self,
        run: Callable[[Layer], None],
        state: Tensor,
        out: Tensor,
        room: Tensor,
        jobs: Jobs,
        read: Tensor | None = None,
    ) -> None:
        """Compute the layer with `run`, the function in C, for hidden states `state` (…, width). Queries, keys and
        values are made from `read`, by default from the state after its norm."""
        job = self.job
        job.state, job.out, job.room = state.data_ptr(), out.data_ptr(), room.data_ptr()
        job.read, job.rows = None if read is None else read.data_ptr(), state.numel() // job.width
        job.turning, job.attention = ctypes.addressof(jobs.turning), ctypes.addressof(jobs.attention)
        run(job)


def whole_of(parts: Iterable[tuple[object, Tensor | None]]) -> list[Matrix] | None:
    """The structures of all products with their biases; None if functions in C cannot read one of them."""
    found: list[Matrix] = []
    for product, bias in parts:
        matrix = product.matrix(bias) if isinstance(product, InMemory) else None
        if matrix is None:
            return None
        found.append(matrix)
    return found
