"""What every test inside vLLM needs; `make test-vllm` builds the environment and runs them."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.engines import PROPOSER, engine, write_model

# One process and one engine after the other; a worker of its own would hide what a test looks at.
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if item.path.is_relative_to(here):
            item.add_marker(pytest.mark.skipif(find_spec("vllm") is None, reason="needs vLLM: make test-vllm"))
            item.add_marker(pytest.mark.filterwarnings("default"))  # vLLM and what it imports warn of much


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def plain(model: Path) -> Any:
    return engine(model)


@pytest.fixture(scope="session")
def ours(model: Path) -> Any:
    return engine(model, {"model": PROPOSER}, {})
