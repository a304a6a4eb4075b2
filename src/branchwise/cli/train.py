"""`branchwise train` and `branchwise calibrate`: what drafters learn from texts that the target writes."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from branchwise.cli.options import AsJson, Device, Dtype, Model, Threads, TrustRemoteCode, group
from branchwise.errors import ModelError, PairingError, UsageError
from branchwise.models import DEFAULT_MODEL
from branchwise.progress import showing
from branchwise.registry import split_spec

if TYPE_CHECKING:
    from branchwise.draft.tree_drafter import TreeDrafter
    from branchwise.train.stop import Fan, Lesson

train = group("Train what helps a drafter, in minutes and on a CPU.")
calibrate = group("Count which tokens a target writes, for drafters that need it.")

BATCH = 4
"""texts that are written together"""


@train.command()
def stop(
    model: Model = DEFAULT_MODEL,
    draft_model: Annotated[
        str | None, typer.Option(help="The draft model that the stop is for; short for --draft model:ID.")
    ] = None,
    draft: Annotated[str | None, typer.Option(help="The drafter that the stop is for, as a spec.")] = None,
    kind: Annotated[
        str,
        typer.Option(
            help="hard: predict from entropy and the ten largest probabilities whether both models agree; "
            "soft: predict from hidden states of the draft model how much is accepted."
        ),
    ] = "hard",
    prompts: Annotated[
        Path | None,
        typer.Option(help="File of prompts, as for `branchwise bench`.", show_default="prompts of Branchwise"),
    ] = None,
    samples: Annotated[int, typer.Option(help="Drafted nodes to train and to test on.")] = 4000,
    epochs: Annotated[int, typer.Option(help="Rounds over the samples; the best round is kept.")] = 10,
    threshold: Annotated[
        float, typer.Option(help="A tree ends where no node scores above it; --tree can name another.")
    ] = 0.4,
    temperature: Annotated[float, typer.Option("--temperature", "-t", help="Temperature of the texts.")] = 1.0,
    seed: Annotated[int, typer.Option(help="The same seed writes the same file.")] = 0,
    dtype: Dtype = "auto",
    device: Device = "auto",
    threads: Threads = None,
    trust_remote_code: TrustRemoteCode = False,
    out: Annotated[Path, typer.Option(help="The file to write.")] = Path("stop.safetensors"),
    as_json: AsJson = False,
) -> None:
    """Learn where a tree should end.

    A small network learns from texts that the target writes and a drafter drafts for. The file then ends trees:
    --tree chain:12,stop=learned:stop.safetensors

    branchwise train stop --model Qwen/Qwen2.5-1.5B-Instruct --draft-model Qwen/Qwen2.5-0.5B-Instruct
    """
    spec = _spec(draft, draft_model)
    _check(kind, samples, epochs, threshold, out)
    from branchwise.bench.prompts import load_items, own_items
    from branchwise.core.sampling import SamplingParams
    from branchwise.draft.policies.stop import Scorer, write_scorer
    from branchwise.llm import load
    from branchwise.train.stop import Fan, collect, fit

    SamplingParams(temperature=temperature)
    items = own_items() if prompts is None else load_items([prompts])
    if len(items) < 2:
        raise UsageError("One prompt cannot be learned from and tested with; give at least two.")
    fan = Fan(kind)
    drafter = _drafter(spec, fan)
    llm = load(
        model,
        draft="none",
        dtype=dtype,
        device=device,
        threads=threads,
        max_batch=BATCH,
        trust_remote_code=trust_remote_code,
    )
    with showing() as progress:
        found = collect(
            llm.engine.target,
            drafter,
            fan,
            [tuple(llm.encode(item.turns[0], raw=item.raw)) for item in items],
            samples=samples,
            temperature=temperature,
            seed=seed,
            stop_tokens=llm.stop_tokens,
            progress=progress,
        )
        network, lesson = fit(kind, found, threshold=threshold, epochs=epochs, seed=seed, progress=progress)
    notes = {"model": llm.name, "temperature": temperature, "seed": seed, **asdict(lesson)}
    write_scorer(Scorer(kind, network, threshold, spec, notes), out)
    if as_json:
        print(json.dumps({"file": str(out), "kind": kind, "draft": spec, "threshold": threshold, **asdict(lesson)}))
    else:
        _print(lesson, kind, threshold, out)


def _spec(draft: str | None, draft_model: str | None) -> str:
    if (draft is None) == (draft_model is None):
        raise UsageError("Name the drafter that the stop is for, with --draft-model ID or with --draft SPEC.")
    return draft if draft is not None else f"model:{draft_model}"


def _check(kind: str, samples: int, epochs: int, threshold: float, out: Path) -> None:
    """Refuse wrong values before anything is loaded."""
    from branchwise.draft.policies.stop import KINDS, read_scorer

    if kind not in KINDS:
        raise UsageError(f"Unknown kind {kind!r}; a stop is {' or '.join(KINDS)}.")
    for name, value in (("samples", samples), ("epochs", epochs)):
        if value < 1:
            raise UsageError(f"--{name} must be at least 1, not {value}.")
    if not 0 < threshold < 1:
        raise UsageError(f"--threshold must be between 0 and 1, not {threshold}.")
    folder = out.absolute().parent
    if out.is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK):
        raise UsageError(f"The stop cannot be written to {out}; name a file in a folder that is there and writable.")
    if out.exists():
        try:
            read_scorer(out)
        except ModelError:
            raise UsageError(f"{out} is there and is no stop; name another file, or remove it.") from None


def _drafter(spec: str, fan: Fan) -> TreeDrafter:
    from branchwise.draft import DRAFTERS
    from branchwise.draft.lookup.base import LookupDrafter
    from branchwise.draft.tree_drafter import TreeDrafter

    name, _, _ = split_spec(spec)
    part = DRAFTERS.find(name)
    if not (isinstance(part, type) and issubclass(part, TreeDrafter)) or issubclass(part, LookupDrafter):
        raise PairingError(f"Drafter {name!r} has no distributions that a stop could look at; name a draft model.")
    drafter: TreeDrafter = DRAFTERS.build(spec, tree=fan)
    return drafter


def _print(lesson: Lesson, kind: str, threshold: float, out: Path) -> None:
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
    print(f"Use it with --tree chain:12,stop=learned:{out}")


@calibrate.command()
def vocab(
    model: Model = DEFAULT_MODEL,
    prompts: Annotated[
        list[Path] | None,
        typer.Option(
            help="File of prompts like those of later use, as for `branchwise bench`; may be repeated.",
            show_default="prompts of Branchwise",
        ),
    ] = None,
    tokens: Annotated[int, typer.Option(help="How many tokens to write and count.")] = 20_000,
    temperature: Annotated[float, typer.Option("--temperature", "-t", help="Temperature of the texts.")] = 1.0,
    seed: Annotated[int, typer.Option(help="The same seed gives the same counts.")] = 0,
    dtype: Dtype = "auto",
    device: Device = "auto",
    threads: Threads = None,
    as_json: AsJson = False,
) -> None:
    """Count the tokens that a target writes.

    A draft head can then be trimmed to the frequent tokens. The table is kept in the cache beside the model;
    --draft model:ID,trim=8192 reads it. Ctrl-C keeps what was counted.

    branchwise calibrate vocab --model smollm2 --prompts questions.jsonl
    """
    if tokens < 1:
        raise UsageError(f"--tokens must be at least 1, not {tokens}.")
    from branchwise.bench.prompts import load_items, own_items
    from branchwise.core.sampling import SamplingParams
    from branchwise.draft.model.vocabulary import save_counts
    from branchwise.llm import load
    from branchwise.train import vocab as counting

    SamplingParams(temperature=temperature)
    items = own_items() if not prompts else load_items(prompts)
    llm = load(model, draft="ngram", dtype=dtype, device=device, threads=threads, max_batch=counting.BATCH)
    with showing() as progress:
        counts = counting.count_tokens(llm, items, tokens=tokens, temperature=temperature, seed=seed, progress=progress)
    counted = int(counts.sum())
    if not counted:
        raise UsageError("Nothing was counted, so nothing was kept.")
    about = {"model": llm.name, "tokens": str(counted), "temperature": str(temperature), "seed": str(seed)}
    path = save_counts(llm.engine.target.info, counts, about)
    seen = int((counts > 0).sum())
    shares = counting.coverage(counts)
    if as_json:
        print(json.dumps({"file": str(path), "tokens": counted, "distinct": seen, "coverage": shares}))
        return
    print(f"{counted:,} tokens counted, {seen:,} different ones of {len(counts):,}.")
    print("; ".join(f"the {size:,} most frequent are {share:.1%} of the text" for size, share in shares.items()) + ".")
    print(f"Kept in {path}. Use it with --draft model:ID,trim=N")
