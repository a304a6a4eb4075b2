"""`branchwise bench` and `branchwise report`: records of a comparison, and a page made from them."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Option

from branchwise.cli.console import console, print_notice
from branchwise.cli.options import AsJson, DraftModel, Index, Loading, Sampling, TrainedHead, at_least, grouped
from branchwise.errors import UsageError
from branchwise.progress import showing
from branchwise.registry import check_known, split_specs

if TYPE_CHECKING:
    from branchwise.bench.contest import Contestant
    from branchwise.bench.prompts import Item
    from branchwise.bench.records import Record
    from branchwise.llm import LLM

STYLEBENCH = "stylebench"
SHORT_ANSWER, LONG_ANSWER = 128, 512
"""tokens of an answer: enough to measure a speed, and enough for most solutions to be complete"""


@dataclass(frozen=True)
class Questions:
    """The prompts of a benchmark."""

    prompts: Annotated[
        list[Path] | None, Option(help="Prompts as in Spec-Bench, MT-bench, HumanEval, GSM8K or text; may be repeated.")
    ] = None
    suite: Annotated[
        list[str] | None, Option(help="spec-bench, mt-bench, humaneval, gsm8k in --data, stylebench; may be repeated.")
    ] = None
    data: Annotated[Path | None, Option(help="Folder of the sets.", show_default="$BRANCHWISE_DATA")] = None
    category: Annotated[list[str] | None, Option(help="Only this category; may be repeated.", show_default="all")] = (
        None
    )
    limit: Annotated[int | None, Option(help="Only the first prompts of each category.", show_default="all")] = None
    problems: Annotated[int, Option(help="Problems for each task of stylebench.")] = 10
    documents: Annotated[
        list[Path] | None, Option(help="Files or folders, joined and cut to --context-lengths; may be repeated.")
    ] = None
    context_lengths: Annotated[
        str | None,
        Option(help="Tokens of a document and its answer, separated by commas.", show_default="4096,8192,16384"),
    ] = None

    @property
    def lengths(self) -> list[int]:
        from branchwise.bench.documents import LENGTHS

        if self.context_lengths is None:
            return list(LENGTHS)
        if not self.documents:
            raise UsageError("--context-lengths are those of --documents; name some.")
        try:
            found = [int(length) for length in self.context_lengths.split(",")]
        except ValueError:
            raise UsageError(
                f"--context-lengths are whole numbers, such as 4096,8192, not {self.context_lengths}."
            ) from None
        if min(found) < 1 or len(set(found)) < len(found):
            raise UsageError("--context-lengths are different numbers of at least 1.")
        return found

    def long_items(self, llm: LLM, answer: int) -> list[Item]:
        """Pieces of documents, whose lengths only a tokenizer can measure."""
        from branchwise.bench.documents import long_items

        return long_items(self.documents or [], self.lengths, answer, self.limit, llm.tokenizer)

    def items(self, seed: int) -> list[Item]:
        from branchwise.bench.prompts import load_items, own_items
        from branchwise.bench.styles import STAND_INS, STYLES, style_items
        from branchwise.bench.tasks import find_tasks

        at_least(1, limit=self.limit, problems=self.problems)
        files, suites = self.prompts or [], self.suite or []
        if self.documents:
            from branchwise.index.texts import find_files

            find_files(self.documents)
        if self.lengths and not files and not suites and not self.category:
            return [] if self.documents else own_items(self.limit)
        items: list[Item] = []
        known = [name for name in suites if name != STYLEBENCH]
        if files or known:
            items += load_items(files, known, self.data, self.limit, self.category or [])
        elif self.category:
            raise UsageError("--category chooses among prompts of --prompts or --suite; name one of the two.")
        if len(known) < len(suites):
            tasks = find_tasks(self.data)
            if absent := [f"{task} ({stand_in})" for task, stand_in in STAND_INS.items() if task not in tasks]:
                print_notice(f"There are no files in --data of {', '.join(absent)}: what is in brackets stands in.")
            items += style_items(list(STYLES), self.problems, seed, tasks)
        return items

    def as_dict(self) -> dict[str, Any]:
        """The description of the prompts that goes into records."""
        return {
            "prompts": [path.name for path in self.prompts or []],
            "suite": self.suite or [],
            "category": self.category or [],
            "limit": self.limit,
            "problems": self.problems if STYLEBENCH in (self.suite or []) else None,
            **({"documents": [path.name for path in self.documents]} if self.documents else {}),
            **({"context_lengths": self.lengths} if self.documents else {}),
        }


@grouped
def bench(
    *,
    questions: Questions,
    methods: Annotated[
        str, Option(help="By name or as draft/tree/verify, separated by commas, or all; see `branchwise methods`.")
    ] = "ngram",
    draft_model: DraftModel = None,
    index: Index = None,
    head: TrainedHead = None,
    peers: Annotated[
        str, Option(help="transformers, transformers-static, -lookup, -assisted:MODEL, llama.cpp, openai:URL.")
    ] = "",
    loading: Loading,
    sampling: Sampling,
    max_new_tokens: Annotated[
        int | None,
        Option("--max-new-tokens", "-n", help="Tokens of an answer at most.", show_default="128; 512 if checked"),
    ] = None,
    check_answers: Annotated[
        bool, Option("--check-answers", help="Run the programs that HumanEval asks for, in a sandbox, for pass@1.")
    ] = False,
    full_length: Annotated[bool, Option("--full-length", help="Forbid the end of text, for equal lengths.")] = False,
    batch: Annotated[int, Option(help="Prompts that run together.")] = 1,
    context: Annotated[
        int | None, Option(help="Tokens of prompt and answer at most, also of drafts.", show_default="the model's")
    ] = None,
    repeat: Annotated[int, Option(help="Rounds over all prompts.")] = 1,
    order: Annotated[str, Option(help="interleaved (prompt by prompt) or sequential.")] = "interleaved",
    budget: Annotated[int | None, Option(help="Drafted nodes at most; larger trees are cut by their own rule.")] = None,
    length: Annotated[int | None, Option(help="Levels of a tree at most, for every method alike.")] = None,
    guard: Annotated[bool, Option("--guard", help="Every method also under a guard, as METHOD+guard.")] = False,
    state: Annotated[str, Option(help="cold: a new drafter for every prompt; warm: it goes on learning.")] = "cold",
    seed: Annotated[int, Option(help="Seed of sampling, the same for every contestant.")] = 0,
    out: Annotated[Path, Option(help="File of records, one JSON line per request.")] = Path("bench.jsonl"),
    categories: Annotated[bool, Option("--categories", help="Show a row for every category.")] = False,
    spec_bench_out: Annotated[Path | None, Option(help="Folder for Spec-Bench's JSON lines by contestant.")] = None,
    vllm_out: Annotated[Path | None, Option(help="Folder for results like `vllm bench serve --save-result`.")] = None,
    csv_out: Annotated[Path | None, Option(help="CSV file for the summary by contestant and category.")] = None,
    commit: Annotated[str | None, Option(help="Commit to record if there is no git repository.")] = None,
    as_json: AsJson = False,
) -> None:
    """Measure methods and peers against plain decoding.

    All contestants run in one process, from the same token ids, in turn on every prompt. Every request is one line of
    JSON in --out; after Ctrl-C the same command goes on. Without --prompts or --suite, ten prompts of Branchwise run.

    branchwise bench --suite spec-bench --data DIR --limit 2 --methods ngram --peers transformers --out run.jsonl
    """
    from branchwise.bench.contest import Ours
    from branchwise.bench.peers import PEERS, build_peer
    from branchwise.bench.records import STATES, Ledger
    from branchwise.bench.run import Contest, Rules, digest, fitting
    from branchwise.core.sampling import SamplingParams
    from branchwise.draft.base import Budget
    from branchwise.methods import PLAIN, PRESETS, find_methods
    from branchwise.provenance import provenance, without_folder

    SamplingParams(**vars(sampling))
    if max_new_tokens is None:
        solving = check_answers or STYLEBENCH in (questions.suite or [])
        max_new_tokens = LONG_ANSWER if solving else SHORT_ANSWER
    shared: dict[str, Any] = {
        **vars(sampling),
        "max_new_tokens": max_new_tokens,
        "full_length": full_length,
        "batch": batch,
        "order": order,
        "state": state,
    }
    rules = Rules(**shared, seed=seed, rounds=repeat)
    check_known("state", state, STATES)
    at_least(1, budget=budget, length=length)
    others = split_specs(peers)
    specs = [name for spec in split_specs(methods) for name in (PRESETS if spec == "all" else [spec])]
    if not specs and not others:
        raise UsageError("There is nothing to compare; name methods with --methods or peers with --peers.")
    chosen = find_methods(specs, draft_model, index, head)
    for method in chosen:
        method.build()  # refuses a pair that does not fit before a model is loaded
    entered = list(dict.fromkeys([PLAIN, *chosen]))
    if len({method.name for method in entered}) < len(chosen) + (PLAIN not in chosen):
        raise UsageError("A method is named twice in --methods.")
    for spec in others:
        PEERS.find(spec.partition(":")[0].strip())
    if len(set(others)) < len(others):
        raise UsageError("A peer is named twice in --peers.")
    for method in chosen:
        method.warn_if_lossy()
    items = questions.items(seed)
    if check_answers:
        items = checked(items)
    arguments = {
        **questions.as_dict(),
        "methods": [method.name for method in chosen],
        "draft_model": None if draft_model is None else without_folder(draft_model),
        "index": None if index is None else without_folder(index),
        "head": None if head is None else without_folder(head),
        "peers": others,
        **shared,
        "context": context,
        "repeat": repeat,
        "budget": budget,
        "length": length,
        **({"guard": True} if guard else {}),
        **({"check_answers": True} if check_answers else {}),
    }
    most = None if budget is None and length is None else Budget((budget or 10**9 - 1) + 1, length or 10**9)
    with Ledger(out) as ledger:
        llm = loading.load(entered, draft="none", context=context, max_batch=batch)
        contestants: list[Contestant] = [Ours(llm, method, most) for method in entered]
        contestants += [Ours(llm, method, most, guard=True) for method in chosen if guard and method != PLAIN]
        contestants += [build_peer(spec, llm, threads=loading.threads) for spec in others]
        if questions.documents:
            items = items + questions.long_items(llm, max_new_tokens)
        kept = fitting(items, llm, max_new_tokens)
        if len(kept) < len(items):
            print_notice(
                f"{len(items) - len(kept)} of {len(items)} prompts cannot be asked here and are left out: they are "
                "longer than the context, or dialogues for a model without a chat template."
            )
        if not kept:
            raise UsageError("No prompt fits into the context; choose a smaller --max-new-tokens or other prompts.")
        run = {
            **provenance(llm.model.device, arguments, commit),
            "model": without_folder(llm.name),
            "weights": None if llm.conversion is None else asdict(llm.conversion),
            "dtype": str(llm.model.dtype).removeprefix("torch."),
            "seed": seed,
            "questions": digest(kept),
        }
        contest = Contest(llm, contestants, kept, rules, ledger, run)
        if ledger.records:
            print_notice(f"{out} holds {len(ledger.records)} records of this run; going on with what is missing.")
        try:
            with showing() as contest.progress:
                contest.play()
        except KeyboardInterrupt:
            print_notice(f"Stopped with {len(ledger.records)} records in {out}; the same command goes on.")
            raise
        records = ledger.records
    write_exports(records, spec_bench_out, vllm_out, csv_out)
    show(records, out, categories, as_json)
    if broken := unequal(records, lossy={method.name for method in chosen if not method.lossless}):
        print_notice(
            f"NOT EQUAL: {len(broken)} answers differ from plain decoding in float32, the first is {broken[0].key}. "
            "This is a bug in Branchwise; please report it."
        )
        raise typer.Exit(1)


def checked(items: list[Item]) -> list[Item]:
    """Items whose programs will be executed, after a warning about the dangers that this machine does not rule out."""
    from branchwise.bench.execution.sandbox import missing
    from branchwise.bench.prompts import executing

    found = executing(items)
    if not any(item.check for item in found):
        raise UsageError("No prompt has an answer to check; --check-answers needs tests as in HumanEval, or numbers.")
    if any(item.program for item in found) and (open_doors := missing()):
        print_notice(f"Programs of the model run here with limits, but {', and '.join(open_doors)}.")
    return found


def report(
    records: Annotated[list[Path], Argument(help="Files of records that `branchwise bench` wrote.")],
    out: Annotated[Path, Option(help="Folder for the page and its figures.")] = Path("report"),
    costs: Annotated[Path | None, Option(help="Output of `branchwise tune --json`, drawn as a figure.")] = None,
    claims: Annotated[Path | None, Option(help="Records of `branchwise reproduce`, drawn as figures.")] = None,
) -> None:
    """Make one HTML page with figures from the records of a benchmark. They may be of several models.

    branchwise report run.jsonl --out report
    """
    from branchwise.bench.records import read
    from branchwise.bench.report import write_report

    found = [record for path in records for record in read(path)]
    if not found:
        raise UsageError("There are no records in these files yet.")
    points = None
    if costs is not None:
        try:
            read_points = json.loads(costs.read_text())["points"]
            points = [{"nodes": int(point["nodes"]), "seconds": float(point["seconds"])} for point in read_points]
        except (OSError, ValueError, KeyError, TypeError):
            raise UsageError(f"{costs} is not what `branchwise tune --json` prints.") from None
    more = []
    if claims is not None:
        from branchwise.bench.claims import drawing, rows

        more = drawing.figures(rows.read(claims))
    print(write_report(found, out, points, more))


def unequal(records: list[Record], lossy: set[str]) -> list[Record]:
    """Float32 answers of lossless methods that differ from plain decoding."""
    from branchwise.bench.records import METHOD

    exact = (record for record in records if record.kind == METHOD and record.run.get("dtype") == "float32")
    return [record for record in exact if record.equal is False and record.contestant not in lossy]


def write_exports(records: list[Record], spec_bench: Path | None, vllm: Path | None, csv: Path | None) -> None:
    from branchwise.bench.export import csv_text, spec_bench_lines, vllm_result
    from branchwise.bench.summary import by_contestant, summarise

    files: dict[Path, str] = {}
    if csv is not None:
        files[csv] = csv_text(summarise(records))
    for name, own in by_contestant(records).items():
        safe = "".join(c if c.isalnum() or c in "-._" else "_" for c in name)
        if spec_bench is not None:
            files[spec_bench / f"{safe}.jsonl"] = "".join(f"{line}\n" for line in spec_bench_lines(own))
        if vllm is not None:
            files[vllm / f"{safe}.json"] = json.dumps(vllm_result(own), indent=1) + "\n"
    for path, text in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8", newline="")


def show(records: list[Record], out: Path, categories: bool, as_json: bool) -> None:
    from branchwise.bench import summary

    rows = summary.summarise(records)
    if as_json:
        print(json.dumps({"records": str(out), "rows": summary.as_json(rows)}))
        return
    shown = console(width=120)
    shown.print(summary.table(rows, per_category=categories, width=shown.width))
    shown.print(f"{len(records)} records in {out}; branchwise report {out} draws them.", style="dim")
