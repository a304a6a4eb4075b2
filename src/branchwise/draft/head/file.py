"""Files of trained heads: matrices in int8 with a scale for every row, and a description of the head."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from branchwise.backends.base import TargetInfo
from branchwise.draft.head.network import Head, HeadConfig
from branchwise.draft.model.vocabulary import kept_places
from branchwise.draft.state import Format, Tensors
from branchwise.errors import ModelError

FORMAT = Format("head", "train one with: branchwise train head --model MODEL", ModelError)
SCALE = ".scale"


@dataclass(frozen=True, eq=False)
class TrainedHead:
    """A head, the tokens that it can propose, and its origin."""

    head: Head
    table: Tensor
    """(tokens,) int64: the tokens of its output rows, most frequent first"""
    target: str
    """name of the model that the head was trained for"""
    weights: str
    """fingerprint of the weights of that model (`TargetInfo.weights`)"""
    about: Mapping[str, Any] = field(default_factory=dict)
    """recipe, scores and provenance"""
    rows: Tensor | None = None
    """(tokens, width): the head's own output rows for the tokens of the table; None if they are the target's"""
    embeddings: Tensor | None = None
    """(vocabulary, width): the head's own embeddings; None if they are the target's"""
    ranked: ClassVar[bool] = True
    """whether the table is in the order of frequency"""

    def save(self, file: Path, *, int8: bool = True) -> None:
        assert (self.rows, self.embeddings) == (None, None), "this file has no place for rows of its own"
        tensors: Tensors = {"table": self.table.to(torch.int32), "frequencies": self.head.frequencies}
        for name, weight in self.head.state_dict().items():
            if int8 and weight.ndim == 2:
                scale = weight.float().abs().amax(dim=1, keepdim=True).clamp_min(1e-12) / 127
                tensors[name] = (weight.float() / scale).round().to(torch.int8)
                tensors[name + SCALE] = scale[:, 0]
            else:
                tensors[name] = weight.float()
        known = {
            "config": asdict(self.head.config),
            "target": self.target,
            "weights": self.weights,
            "about": dict(self.about),
        }
        FORMAT.write(file, known, tensors, parents=True)

    @classmethod
    def load(cls, file: Path) -> TrainedHead:
        return FORMAT.read(file, cls._parsed)

    @classmethod
    def _parsed(cls, known: dict[str, Any], tensors: Tensors) -> TrainedHead:
        sizes = known["config"] | {"taps": tuple(known["config"]["taps"])}
        head = Head(HeadConfig(**sizes), tensors.pop("frequencies"))
        table = tensors.pop("table").long()
        weights = {
            name: tensor.float() * tensors[name + SCALE][:, None] if name + SCALE in tensors else tensor
            for name, tensor in tensors.items()
            if not name.endswith(SCALE)
        }
        head.load_state_dict(weights)
        head.eval().requires_grad_(False)
        return cls(head, table, known["target"], known["weights"], known["about"])

    def check(self, target: TargetInfo) -> None:
        """Refuse a target that the head was not trained for. The head would draft badly for other weights, and its
        network could not run on hidden states of another width or of other layers."""
        if self.weights != target.weights:
            raise ModelError(
                f"The head was trained for {self.target}, and this {target.name} has other weights; {FORMAT.remedy}."
            )
        self._check_cached(target)

    def _check_cached(self, target: TargetInfo) -> None:
        """Refuse a target whose keys and values the head cannot attend to."""
        config = self.head.config
        if not config.cross:
            return
        if target.cached is None:
            raise ModelError(f"{target.name} shows no keys and values, and this head attends to them.")
        for part in target.cached(config.cross, ()):
            _, heads, _, width = part.shape
            if (heads, width) != (config.kv_heads, config.head_width):
                raise ModelError(
                    f"The head attends to {config.kv_heads} heads of width {config.head_width}, and {target.name} has "
                    f"{heads} of width {width}."
                )

    def taps(self, target: TargetInfo) -> tuple[str, ...]:
        """The names of the target's layers that the head reads."""
        return self.head.config.taps

    def proposed(self, target: TargetInfo, first: int | None, trim: int | None) -> Proposed:
        """The tokens that the head proposes to a target: the `first` ones of its table, or with `trim` those that the
        target writes most."""
        assert target.embeddings is not None, "a head needs the target's embeddings"
        output, places = target.embeddings[1], kept_places(self.table, first, trim, target)
        table = self.table[places].to(target.device)
        shared = output[table].contiguous()
        rows = own_or_shared(None if self.rows is None else self.rows[places], shared)
        listed = np.zeros(target.vocabulary, dtype=np.bool_)
        listed[table.cpu()] = True
        if rows is not shared:  # the target's rows do not fit beside the head's own, so no other token can be proposed
            output, listed = rows, np.ones_like(listed)
        return Proposed(table, rows, output, listed)


class Proposed(NamedTuple):
    """The tokens that a head proposes to a target, and their output rows, on the device of the target."""

    table: Tensor
    """(tokens,): the tokens that can be proposed in every text"""
    rows: Tensor
    """(tokens, width): their output rows"""
    output: Tensor
    """(vocabulary, width): output rows for further tokens of a prompt, if there are any"""
    listed: NDArray[np.bool_]
    """(vocabulary,): the tokens that need no such row: all, if the rows of the table are the head's own"""


def own_or_shared(given: Tensor | None, theirs: Tensor) -> Tensor:
    """Rows that came with a head, or those of the target (`theirs`) if the head has none or the same."""
    if given is None:
        return theirs
    own = given.to(theirs.device, theirs.dtype)
    return theirs if torch.equal(own, theirs) else own
