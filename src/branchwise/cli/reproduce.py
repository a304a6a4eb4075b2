"""`branchwise reproduce`: what papers claim, measured here, with a verdict for each claim."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from branchwise.cli.console import bare_table, console, print_notice
from branchwise.cli.options import DraftModel, Index, Loading, TrainedHead, at_least, grouped
from branchwise.errors import UsageError
from branchwise.progress import showing

if TYPE_CHECKING:
    from branchwise.bench.claims.measuring import Measuring, Parts
    from branchwise.bench.claims.rows import Rows
    from branchwise.bench.prompts import Item

CATEGORIES = ("writing", "coding", "reasoning", "translation", "summarization", "qa", "math_reasoning", "rag")
"""categories of Spec-Bench: both kinds of dialogue, and every task of its paper"""


@dataclass(frozen=True)
class Size:
    """The sizes of a run."""

    prompts: int
    """prompts of all categories together; with fewer than 8 nothing would be decided"""
    tokens: int
    alone: int
    """the most prompts of a race"""


TITLES = ("claim", "comparison", "ratio", "paper", "verdict")
QUICK, FULL = Size(8, 24, 8), Size(40, 64, 40)


@grouped
def reproduce(
    *,
    names: Annotated[list[str] | None, Argument(help="Claims or methods by name; all by default.")] = None,
    quick: Annotated[
        bool, Option("--quick", help="Eight short texts, for a CPU: half an hour of its time with smollm2.")
    ] = False,
    loading: Loading,
    draft_model: DraftModel = None,
    head: TrainedHead = None,
    index: Index = None,
    part: Annotated[
        list[str] | None, Option(help="Trained part NAME=PATH, such as student=FOLDER or fspad=FILE; may be repeated.")
    ] = None,
    data: Annotated[
        Path | None, Option(help="Folder with Spec-Bench; else prompts of Branchwise.", show_default="$BRANCHWISE_DATA")
    ] = None,
    prompts: Annotated[list[Path] | None, Option(help="Prompt files in place of Spec-Bench; may be repeated.")] = None,
    limit: Annotated[int | None, Option(help="Prompts of each category.", show_default="40 in all, quick 8")] = None,
    max_new_tokens: Annotated[
        int | None, Option("--max-new-tokens", "-n", help="Tokens of a text at most.", show_default="64, quick 24")
    ] = None,
    alone: Annotated[
        int | None, Option(help="Prompts that are timed one by one, at most; 0: no speeds.", show_default="40, quick 8")
    ] = None,
    minutes: Annotated[
        float | None,
        Option(help="Begin no row after this many minutes; the same command goes on.", show_default="none"),
    ] = None,
    context: Annotated[int, Option(help="Tokens of prompt and text at most.")] = 2048,
    figures: Annotated[bool, Option(help="Also measure what only the figures need; a quick run does not.")] = True,
    seed: Annotated[int, Option(help="Seed of sampling, the same for every method.")] = 0,
    out: Annotated[Path, Option(help="File of records; the same command goes on with it.")] = Path("claims.jsonl"),
    read: Annotated[list[Path] | None, Option(help="Measure nothing, read these records; may be repeated.")] = None,
    claims: Annotated[Path | None, Option(help="Write the page of claims and its figures.")] = None,
    commit: Annotated[str | None, Option(help="Commit to record if there is no git repository.")] = None,
) -> None:
    """Measure what papers claim of the methods, and judge it.

    Every claim is a comparison with the baseline that it names; the verdict follows from the interval. Without a draft
    model the trained head of the target drafts in its place. Rows are kept in --out one by one: after Ctrl-C the same
    command goes on. What was not measured is listed with what it needs. With --read nothing is measured; with --claims
    the page is written from records.

    branchwise reproduce --quick

    branchwise reproduce block cascade --quick
    """
    from branchwise.bench.claims import rows as records
    from branchwise.bench.claims.table import chosen

    wanted = chosen(names or [])
    failed: dict[str, str] = {}
    at_least(1, limit=limit, max_new_tokens=max_new_tokens)
    at_least(0, alone=alone)
    if read:
        setups = [records.read(path) for path in read]
    else:
        from branchwise.bench.claims.table import sweeps

        size = QUICK if quick else FULL
        size = Size(size.prompts, max_new_tokens or size.tokens, size.alone if alone is None else alone)
        items = _items(data, prompts or [], limit, size.prompts)
        begin = time.perf_counter()
        parts = _parts(draft_model, head, index, part)
        measuring = _measuring(loading, parts, items, size, context, seed, quick, commit, out)
        if measuring.file.found.rows:
            print_notice(f"{out} holds {len(measuring.file.found.rows)} rows; going on with what is missing.")
        measuring.tell = print_notice
        measuring.seconds = None if minutes is None else 60 * minutes
        drawn = sweeps() if figures and not quick and not names else ()
        try:
            with showing() as measuring.progress:
                measuring.run(wanted, drawn, quick=quick)
        except KeyboardInterrupt:
            print_notice(f"Stopped with {len(measuring.file.found.rows)} rows in {out}; the same command goes on.")
            raise
        finally:
            measuring.file.close()
        failed = measuring.failed
        for spec, why in failed.items():
            print_notice(f"{spec} could not be measured: {why}")
        print_notice(f"Measured in {(time.perf_counter() - begin) / 60:.1f} minutes, loading included.")
        if measuring.over:
            print_notice("The time is over before all was measured; the same command goes on.")
        setups = [measuring.file.found]
    for rows in setups:
        _show(rows, [claim.name for claim in wanted], failed)
    if claims is not None:
        _write_page(setups, claims)


def _items(data: Path | None, files: list[Path], limit: int | None, most: int) -> list[Item]:
    """The prompts: of files, of Spec-Bench, or our own if no such set is found. Without a `limit`, each category gives
    about as many prompts as are needed for `most` in all."""
    import os

    from branchwise.bench.prompts import FOLDER_VARIABLE, load_items, own_items

    def load(limit: int | None) -> list[Item]:
        if files:
            return load_items(files, limit=limit)
        if data is None and FOLDER_VARIABLE not in os.environ:
            return own_items(limit)
        return load_items(suites=["spec-bench"], folder=data, limit=limit, categories=CATEGORIES)

    return load(limit or max(1, most // len({(item.suite, item.category) for item in load(None)})))


def _parts(draft_model: str | None, head: str | None, index: str | None, part: list[str] | None) -> Parts:
    from branchwise.bench.claims.measuring import Parts

    trained = {}
    for word in part or []:
        name, equals, path = word.partition("=")
        if not equals or not name or not path:
            raise UsageError(f"--part takes NAME=PATH, such as student=FOLDER, not {word!r}.")
        trained[name] = path
    return Parts(draft_model, head, index, trained)


def _measuring(
    loading: Loading,
    parts: Parts,
    items: list[Item],
    size: Size,
    context: int,
    seed: int,
    quick: bool,
    commit: str | None,
    out: Path,
) -> Measuring:
    """A run on a loaded model, with its file of rows."""
    from dataclasses import replace

    from branchwise.bench.claims.judging import FEWEST
    from branchwise.bench.claims.measuring import Measuring
    from branchwise.bench.claims.rows import VERSION, RowFile
    from branchwise.bench.run import digest, fitting
    from branchwise.draft.head.shipped import shipped_head
    from branchwise.provenance import provenance, without_folder

    llm = loading.load(draft="none", context=context, max_batch=len(items), guard=False)
    kept = fitting(items, llm, size.tokens)
    if not kept:
        raise UsageError("No prompt fits into the context; raise --context, or take other prompts.")
    if len(kept) < FEWEST:
        print_notice(f"{len(kept)} prompts decide nothing; verdicts need at least {FEWEST}.")
    if parts.head is None and (shipped := shipped_head(llm.engine.target.info)) is not None:
        parts = replace(parts, head=str(shipped))
    run = {
        **provenance(llm.model.device, {}, commit),
        "version": VERSION,
        "model": without_folder(llm.name),
        "draft": parts.draft_model and without_folder(parts.draft_model),
        "head": parts.head and without_folder(parts.head),
        "index": parts.index and without_folder(parts.index),
        "parts": {name: without_folder(path) for name, path in parts.trained.items()},
        "dtype": str(llm.model.dtype).removeprefix("torch."),
        "quick": quick,
        "tokens": size.tokens,
        "prompts": f"{len(kept)} of {', '.join(dict.fromkeys(item.suite for item in kept))}",
        "questions": digest(kept),
        "seed": seed,
    }
    file = RowFile(out, run)
    return Measuring(llm, kept, parts, file, size.tokens, seed, size.alone)


def _show(rows: Rows, names: list[str], failed: Collection[str]) -> None:
    """Print the verdicts as a table, and below it the claims that were not measured, with the reasons."""
    from branchwise.bench.claims.judging import VERDICTS, disturbed, judge
    from branchwise.bench.claims.table import chosen
    from branchwise.bench.summary import ABSENT, shown_ratio

    found = [judge(claim, rows) for claim in chosen(names)]
    table = bare_table(*TITLES, left=("claim", "comparison", "verdict"))
    missing: dict[str, Counter[str]] = {}
    for judged in found:
        name = judged.claim.name
        for one in judged.found:
            if one.ratio is None:
                why = "failed, see above" if {*one.specs} & {*failed} else one.missing
                missing.setdefault(why, Counter())[judged.claim.name] += 1
                continue
            label = f"({one.point.label})" if one.point.beside else one.point.label
            claimed = ABSENT if one.point.claimed is None else f"{one.point.claimed:g}"
            table.add_row(name, label, shown_ratio(one.ratio), claimed, one.verdict)
            name = ""
    shown = console()
    shown.print(f"{rows.title}, {rows.run['prompts']}, {rows.run['tokens']} tokens each")
    if table.row_count:
        shown.print(table)
    compared = {judged.claim.name: len(judged.found) for judged in found}
    for why, claims in missing.items():
        told = [
            name if count == compared[name] else f"{name} ({count} of {compared[name]})"
            for name, count in claims.items()
        ]
        shown.print(f"Not measured, {why}: {', '.join(told)}")
    if busy := disturbed(rows):
        shown.print(f"{busy[0].upper()}{busy[1:]}.")
    counts = Counter(judged.verdict for judged in found)
    told = [f"{counts[verdict]} {verdict}" for verdict in VERDICTS if counts[verdict]]
    shown.print(f"{len(found)} {'claim' if len(found) == 1 else 'claims'}: {', '.join(told)}")


def _write_page(setups: list[Rows], path: Path) -> None:
    from branchwise.bench.claims.drawing import write_figures
    from branchwise.bench.claims.page import page

    text = page(setups)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8", newline="\n")
    except OSError as error:
        raise UsageError(f"The page {path} cannot be written: {error.strerror}.") from None
    write_figures(setups[0], path.parent)
