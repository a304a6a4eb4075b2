"""The report: one page with tables, figures and the commands that measured them, as a function of records alone.

The page, data/report.html, loads nothing from the network and runs no script; its figures are also PNG files beside it.
The same records give the same bytes.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from branchwise.bench import summary
from branchwise.bench.figures import Figure, Missing, draw, figures
from branchwise.bench.probs import acceptance_by_prob
from branchwise.bench.prompts import PACKAGE_DATA
from branchwise.bench.records import Record
from branchwise.bench.summary import ABSENT, ALL, LEFT, Row, shown, shown_ratio
from branchwise.errors import UsageError
from branchwise.plots import DARK, LIGHT

MOST_LINES = 4
MOST_DIFFERENCES = 50
ALIKE = ("model", "dtype", "device", "machine", "threads", "source")
"""provenance that runs must share to be compared"""
MAY_DIFFER = ("methods", "peers", "state")
"""arguments in which comparable runs may differ"""


@dataclass(frozen=True)
class Table:
    label: str
    titles: Sequence[str]
    lines: Sequence[Sequence[str]]
    words: Collection[str] = LEFT
    """titles of the columns that are not numbers"""
    breaks: Collection[int] = ()
    """lines above which a rule is drawn"""


def write_report(
    records: Sequence[Record], out: Path, costs: Sequence[Mapping[str, Any]] | None = None, more: Sequence[Figure] = ()
) -> Path:
    """Write the page and its figures into a folder, and return the path of the page. `costs` are times of passes,
    `more` are figures of other records."""
    if not records:
        raise UsageError("There are no records to report on; run `branchwise bench` first.")
    for name in ("dtype", "device"):
        values = sorted({str(record.run.get(name)) for record in records})
        if len(values) > 1:
            raise UsageError(f"The records are of more than one {name} ({', '.join(values)}); make a report for each.")
    rows = summary.summarise_models(records)
    # Some figures compare the contestants of one model.
    found = [*figures(records if len(summary.models(records)) == 1 else [], rows, costs), *more]
    found.append(acceptance_by_prob(rows))
    drawn = [figure for figure in found if isinstance(figure, Figure)]
    images = {(figure.name, theme.name): draw(figure, theme) for figure in drawn for theme in (LIGHT, DARK)}
    layout: Any = {"autoescape": True, "trim_blocks": True, "lstrip_blocks": True, "undefined": StrictUndefined}
    environment = Environment(loader=FileSystemLoader(PACKAGE_DATA), **layout)
    page = out / "index.html"
    try:
        out.mkdir(parents=True, exist_ok=True)
        for (name, theme), image in images.items():
            (out / (f"{name}.png" if theme == LIGHT.name else f"{name}-{theme}.png")).write_bytes(image)
        text = environment.get_template("report.html").render(
            _values_of_page(records, rows),
            figures=drawn,
            images={key: base64.b64encode(image).decode() for key, image in images.items()},
            missing=[figure for figure in found if isinstance(figure, Missing)],
        )
        page.write_text(text, encoding="utf-8", newline="\n")
    except OSError as error:
        raise UsageError(f"The report cannot be written to {out}: {error.strerror}.") from None
    return page


def _values_of_page(records: Sequence[Record], rows: Sequence[Row]) -> dict[str, Any]:
    """The values that the template shows, without the figures."""
    overall = summary.in_order(rows, per_category=False)
    ratios = [(row.contestant, row.speed_up) for row in overall if row.speed_up]
    ratios.sort(key=lambda pair: -pair[1].value)
    counts = (
        f"{_count(len(records), 'request')} of {_count(len(overall), 'contestant')} on "
        f"{_count(len({record.item for record in records}), 'prompt')} in "
        f"{_count(len(summary.categories(records)), 'category', 'categories')}"
    )
    where = ", ".join(text for name in ("device", "dtype") for text in _values(records, name))
    single = [row for row in summary.in_order(rows, per_category=True) if row.category != ALL]
    names = dict.fromkeys(name for record in records for name in record.run)
    return {
        "models": ", ".join(_values(records, "model")) or "a model",
        "absent": ABSENT,
        "fastest": [(name, shown_ratio(ratio)) for name, ratio in ratios[:MOST_LINES]],
        "basis": f"{counts}; {where}" if where else counts,
        "mixed": _mixed(records),
        "overall": _rows_table(overall, "Summary over all categories"),
        "single": _rows_table(single, "Summary by category"),
        "styles": _styles(records),
        "commands": commands_of(records),
        "provenance": [(name, _values(records, name)) for name in names],
        **_equality(overall),
    }


def _mixed(records: Sequence[Record]) -> list[str]:
    """The reasons why the times of these runs cannot be compared."""
    several = len(summary.models(records)) > 1  # each model is compared with itself
    mixed = [name for name in ALIKE if len(_values(records, name)) > 1 and not (several and name == "model")]
    asked = [record.run.get("arguments") or {} for record in records]
    names = dict.fromkeys(name for arguments in asked for name in arguments if name not in MAY_DIFFER)
    return mixed + [name for name in names if len({_text(arguments.get(name)) for arguments in asked}) > 1]


def _rows_table(rows: Sequence[Row], label: str) -> Table:
    titles, lines = summary.cells(rows)
    breaks = {number for number in range(1, len(rows)) if rows[number].category != rows[number - 1].category}
    return Table(label, titles, lines, breaks=breaks)


OF_STYLES = ("accuracy", "format", "guessed", "cut", "length", "tokens/s", "speed-up", "acceptance")
"""the columns of the table of styles by model"""


def _styles(records: Sequence[Record]) -> Table | None:
    """Each style with all models and contestants, over all of its tasks."""
    asked = summary.by_style(records)
    if not asked:
        return None
    rows = summary.in_order(summary.summarise_models(asked), per_category=True)
    single = [row for row in rows if row.category != ALL]
    lines = [[row.category, row.contestant, *(summary.COLUMNS[title](row) for title in OF_STYLES)] for row in single]
    breaks = {number for number in range(1, len(single)) if single[number].category != single[number - 1].category}
    return Table("Styles by model", ["style", "contestant", *OF_STYLES], lines, ("style", "contestant"), breaks)


def _equality(rows: Sequence[Row]) -> dict[str, Any]:
    """How many answers equal the baseline's, and the widest gaps at which others differ from it."""
    compared = [(row.contestant, row.equality) for row in rows if row.equality is not None]
    counts = [[name, str(found.compared), str(found.equal), shown(found.max_gap, ".3g")] for name, found in compared]
    apart = [pair for _, found in compared for pair in found.differences]
    apart.sort(key=lambda pair: (-1.0 if pair[1].gap is None else -pair[1].gap, pair[0]))
    lines = [
        [*map(str, (*key, first.place)), shown(first.token, "d"), shown(first.expected, "d"), shown(first.gap, ".3g")]
        for key, first in apart[:MOST_DIFFERENCES]
    ]
    label, titles = "Answers compared with the baseline's", ["contestant", "compared", "equal", "max gap"]
    places = ["contestant", "item", "turn", "round", "place", "token", "expected", "gap"]
    return {
        "compared": Table(label, titles, counts) if counts else None,
        "apart": Table("First differences", places, lines, ("contestant", "item")),
        "apart_of": len(apart),
    }


def commands_of(records: Iterable[Record]) -> list[str]:
    """The commands that measured the records; rebuilt from their arguments if the records hold no command."""
    runs = [record.run for record in records]
    return list(dict.fromkeys(filter(None, (str(run.get("command") or _rebuilt(run)) for run in runs))))


def _rebuilt(run: Mapping[str, Any]) -> str:
    """A command from its arguments: lists repeat an option, true is an option without a value."""
    if not run.get("arguments"):
        return ""
    words = ["branchwise bench"]
    for name, value in run["arguments"].items():
        option = "--" + name.replace("_", "-")
        values = value if isinstance(value, list) else [value]
        words += [option if one is True else f"{option} {one}" for one in values if one not in (None, False)]
    return " ".join(words)


def _values(records: Iterable[Record], name: str) -> list[str]:
    """The different values of a part of the records' provenance, as text."""
    values = (record.run.get(name) for record in records)
    return list(dict.fromkeys(_text(value) for value in values if value is not None))


def _text(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_text(inner)}" for name, inner in value.items() if inner is not None)
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _count(number: int, one: str, many: str | None = None) -> str:
    return f"{number} {one if number == 1 else many or one + 's'}"
