"""The common parts of all plots: matplotlib, which is optional, themes, and files that may not be writable."""

from __future__ import annotations

import importlib.util
import io
import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from branchwise.errors import UsageError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WIDTH = 3.8
DPI = 200
STRONGEST = (1.25, 4.0)
"""the least and the largest ratio that may get the strongest colour of a heat map: small differences stay pale, and a
peer that is fifty times slower leaves the others their colours"""


@dataclass(frozen=True)
class Theme:
    name: str
    paper: str
    ink: str
    faint: str
    neutral: str
    """the colour of the baseline and of remainders"""
    colours: tuple[str, ...]


_ON_LIGHT = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
_ON_DARK = ("#56b4e9", "#e69f00", "#2bc49a", "#e39ac4", "#f0e442", "#ff8a5c")
LIGHT = Theme("light", paper="#ffffff", ink="#1f2328", faint="#d8dde3", neutral="#7a828c", colours=_ON_LIGHT)
DARK = Theme("dark", paper="#161b22", ink="#e6edf3", faint="#363d47", neutral="#9aa4b0", colours=_ON_DARK)


def check_plot(file: Path) -> None:
    """Refuse a plot that could not be written, before anything is measured."""
    if importlib.util.find_spec("matplotlib") is None:
        raise UsageError("A plot needs matplotlib. Install it with: pip install matplotlib")
    if file.suffix.lower() != ".png":
        raise UsageError(f"The plot is a PNG file; {file} is not named like one.")
    if not file.absolute().parent.is_dir():
        raise UsageError(f"The plot cannot be written to {file}: there is no such folder.")


def pyplot() -> Any:
    """`matplotlib.pyplot`, drawing into files."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt


def save(figure: Any, file: Path) -> None:
    """Write a figure of `pyplot` and close it."""
    figure.tight_layout()
    try:
        figure.savefig(file, dpi=150)
    except OSError as error:
        raise UsageError(f"The plot cannot be written to {file}: {error.strerror}.") from None
    finally:
        pyplot().close(figure)


def png(height: float, paint: Callable[[Axes, Theme], None], theme: Theme) -> bytes:
    """A PNG of what `paint` draws on axes of this height in inches; the same numbers give the same bytes."""
    try:
        import matplotlib
    except ModuleNotFoundError:
        raise UsageError("A report needs matplotlib. Install it with: pip install 'branchwise[plot]'") from None
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure as Canvas

    style: dict[Any, Any] = {
        **dict.fromkeys(("text.color", "axes.labelcolor", "xtick.color", "ytick.color"), theme.ink),
        "axes.edgecolor": theme.neutral,
        "font.family": "DejaVu Sans",
        "font.size": 9,
        "text.parse_math": False,  # names may contain dollar signs
    }
    with matplotlib.rc_context(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # letters that the font lacks are drawn as boxes
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(style)
        canvas = Canvas(figsize=(WIDTH, height + 0.5), facecolor=theme.paper, layout="constrained")
        axes = canvas.add_subplot(facecolor=theme.paper)
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_axisbelow(True)
        paint(axes, theme)
        handles, labels = axes.get_legend_handles_labels()
        if labels:
            columns = 2 if max(map(len, labels)) > 9 else 3
            canvas.set_figheight(height + 0.5 + 0.2 * -(-len(labels) // columns))
            canvas.legend(handles, labels, loc="outside upper left", ncols=columns, frameon=False, columnspacing=1.2)
        file = io.BytesIO()
        FigureCanvasAgg(canvas).print_figure(file, format="png", dpi=DPI, metadata={"Software": None})
    return file.getvalue()


def paint_ratios(
    axes: Axes,
    theme: Theme,
    rows: Sequence[str],
    columns: Sequence[str],
    ratios: Sequence[Sequence[float | None]],
    *,
    turned: bool = False,
) -> None:
    """A heat map of ratios with their numbers: the colour of paper at 1, one hue above it and another below.

    Colours follow the logarithm, so that twice as fast is as strong as half as fast. The ratio that is furthest from 1
    gets the strongest colour, within `STRONGEST`. A cell without a ratio stays empty. With `turned`, column names are
    turned.
    """
    from matplotlib.colors import LinearSegmentedColormap, Normalize, to_hex

    below, above = theme.colours[1], theme.colours[0]
    hues = LinearSegmentedColormap.from_list("ratios", [below, theme.paper, above], N=257)  # odd: 1 has its own
    furthest = max([1.0, *(max(ratio, 1 / ratio) for row in ratios for ratio in row if ratio)])
    most = math.log(min(max(furthest, STRONGEST[0]), STRONGEST[1]))
    scale = Normalize(-most, most, clip=True)
    for line, row in enumerate(ratios):
        for place, ratio in enumerate(row):
            if ratio:
                colour = to_hex(hues(scale(math.log(ratio))))
                box: Any = {"facecolor": colour, "edgecolor": theme.faint, "linewidth": 0.6}
                axes.fill_between([place - 0.5, place + 0.5], line - 0.5, line + 0.5, **box)
                look: Any = {"ha": "center", "va": "center", "color": readable_on(colour), "fontsize": 8}
                axes.text(place, line, f"{ratio:.2f}", **look)
    axes.set_xlim(-0.5, len(columns) - 0.5)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xticks(range(len(columns)), columns, fontsize=8, rotation=90 if turned else 0)
    axes.set_yticks(range(len(rows)), rows, fontsize=8)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)


def readable_on(colour: str) -> str:
    """Black or white, whichever is readable on a colour."""
    red, green, blue = (int(colour[start : start + 2], 16) / 255 for start in (1, 3, 5))
    return "#000000" if 0.3 * red + 0.59 * green + 0.11 * blue > 0.45 else "#ffffff"
