"""The state of a drafter in a file: what it has learned, to continue from in another process.

A file (`artifact.py`) has the tensors of every part that learns, `trigram.pairs` and so on, and names the drafter and
the target that they belong to. It only changes what is drafted: whatever a file contains, texts are the target's own.

Two writers do not wait for each other, and files are not merged: what the earlier writer learned since it read the file
is missing from the file of the later writer.
"""

from __future__ import annotations

import os
import secrets
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from branchwise.backends.base import Target
from branchwise.draft.artifact import Format
from branchwise.draft.base import Drafter
from branchwise.draft.model.trim import fingerprint
from branchwise.errors import UsageError

FORMAT = Format("state", "remove it or name another file", UsageError)


class Learning(Protocol):
    """A drafter, or a part of one, whose learned state can be saved."""

    name: str

    def save(self) -> dict[str, Tensor]: ...
    def restore(self, tensors: dict[str, Tensor]) -> None:
        """Replace the state by what `save` returned; a UsageError says why that is impossible."""


def check_state(drafter: Drafter, path: str | os.PathLike[str]) -> None:
    """Refuse a state that could not be loaded or saved, before a model is loaded in vain."""
    parts_of(drafter)
    file = _place(path)
    if not os.access(file.parent, os.W_OK):
        raise UsageError(f"The state cannot be written to {file}: its folder is not writable; name a file elsewhere.")


def save_state(drafter: Drafter, path: str | os.PathLike[str], target: Target) -> None:
    """Write what a drafter has learned for this target; an interrupted write leaves the old file."""
    file = _place(path)
    parts = parts_of(drafter)
    tensors = {f"{name}.{key}": tensor for name, part in parts.items() for key, tensor in part.save().items()}
    known = {"drafters": sorted(parts), "vocabulary": target.vocabulary, "target": fingerprint(target)}
    FORMAT.write(file, known, tensors)


def load_state(drafter: Drafter, path: str | os.PathLike[str], target: Target) -> bool:
    """Restore a drafter that is bound to this target from a file; False if the file does not exist yet."""
    file = _place(path)
    parts = parts_of(drafter)
    if not file.exists():
        return False
    known, tensors = FORMAT.read(file, lambda known, tensors: (known, tensors))
    if known["vocabulary"] != target.vocabulary:
        raise UsageError(
            f"The state {file} is of a model with {known['vocabulary']} tokens, and this one has {target.vocabulary}; "
            "name another file for this model."
        )
    if known["target"] != fingerprint(target):
        raise UsageError(f"The state {file} is of another model or tokenizer; name another file for this model.")
    if known["drafters"] != sorted(parts):
        raise UsageError(
            f"The state {file} is of {' and '.join(known['drafters'])}, and what drafts here is "
            f"{' and '.join(sorted(parts))}; name another file for it."
        )
    for name, part in parts.items():
        own = {key.removeprefix(f"{name}."): value for key, value in tensors.items() if key.startswith(f"{name}.")}
        try:
            part.restore(own)
        except UsageError as error:
            raise UsageError(f"The state {file} does not fit: {error}") from None
    drafter.texts = secrets.randbits(48)  # type: ignore[attr-defined]  # it may have learned from texts of any seed
    return True


def parts_of(drafter: Drafter) -> dict[str, Learning]:
    """The parts of a drafter that learn, by name: the drafter itself, and the members of a fusion."""
    everyone: list[Any] = [drafter, *getattr(drafter, "members", ())]
    learning = [part for part in everyone if getattr(part, "learns", False)]
    parts = {part.name: part for part in learning if hasattr(part, "save") and hasattr(part, "restore")}
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
