"""Merges specialists of one base into a pack (EMR-Merging, arXiv 2405.17461), as `draft.model.pack` explains.

Merging learns nothing and reads no data, so it takes as long as reading the models.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from branchwise.draft.model.pack import EIGHT_BITS, EXACT, Pack, packed
from branchwise.errors import ModelError, UsageError
from branchwise.models import load_model, resolve
from branchwise.models.cache import bytes_in
from branchwise.models.show import quiet
from branchwise.progress import Progress, silent
from branchwise.provenance import without_folder
from branchwise.train.folder import whole_folder

STEPS = 127
"""steps of eight bits on either side of 0"""
NAME = r"[A-Za-z0-9][\w.-]*"


class Elected(NamedTuple):
    """The common part of the changes of one tensor, and what each specialist keeps of it."""

    unified: Tensor
    """float32"""
    masks: Tensor
    """(tasks, …) booleans"""
    rescale: Tensor
    """(tasks,) float64"""


@dataclass(frozen=True)
class Fidelity:
    """How close a specialist of the pack is to its original."""

    agreement: float
    """the share of its changed matrix weights whose change has the elected sign"""
    distance: float
    """the distance of its weights from the original's, as a share of the original's distance from the base"""
    rescale: float
    """the mean factor over tensors"""


def elect(changes: Tensor) -> Elected:
    """The common part of the changes (tasks, …) of one tensor, in float32."""
    sign = changes.sum(dim=0).sign()
    agree = changes * sign > 0
    unified = sign * torch.where(agree, changes.abs(), 0.0).amax(dim=0)
    return Elected(unified, agree, rescaled(changes, agree, unified))


def rescaled(changes: Tensor, masks: Tensor, unified: Tensor) -> Tensor:
    """(tasks,) float64: sum |change| / sum |mask * unified| of each; 1 where nothing is left of it."""
    inner = tuple(range(1, changes.ndim))
    wanted = changes.abs().sum(dim=inner, dtype=torch.float64)
    kept = torch.where(masks, unified.abs(), 0.0).sum(dim=inner, dtype=torch.float64)
    return torch.where(kept > 0, wanted / kept.clamp_min(torch.finfo(torch.float64).tiny), 1.0)


def in_eight_bits(unified: Tensor) -> tuple[Tensor, Tensor]:
    """The tensor in steps (…) of int8, and the scale (rows,) float32 of every row."""
    rows = unified.flatten(0, -2)
    scale = rows.abs().amax(dim=1) / STEPS
    steps = (rows / scale.clamp_min(torch.finfo(torch.float32).tiny)[:, None]).round()
    return steps.to(torch.int8).view(unified.shape), scale


def pack_of(
    base: Mapping[str, Tensor],
    specialists: Mapping[str, Mapping[str, Tensor]],
    kind: str = EIGHT_BITS,
    progress: Progress = silent,
) -> tuple[Pack, dict[str, Fidelity]]:
    """The pack of specialists, given the weights of each specialist and of their base; and how close each of them is to
    its original."""
    tasks, tensors = tuple(specialists), dict[str, Tensor]()
    told = {task: _Told() for task in tasks}
    for done, (name, start) in enumerate(base.items(), start=1):
        progress("electing what specialists share", done, len(base))
        stacked = torch.stack([weights[name].to(start.device) for weights in specialists.values()])
        changes = stacked.float() - start.float()
        if not changes.any():
            continue
        if start.ndim < 2:
            tensors[f"{name}:own"] = stacked
            continue
        unified, masks, rescale = elect(changes)
        if kind == EXACT:
            # Where a specialist's own change was elected, its weight is copied, so that it stays exact.
            owner = (changes == unified).int().argmax(dim=0)
            exact = torch.where(unified != 0, stacked.gather(0, owner[None])[0], start)
            tensors[f"{name}:unified"] = exact
        else:
            steps, scale = in_eight_bits(unified)
            unified = (steps.flatten(0, -2) * scale[:, None]).view(unified.shape)
            rescale = rescaled(changes, masks, unified)
            tensors |= {f"{name}:unified": steps, f"{name}:scale": scale}
        tensors |= {f"{name}:mask": packed(masks.flatten(1)), f"{name}:rescale": rescale.float()}
        for number, task in enumerate(tasks):
            found = Pack(tasks, tensors).weight(name, number, start)
            told[task].add(changes[number], masks[number], found - stacked[number].double(), float(rescale[number]))
    return Pack(tasks, tensors), {task: one.fidelity for task, one in told.items()}


class _Told:
    """Sums over tensors, from which the fidelity of a specialist follows."""

    def __init__(self) -> None:
        self.changed = self.agreed = self.square = self.missed = self.factors = 0.0
        self.tensors = 0

    def add(self, change: Tensor, mask: Tensor, miss: Tensor, factor: float) -> None:
        self.changed += int((change != 0).sum())
        self.agreed += int(mask.sum())
        self.square += float(change.double().square().sum())
        self.missed += float(miss.square().sum())
        self.factors += factor
        self.tensors += 1

    @property
    def fidelity(self) -> Fidelity:
        agreement = self.agreed / self.changed if self.changed else 1.0
        distance = (self.missed / self.square) ** 0.5 if self.square else 0.0
        return Fidelity(agreement, distance, self.factors / self.tensors if self.tensors else 1.0)


# From folders to a folder


@dataclass(frozen=True)
class Merged:
    """The sizes of what was written."""

    bytes: int
    """bytes of the pack"""
    specialists: int
    """bytes of all folders that the pack replaces"""
    tasks: dict[str, Fidelity]


def named(specialists: Sequence[str]) -> dict[str, str]:
    """{task: folder}, from words `code=FOLDER`, or `FOLDER` if the folder has the name of its task."""
    found: dict[str, str] = {}
    for word in specialists:
        task, equals, place = word.partition("=")
        if not equals:
            task, place = Path(word).name, word
        if not re.fullmatch(NAME, task):
            raise UsageError(f"A task has a plain name, as in code=FOLDER, not {task!r}.")
        if task in found:
            raise UsageError(f"Two specialists are called {task!r}; name one as OTHER={place}.")
        found[task] = place
    return found


def merge(base: str, specialists: Mapping[str, str], out: Path, kind: str, progress: Progress = silent) -> Merged:
    """Write the pack of specialists. Only one of them is in memory at a time, in the dtype of its folder."""
    folders = {task: resolve(name) for task, name in specialists.items()}  # a wrong name fails before loading
    model, tokenizer = _loaded(base)
    weights = dict(model.named_parameters())
    others: dict[str, dict[str, Tensor]] = {}
    for number, (task, name) in enumerate(specialists.items(), start=1):
        other, own = _loaded(name)
        _check_pair(base, model, tokenizer, name, other, own)
        others[task] = dict(other.named_parameters())
        progress("reading specialists", number, len(specialists))
    with torch.no_grad():
        pack, told = pack_of(weights, others, kind, progress)
    size = sum(tensor.nbytes for tensor in (*weights.values(), *pack.tensors.values()))
    about: dict[str, Any] = {"source": without_folder(base), "made": "merge", "kind": kind}
    about["tasks"] = {
        task: {"source": without_folder(name), **asdict(told[task])} for task, name in specialists.items()
    }
    with whole_folder(out, about, size) as folder, quiet():
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        pack.write(folder)
    places = [Path(folder) for folder in folders.values() if Path(folder).is_dir()]
    return Merged(bytes_in(out), sum(map(bytes_in, places)), told)


def _loaded(name: str) -> tuple[Any, Any]:
    """A model on the CPU in the dtype in which it is stored."""
    as_stored: Any = "auto"
    return load_model(name, dtype=as_stored, device="cpu")


def _check_pair(base: str, model: Any, tokenizer: Any, name: str, other: Any, own: Any) -> None:
    if own.get_vocab() != tokenizer.get_vocab():
        raise ModelError(f"{name} has another tokenizer than {base}; a specialist is a fine-tune of the base itself.")
    shapes, theirs = ({key: tuple(one.shape) for key, one in each.named_parameters()} for each in (model, other))
    if shapes != theirs:
        odd = sorted(key for key in shapes.keys() | theirs.keys() if shapes.get(key) != theirs.get(key))
        raise ModelError(
            f"{name} is not of the shape of {base} ({odd[0]} differs); a specialist is a fine-tune of the base itself."
        )
