"""Branchwise makes a causal language model generate faster without changing what it would have said."""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from branchwise import hf
    from branchwise.core.sampling import SamplingParams
    from branchwise.core.tree import DraftTree
    from branchwise.errors import BranchwiseError
    from branchwise.llm import LLM, Chunk, Completion, load

__all__ = ["LLM", "BranchwiseError", "Chunk", "Completion", "DraftTree", "SamplingParams", "hf", "load"]

__version__: str

SPINS = "5000"
"""after which a thread of OpenMP that waits for others sleeps: by libgomp's own count it keeps a core for milliseconds
that the thread for which all wait may need (docs/benchmarks.md)"""
# libgomp reads it when torch is imported, which nothing above has done.
if not {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & os.environ.keys():
    os.environ["GOMP_SPINCOUNT"] = SPINS

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


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return _version()
    if name == "hf":
        return import_module("branchwise.hf")
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'branchwise' has no attribute {name!r}")


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version  # takes as long as all other imports of this file

    try:
        return version("branchwise")
    except PackageNotFoundError:  # run from the source tree
        return "0.1.0.dev0"


def __dir__() -> list[str]:
    return sorted(__all__)
