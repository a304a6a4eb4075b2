"""What a drafter adds to a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from branchwise.engine import Engine, Request
from branchwise.engine.stats import Stats
from branchwise.errors import UsageError
from branchwise.progress import Progress, silent
from branchwise.tune.passes import quartiles

if TYPE_CHECKING:
    from branchwise.draft.base import Drafter
    from branchwise.llm import LLM


@dataclass(frozen=True)
class DraftCost:
    """What a drafter adds to a step: its draft phase on short texts; half of the prompts lie between `low` and
    `high`."""

    drafter: str
    seconds: float
    """seconds per step"""
    low: float
    high: float
    drafted: float
    """nodes below the root per step, over all texts"""
    steps: int


def measure_drafter(
    llm: LLM,
    drafter: str | Drafter,
    prompts_ids: Sequence[Sequence[int]],
    *,
    tree: str | None = None,
    verify: str = "match",
    max_new_tokens: int = 48,
    progress: Progress = silent,
) -> DraftCost:
    """Run a drafter on real text, one prompt after the other, and take the draft phase of each step.

    The phase is what a step pays before the target runs: the draft, and copying the tree to the device. The first step
    of a text is not counted, because a draft model reads the prompt in it. Nothing is cached: the measurement takes
    seconds, and a drafter may be the user's own code, or may have learned meanwhile.
    """
    if not prompts_ids:
        raise UsageError("There is no prompt to draft for; give at least one.")
    engine, ends = llm.with_drafter(drafter, tree, verify).engine, llm.stop_tokens
    write(engine, Request(tuple(prompts_ids[0]), max_new_tokens=4, stop_tokens=ends))  # to warm up
    texts: list[Stats] = []
    for number, ids in enumerate(prompts_ids, start=1):
        texts.append(write(engine, Request(tuple(ids), max_new_tokens=max_new_tokens, stop_tokens=ends)))
        progress(f"drafting with {engine.drafter.name}", number, len(prompts_ids))
    texts = [stats for stats in texts if stats.steps]
    if not texts:
        raise UsageError("Every text ended with its first step, which does not count; ask for longer answers.")
    steps = sum(stats.steps for stats in texts)
    middle, low, high = quartiles([stats.seconds["draft"] / stats.steps for stats in texts])
    return DraftCost(
        drafter=drafter if isinstance(drafter, str) else drafter.name,
        seconds=middle,
        low=low,
        high=high,
        drafted=sum(stats.drafted_tokens for stats in texts) / steps,
        steps=steps,
    )


def write(engine: Engine, request: Request) -> Stats:
    """Write a text, and return the statistics of all steps but the first."""
    generation = engine.submit(request)
    try:
        engine.step()
        generation.stats = Stats()
        while not generation.finished:
            engine.step()
    finally:
        engine.cancel(generation)
    generation.check()
    return generation.stats
