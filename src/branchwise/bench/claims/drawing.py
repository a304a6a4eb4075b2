"""The figures of the claims: tokens a pass against length, nodes and temperature, for the page and for a report."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from branchwise.bench.claims.page import IMAGES, drawable, told, values
from branchwise.bench.claims.rows import Rows
from branchwise.bench.claims.table import Sweep, sweeps
from branchwise.bench.figures import MARKS, Figure, draw
from branchwise.errors import UsageError
from branchwise.plots import LIGHT, Theme

if TYPE_CHECKING:
    from matplotlib.axes import Axes

HEIGHT = 2.2


def figures(rows: Rows) -> list[Figure]:
    """The figures for which rows exist."""
    return [
        Figure(
            f"claims-{sweep.name}",
            sweep.title,
            f"{told(sweep, rows)}.",
            "Tokens that one pass of the target gives in the mean, the same prompts for all points.",
            HEIGHT,
            partial(_paint, sweep, rows),
        )
        for sweep in sweeps()
        if drawable(sweep, rows)
    ]


def write_figures(rows: Rows, folder: Path) -> list[Path]:
    """Write the figures into the folder of images beside a page."""
    written = []
    for figure in figures(rows):
        path = folder / IMAGES.format(name=figure.name.removeprefix("claims-"))
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(draw(figure, LIGHT))
        except OSError as error:
            raise UsageError(f"The figure {path} cannot be written: {error.strerror}.") from None
        written.append(path)
    return written


def _paint(sweep: Sweep, rows: Rows, axes: Axes, theme: Theme) -> None:
    for number, (label, line) in enumerate(values(sweep, rows).items()):
        places, tokens = zip(*line, strict=True)
        look: Any = {"color": theme.colours[number % len(theme.colours)], "marker": MARKS[number % len(MARKS)]}
        axes.plot(places, tokens, markersize=4, linewidth=1.4, label=label, **look)
    axes.set_xlabel(sweep.axis, color=theme.ink)
    axes.set_ylabel("tokens a pass", color=theme.ink)
    axes.legend(frameon=False, fontsize=7, labelcolor=theme.ink)
