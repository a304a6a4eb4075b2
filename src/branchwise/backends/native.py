"""A product of our own in C (`products.c`), compiled for the CPU at hand when it is first asked for.

It is a gain and no need: where there is no C compiler, or no OpenMP whose threads could be shared with torch, it is
not there. What is compiled is not kept: it takes half a second, and a file of it would be trusted blindly.
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
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

log = logging.getLogger(__name__)

SOURCE = Path(__file__).with_name("products.c")
FLAGS = ("-O3", "-march=native", "-ffp-contract=fast", "-shared", "-fPIC")
SECONDS = 60
"""that a compiler may take"""
PANEL = 16
"""outputs whose weights lie side by side"""


@cache
def float_product() -> Callable[..., None] | None:
    """Of rows, panels and a place for what is found, of which pointers are given, and then how many rows, inputs and
    outputs there are; None where there is none."""
    library, threads = _library(), _threads()
    if library is None or threads is None:
        return None
    found: Any = library.float_product
    found.argtypes = [ctypes.c_void_p] * 3 + [ctypes.c_ssize_t] * 3 + [ctypes.c_uint, ctypes.c_void_p]
    found.restype = None
    return lambda *given: found(*given, torch.get_num_threads(), threads)


def panels(weight: Tensor) -> Tensor:
    """(outputs / 16, inputs, 16): a matrix (out, in) as it is read, filled up with zeros."""
    filled = functional.pad(weight, (0, 0, 0, -len(weight) % PANEL))
    return filled.view(-1, PANEL, filled.shape[1]).transpose(1, 2).contiguous()


@cache
def _library() -> ctypes.CDLL | None:
    compiler = shlex.split(os.environ.get("CC", "")) or [shutil.which("cc") or shutil.which("gcc") or "clang"]
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder) / "products.so"
        try:
            command = [*compiler, *FLAGS, str(SOURCE), "-o", str(made)]
            subprocess.run(command, check=True, capture_output=True, timeout=SECONDS)
            return ctypes.CDLL(str(made))
        except (OSError, subprocess.SubprocessError) as error:
            log.info("The product of our own is not compiled: %s", error)
            return None


def _threads() -> ctypes.c_void_p | None:
    """What runs a function on the threads of torch. A second pool beside them would take turns with it."""
    try:
        maps = Path("/proc/self/maps").read_text()
        path = re.search(r"/\S*/lib[gi]?omp5?\b[^/\s]*\.so\S*", maps)
        return ctypes.cast(ctypes.CDLL(path[0]).GOMP_parallel, ctypes.c_void_p) if path else None
    except (OSError, AttributeError):
        return None
