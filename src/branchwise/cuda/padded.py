"""Functions of rows over a vocabulary, replayed: what drafting does on a device between two passes of a model.

Launching their few dozen small operations one by one would take longer than a pass of a small model. A recording reads
from fixed places, so rows are copied to these first. They have a few sizes, so that there are few recordings.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from branchwise.cuda.graphs import GraphedFunction


class PaddedGraphedFunction:
    """A function of tensors (rows, …). On the host it is the function itself."""

    def __init__(self, function: Callable[..., Tensor], device: torch.device, *, capture: bool = True) -> None:
        self._device = device
        self._replay = GraphedFunction(function, device, capture=capture)
        self._places: dict[Any, list[Tensor]] = {}
        self.fixed = device.type != "cpu"  # whether inputs are brought to fixed places

    def __call__(self, *inputs: Tensor) -> Tensor:
        """What the function finds, to be read or copied before the next call overwrites it. On a device every input is
        filled up with rows that mean nothing, and so is what is found."""
        if not self.fixed:
            return self._replay(*inputs)
        with torch.inference_mode():  # what comes from a pass of a model may only be touched so
            return self._replay(*self._brought(inputs))

    def _brought(self, inputs: tuple[Tensor, ...]) -> list[Tensor]:
        sizes = tuple((1 << (len(rows) - 1).bit_length(), *rows.shape[1:]) for rows in inputs)  # powers of two
        key = sizes, tuple(rows.dtype for rows in inputs)
        if key not in self._places:
            kinds = zip(sizes, inputs, strict=True)
            self._places[key] = [torch.zeros(size, dtype=rows.dtype, device=self._device) for size, rows in kinds]
        for place, rows in zip(self._places[key], inputs, strict=True):
            place[: len(rows)].copy_(rows, non_blocking=True)
        return self._places[key]
