"""Files of tensors with a description: safetensors, whose metadata holds one JSON value, a version and a digest.

A file is written beside its place and then renamed over it, so a reader finds the old file or the new file, whole. A
file that is truncated, foreign, changed or too new is refused with one sentence that says what to do.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from branchwise.errors import BranchwiseError, UsageError

MOST_HEADER = 100_000_000
"""bytes; safetensors accepts no larger header"""

T = TypeVar("T")
Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Format:
    """One kind of file, and the words of its errors."""

    noun: str
    remedy: str
    """what to do about a file that cannot be used"""
    error: type[BranchwiseError]
    version: int = 1

    @property
    def key(self) -> str:
        """The one key of the metadata: safetensors stores several keys in another order each time."""
        return f"branchwise.{self.noun}"

    def write(self, file: Path, known: Mapping[str, Any], tensors: Tensors, *, parents: bool = False) -> None:
        """Replace a file as a whole; `parents` creates the folder if it is missing."""
        described = {"version": self.version, **known}
        tensors = {name: tensor.detach().cpu().clone().contiguous() for name, tensor in tensors.items()}
        stored = save(tensors, {self.key: json.dumps(described | {"digest": _digest(described, tensors)})})
        partial = file.with_name(f".{file.name}.{secrets.token_hex(8)}.part")
        try:
            if parents:
                file.parent.mkdir(parents=True, exist_ok=True)
            with partial.open("xb") as out:
                out.write(stored)
                out.flush()
                os.fsync(out.fileno())
            os.replace(partial, file)
        except OSError as error:
            raise UsageError(f"The {self.noun} cannot be written to {file}: {error.strerror or error}.") from None
        finally:
            partial.unlink(missing_ok=True)

    def read(self, file: Path, parse: Callable[[dict[str, Any], Tensors], T]) -> T:
        """What `parse` makes of the description and the tensors; its ValueError, or any like it, means damage."""
        try:
            # One open file: safetensors would open it twice, and another file may be renamed over it in between.
            with file.open("rb") as stored:
                size = stored.read(8)
                header = stored.read(min(int.from_bytes(size, "little"), MOST_HEADER))
                metadata = json.loads(header).get("__metadata__", {})
                if self.key not in metadata:
                    raise self.error(f"{file} is no {self.noun}; {self.remedy}.")
                known = json.loads(metadata[self.key])
                if known["version"] > self.version:
                    raise self.error(
                        f"The {self.noun} {file} was written by a newer Branchwise; update, or {self.remedy}."
                    )
                tensors = load(size + header + stored.read())
            if known.pop("digest") != _digest(known, tensors):
                raise ValueError("its contents are not those that were written")
            return parse(known, tensors)
        except (SafetensorError, AttributeError, LookupError, TypeError, ValueError, RuntimeError) as error:
            why = (str(error).splitlines() or [type(error).__name__])[0].rstrip(".:")
            raise self.error(f"The {self.noun} {file} is damaged ({why}); {self.remedy}.") from None
        except OSError as error:
            raise self.error(f"The {self.noun} {file} cannot be read: {error.strerror or error}.") from None


def _digest(known: Mapping[str, Any], tensors: Tensors) -> str:
    """Of the description and all tensors: safetensors itself does not notice a changed byte."""
    found = hashlib.sha256(json.dumps(known, sort_keys=True).encode())
    for name, tensor in sorted(tensors.items()):
        found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        found.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()
