"""`core.rng` in Triton, for all kernels that sample: the same random bits, so the same tokens."""

# mypy: disable-error-code="import-untyped, import-not-found, untyped-decorator, no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl

from branchwise.core import rng

GAMMA = tl.constexpr(rng.GAMMA)
FIRST_FACTOR = tl.constexpr(rng.signed(rng.FACTORS[0]))
SECOND_FACTOR = tl.constexpr(rng.signed(rng.FACTORS[1]))
STEP = tl.constexpr(2.0**-52)
NOBODY = tl.constexpr(1 << 40)
"""a number above every token id"""


@triton.jit
def mix(x):
    """`rng.mix`."""
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * FIRST_FACTOR
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * SECOND_FACTOR
    return x ^ ((x >> 31) & 0x1FFFFFFFF)


@triton.jit
def arrivals(keys, names, mass):
    """The arrival times, float64, of runners in an exponential race whose rates are `mass`; infinite for rate 0."""
    bits = (mix(keys + names * GAMMA) >> 12) & 0xFFFFFFFFFFFFF
    wait = -tl.log((bits.to(tl.float64) + 0.5) * STEP)
    return tl.where(mass > 0, wait / tl.where(mass > 0, mass, 1.0), float("inf"))
