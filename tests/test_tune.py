"""Costs of passes: measured right, cliffs found where they stand and nowhere else, kept whole or not at all.

No test looks at real time: a fake target moves the clock by what a pass is meant to cost.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import LlamaConfig, PreTrainedTokenizerFast
from typer.testing import CliRunner

from branchwise import tune
from branchwise.backends.base import Execution, Scored
from branchwise.backends.transformers.target import TransformersTarget
from branchwise.cli.tune import tune as command
from branchwise.core.batch import TreeBatch
from branchwise.core.sequence import SequenceState
from branchwise.core.tree import DraftTree
from branchwise.draft import build_drafter
from branchwise.draft.base import Budget
from branchwise.draft.lookup.ngram import NGram
from branchwise.engine import Engine
from branchwise.errors import UsageError
from branchwise.llm import LLM
from branchwise.testing import ToyTarget
from branchwise.tune import Cliff, Costs, Point, measure, measure_drafter
from branchwise.tune.costs import Key, key_of
from branchwise.tune.passes import CLIFF, MOST_CLIFFS, MOST_PROBES, SIZES, WARM_UPS
from branchwise.verify import VERIFIERS
from tests.conformance.architectures import COMMON, build

Cost = Callable[[int], float]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("BRANCHWISE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


class TimedTarget(ToyTarget):
    """A target on which a pass over n nodes takes cost(n) seconds of its own clock."""

    def __init__(self, cost: Cost, *, vocabulary: int = 50, context: int = 1024, max_nodes: int = 128) -> None:
        super().__init__(vocabulary, context=context, max_nodes=max_nodes)
        self.cost = cost
        self.now = 0.0
        self.scored: list[int] = []
        self.broken_after: int | None = None

    def clock(self) -> float:
        return self.now

    def score(self, sequences: Sequence[SequenceState], batch: TreeBatch, taps: Sequence[str] = ()) -> Scored:
        for row, sequence in enumerate(sequences):
            assert self._cached[sequence] == sequence.tokens[:-1]
            assert int(batch.tokens[row, 0]) == sequence.root
        assert int(batch.tokens.min()) >= 0
        assert int(batch.tokens.max()) < self.vocabulary
        if self.broken_after is not None and len(self.scored) >= self.broken_after:
            raise KeyboardInterrupt
        self.scored.append(batch.nodes)
        self.now += self.cost(batch.nodes)
        return Scored(torch.zeros(len(batch), batch.nodes, 1))


def timed(target: TimedTarget, **options: Any) -> Costs:
    return measure(target, clock=target.clock, **{"context": 64, **options})


def line(nodes: int) -> float:
    return 1.0 + 0.01 * nodes


def jumping(*cliffs: int, by: float = 0.3) -> Cost:
    return lambda nodes: line(nodes) + by * sum(nodes >= cliff for cliff in cliffs)


def noisy(cost: Cost, share: float, seed: int) -> Cost:
    rng = random.Random(seed)
    return lambda nodes: cost(nodes) * max(0.1, rng.gauss(1.0, share))


# What is measured


def test_every_point_is_the_median_of_its_passes() -> None:
    costs = timed(TimedTarget(line))
    assert set(SIZES) <= {point.nodes for point in costs.points}
    for point in costs.points:
        assert point.seconds == pytest.approx(line(point.nodes))
        assert point.low == pytest.approx(point.high)


def test_half_of_the_passes_lie_between_low_and_high() -> None:
    for point in timed(TimedTarget(noisy(line, 0.05, seed=3)), repeat=15).points:
        assert line(point.nodes) * 0.8 < point.low < point.seconds < point.high < line(point.nodes) * 1.2


def test_outliers_move_neither_points_nor_cliffs() -> None:
    rng = random.Random(5)

    def disturbed(nodes: int) -> float:
        return jumping(17)(nodes) * (20.0 if rng.random() < 0.08 else 1.0)

    costs = timed(TimedTarget(disturbed))
    assert [cliff.nodes for cliff in costs.cliffs] == [17]
    for point in costs.points:
        assert point.seconds == pytest.approx(jumping(17)(point.nodes))


def test_a_machine_that_changes_its_pace_in_mid_measurement_keeps_the_shape() -> None:
    target = TimedTarget(line)
    target.cost = lambda nodes: jumping(20)(nodes) * (1.0 if len(target.scored) < 170 else 1.4)
    costs = timed(target)
    assert len(target.scored) > 220
    assert [cliff.nodes for cliff in costs.cliffs] == [20]
    for point in costs.points:
        assert costs.ratio(point.nodes) == pytest.approx(jumping(20)(point.nodes) / jumping(20)(1), rel=0.02)


def test_every_turn_holds_every_size_once_and_the_order_changes() -> None:
    target = TimedTarget(line)
    timed(target, nodes=[1, 2, 4, 8], repeat=6)
    warm, turns = target.scored[:8], target.scored[8:]
    assert sorted(warm) == [1, 1, 2, 2, 4, 4, 8, 8]
    assert len(turns) == 6 * 4
    orders = [tuple(turns[start : start + 4]) for start in range(0, len(turns), 4)]
    assert all(sorted(order) == [1, 2, 4, 8] for order in orders)
    assert len(set(orders)) > 2


def test_passes_before_a_kernel_is_chosen_do_not_count() -> None:
    target = TimedTarget(line)
    target.cost = lambda nodes: line(nodes) * (50.0 if target.scored.count(nodes) <= WARM_UPS else 1.0)
    for point in timed(target, repeat=3).points:
        assert point.seconds == pytest.approx(line(point.nodes))


def test_a_batch_is_scored_in_one_pass_and_every_tree_has_the_same_size() -> None:
    target = TimedTarget(line)
    batches: list[int] = []
    score = target.score

    def watched(sequences: Sequence[SequenceState], batch: TreeBatch) -> Scored:
        batches.append(len(sequences))
        assert {len(tree) for tree in batch.trees} == {batch.nodes}
        return score(sequences, batch)

    target.score = watched  # type: ignore[method-assign, assignment]
    assert timed(target, batch=3).key.batch == 3
    assert set(batches) == {3}


def test_tokens_are_of_the_vocabulary_even_where_it_is_tiny() -> None:
    timed(TimedTarget(line, vocabulary=2), nodes=[1, 16])  # the target itself looks


# Cliffs


@pytest.mark.parametrize("place", [2, 3, 9, 13, 17, 20, 33, 41, 65, 100, 128])
def test_a_planted_cliff_is_found_exactly_where_it_stands(place: int) -> None:
    costs = timed(TimedTarget(jumping(place)))
    assert [cliff.nodes for cliff in costs.cliffs] == [place]
    assert costs.cliffs[0].stay_at == place - 1
    assert costs.cliffs[0].times == pytest.approx(jumping(place)(place) / jumping(place)(place - 1))


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("place", [17, 27, 33])
def test_a_planted_cliff_is_found_through_noise(place: int, seed: int) -> None:
    costs = timed(TimedTarget(noisy(jumping(place), 0.03, seed)))
    assert len(costs.cliffs) == 1
    assert abs(costs.cliffs[0].nodes - place) <= 1


@pytest.mark.parametrize("seed", range(25))
def test_no_cliff_is_found_on_a_smooth_line_with_noise(seed: int) -> None:
    assert timed(TimedTarget(noisy(line, 0.05, seed))).cliffs == ()


@pytest.mark.parametrize(
    "cost",
    [
        lambda nodes: 1.0,
        lambda nodes: 0.01 * nodes,
        lambda nodes: max(1.0, nodes / 40),
        lambda nodes: 1.0 + nodes**2 / 1000,
    ],
    ids=["flat", "proportional", "a roof and a slope", "a parabola"],
)
def test_what_only_grows_has_no_cliff_however_steep_it_is(cost: Cost) -> None:
    assert timed(TimedTarget(cost)).cliffs == ()


@pytest.mark.parametrize("tile", [16, 32])
@pytest.mark.parametrize("sizes", [None, [1, 2, 4, 8, 16, 32, 64, 128]], ids=["default", "doubling"])
def test_every_stair_of_tiled_hardware_is_found_though_powers_of_two_see_a_line(
    tile: int, sizes: list[int] | None
) -> None:
    costs = timed(TimedTarget(lambda nodes: 1.0 + 0.5 * -(-nodes // tile)), nodes=sizes)
    assert [cliff.nodes for cliff in costs.cliffs] == list(range(tile + 1, 129, tile))


def test_a_step_below_what_is_worth_a_word_is_no_cliff() -> None:
    assert timed(TimedTarget(jumping(17, by=0.5 * CLIFF))).cliffs == ()


def test_the_number_of_passes_is_bounded_even_where_every_size_jumps() -> None:
    rng = random.Random(0)
    steps = [rng.choice([0.0, 0.5]) for _ in range(129)]
    target = TimedTarget(lambda nodes: 1.0 + sum(steps[:nodes]))
    timed(target, repeat=5)
    sizes = len(SIZES) + 4 * MOST_PROBES + 4 * MOST_CLIFFS
    assert len(target.scored) <= sizes * (5 + WARM_UPS)


# Costs between and beyond the points


def costs_of(*points: tuple[int, float]) -> Costs:
    key = timed(TimedTarget(line), nodes=[1], repeat=3).key
    return Costs(tuple(Point(nodes, cost, cost, cost) for nodes, cost in points), (), key, "now")


def test_seconds_are_exact_at_points_and_monotone_between_them() -> None:
    points = [(1, 1.0), (4, 1.5), (16, 1.6), (17, 3.0), (64, 9.0)]
    costs = costs_of(*points)
    for nodes, seconds in points:
        assert costs.seconds(nodes) == seconds
        assert costs.ratio(nodes) == seconds
    assert all(costs.seconds(n) <= costs.seconds(n + 1) for n in range(1, 200))
    for (left, low), (right, high) in pairwise(points):
        assert all(low <= costs.seconds(n) <= high for n in range(left, right + 1))
    assert costs.seconds(10) == pytest.approx(1.55)


def test_beyond_the_last_point_the_cost_goes_on_with_the_last_slope_but_not_with_a_cliff() -> None:
    assert costs_of((1, 1.0), (32, 2.0), (64, 4.0)).seconds(96) == pytest.approx(6.0)
    assert costs_of((1, 1.0), (32, 1.0), (63, 1.0), (64, 2.0)).seconds(128) == pytest.approx(4.0)
    assert costs_of((1, 2.0), (2, 1.9)).seconds(100) == 1.9
    assert costs_of((1, 2.0)).seconds(3) == 6.0


def test_no_pass_scores_less_than_one_node() -> None:
    with pytest.raises(UsageError, match="at least one node"):
        costs_of((1, 1.0)).seconds(0)


@pytest.mark.parametrize("points", [[], [(2, 1.0)], [(1, 1.0), (4, 1.0), (3, 1.0)], [(1, 0.0)], [(1, float("nan"))]])
def test_costs_that_make_no_sense_are_refused(points: list[tuple[int, float]]) -> None:
    with pytest.raises(UsageError):
        costs_of(*points)


# What fits


def test_default_sizes_end_where_the_context_or_the_largest_tree_ends() -> None:
    sizes = [point.nodes for point in timed(TimedTarget(line, context=84)).points]
    assert sizes == [1, 2, 4, 8, 9, 16, 17, 20]
    assert timed(TimedTarget(line, max_nodes=40)).points[-1].nodes == 40


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"context": 1024}, "1024 tokens and a tree do not fit into a context of 1024; ask for fewer."),
        ({"nodes": [1, 200]}, "ask for at most 128 nodes"),
        ({"nodes": [0, 4]}, "nodes must be at least 1, not 0."),
        ({"nodes": [4, -1]}, "nodes must be at least 1, not -1."),
        ({"batch": 0}, "batch must be at least 1, not 0."),
        ({"batch": 9}, "A batch of 9 needs as many slots and 4 are free"),
        ({"context": 0}, "context must be at least 1, not 0."),
        ({"repeat": 2}, "repeat must be at least 3, not 2."),
    ],
)
def test_what_does_not_fit_is_a_sentence_before_any_pass(options: dict[str, Any], sentence: str) -> None:
    target = TimedTarget(line)
    with pytest.raises(UsageError) as refusal:
        timed(target, **options)
    assert sentence in str(refusal.value)
    assert target.scored == []


@pytest.mark.parametrize("batch", [1, 3])
def test_slots_are_given_back(batch: int) -> None:
    target = TimedTarget(line)
    timed(target, batch=batch)
    assert target.free_slots == 4


def test_slots_are_given_back_after_an_interruption_and_nothing_is_kept(cache: Path) -> None:
    target = TimedTarget(line)
    for passes in (0, 5, 100):
        target.broken_after = passes
        with pytest.raises(KeyboardInterrupt):
            timed(target, batch=3)
        assert target.free_slots == 4
    assert [path for path in cache.rglob("*") if path.is_file()] == []


def test_slots_are_given_back_where_opening_fails_half_way(monkeypatch: pytest.MonkeyPatch) -> None:
    target = TimedTarget(line)
    opening = target.open

    def failing(sequence: SequenceState) -> None:
        if target.free_slots == 2:
            raise MemoryError
        opening(sequence)

    monkeypatch.setattr(target, "open", failing)
    with pytest.raises(MemoryError):
        timed(target, batch=4)
    assert target.free_slots == 4


# The cache


def kept(cache: Path) -> list[Path]:
    return sorted((cache / "tune").glob("*"))


def test_what_was_measured_is_remembered_whole(cache: Path) -> None:
    first = timed(TimedTarget(noisy(jumping(17), 0.02, seed=1)))
    again = TimedTarget(line)
    second = timed(again)
    assert again.scored == []
    assert second == first
    assert second.cliffs == first.cliffs != ()
    assert (first.remembered, second.remembered) == (False, True)
    assert len(kept(cache)) == 1


def test_fresh_measures_again_and_replaces_what_was_kept(cache: Path) -> None:
    timed(TimedTarget(jumping(17)))
    assert timed(TimedTarget(jumping(33)), fresh=True).cliffs[0].nodes == 33
    assert timed(TimedTarget(line)).cliffs[0].nodes == 33
    assert len(kept(cache)) == 1


@pytest.mark.parametrize(
    "options", [{"batch": 2}, {"context": 65}, {"repeat": 5}, {"nodes": [1, 2]}, {"model": "another"}], ids=str
)
def test_other_circumstances_have_costs_of_their_own(options: dict[str, Any]) -> None:
    timed(TimedTarget(line))
    other = TimedTarget(line)
    assert not timed(other, **options).remembered
    assert other.scored


def test_a_new_version_a_new_device_or_new_code_of_ours_measures_again(monkeypatch: pytest.MonkeyPatch) -> None:
    timed(TimedTarget(line))
    for change in (
        lambda patch: patch.setattr("branchwise.__version__", "99.0"),
        lambda patch: patch.setattr(torch, "__version__", "99.0"),
        lambda patch: patch.setattr("branchwise.provenance.metadata.version", lambda package: "99.0"),
        lambda patch: patch.setattr("branchwise.tune.costs.device_name", lambda device: "an abacus"),
        lambda patch: patch.setattr("branchwise.tune.costs.source_digest", lambda *folders: "changed"),
        lambda patch: patch.setattr(torch, "get_num_threads", lambda: 77),
        lambda patch: patch.setattr(torch, "get_float32_matmul_precision", lambda: "medium"),
    ):
        with monkeypatch.context() as patch:
            change(patch)
            assert not timed(TimedTarget(line)).remembered
    assert timed(TimedTarget(line)).remembered
    for other in ({"execution": Execution(compile=True)}, {"fingerprint": "another"}, {"dtype": torch.bfloat16}):
        changed = TimedTarget(line)
        changed.info = replace(changed.info, **other)
        assert not timed(changed).remembered


def test_two_models_of_one_name_are_told_apart_by_their_shape() -> None:
    def key(layers: int) -> Key:
        model = build(LlamaConfig(**(COMMON | {"num_hidden_layers": layers})))
        return measure(TransformersTarget(model, slots=1, context=32), context=8, nodes=[1], repeat=3, model="m").key

    assert key(1) != key(2)
    assert key(2) == key(2)


DAMAGES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "another version": lambda stored: stored | {"version": 99},
    "another key": lambda stored: stored | {"key": stored["key"] | {"model": "another"}},
    "no points": lambda stored: stored | {"points": []},
    "words for numbers": lambda stored: stored | {"points": [{**p, "seconds": "slow"} for p in stored["points"]]},
    "negative costs": lambda stored: stored | {"points": [{**p, "seconds": -1.0} for p in stored["points"]]},
    "an unknown field": lambda stored: stored | {"points": [{**p, "extra": 1} for p in stored["points"]]},
    "cliffs of another kind": lambda stored: stored | {"cliffs": [17]},
    "a part is missing": lambda stored: {"version": stored["version"], "key": stored["key"]},
    "a list": lambda stored: [stored],
    "a number": lambda stored: 7,
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_or_foreign_file_is_measured_again(damage: Callable[[dict[str, Any]], Any], cache: Path) -> None:
    first = timed(TimedTarget(line))
    [file] = kept(cache)
    file.write_text(json.dumps(damage(json.loads(file.read_text()))))
    costs = timed(TimedTarget(line))
    assert not costs.remembered
    assert costs.points == first.points
    assert timed(TimedTarget(line)).remembered


@pytest.mark.parametrize("content", [b"", b'{"version": 1, "poin', b"\xff\xfe\x00", b"null"])
def test_a_file_cut_short_or_of_no_text_is_measured_again(content: bytes, cache: Path) -> None:
    timed(TimedTarget(line))
    kept(cache)[0].write_bytes(content)
    assert not timed(TimedTarget(line)).remembered


def test_an_interrupted_write_leaves_the_old_file_and_no_part_of_the_new(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    timed(TimedTarget(jumping(17)))
    before = kept(cache)[0].read_bytes()

    def interrupted(*arguments: Any, **options: Any) -> None:
        raise KeyboardInterrupt

    for place in ("os.replace", "pathlib.Path.write_text"):
        with monkeypatch.context() as patch:
            patch.setattr(place, interrupted)
            with pytest.raises(KeyboardInterrupt):
                timed(TimedTarget(jumping(33)), fresh=True)
        assert [path.read_bytes() for path in cache.rglob("*") if path.is_file()] == [before]
        assert list(cache.glob("tmp-*")) == []


def test_a_cache_that_cannot_be_written_costs_nothing_but_the_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("BRANCHWISE_CACHE", str(tmp_path / "file"))
    assert timed(TimedTarget(jumping(17))).cliffs[0].nodes == 17


# Drafters and the command line

WORDS = ["<pad>", "</s>", *"abcdefgh"]


@pytest.fixture
def llm() -> LLM:
    words = Tokenizer(WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="<pad>"))
    words.pre_tokenizer = Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="</s>", pad_token="<pad>")
    model = build(LlamaConfig(**(COMMON | {"vocab_size": len(WORDS), "max_position_embeddings": 512})))
    target = TransformersTarget(model, slots=2, context=256)
    return LLM("tiny", model, tokenizer, Engine(target, build_drafter("none"), VERIFIERS.build("match")))


def test_a_drafter_is_timed_over_the_steps_of_real_texts(llm: LLM) -> None:
    prompts = [[2, 3, 4, 2, 3], [5, 5, 5, 5]]
    cost = measure_drafter(llm, "ngram", prompts, max_new_tokens=12)
    assert cost.drafter == "ngram"
    assert cost.low <= cost.seconds <= cost.high
    assert cost.seconds > 0
    assert cost.drafted > 0
    assert cost.steps >= len(prompts)
    assert measure_drafter(llm, build_drafter("none"), prompts, max_new_tokens=12).drafted == 0
    assert llm.engine.target.free_slots == 2


def test_the_cost_of_a_drafter_is_the_median_over_prompts_of_its_draft_phase(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    spent = iter([99.0, 1.0, 8.0, 3.0])  # the first is the warm-up

    def written(engine: Engine, request: Any) -> Any:
        from branchwise.engine.stats import Stats

        return Stats(steps=2, drafted_tokens=6, seconds={"draft": next(spent), "score": 50.0})

    monkeypatch.setattr("branchwise.tune.drafters.write", written)
    cost = measure_drafter(llm, "ngram", [[2], [3], [4]])
    assert (cost.low, cost.seconds, cost.high) == (1.0, 1.5, 2.75)
    assert (cost.drafted, cost.steps) == (3.0, 6)


class Prefilling(NGram):
    """A drafter that reads the prompt in the first draft of a text, which takes an hour; any other takes a second."""

    def __init__(self, clock: list[float]) -> None:
        super().__init__()
        self.clock = clock
        self.seen: set[SequenceState] = set()

    def draft(self, sequences: Sequence[SequenceState], budgets: Sequence[Budget]) -> list[DraftTree]:
        self.clock[0] += 1.0 if self.seen.issuperset(sequences) else 3600.0
        self.seen |= set(sequences)
        return super().draft(sequences, budgets)


def test_the_first_step_of_a_text_is_not_counted(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """There a draft model reads the prompt."""
    clock = [0.0]
    monkeypatch.setattr("branchwise.engine.stats.time.perf_counter", lambda: clock[0])
    drafter = Prefilling(clock)
    cost = measure_drafter(llm, drafter, [[2, 3, 4, 2, 3], [5, 5, 5, 5]], max_new_tokens=24)
    assert (cost.low, cost.seconds, cost.high) == (1.0, 1.0, 1.0)
    assert len(drafter.seen) == 3  # one to warm up
    assert cost.steps == clock[0] % 3600 - warm_up_steps(llm)


def warm_up_steps(llm: LLM) -> int:
    return llm.with_drafter("ngram").generate("a b c a b", max_new_tokens=4, raw=True).stats.steps - 1


def test_texts_of_one_step_are_a_sentence(llm: LLM) -> None:
    with pytest.raises(UsageError, match="ended with its first step"):
        measure_drafter(llm, "ngram", [[2, 3]], max_new_tokens=1)


def test_a_drafter_without_prompts_is_a_sentence(llm: LLM) -> None:
    with pytest.raises(UsageError, match="no prompt"):
        measure_drafter(llm, "ngram", [])


def test_slots_are_given_back_where_a_drafter_fails(llm: LLM) -> None:
    drafter = build_drafter("ngram")
    drafter.draft = lambda sequences, budgets: 1 / 0  # type: ignore[method-assign, assignment, return-value]
    with pytest.raises(ZeroDivisionError):
        measure_drafter(llm, drafter, [[2, 3]])
    assert llm.engine.target.free_slots == 2


QUICK = ["--context", "16", "--nodes", "1,2,4", "--repeat", "3"]


@pytest.fixture
def run(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    monkeypatch.setattr("branchwise.llm.load", lambda model, **options: llm)
    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(command)
    return lambda *words: CliRunner().invoke(app, list(words))


def test_the_command_prints_one_json_object_with_everything_in_it(run: Callable[..., Any]) -> None:
    done = run(*QUICK, "--json", "--draft", "ngram:max=3,min=2,none", "--draft", "ngram")
    assert done.exit_code == 0, done.output
    assert done.stderr == ""
    found = json.loads(done.stdout)
    assert set(found) == {"key", "measured", "remembered", "points", "cliffs", "drafters"}
    assert {"model", "dtype", "device", "threads", "batch", "context", "versions"} <= set(found["key"])
    assert {"branchwise", "torch", "transformers"} <= set(found["key"]["versions"])
    assert found["key"]["model"] == "tiny"
    assert {1, 2, 4} <= {point["nodes"] for point in found["points"]}
    assert set(found["points"][0]) == {"nodes", "seconds", "low", "high", "ratio"}
    assert found["points"][0]["ratio"] == 1.0
    assert [cost["drafter"] for cost in found["drafters"]] == ["ngram:max=3,min=2", "none", "ngram"]
    assert set(found["drafters"][0]) == {"drafter", "seconds", "low", "high", "drafted", "steps"}
    again = json.loads(run(*QUICK, "--json").stdout)
    assert again["remembered"]
    assert again["points"] == found["points"]
    assert not json.loads(run(*QUICK, "--json", "--fresh").stdout)["remembered"]


def test_the_table_has_a_bar_for_every_size_and_a_line_for_every_cliff_and_drafter(
    run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    plain = replace(costs_of((1, 0.01), (16, 0.012), (17, 0.024)), cliffs=(Cliff(17, 2.0),))
    monkeypatch.setattr(tune, "measure", lambda target, **options: plain)
    done = run("--plot", str(tmp_path / "costs.png"))
    assert done.exit_code == 0, done.output
    assert "17 nodes cost 2.00 times 16: stay at 16." in done.stdout
    rows = [row for row in done.stdout.splitlines() if "█" in row]
    assert [row.split()[0] for row in rows] == ["1", "16", "17"]
    assert [row.count("█") for row in rows] == [12, 15, 30]
    assert rows[2].split()[1] == "24.00"
    assert "ngram drafts in" in done.stdout
    assert "\x1b" not in done.output
    assert (tmp_path / "costs.png").read_bytes().startswith(b"\x89PNG")
    monkeypatch.setattr(tune, "measure", lambda target, **options: replace(plain, cliffs=()))
    assert "No cliff" in run().stdout


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--nodes", "1,two"], "nodes are sizes separated by commas"),
        (["--nodes", ","], "nodes are sizes separated by commas"),
        (["--nodes", "0,2"], "nodes must be at least 1"),
        (["--batch", "0"], "batch must be at least 1"),
        (["--batch", "3"], "A batch of 3 needs as many slots"),
        (["--context", "256"], "do not fit into a context of 256"),
        (["--repeat", "1"], "repeat must be at least 3"),
        (["--draft", "ngramm"], "ngram"),
        (["--plot", "costs.pdf"], "PNG"),
        (["--plot", "nowhere/costs.png"], "no such folder"),
    ],
)
def test_a_mistake_in_the_request_is_a_sentence(run: Callable[..., Any], words: list[str], sentence: str) -> None:
    done = run(*QUICK, *words)
    assert done.exit_code != 0
    assert sentence in str(done.exception)
    assert done.stdout == ""


def test_a_missing_plot_library_is_a_sentence_with_the_install_line(
    run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    done = run("--plot", "costs.png")
    assert str(done.exception) == "A plot needs matplotlib. Install it with: pip install matplotlib"


def test_ctrl_c_leaves_no_broken_cache(
    run: Callable[..., Any], llm: LLM, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    score, passes = llm.engine.target.score, iter(range(10))

    def interrupted(*arguments: Any) -> Scored:
        if next(passes, None) is None:
            raise KeyboardInterrupt
        return score(*arguments)

    monkeypatch.setattr(llm.engine.target, "score", interrupted)
    assert run(*QUICK).exit_code == 130
    assert llm.engine.target.free_slots == 2
    assert not os.path.exists(cache) or [path for path in cache.rglob("*") if path.is_file()] == []


def test_the_digest_of_our_code_covers_folders_that_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder that was renamed would be left out in silence, and costs of old code be taken for those of new code."""
    folders: list[Path] = []
    monkeypatch.setattr("branchwise.tune.costs.source_digest", lambda *found: folders.extend(found) or "digest")
    assert key_of(TimedTarget(line), None, 1, 8, (1,), 3).source == "digest"
    assert {folder.name for folder in folders} >= {"backends", "core", "tune"}
    assert all(any(folder.rglob("*.py")) for folder in folders)
