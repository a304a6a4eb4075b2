"""The entry point `vllm.general_plugins`. It runs in every process of every vLLM in the environment, and never raises.

`Proposer` installs the hooks itself and does not need this file. Without it, `register` makes block verification work
for vLLM's own draft models and heads: the V1 runner accepts `"rejection_sample_method": "block"` and then ignores it.
"""

from __future__ import annotations

import importlib.util
import logging
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from branchwise.integrations.vllm.hooks import RUNNER, install

log = logging.getLogger("vllm.branchwise")


def register() -> None:
    """Install the hooks as soon as the runner is imported, which workers do and the API server does not."""
    try:
        if RUNNER in sys.modules:
            install()
        elif not any(isinstance(finder, AfterImport) for finder in sys.meta_path):
            sys.meta_path.insert(0, AfterImport(RUNNER, install))
    except Exception as error:  # an exception here would end every vLLM in this environment
        log.warning("Branchwise leaves vLLM alone: %s.", error)


class AfterImport(MetaPathFinder):
    """Calls a function once, right after a module was imported."""

    def __init__(self, name: str, then: Callable[[], Any]) -> None:
        self.name, self.then = name, then

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self.name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = Followed(spec.loader, self.then)
        return spec


class Followed(Loader):
    """A loader that calls a function after it has loaded its module."""

    def __init__(self, loader: Loader, then: Callable[[], Any]) -> None:
        self.loader, self.then = loader, then

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        if module.__spec__ is not None:
            module.__spec__.loader = self.loader
        self.loader.exec_module(module)
        try:
            self.then()
        except Exception as error:
            log.warning("Branchwise leaves vLLM alone: %s.", error)
