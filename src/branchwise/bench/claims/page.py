"""The page of the claims, docs/claims.md: a function of the records and of claims.toml alone."""

from __future__ import annotations

from collections.abc import Sequence

from branchwise.bench.claims.judging import NOT_MEASURED, VERDICTS, Found, Judged, disturbed, judge
from branchwise.bench.claims.rows import Key, Rows
from branchwise.bench.claims.table import MEASURES, SPEED, Claim, Sweep, claims, drafters_of, surprises, sweeps
from branchwise.bench.summary import ABSENT, shown, shown_ratio
from branchwise.errors import UsageError

IMAGES = "images/claims-{name}.png"
HEAD = """# Claims

What the papers of the methods claim, and what comes out here. `branchwise reproduce` measures, and writes this page
from its records; a test compares the two.

    branchwise reproduce --quick                           what needs only the package, on 8 short texts
    branchwise reproduce --draft-model ID --data DIR       with a draft model, on 40 prompts of Spec-Bench
    branchwise reproduce block cascade --quick             some claims, by the names of the sections below
    branchwise reproduce --read FILE --claims claims.md    this page, from records; --read may be repeated

A quick run of SmolLM2 takes half an hour of processor time: 50 minutes on two cores of an Arm server that had other
work to do as well. It says at the beginning how many rows there are to measure, then how long they take, and at the end
what was not measured and why: an index comes from `branchwise index build`, a table of tri-grams from `branchwise index
trigrams`, heads and draft models from `branchwise train`. Rows are kept in `claims.jsonl` one by one; after Ctrl-C, or
after `--minutes 10`, the same command goes on, and so it does with an `--index` or a `--part` more.

A comparison is between a method and the baseline that the claim names, on the same prompts, at the same length of
drafts or with as many nodes. The unit is tokens a pass of the target, counted by the engine that users run; speed is
measured where a claim is about speed, one text at a time from the end of its prompt on, contestants in turn on every
prompt. A ratio has a 95 % interval over prompts (bootstrap, paired). The verdict follows from the interval, by a rule
in code (`bench/claims/judging.py`):

- **holds**: the whole interval lies above the bound and reaches the number of the paper, if the paper gives one;
- **holds in part**: it lies above the bound but below that number, or only some comparisons hold;
- **does not hold here**: it lies below the bound;
- **undecided**: the bound lies inside the interval, fewer than 8 prompts were compared, or the machine had other work
  while a speed was measured;
- **not measured**: a trained part or an index is missing, a quick run leaves it out, or the run has not come to it yet.

The bound is 1, or a little less where the claim is that nothing is lost. Comparisons in parentheses are shown beside a
claim, and do not count for its verdict. The models here are far smaller than those of the papers, so ratios of speed
differ for reasons that have nothing to do with a method; ratios of tokens a pass depend on how well a drafter knows its
target. Numbers of papers are those of abstracts, of Spec-Bench's board and of published code; where a body could not be
read, the claim is what its abstract says. StyleBench is a set of prompts and no method: its results are in
[benchmarks.md](benchmarks.md#styles-of-reasoning).
"""


def page(setups: Sequence[Rows]) -> str:
    """The whole page. A claim is shown with the first setup that measures it."""
    if not setups:
        raise UsageError("There are no records to write a page from; name them with --read.")
    judged = {claim.name: [judge(claim, rows) for rows in setups] for claim in claims()}
    parts = [HEAD, _setups(setups), _table(judged, setups), _surprises(judged), _figures(setups), "## Claim by claim\n"]
    parts += [_section(claim, judged[claim.name], setups) for claim in claims()]
    return "\n".join(parts)


def _setups(setups: Sequence[Rows]) -> str:
    lines = ["| | target | drafts | device | prompts | tokens | command |", "|---|---|---|---|---|---|---|"]
    for letter, rows in zip(letters(), setups, strict=False):
        run = rows.run
        drafts = " and ".join(filter(None, [run["draft"], run["head"] and "the head of the target"])) or "no model"
        device = f"CPU ({run['machine']})" if run["device"] == "cpu" else run["device"]
        commands = "<br>".join(f"`{command}`" for command in rows.commands)
        lines.append(
            f"| {letter} | {run['model']}, {run['dtype']} | {drafts} | {device} | {run['prompts']} | "
            f"{run['tokens']} | {commands} |"
        )
    busy = [(letter, disturbed(rows)) for letter, rows in zip(letters(), setups, strict=False)]
    return "\n".join([*lines, "", *(f"{letter}: {why}.\n" for letter, why in busy if why)])


def letters() -> list[str]:
    return list("ABCDEFGH")


def _table(judged: dict[str, list[Judged]], setups: Sequence[Rows]) -> str:
    marks = letters()[: len(setups)]
    lines = [f"| claim | paper | {' | '.join(marks)} | why |", "|---|---|" + "---|" * (len(marks) + 1)]
    for claim in claims():
        cells = [_cell(found) for found in judged[claim.name]]
        said = f"[`{claim.method}`](#{claim.name}): {claim.says}"
        lines.append(f"| {said} | {claim.paper} | {' | '.join(cells)} | {claim.why} |")
    counts = [
        ", ".join(
            f"{count} {verdict}"
            for verdict in VERDICTS
            if (count := sum(found[place].verdict == verdict for found in judged.values()))
        )
        for place in range(len(marks))
    ]
    summary = "; ".join(f"{mark}: {count}" for mark, count in zip(marks, counts, strict=True))
    return "\n".join(["## The table", "", *lines, "", f"{len(judged)} claims. {summary}.", ""])


def _surprises(judged: dict[str, list[Judged]]) -> str:
    """The surprises about claims that these records measure."""
    told = [
        f"{number}. [`{name}`](#{name}): {says}"
        for number, (name, says) in enumerate(surprises(), 1)
        if any(found.verdict != NOT_MEASURED for found in judged[name])
    ]
    return "\n".join(["## What surprised most", "", *told, ""]) if told else ""


def _cell(found: Judged) -> str:
    if found.verdict == NOT_MEASURED:
        return ABSENT
    first = next(one for one in found.found if one.ratio is not None and not one.point.beside)
    return f"**{found.verdict}** {shown_ratio(first.ratio)}"


def _section(claim: Claim, judged: Sequence[Judged], setups: Sequence[Rows]) -> str:
    lines = [
        f"### {claim.name}",
        "",
        f"{claim.says[0].upper()}{claim.says[1:]}. ({claim.paper}; {claim.setting}.)",
        "",
        *([claim.why, ""] if claim.why else []),
        f"    branchwise reproduce {claim.name}",
        "",
        "| | comparison | method | baseline | drafted by | unit | measured | ratio | paper | verdict |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    missing: dict[str, list[str]] = {}
    rows = []
    for letter, one in zip(letters(), judged, strict=False):
        for found in one.found:
            if found.ratio is None:
                missing.setdefault(found.missing, []).append(f"{found.point.label} ({letter})")
            else:
                rows.append(_row(letter, found))
    if rows:
        lines += [*rows, ""]
    else:
        lines = lines[:-2]
    for why, labels in missing.items():
        lines.append(f"Not measured, {why}: {', '.join(labels)}.\n")
    return "\n".join(lines)


def _row(letter: str, found: Found) -> str:
    point = found.point
    label = f"({point.label})" if point.beside else point.label
    digits = ".1f" if point.measure == SPEED else ".3f" if point.measure == "acceptance" else ".2f"
    measured = f"{shown(found.ours, digits)} against {shown(found.baseline, digits)}"
    claimed = ABSENT if point.claimed is None else f"{point.claimed:g}"
    bound = "" if point.bound == 1 else f", bound {point.bound:g}"
    return (
        f"| {letter} | {label} | `{found.specs[0]}` | `{found.specs[1]}` | {drafters_of(found.specs[0])} | "
        f"{MEASURES[point.measure]} | {measured} | {shown_ratio(found.ratio)} | {claimed}{bound} | {found.verdict} |"
    )


# ---- figures -----------------------------------------------------------------------------------------------------


def _figures(setups: Sequence[Rows]) -> str:
    drawn = [(sweep, rows) for sweep in sweeps() for rows in setups[:1] if drawable(sweep, rows)]
    if not drawn:
        return ""
    lines = ["## Figures", ""]
    for sweep, rows in drawn:
        lines += [f"![{told(sweep, rows)}]({IMAGES.format(name=sweep.name)})", ""]
    return "\n".join(lines)


def values(sweep: Sweep, rows: Rows) -> dict[str, list[tuple[float, float]]]:
    """For each line its places on the axis and the tokens a pass, as far as they are measured."""
    found: dict[str, list[tuple[float, float]]] = {}
    for line in sweep.lines:
        for place, method, temperature in line.points:
            spec = rows.stand.spec(method)
            samples = [] if spec is None else [*rows.samples(Key(spec, temperature, False)).values()]
            if steps := sum(sample.steps for sample in samples):
                tokens = sum(sample.tokens for sample in samples)
                found.setdefault(line.label, []).append((place, tokens / steps))
    return found


def drawable(sweep: Sweep, rows: Rows) -> bool:
    return any(len(line) > 1 for line in values(sweep, rows).values())


def told(sweep: Sweep, rows: Rows) -> str:
    """The figure described in words."""
    lines = [
        f"{label} from {line[0][1]:.2f} at {line[0][0]:g} to {line[-1][1]:.2f} at {line[-1][0]:g}"
        for label, line in values(sweep, rows).items()
    ]
    return f"{sweep.title} ({rows.title}): {'; '.join(lines)}"
