"""The figures of a report: what each shows, a sentence with its main numbers, and its pixels, light and dark.

A figure is 3.8 inches wide, about as wide as a phone, so that its text stays readable. The colours of Okabe and Ito can
be distinguished by colour-blind people; the shapes of marks repeat the distinction.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from branchwise.bench.metrics import OTHER, Ratio
from branchwise.bench.records import PLAIN, STATES, Record
from branchwise.bench.summary import ALL, Row, shown_ratio, summarise
from branchwise.plots import Theme, paint_ratios, png, readable_on

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MARKS = "os^DvPX"
ACROSS = 34
"""how many characters fit below a figure; longer labels are turned"""
TARGET = "target"
"""the source of the target's own tokens"""


@dataclass(frozen=True)
class Figure:
    name: str
    """the name of the file, without its ending"""
    title: str
    finding: str
    """what the picture shows; used as its alternative text"""
    reading: str
    """how to read it"""
    height: float
    """the height of the axes, in inches"""
    paint: Callable[[Axes, Theme], None]
    from_records: bool = True


@dataclass(frozen=True)
class Missing:
    """A figure that cannot be drawn, and why."""

    title: str
    why: str


def figures(
    records: Sequence[Record], rows: Sequence[Row], costs: Sequence[Mapping[str, Any]] | None
) -> list[Figure | Missing]:
    found = [
        speed_up_by_category(rows),
        where_it_pays(records),
        acceptance_by_depth(rows),
        tokens_against_nodes(rows),
        time_by_phase(rows),
        tokens_by_source(rows),
        cold_against_warm(records),
        accuracy_by_category(rows),
    ]
    return found if costs is None else [*found, scoring_cost(costs)]


def draw(figure: Figure, theme: Theme) -> bytes:
    return png(figure.height, figure.paint, theme)


def speed_up_by_category(rows: Sequence[Row]) -> Figure | Missing:
    title = "Speed-up by category"
    values = {(row.contestant, row.category): row.speed_up for row in rows if row.speed_up is not None}
    if not values:
        return Missing(title, "No contestant has requests that the baseline has done too.")
    return Figure(
        "speed-up",
        title,
        _sentence(
            f"{name} is {shown_ratio(ratio)} times as fast as plain decoding{_range(name, values)}"
            for (name, category), ratio in values.items()
            if category == ALL
        ),
        "Time per token of plain decoding over that of the contestant, with 95 % intervals over prompts. "
        "Right of the line is faster.",
        *_dots(values, _names(rows), "times as fast as plain decoding", reference=1.0),
    )


def where_it_pays(records: Sequence[Record]) -> Figure | Missing:
    title = "Where it pays"
    by_batch: dict[int | None, list[Record]] = {}
    for record in records:
        by_batch.setdefault((record.run.get("arguments") or {}).get("batch"), []).append(record)
    ratios = {
        (row.contestant + (f", batch {batch}" if len(by_batch) > 1 else ""), row.category): row.speed_up.value
        for batch, own in by_batch.items()
        for row in summarise(own)
        if row.speed_up is not None
    }
    names, kinds = (list(dict.fromkeys(key[side] for key in ratios)) for side in (0, 1))
    if len(kinds) < 3:  # one category alone is the same as all
        return Missing(title, "No contestant and the baseline have done the same requests in two categories.")
    table = [[ratios.get((name, kind)) for name in names] for kind in kinds]
    if len(names) > len(kinds):  # the longer side runs down the page
        table, names, kinds = [list(line) for line in zip(*table, strict=True)], kinds, names
    below = [*map(_short, names)]
    turned = len(below) * max(map(len, below)) > ACROSS
    found = sorted((ratio, f"for {name} in {kind}") for (name, kind), ratio in ratios.items() if kind != ALL)
    return Figure(
        "where-it-pays",
        title,
        f"{sum(ratio > 1 for ratio, _ in found)} of {len(found)} are faster than plain decoding, from "
        f"{found[0][0]:.2f} {found[0][1]} to {found[-1][0]:.2f} {found[-1][1]}.",
        "Times as fast as plain decoding, by category. One hue is faster, the other is slower, neither is as fast.",
        0.24 * len(kinds) + 0.2 + 0.055 * max(map(len, below)) * turned,
        partial(paint_ratios, rows=[*map(_short, kinds)], columns=below, ratios=table, turned=turned),
    )


def cold_against_warm(records: Sequence[Record]) -> Figure | Missing:
    title = "Cold against warm"
    if len(states := {record.state for record in records}) == 1:
        return Missing(title, f"All records are {states.pop()}; run the benchmark in the other state too to compare.")
    values = {
        (row.contestant, state): row.speed_up
        for state in STATES
        for row in summarise([record for record in records if record.state == state])
        if row.category == ALL and row.speed_up
    }
    names = [name for name, state in values if state == "cold" and (name, "warm") in values]
    if not names:
        return Missing(title, "No contestant has a speed-up in both states.")
    both = {key: ratio for key, ratio in values.items() if key[0] in names}
    return Figure(
        "cold-warm",
        title,
        _sentence(
            f"{name} goes from {shown_ratio(values[name, 'cold'])} cold to {shown_ratio(values[name, 'warm'])} warm"
            for name in names
        ),
        "Times as fast as plain decoding. Cold: the drafter is fresh for every prompt. Warm: it keeps what it saw.",
        *_dots(both, _names(records), "times as fast as plain decoding", reference=1.0),
    )


def acceptance_by_depth(rows: Sequence[Row]) -> Figure | Missing:
    title = "Acceptance by depth"
    known = [row for row in rows if row.category == ALL and row.acceptance_per_depth]
    if not known:
        return Missing(title, "No contestant says at which depth its drafts were accepted.")

    def paint(axes: Axes, theme: Theme) -> None:
        for row in known:
            depths = range(1, 1 + len(row.acceptance_per_depth))
            shares = [100 * share for share in row.acceptance_per_depth]
            axes.plot(depths, shares, markersize=4, linewidth=1.4, **_look(row.contestant, _names(rows), theme))
        axes.set_ylim(0, 100)
        axes.locator_params(axis="x", integer=True)
        _label(axes, theme, "depth in the draft", "accepted, %")

    def ends(row: Row) -> str:
        shares = row.acceptance_per_depth
        last = "" if len(shares) == 1 else f" and {shares[-1]:.0%} at depth {len(shares)}"
        return f"{row.contestant} accepts {shares[0]:.0%} at depth 1{last}"

    return Figure(
        "acceptance-by-depth",
        title,
        _sentence(map(ends, known)),
        "Of the steps whose draft reached a depth, the share that accepted a token at it.",
        2.4,
        paint,
    )


def tokens_against_nodes(rows: Sequence[Row]) -> Figure | Missing:
    title = "Tokens per step against nodes scored"
    known = [
        (row, row.nodes_per_step, row.block_efficiency)
        for row in rows
        if row.nodes_per_step is not None and row.block_efficiency is not None
    ]
    if not any(nodes != 1 for _, nodes, _ in known):
        return Missing(title, "No contestant says how many nodes it drafted.")

    def paint(axes: Axes, theme: Theme) -> None:
        for row, nodes, efficiency in known:
            look = _look(row.contestant, _names(rows), theme)
            whole = row.category == ALL
            look |= {"label": look["label"] if whole else None, "markersize": 8 if whole else 4, "linestyle": "none"}
            axes.plot(nodes, efficiency, alpha=1 if whole else 0.45, **look)
        axes.set_xlim(left=0)
        axes.margins(0.08)
        _label(axes, theme, "nodes scored per step", "tokens per step")

    return Figure(
        "tokens-against-nodes",
        title,
        _sentence(
            f"{row.contestant} writes {efficiency:.2f} tokens per step and scores {nodes:.1f} nodes"
            for row, nodes, efficiency in known
            if row.category == ALL
        ),
        "Large marks are over all prompts, small ones are single categories. Higher is more text per pass, further "
        "right is more work per pass.",
        2.4,
        paint,
    )


def tokens_by_source(rows: Sequence[Row]) -> Figure | Missing:
    counts = {row.contestant: row.tokens_by_source for row in rows if row.category == ALL}
    parts = {
        name: {source: count / (sum(own.values()) or 1) for source, count in own.items()}
        for name, own in counts.items()
        if any(source != TARGET for source in own)
    }
    if not parts:
        return Missing("Tokens by source", "No contestant says who proposed its tokens.")
    reading = "Who proposed the tokens that were emitted; “target” are the model's own."
    return _bars("tokens-by-source", "Tokens by source", "has", reading, parts, TARGET, "share of tokens, %")


def time_by_phase(rows: Sequence[Row]) -> Figure | Missing:
    parts = {row.contestant: row.phase_shares for row in rows if row.category == ALL and row.phase_shares}
    if not parts:
        return Missing("Share of time by phase", "No contestant says where its time went.")
    reading = "Wall clock of all requests; “other” is what no phase has booked."
    return _bars("time-by-phase", "Share of time by phase", "spends", reading, parts, OTHER, "share of time, %")


def accuracy_by_category(rows: Sequence[Row]) -> Figure | Missing:
    title = "Accuracy by category"
    known = {(row.contestant, row.category): row.accuracy for row in rows if row.accuracy is not None}
    if not known:
        return Missing(title, "No item of these records has a checker.")
    values = {key: Ratio(100 * accuracy, None, None, 1) for key, accuracy in known.items()}
    return Figure(
        "accuracy",
        title,
        _sentence(f"{name} answers {share:.1%} right" for (name, category), share in known.items() if category == ALL),
        "The share of right answers among those that could be checked. Lossless methods answer as plain decoding does.",
        *_dots(values, _names(rows), "right answers, %"),
    )


def scoring_cost(costs: Sequence[Mapping[str, Any]]) -> Figure | Missing:
    title = "Cost of a pass"
    points = sorted((int(cost["nodes"]), 1e3 * float(cost["seconds"])) for cost in costs)
    if not points:
        return Missing(title, "No pass was timed.")

    def paint(axes: Axes, theme: Theme) -> None:
        nodes, times = zip(*points, strict=True)
        axes.plot(nodes, times, marker="o", markersize=4, linewidth=1.4, color=theme.colours[0])
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.set_ylim(bottom=0)
        _label(axes, theme, "nodes scored in one pass", "milliseconds")

    (least, first), (most, last) = points[0], points[-1]
    return Figure(
        "scoring-cost",
        title,
        f"A pass over {least} nodes takes {first:.1f} ms, one over {most} takes {last:.1f} ms.",
        "Time of one pass of the target over trees of so many nodes.",
        2.4,
        paint,
        from_records=False,
    )


# ---- how it is drawn ---------------------------------------------------------------------------------------------


def _dots(
    values: Mapping[tuple[str, str], Ratio], names: Sequence[str], label: str, reference: float | None = None
) -> tuple[float, Callable[[Axes, Theme], None]]:
    """Height and paint of a figure with a line for each place (a category or a state), and in each line a mark with its
    interval for each contestant. Without a reference, the values are percentages."""
    own = [name for name in names if any(key[0] == name for key in values)]
    places = list(dict.fromkeys(place for _, place in values))
    if len(places) == 2 and ALL in places:
        places = [ALL]  # one category alone is the same as all
    band = len(own) + 0.6

    def paint(axes: Axes, theme: Theme) -> None:
        for rank, name in enumerate(own):
            look = _look(name, names, theme) | {"linestyle": "none"}
            for number, place in enumerate(places):
                ratio = values.get((name, place))
                if ratio is None:
                    continue
                y = number * band + rank
                low, high = (ratio.value if end is None else end for end in (ratio.low, ratio.high))
                axes.plot([low, high], [y, y], color=look["color"], linewidth=1.6, solid_capstyle="round")
                axes.plot(ratio.value, y, markersize=6, **look)
                look["label"] = None
                text = f"{ratio.value:.2f}" if reference is not None else f"{ratio.value:.0f}"
                beside: Any = {"xytext": (6, 0), "textcoords": "offset points", "va": "center", "fontsize": 8}
                axes.annotate(text, (high, y), **beside)
        if reference is not None:
            axes.axvline(reference, color=theme.neutral, linewidth=1, linestyle="--", zorder=0)
        for number in range(1, len(places)):
            axes.axhline(number * band - 0.8, color=theme.faint, linewidth=0.6)
        axes.set_yticks([number * band + (len(own) - 1) / 2 for number in range(len(places))], map(_short, places))
        axes.tick_params(axis="y", length=0)
        axes.set_ylim(len(places) * band - 0.8, -0.8)
        axes.margins(x=0.14)
        if reference is None:
            axes.set_xlim(0, 112)  # percentages, with space for the number
        axes.set_xlabel(label)
        axes.grid(axis="x", color=theme.faint, linewidth=0.6)

    return max(0.7, 0.19 * band * len(places)), paint


def _bars(
    name: str, title: str, verb: str, reading: str, parts: Mapping[str, Mapping[str, float]], neutral: str, label: str
) -> Figure:
    """A bar of 100 % for each contestant, with its name above; the neutral part comes last and is grey."""
    names = [part for part in dict.fromkeys(part for own in parts.values() for part in own) if part != neutral]

    def paint(axes: Axes, theme: Theme) -> None:
        starts = [0.0] * len(parts)
        for place, part in enumerate([*names, neutral]):
            colour = theme.neutral if part == neutral else theme.colours[place % len(theme.colours)]
            widths = [100 * own.get(part, 0.0) for own in parts.values()]
            bars: Any = {"height": 0.5, "color": colour, "label": _short(part), "edgecolor": theme.paper}
            axes.barh(range(len(parts)), widths, left=starts, **bars)
            for line, (start, width) in enumerate(zip(starts, widths, strict=True)):
                if width >= 9:
                    look: Any = {"ha": "center", "va": "center", "color": readable_on(colour), "fontsize": 8}
                    axes.text(start + width / 2, line, f"{width:.0f}", **look)
            starts = [start + width for start, width in zip(starts, widths, strict=True)]
        for line, contestant in enumerate(parts):
            axes.text(0, line - 0.3, _short(contestant, 44), va="bottom")
        axes.set_ylim(len(parts) - 0.6, -0.75)
        axes.set_xlim(0, 100)
        axes.set_yticks([])
        axes.spines["left"].set_visible(False)
        axes.set_xlabel(label)

    finding = _sentence(f"{contestant} {verb} {_largest(own)}" for contestant, own in parts.items())
    return Figure(name, title, finding, reading, 0.5 * len(parts) + 0.1, paint)


def _label(axes: Axes, theme: Theme, x: str, y: str) -> None:
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(color=theme.faint, linewidth=0.6)


def _look(name: str, names: Sequence[str], theme: Theme) -> dict[str, Any]:
    """Colour and mark of a contestant, the same in every figure; the baseline comes first and is grey."""
    place = names.index(name)
    colour = theme.neutral if place == 0 else theme.colours[(place - 1) % len(theme.colours)]
    return {"label": _short(name), "color": colour, "marker": MARKS[place % len(MARKS)]}


def _names(rows: Iterable[Row | Record]) -> list[str]:
    """The contestants in the order that gives them their colours; the first place belongs to the baseline."""
    kinds = {row.contestant: row.kind for row in rows}
    plain = [name for name, kind in kinds.items() if kind == PLAIN]
    return [plain[0] if plain else "", *(name for name in kinds if name not in plain[:1])]


def _short(name: str, most: int = 20) -> str:
    """A name short enough for a phone and long enough to be recognised; the middle is left out."""
    name = " ".join(name.split())
    return name if len(name) <= most else f"{name[: most - most // 3 - 1]}…{name[-(most // 3) :]}"


# ---- how it is said ----------------------------------------------------------------------------------------------


def _sentence(clauses: Iterable[str], most: int = 5) -> str:
    found = list(clauses)
    rest = f"; {len(found) - most} more are in the summary table" if len(found) > most else ""
    return "; ".join(found[:most]) + rest + "."


def _range(name: str, values: Mapping[tuple[str, str], Ratio]) -> str:
    """The categories in which a contestant is slowest and fastest; empty if it has only one."""
    own = [(ratio.value, category) for (other, category), ratio in values.items() if other == name and category != ALL]
    if len(own) < 2:
        return ""
    (least, slow), (most, fast) = min(own), max(own)
    return f", from {least:.2f} in {slow} to {most:.2f} in {fast}"


def _largest(part: Mapping[str, float]) -> str:
    """The largest parts in words, such as `61 % in score and 20 % in draft`."""
    top = sorted(part.items(), key=lambda pair: -pair[1])[:2]
    return " and ".join(f"{share:.0%} in {name}" for name, share in top)
