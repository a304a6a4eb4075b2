"""`branchwise tune`: what a pass over n nodes costs on this machine, as a table, as one JSON object or as a picture."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from branchwise.bench.prompts import EDITING, FREE
from branchwise.cli.console import bare_table, console
from branchwise.cli.options import AsJson, DraftModel, Index, Loading, TrainedHead, at_least, grouped
from branchwise.errors import UsageError
from branchwise.plots import check_plot, pyplot, save
from branchwise.progress import showing
from branchwise.registry import split_specs

if TYPE_CHECKING:
    from branchwise.tune import Costs, DraftCost

BAR = 30

PROMPTS = (EDITING[0], EDITING[2], FREE[0])
"""the prompts that drafters are timed on: two whose answers repeat them, and one of free writing"""


@grouped
def tune(
    *,
    loading: Loading,
    batch: Annotated[int, Option(help="Sequences in a pass.")] = 1,
    context: Annotated[int, Option(help="Tokens before the tree.")] = 512,
    nodes: Annotated[str | None, Option(help="Sizes to begin with, such as 1,2,4.", show_default="1 to 128")] = None,
    repeat: Annotated[int, Option(help="Timed passes for each size.")] = 9,
    draft: Annotated[list[str] | None, Option(help="Drafters to time; may be repeated.", show_default="ngram")] = None,
    method: Annotated[list[str] | None, Option(help="Methods to time; may be repeated.")] = None,
    draft_model: DraftModel = None,
    index: Index = None,
    head: TrainedHead = None,
    fresh: Annotated[bool, Option("--fresh", help="Measure again, whatever the cache holds.")] = False,
    as_json: AsJson = False,
    plot: Annotated[Path | None, Option(help="Draw the costs as a PNG file.")] = None,
) -> None:
    """Measure what a pass over n nodes costs on this machine.

    A pass over a few nodes costs nearly as much as a pass over one, up to a size where one node more costs clearly more
    (a cliff). Drafts should stay below it. Costs are kept in the cache, and measured again if the model, the machine or
    a version changes.

    branchwise tune --model smollm2 --batch 4 --context 1024
    """
    sizes = None if nodes is None else _sizes(nodes)
    wanted = [name for given in method or [] for name in split_specs(given)]
    drafts = [name for given in draft or ([] if wanted else ["ngram"]) for name in split_specs(given)]
    at_least(1, batch=batch)
    if plot is not None:
        check_plot(plot)
    from branchwise.methods import Method, find_methods
    from branchwise.tune import measure, measure_drafter

    timed = [*(Method(name, name) for name in drafts), *find_methods(wanted, draft_model, index, head)]
    for found in timed:  # refuses an unknown name, and warns of a lossy method, before a model is loaded
        found.build()
        found.warn_if_lossy()
    llm = loading.load(draft="none", max_batch=batch)
    target, prompts = llm.engine.target, [llm.encode(prompt) for prompt in PROMPTS]
    with showing() as progress:
        costs = measure(
            target,
            model=llm.name,
            batch=batch,
            context=context,
            nodes=sizes,
            repeat=repeat,
            fresh=fresh,
            progress=progress,
        )
        drafting = [
            replace(
                measure_drafter(llm, found.draft, prompts, tree=found.tree, verify=found.verify, progress=progress),
                drafter=found.name,
            )
            for found in timed
        ]
    if plot is not None:
        _draw(costs, plot)
    if as_json:
        print(json.dumps(_as_dict(costs, drafting)))
    else:
        _print(costs, drafting)


def _sizes(nodes: str) -> list[int]:
    sizes = [part.strip() for part in nodes.split(",") if part.strip()]
    if not sizes or not all(size.isdecimal() for size in sizes):
        raise UsageError(f"nodes are sizes separated by commas, such as 1,2,4,8, not {nodes!r}.")
    return [int(size) for size in sizes]


def _as_dict(costs: Costs, drafting: Sequence[DraftCost]) -> dict[str, Any]:
    return {
        "key": asdict(costs.key),
        "measured": costs.measured,
        "remembered": costs.remembered,
        "points": [{**asdict(point), "ratio": costs.ratio(point.nodes)} for point in costs.points],
        "cliffs": [{**asdict(cliff), "stay_at": cliff.stay_at} for cliff in costs.cliffs],
        "drafters": [asdict(cost) for cost in drafting],
    }


def _print(costs: Costs, drafting: Sequence[DraftCost]) -> None:
    from branchwise.tune.passes import CLIFF

    shown = console()
    shown.print(_title(costs))
    again = "; --fresh measures again" if costs.remembered else ""
    shown.print(f"measured {costs.measured}{again}\n", style="dim")
    cliffs = {cliff.nodes for cliff in costs.cliffs}
    dearest = max(point.seconds for point in costs.points)
    table = bare_table("nodes", "ms", "half between", "times one node", "", left=[""])
    for point in costs.points:
        table.add_row(
            str(point.nodes),
            f"{1e3 * point.seconds:.2f}",
            f"{1e3 * point.low:.2f} – {1e3 * point.high:.2f}",
            f"{costs.ratio(point.nodes):.2f}",
            "█" * max(1, round(BAR * point.seconds / dearest)),
            style="yellow" if point.nodes in cliffs else None,
        )
    shown.print(table)
    shown.print()
    for cliff in costs.cliffs:
        shown.print(f"{cliff.nodes} nodes cost {cliff.times:.2f} times {cliff.stay_at}: stay at {cliff.stay_at}.")
    if not costs.cliffs:
        shown.print(f"No cliff: no size was found that clearly costs {CLIFF:.0%} more than the one before.")
    for cost in drafting:
        shown.print(
            f"{cost.drafter} drafts in {1e3 * cost.seconds:.3f} ms a step, {cost.drafted:.1f} nodes on average "
            f"({cost.seconds / costs.seconds(1):.1%} of a pass over one node)."
        )


def _title(costs: Costs) -> str:
    key = costs.key
    sequences = "one sequence" if key.batch == 1 else f"{key.batch} sequences"
    return f"{key.model}, {key.dtype}, {sequences} of {key.context} tokens; {key.device}, {key.threads} threads"


def _draw(costs: Costs, file: Path) -> None:
    plt = pyplot()
    sizes = [point.nodes for point in costs.points]
    ms = [(1e3 * point.low, 1e3 * point.seconds, 1e3 * point.high) for point in costs.points]
    low, middle, high = zip(*ms, strict=True)
    figure, axis = plt.subplots(figsize=(7, 4))
    axis.fill_between(sizes, low, high, color="#2a7f62", alpha=0.2, linewidth=0)
    axis.plot(sizes, middle, "o-", color="#2a7f62", markersize=3)
    for cliff in costs.cliffs:
        axis.axvline(cliff.nodes - 0.5, color="#c03a2b", linewidth=1, linestyle="--")
        note = f" {cliff.nodes}: × {cliff.times:.2f}"
        axis.text(cliff.nodes - 0.5, 0.02, note, color="#c03a2b", fontsize=8, transform=axis.get_xaxis_transform())
    axis.set(ylim=(0, None), xlabel="nodes", ylabel="milliseconds a pass")
    axis.set_title(_title(costs), fontsize=8, loc="left")
    axis.spines[["top", "right"]].set_visible(False)
    save(figure, file)
