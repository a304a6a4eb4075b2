"""A page that anyone can open: what records say, in tables and figures, with the commands that measured it.

The page is one file that asks nothing of the network and runs no script; the figures lie beside it as PNG files too.
The same records give the same bytes.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from branchwise.bench.figures import DARK, LIGHT, Figure, Missing, draw, figures
from branchwise.bench.records import Record
from branchwise.bench.summary import (
    ABSENT,
    ALL,
    LEFT,
    Row,
    by_contestant,
    categories,
    cells,
    in_order,
    shown,
    shown_ratio,
    summarise,
)
from branchwise.errors import UsageError

MOST_LINES = 4
MOST_DIFFERENCES = 50
ALIKE = ("model", "dtype", "device", "machine", "threads", "source")
"""what runs must share to be compared"""
MAY_DIFFER = ("methods", "peers", "state")
"""arguments that need not be the same"""

STYLE = """
:root { color-scheme: light dark; --paper: #ffffff; --back: #f4f6f8; --ink: #1f2328; --soft: #57606a; --line: #d8dde3;
  --shade: #57606a66; }
@media (prefers-color-scheme: dark) {
  :root { --paper: #161b22; --back: #0d1117; --ink: #e6edf3; --soft: #9aa4b0; --line: #363d47; --shade: #000000cc; }
}
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 0.75rem; max-width: 74rem; background: var(--back); color: var(--ink);
  font: 1rem/1.5 system-ui, sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.5rem; line-height: 1.25; margin: 0.5rem 0; }
h2 { font-size: 1.15rem; line-height: 1.3; margin: 0 0 0.5rem; }
p { margin: 0.4rem 0; }
.soft, figcaption { color: var(--soft); font-size: 0.875rem; }
.card { background: var(--paper); border: 1px solid var(--line); border-radius: 0.5rem; padding: 0.75rem;
  margin: 1rem 0; }
.warning { border-left: 0.3rem solid #d55e00; }
.figures { columns: 2 26rem; column-gap: 1rem; }
.figures .card { margin: 0 0 1rem; break-inside: avoid; }
figure { margin: 0; }
img { display: block; width: 100%; max-width: 31rem; height: auto; margin: 0 auto 0.4rem; }
.scroll { overflow-x: auto; background:  /* a shadow at the edge behind which a table goes on */
  linear-gradient(90deg, var(--paper) 40%, transparent) 0 0 / 2.5rem 100% local no-repeat,
  linear-gradient(270deg, var(--paper) 40%, transparent) 100% 0 / 2.5rem 100% local no-repeat,
  linear-gradient(90deg, var(--shade), transparent) 0 0 / 0.9rem 100% scroll no-repeat,
  linear-gradient(270deg, var(--shade), transparent) 100% 0 / 0.9rem 100% scroll no-repeat; }
.scroll:focus-visible { outline: 2px solid #0072b2; }
table { border-collapse: collapse; font-size: 0.875rem; font-variant-numeric: tabular-nums; overflow-wrap: normal; }
th, td { padding: 0.3rem 0.5rem; text-align: right; white-space: nowrap; border-bottom: 1px solid var(--line); }
th.word, td.word { text-align: left; }
td.word span { display: inline-block; max-width: 14rem; white-space: normal; overflow-wrap: break-word; }
@media (max-width: 40rem) { td.word span { max-width: 8rem; } }
tr.new td { border-top: 2px solid var(--line); }
pre { margin: 0.5rem 0 0; padding: 0.5rem; background: var(--back); border-radius: 0.25rem; overflow-x: auto;
  font-size: 0.8rem; }
dl { display: grid; grid-template-columns: fit-content(8rem) minmax(0, 1fr); gap: 0.2rem 1rem; margin: 0;
  font-size: 0.875rem; }
dt { color: var(--soft); }
dd { margin: 0; }
details { margin: 0.6rem 0; }
summary { cursor: pointer; }
"""


def write_report(records: Sequence[Record], out: Path, costs: Sequence[Mapping[str, Any]] | None = None) -> Path:
    """Write the page and its figures into a folder; says where the page is. `costs` are times of passes by nodes."""
    if not records:
        raise UsageError("There are no records to report on; run `branchwise bench` first.")
    for name in ("model", "dtype", "device"):
        values = sorted({str(record.run.get(name)) for record in records})
        if len(values) > 1:
            raise UsageError(
                f"These records are of more than one {name} ({', '.join(values)}), which no ratio can join; make a "
                "report for each."
            )
    rows = summarise(records)
    found = figures(records, rows, costs)
    images = {
        (figure.name, theme.name): draw(figure, theme)
        for figure in found
        if isinstance(figure, Figure)
        for theme in (LIGHT, DARK)
    }
    page = out / "index.html"
    try:
        out.mkdir(parents=True, exist_ok=True)
        for (name, theme), image in images.items():
            (out / _file(name, theme)).write_bytes(image)
        page.write_text(_page(records, rows, found, images), encoding="utf-8", newline="\n")
    except OSError as error:
        raise UsageError(f"The report cannot be written to {out}: {error.strerror}.") from None
    return page


def _page(
    records: Sequence[Record],
    rows: Sequence[Row],
    found: Sequence[Figure | Missing],
    images: Mapping[tuple[str, str], bytes],
) -> str:
    models = ", ".join(_values(records, "model")) or "a model"
    commands = commands_of(records)
    drawn = [_figure(figure, images, commands) for figure in found if isinstance(figure, Figure)]
    parts = [
        f"<h1>Benchmark of {escape(models)}</h1>",
        _opening(records, rows),
        _warning(records),
        _summary(rows, commands),
        f'<div class="figures">{"".join(drawn)}</div>' if drawn else "",
        _equality(rows, commands),
        _left_out([figure for figure in found if isinstance(figure, Missing)]),
        _provenance(records),
    ]
    # Nothing may be loaded or run, whatever a record holds.
    policy = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>Benchmark of {escape(models)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n<main>\n"
        + "\n".join(part for part in parts if part)
        + "\n</main>\n</body>\n</html>\n"
    )


# ---- sections ----------------------------------------------------------------------------------------------------


def _opening(records: Sequence[Record], rows: Sequence[Row]) -> str:
    """The result in a line for each of the fastest, and what it rests on."""
    fast = [(row.speed_up.value, row) for row in rows if row.category == ALL and row.speed_up is not None]
    fast.sort(key=lambda pair: -pair[0])
    lines = [
        f"<p><strong>{escape(row.contestant)}</strong>: {shown_ratio(row.speed_up)} times as fast as plain decoding</p>"
        for _, row in fast[:MOST_LINES]
    ]
    counts = (
        f"{_count(len(records), 'request')} of {_count(len(by_contestant(records)), 'contestant')} on "
        f"{_count(len({record.item for record in records}), 'prompt')} in "
        f"{_count(len(categories(records)), 'category', 'categories')}"
    )
    where = ", ".join(escape(text) for name in ("device", "dtype") for text in _values(records, name))
    return "".join(lines) + f'<p class="soft">{counts}{"; " + where if where else ""}. Brackets are 95 % intervals.</p>'


def _warning(records: Sequence[Record]) -> str:
    mixed = [name for name in ALIKE if len(_values(records, name)) > 1]
    asked = [record.run.get("arguments") or {} for record in records]
    names = dict.fromkeys(name for arguments in asked for name in arguments if name not in MAY_DIFFER)
    mixed += [name for name in names if len({_text(arguments.get(name)) for arguments in asked}) > 1]
    if not mixed:
        return ""
    return (
        f'<p class="card warning">These records are of runs that differ in {escape(", ".join(mixed))}; '
        "their times cannot be compared.</p>"
    )


def _summary(rows: Sequence[Row], commands: Sequence[str]) -> str:
    overall = _rows_table(in_order(rows, per_category=False), "Summary over all categories")
    single = _rows_table(
        [row for row in in_order(rows, per_category=True) if row.category != ALL], "Summary by category"
    )
    return (
        f'<section class="card"><h2>Summary</h2>{overall}'
        f"<details><summary>By category</summary>{single}</details>"
        '<p class="soft">speed-up: time per token of plain decoding over the contestant\'s. acceptance: 1 + accepted '
        "drafts per step. drafts/step: passes of the draft model. MBSU: the speed-up if time were bytes read. "
        "by depth: acceptance at depth 1, 2, … in percent. equal: answers that are the baseline's, token for token. "
        "max gap: between the logits of the two tokens where answers part. "
        f"{ABSENT}: not told.</p>{_commands(commands)}</section>"
    )


def _rows_table(rows: Sequence[Row], label: str) -> str:
    titles, lines = cells(rows)
    place = titles.index("category") if "category" in titles else None
    breaks = {
        number
        for number in range(1, len(lines))
        if place is not None and lines[number][place] != lines[number - 1][place]
    }
    return _table(titles, lines, label, LEFT, breaks)


def _figure(figure: Figure, images: Mapping[tuple[str, str], bytes], commands: Sequence[str]) -> str:
    light, dark = (base64.b64encode(images[figure.name, theme.name]).decode() for theme in (LIGHT, DARK))
    source = (
        _commands(commands) if figure.from_records else '<p class="soft">The times were given with the records.</p>'
    )
    return (
        f'<section class="card"><h2>{escape(figure.title)}</h2><figure><picture>'
        f'<source media="(prefers-color-scheme: dark)" srcset="data:image/png;base64,{dark}">'
        f'<img src="data:image/png;base64,{light}" alt="{escape(figure.finding)}"></picture>'
        f"<figcaption>{escape(figure.reading)}</figcaption></figure>{source}</section>"
    )


def _equality(rows: Sequence[Row], commands: Sequence[str]) -> str:
    told = [(row, row.equality) for row in rows if row.category == ALL and row.equality is not None]
    if not told:
        return '<section class="card"><h2>Equality</h2><p>No answer was compared with the baseline\'s.</p></section>'
    counts = [
        [row.contestant, str(found.compared), str(found.equal), shown(found.max_gap, ".3g")] for row, found in told
    ]
    apart = [pair for _, found in told for pair in found.differences]
    apart.sort(key=lambda pair: (-1.0 if pair[1].gap is None else -pair[1].gap, pair[0]))
    lines = [
        [key.contestant, key.item, str(key.turn), str(key.round), str(difference.place)]
        + [ABSENT if token is None else str(token) for token in (difference.token, difference.expected)]
        + [shown(difference.gap, ".3g")]
        for key, difference in apart[:MOST_DIFFERENCES]
    ]
    text = _table(["contestant", "compared", "equal", "max gap"], counts, "Answers compared with the baseline's", LEFT)
    if lines:
        titles = ["contestant", "item", "turn", "round", "place", "token", "expected", "gap"]
        more = f" The {MOST_DIFFERENCES} widest of {len(apart)} are shown." if len(apart) > MOST_DIFFERENCES else ""
        text += (
            f'<p class="soft">Where answers part first, the widest gap first: a small gap is a near-tie that rounding '
            f"decided; {ABSENT} where one of the two ended.{more}</p>"
            + _table(titles, lines, "First differences", ("contestant", "item"))
        )
    else:
        text += "<p>Every compared answer is the baseline's, token for token.</p>"
    return f'<section class="card"><h2>Equality and near-ties</h2>{text}{_commands(commands)}</section>'


def _left_out(missing: Sequence[Missing]) -> str:
    if not missing:
        return ""
    lines = "".join(f"<p><strong>{escape(one.title)}</strong>: {escape(one.why)}</p>" for one in missing)
    return f'<section class="card"><h2>Not shown</h2>{lines}</section>'


def _provenance(records: Sequence[Record]) -> str:
    names = dict.fromkeys(name for record in records for name in record.run)
    lines = "".join(
        f"<dt>{escape(name)}</dt><dd>{'<br>'.join(map(escape, _values(records, name)))}</dd>" for name in names
    )
    text = f"<dl>{lines}</dl>" if lines else "<p>The records do not say where they come from.</p>"
    return f'<section class="card"><h2>Where the numbers come from</h2>{text}</section>'


# ---- pieces ------------------------------------------------------------------------------------------------------


def commands_of(records: Iterable[Record]) -> list[str]:
    """The commands that measured the records; from their arguments where they do not hold a command."""
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


def _commands(commands: Sequence[str]) -> str:
    if not commands:
        return '<p class="soft">The records do not say which command measured them.</p>'
    return f'<pre tabindex="0" aria-label="Command"><code>{escape(chr(10).join(commands))}</code></pre>'


def _table(
    titles: Sequence[str],
    lines: Sequence[Sequence[str]],
    label: str,
    words: Sequence[str],
    breaks: Iterable[int] = (),
) -> str:
    """A table in a box of its own that scrolls, so that the page need not."""
    kinds = [' class="word"' if title in words else "" for title in titles]
    head = "".join(f'<th scope="col"{kind}>{escape(title)}</th>' for title, kind in zip(titles, kinds, strict=True))
    body = "".join(
        ('<tr class="new">' if number in breaks else "<tr>")
        + "".join(f"<td{kind}><span>{escape(text)}</span></td>" for text, kind in zip(line, kinds, strict=True))
        + "</tr>"
        for number, line in enumerate(lines)
    )
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(label)}"><table>'
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def _values(records: Iterable[Record], name: str) -> list[str]:
    """The different values that records have for a part of their provenance, as text."""
    values = (record.run.get(name) for record in records)
    return list(dict.fromkeys(_text(value) for value in values if value is not None))


def _text(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_text(inner)}" for name, inner in value.items() if inner is not None)
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _count(number: int, one: str, many: str | None = None) -> str:
    return f"{number} {one if number == 1 else many or one + 's'}"


def _file(name: str, theme: str) -> str:
    return f"{name}.png" if theme == LIGHT.name else f"{name}-{theme}.png"
