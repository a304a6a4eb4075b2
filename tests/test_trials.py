"""Times of trials are kept: two processes measure, and the others take the shortest times over."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from branchwise.backends import exact, packed, trials
from branchwise.backends.packed import PackedMatrix, ways_to_pack
from branchwise.backends.trials import Times, remembered


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("BRANCHWISE_CACHE", str(tmp_path))
    return tmp_path


def measuring(*found: Times) -> Callable[[], Times]:
    """A trial that finds these times, one after the other; it fails if it is made once more."""
    left = list(found)
    return lambda: left.pop(0)


def test_the_shortest_of_two_trials_counts_from_then_on() -> None:
    trial = measuring({"a": [3.0, 1.0], "b": [5.0, 5.0]}, {"a": [2.0, 4.0], "b": [6.0, 1.0]})
    assert remembered(["x", 1], trial) == {"a": [3.0, 1.0], "b": [5.0, 5.0]}
    for _ in range(3):
        assert remembered(["x", 1], trial) == {"a": [2.0, 1.0], "b": [5.0, 1.0]}


def test_a_way_that_works_no_more_is_forgotten_and_a_new_one_is_known() -> None:
    trial = measuring({"a": [1.0], "b": [5.0]}, {"b": [7.0], "c": [2.0]})
    remembered(["x"], trial)
    for _ in range(2):
        assert remembered(["x"], trial) == {"b": [5.0], "c": [2.0]}


def test_trials_about_other_matrices_are_their_own() -> None:
    for number in (1.0, 2.0):
        for _ in range(3):
            assert remembered(["x", number], measuring(*2 * [{"a": [number]}])) == {"a": [number]}


def test_with_another_number_of_threads_a_trial_is_made_anew() -> None:
    before = torch.get_num_threads()
    for _ in range(2):
        remembered(["x"], lambda: {"a": [1.0]})
    try:
        torch.set_num_threads(before + 1)
        assert remembered(["x"], lambda: {"a": [9.0]}) == {"a": [9.0]}
    finally:
        torch.set_num_threads(before)
    assert remembered(["x"], measuring()) == {"a": [1.0]}


@pytest.mark.parametrize(
    "damage", ["", "[]", '{"[\\"x\\"]": 3}', '{"[\\"x\\"]": [2, {"a": []}]}', '{"[\\"x\\"]": [9]}']
)
def test_after_damage_a_trial_is_made_anew(damage: str, cache: Path) -> None:
    for _ in range(2):
        remembered(["x"], lambda: {"a": [1.0]})
    [file] = cache.glob("trials/*.json")
    file.write_text(damage)
    assert remembered(["x"], lambda: {"a": [9.0]}) == {"a": [9.0]}


def test_without_a_cache_every_process_makes_its_trial(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (cache / "file").touch()
    monkeypatch.setenv("BRANCHWISE_CACHE", str(cache / "file" / "cache"))
    for number in (3.0, 4.0, 5.0):
        assert remembered(["x"], lambda number=number: {"a": [number]}) == {"a": [number]}  # type: ignore[misc]


def test_matrices_are_packed_as_two_trials_have_found(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []

    def seconds(products: list[object], rows: torch.Tensor) -> float:
        made.append(len(rows))
        return 0.5 if isinstance(products[0], PackedMatrix) else 1.0

    monkeypatch.setattr(packed, "seconds", seconds)
    monkeypatch.setattr(packed, "WAYS", (PackedMatrix,))
    weight = torch.randn(304, 256)
    for process in range(4):
        made.clear()
        assert ways_to_pack([weight]) == [PackedMatrix]
        assert bool(made) == (process < trials.ENOUGH)


def test_a_product_that_is_wrong_by_now_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its times are known, and its results are not trusted."""

    class Wrong(PackedMatrix):
        broken = False

        def multiply(self, rows: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
            return super().multiply(rows, bias) + self.broken

    monkeypatch.setattr(packed, "seconds", lambda products, rows: 0.5 if isinstance(products[0], Wrong) else 1.0)
    monkeypatch.setattr(packed, "WAYS", (Wrong,))
    weight = torch.randn(304, 256)
    for _ in range(3):
        assert ways_to_pack([weight]) == [Wrong]
    Wrong.broken = True
    assert ways_to_pack([weight]) == [None]


def test_a_way_that_is_exact_no_more_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(3):
        exact._tried.cache_clear()
        assert exact.tried([(96, 64)]).best is not None
    exact._tried.cache_clear()
    monkeypatch.setattr(exact, "is_exact", lambda product, matrix: False)
    assert exact.tried([(96, 64)]).best is None
    exact._tried.cache_clear()


def test_bytes_are_multiplied_as_two_trials_have_found(monkeypatch: pytest.MonkeyPatch) -> None:
    made, own = [], exact.seconds
    monkeypatch.setattr(exact, "seconds", lambda *given: (made.append(1), own(*given))[1])
    for process in range(3):
        exact._tried.cache_clear()
        made.clear()
        found = exact.tried([(96, 64), (64, 64)])
        assert found.best is not None
        assert None in found.seconds
        assert bool(made) == (process < trials.ENOUGH)
    exact._tried.cache_clear()
