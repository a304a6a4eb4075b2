"""`branchwise train head` and `export`: from a model to the file of a head, and from that file to another engine."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Option

from branchwise.cli.console import print_notice
from branchwise.cli.options import AsJson, Loading, at_least, check_out, grouped
from branchwise.errors import UsageError
from branchwise.plots import check_plot, pyplot, save
from branchwise.progress import showing
from branchwise.registry import check_known

TOO_LONG = 1.0
"""the hours of writing texts from which on the user is warned first"""
Scored = Mapping[str, Any]
"""an entry of the learning curve: seconds, steps, loss, and hits by depth on held-out texts"""


@grouped
def head(
    *,
    loading: Loading,
    minutes: Annotated[float, Option(help="How long the head learns; writing texts comes before.")] = 5.0,
    texts: Annotated[int, Option(help="Texts that the target writes to learn from.")] = 60_000,
    kind: Annotated[
        str, Option(help="What prompts these texts answer: general, or code for a model of programs.")
    ] = "general",
    form: Annotated[
        str,
        Option(
            help="carry, eagle, fspad, fspad-gate, longspec, longspec-states, parallelspec, speculators or two-layers."
        ),
    ] = "carry",
    mlp: Annotated[
        int | None, Option(help="Width of the head's MLP.", show_default="five times the model's hidden width")
    ] = None,
    table: Annotated[int, Option(help="Tokens that it can propose, the most frequent ones.")] = 32_768,
    batch_tokens: Annotated[int, Option(help="Tokens of a step of learning.")] = 32_768,
    avoid: Annotated[
        list[Path] | None, Option(help="Prompts of an evaluation, which no text may begin with; repeatable.")
    ] = None,
    data: Annotated[
        Path | None,
        Option(
            help="Learn from these texts: JSON lines with prompt and answer, or with text. Best are the model's own."
        ),
    ] = None,
    seed: Annotated[int, Option(help="The same seed takes the same prompts and batches.")] = 0,
    out: Annotated[Path, Option(help="The file to write; work in progress is kept beside it.")] = Path(
        "head.safetensors"
    ),
    plot: Annotated[Path | None, Option(help="Draw the learning curve as a PNG file.")] = None,
    as_json: AsJson = False,
) -> None:
    """Train a head that drafts from the target's own hidden states.

    The target writes texts, and a small network learns from them what comes next. After Ctrl-C the same command goes
    on. The file then drafts: --head head.safetensors

    branchwise train head --model smollm2 --minutes 5 --out smollm2.head
    """
    at_least(1, texts=texts, table=table, mlp=mlp, batch_tokens=batch_tokens)
    if not minutes > 0:
        raise UsageError(f"--minutes must be above 0, not {minutes}.")
    if plot is not None:
        check_plot(plot)
    from branchwise.draft.head.file import TrainedHead
    from branchwise.provenance import without_folder
    from branchwise.train.head.learn import Recipe
    from branchwise.train.head.run import FORMS, Sizes, Training
    from branchwise.train.writing import SHARES, hours_to_write, prepare

    check_known("form", form, FORMS)
    check_known("kind", kind, SHARES)
    check_out(out, TrainedHead.load, "head")
    if data is not None and not data.is_file():
        raise UsageError(f"There is no file {data} with texts to learn from.")
    from branchwise.bench.prompts import load_items

    evaluation = [turn for item in load_items(avoid) for turn in item.turns] if avoid else []
    llm = loading.load(draft="none", max_batch=1)
    info, width = llm.engine.target.info, llm.engine.target.info.hidden_width
    folder = out.with_name(f"{out.name}.run")
    sizes = Sizes(mlp=mlp or 5 * width, table=table, **FORMS[form])
    if data is None and (hours := hours_to_write(llm, texts)) > TOO_LONG:
        print_notice(
            f"On this machine {llm.name} would take about {hours:.0f} hours to write {texts} texts; a GPU takes "
            "minutes. Ctrl-C ends it; --texts asks for fewer, --data takes texts that are there."
        )

    def shown(scored: Scored) -> None:
        if not as_json:
            print(_line(scored), flush=True)

    try:
        with showing() as progress:
            recipe = Recipe(minutes, tokens=batch_tokens, seed=seed)
            asked = {"count": texts, "kind": kind, "avoid": [file.name for file in avoid or ()]}
            asked |= {"data": data.name if data else None}
            run = Training(llm.model, info, folder, sizes, recipe, progress, shown, asked)
            learn, held_out = prepare(
                llm, folder, texts, seed=seed, avoid=evaluation, kind=kind, data=data, progress=progress
            )
            if not as_json:
                print(_title(), flush=True)
            found = run.run(learn, held_out)
    except KeyboardInterrupt:
        print_notice(f"Stopped; the same command goes on with what is in {folder}.")
        raise
    replace(found, target=without_folder(llm.name)).save(out)
    last = found.about["curve"][-1]
    if plot is not None:
        _draw(found.about["curve"], plot)
    weights = sum(weight.numel() for weight in found.head.parameters())
    if as_json:
        print(json.dumps({"file": str(out), "form": form, "weights": weights, **last}))
        return
    print(f"{weights / 1e6:.1f} M weights, {last['steps']} steps, {_chain(last):.2f} tokens a pass in a chain.")
    print(f"Use it with --head {out}")


@grouped
def export(
    *,
    file: Annotated[Path, Argument(metavar="HEAD", help="The file that `branchwise train head` wrote.")],
    loading: Loading,
    layout: Annotated[str, Option("--format", help="speculators, the layout of vLLM.")] = "speculators",
    verifier: Annotated[
        str | None, Option(help="Hub id or folder by which vLLM loads the model.", show_default="--model")
    ] = None,
    out: Annotated[Path, Option(help="The folder to write.")] = Path("head"),
    as_json: AsJson = False,
) -> None:
    """Write a head for another engine.

    The folder drafts in vLLM and here: --draft head:FOLDER. Heads of the forms speculators and eagle can be exported.

    branchwise train export --format speculators smollm2.head --model smollm2 --out smollm2-eagle3
    """
    check_known("format", layout, ("speculators",))
    from branchwise.draft.head.export import Verifier, check_exportable, check_folder, export_speculators
    from branchwise.draft.head.speculators import read_head

    head = read_head(file)
    check_exportable(head)
    check_folder(out)
    llm = loading.load(draft="none", max_batch=1)
    info, config = llm.engine.target.info, llm.model.config
    positions = config.get_text_config().to_dict().get("max_position_embeddings") or info.context
    known = Verifier(verifier or loading.model, tuple(config.architectures or ()), positions)
    export_speculators(head, out, info, known)
    if as_json:
        print(json.dumps({"folder": str(out), "format": layout, "verifier": known.name, "tokens": len(head.table)}))
        return
    print(f"Use it with vllm serve {out}, or here with --draft head:{out}")


def _title() -> str:
    return "   time   steps    loss  tokens a pass  hits by depth, on texts that it does not learn from"


def _line(scored: Scored) -> str:
    minutes, seconds = divmod(round(scored["seconds"]), 60)
    hits = " ".join(f"{hit:.2f}".lstrip("0") for hit in scored["hits"])
    return f"{minutes:4d}:{seconds:02d} {scored['steps']:7d} {scored['loss']:7.3f} {_chain(scored):14.2f}  {hits}"


def _chain(scored: Scored) -> float:
    """Tokens a pass of a chain with one level for each hit rate."""
    from branchwise.train.head.learn import Score

    return Score(scored["hits"]).tokens


def _draw(curve: Sequence[Scored], file: Path) -> None:
    plt = pyplot()
    minutes = [scored["seconds"] / 60 for scored in curve]
    figure, axis = plt.subplots(figsize=(7, 4))
    for depth in range(len(curve[-1]["hits"])):
        values = [scored["hits"][depth] for scored in curve]
        axis.plot(minutes, values, "o-", markersize=2, linewidth=1, label=f"depth {depth + 1}")
    axis.set(xlabel="minutes of learning", ylabel="hits on held-out texts, given those above", ylim=(None, 1))
    axis.set_title(
        f"a chain of {len(curve[-1]['hits'])}: {_chain(curve[-1]):.2f} tokens a pass", fontsize=8, loc="left"
    )
    axis.legend(fontsize=8, frameon=False)
    axis.spines[["top", "right"]].set_visible(False)
    save(figure, file)
