"""What every plot needs: the library, which is an extra, and a file that may turn out not to be writable."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from branchwise.errors import UsageError


def check_plot(file: Path) -> None:
    """What would spoil a picture is told before anything is measured for it."""
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
    """Write a figure and forget it."""
    figure.tight_layout()
    try:
        figure.savefig(file, dpi=150)
    except OSError as error:
        raise UsageError(f"The plot cannot be written to {file}: {error.strerror}.") from None
    finally:
        pyplot().close(figure)
