"""The numbers of a benchmark side by side: a row for each contestant and category, as values, as JSON, as a table."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from branchwise.bench import metrics
from branchwise.bench.metrics import Equality, Ratio
from branchwise.bench.records import PLAIN, Record

if TYPE_CHECKING:
    from rich.table import Table

ALL = "all"
"""the name of all categories together"""
ABSENT = "–"
STYLEBENCH = "stylebench"
"""the suite whose categories are styles and tasks"""
MOST_DEPTHS = 8


@dataclass(frozen=True)
class Row:
    """All numbers of one contestant in one category, or in all. A number is None if the records do not hold it."""

    contestant: str
    kind: str
    category: str
    state: str
    """cold, warm, or both if the records are mixed"""
    items: int
    requests: int
    tokens: int
    seconds: float
    tokens_per_second: float | None
    speed_up: Ratio | None
    """the speed-up; None for the baseline"""
    mean_acceptance_length: float | None
    block_efficiency: float | None
    memory_bound_speed_up: float | None
    nodes_per_step: float | None
    target_passes_per_step: float | None
    draft_passes_per_step: float | None
    acceptance_per_depth: tuple[float, ...]
    acceptance_by_prob: tuple[float | None, ...]
    phase_shares: dict[str, float] | None
    tokens_by_source: dict[str, int]
    equality: Equality | None
    accuracy: float | None
    cut_share: float | None
    followed_share: float | None
    guessed_share: float | None
    output_length: float | None
    repeat_rate: float | None


OF_OWN_RECORDS = (
    "mean_acceptance_length", "block_efficiency", "memory_bound_speed_up", "nodes_per_step", "target_passes_per_step",
    "draft_passes_per_step", "acceptance_per_depth", "acceptance_by_prob", "tokens_by_source", "equality", "accuracy",
    "cut_share", "followed_share", "guessed_share", "output_length", "repeat_rate",
)  # fmt: skip
"""the numbers of a row that follow from the contestant's own records alone, with their functions in `metrics`"""


def by_contestant(records: Iterable[Record]) -> dict[str, list[Record]]:
    """The records of each contestant, the baseline first, the others in the order of the records."""
    found: dict[str, list[Record]] = {}
    for record in records:
        found.setdefault(record.contestant, []).append(record)
    return dict(sorted(found.items(), key=lambda pair: pair[1][0].kind != PLAIN))


def categories(records: Iterable[Record]) -> list[str]:
    return list(dict.fromkeys(record.category for record in records))


def summarise(records: Sequence[Record]) -> list[Row]:
    """For each contestant a row over all categories, then a row for each category."""
    baseline = [record for record in records if record.kind == PLAIN]
    rows = []
    for own in by_contestant(records).values():
        among = own if own[0].kind == PLAIN else [*own, *baseline]
        rows.append(_row(ALL, own, baseline, among))
        for category in categories(records):
            mine, base = ([record for record in side if record.category == category] for side in (own, baseline))
            if mine:
                rows.append(_row(category, mine, base, among))
    return rows


def models(records: Iterable[Record]) -> dict[str, list[Record]]:
    """The records of each model."""
    found: dict[str, list[Record]] = {}
    for record in records:
        found.setdefault(str(record.run.get("model")), []).append(record)
    return found


def summarise_models(records: Sequence[Record]) -> list[Row]:
    """Rows for records of several models: each model is compared with its own plain decoding, and named with each
    contestant."""
    found = models(records)
    if len(found) < 2:
        return summarise(records)
    return [
        dataclasses.replace(row, contestant=f"{model}: {row.contestant}")
        for model, own in found.items()
        for row in summarise(own)
    ]


def by_style(records: Iterable[Record]) -> list[Record]:
    """Records of styles with all tasks together: the category "cot/gsm8k" becomes "cot". Other records are left out."""
    return [
        dataclasses.replace(record, category=record.category.partition("/")[0])
        for record in records
        if record.suite == STYLEBENCH
    ]


def _row(category: str, own: list[Record], baseline: list[Record], among: Sequence[Record]) -> Row:
    states = {record.state for record in own}
    return Row(
        contestant=own[0].contestant,
        kind=own[0].kind,
        category=category,
        state=states.pop() if len(states) == 1 else "both",
        items=len({record.item for record in own}),
        requests=len(own),
        tokens=sum(record.tokens for record in own),
        seconds=sum(metrics.shares(own, among)),
        tokens_per_second=metrics.tokens_per_second(own, among),
        speed_up=None if own[0].kind == PLAIN else metrics.speed_up(own, baseline, among),
        phase_shares=metrics.phase_shares(own, among),
        **{name: getattr(metrics, name)(own) for name in OF_OWN_RECORDS},
    )


def as_json(rows: Iterable[Row]) -> list[dict[str, Any]]:
    """Rows as plain values for `json.dumps`; missing values are null."""
    plain = []
    for row in rows:
        values = dataclasses.asdict(row)
        if row.equality is not None:
            apart = [{**key._asdict(), **dataclasses.asdict(found)} for key, found in row.equality.differences]
            values["equality"] |= {"differences": apart, "max_gap": row.equality.max_gap}
        plain.append(values)
    return plain


# ---- for people --------------------------------------------------------------------------------------------------


def shown(value: float | None, pattern: str = ".2f") -> str:
    return ABSENT if value is None else format(value, pattern)


def shown_ratio(ratio: Ratio | None) -> str:
    """A ratio with its interval, such as `1.88 [1.31, 2.40]`."""
    if ratio is None:
        return ABSENT
    interval = "" if ratio.low is None else f" [{ratio.low:.2f}, {ratio.high:.2f}]"
    return f"{ratio.value:.2f}{interval}"


def _shown_depths(shares: Sequence[float]) -> str:
    """Acceptance at depth 1, 2, … in percent, such as `86 78 71`; depths beyond `MOST_DEPTHS` are in the JSON only."""
    return " ".join(f"{100 * share:.0f}" for share in shares[:MOST_DEPTHS]) or ABSENT


COLUMNS: dict[str, Callable[[Row], str]] = {
    "contestant": lambda row: row.contestant,
    "category": lambda row: row.category,
    "tokens/s": lambda row: shown(row.tokens_per_second, ".1f"),
    "speed-up": lambda row: shown_ratio(row.speed_up),
    "acceptance": lambda row: shown(row.mean_acceptance_length),
    "tokens/step": lambda row: shown(row.block_efficiency),
    "nodes/step": lambda row: shown(row.nodes_per_step, ".1f"),
    "drafts/step": lambda row: shown(row.draft_passes_per_step, ".1f"),
    "MBSU": lambda row: shown(row.memory_bound_speed_up),
    "by depth": lambda row: _shown_depths(row.acceptance_per_depth),
    "equal": lambda row: f"{row.equality.equal}/{row.equality.compared}" if row.equality else ABSENT,
    "max gap": lambda row: shown(row.equality.max_gap if row.equality else None, ".3g"),
    "accuracy": lambda row: shown(row.accuracy, ".1%"),
    "format": lambda row: shown(row.followed_share, ".0%"),
    "guessed": lambda row: shown(row.guessed_share, ".0%"),
    "cut": lambda row: shown(row.cut_share, ".0%"),
    "length": lambda row: shown(row.output_length, ".1f"),
}
LEFT = ("contestant", "category", "by depth")
"""columns of words and lists; the others hold numbers"""
DRAFTED = ("drafts/step", "MBSU", "by depth")
"""columns that are about draft models"""
EXPENDABLE = (
    "cut", "guessed", "format", "tokens/step", "length", "nodes/step", "max gap", "by depth", "MBSU", "drafts/step",
    "accuracy", "acceptance",
)  # fmt: skip
"""columns that a narrow terminal leaves out, in this order"""


def cells(rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    """Titles and texts of a table; a column without values is left out."""
    full = {title: [show(row) for row in rows] for title, show in COLUMNS.items()}
    kept = {title: texts for title, texts in full.items() if set(texts) != {ABSENT}}
    if not any(row.draft_passes_per_step for row in rows):
        for title in DRAFTED:  # no contestant runs a draft model
            kept.pop(title, None)
    if {row.category for row in rows} == {ALL}:
        kept.pop("category")
    return list(kept), [list(line) for line in zip(*kept.values(), strict=True)]


def in_order(rows: Sequence[Row], per_category: bool) -> list[Row]:
    """The rows over all categories first, then, if asked for, each category with all its contestants."""
    overall = [row for row in rows if row.category == ALL]
    names = dict.fromkeys(row.category for row in rows if row.category != ALL)
    return overall + [row for name in names for row in rows if row.category == name and per_category]


def table(rows: Sequence[Row], per_category: bool = False, width: int = 120) -> Table:
    """A table of at most `width` characters. Numbers are never cut; the least important columns are left out first."""
    from rich.table import Table
    from rich.text import Text

    wanted = in_order(rows, per_category)
    titles, lines = cells(wanted)
    columns = dict(zip(titles, zip(*lines, strict=True), strict=True))
    for title in EXPENDABLE:
        needed = sum(2 + max(map(len, (title, *texts))) for title, texts in columns.items())
        if needed - 2 > width:
            columns.pop(title, None)
    found = Table(box=None, header_style="bold", pad_edge=False)
    for title in columns:
        found.add_column(title, justify="left" if title in LEFT else "right", no_wrap=True)
    ends = [row.category != later.category for row, later in pairwise(wanted)]
    for *line, end in zip(*columns.values(), [*ends, False], strict=True):
        found.add_row(*map(Text, line), end_section=end)
    return found
