from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings

from tests.tiers import CASES, quick_cases

TESTS = Path(__file__).parent

# No test may wait for a hub: what is not here is not there.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

# Without a GPU Triton's kernels run in its interpreter, which must be known before anything imports Triton.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# The same cases every time, and no time limit for one: a busy machine is no bug. `--hypothesis-profile=search` looks
# for new ones, and the quick tier is content with a few.
settings.register_profile("branchwise", derandomize=True, deadline=None)
settings.register_profile("quick", max_examples=15, derandomize=True, deadline=None)
settings.register_profile("search", max_examples=2000, deadline=None)
settings.load_profile("branchwise")

# Tests run in one process per core. Threads that wait for each other on a busy core are slower than no threads.
os.environ["OMP_NUM_THREADS"] = "1"
torch.set_num_threads(1)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "slow: left to `make test-all`; `make test` runs a smaller case of its kind")
    if config.option.markexpr == "not slow" and not config.getoption("--hypothesis-profile"):
        settings.load_profile("quick")
    # Said once in a process by CPUs that cannot multiply bfloat16, and true: products are made by other means.
    config.addinivalue_line("filterwarnings", "ignore:mkldnn_matmul failed")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    tests: dict[str, dict[str, pytest.Item]] = defaultdict(dict)
    for item in items:
        assert isinstance(item, pytest.Function)
        test = f"{item.path.relative_to(TESTS).as_posix()}::{item.originalname}"
        tests[test][item.callspec.id if "callspec" in vars(item) else ""] = item
    found = config.stash.setdefault(CASES, {})
    for test, cases in tests.items():
        quick = quick_cases(test, list(cases))
        found[test] = {parameters: parameters in quick for parameters in cases}
        for parameters, item in cases.items():
            if parameters not in quick:
                item.add_marker(pytest.mark.slow)


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


@pytest.fixture
def interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's interpreter as tests on the host need it: 3.6 makes the bound of a loop from an array of one element,
    which NumPy 2.4 refuses."""
    if torch.cuda.is_available() or find_spec("triton") is None:
        return
    from triton.runtime import interpreter as found

    patch = found._patch_lang_tensor

    def patch_index_too(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    monkeypatch.setattr(found, "_patch_lang_tensor", patch_index_too)


@pytest.fixture(autouse=True, scope="session")
def _language_is_patched_once_in_a_launch() -> Iterator[None]:
    """Triton's interpreter patches its whole language anew for every function that a kernel calls, which takes longer
    than most of these functions; what a launch has patched stays patched until it ends."""
    if torch.cuda.is_available() or find_spec("triton") is None:
        yield
        return
    from triton.runtime import interpreter as found

    patch_lang, patched = found._patch_lang, set[int]()

    class Scope:
        def __init__(self, inner: Any) -> None:
            self.inner = inner

        def restore(self) -> None:
            patched.clear()
            self.inner.restore()

    def patch_once(function: Any) -> Any:
        seen = {id(value) for value in function.__globals__.values() if value is found.tl or value is found.tl.core}
        if seen and seen <= patched:
            return None  # a function of a kernel; only the launch restores
        scope = Scope(patch_lang(function))
        patched.update(seen)
        return scope

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(found, "_patch_lang", patch_once)
        _know_types_again(patch, found)
        yield


def _know_types_again(patch: pytest.MonkeyPatch, found: Any) -> None:
    """Every operation makes the type of its result anew, of which a kernel has a few: half of its time."""
    tl, numpy_types, blocks, shapes = found.tl, {}, {}, {}
    own_numpy, own_block, own_tensor = found._get_np_dtype, tl.block_type.__init__, tl.tensor.__init__

    def numpy_type(kind: Any) -> Any:
        key = kind.element_ty.name if kind.is_block() else kind.name
        if key not in numpy_types:
            numpy_types[key] = own_numpy(kind)
        return numpy_types[key]

    def block(self: Any, element_ty: Any, shape: Any) -> None:
        key = element_ty.name, *(getattr(size, "value", size) for size in shape)
        if key not in blocks:
            own_block(self, element_ty, shape)
            blocks[key] = vars(self).copy()
        vars(self).update(blocks[key])

    def tensor(self: Any, handle: Any, type: Any) -> None:
        known = shapes.get(id(type.shape)) if type.is_block() else None
        if known is None:
            own_tensor(self, handle, type)
            if type.is_block():
                shapes[id(type.shape)] = type.shape, {"shape": self.shape, "numel": self.numel}
        else:
            vars(self).update(known[1], handle=handle, type=type, dtype=type.scalar)

    patch.setattr(found, "_get_np_dtype", numpy_type)
    patch.setattr(tl.block_type, "__init__", block)
    patch.setattr(tl.tensor, "__init__", tensor)
