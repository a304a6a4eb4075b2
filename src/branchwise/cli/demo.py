"""Plain and speculative decoding side by side on a real model.

Equality is a promise in float32 and is proven there. Speed is measured in bfloat16, where a pass over a tree rounds
otherwise than a pass over one token, so that near-ties can fall the other way; the first such place is shown.
"""

from __future__ import annotations

from statistics import median

import torch
from rich.console import Console
from rich.table import Table

from branchwise.cli import write
from branchwise.errors import BranchwiseError
from branchwise.llm import LLM, Completion, load

PROMPT = """Repeat this note word for word.

The committee meets on Thursday at nine in the small hall behind the library. Please bring the printed plans of the \
new footbridge, the letter from the water board, and the list of families who offered to help with the planting along \
the river. After the meeting on Thursday we walk to the river together, look at the place where the old bridge stood, \
and decide where the new footbridge should begin. If it rains on Thursday, the committee meets in the school."""

ROUNDS = 3


def run(console: Console, *, model: str, max_new_tokens: int, threads: int | None) -> None:
    console.print(PROMPT, style="dim")
    _prove_equality(console, model, max_new_tokens, threads)
    _measure_speed(console, model, max_new_tokens, threads)


def _prove_equality(console: Console, model: str, max_new_tokens: int, threads: int | None) -> None:
    llm = load(model, draft="none", dtype="float32", threads=threads, max_batch=1)
    console.print("\n[bold]float32, plain decoding[/bold]")
    plain = write(console, llm, PROMPT, {"max_new_tokens": max_new_tokens}, show_draft=False)
    console.print("\n[bold]float32, speculative[/bold] (green: drafted and accepted)")
    drafting = llm.with_drafter("ngram")
    speculative = write(console, drafting, PROMPT, {"max_new_tokens": max_new_tokens}, show_draft=True)
    if plain.token_ids != speculative.token_ids:
        raise BranchwiseError("The tokens differ in float32. This is a bug in Branchwise; please report it.")
    console.print(f"\nfloat32: all {len(plain.token_ids)} tokens are equal.", style="green")


def _measure_speed(console: Console, model: str, max_new_tokens: int, threads: int | None) -> None:
    plain_llm = load(model, draft="none", dtype="bfloat16", threads=threads, max_batch=1)
    methods = {"plain": plain_llm, "ngram": plain_llm.with_drafter("ngram")}
    runs: dict[str, list[Completion]] = {name: [] for name in methods}
    with console.status("bfloat16: measuring, plain and speculative in turn"):
        for llm in methods.values():
            llm.generate(PROMPT, max_new_tokens=8)  # first passes are slower: libraries choose their kernels
        for _ in range(ROUNDS):
            for name, llm in methods.items():
                runs[name].append(llm.generate(PROMPT, max_new_tokens=max_new_tokens))
    speed = {name: median(run.stats.tokens_per_second for run in done) for name, done in runs.items()}
    table = Table(title=f"bfloat16, {plain_llm.engine.target.device}, median of {ROUNDS}", title_justify="left")
    for column in ("drafter", "tokens/s", "ratio", "steps", "mean acceptance length"):
        table.add_column(column, justify="left" if column == "drafter" else "right")
    for name, done in runs.items():
        stats = done[0].stats
        ratio = f"{speed[name] / speed['plain']:.2f}"
        table.add_row(name, f"{speed[name]:.1f}", ratio, str(stats.steps), f"{stats.mean_acceptance_length:.2f}")
    console.print()
    console.print(table)
    console.print(_first_difference(plain_llm, runs["plain"][0], runs["ngram"][0]))


def _first_difference(llm: LLM, plain: Completion, speculative: Completion) -> str:
    """Where two outputs part, and how close the two tokens were for the model."""
    pairs = list(zip(plain.token_ids, speculative.token_ids, strict=False))
    place = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
    if place is None:
        return f"bfloat16: all {len(pairs)} tokens are equal."
    tokens = llm.encode(PROMPT) + plain.token_ids[:place]
    with torch.inference_mode():
        logits = llm.model(input_ids=torch.tensor([tokens], device=llm.model.device)).logits[0, -1].float()
    a, b = pairs[place]
    return (
        f"bfloat16: first difference at token {place + 1}, {llm.decode([a])!r} against {llm.decode([b])!r}, "
        f"with a logit gap of {abs(logits[a] - logits[b]).item():.3f}: a near-tie that rounding decides."
    )
