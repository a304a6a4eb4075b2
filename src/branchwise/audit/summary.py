"""What the exact audit found, as a table and as a figure."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING

from branchwise.audit.exact import TOLERANCE, Audited
from branchwise.plots import check_plot, pyplot, save

if TYPE_CHECKING:
    from rich.console import Console

BAR = 20


@dataclass(frozen=True)
class Row:
    similarity: str
    """how close the drafter is to the target; empty for given cases"""
    audited: Audited


@dataclass(frozen=True)
class Line:
    """One verifier on one kind of drafts, over all instances of one similarity."""

    drafts: str
    verifier: str
    tv: float
    """the largest total-variation distance"""
    block_efficiency: float
    """the mean block efficiency"""
    lp: float
    """the mean optimum"""

    @property
    def share(self) -> float:
        return self.block_efficiency / self.lp


def lines(rows: Sequence[Row]) -> dict[str, list[Line]]:
    """The lines of each similarity, in order of first appearance; within, sorted by drafts, the best verifier first."""
    groups: dict[tuple[str, str, str], list[Audited]] = defaultdict(list)
    for row in rows:
        groups[row.similarity, row.audited.drafts, row.audited.verifier].append(row.audited)
    found: dict[str, list[Line]] = defaultdict(list)
    for (similarity, drafts, verifier), same in groups.items():
        efficiency, optimum = mean(a.block_efficiency for a in same), mean(a.lp for a in same)
        found[similarity].append(Line(drafts, verifier, max(a.tv for a in same), efficiency, optimum))
    return {name: sorted(own, key=lambda line: (line.drafts, -line.block_efficiency)) for name, own in found.items()}


def summarise(console: Console, rows: Sequence[Row]) -> None:
    """A table for each similarity, with a bar for the share of the optimum."""
    from rich.table import Table

    for similarity, found in lines(rows).items():
        count = len({row.audited.case for row in rows if row.similarity == similarity})
        console.print(f"\n{similarity + ', ' if similarity else ''}{count} instances", style="bold")
        table = Table(box=None, header_style="bold", pad_edge=False)
        for column in ("drafts", "verifier", "distance", "block efficiency", "optimum", "share of the optimum"):
            numeric = column in ("distance", "block efficiency", "optimum")
            table.add_column(column, justify="right" if numeric else "left")
        for line in found:
            filled = round(BAR * line.share)
            bar = "█" * filled + "░" * (BAR - filled)
            numbers = (f"{line.tv:.1e}", f"{line.block_efficiency:.3f}", f"{line.lp:.3f}")
            style = None if line.tv < TOLERANCE else "red"
            table.add_row(line.drafts, line.verifier, *numbers, f"{bar} {100 * line.share:.1f} %", style=style)
        console.print(table)


def draw(rows: Sequence[Row], file: Path) -> None:
    """The block efficiency of every verifier, with the optimum as a line, one panel for each similarity and drafts."""
    check_plot(file)
    plt = pyplot()
    found = lines(rows)
    kinds = list(dict.fromkeys(line.drafts for own in found.values() for line in own))
    heights = [len({line.verifier for own in found.values() for line in own if line.drafts == kind}) for kind in kinds]
    figure, axes = plt.subplots(
        len(kinds),
        len(found),
        figsize=(4.2 * len(found) + 0.5, 0.3 * sum(heights) + 0.9 * len(kinds)),
        height_ratios=heights,
        squeeze=False,
    )
    for axis, (drafts, similarity) in zip(axes.flat, itertools.product(kinds, found), strict=True):
        shown = [line for line in found[similarity] if line.drafts == drafts][::-1]
        colours = ["#2a7f62" if line.tv < TOLERANCE else "#c03a2b" for line in shown]
        values = [line.block_efficiency for line in shown]
        axis.barh([line.verifier for line in shown], values, color=colours, height=0.7)
        axis.axvline(shown[-1].lp, color="black", linewidth=1, linestyle="--")
        for place, value in enumerate(values):
            axis.text(value - 0.02, place, f"{value:.3f}", va="center", ha="right", color="white", fontsize=8)
        axis.set_xlim(1, shown[-1].lp * 1.01)
        title = f"{similarity}, {drafts}" if similarity else drafts
        axis.set_title(f"{title}: tokens per step (dashed: the optimum)", fontsize=9, loc="left")
        axis.tick_params(labelsize=8)
        axis.spines[["top", "right"]].set_visible(False)
    save(figure, file)
