"""The tables of docs/benchmarks.md, written from the committed records.

A table stands behind a line `<!-- table: FILE [what] -->` and is whatever that file of records says today.

    python benchmarks/tables.py            write them
    python benchmarks/tables.py --check    fail where the page says something else
"""

from __future__ import annotations

import contextlib
import io
import json
import re
import sys
from pathlib import Path

import foundations
import verifiers
from rich.console import Console

from branchwise.bench.records import read
from branchwise.bench.summary import summarise, table

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "benchmarks.md"
RECORDS = ROOT / "benchmarks" / "records"
PLACE = re.compile(r"(<!-- table: (\S+?)(?: (\S+))? -->\n```\n)(.*?)(```\n)", re.DOTALL)


def main() -> None:
    page = PAGE.read_text()
    found = filled(page)
    if "--check" in sys.argv:
        sys.exit(found != page and f"{PAGE.name} is not what the records say; run python benchmarks/tables.py.")
    PAGE.write_text(found)


def filled(page: str) -> str:
    return PLACE.sub(lambda place: place[1] + text_of(RECORDS / place[2], place[3]) + place[5], page)


def text_of(path: Path, what: str | None) -> str:
    printed = io.StringIO()
    if path.name.startswith(("foundations", "verifiers")):
        script = foundations if path.name.startswith("foundations") else verifiers
        with contextlib.redirect_stdout(printed):
            script.summarise([json.loads(line) for line in path.read_text().splitlines()])
        return printed.getvalue()
    rows = summarise(read(path))
    Console(file=printed, width=120, highlight=False).print(table(rows, per_category=what == "categories"))
    return "".join(line.rstrip() + "\n" for line in printed.getvalue().splitlines())


if __name__ == "__main__":
    main()
