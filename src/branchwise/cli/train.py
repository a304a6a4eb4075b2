"""`branchwise train`, `calibrate` and `tree`: networks, counts and shapes for drafters, from texts of the target."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from branchwise.cli import group
from branchwise.cli.drafters.data import data
from branchwise.cli.drafters.experts import prune_experts
from branchwise.cli.drafters.merge import merge
from branchwise.cli.drafters.student import nested, student
from branchwise.cli.heads import export, head
from branchwise.cli.options import AsJson, DraftModel, Loading, at_least, check_out, drafter_spec, grouped
from branchwise.errors import PairingError, UsageError
from branchwise.progress import Progress, showing
from branchwise.registry import split_spec

if TYPE_CHECKING:
    from branchwise.bench.prompts import Item
    from branchwise.llm import LLM
    from branchwise.train.stop import Lesson
    from branchwise.tune.sequoia import Acceptance, Shape, Shapes, Size

train = group("Train what helps a drafter, in minutes and on a CPU.")
calibrate = group("Count which tokens a target writes, for drafters that need it.")
tree = group("Find the shape that drafts should have.")
for command in (data, head, student, nested, prune_experts, merge, export):
    train.command()(command)

BATCH = 4
"""texts that are written together"""
LEVELS = 4
"""the depth of the drafts that are timed"""


@dataclass(frozen=True)
class Texts:
    """The texts that the target writes to learn from."""

    prompts: Annotated[
        list[Path] | None, Option(help="As for `branchwise bench`; repeatable.", show_default="prompts of Branchwise")
    ] = None
    temperature: Annotated[float, Option("--temperature", "-t", help="Temperature of the texts.")] = 1.0
    seed: Annotated[int, Option(help="The same seed finds the same.")] = 0

    @property
    def sampling(self) -> dict[str, Any]:
        return {"temperature": self.temperature, "seed": self.seed}

    def items(self) -> list[Item]:
        """The prompts to begin with; wrong values are refused."""
        from branchwise.bench.prompts import load_items, own_items
        from branchwise.core.sampling import SamplingParams

        SamplingParams(temperature=self.temperature)
        return load_items(self.prompts) if self.prompts else own_items()


@train.command()
@grouped
def stop(
    *,
    loading: Loading,
    draft_model: Annotated[str | None, Option(help="Model that the stop is for; short for --draft model:ID.")] = None,
    draft: Annotated[str | None, Option(help="The drafter that the stop is for, as a spec.")] = None,
    kind: Annotated[
        str, Option(help="hard: predict agreement from entropy and probabilities; soft: acceptance from hidden states.")
    ] = "hard",
    texts: Texts,
    samples: Annotated[int, Option(help="Drafted nodes to train and to test on.")] = 4000,
    epochs: Annotated[int, Option(help="Rounds over the samples; the best round is kept.")] = 10,
    threshold: Annotated[float, Option(help="A tree ends where no node scores above it.")] = 0.4,
    out: Annotated[Path | None, Option(help="The file to write; by default one that is kept for both models.")] = None,
    as_json: AsJson = False,
) -> None:
    """Learn where a tree should end.

    A small network learns from texts that the target writes and a drafter drafts for. It then ends trees of the same
    two models, --tree chain:12,stop=learned and --method improved-mcsd, or, with --out, those that name its file:
    --tree chain:12,stop=learned:stop.safetensors

    branchwise train stop --model Qwen/Qwen2.5-1.5B-Instruct --draft-model Qwen/Qwen2.5-0.5B-Instruct
    """
    spec = drafter_spec(draft, draft_model)
    from branchwise.draft.policies.stop import KINDS, Scorer, file_for, read_scorer, write_scorer
    from branchwise.methods import MODEL

    if kind not in KINDS:
        raise UsageError(f"Unknown kind {kind!r}; a stop is {' or '.join(KINDS)}.")
    at_least(1, samples=samples, epochs=epochs)
    if not 0 < threshold < 1:
        raise UsageError(f"--threshold must be between 0 and 1, not {threshold}.")
    if out is not None:
        check_out(out, read_scorer, "stop")
    from branchwise.draft import DRAFTERS
    from branchwise.train.stop import Fan, collect, fit

    items = texts.items()
    if len(items) < 2:
        raise UsageError("One prompt cannot be learned from and tested with; give at least two.")
    fan = Fan(kind)
    _check_drafter(spec, "has no distributions that a stop could look at; name a draft model.", lookup=False)
    if out is None and split_spec(spec)[0] != MODEL:
        raise UsageError(f"Only the stop of a draft model is kept for it; name a file for that of {spec} with --out.")
    drafter = DRAFTERS.build(spec, tree=fan)
    llm = loading.load(draft="none", max_batch=BATCH)
    target, prompts = llm.engine.target, [tuple(llm.encode(item.turns[0], raw=item.raw)) for item in items]
    with showing() as progress:
        found = collect(
            target,
            drafter,
            fan,
            prompts,
            samples=samples,
            **texts.sampling,
            stop_tokens=llm.stop_tokens,
            progress=progress,
        )
        network, lesson = fit(kind, found, threshold=threshold, epochs=epochs, seed=texts.seed, progress=progress)
    notes = {"model": llm.name, **texts.sampling, **asdict(lesson)}
    file = out or file_for(target.info, drafter.weights.fingerprint)
    write_scorer(Scorer(kind, network, threshold, spec, notes), file)
    if as_json:
        print(json.dumps({"file": str(file), "kind": kind, "draft": spec, "threshold": threshold, **asdict(lesson)}))
    else:
        _print_lesson(lesson, kind, threshold, "" if out is None else f":{out}")


def _check_drafter(spec: str, refusal: str, *, lookup: bool) -> None:
    """Refuse a drafter without distributions to draw from; with `lookup`, lookup drafters are accepted."""
    from branchwise.draft import DRAFTERS
    from branchwise.draft.lookup.base import LookupDrafter
    from branchwise.draft.tree_drafter import TreeDrafter

    name, _, _ = split_spec(spec)
    part = DRAFTERS.find(name)
    draws = isinstance(part, type) and issubclass(part, TreeDrafter) and (lookup or not issubclass(part, LookupDrafter))
    if not draws:
        raise PairingError(f"Drafter {name!r} {refusal}")


def _print_lesson(lesson: Lesson, kind: str, threshold: float, named: str) -> None:
    meaning = "agreement on the best token" if kind == "hard" else "acceptance of a drawn token"
    print(
        f"{lesson.samples} nodes to learn from, {lesson.held_out} of other texts to test with. "
        f"Loss {lesson.loss:.3f} there after epoch {lesson.epoch}, against {lesson.blind_loss:.3f} for a blind guess."
    )
    if lesson.label_stopped is not None and lesson.label_kept is not None:
        print(
            f"{lesson.stopped:.0%} of the nodes score at most {threshold}. Mean {meaning}: {lesson.label_stopped:.2f} "
            f"at those, {lesson.label_kept:.2f} at the others."
        )
    else:
        print(f"{'All' if lesson.stopped else 'None'} of the nodes score at most {threshold}; try another threshold.")
    if lesson.loss >= lesson.blind_loss:
        print("It learned nothing that helps; try more samples, or the other kind.")
    print(f"Use it with --tree chain:12,stop=learned{named}")


@calibrate.command()
@grouped
def vocab(
    *,
    loading: Loading,
    texts: Texts,
    tokens: Annotated[int, Option(help="How many tokens to write and count.")] = 20_000,
    data: Annotated[list[Path] | None, Option(help="Count in what `branchwise train data` wrote; repeatable.")] = None,
    files: Annotated[
        list[Path] | None, Option("--texts", help="Count in files or folders of the task's texts; repeatable.")
    ] = None,
    background: Annotated[
        list[Path] | None, Option(help="Files or folders that rank what the target did not write; repeatable.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Count the tokens that a target writes.

    A draft head can then be trimmed to the frequent tokens. The table is kept in the cache beside the model;
    --draft model:ID,trim=8192 and head:FILE,trim=8192 read it. What the target itself writes about its task is counted
    best; without --data or --texts it writes now. Ctrl-C keeps what was counted.

    branchwise calibrate vocab --model smollm2 --prompts questions.jsonl
    """
    at_least(1, tokens=tokens)
    from branchwise.draft.model.vocabulary import save_counts
    from branchwise.train import vocab as counting

    given = bool(data or files)
    if given and texts.prompts:
        raise UsageError(
            "--prompts are asked where nothing is given to count in; leave them out, or --data and --texts."
        )
    items = texts.items()
    llm = loading.load(draft="ngram", max_batch=counting.BATCH)
    found = counting.count_texts(llm, data or [], files or [], background or [])
    counts = found.answers
    if not given:
        with showing() as progress:
            counts = counting.count_tokens(llm, items, tokens=tokens, **texts.sampling, progress=progress)
    counted = int(counts.sum())
    if not counted:
        raise UsageError("Nothing was counted, so nothing was kept.")
    named = [path.name for path in (*(data or ()), *(files or ()))]
    about = {"model": llm.name, "tokens": counted, **({"texts": named} if given else texts.sampling)}
    notes = {name: str(value) for name, value in about.items()}
    path = save_counts(llm.engine.target.info, counts, notes, found.others)
    seen = int((counts > 0).sum())
    held_out = found.held_out if int(found.held_out.sum()) else None
    shares = counting.coverage(counts, held_out)
    if as_json:
        known = {"tokens": counted, "distinct": seen, "held_out": held_out is not None, "coverage": shares}
        print(json.dumps({"file": str(path), **known}))
        return
    print(f"{counted:,} tokens counted, {seen:,} different ones of {len(counts):,}.")
    of = "the text" if held_out is None else "texts that were held out"
    print("; ".join(f"the {size:,} most frequent are {share:.1%} of {of}" for size, share in shares.items()) + ".")
    print(f"Kept in {path}. Use it with --draft model:ID,trim=N or head:FILE,trim=N")


@tree.command()
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
    texts: Texts,
    max_new_tokens: Annotated[int, Option("--max-new-tokens", "-n", help="Tokens to write for each prompt.")] = 64,
    out: Annotated[Path | None, Option(help="File for the template.", show_default="standard output")] = None,
) -> None:
    """Find the best shape for a pair of models.

    The shape is written as a template for --tree template:FILE.json. The command counts on real texts how often the
    first, second, … child of a node is accepted, times passes of both models, and computes the shape and size with the
    least time per token (Sequoia, arXiv 2402.12374).

    branchwise tree optimise --model TARGET --draft-model DRAFT --out tree.json
    """
    at_least(1, nodes=nodes, depth=depth, width=width, max_new_tokens=max_new_tokens)
    source = drafter_spec(draft, draft_model)
    from branchwise.draft import build_drafter
    from branchwise.draft.policies.template import as_json, read_template, write_template
    from branchwise.tune.sequoia import Shapes, measure_acceptance

    _check_drafter(source, "draws from no distribution, so no shape suits it best; use --draft-model.", lookup=True)
    if out is not None:
        if out.suffix != ".json":
            raise UsageError(f"A template is a JSON file, such as {out.stem or 'tree'}.json, not {out}.")
        check_out(out, read_template, "template")
    items = texts.items()
    build_drafter(source, f"rsd-c:{width}")
    llm = loading.load(draft="none", max_batch=1)
    most = llm.engine.most.nodes - 1
    if max(nodes, width) > most:
        raise UsageError(f"A tree has at most {most} nodes below the root; ask for fewer nodes or a smaller width.")
    # Two levels if they fit, because a draft is right more often after an accepted token than at the root.
    drafter = build_drafter(source, f"rsd-c:{width},{width}" if width + width**2 <= most else f"rsd-c:{width}")
    prompts = [llm.encode(item.turns[0], raw=item.raw) for item in items]
    with showing() as progress:
        acceptance = measure_acceptance(
            llm, drafter, prompts, width=width, max_new_tokens=max_new_tokens, **texts.sampling, progress=progress
        )
        shapes = Shapes(acceptance.rates, nodes, depth)
        size = None if fill else _timed(llm, source, prompts, shapes, progress)
    best = shapes.best(nodes, depth) if size is None else shapes.best(size.nodes, size.depth)
    note = (
        f"{llm.name} drafted for by {source} at temperature {texts.temperature:g}: {best.worth:.2f} tokens a step "
        f"expected, from rates of acceptance {', '.join(f'{rate:.3f}' for rate in acceptance.rates)}"
    )
    if out is None:
        print(as_json(best.parents, note))
        return
    write_template(out, best.parents, note)
    _print_shape(best, acceptance, size, out)


def _timed(llm: LLM, source: str, prompts: Sequence[Sequence[int]], shapes: Shapes, progress: Progress) -> Size:
    """The size with the least time per token, from passes timed on this machine."""
    from branchwise.tune import measure, measure_drafter
    from branchwise.tune.passes import SIZES
    from branchwise.tune.sequoia import best_size

    target, most = llm.engine.target, shapes.nodes + 1
    sizes = sorted({most, *(size for size in SIZES if size < most)})
    context = max(1, min(512, target.context - most))
    costs = measure(target, model=llm.name, context=context, nodes=sizes, progress=progress)
    chain = ",".join("1" * LEVELS)
    step = measure_drafter(llm, source, prompts[:3], tree=f"rsd-c:{chain}", progress=progress)
    return best_size(shapes, costs.seconds, step.seconds / LEVELS)


def _print_shape(shape: Shape, acceptance: Acceptance, size: Size | None, out: Path) -> None:
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
