from __future__ import annotations

import os

import pytest
import torch
from hypothesis import settings

# No test may wait for a hub: what is not here is not there.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

# The same cases every time, and no time limit for one: a busy machine is no bug. `--hypothesis-profile=search` looks
# for new ones.
settings.register_profile("branchwise", derandomize=True, deadline=None)
settings.register_profile("search", max_examples=2000, deadline=None)
settings.load_profile("branchwise")

# Tests run in one process per core. Threads that wait for each other on a busy core are slower than no threads.
os.environ["OMP_NUM_THREADS"] = "1"
torch.set_num_threads(1)


@pytest.fixture(autouse=True, scope="session")
def _quiet() -> None:
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


@pytest.fixture(autouse=True)
def _fixed_seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def smollm2():  # type: ignore[no-untyped-def]
    """The real default model in float32, plain; `with_drafter` gives it a drafter."""
    import branchwise

    return branchwise.load("smollm2", draft="none", dtype="float32", device="cpu", max_batch=6)
