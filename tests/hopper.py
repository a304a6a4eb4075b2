"""Kernels that are compiled for a GPU and not run, usually a Hopper one: the interpreter takes much that the compiler
does not."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

interpreted = pytest.mark.skipif(
    find_spec("triton") is None or torch.cuda.is_available(),
    reason="needs Triton" if find_spec("triton") is None else "tests/gpu runs these cases on the device",
)


def compiled_by(module: str, cache: Path, function: str = "compile_all") -> list[str]:
    """The kernels that a function of a module compiles, with nothing but the compiler: what they do on a device is for
    `tests/gpu`."""
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(cache)}
    command = [sys.executable, "-c", f"from {module} import {function}; {function}()"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=Path(__file__).parents[1])
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def as_on_hopper(device: torch.device) -> dict[str, bool]:
    """Stands for `early`."""
    return {"early": True, "launch_pdl": True}


@dataclass(frozen=True)
class Device:
    """A GPU to compile for."""

    capability: int
    shared: int
    """bytes of shared memory that a program may have"""


HOPPER, ADA = Device(90, 232_448), Device(89, 101_376)


class Compiled:
    """Stands for a kernel: compiles it for the arguments that it is called with."""

    def __init__(self, kernel: Any, device: Device = HOPPER) -> None:
        self.kernel, self.device = kernel, device

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return self._compile

    def _compile(
        self,
        *given: Any,
        num_warps: int,
        num_stages: int = 3,
        maxnreg: int | None = None,
        enable_fp_fusion: bool = True,
        launch_pdl: bool = False,
        **constants: Any,
    ) -> None:
        import triton
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource

        signature: dict[str, str] = dict.fromkeys(constants, "constexpr")
        aligned = {}
        kinds = {torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.int32: "*i32"}
        kinds[torch.int64] = "*i64"
        for place, (parameter, it) in enumerate(zip(self.kernel.params, given, strict=False)):
            name, fixed = parameter.name, not parameter.do_not_specialize
            if parameter.is_constexpr or (isinstance(it, int) and it == 1 and fixed):
                signature[name], constants[name] = "constexpr", it
            else:
                signature[name] = (
                    kinds[it.dtype] if isinstance(it, Tensor) else "i32" if isinstance(it, int) else "fp32"
                )
                if isinstance(it, Tensor) or (isinstance(it, int) and it % 16 == 0 and fixed):
                    aligned[place,] = [["tt.divisibility", 16]]
        in_order = {name: signature[name] for name in self.kernel.arg_names}
        source = ASTSource(self.kernel, in_order, constants, aligned)
        options = {"num_warps": num_warps, "num_stages": num_stages, "enable_fp_fusion": enable_fp_fusion}
        options |= {"maxnreg": maxnreg, "launch_pdl": launch_pdl}
        compiled = triton.compile(source, target=GPUTarget("cuda", self.device.capability, 32), options=options)
        assert compiled.metadata.shared <= self.device.shared, self.kernel.fn.__name__
        assert enable_fp_fusion or "fma." not in compiled.asm["ptx"]
        print(self.kernel.fn.__name__)
