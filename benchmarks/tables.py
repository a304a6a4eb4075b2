"""The tables of the pages in docs, from the committed records, and the README's tables of speeds and of methods.

A table stands behind a line `<!-- table: FILE [what] -->` and is whatever that file of records says today, over all
prompts, by `categories`, or of the `sources` of the tokens; where a file is still to be measured, it says so.

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

import cells
import chains
import controller
import crowded
import drafting
import foundations
import headline
import load
import long_heads
import memories
import students
import verifiers
from rich.console import Console

import gpu
import heads
from branchwise.bench.records import read
from branchwise.bench.summary import Row, summarise, table
from branchwise.methods import table as table_of_methods

ROOT = Path(__file__).parents[1]
PAGE, HEADS, TRAIN = (ROOT / "docs" / name for name in ("benchmarks.md", "heads.md", "train.md"))
RECORDS = ROOT / "benchmarks" / "records"
README = ROOT / "README.md"
PLACE = re.compile(r"(<!-- table: (\S+?)(?: (\S+))? -->\n```\n)(.*?)(```\n)", re.DOTALL)
METHODS = re.compile(r"(<!-- methods -->\n).*?(<!-- /methods -->\n)", re.DOTALL)
SPEEDS = re.compile(r"(<!-- speeds -->\n).*?(<!-- /speeds -->\n)", re.DOTALL)
SCRIPTS = {
    "foundations": foundations,
    "verifiers": verifiers,
    "drafting-overhead": drafting,
    "memories": memories,
    "gpu": gpu,
    "heads": heads,
    "long-heads": long_heads,
    "cells": cells,
    "chains": chains,
    "controller": controller,
    "crowded": crowded,
    "load": load,
    "students": students,
}
"""whose records are their own, with a summary that prints"""
WIDTHS = {"drafting": 150}
"""characters of a table; 120 for the others"""


def main() -> None:
    for path, fill in ((PAGE, filled), (HEADS, filled), (TRAIN, filled), (README, with_tables)):
        page = path.read_text()
        found = fill(page)
        if "--check" in sys.argv and found != page:
            sys.exit(f"{path.name} is not what the records and presets say; run python benchmarks/tables.py.")
        path.write_text(found)


def filled(page: str) -> str:
    return PLACE.sub(lambda place: place[1] + text_of(RECORDS / place[2], place[3]) + place[5], page)


def with_tables(readme: str) -> str:
    page = METHODS.sub(lambda place: place[1] + table_of_methods() + place[2], readme)
    return SPEEDS.sub(lambda place: place[1] + headline.table() + place[2], page)


def text_of(path: Path, what: str | None) -> str:
    if not path.exists():
        return "not measured yet\n"
    printed = io.StringIO()
    for name, script in SCRIPTS.items():
        if path.name.startswith(name):
            with contextlib.redirect_stdout(printed):
                script.summarise([json.loads(line) for line in path.read_text().splitlines()])
            return printed.getvalue()
    rows = summarise(read(path))
    if what == "sources":
        return "".join(shares(row) for row in rows if len(row.tokens_by_source) > 1)
    width = next((width for name, width in WIDTHS.items() if path.name.startswith(name)), 120)
    shown = table(rows, per_category=what == "categories", width=width)
    Console(file=printed, width=width, highlight=False).print(shown)
    return "".join(line.rstrip() + "\n" for line in printed.getvalue().splitlines())


def shares(row: Row) -> str:
    """Who wrote the tokens of a contestant: the target itself, or one of its drafters."""
    tokens = sum(row.tokens_by_source.values())
    told = ", ".join(f"{name} {count / tokens:.0%}" for name, count in row.tokens_by_source.items() if count)
    return f"{row.contestant:20} {row.category:15} {told}\n"


if __name__ == "__main__":
    main()
