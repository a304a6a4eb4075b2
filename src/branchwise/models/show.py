"""What a user sees while a model is fetched, converted and loaded: our progress bar, and nobody else's output."""

from __future__ import annotations

import contextlib
import importlib
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any


def wanted(progress: bool | None) -> bool:
    """Whether to show progress: as the caller says, else only to somebody at a terminal."""
    return progress if progress is not None else sys.stderr is not None and sys.stderr.isatty()


@contextlib.contextmanager
def bar(label: str, total: int | None, progress: bool | None) -> Iterator[Callable[[int], None]]:
    """A progress bar on stderr, since stdout belongs to results; yields what sets its position."""
    if not wanted(progress):
        yield lambda position: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn

    columns = [TextColumn("{task.description}"), BarColumn()]
    columns += [DownloadColumn()] if total else [TimeElapsedColumn()]
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=console.is_terminal) as shown:
        task = shown.add_task(label, total=total)
        yield lambda position: shown.update(task, completed=min(position, total or position))


@contextlib.contextmanager
def quiet(bars: bool = False) -> Iterator[None]:
    """Keep transformers and huggingface_hub from writing warnings and, unless wanted, progress bars."""
    logging: Any = importlib.import_module("transformers.utils.logging")
    hub_logging: Any = importlib.import_module("huggingface_hub.utils.logging")
    gguf_utils: Any = importlib.import_module("transformers.modeling_gguf_pytorch_utils")
    verbosity, hub_verbosity = logging.get_verbosity(), hub_logging.get_verbosity()
    had_bars, gguf_bar = logging.is_progress_bar_enabled(), gguf_utils.tqdm
    logging.set_verbosity_error()
    hub_logging.set_verbosity_error()
    if had_bars and not bars:
        logging.disable_progress_bar()
    gguf_utils.tqdm = lambda things, **_: things  # not one of transformers' own bars: it has no switch
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        gguf_utils.tqdm = gguf_bar
        logging.set_verbosity(verbosity)
        hub_logging.set_verbosity(hub_verbosity)
        if had_bars and not bars:
            logging.enable_progress_bar()


def first_line(error: BaseException) -> str:
    """What another library raised, short enough to stand inside a sentence of ours."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    line = lines[0] if lines else type(error).__name__
    return (line if len(line) <= 200 else line[:200] + "…").rstrip(".:")
