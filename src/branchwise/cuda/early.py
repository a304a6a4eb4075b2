"""Kernels that start before the previous kernel is over (programmatic dependent launch).

Starting a kernel and fetching its first weights takes as long as a small product. From Hopper on a kernel can do both
while the previous kernel still runs, and waits for its results only before it reads them. A kernel that is launched
like this calls `begin` before it reads or writes anything that other kernels write or read.
"""

# mypy: disable-error-code="import-untyped, import-not-found, untyped-decorator, no-untyped-def"

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from triton.language.extra import cuda


@cache
def early(device: torch.device) -> dict[str, bool]:
    """The launch options of a kernel that has the argument `early`."""
    able = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
    return {"early": True, "launch_pdl": True} if able else {"early": False}


@triton.jit
def begin(early: tl.constexpr):
    """Wait for the writes of the previous kernel, and then let the next kernel start. It is not started sooner, because
    kernels that only wait would fill the device."""
    if early:
        cuda.gdc_wait()
        cuda.gdc_launch_dependents()


@triton.jit
def fetch(weights, line, lines, inputs: tl.constexpr, early: tl.constexpr):
    """Prefetch some lines of a matrix into the L2 cache. That is safe before `begin`, because no kernel writes
    weights."""
    if early:
        at = tl.arange(0, triton.next_power_of_2((inputs + 63) // 64)) * 64  # two bytes each: lines of the cache
        places = weights + tl.minimum(line, lines - 1)[:, None].to(tl.int64) * inputs
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [places + tl.minimum(at, inputs - 1)[None, :]],
            dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip
