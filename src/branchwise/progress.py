"""A progress line with the remaining time if standard error is a terminal, and nothing if a program reads it."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator

Progress = Callable[[str, int, int], None]
"""called with (the current work, how much of it is done, how much it is in all, or 0 if that is not known yet)"""


def silent(what: str, done: int, of: int) -> None:
    pass


@contextlib.contextmanager
def showing() -> Iterator[Progress]:
    if not sys.stderr.isatty():
        yield silent
        return
    from rich import progress as rich
    from rich.console import Console

    columns = (
        rich.BarColumn(bar_width=24),
        rich.MofNCompleteColumn(),
        rich.TimeRemainingColumn(),
        rich.TextColumn("{task.description}", markup=False),
    )
    with rich.Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=None)

        def show(what: str, done: int, of: int) -> None:
            if done < bar.tasks[0].completed:
                bar.reset(task)  # new work begins, and the earlier work says nothing about its time
            bar.update(task, description=what, completed=done, total=of or None)

        yield show
