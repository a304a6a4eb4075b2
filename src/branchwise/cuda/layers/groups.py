"""Linear maps that read the same input, as one product over their stacked weights."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(eq=False)
class Group:
    """Linear maps that read the same input, and their weights stacked."""

    maps: list[nn.Linear]
    weight: Tensor | None = None
    bias: Tensor | None = None

    def refresh(self) -> None:
        """Make the weights of each map a view of the stack. If a map has got other weights since, stack all again."""
        for name in ("weight", "bias"):
            parts, whole = [getattr(one, name) for one in self.maps], getattr(self, name)
            if parts[0] is None:
                continue
            sizes = [len(part) for part in parts]
            if whole is None or any(
                part.data_ptr() != place.data_ptr() for part, place in zip(parts, whole.split(sizes), strict=True)
            ):
                whole = torch.cat([part.detach() for part in parts])
                setattr(self, name, whole)
                for part, place in zip(parts, whole.split(sizes), strict=True):
                    part.data = place


@contextmanager
def joined(groups: list[Group]) -> Iterator[None]:
    """Inside this context the first map of each group computes all of its maps."""
    with ExitStack() as undo:
        for group in groups:
            group.refresh()
            found: dict[str, Any] = {}
            for number, one in enumerate(group.maps):
                patch(one, partial(_part, group, number, found), undo)
        yield


def _part(group: Group, number: int, found: dict[str, Any], given: Tensor) -> Tensor:
    """The output of one map of a group; the first map computes the outputs of all."""
    if number == 0:
        # From the group: a traced layer puts into it the weights of the layer that it runs for.
        assert group.weight is not None, "weights are stacked before they are used"
        sizes = [one.out_features for one in group.maps]
        parts = nn.functional.linear(given, group.weight, group.bias).split(sizes, dim=-1)
        found.update(given=given, parts=parts)
    elif found.get("given") is not given:
        return nn.functional.linear(given, group.maps[number].weight, group.maps[number].bias)
    part: Tensor = found["parts"][number]
    return part


def patched(module: nn.Module) -> bool:
    return "forward" in module.__dict__


def patch(module: nn.Module, forward: Callable[..., Any], undo: ExitStack) -> None:
    module.__dict__["forward"] = forward
    undo.callback(module.__dict__.pop, "forward", None)


_joined: weakref.WeakKeyDictionary[nn.Module, list[weakref.ref[Group]]] = weakref.WeakKeyDictionary()
"""The groups of a model. All its targets share one stack of the weights, which is freed with the last target. If one
target stacked them again, the recordings of another would read freed memory."""


def groups_of(model: nn.Module, run: Callable[[], object]) -> list[Group]:
    """The linear maps of a model that can be joined, found once by watching a pass; no other pass of the model may run
    meanwhile. All targets get them in the same order, because a program compiled for one layer is used for others,
    whose stacks it reads in that order."""
    groups = [group for known in _joined.get(model, ()) if (group := known())]
    if not groups:
        groups = same_inputs(model, run)
        _joined[model] = [weakref.ref(group) for group in groups]
    return [group for group in groups if not any(map(patched, group.maps))]


def same_inputs(model: nn.Module, run: Callable[[], object]) -> list[Group]:
    """The linear maps of one module that read the very same tensor in a pass."""
    readers: dict[tuple[int, int], list[nn.Linear]] = {}
    kept: list[Tensor] = []  # or another tensor could take the place of one that is gone

    def see(parent: nn.Module, module: nn.Module, given: tuple[Any, ...]) -> None:
        kept.append(given[0])
        readers.setdefault((id(parent), id(given[0])), []).append(module)  # type: ignore[arg-type]

    with ExitStack() as undo:
        for parent in model.modules():
            for child in parent.children():
                if type(child) is nn.Linear and not patched(child):  # or somebody else wants to be in between
                    undo.callback(child.register_forward_pre_hook(partial(see, parent)).remove)
        run()
    found = {tuple(map(id, maps)): maps for maps in readers.values()}
    return [Group(maps) for maps in found.values() if _joinable(maps)]


def _joinable(maps: list[nn.Linear]) -> bool:
    kinds = {(one.weight.dtype, one.weight.device, one.bias is None) for one in maps}
    return len(set(maps)) == len(maps) > 1 and len(kinds) == 1
