"""Counters of compilations, recordings and eager launches: after a warm-up none of these should occur."""

# mypy: disable-error-code="import-untyped, import-not-found"

from __future__ import annotations

import logging
from collections import Counter
from importlib.util import find_spec
from typing import Any

log = logging.getLogger(__name__)

_counts: Counter[str] = Counter()
_watching = False


def count(kind: str, what: object = "") -> None:
    """Count an event of a kind: "compiled", "recorded" (a graph), or "eager" (a function that normally has a graph ran
    without). The log names `what` it was."""
    _counts[kind] += 1
    log.debug("%s: %s", kind, what)


def counted() -> Counter[str]:
    """A copy of all counts of this process."""
    return _counts.copy()


def since(before: Counter[str]) -> frozenset[str]:
    """The kinds of events that have occurred since the counts `before`."""
    return frozenset(_counts - before)


def watch_triton() -> None:
    """Count the kernels that Triton compiles, too: it compiles one again for arguments of a new kind."""
    global _watching
    if _watching or find_spec("triton") is None:
        return
    _watching = True
    from triton import knobs

    before = knobs.runtime.jit_post_compile_hook

    def hook(*args: Any, **kwargs: Any) -> Any:
        count("compiled", kwargs.get("repr", "a kernel"))
        return None if before is None else before(*args, **kwargs)

    knobs.runtime.jit_post_compile_hook = hook
