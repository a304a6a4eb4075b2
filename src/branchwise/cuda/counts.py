"""How often something was compiled, recorded or launched kernel by kernel: what a warm-up should leave nothing of."""

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
    """One more of a kind: something was "compiled", a graph was "recorded", or what has a graph otherwise ran "eager".
    The log says what it was."""
    _counts[kind] += 1
    log.debug("%s: %s", kind, what)


def counted() -> Counter[str]:
    """All counts of this process."""
    return _counts.copy()


def since(before: Counter[str]) -> frozenset[str]:
    """What has happened since then."""
    return frozenset(_counts - before)


def watch_triton() -> None:
    """Count the kernels that Triton compiles, too: it does so when one meets arguments of a new kind."""
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
