"""`branchwise train student` and `nested`: from a target to the folder of a draft model."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from typer import Option

from branchwise.cli.console import print_notice
from branchwise.cli.drafters.data import Avoid, Kind
from branchwise.cli.options import AsJson, Target, at_least, grouped
from branchwise.errors import UsageError
from branchwise.progress import showing
from branchwise.registry import check_known

TOO_LONG = 1.0
"""the hours of writing texts from which on the user is warned first"""

Init = Annotated[
    str | None,
    Option(
        help="Where it begins: layers:0,14,29 of the target, or a folder or hub id of a model with its tokenizer.",
        show_default="layers of the target, spread evenly",
    ),
]


@dataclass(frozen=True)
class Lessons:
    """The settings that decide how a student learns."""

    data: Annotated[
        Path | None,
        Option(help="Texts to learn from: those of `branchwise train data`, or a fixed set.", show_default="written"),
    ] = None
    texts: Annotated[int, Option(help="Texts that the target writes, without --data.")] = 60_000
    kind: Kind = "general"
    avoid: Avoid = None
    on_policy: Annotated[float, Option(help="Share of the batches that the student writes itself, 0 to 1.")] = 0.0
    divergence: Annotated[
        str, Option(help="fkl (forward KL), rkl (reverse KL), js (Jensen-Shannon) or tv (total variation).")
    ] = "fkl"
    temperature: Annotated[float, Option("--temperature", "-t", help="Of both distributions in the loss.")] = 1.0
    minutes: Annotated[float, Option(help="How long it learns; writing texts comes before.")] = 5.0
    steps: Annotated[int | None, Option(help="Number of steps, in place of minutes.", show_default="by the clock")] = (
        None
    )
    batch_tokens: Annotated[int, Option(help="Tokens of a step.")] = 16_384
    rate: Annotated[float, Option(help="The learning rate.")] = 1e-3
    depth: Annotated[int, Option(help="Tokens of the drafts whose block efficiency is shown.")] = 5
    every: Annotated[float, Option(help="Seconds between two scores on held-out texts, each with a checkpoint.")] = 20.0
    seed: Annotated[int, Option(help="The same seed takes the same prompts and batches.")] = 0

    def check(self) -> None:
        from branchwise.train.student.divergence import KINDS
        from branchwise.train.writing import SHARES

        at_least(1, texts=self.texts, steps=self.steps, batch_tokens=self.batch_tokens, depth=self.depth)
        check_known("divergence", self.divergence, KINDS)
        check_known("kind", self.kind, SHARES)
        if not 0 <= self.on_policy <= 1:
            raise UsageError(f"--on-policy is a share between 0 and 1, not {self.on_policy}.")
        for name in ("temperature", "minutes", "rate"):
            if not vars(self)[name] > 0:
                raise UsageError(f"--{name} must be above 0, not {vars(self)[name]}.")
        if self.data is not None and not self.data.is_file():
            raise UsageError(f"There is no file {self.data} with texts to learn from.")

    def recipe(self) -> Any:
        from branchwise.train.student.learn import Recipe

        return Recipe(
            self.minutes,
            self.steps,
            self.divergence,
            self.temperature,
            self.on_policy,
            tokens=self.batch_tokens,
            rate=self.rate,
            depth=self.depth,
            seed=self.seed,
        )


@grouped
def student(
    *,
    target: Target,
    init: Init = None,
    layers: Annotated[int, Option(help="How many layers of the target to begin with, without --init.")] = 4,
    lessons: Lessons,
    out: Annotated[Path, Option(help="The folder to write; work in progress is kept beside it.")] = Path("student"),
    as_json: AsJson = False,
) -> None:
    """Train a draft model on the distributions of its target (DistillSpec).

    The folder drafts: --draft-model FOLDER. transformers and vLLM load it as any other model. After Ctrl-C the same
    command goes on.

    branchwise train student --target smollm2 --init layers:0,14,28,29 --data texts.jsonl --out student
    """
    at_least(1, layers=layers)
    _train(target, init, layers, (), lessons, out, as_json)


@grouped
def nested(
    *,
    target: Target,
    exits: Annotated[str, Option(help="After how many layers a draft may leave, in ascending order.")] = "2,4,6",
    init: Init = None,
    lessons: Lessons,
    out: Annotated[Path, Option(help="The folder to write; work in progress is kept beside it.")] = Path("nested"),
    as_json: AsJson = False,
) -> None:
    """Train one draft model whose first layers are draft models too (S2D).

    --method s2d --draft-model FOLDER leaves it after as few layers as are sure enough; it serves every target of its
    tokenizer. After Ctrl-C the same command goes on.

    branchwise train nested --target smollm2 --exits 2,4,6 --data texts.jsonl --out nested
    """
    try:
        numbers = tuple(int(number) for number in exits.split(","))
    except ValueError:
        raise UsageError(f"--exits are numbers of layers, as in 2,4,6, not {exits!r}.") from None
    if len(numbers) < 2 or numbers[0] < 1 or list(numbers) != sorted(set(numbers)):
        raise UsageError(f"--exits are two or more numbers of layers in ascending order, not {exits!r}.")
    _train(target, init, numbers[-1], numbers, lessons, out, as_json)


def _train(
    target: Target, init: str | None, layers: int, exits: Sequence[int], lessons: Lessons, out: Path, as_json: bool
) -> None:
    lessons.check()
    from branchwise.provenance import provenance, without_folder
    from branchwise.train.student.model import begin, check_out, check_output, export, spread_layers
    from branchwise.train.student.run import Run, calibrated

    check_out(out)
    from branchwise.bench.prompts import load_items
    from branchwise.train.writing import hours_to_write, prepare

    evaluation = [turn for item in load_items(lessons.avoid) for turn in item.turns] if lessons.avoid else []
    llm = target.load(draft="none", max_batch=1)
    if llm.conversion is not None:
        raise UsageError("A student learns from a target in floating point; leave out --weights.")
    info, device = llm.engine.target.info, llm.engine.target.device
    init = init or spread_layers(layers, llm.model.config.get_text_config().num_hidden_layers)
    model = begin(init, llm.model, llm.tokenizer, device)
    own = model.config.get_text_config().num_hidden_layers
    if exits and exits[-1] != own:
        raise UsageError(f"The last exit of {init} is after its {own} layers, not after {exits[-1]}.")
    check_output(llm.model, llm.name)
    check_output(model, "the student")
    folder = out.with_name(f"{out.name}.run")
    asked = {"init": without_folder(init), "count": lessons.texts, "kind": lessons.kind}
    asked |= {"avoid": [file.name for file in lessons.avoid or ()]}
    asked |= {"data": lessons.data.name if lessons.data else None}
    if lessons.data is None and (hours := hours_to_write(llm, lessons.texts)) > TOO_LONG:
        print_notice(
            f"On this machine {llm.name} would take about {hours:.0f} hours to write {lessons.texts} texts; a GPU "
            "takes minutes. Ctrl-C ends it; --texts asks for fewer, --data takes texts that are there."
        )

    def shown(entry: dict[str, Any]) -> None:
        if not as_json:
            print(line(entry), flush=True)

    try:
        with showing() as progress:
            stops = sorted(llm.stop_tokens)
            run = Run(model, llm.model, info, folder, lessons.recipe(), exits, stops, asked, progress, shown)
            options = {"seed": lessons.seed, "avoid": evaluation, "kind": lessons.kind, "data": lessons.data}
            learn, held_out = prepare(
                llm,
                folder,
                lessons.texts,
                learner="student",
                progress=progress,
                **options,  # type: ignore[arg-type]
            )
            if not as_json:
                print(title(run.exits), flush=True)
            learner = run.run(learn, held_out, lessons.every)
    except KeyboardInterrupt:
        print_notice(f"Stopped; the same command goes on with what is in {folder}.")
        raise
    before, after = learner.curve[0], max(learner.curve, key=_worth)
    note = {
        "target": without_folder(llm.name),
        "target_weights": info.weights,
        "asked": asked,
        "exits": list(learner.student.exits),
        "texts": len(learn),
        "held_out": len(held_out),
        "own_steps": learner.written,
        "before": before,
        "after": after,
        "curve": learner.curve,
        "provenance": provenance(device, vars(lessons.recipe())),
    }
    files: dict[str, Any] = {}
    if exits:
        model.config.get_text_config().exits = list(exits)
        files["exits"] = {"exits": list(exits), "samples": calibrated(learner, held_out)}
    export(model, llm.tokenizer, out, note, info.dtype, **files)
    if as_json:
        print(json.dumps({"folder": str(out), "before": before["exits"], "after": after["exits"], **_minutes(learner)}))
        return
    for first, last in zip(before["exits"], after["exits"], strict=True):
        print(
            f"{last['layers']} layers: acceptance {first['acceptance']:.3f} to {last['acceptance']:.3f}, block "
            f"efficiency {first['block']:.2f} to {last['block']:.2f} with {lessons.depth} drafted tokens."
        )
    method = "--method s2d --draft-model" if exits else "--draft-model"
    print(f"{learner.steps} steps in {learner.elapsed / 60:.1f} minutes. Use it with {method} {out}")


def _minutes(learner: Any) -> dict[str, Any]:
    return {"steps": learner.steps, "own_steps": learner.written, "minutes": learner.elapsed / 60}


def _worth(entry: dict[str, Any]) -> float:
    return float(sum(one["block"] for one in entry["exits"]))


def title(exits: Sequence[int]) -> str:
    columns = "  acceptance  tokens a pass"
    said = "".join(f"  {f'{number} layers:':>11}{columns}" for number in exits) or columns
    return f"   time   steps    loss{said}  on texts that it does not learn from"


def line(entry: dict[str, Any]) -> str:
    minutes, seconds = divmod(round(entry["seconds"]), 60)
    loss = "       " if entry["loss"] is None else f"{entry['loss']:7.4f}"
    several = len(entry["exits"]) > 1
    found = "".join(
        f"{'':{13 if several else 0}}{one['acceptance']:12.3f}{one['block']:15.2f}" for one in entry["exits"]
    )
    return f"{minutes:4d}:{seconds:02d} {entry['steps']:7d} {loss}{found}"
