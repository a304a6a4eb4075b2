"""Functions of our own in C, compiled for the CPU at hand when they are first asked for: a product (`products.c`),
attention (`attention.c`), what else a decoder layer does between its products (`rows.c`), all of it together
(`layer.c`), and the most probable tokens of what comes out (`likely.c`).

They are a gain and no need: where there is no C compiler, or no OpenMP whose threads could be shared with torch, they
are not there. What is compiled is not kept: it takes seconds, in which a model is read (`begin`), and a file of it
would be trusted blindly.
"""

from __future__ import annotations

import ctypes
import logging
import os
import re
import shlex
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Callable
from ctypes import c_float, c_int, c_ssize_t, c_uint, c_void_p
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from branchwise.backends.native.layer import Attention, Gate, Layer, Likely, Turning

log = logging.getLogger(__name__)

SOURCES = [Path(__file__).with_name(name) for name in ("products.c", "rows.c", "attention.c", "layer.c", "likely.c")]
FLAGS = (
    *("-O3", "-march=native", "-ffp-contract=fast", "-fopenmp-simd", "-fno-math-errno", "-fno-trapping-math"),
    *("-shared", "-fPIC", "-Wl,-Bsymbolic"),
)
ALIKE = "--param=avoid-fma-max-bits=0"
"""GCC would round sums otherwise where there is only one of them, for some CPUs; other compilers may not know that"""
SECONDS = 60
"""that a compiler may take"""
_COMPILING = threading.Lock()
PANEL = 16
"""outputs whose weights lie side by side"""


@cache
def float_product() -> Callable[..., None] | None:
    """Of rows, panels and a place for what is found, of which pointers are given, and then how many rows, inputs and
    outputs there are; None where there is none."""
    threads = _threads()
    library = _library() if threads else None
    if library is None:
        return None
    found: Any = library.float_product
    found.argtypes = [c_void_p] * 3 + [c_ssize_t] * 3 + [c_uint, c_void_p]
    found.restype = None
    return lambda *given: found(*given, torch.get_num_threads(), threads)


@cache
def byte_product() -> Callable[..., None] | None:
    """Of rows, places for them in bytes, twice, and for their scales, panels of bytes, scales of outputs, what `zero`
    makes of each of them, and a place for what is found, of which pointers are given; then how many rows, inputs and
    outputs there are, how many levels a row has, the least scale and `zero`. None where there is none."""
    threads = _threads()
    library = _library() if threads else None
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
    """(outputs / 16, inputs / 4, 16, 4): a matrix of bytes (out, in) as it is read, filled up with zeros."""
    filled = functional.pad(numbers, (0, 0, 0, -len(numbers) % PANEL))
    return filled.view(-1, PANEL, filled.shape[1] // 4, 4).transpose(1, 2).contiguous()


def panels(weight: Tensor) -> Tensor:
    """(outputs / 16, inputs, 16): a matrix (out, in) as it is read, filled up with zeros."""
    filled = functional.pad(weight, (0, 0, 0, -len(weight) % PANEL))
    return filled.view(-1, PANEL, filled.shape[1]).transpose(1, 2).contiguous()


class RowFunctions:
    """What is computed of rows of float32, each by itself; all tensors are in one piece."""

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
        """(rows, width): silu(gate) * up, which lie side by side in `rows`."""
        count, width = rows.shape[0], rows.shape[1] // 2
        out = rows.new_empty(count, width)
        self._gated(rows.data_ptr(), out.data_ptr(), count, width)
        return out

    def whole_numbers(
        self, rows: Tensor, levels: int, least: float, kind: torch.dtype = torch.float32, zero: int = 0
    ) -> tuple[Tensor, Tensor]:
        """Rows as whole numbers up to so many levels, and the scale (rows, 1) of each. They may be of one byte, in
        which `zero` stands for zero."""
        out, scales = torch.empty_like(rows, dtype=kind), rows.new_empty(len(rows), 1)
        places = (out.data_ptr(), None) if kind == torch.float32 else (None, out.data_ptr())
        self._whole_numbers(rows.data_ptr(), *places, scales.data_ptr(), *rows.shape, levels, least, zero)
        return out, scales

    def scaled(self, sums: Tensor, columns: Tensor, rows: Tensor) -> Tensor:
        """Sums of whole numbers (rows, out) int32, times the scales of their columns and of their rows."""
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
    """None where there are none."""
    threads = _threads()
    library = _library() if threads else None
    return RowFunctions(library, threads) if library and threads else None


def normed(rows: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """The norm of rows (…, width); torch takes several operations for it on a CPU."""
    functions = row_functions() if rows.device.type == "cpu" and rows.dtype == weight.dtype == torch.float32 else None
    if functions is None:
        return functional.rms_norm(rows, weight.shape, weight.to(rows.dtype), epsilon)
    flat = rows.reshape(-1, rows.shape[-1]).contiguous()
    return functions.add_norm(flat, None, weight, epsilon).view(rows.shape)


def begin() -> None:
    """Compile beside what the caller does, which may end first: whoever asks for a function waits."""
    if _threads() is not None:  # or nobody will ask
        threading.Thread(target=_library, daemon=True, name="compiling").start()


def _library() -> ctypes.CDLL | None:
    with _COMPILING:
        return _compiled()


@cache
def _compiled() -> ctypes.CDLL | None:
    for flags in ((*FLAGS, ALIKE), FLAGS):
        try:
            compiler = shlex.split(os.environ.get("CC", "")) or [shutil.which("cc") or shutil.which("gcc") or "clang"]
            with tempfile.TemporaryDirectory() as folder:
                made = Path(folder) / "native.so"
                command = [*compiler, *flags, *map(str, SOURCES), "-o", str(made), "-lm"]
                subprocess.run(command, check=True, capture_output=True, timeout=SECONDS)
                return ctypes.CDLL(str(made))
        except (OSError, ValueError, subprocess.SubprocessError) as error:
            log.info("Functions of our own are not compiled: %s", error)
    return None


def _threads() -> c_void_p | None:
    """What runs a function on the threads of torch. A second pool beside them would take turns with it."""
    try:
        maps = Path("/proc/self/maps").read_text()
        path = re.search(r"/\S*/lib[gi]?omp5?\b[^/\s]*\.so\S*", maps)
        return ctypes.cast(ctypes.CDLL(path[0]).GOMP_parallel, c_void_p) if path else None
    except (OSError, AttributeError):
        return None
