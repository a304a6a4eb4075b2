"""Matrix products with weights of 8 or 4 bits on a CPU, by the fastest way that is exact there (`backends.exact`).

A weight matrix (out, in) is kept as small integers and a scale for every output row (8 bits) or for every 32 numbers of
it (4 bits). The input rows are quantised to 8 bits on the fly, each by a scale of its own. Sums of integers are exact
in any order, so a row gives the same bits alone, in a tree and in a batch. A way with one common scale for all rows of
a call would break that, so none is used here.

Numbers of 8 bits reach from -119 to 119 and not to 127, because such a number is 16 a + b with a and b from -8 to 7: so
two products with 4 bits make one with 8. On ARM torch has fast kernels for 4 bits (KleidiAI), but none for 8 bits.
"""

from __future__ import annotations

import logging
import warnings
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from branchwise.backends.native import PANEL, byte_panels, byte_product, row_functions
from branchwise.backends.native.layer import InMemory, Matrix

log = logging.getLogger(__name__)

MOST = 119
"""the largest number of 8 bits"""
GROUP = 32
"""the count of 4-bit numbers that share a scale"""
LEAST = 1e-30
"""the least scale, so that a row of zeros can be divided by its scale"""

_aten: Any = torch.ops.aten
_onednn: Any = torch.ops.onednn
_quantized: Any = torch.ops.quantized


class Numbers(NamedTuple):
    """A quantised matrix."""

    numbers: Tensor
    """(out, in) int8"""
    scale: Tensor
    """(out, groups) float32: the factor of the numbers of a group; with 8 bits a row is one group"""
    bits: int = 8

    def copy(self) -> Numbers:
        return Numbers(self.numbers.clone(), self.scale.clone(), self.bits)

    @property
    def nbytes(self) -> int:
        return self.numbers.numel() * self.bits // 8 + self.scale.nbytes

    @property
    def weight(self) -> Tensor:
        """(out, in) float32: the dequantised matrix."""
        out, groups = self.scale.shape
        return (self.numbers.view(out, groups, -1) * self.scale[:, :, None]).view(out, -1)

    @classmethod
    def of(cls, weight: Tensor, bits: int = 8) -> Numbers:
        """Quantise a matrix to this many bits, rounding to nearest. Four bits reach from -8 to 7; the weight of a group
        with the largest magnitude becomes -8, and scales are rounded to bfloat16, which the kernels read."""
        weight = weight.detach().float()
        if bits == 8:
            scale = weight.abs().amax(dim=1, keepdim=True).clamp_min(LEAST) / MOST
            return cls((weight / scale).round().to(torch.int8), scale)
        groups = weight.view(len(weight), -1, GROUP)
        largest = groups.gather(2, groups.abs().argmax(dim=2, keepdim=True))
        scale = (largest / -8).to(torch.bfloat16).float()
        scale = torch.where(scale == 0, LEAST, scale)
        return cls((groups / scale).round().clamp(-8, 7).to(torch.int8).view(weight.shape), scale[:, :, 0], bits)


class Way(ABC):
    """One way to multiply rows (rows, in) float32 with a matrix."""

    name: ClassVar[str]
    bits: ClassVar[int] = 8
    levels: ClassVar[int] = 127
    """the largest number to which an input row is quantised"""

    @abstractmethod
    def __init__(self, matrix: Numbers) -> None: ...

    @abstractmethod
    def __call__(self, rows: Tensor) -> Tensor:
        """(rows, out) float32."""


class WholeNumbers(Way):
    """A way that quantises a row by the scale max(abs(row)) / `levels` and sums products of integers. All such ways
    give the same result, up to the last bit of the scaled sum."""

    kind: ClassVar[torch.dtype] = torch.float32
    """the dtype of quantised rows"""
    zero: ClassVar[int] = 0
    """the zero point: the byte that stands for 0"""


class RowsFirst(WholeNumbers):
    """A way whose library takes rows that are quantised already."""

    def __call__(self, rows: Tensor) -> Tensor:
        if (functions := row_functions()) is not None:
            return self.multiply(*functions.whole_numbers(rows.contiguous(), self.levels, LEAST, self.kind, self.zero))
        scale = rows.abs().amax(dim=1, keepdim=True).clamp_min_(LEAST).div_(self.levels)
        return self.multiply((rows / scale).round_().add_(self.zero).to(self.kind), scale)

    @abstractmethod
    def multiply(self, rows: Tensor, scale: Tensor) -> Tensor:
        """(rows, out) float32: sums of integers, times the scales (rows, 1) of the rows and those of the matrix. It may
        overwrite `rows`."""


class OneDnn(RowsFirst):
    """oneDNN's product of bytes (VNNI, AMX), with prepacked weights."""

    name, kind, zero = "onednn", torch.uint8, 128

    def __init__(self, matrix: Numbers) -> None:
        self._packed = _onednn.qlinear_prepack(matrix.numbers.contiguous(), None)
        self._scale = matrix.scale[:, 0].contiguous()
        self._zeros = torch.zeros(len(matrix.scale), dtype=torch.int64)

    def multiply(self, rows: Tensor, scale: Tensor) -> Tensor:
        packed, columns, zeros = self._packed, self._scale, self._zeros
        found: Tensor = _onednn.qlinear_pointwise(
            rows, 1.0, self.zero, packed, columns, zeros, None, 1.0, 0, torch.float32, "none", [], ""
        )
        return found.mul_(scale)


class Fbgemm(RowsFirst):
    """FBGEMM's product of bytes, with prepacked weights. It takes the integers as floats and makes bytes of them."""

    name = "fbgemm"
    middle: ClassVar[int] = 128
    """the zero point of its bytes"""

    def __init__(self, matrix: Numbers) -> None:
        zeros = torch.zeros(len(matrix.scale), dtype=torch.int64)
        scale = matrix.scale[:, 0].double()
        engine = torch.backends.quantized.engine
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch deprecates quantised tensors; without them this way is not used
            try:
                torch.backends.quantized.engine = "fbgemm"
                made = torch._make_per_channel_quantized_tensor(matrix.numbers, scale, zeros, 0)
                self._packed = _quantized.linear_prepack(made, None)
            finally:
                torch.backends.quantized.engine = engine

    def multiply(self, rows: Tensor, scale: Tensor) -> Tensor:
        found: Tensor = _quantized.linear_with_input_q_dq_qweight_dq_output_fp32(rows, 1.0, self.middle, self._packed)
        return found.mul_(scale)


class OneDnnSigned(OneDnn):
    """oneDNN's product with signed bytes, which some CPUs multiply directly."""

    name, kind, zero = "onednn signed", torch.int8, 0


class OneDnnSevenBits(OneDnn):
    """oneDNN's product with 7 bits for rows: older x86 CPUs add two products in 16 bits, which 8 bits overflow."""

    name, levels, zero = "onednn with 7 bits", 63, 64


class FbgemmSevenBits(Fbgemm):
    name, levels, middle = "fbgemm with 7 bits", 63, 64


class IntMM(RowsFirst):
    """torch's plain product of integers, which works on every CPU."""

    name, kind = "int_mm", torch.int8

    def __init__(self, matrix: Numbers) -> None:
        self._numbers, self._scale = matrix.numbers.t(), matrix.scale[:, 0].contiguous()

    def multiply(self, rows: Tensor, scale: Tensor) -> Tensor:
        sums = torch._int_mm(rows, self._numbers)
        if (functions := row_functions()) is not None:
            return functions.scaled(sums, self._scale, scale)
        return sums.float().mul_(self._scale).mul_(scale)


class Bytes(WholeNumbers, InMemory):
    """Our own product (VNNI), which quantises rows itself and reads every weight once for up to sixteen rows."""

    name, kind, zero = "our own", torch.uint8, 128

    def __init__(self, matrix: Numbers) -> None:
        product = byte_product()
        if product is None:
            raise ValueError("there is none for this CPU")
        self._product, (self._out, self._width) = product, matrix.numbers.shape
        self._fill = (0, -self._width % 4)
        panels = byte_panels(functional.pad(matrix.numbers, self._fill))
        self._size = panels.shape[0] * PANEL
        more = (0, self._size - self._out)
        zeros = functional.pad(self.zero * matrix.numbers.sum(dim=1, dtype=torch.int32), more)
        self._matrix = panels, functional.pad(matrix.scale[:, 0], more), zeros

    def __call__(self, rows: Tensor) -> Tensor:
        rows = functional.pad(rows, self._fill) if self._fill[1] else rows.contiguous()
        count, width = rows.shape
        out, scales = rows.new_empty(count, self._size), rows.new_empty(count)
        room = torch.empty(2, count, width, dtype=self.kind)
        panels, columns, zeros = self._matrix
        self._product(
            rows.data_ptr(), room.data_ptr(), scales.data_ptr(), panels.data_ptr(), columns.data_ptr(),
            zeros.data_ptr(), out.data_ptr(), count, width, self._size, self.levels, LEAST, self.zero,
        )  # fmt: skip
        return out if self._size == self._out else out[:, : self._out].contiguous()

    def matrix(self, bias: Tensor | None) -> Matrix | None:
        if self._fill[1] or self._size > self._out:
            return None
        panels, columns, zeros = (part.data_ptr() for part in self._matrix)
        added = None if bias is None else bias.data_ptr()
        return Matrix(
            panels=panels, columns=columns, zeros=zeros, bias=added, width=self._width, size=self._size,
            levels=self.levels, least=LEAST, zero=self.zero,
        )  # fmt: skip


class FourBits(Way):
    """KleidiAI's product with 4 bits, in groups. It quantises each row to 8 bits itself, with its own scale and zero
    point."""

    name, bits = "kleidiai", 4

    def __init__(self, matrix: Numbers) -> None:
        self._out, self._in = matrix.numbers.shape
        self._packed = packed_nibbles(matrix.numbers, matrix.scale.to(torch.bfloat16), GROUP)

    def __call__(self, rows: Tensor) -> Tensor:
        found: Tensor = _aten._dyn_quant_matmul_4bit(rows, self._packed, GROUP, self._in, self._out)
        return found


class TwoNibbles(Way):
    """Two KleidiAI products with 4 bits that make one with 8: the first counts 16 times as much as the second."""

    name = "kleidiai"

    def __init__(self, matrix: Numbers) -> None:
        self._out, self._in = matrix.numbers.shape
        self._packed = packed_nibbles(nibbles(matrix.numbers), torch.cat([16 * matrix.scale, matrix.scale]), self._in)

    def __call__(self, rows: Tensor) -> Tensor:
        found: Tensor = _aten._dyn_quant_matmul_4bit(rows, self._packed, self._in, self._in, 2 * self._out)
        return found[:, : self._out] + found[:, self._out :]


def nibbles(numbers: Tensor) -> Tensor:
    """(2 out, in) int8: first a and then b, from -8 to 7, of the numbers 16 a + b (out, in)."""
    shifted = numbers + 8  # up to 127: still int8
    return torch.cat([shifted >> 4, (shifted & 15) - 8])


def packed_nibbles(numbers: Tensor, scale: Tensor, group: int) -> Tensor:
    """Numbers from -8 to 7 (out, in) in the order in which KleidiAI reads them."""
    out, width = numbers.shape
    shifted = (numbers + 8).to(torch.uint8)
    pairs = (shifted[:, 1::2] << 4 | shifted[:, ::2]).contiguous()
    found: Tensor = _aten._dyn_quant_pack_4bit_weight(pairs, scale, None, group, width, out)
    return found


WAYS: dict[int, tuple[type[Way], ...]] = {
    8: (Bytes, OneDnn, OneDnnSigned, Fbgemm, TwoNibbles, OneDnnSevenBits, FbgemmSevenBits, IntMM),
    4: (FourBits,),
}
"""bits -> ways, in order of preference among exact ways that are equally fast"""


def stacked(parts: Sequence[Numbers]) -> Numbers:
    """Matrices that multiply the same rows, as one matrix."""
    numbers, scales = [part.numbers for part in parts], [part.scale for part in parts]
    return Numbers(torch.cat(numbers), torch.cat(scales), parts[0].bits)
