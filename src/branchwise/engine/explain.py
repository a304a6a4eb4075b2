"""Why a request was as fast as it was: where its time went, what nodes cost and earned, and what would help."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any, NamedTuple

from branchwise.backends.base import TargetInfo
from branchwise.control.choice import WORTH
from branchwise.control.costs import cost_models, plain_seconds_of
from branchwise.cuda.inputs import BATCHES, fitting
from branchwise.engine.stats import PHASES, Stats

FEW = 3
"""how many plain steps of a text suffice to say what a plain step takes"""
MOSTLY = 0.5
"""the share of the time that a prompt must take for the advice that no drafter helps much"""
DEAR_DRAFT = 0.25
"""the time of drafting, in plain steps, above which it is called dear"""
DEAR_PASS = 1.5
"""the time of a pass over a tree, in plain steps, above which it is called dear"""
ROWS = (2, 4, 8, 16)
"""the sizes of passes whose costs are shown"""
FEW_KEPT = 1.3
"""the tokens a step below which too few drafted nodes are kept"""


class Size(NamedTuple):
    """All steps with the same number of nodes."""

    nodes: int
    """drafted nodes below the root"""
    steps: int
    tokens: float
    """mean tokens that a step emitted"""
    seconds: float
    """mean time of a step"""


class Source(NamedTuple):
    name: str
    drafted: int
    kept: int


@dataclass(frozen=True)
class Explanation:
    """An explanation that prints as a short text; `as_dict` is the same for programs."""

    method: str
    tokens: int
    steps: int
    seconds: dict[str, float]
    """the time of the whole request by purpose; the parts add up to its wall clock"""
    sizes: tuple[Size, ...]
    sources: tuple[Source, ...]
    """the sources, most kept tokens first"""
    plain: float | None
    """seconds that a step of plain decoding takes here, if known"""
    speedup: float | None
    """the speed of the answer relative to plain decoding, the prompt left out"""
    advice: tuple[str, ...]
    """what would help, most helpful first"""
    weights: str = ""
    """the bits of the target's weights (`TargetInfo.quantised`)"""
    rested: int = 0
    """steps in which the guard let nothing be drafted"""
    drafting_speed: float | None = None
    """the speed of drafted steps relative to plain decoding, by which the guard decided"""
    reasons: tuple[str, ...] = ()
    """what drafter and guard chose, and by which numbers"""

    @property
    def wall(self) -> float:
        return sum(self.seconds.values())

    @property
    def stepping(self) -> float:
        """Seconds without the prompt."""
        return self.wall - self.seconds["prefill"]

    @property
    def headline(self) -> str:
        found = self.speedup
        if not any(size.nodes for size in self.sizes):
            return "Nothing was drafted: the answer is plain decoding."
        if found is None:
            return "Whether speculation paid is not known: nobody timed plain decoding here."
        if found > WORTH:
            return f"Speculation paid: {found:.2f} times plain decoding."
        if found >= 1 / WORTH:
            return f"Speculation made no difference: {found:.2f} times plain decoding."
        return f"Speculation did not pay: {found:.2f} times plain decoding."

    @property
    def aside(self) -> str | None:
        """Why the drafter stood aside in some steps, if it did."""
        if not self.rested or self.drafting_speed is None or self.drafting_speed >= 1:
            return None
        return (
            f"In {self.rested} of {self.steps} steps nothing was drafted, because steps with a draft reached "
            f"{self.drafting_speed:.2f} times the speed of plain decoding; --no-guard drafts all the same."
        )

    def __str__(self) -> str:
        lines = [self.headline, *([self.aside] if self.aside else []), ""]
        target = f" of a target in {self.weights}" if self.weights else ""
        lines.append(f"{self.tokens} tokens{target} in {self.steps} steps, {1e3 * self.wall:.0f} ms in all:")
        lines += [
            f"  {name:8}{1e3 * spent:9.1f} ms  {spent / self.wall:5.1%}  {MEANING[name]}"
            for name, spent in self.seconds.items()
            if spent
        ]
        if self.sizes:
            lines += ["", "By nodes that were drafted:", "  nodes  steps  ms a step  tokens a step  tokens/s"]
            lines += [
                f"  {size.nodes:5}  {size.steps:5}  {1e3 * size.seconds:9.1f}  {size.tokens:13.2f}  "
                + (f"{size.tokens / size.seconds:8.1f}" if size.seconds else "       -")
                for size in self.sizes
            ]
        if self.sources:
            lines += ["", "By who drafted them:"]
            lines += [
                f"  {source.name:16}{source.kept} of {source.drafted} nodes kept, {source.kept / source.drafted:.1%}"
                for source in self.sources
            ]
        if self.reasons:
            lines += ["", "How that was decided:", *(f"  - {sentence}" for sentence in self.reasons)]
        if self.advice:
            lines += ["", "What would help:", *(f"  - {sentence}" for sentence in self.advice)]
        return "\n".join(lines)

    def as_dict(self) -> dict[str, Any]:
        return {
            "headline": self.headline,
            "speedup": self.speedup,
            "method": self.method,
            "weights": self.weights,
            "tokens": self.tokens,
            "steps": self.steps,
            "seconds": self.seconds,
            "sizes": [size._asdict() for size in self.sizes],
            "sources": [source._asdict() for source in self.sources],
            "plain_step_seconds": self.plain,
            "rested": self.rested,
            "drafting_speed": self.drafting_speed,
            "reasons": list(self.reasons),
            "advice": list(self.advice),
        }


MEANING = {
    "prefill": "writing the prompt into the cache",
    "draft": "drafting",
    "score": "passes of the model",
    "verify": "deciding what is kept",
    "commit": "keeping it, and learning from it",
    "other": "between steps: text, requests, the interpreter",
}


def explain(
    stats: Stats, target: TargetInfo, method: str, plain: Stats | None = None, reasons: Sequence[str] = ()
) -> Explanation:
    """Explain a request. `plain` holds the statistics of the same request without a drafter, if that was run. Otherwise
    the time of a plain step is that of the request's own plain steps, or of plain steps timed on this target before.
    `reasons` are the drafter's."""
    seconds = {"prefill": stats.prefill_seconds, **{phase: stats.seconds.get(phase, 0.0) for phase in PHASES}}
    # Wall clocks are compared with wall clocks and steps with steps: the time that the reader of a stream takes between
    # two steps would slow down plain decoding as well.
    spent, a_plain_step = sum(stats.seconds.values()), _plain_step(stats, target)
    if plain is not None and plain.emitted_tokens and plain.wall_seconds > plain.prefill_seconds:
        spent = stats.wall_seconds - stats.prefill_seconds
        a_plain_step = (plain.wall_seconds - plain.prefill_seconds) / plain.emitted_tokens
    seconds["other"] = max(0.0, stats.wall_seconds - sum(seconds.values()))
    sources = [
        Source(name, drafted, stats.accepted_by_source.get(name, 0))
        for name, drafted in stats.drafted_by_source.items()
    ]
    found = Explanation(
        method,
        stats.emitted_tokens,
        stats.steps,
        seconds,
        _sizes(stats),
        tuple(sorted(sources, key=lambda source: -source.kept)),
        a_plain_step,
        None if a_plain_step is None or spent <= 0 else stats.emitted_tokens * a_plain_step / spent,
        (),
        target.quantised,
        stats.rested,
        stats.drafting_speed,
    )
    decided = (*reasons, *_costs(stats, target))
    return replace(found, reasons=decided, advice=(*_late(stats), *_advice(found, target)))


def _costs(stats: Stats, target: TargetInfo) -> list[str]:
    """What passes cost here, if known."""
    model = cost_models(target).get(fitting(stats.each[-1].batch, BATCHES)) if stats.each else None
    if model is None or not model.knows_plain or not any(step.nodes for step in stats.each):
        return []
    found = [f"{cost:.2f}" for cost in model.costs(ROWS)]
    return [f"Passes over {_listed(map(str, ROWS))} rows of a text cost {_listed(found)} plain ones here."]


def _late(stats: Stats) -> list[str]:
    if not stats.prepared:
        return []
    kinds = _listed(f"{kind} in {steps} of them" for kind, steps in sorted(stats.prepared.items()))
    line = f"Of {stats.steps} steps some were not ready ({kinds}): warm-up makes ready what max_batch allows."
    return [line]


def _listed(words: Iterable[str]) -> str:
    *most, last = words
    return f"{', '.join(most)} and {last}" if most else last


def _sizes(stats: Stats) -> tuple[Size, ...]:
    groups: dict[int, list[tuple[int, float]]] = {}
    for nodes, tokens, seconds, _ in stats.each:
        groups.setdefault(nodes, []).append((tokens, seconds))
    return tuple(
        Size(nodes, len(steps), sum(tokens for tokens, _ in steps) / len(steps), sum(s for _, s in steps) / len(steps))
        for nodes, steps in sorted(groups.items())
    )


def _plain_step(stats: Stats, target: TargetInfo) -> float | None:
    """The time of a step of plain decoding in a batch of this size; None if the size changed during the request."""
    batches = {step.batch for step in stats.each}
    if len(batches) != 1:
        return None
    own = [step.seconds for step in stats.each if not step.nodes and step.seconds]
    return median(own) if len(own) >= FEW else plain_seconds_of(target, *batches)


def _advice(found: Explanation, target: TargetInfo) -> list[str]:
    """What would help, ordered by the seconds that each line is about, most first."""
    spent, steps, plain = found.seconds, max(found.steps, 1), found.plain
    worth: list[tuple[float, str]] = []
    if spent["prefill"] > MOSTLY * found.wall:
        share = f"{spent['prefill'] / found.wall:.0%}"
        worth.append((spent["prefill"], f"{share} of the time went into the prompt, which no drafter makes shorter."))
    if target.device.type == "cuda" and not (target.execution.compile or target.execution.layers):
        worth.append((spent["score"], "Layers run uncompiled: load with --compile."))
    if plain is not None and any(size.nodes for size in found.sizes):
        drafting, scoring = spent["draft"] / steps / plain, spent["score"] / steps / plain
        if drafting > DEAR_DRAFT:
            line = f"Drafting takes {drafting:.2f} plain steps of a step: try a cheaper drafter, or shorter drafts."
            worth.append((spent["draft"], line))
        if scoring > DEAR_PASS:
            line = (
                f"A pass over these trees costs {scoring:.2f} plain steps: try smaller trees (--tree). "
                "branchwise tune shows what a pass over n nodes costs."
            )
            worth.append((spent["score"] - steps * plain, line))
        if found.tokens < FEW_KEPT * steps and (found.speedup or 0) < 1:
            line = (
                f"A step gives {found.tokens / steps:.2f} tokens, so hardly anything that is drafted is kept: other "
                "drafters may know these texts better, such as a smaller model of the same family (--draft-model) or a "
                "trained head (branchwise train head); branchwise bench --methods compares them."
            )
            worth.append((found.stepping, line))
    return [line for _, line in sorted(worth, key=lambda one: -one[0])]
