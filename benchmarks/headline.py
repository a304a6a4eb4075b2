"""The README's table of speeds, from the committed records: this engine without a drafter, `default`, and others."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from branchwise.bench.records import read
from branchwise.bench.summary import summarise

RECORDS = Path(__file__).parent / "records"
COLUMNS = "transformers", "llama.cpp", "none", "default"
Speeds = Mapping[str, float]
"""tokens a second, by column"""


class Row(NamedTuple):
    model: str
    hardware: str
    prompts: str
    speeds: Speeds
    page: str
    """where the numbers, their intervals and the command are"""


def rows() -> list[Row]:
    llama, bits = "docs/benchmarks.md#against-llamacpp", "docs/eight-bits.md"
    in_bits = of_bits("eight-bits-layers-cascade-lake.jsonl")
    shipped = of_heads("heads-shipped-smollm2-h200.jsonl", "head as shipped")
    heads, cells = "docs/heads.md", "docs/benchmarks.md#every-cell"
    return [
        Row("SmolLM2-135M, float32", "2 CPU cores", "Spec-Bench", of_contest("bench-default-xeon.jsonl"), llama),
        Row("the same, `--weights int8`", "2 CPU cores", "writing, editing", in_bits, bits),
        Row("SmolLM2-135M, bfloat16", "H200", "Spec-Bench", shipped, heads),
        Row("the same, 16 texts at once", "H200", "Spec-Bench", of_cell("cells-smollm2-h200.jsonl", 16), cells),
        Row(
            "Qwen2.5-Coder-1.5B, a head made in ten minutes", "H200, an older engine", "HumanEval",
            of_heads("heads-coder-h200.jsonl", "head 63, copies"), f"{heads}#a-larger-model",
        ),
    ]  # fmt: skip


def table() -> str:
    lines = [
        "| model | hardware | prompts | `transformers` | llama.cpp | `none` | `default` | |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows():
        cells = [f"{row.speeds[name]:,.{1 if row.speeds[name] < 200 else 0}f}" if name in row.speeds else ""
                 for name in COLUMNS]  # fmt: skip
        cells[-1] = f"**{cells[-1]}**"
        gain = row.speeds["default"] / row.speeds["none"]
        told = f"[{gain:.2f} x `none`]({row.page})"
        lines.append(f"| {row.model} | {row.hardware} | {row.prompts} | {' | '.join(cells)} | {told} |")
    return "\n".join(lines) + "\n"


def of_contest(name: str) -> Speeds:
    """Of `branchwise bench`: whole answers, prompts included."""
    titles = {"plain": "none"}
    found = [row for row in summarise(read(RECORDS / name)) if row.category == "all"]
    return {titles.get(row.contestant, row.contestant): row.tokens_per_second for row in found}


def of_bits(name: str) -> Speeds:
    """Of `eight_bits.py`, answers without their prompts; llama.cpp as it is fastest."""
    found = [record for record in _loaded(name) if record["kind"] == "decoding"]
    by: dict[str, list[Mapping[str, Any]]] = {}
    for record in found:
        peer = record["weights"].startswith("llama.cpp")
        title = "llama.cpp" if peer else {"plain": "none"}.get(record["method"], record["method"])
        if peer or record["weights"] == "int8":
            by.setdefault(title, []).append(record)
    return {title: sum(r["tokens"] for r in own) / sum(r["decode"] for r in own) for title, own in by.items()}


def of_heads(name: str, method: str) -> Speeds:
    """Of `heads.py`, one greedy text at a time, prompts included, as this method drafts; the median of turns."""
    by: dict[str, list[float]] = {}
    for record in _loaded(name):
        if record["kind"] == "speed" and record["batch"] == 1 and record["method"] in ("none", method):
            title = "none" if record["method"] == "none" else "default"
            by.setdefault(title, []).append(record["tokens"] / record["seconds"])
    return {title: statistics.median(speeds) for title, speeds in by.items()}


def of_cell(name: str, batch: int) -> Speeds:
    """Of `cells.py`: so many greedy texts at once, prompts included."""
    (cell,) = [record for record in _loaded(name) if (record["batch"], record["way"]) == (batch, "greedy")]
    return {"none": cell["plain"]["tokens_per_second"], "default": cell["own"]["tokens_per_second"]}


def _loaded(name: str) -> Sequence[Mapping[str, Any]]:
    return [json.loads(line) for line in (RECORDS / name).read_text().splitlines()]


if __name__ == "__main__":
    print(table(), end="")
