"""Verdicts: a ratio with its interval over prompts, and the one rule that turns it into a verdict.

    holds               the whole interval lies above the bound, and reaches the number of the paper, if it gives one
    holds in part       it lies above the bound but below that number; or some comparisons of a claim hold, not all
    does not hold here  the whole interval lies below the bound, in every comparison
    undecided           the interval holds the bound, or fewer than 8 prompts were compared: more of them would tell;
                        or it is about speed, and the machine had other work
    not measured        a part is missing, a quick run leaves it out, or the run did not get there

The bound is 1 where a paper claims a gain; a claim that nothing is lost has one a little below.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from branchwise.bench.claims.rows import Key, Rows, Sample
from branchwise.bench.claims.table import ACCEPTANCE, MBSU, SPEED, Claim, Point
from branchwise.bench.metrics import Ratio, paired_ratio
from branchwise.methods import PLAIN

HOLDS, IN_PART, NOT_HERE = "holds", "holds in part", "does not hold here"
UNDECIDED, NOT_MEASURED = "undecided", "not measured"
FEWEST = 8
"""the fewest prompts that decide; intervals over fewer are too narrow (tests/test_bench_metrics.py simulates it)"""
STEADY = 1.5
"""on a machine without other work, plain decoding takes at most this many times as long for a token of one prompt as
for a token of another"""
LEFT_OUT = "left out of a quick run"
VERDICTS = (HOLDS, IN_PART, NOT_HERE, UNDECIDED, NOT_MEASURED)


@dataclass(frozen=True)
class Found:
    """One comparison, measured."""

    point: Point
    verdict: str
    ratio: Ratio | None = None
    ours: float | None = None
    """the measured quantity of the method: tokens a pass, tokens a second, …; `baseline` is that of the baseline"""
    baseline: float | None = None
    specs: tuple[str, str] = ("", "")
    missing: str = ""
    """why the comparison was not measured"""


@dataclass(frozen=True)
class Judged:
    claim: Claim
    verdict: str
    found: tuple[Found, ...]


def verdict_of(low: float | None, high: float | None, bound: float, claimed: float | None) -> str:
    """The verdict on one comparison."""
    if low is None or high is None:
        return UNDECIDED
    if low > bound:
        return HOLDS if claimed is None or high >= claimed else IN_PART
    return NOT_HERE if high < bound else UNDECIDED


def combined(verdicts: Sequence[str]) -> str:
    """The verdict on a claim of several comparisons; comparisons that are not measured do not count."""
    known = [verdict for verdict in verdicts if verdict != NOT_MEASURED]
    if not known:
        return NOT_MEASURED
    if len(set(known)) == 1:
        return known[0]
    return IN_PART if set(known) & {HOLDS, IN_PART} else UNDECIDED


def judge(claim: Claim, rows: Rows) -> Judged:
    found = tuple(compare(point, rows) for point in claim.points)
    return Judged(claim, combined([one.verdict for one in found if not one.point.beside]), found)


def compare(point: Point, rows: Rows) -> Found:
    specs = rows.stand.specs(point)
    if isinstance(specs, str):
        return Found(point, NOT_MEASURED, missing=specs)
    keys = [Key(spec, point.temperature, point.alone) for spec in specs]
    ours, baseline = (
        {item: one for item, one in rows.samples(key).items() if point.category in ("", one.category)} for key in keys
    )
    items = [item for item in ours if item in baseline]
    if not items:
        missing = LEFT_OUT if rows.quick and not point.quick else "the run has not come to it yet"
        return Found(point, NOT_MEASURED, specs=specs, missing=missing)
    sides = [[side[item] for item in items] for side in (ours, baseline)]
    factors = [_factor(point.measure, key, rows) for key in keys]
    amounts = [[_amount(point.measure, one) for one in side] for side in sides]
    ratio = paired_ratio(amounts[0], amounts[1], factors[0] / factors[1])
    if ratio is None:
        return Found(point, NOT_MEASURED, specs=specs, missing="nothing was written that could be compared")
    values = [
        factor * sum(above for above, _ in side) / sum(below for _, below in side)
        for factor, side in zip(factors, amounts, strict=True)
    ]
    enough = ratio.units >= FEWEST and not (point.measure == SPEED and disturbed(rows))
    verdict = verdict_of(ratio.low, ratio.high, point.bound, point.claimed) if enough else UNDECIDED
    return Found(point, verdict, ratio, values[0], values[1], specs)


def disturbed(rows: Rows) -> str:
    """A sentence about other work of the machine while texts were timed; empty if nothing shows any.

    A moment of other work slows down the contestant that is writing just then, and a few short texts do not average
    that out.
    """
    raced = [one for row in rows.rows if row.key.alone and row.key.method == PLAIN.name for one in row.samples]
    paces = sorted((one.seconds or 0.0) / one.steps for one in raced if one.steps)
    if not paces or paces[-1] <= STEADY * paces[0]:
        return ""
    least, most = (f"{1000 * pace:.0f}" for pace in (paces[0], paces[-1]))
    return f"plain decoding took {least} to {most} ms a token: the machine had other work, and speeds decide nothing"


def _amount(measure: str, sample: Sample) -> tuple[float, float]:
    """Numerator and denominator of a measure for one sample; both are summed over prompts."""
    if measure == SPEED:
        return sample.tokens, sample.seconds or 0.0
    if measure == ACCEPTANCE:
        return sample.accepted, sample.drafted
    return sample.tokens, sample.steps


def _factor(measure: str, key: Key, rows: Rows) -> float:
    """The factor of a measure that does not depend on the prompt."""
    return 1 / rows.cost(key) if measure == MBSU else 1.0
