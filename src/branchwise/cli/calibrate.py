"""`branchwise calibrate vocab`: which tokens a target writes, counted on text of its own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from branchwise.cli.options import AsJson, Device, Dtype, Model, Threads
from branchwise.errors import UsageError
from branchwise.models import DEFAULT_MODEL
from branchwise.progress import Progress, showing, silent

if TYPE_CHECKING:
    from torch import Tensor

    from branchwise.bench.prompts import Item
    from branchwise.llm import LLM

app = typer.Typer(
    name="calibrate",
    help="Count what a target writes, for drafters that use it.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)

BATCH = 8
ANSWER = 256
"""tokens of one answer"""


@app.callback()
def _group() -> None:
    """A group of commands, also while there is only one."""


@app.command()
def vocab(
    model: Model = DEFAULT_MODEL,
    prompts: Annotated[
        list[Path] | None,
        typer.Option(
            help="File of prompts like those of later use, as for `branchwise bench`; may be repeated.",
            show_default="our own",
        ),
    ] = None,
    tokens: Annotated[int, typer.Option(help="How many tokens to write and count.")] = 20_000,
    temperature: Annotated[float, typer.Option("--temperature", "-t", help="Of the texts that are written.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Same seed, same counts.")] = 0,
    dtype: Dtype = "auto",
    device: Device = "auto",
    threads: Threads = None,
    as_json: AsJson = False,
) -> None:
    """Count the tokens that a target writes, so that a draft head can be trimmed to the frequent ones.

    The table lies in the cache beside the model, and  --draft model:ID,trim=8192  reads it. Ctrl-C keeps what was
    counted.

    branchwise calibrate vocab --model smollm2 --prompts questions.jsonl
    """
    if tokens < 1:
        raise UsageError(f"--tokens must be at least 1, not {tokens}.")
    from branchwise.bench.prompts import load_items, own_items
    from branchwise.core.sampling import SamplingParams
    from branchwise.draft.model.trim import save_counts
    from branchwise.llm import load

    SamplingParams(temperature=temperature)
    items = own_items() if not prompts else load_items(prompts)
    llm = load(model, draft="ngram", dtype=dtype, device=device, threads=threads, max_batch=BATCH)
    with showing() as progress:
        counts = count_tokens(llm, items, tokens=tokens, temperature=temperature, seed=seed, progress=progress)
    counted = int(counts.sum())
    if not counted:
        raise UsageError("Nothing was counted, so nothing was kept.")
    about = {"model": llm.name, "tokens": str(counted), "temperature": str(temperature), "seed": str(seed)}
    path = save_counts(llm.engine.target.info, counts, about)
    seen = int((counts > 0).sum())
    shares = coverage(counts)
    if as_json:
        print(json.dumps({"file": str(path), "tokens": counted, "distinct": seen, "coverage": shares}))
        return
    print(f"{counted:,} tokens counted, {seen:,} different ones of {len(counts):,}.")
    print("; ".join(f"the {size:,} most frequent are {share:.1%} of the text" for size, share in shares.items()) + ".")
    print(f"Kept in {path}. Use it with --draft model:ID,trim=N")


def count_tokens(
    llm: LLM, items: list[Item], *, tokens: int, temperature: float, seed: int, progress: Progress = silent
) -> Tensor:
    """(vocabulary,) int64: how often the target wrote each token, in at least so many tokens unless interrupted.

    The prompts are asked again and again, each round with seeds of its own.
    """
    import torch

    counts = torch.zeros(llm.engine.target.vocabulary, dtype=torch.long)
    asked = 0
    try:
        while int(counts.sum()) < tokens:
            batch: list[Any] = [items[(asked + n) % len(items)].turns[0] for n in range(BATCH)]
            options: dict[str, Any] = {"max_new_tokens": min(ANSWER, tokens), "temperature": temperature}
            for answer in llm.generate(batch, seed=seed + asked, **options):
                counts += torch.bincount(torch.tensor(answer.token_ids), minlength=len(counts))
            asked += BATCH
            progress("counting what the target writes", min(int(counts.sum()), tokens), tokens)
    except KeyboardInterrupt:
        pass  # fewer tokens make a coarser table, not a wrong one
    return counts


def coverage(counts: Tensor) -> dict[int, float]:
    """The share of the text that the most frequent tokens make up, for some sizes of a trimmed head."""
    ranked = counts.sort(descending=True).values.double()
    sizes = [size for size in (1024, 4096, 8192, 16384, 32768) if size < len(counts)] or [len(counts)]
    return {size: float(ranked[:size].sum() / ranked.sum()) for size in sizes}
