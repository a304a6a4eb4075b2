"""Products with packed weights are the products, and a model is lent them for a pass alone."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

from branchwise.backends import packed
from branchwise.backends.packed import PackedLayers, PackedMatrix, matrix, worth_packing

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="needs mkldnn")


@pytest.fixture(autouse=True)
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a trial finds on this machine."""
    monkeypatch.setattr(packed, "_faster", lambda weight: True)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(1,), (1, 1), (2,), (3, 5), (70,)])
def test_rows_of_every_number_are_multiplied(shape: tuple[int, ...], bias: bool) -> None:
    torch.manual_seed(0)
    weight, rows = torch.randn(300, 256), torch.randn(*shape, 256)
    added = torch.randn(300) if bias else None
    wanted = functional.linear(rows, weight, added)
    torch.testing.assert_close(PackedMatrix(weight)(rows, added), wanted, rtol=1e-4, atol=1e-3)


def test_a_matrix_that_was_changed_is_not_taken_for_what_it_was() -> None:
    weight, rows = torch.randn(300, 256), torch.randn(4, 256)
    product = PackedMatrix(weight)
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
    assert worth_packing([large, small, large]) == [True, False, True]
    assert isinstance(matrix(large), PackedMatrix)
    monkeypatch.setattr(packed, "free_memory", lambda: 3.0 * large.nbytes)
    assert worth_packing([large]) == [True]
    assert worth_packing([large, large]) == [False, False]
    with torch.inference_mode():
        assert worth_packing([torch.randn(300, 256)]) == [False]


def test_a_type_without_such_a_product_is_not_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert worth_packing([torch.zeros(300, 256, dtype=torch.float64)]) == [False]


def test_a_product_that_failed_elsewhere_keeps_nothing_from_being_packed() -> None:
    """Where a CPU has no bfloat16, torch turns its library off for good at the first such product."""
    before = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        rows, weight = torch.randn(4, 256), torch.randn(300, 256)
        assert worth_packing([weight]) == [True]
        torch.testing.assert_close(PackedMatrix(weight)(rows), functional.linear(rows, weight), rtol=1e-4, atol=1e-3)
    finally:
        torch._C._set_mkldnn_enabled(before)
