"""The state of a drafter in a file: what it has learned, to continue from in another process.

A file (`artifact.py`) has the tensors of every part that learns, `trigram.pairs` and so on, and names the drafter and
the target that they belong to. It only changes what is drafted: whatever a file contains, texts are the target's own.
Two writers do not wait for each other: of what both have learned since they read a file, the later one's stays.
"""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from branchwise.backends.base import TargetInfo
from branchwise.draft.artifact import Format
from branchwise.draft.base import Drafter, LearningDrafter
from branchwise.errors import UsageError

FORMAT = Format("state", "remove it or name another file", UsageError)


def check_state(drafter: Drafter, path: str | os.PathLike[str]) -> None:
    """Refuse a state that could not be loaded or saved, before a model is loaded in vain."""
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
    """The drafter and its members, by name, those that learn."""
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
