"""Claims: the rule of verdicts, records that survive being killed, and a page that says what they say."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from branchwise.bench.claims import judging, rows, table
from branchwise.bench.claims.drawing import figures, write_figures
from branchwise.bench.claims.judging import HOLDS, IN_PART, NOT_HERE, NOT_MEASURED, UNDECIDED, combined, verdict_of
from branchwise.bench.claims.measuring import Measuring, Parts, of_claims, of_sweeps, sample_of, spread
from branchwise.bench.claims.page import page
from branchwise.bench.claims.rows import Key, Row, RowFile, Rows, Sample
from branchwise.bench.claims.table import MEASURES, Claim, Point, Stand, chosen, claims, sweeps
from branchwise.bench.contest import Answer
from branchwise.bench.prompts import FOLDER_VARIABLE, Item
from branchwise.bench.report import write_report
from branchwise.cli import app
from branchwise.cli.reproduce import CATEGORIES, QUICK, _items
from branchwise.draft import build_policy
from branchwise.errors import UnknownName, UsageError
from branchwise.llm import LLM
from branchwise.methods import PRESETS, find_any
from branchwise.registry import split_spec
from tests.conformance.architectures import build, served
from tests.test_bench_metrics import record
from tests.test_bench_peers import llm_of

ROOT = Path(__file__).parents[1]
RECORDS = sorted((ROOT / "benchmarks" / "records").glob("claims-*.jsonl"))
RUN: dict[str, Any] = {
    "version": rows.VERSION,
    "model": "big",
    "draft": "small",
    "head": None,
    "index": None,
    "parts": {},
    "dtype": "float32",
    "device": "cpu",
    "machine": "2 cores",
    "quick": False,
    "tokens": 8,
    "prompts": "4 of own",
    "questions": "0",
    "seed": 0,
    "command": "branchwise reproduce",
    "source": "a",
    "commit": None,
    "versions": {},
}
EVERYTHING = Stand(True, True, True, frozenset(table.PART.findall(str(claims()))))


# ---- the claims --------------------------------------------------------------------------------------------------


def test_every_method_has_a_claim_and_every_claim_a_source() -> None:
    named = {claim.method for claim in claims()}
    assert set(PRESETS) - named <= {"plain", "ngram"}  # the baseline, and prompt lookup under another name
    assert len({claim.name for claim in claims()}) == len(claims())
    for claim in claims():
        assert claim.paper
        assert claim.says
        assert claim.setting
        assert any(not point.beside for point in claim.points), claim.name
        for point in claim.points:
            assert point.measure in MEASURES
            assert point.label


@pytest.mark.parametrize("claim", claims(), ids=lambda claim: claim.name)
def test_the_trees_of_a_claim_exist_and_are_as_large_as_it_says(claim: Claim) -> None:
    for point in claim.points:
        specs = EVERYTHING.specs(point)
        if isinstance(specs, str):
            assert "there is no method" in specs
            continue
        for spec in specs:
            method = find_any(table.PART.sub("part", spec))
            if method.tree is not None:
                build_policy(method.tree)
        if re.search(r"\d nodes", point.label) and not {"plain"} & {*specs} and "against 80" not in point.label:
            assert size(specs[0]) == size(specs[1]), point.label


def size(spec: str) -> int:
    """Nodes of a tree at most."""
    name, positional, _ = split_spec(find_any(table.PART.sub("part", spec)).tree or "none")
    if name in ("paths", "rsd-s", "fork-lossy"):
        width, depth = positional[0].split("x")
        return int(width) * int(depth)
    if name in ("rsd-c", "iid"):
        counts = [int(one) for one in positional]
        return sum(level for level in cumulative(counts))
    if name == "template":
        return int(positional[0].rpartition("-")[2])
    return int(positional[1 if name == "threshold" else 0])


def cumulative(counts: list[int]) -> list[int]:
    made, found = 1, []
    for count in counts:
        made *= count
        found.append(made)
    return found


def test_claims_are_found_by_name_and_by_method() -> None:
    assert [claim.name for claim in chosen(["LongSpec", "block"])] == ["block", "longspec"]
    assert chosen([]) == list(claims())
    with pytest.raises(UnknownName, match="Did you mean 'cascade'"):
        chosen(["cascades"])


def test_what_drafts_is_the_model_or_else_the_head_or_else_the_target_with_noise() -> None:
    plain, recalling = Point("block", "speculative"), Point("model:recall=0.3/chain:2/token", "model/chain:2/token")
    assert Stand(True, True).specs(plain) == ("model/chain:8/block", "model/chain:6/token")
    assert Stand(False, True).specs(plain) == ("head/chain:8/block", "head/chain:6/token")
    assert Stand(False, False).specs(plain) == ("disturbed/chain:8/block", "disturbed/chain:6/token")
    # Both sides of a comparison draft with the same, though only one of them asks for what a head cannot do.
    assert Stand(False, True).specs(recalling) == ("disturbed:recall=0.3/chain:2/token", "disturbed/chain:2/token")


def test_what_is_missing_is_said_and_no_error() -> None:
    stand = Stand(False, True)
    assert stand.specs(Point("rest", "plain")) == "needs --index DIR"
    assert stand.specs(Point("model:{student}/chain:2/token", "plain")) == "needs --part student=PATH"
    assert stand.specs(Point("nothing-of-this-name", "plain")) == "there is no method `nothing-of-this-name` yet"
    assert stand.specs(Point("vocabtrim", "plain")) == "needs --draft-model ID"
    assert Stand(True, False).specs(Point("eagle", "plain")) == "needs --head FILE"


# ---- verdicts ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("low", "high", "claimed", "bound", "verdict"),
    [
        (1.01, 1.2, None, 1.0, HOLDS),
        (1.01, 1.2, 1.2, 1.0, HOLDS),
        (1.01, 1.2, 1.21, 1.0, IN_PART),
        (0.99, 1.5, 1.2, 1.0, UNDECIDED),
        (1.0, 1.5, None, 1.0, UNDECIDED),
        (0.8, 1.0, None, 1.0, UNDECIDED),
        (0.8, 0.99, 1.2, 1.0, NOT_HERE),
        (0.96, 0.99, None, 0.95, HOLDS),
        (0.9, 0.94, None, 0.95, NOT_HERE),
        (None, None, 1.2, 1.0, UNDECIDED),
    ],
)
def test_a_verdict_follows_from_the_interval(
    low: float | None, high: float | None, claimed: float | None, bound: float, verdict: str
) -> None:
    assert verdict_of(low, high, bound, claimed) == verdict


@pytest.mark.parametrize(
    ("verdicts", "whole"),
    [
        ([], NOT_MEASURED),
        ([NOT_MEASURED], NOT_MEASURED),
        ([HOLDS, NOT_MEASURED, HOLDS], HOLDS),
        ([HOLDS, NOT_HERE], IN_PART),
        ([HOLDS, UNDECIDED], IN_PART),
        ([IN_PART, IN_PART], IN_PART),
        ([NOT_HERE, NOT_HERE], NOT_HERE),
        ([NOT_HERE, UNDECIDED], UNDECIDED),
    ],
)
def test_a_claim_of_several_comparisons_holds_where_all_do(verdicts: list[str], whole: str) -> None:
    assert combined(verdicts) == whole


def samples(tokens: int, steps: int, count: int = 8, **more: Any) -> tuple[Sample, ...]:
    """Prompts that differ a little, as prompts do."""
    return tuple(
        Sample(f"own/{number}", "free", tokens + number, steps, 4 * steps, tokens - steps, **more)
        for number in range(count)
    )


def measured(point: Point, ours: tuple[Sample, ...], baseline: tuple[Sample, ...], cost: float = 0.0) -> judging.Found:
    keys = [Key(spec, point.temperature, point.alone) for spec in ("model/chain:8/block", "model/chain:6/token")]
    found = Rows(RUN, [Row(key, own, 4.0, cost) for key, own in zip(keys, (ours, baseline), strict=True)])
    return judging.compare(point, found)


def test_the_same_on_both_sides_is_a_ratio_of_one() -> None:
    point = Point("block", "speculative", temperature=1.0)
    found = measured(point, samples(30, 10), samples(30, 10))
    assert found.ratio is not None
    assert (found.ratio.value, found.ratio.low, found.ratio.high) == (1, 1, 1)  # paired: prompts cancel out
    assert found.verdict == UNDECIDED


def test_few_prompts_decide_nothing() -> None:
    point = Point("block", "speculative", temperature=1.0)
    found = [measured(point, samples(60, 10, count), samples(60, 20, count)) for count in (7, 8)]
    assert [one.verdict for one in found] == [UNDECIDED, HOLDS]


def test_a_machine_with_other_work_decides_nothing_about_speed() -> None:
    point = Point("ngram", "plain", measure="speed", alone=True)
    fast = samples(60, 10, seconds=0.5)
    quiet = samples(60, 60, seconds=1.5)
    busy = (quiet[0]._replace(seconds=3.0), *quiet[1:])
    found = []
    for plain in (quiet, busy):
        held = Rows(RUN)
        specs = held.stand.specs(point)
        assert not isinstance(specs, str)
        sides = zip(specs, (fast, plain), strict=True)
        held.rows += [Row(Key(spec, 0.0, True), side, 0.0, None) for spec, side in sides]
        found.append((judging.compare(point, held).verdict, judging.disturbed(held)))
        assert judging.compare(replace(point, measure="tokens"), held).verdict == HOLDS
    assert found[0] == (HOLDS, "")
    assert found[1][0] == UNDECIDED
    assert "took 25 to 50 ms a token" in found[1][1]


def test_races_take_prompts_of_every_category_first() -> None:
    items = [Item(name, "own", name[0], ("?",)) for name in ("a1", "a2", "a3", "b1", "b2")]
    assert [item.id for item in spread(items)] == ["a1", "b1", "a2", "b2", "a3"]


def test_each_measure_is_counted_by_its_own_numbers() -> None:
    point = Point("block", "speculative", temperature=1.0, claimed=2.0)
    twice, once = samples(60, 10), samples(60, 20)
    found = measured(point, twice, once)
    assert found.ratio is not None
    assert found.ratio.value == pytest.approx(2)
    assert found.verdict == HOLDS
    assert found.ours == pytest.approx(6.35)
    assert found.baseline == pytest.approx(3.175)
    half = measured(replace(point, measure="mbsu"), twice, once, cost=0.25)
    assert half.ours == pytest.approx(6.35 / 2)  # four draft passes of a quarter each
    kept = measured(replace(point, measure="acceptance"), twice, once)
    assert kept.ours == pytest.approx(sum(one.accepted for one in twice) / sum(one.drafted for one in twice))
    fast, slow = samples(60, 10, seconds=0.5), samples(60, 20, seconds=1.5)
    raced = measured(replace(point, measure="speed", alone=True), fast, slow)
    assert raced.ratio is not None
    assert raced.ratio.value == pytest.approx(3)


def test_only_prompts_of_the_category_count_and_only_those_of_both() -> None:
    point = Point("block", "speculative", temperature=1.0, category="free")
    other = Sample("own/x", "other", 1000, 1, 0, 999)
    assert measured(point, (*samples(30, 10), other), (*samples(30, 10, 5), other)).ratio.units == 5  # type: ignore[union-attr]
    assert measured(replace(point, category="none"), samples(30, 10), samples(30, 10)).verdict == NOT_MEASURED


def test_a_quick_run_says_what_it_leaves_out() -> None:
    point = Point("block", "speculative", quick=False)
    missing = [judging.compare(point, Rows(RUN | {"quick": quick})).missing for quick in (True, False)]
    assert missing == ["left out of a quick run", "the run has not come to it yet"]


# ---- records -----------------------------------------------------------------------------------------------------

ROW = Row(Key("plain", 0.0, False), samples(8, 8, 2), 0.0, None, 0.5)


def test_rows_come_back_as_they_were_written_and_a_torn_line_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    file = RowFile(path, RUN)
    file.add(ROW)
    file.close()
    with path.open("a") as torn:
        torn.write('{"method":"pla')
    again = RowFile(path, RUN)
    again.close()
    assert again.found.rows == [ROW] == rows.read(path).rows
    assert len(path.read_text().splitlines()) == 2


def test_other_code_may_go_on_and_another_setup_may_not(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    RowFile(path, RUN).close()
    RowFile(path, RUN | {"source": "b"}).close()
    assert [json.loads(line)["run"]["source"] for line in path.read_text().splitlines()] == ["a", "b"]
    with pytest.raises(UsageError, match=r"another setup: its draft is 'small', now it is 'tiny'"):
        RowFile(path, RUN | {"draft": "tiny"})


def test_an_index_and_parts_may_come_later(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    RowFile(path, RUN).close()
    RowFile(path, RUN | {"index": "texts", "parts": {"trigrams": "table"}}).close()
    assert rows.read(path).stand == Stand(True, False, True, frozenset({"trigrams"}))
    with pytest.raises(UsageError, match=r"another setup: its index is 'texts', now it is 'others'"):
        RowFile(path, RUN | {"index": "others"})


@pytest.mark.parametrize("text", ["", "hello\n", '{"method": "plain"}\n', '{"run": {"version": 99}}\n'])
def test_what_is_no_file_of_rows_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "x").write_text(text)
    with pytest.raises(UsageError):
        rows.read(tmp_path / "x")


# ---- measuring ---------------------------------------------------------------------------------------------------

PROMPTS = [Item(f"own/{number}", "own", "free", (f"w{5 + number} w9 w11 w5",), raw=True) for number in range(3)]
SMALL = Claim(
    "small",
    "block",
    "none",
    "says",
    "where",
    (
        Point("model/chain:2/block", "model/chain:2/token", temperature=1.0),
        Point("ngram/chain:2/match", "plain", measure="speed", alone=True),
        Point("model:{student}/chain:2/token", "plain"),
        Point("retrieval/chain:2/match", "plain"),
        Point("ngram/chain:2/token", "plain", label="a pair that does not fit"),
    ),
)


@pytest.fixture(scope="module")
def tiny() -> LLM:
    return llm_of(build(served()["llama"]))


@pytest.fixture(scope="module")
def draft_model(tiny: LLM, tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("draft")
    config = served()["llama"]
    config.num_hidden_layers = 1
    build(config).save_pretrained(folder)
    tiny.tokenizer.save_pretrained(folder)
    return str(folder)


def measuring(tiny: LLM, draft_model: str, path: Path, **options: Any) -> Measuring:
    run = Measuring(tiny, PROMPTS, Parts(draft_model), RowFile(path, RUN), tokens=6, **options)
    run.run([SMALL], quick=False)
    run.file.close()
    return run


def test_a_run_measures_what_it_can_and_goes_on_where_it_was_stopped(
    tiny: LLM, draft_model: str, tmp_path: Path
) -> None:
    path = tmp_path / "rows.jsonl"
    assert not measuring(tiny, draft_model, path, seconds=0.0).file.found.rows
    told: list[str] = []
    first = measuring(tiny, draft_model, path, tell=told.append)
    keys = [row.key for row in first.file.found.rows]
    assert keys[:2] == [Key(f"model/chain:2/{rule}", 1.0, False) for rule in ("block", "token")]
    assert first.failed.keys() == {"ngram/chain:2/token"}
    raced = [key.method for key in keys if key.alone]
    assert raced == ["ngram/chain:2/match", "plain", "plain", "ngram/chain:2/match", "ngram/chain:2/match", "plain"]
    judged = judging.judge(SMALL, rows.read(path))
    assert [one.ratio is not None for one in judged.found] == [True, True, False, False, False]
    assert judged.found[0].ours is not None
    assert judged.found[0].ours >= 1
    assert told[0].startswith("Rows to measure: 6, of which 4 on 3 texts at once and 2 in turn on 3 texts.")
    assert re.match(r"1 of 6 rows after \d+\.\d minutes; about \d+ more\.", told[1])
    assert 3 <= len(told) <= 5
    before = path.read_bytes()
    measuring(tiny, draft_model, path, tell=told.append)
    assert path.read_bytes() == before
    assert told[-1].startswith("Rows to measure: 1,")  # the pair that does not fit is tried again


LEARNING = replace(SMALL, points=(Point("recycle/topk:4,depth=2,width=2/match", "plain", alone=True),))
ALIKE = [replace(PROMPTS[0], id=f"own/{number}") for number in range(3)]


def test_what_a_drafter_learned_is_learned_again_when_a_run_goes_on(tiny: LLM, tmp_path: Path) -> None:
    path, cut = tmp_path / "rows.jsonl", tmp_path / "cut.jsonl"

    def steps(path: Path) -> list[int]:
        run = Measuring(tiny, ALIKE, Parts(), RowFile(path, RUN), tokens=6)
        run.run([LEARNING], quick=False)
        run.file.close()
        key = Key("recycle/topk:4,depth=2,width=2/match", 0.0, True)
        return [one.steps for one in run.file.found.samples(key).values()]

    whole = steps(path)
    assert whole[0] > whole[2]  # it learns, or this test would show nothing
    cut.write_text("".join(path.read_text().splitlines(keepends=True)[:5]))  # two texts of both
    assert steps(cut) == whole


def test_where_no_text_is_to_be_timed_there_are_no_races(tiny: LLM, tmp_path: Path) -> None:
    claim = replace(SMALL, points=(*SMALL.points, Point("ngram/chain:2/match", "plain", measure="speed", alone=True)))
    run = Measuring(tiny, PROMPTS[:2], Parts(), RowFile(tmp_path / "rows.jsonl", RUN), tokens=4, alone=0)
    run.run([claim], quick=False)
    run.file.close()
    assert run.file.found.rows
    assert not any(row.key.alone for row in run.file.found.rows)


def test_the_clock_of_a_text_runs_from_the_end_of_its_prompt_on() -> None:
    answer = Answer([5, 9], "length", seconds=3.0, steps=2, phases={"prefill": 2.0})
    assert [sample_of(PROMPTS[0], answer, alone=alone).seconds for alone in (True, False)] == [1.0, None]


def test_all_that_is_planned_has_a_method(draft_model: str) -> None:
    parts = Parts(draft_model, head="head", index="index")
    for key in [*of_claims(claims(), parts.stand, quick=False), *of_sweeps(sweeps(), parts.stand)]:
        assert parts.method(key.method).verify


def test_the_command_measures_judges_and_reads_again(tiny: LLM, draft_model: str, tmp_path: Path) -> None:
    tiny.model.save_pretrained(tmp_path / "target")
    tiny.tokenizer.save_pretrained(tmp_path / "target")
    (tmp_path / "prompts.txt").write_text("w5 w9 w11\nw7 w3 w3\nw8 w9\n")
    out, shown = tmp_path / "rows.jsonl", tmp_path / "docs" / "claims.md"
    sizes = ["--quick", "-n", "4", "--context", "64", "--prompts", str(tmp_path / "prompts.txt")]
    models = ["--model", str(tmp_path / "target"), "--draft-model", draft_model, "--dtype", "float32"]
    done = reproduce("block", *sizes, *models, "--out", str(out))
    assert done.exit_code == 0, done.output
    found = rows.read(out)
    assert {row.key.method for row in found.rows} == {
        f"model/chain:{n}/{r}" for n in (4, 8) for r in ("block", "token")
    }
    assert str(tmp_path) not in out.read_text()
    assert found.quick
    again = reproduce("block", "--read", str(out), "--claims", str(shown))
    assert again.exit_code == 0, again.output
    assert "4 tokens" in again.output
    assert "Not measured, left out of a quick run: block (1 of 3)" in again.output
    assert shown.read_text() == page([found])


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["no-such-claim"], "Unknown claim"),
        (["--read", "nowhere.jsonl"], "cannot be read"),
        (["--part", "student"], "NAME=PATH"),
        (["--limit", "0"], "at least 1"),
    ],
)
def test_what_cannot_be_done_is_refused_in_a_sentence(words: list[str], says: str) -> None:
    done = reproduce(*words)
    assert done.exit_code
    assert says in str(done.exception)


def test_a_quick_run_has_enough_prompts_to_decide_by_whatever_set_they_come_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(FOLDER_VARIABLE, raising=False)
    lines, talks = tmp_path / "lines.txt", tmp_path / "spec_bench.jsonl"
    lines.write_text("".join(f"prompt {number}\n" for number in range(50)))
    questions = [(number, category) for number, category in enumerate(10 * CATEGORIES)]
    talks.write_text(
        "".join(
            json.dumps({"question_id": number, "category": category, "turns": ["?"]}) + "\n"
            for number, category in questions
        )
    )
    for data, files in ((None, [lines]), (tmp_path, []), (None, [])):
        assert len(_items(data, files, None, QUICK.prompts)) == judging.FEWEST
    assert [len(_items(data, files, None, 40)) for data, files in ((None, [lines]), (tmp_path, []))] == [40, 40]
    assert len(_items(tmp_path, [], 2, 40)) == 2 * len(CATEGORIES)


def reproduce(*words: str) -> Any:
    return CliRunner().invoke(app, ["reproduce", *words])


# ---- the page ----------------------------------------------------------------------------------------------------


def made() -> Rows:
    """Rows for all that is planned, with numbers that grow with the tree."""
    found = Rows(RUN)
    stand = found.stand
    for key in dict.fromkeys([*of_claims(claims(), stand, quick=False), *of_sweeps(sweeps(), stand)]):
        tokens = 20 + 3 * (len(key.method) % 7)
        found.rows.append(Row(key, samples(tokens, 10, seconds=1.0 if key.alone else None), 4.0, 0.3))
    return found


def test_the_page_has_a_row_and_a_section_for_every_claim() -> None:
    text = page([made()])
    for claim in claims():
        assert f"\n### {claim.name}\n" in text
        assert f"[`{claim.method}`](#{claim.name})" in text
    assert "**holds**" in text
    assert "needs --part student=PATH" in text
    with pytest.raises(UsageError, match="no records"):
        page([])


def test_the_page_names_every_command_that_measured(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    for command in ("first", "second", "second"):
        file = RowFile(path, RUN | {"command": command})
        assert file.found.commands == list(dict.fromkeys(["first", command]))
        file.close()
    assert path.read_text().count("\n") == 2
    assert "| `first`<br>`second` |\n" in page([rows.read(path)])


def test_figures_are_drawn_from_the_first_records(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    written = write_figures(made(), tmp_path)
    assert [path.name for path in written] == [f"claims-{sweep.name}.png" for sweep in sweeps()]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in written)
    assert write_figures(Rows(RUN), tmp_path / "none") == []


def test_a_report_shows_the_figures_of_claims_too(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    write_report([record("plain"), record()], tmp_path, more=figures(made()))
    shown = (tmp_path / "index.html").read_text()
    assert all(sweep.title in shown for sweep in sweeps())


def test_the_committed_page_is_what_the_committed_records_give() -> None:
    assert RECORDS
    assert (ROOT / "docs" / "claims.md").read_text() == page([rows.read(path) for path in RECORDS])
