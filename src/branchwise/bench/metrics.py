"""Metrics: every number of a benchmark is defined here once.

A function takes the records of one contestant and skips those without the needed values; it returns None if it skips
all. `seconds` of a record is the time of its whole group, so it counts once per group. If `records` are only a part of
their groups, such as the records of one category, `among` holds all records, and a request gets an equal share of the
time of its group.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import takewhile, zip_longest
from typing import Any

import numpy as np
from scipy.special import ndtr, stdtrit  # type: ignore[import-untyped]

from branchwise.bench.records import PEER, Difference, Key, Record
from branchwise.engine.stats import PHASES

OTHER = "other"
"""the time that belongs to none of the phases"""
DRAWS = 4000
"""how many draws the bootstrap makes"""
FEWEST = 3
"""the fewest items for an interval: with fewer, a bootstrap cannot leave the range of its items"""


# ---- time --------------------------------------------------------------------------------------------------------

Group = tuple[str, str, int, int, str]


def group_of(record: Record) -> Group:
    """The identity of requests that ran together, with their state, since cold and warm runs may be read together."""
    return record.contestant, record.state, record.round, record.turn, record.group


def group_sizes(records: Iterable[Record]) -> dict[Group, int]:
    """How many items each group has. An item counts once, even if files of several runs are read together."""
    return Counter(group for group, _ in {(group_of(record), record.item) for record in records})


def shares(records: Sequence[Record], among: Sequence[Record] | None = None) -> list[float]:
    """The seconds of each request: an equal share of the time of its group."""
    sizes = group_sizes(records if among is None else among)
    return [record.seconds / sizes[group_of(record)] for record in records]


def tokens_per_second(records: Sequence[Record], among: Sequence[Record] | None = None) -> float | None:
    """Emitted tokens over the time of all groups, prefill included."""
    return _over(sum(record.tokens for record in records), sum(shares(records, among)))


def phase_shares(records: Sequence[Record], among: Sequence[Record] | None = None) -> dict[str, float] | None:
    """Shares of the time by phase, which sum to 1, with `other` for the rest.

    In our engine the requests of a group are prefilled one after another and then step together: a prefill belongs to
    one request, and the request that ran longest has the whole time of the other phases. A peer does all at once.
    """
    among = records if among is None else among
    sizes = group_sizes(among)
    longest: dict[tuple[Group, float], dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for record in among:
        seen = longest[group_of(record), record.seconds]
        for name, spent in record.phases.items():
            seen[name] = max(spent, seen[name])
    timed = [record for record in records if record.phases]
    sums: dict[str, float] = defaultdict(float)
    for record in timed:
        for name, spent in longest[group_of(record), record.seconds].items():
            alone = name == "prefill" and record.kind != PEER
            sums[name] += record.phases.get(name, 0.0) if alone else spent / sizes[group_of(record)]
    if not any(sums.values()):
        return None
    sums[OTHER] = max(0.0, sum(shares(timed, among)) - sum(sums.values()))
    whole = sum(sums.values())
    order = ("prefill", *PHASES, *(name for name in sums if name not in ("prefill", *PHASES, OTHER)), OTHER)
    return {name: sums[name] / whole for name in order if name in sums}


# ---- speed-up ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ratio:
    """How many times faster than the baseline a contestant is, with a 95 % interval."""

    value: float
    low: float | None
    high: float | None
    units: int
    """the size of the sample: items, or batches of items"""


def speed_up(
    records: Sequence[Record],
    baseline: Sequence[Record],
    among: Sequence[Record] | None = None,
    draws: int = DRAWS,
    seed: int = 0,
) -> Ratio | None:
    """The baseline's time per token over the contestant's, on the requests that both have done.

    The interval is a bootstrap over items, because prompts differ more than rounds do. Items of one batch share their
    time and are drawn together. Its quantiles are widened for small samples (Hesterberg, What Teachers Should Know
    About the Bootstrap, 2015: the expanded percentile interval). With skewed speed-ups, intervals over 8 items cover 92
    %, over 30 items 94 %, as the tests simulate.
    """
    among = [*records, *baseline] if among is None else among
    both = {_asked(record) for record in records} & {_asked(record) for record in baseline}
    sides = [[record for record in side if _asked(record) in both] for side in (baseline, records)]
    unit = _units([*sides[0], *sides[1]])
    sums = np.zeros((len(set(unit.values())), 4))  # columns: seconds and tokens of the baseline, then of the contestant
    for column, side in zip((0, 2), sides, strict=True):
        for record, spent in zip(side, shares(side, among), strict=True):
            sums[unit[record.item], column : column + 2] += spent, record.tokens
    return _bootstrap(sums, draws, seed)


def paired_ratio(
    ours: Sequence[tuple[float, float]],
    baseline: Sequence[tuple[float, float]],
    scale: float = 1.0,
    draws: int = DRAWS,
    seed: int = 0,
) -> Ratio | None:
    """The quotient of two sums, divided by another such quotient on the same prompts, with the interval of `speed_up`.
    An example is tokens over passes. `scale` is a factor that does not depend on the prompt."""
    sums = np.array([[*mine, *theirs] for mine, theirs in zip(ours, baseline, strict=True)], dtype=np.float64)
    found = _bootstrap(sums, draws, seed)
    if found is None:
        return None
    bounds = [None if bound is None else scale * bound for bound in (found.low, found.high)]
    return Ratio(scale * found.value, bounds[0], bounds[1], found.units)


def _bootstrap(sums: np.ndarray[Any, np.dtype[np.float64]], draws: int, seed: int) -> Ratio | None:
    """The ratio of the sums of these rows, and its interval over rows."""
    whole = sums.sum(axis=0)
    if not whole.all():
        return None
    value, count = float(_ratio(whole)), len(sums)
    if count < FEWEST:
        return Ratio(value, None, None, count)
    weights = np.random.default_rng(seed).multinomial(count, np.full(count, 1 / count), size=draws)
    drawn = weights @ sums
    drawn = drawn[drawn.all(axis=1)]
    tail = float(ndtr(np.sqrt(count / (count - 1)) * stdtrit(count - 1, 0.025)))
    low, high = np.quantile(_ratio(drawn), (tail, 1 - tail))
    return Ratio(value, float(low), float(high), count)


def _ratio(sums: np.ndarray[Any, np.dtype[np.float64]]) -> Any:
    return (sums[..., 0] / sums[..., 1]) / (sums[..., 2] / sums[..., 3])


def _asked(record: Record) -> tuple[str, int, int, str]:
    """The parts of a request that must be equal for two requests to be compared."""
    return record.item, record.turn, record.round, record.state


def _units(records: Iterable[Record]) -> dict[str, int]:
    """A number for each item. Items that ever ran in one group have the same number."""
    leader: dict[str, str] = {}

    def lead(item: str) -> str:
        while leader.setdefault(item, item) != item:
            item = leader[item]
        return item

    first: dict[Group, str] = {}
    for record in records:
        leader[lead(record.item)] = lead(first.setdefault(group_of(record), record.item))
    numbers: dict[str, int] = {}
    return {item: numbers.setdefault(lead(item), len(numbers)) for item in leader}


# ---- speculation -------------------------------------------------------------------------------------------------


def _over(above: float, below: float) -> float | None:
    return above / below if below else None


def _per_step(records: Sequence[Record], count: Callable[[Record], int | None]) -> float | None:
    """The sum of a count, divided by the sum of steps, over records that have both."""
    known = [(counted, record.steps) for record in records if (counted := count(record)) is not None and record.steps]
    return _over(sum(counted for counted, _ in known), sum(steps for _, steps in known))


def mean_acceptance_length(records: Sequence[Record]) -> float | None:
    """1 + accepted drafts per step, as in vLLM. A last step in which the text ends counts as whole."""
    accepted = _per_step(records, lambda record: record.accepted)
    return None if accepted is None else 1 + accepted


def block_efficiency(records: Sequence[Record]) -> float | None:
    """Emitted tokens per step."""
    return _per_step(records, lambda record: record.tokens)


def nodes_per_step(records: Sequence[Record]) -> float | None:
    """How many nodes a pass of the target scores for one text: the drafted nodes and the root."""
    drafted = _per_step(records, lambda record: record.drafted)
    return None if drafted is None else 1 + drafted


def target_passes_per_step(records: Sequence[Record]) -> float | None:
    return _passes_per_step(records, lambda record: record.target_passes)


def draft_passes_per_step(records: Sequence[Record]) -> float | None:
    return _passes_per_step(records, lambda record: record.draft_passes)


def _passes_per_step(records: Sequence[Record], count: Callable[[Record], int | None]) -> float | None:
    """Passes per step. In our engine a pass serves all texts of a group, so a group has the passes and steps of its
    longest text.

    A peer that reports passes writes the texts of a group one after another.
    """
    longest: dict[tuple[Group, float], tuple[int, int]] = {}
    for record in records:
        passes = count(record)
        if passes is not None and record.steps:
            most = longest.get(key := (group_of(record), record.seconds), (0, 0))
            join = sum if record.kind == PEER else max
            longest[key] = join((passes, most[0])), join((record.steps, most[1]))
    return _over(sum(passes for passes, _ in longest.values()), sum(steps for _, steps in longest.values()))


def memory_bound_speed_up(records: Sequence[Record]) -> float | None:
    """MBSU, the speed-up if time were bytes read: block efficiency / (target cost + draft cost · draft passes per
    step). The target cost is the cost of a pass over a tree in passes over one token: 1, unless a mixture of experts
    reads more experts for more nodes."""
    efficiency, passes = block_efficiency(records), draft_passes_per_step(records)
    cost = next((record.draft_cost for record in records if record.draft_cost is not None), None)
    if efficiency is None or passes is None or (passes and cost is None):
        return None
    costs = [(record.target_cost, record.steps) for record in records if record.target_cost and record.steps]
    whole = sum(target * steps for target, steps in costs) / sum(steps for _, steps in costs) if costs else 1.0
    return efficiency / (whole + (cost or 0.0) * passes)


def acceptance_by_prob(records: Sequence[Record]) -> tuple[float | None, ...]:
    """For each of the equal bins of draft probability from 0 to 1, the share of the first draws below accepted nodes
    that was accepted; None for a bin without draws."""
    tried, accepted = (sum_per_depth(records, name) for name in ("tried_by_prob", "accepted_by_prob"))
    return tuple(_over(taken, reached) for taken, reached in zip(accepted, tried, strict=True))


def acceptance_per_depth(records: Sequence[Record]) -> tuple[float, ...]:
    """For each depth, the share of the steps with a node there that accepted one; index d - 1 is depth d."""
    drafted, accepted = (sum_per_depth(records, name) for name in ("drafted_per_depth", "accepted_per_depth"))
    pairs = takewhile(lambda pair: pair[0], zip_longest(drafted, accepted, fillvalue=0))
    return tuple(taken / reached for reached, taken in pairs)


def sum_per_depth(records: Sequence[Record], field: str) -> list[int]:
    """Counts per depth, summed over records."""
    rows = [getattr(record, field) for record in records]
    return [sum(row[depth] for row in rows if depth < len(row)) for depth in range(max(map(len, rows), default=0))]


def tokens_by_source(records: Sequence[Record]) -> dict[str, int]:
    """Emitted tokens by drafter, the largest count first."""
    counts: Counter[str] = Counter()
    for record in records:
        counts.update(record.by_source)
    return dict(sorted(counts.items(), key=lambda pair: (-pair[1], pair[0])))


# ---- fidelity and content ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Equality:
    """How many answers are the baseline's, token for token."""

    compared: int
    equal: int
    differences: tuple[tuple[Key, Difference], ...]
    """the first difference of each answer that is not the baseline's"""

    @property
    def max_gap(self) -> float | None:
        """The widest gap between the target's logits at a first difference; near 0 if all differences are near-ties."""
        return max((found.gap for _, found in self.differences if found.gap is not None), default=None)


def equality(records: Sequence[Record]) -> Equality | None:
    compared = [record for record in records if record.equal is not None]
    if not compared:
        return None
    apart = tuple((record.key, record.difference) for record in compared if record.difference is not None)
    return Equality(len(compared), sum(record.equal is True for record in compared), apart)


def accuracy(records: Sequence[Record]) -> float | None:
    """The share of right answers among those that could be checked; for programs this is pass@1."""
    checked = [record.correct for record in records if record.correct is not None]
    return _over(sum(checked), len(checked))


def followed_share(records: Sequence[Record]) -> float | None:
    """The share of answers that have the form that was asked for."""
    known = [record.followed for record in records if record.followed is not None]
    return _over(sum(known), len(known))


def guessed_share(records: Sequence[Record]) -> float | None:
    """The share of answers that are given without any reasoning before them."""
    known = [record.guessed for record in records if record.guessed is not None]
    return _over(sum(known), len(known))


def cut_share(records: Sequence[Record]) -> float | None:
    """The share of the checkable answers that the limit of tokens cut off, so that they had no time to be right."""
    checked = [record for record in records if record.correct is not None]
    return _over(sum(record.finish_reason == "length" for record in checked), len(checked))


def output_length(records: Sequence[Record]) -> float | None:
    """The mean number of tokens of an answer."""
    return _over(sum(record.tokens for record in records), len(records))


def repeat_rate(records: Sequence[Record], size: int = 4) -> float | None:
    """The share of an answer's 4-grams that occurred earlier in it; high if the model loops."""
    seen = new = 0
    for record in records:
        runs = max(0, len(record.ids) - size + 1)
        distinct = len(set(zip(*(record.ids[start:] for start in range(size)), strict=False)))
        seen, new = seen + runs - distinct, new + distinct
    return _over(seen, seen + new)
