"""What speculation did: a run of four steps, counted by hand."""

from __future__ import annotations

import json

import pytest
import torch

from branchwise.core.sampling import SamplingParams
from branchwise.core.tree import DraftTree, Draw
from branchwise.draft import build_drafter
from branchwise.engine import Engine, Request
from branchwise.engine.stats import PHASES, Stats, Stopwatch
from branchwise.testing import ToyTarget
from branchwise.verify import VERIFIERS


def four_steps() -> Stats:
    stats = Stats(prefill_seconds=9.0)
    tenth = dict.fromkeys(PHASES, 0.1)
    stats.record(DraftTree.chain([0] * 4), 3, tenth, ["a", "a"])  # a chain of three, two of them right
    stats.record(DraftTree.root(0), 1, {"score": 0.4}, [])  # nothing drafted
    stats.record(DraftTree(torch.arange(6), (-1, 0, 0, 1, 1, 2)), 1, tenth, [])  # a tree, nothing right
    stats.record(DraftTree.chain([0] * 5), 4, tenth, ["b"] * 4)  # all right, the last token cut by a stop
    return stats


def test_a_run_is_counted_as_by_hand() -> None:
    stats = four_steps()
    assert (stats.steps, stats.drafted_tokens, stats.accepted_tokens, stats.emitted_tokens) == (4, 12, 6, 9)
    assert stats.drafted_per_depth == [3, 3, 2, 1]
    assert stats.accepted_per_depth == [2, 2, 1, 1]
    assert stats.acceptance_per_depth == pytest.approx([2 / 3, 2 / 3, 1 / 2, 1])
    assert stats.mean_acceptance_length == pytest.approx(1 + 6 / 4)
    assert stats.seconds == pytest.approx({"draft": 0.3, "score": 0.7, "verify": 0.3, "commit": 0.3})


def test_speed_counts_emitted_tokens_over_steps_without_prefill() -> None:
    assert four_steps().tokens_per_second == pytest.approx(9 / 1.6)


def test_a_request_that_never_ran_has_no_rates() -> None:
    stats = Stats()
    assert stats.mean_acceptance_length == 0
    assert stats.tokens_per_second == 0
    assert stats.acceptance_per_depth == []


def test_the_record_can_be_written_as_json_and_names_what_the_command_line_promises() -> None:
    record = json.loads(json.dumps(four_steps().as_dict()))
    promised = {"steps", "drafted_tokens", "accepted_tokens", "mean_acceptance_length", "acceptance_per_depth"}
    assert promised | {"tokens_per_second", "seconds"} <= set(record)
    assert set(record["seconds"]) == set(PHASES)
    assert (record["steps"], record["drafted_tokens"], record["accepted_tokens"]) == (4, 12, 6)


def test_a_record_is_a_copy() -> None:
    stats = four_steps()
    stats.as_dict()["seconds"]["draft"] = 100.0
    assert stats.seconds["draft"] == pytest.approx(0.3)


def test_two_requests_do_not_share_their_counts() -> None:
    four_steps()
    assert Stats() == Stats(steps=0, seconds=dict.fromkeys(PHASES, 0.0))


def test_a_stopwatch_books_each_lap_once(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([10.0, 11.0, 13.0, 13.5])
    monkeypatch.setattr("time.perf_counter", lambda: next(times))
    clock = Stopwatch()
    for phase in ("draft", "score", "draft"):
        clock.lap(phase)
    assert clock.settle() == {"draft": 1.5, "score": 2.0}
    assert clock.settle() == {}


def test_a_step_that_failed_leaves_no_time_to_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([0.0, 5.0, 20.0, 21.0])
    monkeypatch.setattr("time.perf_counter", lambda: next(times))
    clock = Stopwatch()
    clock.lap("draft")
    clock.start()
    clock.lap("draft")
    assert clock.settle() == {"draft": 1.0}


class Event:
    """A CUDA event: its time is on the device's clock, and known when the device has come past it."""

    device = 0.0  # how far the device has come
    queue = 0.0  # when it will have done all that was asked

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self, stream: object) -> None:
        assert stream == "the stream of cuda:1"
        self.time = Event.queue

    def query(self) -> bool:
        return self.time <= Event.device

    def elapsed_time(self, end: Event) -> float:
        assert self.query()
        assert end.query(), "looked at an event that has not passed: this would wait"
        return 1e3 * (end.time - self.time)


def test_on_cuda_a_lap_is_told_when_the_device_has_passed_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"the stream of {device}")
    clock = Stopwatch(torch.device("cuda:1"))
    for phase, cost in (("draft", 1.0), ("score", 2.0), ("commit", 4.0)):
        Event.queue += cost
        clock.lap(phase)
    assert clock.settle() == {}
    Event.device = 3.0  # as after the read of the verdicts
    assert clock.settle() == {"draft": 1.0, "score": 2.0}
    clock.start()
    Event.queue += 1.0
    clock.lap("draft")
    Event.device = Event.queue
    assert clock.settle() == {"commit": 4.0, "draft": 1.0}


# Draft probability against acceptance


def test_first_draws_are_counted_by_their_draft_probability() -> None:
    q = torch.tensor([[0.05, 0.35, 0.6, 0.0], [0.25, 0.25, 0.5, 0.0], [0.0, 0.0, 0.0, 1.0]])
    tree = DraftTree(torch.tensor([9, 1, 2, 0, 3]), (-1, 0, 0, 1, 2), Draw.WITHOUT_REPLACEMENT, q)
    stats = Stats()
    stats.count_probs(tree, (0, 2, 4))  # the first draw below the root, 0.35, was rejected; below node 2 all went well
    assert [place for place, tried in enumerate(stats.tried_by_prob) if tried] == [3, 9]
    assert stats.acceptance_by_prob == [None] * 3 + [0.0] + [None] * 5 + [1.0]
    stats.count_probs(tree, (0, 1))
    assert (stats.tried_by_prob[3], stats.accepted_by_prob[3], stats.tried_by_prob[2]) == (2, 1, 1)


def test_what_was_not_drawn_by_the_drafter_is_not_counted() -> None:
    stats, q = Stats(), torch.full((2, 4), 0.25)
    stats.count_probs(DraftTree.chain([1, 2, 3]), (0, 1))
    stats.count_probs(DraftTree.root(1), (0,))
    assert stats.tried_by_prob == stats.acceptance_by_prob == []
    stats.count_probs(DraftTree(torch.tensor([0, 1, 2]), (-1, 0, 1), Draw.FORK, q, trusted=True), (0, 1))
    assert sum(stats.tried_by_prob) == 1


def test_paths_are_counted_in_the_order_of_their_draws() -> None:
    q = torch.tensor([[0.05, 0.95]])
    tree = DraftTree(torch.tensor([0, 0, 1]), (-1, 0, 0), Draw.PATHS, q, leaves=(2, 1))
    stats = Stats()
    stats.count_probs(tree, (0, 2))
    assert stats.accepted_by_prob[9] == stats.tried_by_prob[9] == sum(stats.tried_by_prob) == 1


@pytest.mark.parametrize("counts", [True, False])
def test_an_engine_counts_them_if_asked(counts: bool) -> None:
    engine = Engine(ToyTarget(6), build_drafter("disturbed:0", "chain:3"), VERIFIERS.build("token"))
    engine.counts_probs = counts
    text = engine.submit(Request((1, 2), SamplingParams(temperature=1.0, seed=1), max_new_tokens=20))
    while engine.busy:
        engine.step()
    assert bool(text.stats.tried_by_prob) is counts
    assert text.stats.accepted_by_prob == text.stats.tried_by_prob, "a drafter that is the target is always right"
