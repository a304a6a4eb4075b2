"""Products with packed weights are the products, and a model is lent them for a pass alone."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

from branchwise.backends import packed
from branchwise.backends.native import compiled, float_product
from branchwise.backends.packed import (
    PackedLayers,
    PackedMatrix,
    PanelMatrix,
    PanelsForSeveral,
    Way,
    matrix,
    ways_to_pack,
)

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="needs mkldnn")


needs_compiler = pytest.mark.skipif(float_product() is None, reason="needs a C compiler and OpenMP")
OURS = [pytest.param(way, marks=needs_compiler) for way in (PanelMatrix, PanelsForSeveral)]
ways = pytest.mark.parametrize("way", [PackedMatrix, *OURS])


@pytest.fixture(autouse=True)
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long products take on this machine, or took in earlier trials."""
    monkeypatch.setattr(packed, "remembered", lambda about, measure: measure())
    monkeypatch.setattr(packed, "WAYS", (PackedMatrix,))
    monkeypatch.setattr(packed, "GAIN", torch.inf)
    monkeypatch.setattr(packed, "copies", lambda nbytes, count: 1)


@ways
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(1,), (1, 1), (2,), (3, 5), (70,), (129,), (0,)])
def test_rows_of_every_number_are_multiplied(shape: tuple[int, ...], bias: bool, way: Way) -> None:
    torch.manual_seed(0)
    weight, rows = torch.randn(303, 257), torch.randn(*shape, 257)
    added = torch.randn(303) if bias else None
    wanted = functional.linear(rows, weight, added)
    torch.testing.assert_close(way(weight)(rows, added), wanted, rtol=1e-4, atol=1e-3)


@needs_compiler
@pytest.mark.parametrize("threads", [1, 2, 5])
def test_a_row_gives_the_same_bits_alone_and_among_others(threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        rows = torch.randn(23, 257)
        product = PanelMatrix(torch.randn(1303, 257))
        for count in range(1, 23):
            assert torch.equal(product(rows[:count]), product(rows)[:count])
    finally:
        torch.set_num_threads(before)


@needs_compiler
def test_rows_that_stand_apart_are_multiplied() -> None:
    weight, rows = torch.randn(304, 256), torch.randn(256, 5).t()
    torch.testing.assert_close(PanelMatrix(weight)(rows), functional.linear(rows, weight), rtol=1e-4, atol=1e-3)


@ways
def test_a_matrix_that_was_changed_is_not_taken_for_what_it_was(way: Way) -> None:
    weight, rows = torch.randn(304, 256), torch.randn(4, 256)
    product = way(weight)
    weight.mul_(2)
    assert torch.equal(product(rows), functional.linear(rows, weight))


def test_a_model_is_as_it_was_outside_a_pass() -> None:
    model = nn.Sequential(nn.Linear(256, 300), nn.ReLU(), nn.Linear(300, 256, bias=False), nn.Linear(256, 2))
    rows = torch.randn(5, 256)
    wanted, layers = model(rows), PackedLayers(model)
    with layers():
        assert [("forward" in layer.__dict__) for layer in model] == [True, False, True, False]
        torch.testing.assert_close(model(rows), wanted, rtol=1e-4, atol=1e-4)

    def interrupted() -> None:
        with layers():
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert not any("forward" in layer.__dict__ for layer in model)


def test_nothing_is_packed_where_memory_is_short_or_a_matrix_is_small(monkeypatch: pytest.MonkeyPatch) -> None:
    large, small = torch.randn(300, 256), torch.randn(3, 256)
    assert ways_to_pack([large, small, large]) == [PackedMatrix, None, PackedMatrix]
    assert isinstance(matrix(large), PackedMatrix)
    monkeypatch.setattr(packed, "free_memory", lambda: 3.0 * large.nbytes)
    assert ways_to_pack([large]) == [PackedMatrix]
    assert ways_to_pack([large, large]) == [None, None]
    with torch.inference_mode():
        assert ways_to_pack([torch.randn(300, 256)]) == [None]


def test_a_type_without_such_a_product_is_not_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert ways_to_pack([torch.zeros(304, 256, dtype=torch.float64)]) == [None]


def test_a_way_that_finds_something_else_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(304, 256)
    assert ways_to_pack([weight]) == [PackedMatrix]
    monkeypatch.setattr(PackedMatrix, "multiply", lambda self, rows, bias: self.plain(rows) + 1)
    assert ways_to_pack([weight]) == [None]


class Other(PackedMatrix):
    """A way of another speed."""


def test_the_way_that_is_fastest_with_all_matrices_is_taken_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Times of small products are noise where other processes run, and large ones are most of a pass."""
    large, small = torch.randn(2048, 256), torch.randn(304, 256)
    spent = {(PackedMatrix, 304): 0.1, (PackedMatrix, 2048): 9.8, (Other, 304): 2.0, (Other, 2048): 9.1}

    def seconds(products: list[packed.PackedMatrix], rows: torch.Tensor) -> float:
        [product] = products
        size = product(rows).shape[-1]
        return spent.get((type(product), size), {304: 1.0, 2048: 10.0}[size])  # type: ignore[call-overload]

    monkeypatch.setattr(packed, "seconds", seconds)
    monkeypatch.setattr(packed, "WAYS", (PackedMatrix, Other))
    monkeypatch.setattr(packed, "GAIN", 0.95)
    assert ways_to_pack([small, large]) == [PackedMatrix, PackedMatrix]
    assert ways_to_pack([small, large, large, large]) == [Other] * 4
    spent[Other, 2048] = 9.6
    assert ways_to_pack([small, large, large, large]) == [None] * 4


@needs_compiler
@pytest.mark.parametrize(("single", "wanted"), [(0.9, PanelMatrix), (1.1, PanelsForSeveral)])
def test_a_single_row_is_left_to_the_library_if_that_is_faster(
    single: float, wanted: Way, monkeypatch: pytest.MonkeyPatch
) -> None:
    def seconds(products: list[packed.PackedMatrix], rows: torch.Tensor) -> float:
        [product] = products
        return (single if len(rows) == 1 else 0.5) if isinstance(product, PanelMatrix) else 1.0

    monkeypatch.setattr(packed, "seconds", seconds)
    monkeypatch.setattr(packed, "WAYS", (PanelMatrix, PackedMatrix))
    assert ways_to_pack([torch.randn(304, 256)]) == [wanted]


@pytest.mark.parametrize("compiler", ["false", "no-such-compiler", "true"])
def test_without_a_compiler_a_library_multiplies(compiler: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that fails, none at all, and one that makes nothing."""
    monkeypatch.undo()
    monkeypatch.setenv("CC", compiler)
    float_product.cache_clear()
    compiled._library.cache_clear()
    try:
        assert float_product() is None
        with pytest.raises(RuntimeError):
            PanelMatrix(torch.randn(304, 256))
        assert ways_to_pack([torch.randn(304, 256)])[0] in (None, PackedMatrix)
    finally:
        float_product.cache_clear()
        compiled._library.cache_clear()


def test_a_product_that_failed_elsewhere_keeps_nothing_from_being_packed() -> None:
    """Where a CPU has no bfloat16, torch turns its library off for good at the first such product."""
    before = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        rows, weight = torch.randn(4, 256), torch.randn(300, 256)
        assert ways_to_pack([weight]) == [PackedMatrix]
        torch.testing.assert_close(PackedMatrix(weight)(rows), functional.linear(rows, weight), rtol=1e-4, atol=1e-3)
    finally:
        torch._C._set_mkldnn_enabled(before)
