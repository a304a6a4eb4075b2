"""Branchwise makes a causal language model generate faster without changing what it would have said."""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from branchwise import hf
    from branchwise.core.sampling import SamplingParams
    from branchwise.core.tree import DraftTree
    from branchwise.errors import BranchwiseError
    from branchwise.llm import LLM, Chunk, Completion, load

__all__ = ["LLM", "BranchwiseError", "Chunk", "Completion", "DraftTree", "SamplingParams", "hf", "load"]

# Importing torch and transformers takes seconds; `branchwise --help` and a listing of names should not.
_HOMES = {
    "BranchwiseError": "branchwise.errors",
    "Chunk": "branchwise.llm",
    "Completion": "branchwise.llm",
    "DraftTree": "branchwise.core.tree",
    "LLM": "branchwise.llm",
    "SamplingParams": "branchwise.core.sampling",
    "load": "branchwise.llm",
}

try:
    __version__ = version("branchwise")
except PackageNotFoundError:  # run from the source tree
    __version__ = "0.1.0.dev0"


def __getattr__(name: str) -> Any:
    if name == "hf":
        return import_module("branchwise.hf")
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'branchwise' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
