"""`branchwise tree`: the shape that a draft should have for a pair of models on this machine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Option

from branchwise.bench.prompts import own_items
from branchwise.cli import group
from branchwise.cli.options import (
    DraftModel,
    Loading,
    PromptFile,
    TextTemperature,
    at_least,
    check_out,
    drafter_spec,
    grouped,
)
from branchwise.errors import PairingError, UsageError
from branchwise.progress import Progress, showing

if TYPE_CHECKING:
    from branchwise.llm import LLM
    from branchwise.tune.sequoia import Acceptance, Shape, Shapes, Size

app = group("Find the shape that drafts should have.")

LEVELS = 4
"""depth of the drafts that are timed"""


@app.command()
@grouped
def optimise(
    *,
    loading: Loading,
    draft_model: DraftModel = None,
    draft: Annotated[str | None, Option(help="Drafter that samples in place of a model, such as disturbed:1.")] = None,
    nodes: Annotated[int, Option(help="The most nodes below the root.")] = 24,
    depth: Annotated[int, Option(help="The most levels below the root.")] = 8,
    width: Annotated[int, Option(help="The most children of a node.")] = 8,
    fill: Annotated[bool, Option("--fill", help="Use all nodes whatever they cost, and time nothing.")] = False,
    temperature: TextTemperature = 1.0,
    prompts: PromptFile = None,
    max_new_tokens: Annotated[int, Option("--max-new-tokens", "-n", help="Tokens to write for each prompt.")] = 64,
    out: Annotated[Path | None, Option(help="File for the template.", show_default="standard output")] = None,
    seed: Annotated[int, Option(help="Seed of the texts.")] = 0,
) -> None:
    """Find the best shape for a pair of models.

    The shape is written as a template for --tree template:FILE.json. The command counts on real texts how often the
    first, second, … child of a node is accepted, times passes of both models, and computes the shape and size with the
    least time per token (Sequoia, arXiv 2402.12374).

    branchwise tree optimise --model TARGET --draft-model DRAFT --out tree.json
    """
    at_least(1, nodes=nodes, depth=depth, width=width, max_new_tokens=max_new_tokens)
    source = _source(drafter_spec(draft, draft_model))
    if out is not None:
        _check_place(out)
    from branchwise.bench.prompts import read_items
    from branchwise.core.sampling import SamplingParams
    from branchwise.draft import build_drafter
    from branchwise.draft.policies.template import as_json, write_template
    from branchwise.tune.sequoia import Shapes, measure_acceptance

    SamplingParams(temperature=temperature)  # refuse a wrong temperature before a model is loaded
    items = own_items() if prompts is None else read_items(prompts)
    build_drafter(source, f"rsd-c:{width}")
    llm = loading.load(draft="none", max_batch=1)
    most = llm.engine.most.nodes - 1
    if max(nodes, width) > most:
        raise UsageError(f"A tree has at most {most} nodes below the root; ask for fewer nodes or a smaller width.")
    # Two levels where they fit: after an accepted token a draft is more often right than at the root.
    drafter = build_drafter(source, f"rsd-c:{width},{width}" if width + width**2 <= most else f"rsd-c:{width}")
    texts = [llm.encode(item.turns[0], raw=item.raw) for item in items]
    with showing() as progress:
        acceptance = measure_acceptance(
            llm,
            drafter,
            texts,
            width=width,
            temperature=temperature,
            max_new_tokens=max_new_tokens,
            seed=seed,
            progress=progress,
        )
        shapes = Shapes(acceptance.rates, nodes, depth)
        size = None if fill else _timed(llm, source, texts, shapes, progress)
    best = shapes.best(nodes, depth) if size is None else shapes.best(size.nodes, size.depth)
    note = (
        f"{llm.name} drafted for by {source} at temperature {temperature:g}: {best.worth:.2f} tokens a step expected, "
        f"from rates of acceptance {', '.join(f'{rate:.3f}' for rate in acceptance.rates)}"
    )
    if out is None:
        print(as_json(best.parents, note))
        return
    write_template(out, best.parents, note)
    _print(best, acceptance, size, out)


def _source(spec: str) -> str:
    """The spec of a drafter, which must have distributions to sample from."""
    from branchwise.draft import DRAFTERS
    from branchwise.draft.tree_drafter import TreeDrafter
    from branchwise.registry import split_spec

    name, _, _ = split_spec(spec)
    part = DRAFTERS.find(name)
    if not (isinstance(part, type) and issubclass(part, TreeDrafter)):
        raise PairingError(
            f"Drafter {name!r} draws from no distribution, so no shape suits it better than another; use --draft-model."
        )
    return spec


def _check_place(out: Path) -> None:
    from branchwise.draft.policies.template import read_template

    if out.suffix != ".json":
        raise UsageError(f"A template is a JSON file, such as {out.stem or 'tree'}.json, not {out}.")
    check_out(out, read_template, "template")


def _timed(llm: LLM, source: str, texts: Sequence[Sequence[int]], shapes: Shapes, progress: Progress) -> Size:
    """The size with the least time per token, from passes that are timed on this machine."""
    from branchwise.tune import measure, measure_drafter
    from branchwise.tune.passes import SIZES
    from branchwise.tune.sequoia import best_size

    target, most = llm.engine.target, shapes.nodes + 1
    costs = measure(
        target,
        model=llm.name,
        context=max(1, min(512, target.context - most)),
        nodes=sorted({most, *(size for size in SIZES if size < most)}),
        progress=progress,
    )
    chain = ",".join("1" * LEVELS)
    step = measure_drafter(llm, source, texts[:3], tree=f"rsd-c:{chain}", progress=progress)
    return best_size(shapes, costs.seconds, step.seconds / LEVELS)


def _print(shape: Shape, acceptance: Acceptance, size: Size | None, out: Path) -> None:
    from branchwise.core.topology import topology

    levels = [len(level) for level in topology(shape.parents).levels[1:]]
    print("accepted where the children before were rejected:")
    for turn, (rate, tried) in enumerate(zip(acceptance.rates, acceptance.tried, strict=True), start=1):
        print(f"  child {turn}: {rate:.3f} of {tried}")
    print(f"{sum(levels)} nodes, {len(levels)} deep ({', '.join(map(str, levels))}): {shape.worth:.2f} tokens a step.")
    if size is not None:
        print(f"{1e3 * size.seconds:.2f} ms a token expected, {1e3 * size.plain:.2f} without a draft.")
        if size.seconds >= size.plain:
            print("This draft makes nothing faster here; a cheaper one may.")
    print(f"Use it with --tree template:{out}")
