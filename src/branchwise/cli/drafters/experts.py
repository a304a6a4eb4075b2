"""`branchwise train prune-experts`: from a mixture of experts to a smaller one that drafts for it."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from branchwise.cli.options import AsJson, Loading, at_least, grouped
from branchwise.errors import UsageError
from branchwise.progress import showing
from branchwise.registry import check_known

if TYPE_CHECKING:
    from branchwise.train.experts.run import Reduction

AUTO = "auto"


@grouped
def prune_experts(
    *,
    mixture: Annotated[str, Argument(metavar="MOE", help="The mixture, named as for --model.")],
    task: Annotated[Path, Option(help="Prompts of the task, as for `branchwise bench`; one in four is measured with.")],
    keep: Annotated[
        str, Option(help="Experts of every layer to keep, or auto: the fewest that --least allows.")
    ] = AUTO,
    way: Annotated[str, Option(help="drop, cluster or merge; auto measures all three and takes the best.")] = AUTO,
    active: Annotated[
        int | None, Option(help="Experts that a token is sent to.", show_default="as many as before")
    ] = None,
    least: Annotated[float, Option(help="Acceptance that --keep auto may go down to.")] = 0.9,
    loading: Loading,
    max_new_tokens: Annotated[int, Option("--max-new-tokens", "-n", help="Tokens of an answer.")] = 128,
    temperature: Annotated[float, Option("--temperature", "-t", help="Temperature of the answers.")] = 1.0,
    seed: Annotated[int, Option(help="The same seed writes the same answers.")] = 0,
    out: Annotated[Path, Option(help="The folder to write; it must not exist.")] = Path("reduced"),
    as_json: AsJson = False,
) -> None:
    """Reduce the experts of a mixture for a task.

    The mixture answers the prompts of the task; which experts answered is counted, and the others are dropped, or
    merged with those that are like them. The folder then drafts for the whole mixture, or for others of its tokenizer:
    --draft-model reduced

    branchwise train prune-experts mistralai/Mixtral-8x7B-Instruct-v0.1 --task questions.jsonl --keep 4 --out reduced
    """
    from branchwise.bench.prompts import load_items
    from branchwise.core.sampling import SamplingParams
    from branchwise.train.folder import check_folder

    at_least(1, max_new_tokens=max_new_tokens, active=active)
    SamplingParams(temperature=temperature)
    if keep != AUTO and not (keep.isdecimal() and int(keep) > 0):
        raise UsageError(f"--keep is a number of experts, or auto, not {keep!r}.")
    if not 0 < least <= 1:
        raise UsageError(f"--least must be above 0 and at most 1, not {least}.")
    check_known("way", way, (AUTO, "drop", "cluster", "merge"))
    check_folder(out)
    items = load_items([task])
    llm = replace(loading, model=mixture).load(draft="none", max_batch=8)
    from branchwise.backends.transformers.experts import active_experts
    from branchwise.provenance import without_folder
    from branchwise.train.experts.reduce import check_mixture, check_sizes
    from branchwise.train.experts.run import answers, reduce_experts, save_reduction, split

    count = check_mixture(llm.model, mixture)
    wanted = None if keep == AUTO else int(keep)
    check_sizes(count, active_experts(llm.model.config) or count, wanted or count, active)
    with showing() as progress:
        counted, measured = split(answers(llm, items, max_new_tokens, temperature, seed, progress))
        found = reduce_experts(
            llm.model,
            mixture,
            counted,
            measured,
            keep=wanted,
            way=None if way == AUTO else way,
            active=active,
            least=least,
            progress=progress,
        )
    about = {"source": without_folder(mixture), "made": "prune-experts", "task": task.name, "prompts": len(items)}
    save_reduction(found, llm.tokenizer, out, about | {"temperature": temperature, "seed": seed})
    if as_json:
        trials = [asdict(trial) for trial in found.trials]
        print(
            json.dumps(
                {
                    "folder": str(out),
                    "experts": count,
                    **asdict(found.chosen),
                    "cost": round(found.cost, 4),
                    "trials": trials,
                    "layers": found.layers,
                }
            )
        )
    else:
        _print_reduction(found, out)


def _print_reduction(found: Reduction, out: Path) -> None:
    for layer in found.layers:
        line = f"{layer['layer']}: {layer['used']} of {found.experts} experts answer; kept {_listed(layer['kept'])}"
        for expert, others in layer["stand for"].items():
            line += f"; {expert} stands for {_listed(others)}"
        print(f"{line}; {layer['share']:.1%} of the answers' weight is theirs")
    for trial in found.trials:
        print(f"{trial.keep:4d} experts by {trial.way:7s}: {trial.acceptance:.3f} of its draws accepted")
    chosen = found.chosen
    print(
        f"{chosen.keep} of {found.experts} experts by {chosen.way}: a pass over one token reads {found.cost:.0%} of "
        f"what the whole model reads, and {chosen.acceptance:.3f} of what it draws is accepted on held-out answers."
    )
    print(f"Use it with --draft-model {out}")


def _listed(experts: list[int]) -> str:
    return ", ".join(map(str, experts))
