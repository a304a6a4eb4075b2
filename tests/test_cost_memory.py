"""What passes cost is known to the next process too."""

from __future__ import annotations

import gc
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from branchwise.backends.base import Execution, TargetInfo
from branchwise.backends.toy import ToyTarget
from branchwise.control.costs import PassCostModel, cost_model_of
from branchwise.control.memory import path_of, remember_costs
from branchwise.tune import measure

LEARNED = PassCostModel()
for _ in range(9):
    for _rows in (1, 8):
        LEARNED.record(_rows, _rows)
SECONDS = {1: 0.01, 2: 0.02, 4: 0.021, 8: 0.03}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BRANCHWISE_CACHE", str(tmp_path))


def started() -> TargetInfo:
    """A target of a new process."""
    info = replace(ToyTarget(4).info)
    remember_costs(info)
    return info


def used(info: TargetInfo, batch: int = 1, seconds: dict[int, float] = SECONDS) -> None:
    for _ in range(40):
        for rows, spent in seconds.items():
            cost_model_of(info, batch).record(rows, spent)


def test_a_process_begins_with_what_the_last_one_knew() -> None:
    info = started()
    used(info)
    used(info, 4, {1: 0.02, 2: 0.05})
    path = path_of(info)
    learned = cost_model_of(info, 1).costs([1, 2, 4, 8])
    del info
    gc.collect()
    assert path.exists()
    again = started()
    model = cost_model_of(again, 1)
    assert learned == pytest.approx([1, 2, 2.1, 3], rel=0.1)
    assert model.costs([1, 2, 4, 8]) == pytest.approx(learned)
    assert cost_model_of(again, 4).costs([1, 2]) == pytest.approx([1, 2.5], rel=0.1)
    assert not model.knows_plain, "the pace of today is looked at first"
    for _ in range(3):
        model.record(1, 0.03)
    assert model.knows_plain
    assert model.plain_seconds == pytest.approx(0.03, rel=0.1)
    assert model.costs([8], hoped=True)[0] > 2, "there is nothing left to try"


def test_what_was_not_used_is_not_forgotten() -> None:
    first = started()
    used(first, 4)
    path = path_of(first)
    del first
    gc.collect()
    second = started()
    used(second, 1)
    del second
    gc.collect()
    assert set(json.loads(path.read_text())) == {"1", "4"}
    kept = path.read_text()
    started()
    gc.collect()
    assert path.read_text() == kept, "a process that wrote nothing leaves the file alone"


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[1, 2]",
        "{",
        '{"1": 3}',
        '{"1": {"known": [1], "spread": [[1]], "noise": 0.1}}',
        '{"one": {}}',
        '{"1": {"noise": 1}}',
        json.dumps({"1": {name: part for name, part in LEARNED.state().items() if name != "noise"}}),
        json.dumps({"1": {**LEARNED.state(), "known": [5000.0] * len(LEARNED.state()["known"])}}),  # type: ignore[arg-type]
        json.dumps({"1": {**LEARNED.state(), "noise": 10**400}}),
        json.dumps({"1": PassCostModel().state()}),
    ],
)
def test_a_damaged_file_counts_as_missing(content: str) -> None:
    path = path_of(ToyTarget(4).info)
    path.parent.mkdir(parents=True)
    path.write_text(content)
    assert cost_model_of(started(), 1).costs([1, 8]) == PassCostModel().costs([1, 8])


def test_numbers_that_are_none_are_refused() -> None:
    state = PassCostModel().state()
    broken = {**state, "known": [float("nan")] * len(list(state["known"]))}  # type: ignore[call-overload]
    with pytest.raises(ValueError, match="no costs"):
        PassCostModel().restore(broken)


def test_another_model_machine_or_way_to_run_has_a_file_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    info = ToyTarget(4).info
    others = [
        replace(info, fingerprint="another"),
        replace(info, dtype=torch.bfloat16),
        replace(info, weight_bytes=7),
        replace(info, execution=Execution(compile=True)),
    ]
    paths = {path_of(one) for one in (info, *others)}
    monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
    assert len({*paths, path_of(info)}) == 6
    monkeypatch.undo()


def test_a_cache_that_cannot_be_written_loses_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "file"
    file.write_text("no folder")
    monkeypatch.setenv("BRANCHWISE_CACHE", str(file))
    info = started()
    used(info)
    del info
    gc.collect()
    assert file.read_text() == "no folder"


def test_what_tune_measures_is_what_drafters_know() -> None:
    now = [0.0]

    class Timed(ToyTarget):
        def score(self, sequences, batch):  # type: ignore[no-untyped-def]
            now[0] += 1.0 if batch.nodes <= 4 else 2.0
            return super().score(sequences, batch)

    target = Timed(4)
    measure(target, context=2, nodes=[1, 2, 4, 8], repeat=3, clock=lambda: now[0], fresh=True)
    assert cost_model_of(target.info, 1).costs([1, 2, 4, 8]) == pytest.approx([1, 1, 1, 2], rel=0.1)
    again = Timed(4)
    measure(again, context=2, nodes=[1, 2, 4, 8], repeat=3, clock=lambda: now[0])
    assert cost_model_of(again.info, 1).costs([8]) == pytest.approx([2], rel=0.1), "from the cache too"
