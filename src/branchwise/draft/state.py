"""Files of tensors with a description, and the state of a drafter as such a file, to continue from in another process.

A file is safetensors, whose metadata holds one JSON value with a version and a digest. A new file is written beside the
old one and then renamed over it, so a reader finds either the old file or the new one, never a part. A file that is
truncated, foreign, changed or too new is refused with one sentence that says what to do.

A state has the tensors of every part that learns, `trigram.pairs` and so on, and names the drafter and the target that
they belong to. It only changes what is drafted: whatever a file contains, texts are the target's own. Two writers do
not wait for each other: if both have learned something since they read a file, the later one overwrites the earlier.
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

from branchwise.backends.base import TargetInfo
from branchwise.draft.base import Drafter, LearningDrafter
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
    """what the user can do about a file that cannot be used"""
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
        """The result of `parse`, given the description and the tensors; an error such as a ValueError means damage."""
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
                    raise self.error(f"The {self.noun} {file} is of a newer Branchwise; update, or {self.remedy}.")
                tensors = load(size + header + stored.read())
            if known.pop("digest") != _digest(known, tensors):
                raise ValueError("its contents are not those that were written")
            return parse(known, tensors)
        except (SafetensorError, AttributeError, LookupError, TypeError, ValueError, RuntimeError) as error:
            why = (str(error).splitlines() or [type(error).__name__])[0].rstrip(".:")
            raise self.error(f"The {self.noun} {file} is damaged ({why}); {self.remedy}.") from None
        except OSError as error:
            why = error.strerror or str(error)
            raise self.error(f"The {self.noun} {file} cannot be read: {why}; {self.remedy}.") from None


def _digest(known: Mapping[str, Any], tensors: Tensors) -> str:
    """A digest of the description and all tensors: safetensors itself does not notice a changed byte."""
    found = hashlib.sha256(json.dumps(known, sort_keys=True).encode())
    for name, tensor in sorted(tensors.items()):
        found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        if tensor.numel():  # an empty tensor cannot be viewed as bytes
            found.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


# The state of a drafter

FORMAT = Format("state", "remove it or name another file", UsageError)


def check_state(drafter: Drafter, path: str | os.PathLike[str]) -> None:
    """Refuse a state that could not be loaded or saved, before time is spent on loading a model."""
    parts_of(drafter)
    file = _place(path)
    if not os.access(file.parent, os.W_OK):
        raise UsageError(f"The state cannot be written to {file}: its folder is not writable; name a file elsewhere.")


def save_state(drafter: Drafter, path: str | os.PathLike[str], target: TargetInfo) -> None:
    """Write what a drafter has learned for this target; an interrupted write leaves the old file."""
    file = _place(path)
    parts = parts_of(drafter)
    tensors = {f"{name}.{key}": tensor for name, part in parts.items() for key, tensor in part.save().items()}
    known = {"drafters": sorted(parts), "vocabulary": target.vocabulary, "target": target.fingerprint}
    FORMAT.write(file, known, tensors)


def load_state(drafter: Drafter, path: str | os.PathLike[str], target: TargetInfo) -> bool:
    """Restore a drafter that is bound to this target from a file; False if the file does not exist yet."""
    file = _place(path)
    parts = parts_of(drafter)
    if not file.exists():
        return False
    known, tensors = FORMAT.read(file, lambda known, tensors: (known, tensors))
    other = None
    if known["vocabulary"] != target.vocabulary:
        other = f"a model with {known['vocabulary']} tokens, and this one has {target.vocabulary}"
    elif known["target"] != target.fingerprint:
        other = "another model or tokenizer"
    elif known["drafters"] != sorted(parts):
        other = f"{' and '.join(known['drafters'])}, and what drafts here is {' and '.join(sorted(parts))}"
    if other is not None:
        raise UsageError(f"The state {file} is of {other}; name another file for it.")
    for name, part in parts.items():
        own = {key.removeprefix(f"{name}."): value for key, value in tensors.items() if key.startswith(f"{name}.")}
        try:
            part.restore(own)
        except UsageError as error:
            raise UsageError(f"The state {file} does not fit: {error}") from None
    if isinstance(drafter, LearningDrafter):
        drafter.texts = secrets.randbits(48)  # it may have learned from texts of any seed
    return True


def parts_of(drafter: Drafter) -> dict[str, LearningDrafter]:
    """Those of the drafter and its members that learn, by name."""
    everyone = [drafter, *drafter.members]
    parts = {part.name: part for part in everyone if isinstance(part, LearningDrafter) and part.learns}
    if not parts:
        raise UsageError(
            f"Drafter {drafter.name!r} keeps nothing from one text to the next; leave out the state, or draft with one "
            "that learns, such as trigram."
        )
    return parts


def _place(path: str | os.PathLike[str]) -> Path:
    """The real path of the file: a link stays a link, and the file that it points to is replaced."""
    file = Path(os.path.realpath(Path(path).expanduser()))
    if not file.parent.is_dir():
        raise UsageError(f"There is no folder {file.parent} for the state {file.name}; make it first.")
    if file.exists() and not file.is_file():
        raise UsageError(f"The state {file} is no file; name one.")
    return file
