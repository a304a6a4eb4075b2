"""Reduces a mixture for the prompts of a task, and writes the result as a folder.

UNCURL (Sarkar et al., arXiv 2409.01483) reduces the experts of every layer offline, for a task. It finds that quality
holds while no more than some share of the experts is pruned, which depends on their number, and falls beyond that. Its
thresholds cannot be carried over. So the threshold is searched here, on a held-out part of the task: the fewest experts
with which the whole model still accepts a given share.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from branchwise.backends.transformers.experts import active_experts
from branchwise.backends.transformers.runner import bytes_read
from branchwise.bench.prompts import Item
from branchwise.errors import UsageError
from branchwise.llm import LLM
from branchwise.models.show import quiet
from branchwise.progress import Progress, silent
from branchwise.train.experts.reduce import WAYS, check_mixture, check_sizes, grouped, reduced, told
from branchwise.train.experts.usage import Text, Usage, acceptance, usage_of
from branchwise.train.folder import whole_folder

HELD_OUT = 4
"""one of this many prompts is kept to measure with"""
BATCH = 8
"""answers that the model writes together"""


@dataclass(frozen=True)
class Trial:
    """A way to reduce a mixture, and its result."""

    keep: int
    way: str
    acceptance: float
    """the acceptance of the reduced model's drafts by the whole model, on held-out answers"""


@dataclass(frozen=True, eq=False)
class Reduction:
    model: Any
    experts: int
    """experts of a layer before the reduction"""
    chosen: Trial
    trials: list[Trial]
    layers: list[dict[str, Any]]
    cost: float
    """bytes that a pass over one row reads, as a share of those of the whole model"""


def answers(
    llm: LLM, items: Sequence[Item], tokens: int, temperature: float, seed: int, progress: Progress = silent
) -> list[Text]:
    """The model's answers to prompts, which a drafter will have to predict."""
    found: list[Text] = []
    done = 0
    for raw in (False, True):
        asked = [item.turns[0] for item in items if item.raw is raw]
        for start in range(0, len(asked), BATCH):
            batch = asked[start : start + BATCH]
            written = llm.generate(batch, raw=raw, max_new_tokens=tokens, temperature=temperature, seed=seed + start)
            for prompt, answer in zip((llm.encode(text, raw=raw) for text in batch), written, strict=True):
                if answer.token_ids:
                    found.append(Text([*prompt, *answer.token_ids], len(prompt)))
            done += len(batch)
            progress("writing answers to the prompts of the task", done, len(items))
    return found


def split(texts: Sequence[Text]) -> tuple[list[Text], list[Text]]:
    """Texts to count, and texts to measure with."""
    if len(texts) < 2:
        raise UsageError("One answer cannot be both counted and measured with; give the task at least two prompts.")
    every = min(HELD_OUT, len(texts))
    measured = [text for number, text in enumerate(texts) if number % every == every - 1]
    return [text for number, text in enumerate(texts) if number % every != every - 1], measured


def reduce_experts(
    model: Any,
    name: str,
    counted: Sequence[Text],
    measured: Sequence[Text],
    *,
    keep: int | None,
    way: str | None = None,
    active: int | None = None,
    least: float = 0.9,
    progress: Progress = silent,
) -> Reduction:
    """The best reduction to `keep` experts, or to the fewest with which the model accepts at least `least`. It is made
    by one `way`, or by the best of all."""
    count = check_mixture(model, name)
    check_sizes(count, active_experts(model.config) or count, keep or count, active)

    def counting(done: int) -> None:
        progress("counting which experts answer", done, len(counted))

    usages = usage_of(model, counted, counting)
    ways = (way,) if way else WAYS
    trials: list[Trial] = []
    best: tuple[Trial, Any] | None = None
    for size in [keep] if keep else _sizes(count, active or 1):
        tried = [*_tried(model, usages, measured, size, ways if size < count else ("drop",), active)]
        trials += [trial for trial, _ in tried]
        found = max(tried, key=lambda pair: pair[0].acceptance)
        progress("trying fewer experts", len(trials), 0)
        if best is not None and found[0].acceptance < least:
            break
        best = found
    assert best is not None
    chosen, made = best
    groups = [grouped(usage, chosen.keep, chosen.way) for usage in usages]
    cost = bytes_read(made) / bytes_read(model)
    layers = [told(usage, group, chosen.way) for usage, group in zip(usages, groups, strict=True)]
    return Reduction(made, count, chosen, trials, layers, cost)


def _sizes(count: int, least: int) -> list[int]:
    """The number of experts, then half as many, and so on down to `least`."""
    sizes = [count]
    while sizes[-1] // 2 >= max(least, 1):
        sizes.append(sizes[-1] // 2)
    return sizes


def _tried(
    model: Any, usages: Sequence[Usage], texts: Sequence[Text], keep: int, ways: Sequence[str], active: int | None
) -> Iterator[tuple[Trial, Any]]:
    for way in ways:
        made = reduced(model, usages, [grouped(usage, keep, way) for usage in usages], way, active)
        yield Trial(keep, way, acceptance(model, made, texts)), made


def save_reduction(found: Reduction, tokenizer: Any, out: Path, about: dict[str, Any]) -> None:
    """Write the reduced model as a folder that transformers loads, with its tokenizer and its provenance."""
    size = sum(weight.nbytes for weight in found.model.parameters())
    noted = {
        **about,
        "experts": found.experts,
        "kept": found.chosen.keep,
        "way": found.chosen.way,
        "acceptance": round(found.chosen.acceptance, 4),
        "layers": found.layers,
    }
    with whole_folder(out, noted, size) as folder, quiet():
        found.model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
