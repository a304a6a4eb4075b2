"""A pack of specialists: several fine-tunes of one base model, stored as one shared change and a bit for every weight.

Huang et al., "EMR-Merging: Tuning-Free High-Performance Model Merging" (arXiv 2405.17461). Given the base t0 and
specialists t1, t2, …, tensor by tensor:

    elect    the sign of every weight's summed change, and the largest change of that sign: the unified change u
    mask     of each specialist: where its own change has the sign of u
    rescale  of each specialist: the factor that makes the mean of |mask * u| that of its own changes

A specialist is t0 + rescale * mask * u. A pack is the folder of its base model, which other programs load as the base,
with one more file. u is stored in 8 bits with a scale for every row, or exactly: every weight of t0 + u is a weight of
one of the specialists, so the dtype of the specialists holds it. Vectors, such as norms, are few numbers that matter
much: each specialist keeps its own.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from branchwise.draft.state import Format, Tensors
from branchwise.errors import ModelError
from branchwise.models import ALIASES, load_model, resolve
from branchwise.registry import check_known

FILE = "specialists.safetensors"
FORMAT = Format("pack", "make it again with: branchwise train merge", ModelError)
EIGHT_BITS, EXACT = "int8", "exact"
KINDS = EIGHT_BITS, EXACT
"""ways to store unified changes"""
PARTS = "unified", "scale", "mask", "rescale", "own"


@dataclass(frozen=True, eq=False)
class Pack:
    """The content of a pack besides its base model."""

    tasks: tuple[str, ...]
    tensors: Tensors
    """for a matrix NAME: `NAME:unified` in 8 bits and `NAME:scale`, or `NAME:unified` as exact weights of t0 + u;
    `NAME:mask` (tasks, bytes); `NAME:rescale` (tasks,). For a vector: `NAME:own` (tasks, numbers)"""

    @classmethod
    def read(cls, folder: Path) -> Pack:
        def parse(known: dict[str, Any], tensors: Tensors) -> Pack:
            if any(key.rpartition(":")[2] not in PARTS for key in tensors):
                raise ValueError("it holds other tensors")
            return cls(tuple(map(str, known["tasks"])), tensors)

        return FORMAT.read(folder / FILE, parse)

    def write(self, folder: Path) -> None:
        FORMAT.write(folder / FILE, {"tasks": list(self.tasks)}, self.tensors)

    @torch.no_grad()
    def become(self, model: Any, task: str) -> None:
        """Turn the base model, in float32, into a specialist."""
        number = self.tasks.index(task)
        weights = dict(model.named_parameters())
        for name in {key.rpartition(":")[0] for key in self.tensors}:
            if name not in weights:
                raise ModelError(f"The pack changes {name}, which its base does not have; {FORMAT.remedy}.")
            weights[name].copy_(self.weight(name, number, weights[name]))

    def weight(self, name: str, number: int, base: Tensor) -> Tensor:
        """A weight of specialist `number` in float64, given the weight of the base model."""
        if f"{name}:own" in self.tensors:
            return self._part(name, "own", base)[number].double()
        unified = self._part(name, "unified", base).double()
        if f"{name}:scale" in self.tensors:
            change = (unified.flatten(0, -2) * self._part(name, "scale", base).double()[:, None]).view(base.shape)
        else:
            change = unified - base.double()
        mask = unpacked(self._part(name, "mask", base)[number], base.numel()).view(base.shape)
        return base.double() + float(self.tensors[f"{name}:rescale"][number]) * torch.where(mask, change, 0.0)

    def _part(self, name: str, part: str, like: Tensor) -> Tensor:
        return self.tensors[f"{name}:{part}"].to(like.device)


def tasks_of(model: str) -> tuple[str, ...]:
    """The names of the specialists of a pack; empty for any other model."""
    if model in ALIASES:
        return ()
    found = resolve(model)
    if not isinstance(found, Path) or not (found / FILE).is_file():
        return ()
    try:
        with safe_open(found / FILE, "pt") as file:  # read the header alone: the tensors may be gigabytes
            return tuple(map(str, json.loads(file.metadata()[FORMAT.key])["tasks"]))
    except (SafetensorError, OSError, LookupError, TypeError, ValueError):
        return Pack.read(found).tasks  # this raises an error that says what is wrong


def load_specialist(name: str, *, task: str, dtype: torch.dtype, device: str) -> tuple[Any, Any]:
    """A specialist of a pack and its tokenizer, ready for inference. Changes are smaller than the steps between 16-bit
    numbers, so they are added in higher precision, and rounded once."""
    model, tokenizer = load_model(name, dtype=torch.float32, device=device)
    Pack.read(Path(resolve(name))).become(model, task)
    for weight in model.parameters():  # buffers stay as they are: positions are computed in float32
        weight.data = weight.data.to(dtype)
    return model, tokenizer


def check_task(model: str, tasks: Sequence[str], task: str) -> None:
    if not tasks:
        raise ModelError(f"{model} is one model, not a pack of specialists; leave out task={task}.")
    check_known("task", task, tasks)


def packed(bits: Tensor) -> Tensor:
    """(…, bytes) uint8: the booleans (…, count), eight to a byte, the first in the lowest bit."""
    padded = torch.nn.functional.pad(bits.to(torch.uint8), (0, -bits.shape[-1] % 8))
    places = torch.arange(8, device=bits.device)
    return (padded.view(*bits.shape[:-1], -1, 8) << places).sum(dim=-1).to(torch.uint8)


def unpacked(stored: Tensor, count: int) -> Tensor:
    """(…, count): the booleans that `packed` stored."""
    places = torch.arange(8, device=stored.device)
    return ((stored[..., None] >> places) & 1).bool().flatten(-2)[..., :count]
