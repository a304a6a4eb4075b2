"""Where the time of a request went, what nodes earned, and what is said of it."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from branchwise.backends.base import Chunk, Prefill, Scored, TargetInfo
from branchwise.backends.toy import ToyTarget
from branchwise.cli.console import summarise
from branchwise.control.costs import cost_model_of
from branchwise.core.batch import TreeBatch
from branchwise.core.sequence import SequenceState
from branchwise.core.tree import DraftTree
from branchwise.draft import build_drafter
from branchwise.engine import Engine, Request
from branchwise.engine.explain import MEANING, Explanation, explain
from branchwise.engine.stats import PHASES, Stats
from branchwise.errors import UsageError
from branchwise.llm import LLM
from branchwise.verify import VERIFIERS
from tests.test_cli import run


@dataclass
class Clock:
    """Every look at it takes a microsecond."""

    now: float = 0.0

    def __call__(self) -> float:
        self.now += 1e-6
        return self.now


@pytest.fixture(name="clock")
def make_clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(time, "perf_counter", clock)
    return clock


class TimedTarget(ToyTarget):
    """A pass takes a while, and longer for every further node; so does a prompt."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(5)
        self.clock = clock

    def prefill(self, chunks: Sequence[Chunk]) -> list[Prefill]:
        self.clock.now += 0.1
        return super().prefill(chunks)

    def score(self, sequences: Sequence[SequenceState], batch: TreeBatch) -> Scored:
        self.clock.now += 0.004 + 0.001 * batch.nodes
        return super().score(sequences, batch)


def written(clock: Clock, draft: str, tokens: int = 40) -> tuple[Stats, TargetInfo]:
    target = TimedTarget(clock)
    engine = Engine(target, build_drafter(draft), VERIFIERS.build("match"))
    generation = engine.submit(Request((1, 2, 3, 1, 2), max_new_tokens=tokens))
    while not generation.finished:
        engine.step()
    return generation.stats, target.info


def test_phases_add_up_to_the_wall_clock(clock: Clock) -> None:
    started = clock()
    stats, info = written(clock, "ngram")
    waited = clock() - started
    found = explain(stats, info, "ngram")
    assert found.wall == pytest.approx(waited, rel=0.01)
    assert found.wall == pytest.approx(stats.wall_seconds)
    assert found.seconds["other"] < 0.01 * found.wall
    assert found.seconds["prefill"] == pytest.approx(0.1, rel=0.01)
    assert found.seconds["score"] == pytest.approx(
        sum(0.005 + 0.001 * size.nodes for size in found.sizes for _ in range(size.steps)), rel=0.01
    )
    assert set(found.seconds) == {"prefill", *PHASES, "other"} == set(MEANING)


def test_every_step_token_and_node_is_counted_once(clock: Clock) -> None:
    stats, info = written(clock, "ngram")
    found = explain(stats, info, "ngram")
    assert sum(size.steps for size in found.sizes) == found.steps == stats.steps
    assert sum(size.steps * size.tokens for size in found.sizes) == pytest.approx(found.tokens) == 40
    assert sum(size.steps * size.nodes for size in found.sizes) == stats.drafted_tokens
    [source] = found.sources
    assert (source.name, source.drafted, source.kept) == ("ngram", stats.drafted_tokens, stats.accepted_tokens)
    assert [size.nodes for size in found.sizes] == sorted({size.nodes for size in found.sizes})


def given(steps: Sequence[tuple[int, int, float]], prefill: float = 0.0, draft: float = 0.0) -> Stats:
    """Steps of (nodes, tokens, seconds), each with so many seconds of drafting besides."""
    stats = Stats(prefill_seconds=prefill)
    for nodes, tokens, seconds in steps:
        tree = DraftTree(
            torch.arange(1 + nodes), (-1, *range(nodes)), sources=("", *["memory"] * nodes) if nodes else ()
        )
        stats.record(tree, tokens, {"draft": draft, "score": seconds}, ["memory"] * (tokens - 1))
    stats.wall_seconds = prefill + sum(seconds + draft for _, _, seconds in steps)
    return stats


INFO = ToyTarget(5).info
PLAIN = given([(0, 1, 1.0)] * 9)


def test_the_speed_is_that_of_the_answer_without_its_prompt() -> None:
    found = explain(given([(3, 2, 1.25)] * 10, prefill=2.0), INFO, "memory", PLAIN)
    assert found.speedup == pytest.approx(1.6)
    assert found.headline == "Speculation paid: 1.60 times plain decoding."
    assert explain(given([(3, 1, 1.25)] * 10), INFO, "memory", PLAIN).headline.startswith(
        "Speculation did not pay: 0.80"
    )
    same = explain(given([(3, 1, 1.0)] * 10), INFO, "memory", PLAIN)
    assert same.headline.startswith("Speculation made no difference: 1.00")
    assert explain(PLAIN, INFO, "none").headline == "Nothing was drafted: the answer is plain decoding."


def test_a_plain_step_takes_what_was_timed_here() -> None:
    own = [(0, 1, 1.0), (0, 1, 1.1), (0, 1, 9.0), (4, 3, 2.0)]
    assert explain(given(own), INFO, "memory").plain == 1.1, "the median of its own"
    few = given([(4, 3, 2.0)] * 5)
    info = ToyTarget(5).info
    assert explain(few, info, "memory").speedup is None
    assert "not known" in explain(few, info, "memory").headline
    for _ in range(9):
        cost_model_of(info, 1).record(1, 0.5)
        cost_model_of(info, 8).record(1, 0.9)
    assert explain(few, info, "memory").plain == pytest.approx(0.5, rel=0.1)
    few.each = [step._replace(batch=7) for step in few.each]
    assert explain(few, info, "memory").plain == pytest.approx(0.9, rel=0.1), "that of as many texts"
    few.each[0] = few.each[0]._replace(batch=1)
    assert explain(few, info, "memory").plain is None, "the batch changed"
    assert explain(few, info, "memory", PLAIN).plain == 1.0


def test_who_reads_slowly_does_not_make_speculation_slower() -> None:
    """Without a plain run to compare with, only steps are compared with steps."""
    stats = given([(0, 1, 1.0)] * 3 + [(3, 2, 1.25)] * 30)
    fast = explain(stats, INFO, "memory").speedup
    stats.wall_seconds += 60.0
    found = explain(stats, INFO, "memory")
    assert found.speedup == fast == pytest.approx(63 / 40.5)
    assert found.seconds["other"] == pytest.approx(60.0)
    broken = given([(0, 1, 1.0)])
    broken.wall_seconds = 0.0
    assert explain(stats, INFO, "memory", broken).speedup == fast, "a run that was cut off says nothing"


def advice(steps: Sequence[tuple[int, int, float]], info: TargetInfo = INFO, **more: float) -> str:
    return " ".join(explain(given(steps, **more), info, "memory", PLAIN).advice)


def test_what_would_help_is_what_took_the_time() -> None:
    assert advice([(3, 3, 1.0)] * 5) == "", "all is well"
    assert advice([(3, 3, 1.0)] * 5, prefill=20.0).startswith("80% of the time went into the prompt")
    assert "Drafting takes 0.40 plain steps" in advice([(3, 3, 1.0)] * 5, draft=0.4)
    assert "costs 1.80 plain steps" in advice([(3, 3, 1.8)] * 5)
    assert "A step gives 1.00 tokens" in advice([(3, 1, 1.1)] * 5)
    assert "A step gives" not in advice([(3, 2, 1.8)] * 5)
    both = explain(given([(3, 1, 1.6)] * 5, draft=0.9), INFO, "memory", PLAIN).advice
    assert [line.split()[0] for line in both] == ["A", "Drafting", "A"], "what took most comes first"
    assert "--compile" not in advice([(3, 1, 1.1)] * 5)


def test_it_prints_as_a_short_text_with_all_of_it() -> None:
    text = str(explain(given([(0, 1, 1.0), (3, 2, 1.25), (3, 3, 1.25)], prefill=0.5), INFO, "memory", PLAIN))
    assert text.startswith("Speculation paid: 1.71 times plain decoding.")
    assert "6 tokens in 3 steps, 4000 ms in all:" in text
    assert "prefill     500.0 ms  12.5%" in text
    assert "      3      2     1250.0           2.50       2.0" in text
    assert "memory          3 of 6 nodes kept, 50.0%" in text
    assert len(text.splitlines()) < 20


def test_programs_read_the_same() -> None:
    found = explain(given([(3, 2, 1.25)] * 10, prefill=2.0), INFO, "memory", PLAIN)
    read: dict[str, Any] = json.loads(json.dumps(found.as_dict()))
    assert read["speedup"] == found.speedup
    assert read["sizes"] == [{"nodes": 3, "steps": 10, "tokens": 2.0, "seconds": 1.25}]
    assert read["sources"] == [{"name": "memory", "drafted": 30, "kept": 10}]
    assert isinstance(found, Explanation)


class Written:
    """An LLM that has written something."""

    def __init__(self, stats: Stats) -> None:
        self.stats = stats

    def explain(self, completion: object) -> Explanation:
        return explain(self.stats, INFO, "memory", PLAIN)


@pytest.mark.parametrize(("seconds", "said"), [(1.9, True), (1.0, False), (0.5, False)])
def test_where_speculation_did_not_pay_a_line_says_so_and_why(
    seconds: float, said: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    stats = given([(3, 1, seconds)] * 9)
    completion = SimpleNamespace(stats=stats, error=None, token_ids=[1] * 9)
    summarise(Written(stats), completion, show_draft=False)  # type: ignore[arg-type]
    lines = capsys.readouterr().err.splitlines()
    assert ("did not pay: 0.53" in lines[-1] and "A step gives 1.00" in lines[-1]) is said
    assert len(lines) == 1 + said


def test_nothing_is_explained_before_something_was_written() -> None:
    engine = Engine(ToyTarget(5), build_drafter("none"), VERIFIERS.build("match"))
    with pytest.raises(UsageError, match="generate something first"):
        LLM("toy", None, None, engine).explain()  # type: ignore[arg-type]


@pytest.mark.slow
def test_the_command_explains_a_real_answer(tmp_path: Path) -> None:
    picture = tmp_path / "why.png"
    done = run("explain", "Say hello three times.", "-n", "24", "--temperature", "0", "--plot", str(picture), "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["tokens"] == sum(size["steps"] * size["tokens"] for size in found["sizes"])
    assert found["plain_step_seconds"] > 0
    assert picture.read_bytes().startswith(b"\x89PNG")
