"""Our own functions in C, compiled for the present CPU when first needed: matrix products (`products.c`), attention
(`attention.c`), the operations of a decoder layer between its products (`rows.c`), a whole layer (`layer.c`), and the
most probable tokens of logits (`likely.c`).

They are optional: without a C compiler, or without an OpenMP whose threads torch shares, other code takes their place.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable
from ctypes import c_float, c_int, c_ssize_t, c_uint, c_void_p
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from branchwise.backends.native import compiled
from branchwise.backends.native.layer import Attention, Gate, Layer, Likely, Turning

PANEL = 16
"""the number of outputs whose weights are interleaved"""


@cache
def float_product() -> Callable[..., None] | None:
    """The product in float32: a function of pointers to rows, panels and output, then of the numbers of rows, inputs
    and outputs. None if it is not available."""
    threads = _threads()
    library = compiled.library() if threads else None
    if library is None:
        return None
    found: Any = library.float_product
    found.argtypes = [c_void_p] * 3 + [c_ssize_t] * 3 + [c_uint, c_void_p]
    found.restype = None
    return lambda *given: found(*given, torch.get_num_threads(), threads)


@cache
def byte_product() -> Callable[..., None] | None:
    """The product in bytes. Its arguments are pointers to rows, room for twice their bytes, room for their scales,
    panels of bytes, scales of outputs, what the zero point adds to each output, and output; then the numbers of rows,
    inputs and outputs, the levels of a row, the least scale, and the zero point. None if it is not available."""
    threads = _threads()
    library = compiled.library() if threads else None
    try:
        found: Any = library and library.byte_product
    except AttributeError:  # the CPU has no such instructions
        return None
    if found is None:
        return None
    found.argtypes = [c_void_p] * 7 + [c_ssize_t] * 3 + [c_float] * 2 + [c_int, c_uint, c_void_p]
    found.restype = None
    return lambda *given: found(*given, torch.get_num_threads(), threads)


def byte_panels(numbers: Tensor) -> Tensor:
    """(outputs / 16, inputs / 4, 16, 4): a matrix of bytes (out, in) in the order in which it is read, zero-padded."""
    filled = functional.pad(numbers, (0, 0, 0, -len(numbers) % PANEL))
    return filled.view(-1, PANEL, filled.shape[1] // 4, 4).transpose(1, 2).contiguous()


def panels(weight: Tensor) -> Tensor:
    """(outputs / 16, inputs, 16): a matrix (out, in) in the order in which it is read, zero-padded."""
    filled = functional.pad(weight, (0, 0, 0, -len(weight) % PANEL))
    return filled.view(-1, PANEL, filled.shape[1]).transpose(1, 2).contiguous()


class RowFunctions:
    """Functions in C over rows of float32, each computed by itself. All tensors must be contiguous."""

    def __init__(self, library: Any, threads: c_void_p) -> None:
        self._threads = threads
        self._add_norm = self._bound(library.add_norm, [c_void_p] * 4 + [c_ssize_t] * 2 + [c_float])
        self._gated = self._bound(library.gated, [c_void_p] * 2 + [c_ssize_t] * 2)
        self._whole_numbers = self._bound(
            library.whole_numbers, [c_void_p] * 4 + [c_ssize_t] * 2 + [c_float] * 2 + [c_int]
        )
        self._scaled = self._bound(library.scaled, [c_void_p] * 4 + [c_ssize_t] * 2)
        self._most_likely = self._bound(library.most_likely, [c_void_p])
        self._turn = self._bound(library.turn, [c_void_p])
        self._attend = self._bound(library.attend, [c_void_p, c_uint, c_void_p])
        self._layer = self._bound(library.compute_layer, [c_void_p, c_uint, c_void_p])
        self._gate = self._bound(library.compute_gate, [c_void_p, c_uint, c_void_p])

    @staticmethod
    def _bound(function: Any, types: list[Any]) -> Any:
        function.argtypes, function.restype = types, None
        return function

    def add_norm(self, state: Tensor, more: Tensor | None, weight: Tensor, epsilon: float) -> Tensor:
        """The norm of a state (rows, width), to which `more` is added first."""
        out, added = torch.empty_like(state), None if more is None else more.data_ptr()
        self._add_norm(state.data_ptr(), added, weight.data_ptr(), out.data_ptr(), *state.shape, epsilon)
        return out

    def gated(self, rows: Tensor) -> Tensor:
        """(rows, width): silu(gate) * up; each row holds gate and then up."""
        count, width = rows.shape[0], rows.shape[1] // 2
        out = rows.new_empty(count, width)
        self._gated(rows.data_ptr(), out.data_ptr(), count, width)
        return out

    def whole_numbers(
        self, rows: Tensor, levels: int, least: float, kind: torch.dtype = torch.float32, zero: int = 0
    ) -> tuple[Tensor, Tensor]:
        """Rows quantised to integers up to `levels`, and the scale (rows, 1) of each. The integers may be bytes with
        the zero point `zero`."""
        out, scales = torch.empty_like(rows, dtype=kind), rows.new_empty(len(rows), 1)
        places = (out.data_ptr(), None) if kind == torch.float32 else (None, out.data_ptr())
        self._whole_numbers(rows.data_ptr(), *places, scales.data_ptr(), *rows.shape, levels, least, zero)
        return out, scales

    def scaled(self, sums: Tensor, columns: Tensor, rows: Tensor) -> Tensor:
        """Integer sums (rows, out) int32, times the scales of their columns and of their rows."""
        out = torch.empty_like(sums, dtype=torch.float32)
        self._scaled(sums.data_ptr(), columns.data_ptr(), rows.data_ptr(), out.data_ptr(), *sums.shape)
        return out

    def most_likely(self, job: Likely) -> None:
        self._most_likely(ctypes.addressof(job))

    def turn(self, job: Turning) -> None:
        self._turn(ctypes.addressof(job))

    def attend(self, job: Attention) -> None:
        self._attend(ctypes.addressof(job), torch.get_num_threads(), self._threads)

    def layer(self, job: Layer) -> None:
        self._layer(ctypes.addressof(job), torch.get_num_threads(), self._threads)

    def gate(self, job: Gate) -> None:
        self._gate(ctypes.addressof(job), torch.get_num_threads(), self._threads)


@cache
def row_functions() -> RowFunctions | None:
    """The functions over rows; None if they are not available."""
    threads = _threads()
    library = compiled.library() if threads else None
    return RowFunctions(library, threads) if library and threads else None


def normed(rows: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """The RMS norm of rows (…, width), in C if possible: torch takes several operations for it on a CPU."""
    functions = row_functions() if rows.device.type == "cpu" and rows.dtype == weight.dtype == torch.float32 else None
    if functions is None:
        return functional.rms_norm(rows, weight.shape, weight.to(rows.dtype), epsilon)
    flat = rows.reshape(-1, rows.shape[-1]).contiguous()
    return functions.add_norm(flat, None, weight, epsilon).view(rows.shape)


def begin() -> None:
    """Compile beside what the caller does, if the functions will be available."""
    if _threads() is not None:
        compiled.begin()


def _threads() -> c_void_p | None:
    """The address of the function that runs work on torch's OpenMP threads: a second pool would compete with them."""
    try:
        maps = Path("/proc/self/maps").read_text()
        path = re.search(r"/\S*/lib[gi]?omp5?\b[^/\s]*\.so\S*", maps)
        return ctypes.cast(ctypes.CDLL(path[0]).GOMP_parallel, c_void_p) if path else None
    except (OSError, AttributeError):
        return None
