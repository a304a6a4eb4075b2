"""Where weights come from: an alias, a GGUF file, a local folder, or a model on the Hugging Face hub.

A GGUF file is dequantised once and kept in the cache as float32 safetensors with its tokenizer. Code that travels with
a model runs only if the caller says so; pickles are not read at all.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from branchwise.errors import ModelError, UnknownName
from branchwise.models.cache import bytes_in, cache_dir, remembered_digest, sha256_of
from branchwise.models.convert import convert_gguf, converted_folder, intact
from branchwise.models.fetch import ALIASES, DEFAULT_MODEL, Alias, gguf_of
from branchwise.models.gguf import read_header
from branchwise.models.load import explained, local_first, read_model, read_skeleton
from branchwise.models.show import quiet, wanted
from branchwise.registry import nearest

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

__all__ = [
    "ALIASES",
    "DEFAULT_MODEL",
    "Alias",
    "CachedModel",
    "cache_dir",
    "cached",
    "check_name",
    "gguf_path",
    "load_model",
    "load_skeleton",
    "load_tokenizer",
    "local_folder",
    "resolve",
]


@dataclass(frozen=True)
class CachedModel:
    """A model or a GGUF file in our cache."""

    name: str
    path: Path
    bytes: int
    source: str
    distance: str = ""
    """the distance from the model in float32, for a quantised model"""


def cached() -> list[CachedModel]:
    """The entries of our cache: converted and quantised models first, then GGUF files."""
    cache = cache_dir()
    found = []
    for note in sorted(cache.glob("converted/*/branchwise.json")):
        with contextlib.suppress(OSError, ValueError, KeyError):
            about = json.loads(note.read_text())
            found.append(CachedModel(about["name"], note.parent, bytes_in(note.parent), about["source"]))
    for note in sorted(cache.glob("quantised/*/branchwise.json")):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            about = json.loads(note.read_text())
            far = about["distance"]
            shown = f"KL {far['kl']:.4f}, {far['equal']:.1%} of {far['tokens']} most probable tokens equal"
            found.append(CachedModel(about["name"], note.parent, bytes_in(note.parent), about["source"], shown))
    packages = {alias.member: alias.package for alias in ALIASES.values()}
    return found + [
        CachedModel(file.name, file, file.stat().st_size, packages.get(file.name, "unknown"))
        for file in sorted(cache.glob("gguf/*.gguf"))
    ]


def resolve(name: str, *, progress: bool | None = None) -> Path | str:
    """The argument of `from_pretrained` for `name`: a folder, fetched and converted if needed, or the hub id unchanged.
    `progress=None` shows progress only on a terminal."""
    if alias := ALIASES.get(name):
        folder = converted_folder(alias.sha256)
        if folder.is_dir():
            return intact(folder)
        return convert_gguf(gguf_of(alias, progress), alias.sha256, name, alias.package, progress)
    path = os.path.expanduser(name)
    try:
        if name.strip() and os.path.isdir(path):
            return _local_folder(Path(path), progress)
        if os.path.isfile(path):
            return _local_file(Path(path), progress)
    except OSError as error:
        raise ModelError(f"Cannot read {name!r}: {error.strerror or error}.") from error
    check_name(name)
    return name


def check_name(name: str) -> None:
    """Refuse a name that cannot be a model's, before any slow work begins."""
    path = os.path.expanduser(name)
    if name in ALIASES or (name.strip() and os.path.isdir(path)) or os.path.isfile(path):
        return
    if name.endswith(".gguf") or name.startswith((".", "/", "~")) or os.path.isabs(path):
        raise ModelError(f"There is no file or folder {name!r}. Check the path.")
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", name):
        raise _unknown(name)


def gguf_path(alias_name: str, *, progress: bool | None = None) -> Path:
    """The path of the GGUF file of an alias, fetched if needed, with its checksum verified."""
    if alias_name not in ALIASES:
        raise _unknown(alias_name)
    return gguf_of(ALIASES[alias_name], progress)


def load_model(
    name: str, *, dtype: torch.dtype, device: str, trust_remote_code: bool = False, progress: bool | None = None
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The causal language model `name` and its tokenizer, ready for inference on `device`."""
    source = resolve(name, progress=progress)
    with quiet(bars=wanted(progress)), explained(name, source):
        model, tokenizer = local_first(partial(read_model, dtype=dtype), source, trust_remote_code)
        return model.requires_grad_(False).to(device), tokenizer  # from_pretrained left it in eval mode


def load_skeleton(
    name: str, *, trust_remote_code: bool = False, progress: bool | None = None
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model `name` on the CPU without its weights, and its tokenizer."""
    source = resolve(name, progress=progress)
    with quiet(bars=wanted(progress)), explained(name, source):
        model, tokenizer = local_first(read_skeleton, source, trust_remote_code)
        return model, tokenizer


def local_folder(name: str, *, progress: bool | None = None) -> Path | None:
    """The folder on this machine that holds the model `name`; None for a hub model that was not fetched yet."""
    source = resolve(name, progress=progress)
    if isinstance(source, Path):
        return source
    from huggingface_hub import try_to_load_from_cache

    config = try_to_load_from_cache(source, "config.json")
    return Path(config).parent if isinstance(config, str) else None


def load_tokenizer(
    name: str, *, trust_remote_code: bool = False, progress: bool | None = None
) -> PreTrainedTokenizerBase:
    """The tokenizer of the model `name` alone."""
    source = resolve(name, progress=progress)
    from transformers import AutoTokenizer  # takes seconds to import

    with quiet(bars=wanted(progress)), explained(name, source):
        tokenizer: PreTrainedTokenizerBase = local_first(AutoTokenizer.from_pretrained, source, trust_remote_code)
        return tokenizer


def _unknown(name: str) -> UnknownName:
    hint = nearest(name.lower(), ALIASES)
    return UnknownName(
        f"Unknown model {name!r}.{hint} A model is an alias ({', '.join(ALIASES)}), a hub id such as org/name, "
        "a folder with safetensors, or a .gguf file."
    )


_PICKLES = (".bin", ".pt", ".pth", ".pkl", ".ckpt")


def _local_file(path: Path, progress: bool | None) -> Path:
    if path.suffix == ".safetensors":
        raise ModelError(f"{path} is a file of weights. Give the folder that holds it and its config.json.")
    if path.suffix in _PICKLES:
        raise ModelError(f"{path} may hold a pickle, which can run code. Only safetensors and GGUF are read.")
    path = path.resolve()
    digest = remembered_digest(path)
    if digest is None:
        read_header(path)  # refuses a bad file at once; hashing it would take minutes
        digest = sha256_of(path)
    folder = converted_folder(digest)
    return intact(folder) if folder.is_dir() else convert_gguf(path, digest, path.stem, str(path), progress)


def _local_folder(folder: Path, progress: bool | None) -> Path:
    if not (folder / "config.json").is_file():
        files = sorted(folder.glob("*.gguf"))
        if len(files) == 1:
            return _local_file(files[0], progress)
        if files:
            names = ", ".join(file.name for file in files)
            raise ModelError(f"{folder} holds several GGUF files. Give the path of one of them: {names}.")
        raise ModelError(f"{folder} does not hold a model: there is no config.json in it.")
    if (folder / "branchwise.json").is_file():
        return intact(folder)
    if any(folder.glob("*.safetensors")):
        return folder
    if any(file.suffix in _PICKLES for file in folder.iterdir()):
        raise ModelError(
            f"{folder} holds its weights as a pickle, which can run code. Only safetensors are read: save it "
            "again with save_pretrained, or get a copy in safetensors."
        )
    raise ModelError(f"{folder} does not hold a model: there are no safetensors beside its config.json.")
