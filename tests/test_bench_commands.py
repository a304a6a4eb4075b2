"""`branchwise bench` and `branchwise report` as a user runs them, on the real default model."""

from __future__ import annotations

import csv
import json
import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest

from branchwise.bench.records import read
from branchwise.bench.summary import cells, summarise
from branchwise.cli.bench import unequal
from branchwise.registry import split_specs
from tests.test_bench_metrics import record as told
from tests.test_cli import BRANCHWISE, assert_one_sentence, run

SHORT = ("bench", "--limit", "1", "-n", "6", "--dtype", "float32", "--threads", "1")


@pytest.fixture(scope="module")
def short_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    folder = tmp_path_factory.mktemp("bench")
    exports = ("--spec-bench-out", str(folder / "spec"), "--vllm-out", str(folder / "vllm"))
    done = run(
        *SHORT, "--peers", "transformers,transformers-lookup", "--out", str(folder / "run.jsonl"), *exports, "--json"
    )
    assert done.returncode == 0, done.stderr
    return folder, done


def test_bench_records_every_contestant_and_prints_one_json_object(
    short_run: tuple[Path, subprocess.CompletedProcess[str]],
) -> None:
    folder, done = short_run
    records = read(folder / "run.jsonl")
    contestants = {"plain", "ngram", "transformers", "transformers-lookup"}
    assert {record.contestant for record in records} == contestants
    assert len(records) == 8
    # Greedy in float32: everyone writes what plain decoding writes.
    assert [record.equal for record in records if record.contestant != "plain"] == [True] * 6
    rows = json.loads(done.stdout)["rows"]
    assert {row["contestant"] for row in rows} == contestants
    assert next(row for row in rows if row["contestant"] == "ngram")["speed_up"]["value"] > 0
    assert done.stderr == ""


def test_every_record_says_where_it_comes_from(short_run: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    folder, _ = short_run
    for record in read(folder / "run.jsonl"):
        about = record.run
        assert about["model"] == "smollm2"
        assert about["dtype"] == "float32"
        assert about["threads"] == 1
        assert about["device"] == "cpu"
        assert about["seed"] == 0
        assert about["arguments"]["limit"] == 1
        assert about["command"].startswith("branchwise bench --limit 1")
        assert str(folder) not in json.dumps(about)
        assert {"branchwise", "python", "torch", "transformers"} <= set(about["versions"])
        assert len(about["source"]) == 16
        assert set(about) >= {"commit", "dirty", "machine", "time"}


def test_the_same_command_again_does_nothing_and_another_is_refused(
    short_run: tuple[Path, subprocess.CompletedProcess[str]],
) -> None:
    folder, _ = short_run
    before = (folder / "run.jsonl").read_bytes()
    peers = ("--peers", "transformers,transformers-lookup")
    again = run(*SHORT, *peers, "--out", str(folder / "run.jsonl"))
    assert again.returncode == 0
    assert "holds 8 records of this run; going on with what is missing" in again.stderr
    assert "ngram" in again.stdout
    seeded = run(*SHORT, *peers, "--seed", "5", "--out", str(folder / "run.jsonl"))
    assert_one_sentence(seeded, "holds records of another run", "its seed is 0, now it is 5")
    other = run(*SHORT, *peers, "-t", "0.5", "--out", str(folder / "run.jsonl"))
    assert_one_sentence(other, "holds records of another run", "its temperature is 0.0, now it is 0.5")
    assert (folder / "run.jsonl").read_bytes() == before


def test_exports_have_the_forms_of_others(short_run: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    folder, _ = short_run
    lines = [json.loads(line) for line in (folder / "spec" / "ngram.jsonl").read_text().splitlines()]
    assert {"question_id", "category", "model_id", "choices"} <= set(lines[0])
    assert json.loads((folder / "vllm" / "ngram.json").read_text())["label"] == "ngram"
    assert json.loads((folder / "vllm" / "plain.json").read_text())["total_output_tokens"] == 12


def test_a_report_is_made_from_records_alone(short_run: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    folder, _ = short_run
    done = run("report", str(folder / "run.jsonl"), "--out", str(folder / "report"))
    assert done.returncode == 0, done.stderr
    page = folder / "report" / "index.html"
    assert done.stdout.strip() == str(page)
    assert "transformers-lookup" in page.read_text()


def test_a_run_that_was_killed_goes_on(tmp_path: Path) -> None:
    out = tmp_path / "run.jsonl"
    words = [*SHORT, "--methods", "ngram", "-n", "24", "--out", str(out)]
    running = subprocess.Popen([*BRANCHWISE, *words], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 240
    while (not out.exists() or out.read_bytes().count(b"\n") < 2) and time.monotonic() < deadline:
        time.sleep(0.05)
    os.kill(running.pid, signal.SIGKILL)
    running.wait()
    before = [record.key for record in read(out)]
    assert 0 < len(before) < 4
    done = run(*words)
    assert done.returncode == 0, done.stderr
    after = [record.key for record in read(out)]
    assert after[: len(before)] == before
    assert len(after) == len(set(after)) == 4


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("--methods", "ngran"), "Unknown method 'ngran'. Did you mean 'ngram'?"),
        (("--methods", "ngram/chain:8/cascade"), "is not exact for drafter 'ngram'"),
        (("--methods", "ngram,ngram"), "named twice"),
        (("--methods", "ngram,cascade"), "Method 'cascade' needs a draft model; name one with --draft-model"),
        (("--methods", "a/b/c/d"), "Unknown method"),
        (("--suite", "spec-bensh"), "Did you mean 'spec-bench'?"),
        (("--peers", "transformer"), "Did you mean 'transformers'?"),
        (("--peers", "transformers,transformers"), "A peer is named twice"),
        (("--methods", ""), "There is nothing to compare"),
        (("--state", "hot"), "Unknown state 'hot'"),
        (("--order", "random"), "Unknown order 'random'"),
        (("--batch", "0"), "--batch must be at least 1"),
        (("--limit", "0"), "--limit must be at least 1"),
        (("-t", "-1"), "temperature must be at least 0"),
        (("--prompts", "no-such-file.jsonl"), "no-such-file.jsonl"),
    ],
)
def test_a_mistake_is_one_sentence_before_anything_is_loaded(
    tmp_path: Path, words: tuple[str, ...], sentence: str
) -> None:
    assert_one_sentence(run("bench", *words, "--out", str(tmp_path / "r.jsonl")), sentence)


def test_a_report_of_nothing_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("")
    assert_one_sentence(run("report", str(tmp_path / "empty.jsonl")), "There are no records")
    assert_one_sentence(run("report", str(tmp_path / "none.jsonl")), "cannot be read")
    (tmp_path / "costs.json").write_text("[]")
    (tmp_path / "one.jsonl").write_text("{}\n")
    assert_one_sentence(run("report", str(tmp_path / "one.jsonl")), "line 1 is no record")


@pytest.mark.parametrize(
    ("text", "specs"),
    [
        ("a,b c", ["a", "b", "c"]),
        ("ngram:max=4,min=2,other", ["ngram:max=4,min=2", "other"]),
        ("disturbed/rsd-c:4,2,1/rrs,ngram", ["disturbed/rsd-c:4,2,1/rrs", "ngram"]),
        ("openai:http://host:8000/v1,model=x,transformers", ["openai:http://host:8000/v1,model=x", "transformers"]),
        (",a,", ["a"]),
        ("", []),
    ],
)
def test_specs_are_split_between_them_and_not_inside(text: str, specs: list[str]) -> None:
    assert split_specs(text) == specs


def test_answers_that_differ_in_float32_are_a_failure(
    short_run: tuple[Path, subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    folder, _ = short_run
    lines = (folder / "run.jsonl").read_text().splitlines(keepends=True)
    place = next(i for i, line in enumerate(lines) if '"compares":["ngram"' in line)
    apart = '"equal":false,"difference":{"place":0,"token":1,"expected":2,"gap":3.0}'
    lines[place] = lines[place].replace('"equal":true,"difference":null', apart)
    (tmp_path / "run.jsonl").write_text("".join(lines))
    done = run(*SHORT, "--peers", "transformers,transformers-lookup", "--out", str(tmp_path / "run.jsonl"))
    assert done.returncode == 1
    assert "NOT EQUAL: 1 answers differ from plain decoding in float32" in done.stderr
    assert "Traceback" not in done.stderr


# With a draft model


DRAFT_MODEL = "smollm2,weights=float"
"""by default it has 8 bits where they pay"""


@pytest.fixture(scope="module")
def drafted_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """The model drafts for itself, in trees of at most five nodes below the root."""
    folder = tmp_path_factory.mktemp("drafted")
    (folder / "prompt.txt").write_text("Name a colour.\n")
    methods = ("--methods", "block,improved-mcsd-lossy", "--draft-model", DRAFT_MODEL, "--budget", "5")
    files = ("--out", str(folder / "run.jsonl"), "--csv-out", str(folder / "run.csv"))
    done = run(*SHORT, *methods, *files, "--prompts", str(folder / "prompt.txt"), "-n", "8")
    assert done.returncode == 0, done.stderr
    return folder, done


def test_draft_passes_and_their_cost_are_recorded(drafted_run: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    folder, _ = drafted_run
    records = {record.contestant: record for record in read(folder / "run.jsonl")}
    assert set(records) == {"plain", "block", "improved-mcsd-lossy"}
    assert records["block"].draft_cost == pytest.approx(1.0)
    assert records["block"].draft_passes
    assert records["block"].equal is True
    assert records["plain"].draft_passes == 0
    assert records["block"].run["arguments"]["draft_model"] == DRAFT_MODEL


def test_a_budget_bounds_the_nodes_below_the_root_of_every_method(
    drafted_run: tuple[Path, subprocess.CompletedProcess[str]],
) -> None:
    folder, _ = drafted_run
    for record in read(folder / "run.jsonl"):
        if record.kind == "method":
            assert record.steps
            assert record.drafted
            assert record.drafted <= 5 * record.steps
            assert len(record.drafted_per_depth) <= 5
    first = next(record for record in read(folder / "run.jsonl") if record.contestant == "block")
    assert len(first.drafted_per_depth) == 5, "five nodes below the root make a chain of five"


def test_the_table_and_the_csv_show_what_drafting_costs(
    drafted_run: tuple[Path, subprocess.CompletedProcess[str]],
) -> None:
    folder, done = drafted_run
    titles = done.stdout.splitlines()[0].split("  ")
    assert {"drafts/step", "MBSU", "by depth"} <= {title.strip() for title in titles}
    with (folder / "run.csv").open(newline="") as file:
        rows = {(row["contestant"], row["category"]): row for row in csv.DictReader(file)}
    block = rows["block", "all"]
    assert float(block["draft_passes_per_step"]) > 1
    assert float(block["memory_bound_speed_up"]) < float(block["block_efficiency"])
    assert all(0 <= float(share) <= 1 for share in block["acceptance_per_depth"].split())
    assert rows["plain", "all"]["speed_up"] == ""


def test_whoever_runs_a_lossy_method_is_told_and_it_is_no_bug(
    drafted_run: tuple[Path, subprocess.CompletedProcess[str]],
) -> None:
    _, done = drafted_run
    large, line = sorted(done.stderr.splitlines())
    assert large.startswith("branchwise: A pass of the draft model reads 1.0 times the bytes")
    assert line.startswith("branchwise: Verifier 'lossy-longest' is lossy: it changes the distribution")
    assert re.search(r"up to 0\.\d{3} there; for fork-lossy:4x6,stop=learned on", line)


def test_only_lossless_methods_must_be_equal_and_only_in_float32() -> None:
    exact, rough = {"dtype": "float32"}, {"dtype": "bfloat16"}
    apart = told("block", equal=False, run=exact)
    records = [
        apart,
        told("block", item="b", equal=True, run=exact),
        told("block", item="c", equal=False, run=rough),
        told("some-lossy", equal=False, run=exact),
    ]
    assert unequal(records, lossy={"some-lossy"}) == [apart]
    assert len(unequal(records, lossy=set())) == 2


def test_columns_about_draft_models_are_shown_only_where_one_runs() -> None:
    numbers = {"steps": 4, "accepted": 6, "drafted": 12, "drafted_per_depth": (4, 4), "accepted_per_depth": (4, 2)}
    plain = told("plain", steps=10, accepted=0, drafted=0, draft_passes=0)
    without = told("ngram", **numbers, draft_passes=0)
    with_model = told("block", **numbers, draft_passes=8, draft_cost=0.25)
    titles, _ = cells(summarise([plain, without]))
    assert not {"drafts/step", "MBSU", "by depth"} & set(titles)
    titles, lines = cells([row for row in summarise([plain, without, with_model]) if row.category == "all"])
    shown = {line[0]: dict(zip(titles, line, strict=True)) for line in lines}
    assert shown["block"]["drafts/step"] == "2.0"
    assert shown["block"]["MBSU"] == f"{10 / 4 / (1 + 0.25 * 2):.2f}"
    assert shown["block"]["by depth"] == "100 50"
    assert shown["plain"]["by depth"] == "–"
