"""The choice of a model's device and dtype."""

from __future__ import annotations

import torch

from branchwise.errors import UsageError
from branchwise.registry import check_known, nearest

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def choose_device(device: str) -> str:
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    kind = device.partition(":")[0]
    if kind not in ("cpu", "cuda"):
        raise UsageError(f"Unknown device {device!r}.{nearest(kind, ['auto', 'cpu', 'cuda'])} Use auto, cpu or cuda.")
    if kind == "cuda" and not torch.cuda.is_available():
        raise UsageError("No CUDA device is available here; use --device cpu.")
    return device


def choose_dtype(dtype: str | torch.dtype, device: str) -> torch.dtype:
    """The dtype of that name. `auto` is bfloat16 if the hardware computes in it, else float32."""
    if isinstance(dtype, torch.dtype):
        dtype = str(dtype).removeprefix("torch.")
    if dtype == "auto":
        return torch.bfloat16 if device.startswith("cuda") or _cpu_computes_bfloat16() else torch.float32
    check_known("dtype", dtype, ["auto", *DTYPES])
    return DTYPES[dtype]


def _cpu_computes_bfloat16() -> bool:
    """Whether the CPU has AMX or AVX512-BF16; without them bfloat16 is emulated and slower than float32."""
    return any(getattr(torch.cpu, f"_is_{name}_supported", bool)() for name in ("amx_tile", "avx512_bf16"))
