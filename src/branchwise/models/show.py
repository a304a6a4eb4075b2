"""The output while a model is fetched, converted and loaded: our progress bar, and none of other libraries."""

from __future__ import annotations

import contextlib
import importlib
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any


def wanted(progress: bool | None) -> bool:
    """Whether to show progress: as the caller says; by default only if stderr is a terminal."""
    return progress if progress is not None else sys.stderr is not None and sys.stderr.isatty()


@contextlib.contextmanager
def bar(label: str, total: int | None, progress: bool | None) -> Iterator[Callable[[int], None]]:
    """A progress bar on stderr, because stdout is for results. Yields a function that sets its position."""
    if not wanted(progress):
        yield lambda position: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn

    columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn() if total else TimeElapsedColumn()
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=console.is_terminal) as shown:
        task = shown.add_task(label, total=total)
        yield lambda position: shown.update(task, completed=min(position, total or position))


@contextlib.contextmanager
def quiet(bars: bool = False) -> Iterator[None]:
    """Keep transformers and huggingface_hub from writing warnings and, unless `bars`, progress bars."""
    logging: Any = importlib.import_module("transformers.utils.logging")
    hub_logging: Any = importlib.import_module("huggingface_hub.utils.logging")
    gguf_utils: Any = importlib.import_module("transformers.modeling_gguf_pytorch_utils")
    with contextlib.ExitStack() as undo, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for library in (logging, hub_logging):
            undo.callback(library.set_verbosity, library.get_verbosity())
            library.set_verbosity_error()
        if not bars and logging.is_progress_bar_enabled():
            undo.callback(logging.enable_progress_bar)
            logging.disable_progress_bar()
        undo.callback(setattr, gguf_utils, "tqdm", gguf_utils.tqdm)
        gguf_utils.tqdm = lambda things, **_: things  # transformers cannot switch this bar off
        yield
