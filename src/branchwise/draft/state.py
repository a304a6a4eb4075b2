"""What a drafter has learned, in a file: memories that go on where they were left.

A file is safetensors with the tensors of every part that learns, `trigram.pairs` and so on, and tells in its metadata
whose they are and for which target. It is a hint, never an answer: whatever is in it, texts are the target's own.

A file is written beside its place and then put there in one move. So a reader finds the old one or the new one, whole,
and of two writers the later one wins, whole; nobody waits for anybody. Files are not merged: what the earlier writer
had learned since it read the file is not in that of the later one.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from branchwise.backends.base import TargetInfo
from branchwise.draft.base import Drafter, LearningDrafter
from branchwise.errors import UsageError

FORMAT = "branchwise.state"
"""the one key of the metadata, which holds all of it as JSON"""
VERSION = 1
MOST_HEADER = 100_000_000
"""bytes; safetensors takes no larger one"""


def check_state(drafter: Drafter, path: str | os.PathLike[str]) -> None:
    """Refuse what could not be loaded or saved in the end, before a model is loaded for nothing."""
    parts_of(drafter)
    file = _place(path)
    if not os.access(file.parent, os.W_OK):
        raise UsageError(f"The state cannot be written to {file}: its folder is not writable; name a file elsewhere.")


def save_state(drafter: Drafter, path: str | os.PathLike[str], target: TargetInfo) -> None:
    """Write what a drafter has learned for this target; a file is the old one or the new one, never half of either."""
    file = _place(path)
    parts = parts_of(drafter)
    tensors = {
        f"{name}.{key}": tensor.detach().cpu().clone().contiguous()
        for name, part in parts.items()
        for key, tensor in part.save().items()
    }
    known = {"version": VERSION, "drafters": sorted(parts), "vocabulary": target.vocabulary}
    known |= {"target": target.fingerprint}
    stored = save(tensors, {FORMAT: json.dumps(known | {"digest": _digest(known, tensors)})})
    beside = file.with_name(f".{file.name}.{secrets.token_hex(8)}.part")
    try:
        with beside.open("xb") as out:
            out.write(stored)
            out.flush()
            os.fsync(out.fileno())
        os.replace(beside, file)
    except OSError as error:
        raise UsageError(f"The state cannot be written to {file}: {error.strerror or error}.") from None
    finally:
        beside.unlink(missing_ok=True)


def load_state(drafter: Drafter, path: str | os.PathLike[str], target: TargetInfo) -> bool:
    """Let a drafter that is bound to this target go on from a file; says whether there is one yet."""
    file = _place(path)
    parts = parts_of(drafter)
    if not file.exists():
        return False
    known, tensors = _read(file)
    if known["vocabulary"] != target.vocabulary:
        raise UsageError(
            f"The state {file} is of a model with {known['vocabulary']} tokens, and this one has {target.vocabulary}; "
            "name another file for this model."
        )
    if known["target"] != target.fingerprint:
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
    if isinstance(drafter, LearningDrafter):
        drafter.texts = secrets.randbits(48)  # it has learned from texts of any seed
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
    """Where the file is or will be. A link stays a link: it is what it points to that is replaced."""
    file = Path(os.path.realpath(Path(path).expanduser()))
    if not file.parent.is_dir():
        raise UsageError(f"There is no folder {file.parent} for the state {file.name}; make it first.")
    if file.exists() and not file.is_file():
        raise UsageError(f"The state {file} is no file; name one.")
    return file


def _read(file: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """What a file says about itself, and its tensors; whatever is wrong with it is one sentence."""
    try:
        # Opened once, where safetensors would open it twice: between the two another file may have come in its place.
        with file.open("rb") as stored:
            size = stored.read(8)
            header = stored.read(min(int.from_bytes(size, "little"), MOST_HEADER))
            metadata = json.loads(header).get("__metadata__", {})
            if FORMAT not in metadata:
                raise UsageError(f"{file} is no state of a drafter; name another file.")
            known = json.loads(metadata[FORMAT])
            if known["version"] > VERSION:
                raise UsageError(f"The state {file} was written by a newer Branchwise; update, or name another file.")
            tensors = load(size + header + stored.read())
        if known.pop("digest") != _digest(known, tensors):
            raise ValueError("its contents are not those that were written")
    except (SafetensorError, AttributeError, LookupError, TypeError, ValueError, RuntimeError) as error:
        why = (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
        raise UsageError(f"The state {file} is damaged ({why}); remove it to begin a new one.") from None
    except OSError as error:
        raise UsageError(f"The state {file} cannot be read: {error.strerror or error}.") from None
    return known, tensors


def _digest(known: dict[str, Any], tensors: dict[str, Tensor]) -> str:
    """Of all that a file says: safetensors itself would not notice a byte that has changed."""
    found = hashlib.sha256(json.dumps(known, sort_keys=True).encode())
    for name, tensor in sorted(tensors.items()):
        found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        found.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()
