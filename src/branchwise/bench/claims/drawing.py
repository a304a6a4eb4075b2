"""The figures of the claims: tokens a pass against length, nodes and temperature, as PNG files."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from branchwise.bench.claims.page import IMAGES, drawable, values
from branchwise.bench.claims.rows import Rows
from branchwise.bench.claims.table import Sweep, sweeps
from branchwise.bench.figures import MARKS
from branchwise.errors import UsageError
from branchwise.plots import LIGHT, Theme, png

if TYPE_CHECKING:
    from matplotlib.axes import Axes

HEIGHT = 2.2


def write_figures(rows: Rows, folder: Path) -> list[Path]:
    """The figures for which there are rows, into the folder of images beside a page."""
    written = []
    for sweep in sweeps():
        if not drawable(sweep, rows):
            continue
        path = folder / IMAGES.format(name=sweep.name)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(picture(sweep, rows, LIGHT))
        except OSError as error:
            raise UsageError(f"The figure {path} cannot be written: {error.strerror}.") from None
        written.append(path)
    return written


def picture(sweep: Sweep, rows: Rows, theme: Theme) -> bytes:
    def paint(axes: Axes, theme: Theme) -> None:
        for number, (label, line) in enumerate(values(sweep, rows).items()):
            places, tokens = zip(*line, strict=True)
            look: Any = {"color": theme.colours[number % len(theme.colours)], "marker": MARKS[number % len(MARKS)]}
            axes.plot(places, tokens, markersize=4, linewidth=1.4, label=label, **look)
        axes.set_xlabel(sweep.axis, color=theme.ink)
        axes.set_ylabel("tokens a pass", color=theme.ink)
        axes.set_title(sweep.title, fontsize=8, color=theme.ink)
        axes.legend(frameon=False, fontsize=7, labelcolor=theme.ink)

    return png(HEIGHT, paint, theme)
