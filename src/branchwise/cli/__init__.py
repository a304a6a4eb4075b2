"""The command line: the names of the commands, and the file of each.

A command is imported when it is run. Listing the commands imports none of them, so that help is instant.
"""

from __future__ import annotations

import gc
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Option
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command, get_group

from branchwise.cli.console import errors_in_one_sentence
from branchwise.errors import UsageError

PLAIN_HELP: dict[str, Any] = {"add_completion": False, "pretty_exceptions_enable": False, "rich_markup_mode": None}
"""settings of every parser: help is plain text, because importing rich takes longer than all the rest of help"""

USUAL = gc.get_threshold()
NEW_OBJECTS = 50_000
"""how many objects a command makes, until its model is loaded, before the garbage collector looks for dead ones: Python
looks after 700, which takes most of a second while torch and transformers are imported, whose objects all stay"""

COMMANDS = {
    "generate": ("generate:generate", "Write the answer to a prompt."),
    "chat": ("generate:chat", "Talk with a model."),
    "serve": ("serve:serve", "Serve a model with OpenAI's protocol."),
    "explain": ("explain:explain", "Say where the time of an answer went, and whether speculation paid."),
    "demo": ("demo:demo", "Show plain and speculative decoding side by side: same tokens, measured speed."),
    "models": ("methods:models", "List the model aliases and the models in the cache."),
    "methods": ("methods:methods", "List the methods: paper, drafter, tree, verifier, lossless or lossy."),
    "bench": ("bench:bench", "Measure methods and peers against plain decoding."),
    "report": ("bench:report", "Make one HTML page with figures from the records of a benchmark."),
    "reproduce": ("reproduce:reproduce", "Measure what papers claim of the methods, and judge it."),
    "audit": ("audit:app", "Prove that speculation keeps the distribution of the target."),
    "tune": ("tune:tune", "Measure what a pass over n nodes costs on this machine."),
    "tree": ("train:tree", "Find the shape that drafts should have."),
    "train": ("train:train", "Train what helps a drafter, in minutes and on a CPU."),
    "calibrate": ("train:calibrate", "Count which tokens a target writes, for drafters that need it."),
    "index": ("index:app", "Index texts for drafting by retrieval, or count their tri-grams."),
}
"""name: (file of this folder and the function or group in it, the line that `branchwise --help` shows)"""


def group(help: str) -> typer.Typer:
    """A command with commands of its own, such as `branchwise audit`."""
    return typer.Typer(help=help, no_args_is_help=True, **PLAIN_HELP)


class LazyGroup(TyperGroup):
    """Holds the name and the help line of every command; a command is imported when it is run."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        for name, (_, line) in COMMANDS.items():
            self.add_command(TyperCommand(name, short_help=line))

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        name, command, rest = super().resolve_command(ctx, args)
        return name, command if name is None else imported(name), rest


def imported(name: str) -> Any:
    """The command of this name, in the form that the parser needs."""
    module, _, attribute = COMMANDS[name][0].partition(":")
    part = getattr(import_module(f"branchwise.cli.{module}"), attribute)
    if isinstance(part, typer.Typer):
        return get_group(part)
    single = typer.Typer(**PLAIN_HELP)
    single.command(name)(part)
    return get_command(single)


app = typer.Typer(
    cls=LazyGroup,
    name="branchwise",
    help="Generate faster with any causal language model, without changing what it would have said.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    **PLAIN_HELP,
)


@app.callback(invoke_without_command=True)
def common_options(
    version: Annotated[bool, Option("--version", help="Print the version.", is_eager=True)] = False,
    plugin: Annotated[list[Path] | None, Option(help="Python file with parts of your own; may be repeated.")] = None,
) -> None:
    for file in plugin or []:
        _run_plugin(file)
    if version:
        from branchwise import __version__

        print(f"branchwise {__version__}")
        raise typer.Exit


def _run_plugin(file: Path) -> None:
    """Run a Python file that registers parts with the statements that the documentation shows."""
    import runpy

    if not file.is_file():
        raise UsageError(f"There is no plugin {file}.")
    try:
        runpy.run_path(str(file), run_name="plugin")
    except Exception as error:  # the user's own code may raise anything
        raise UsageError(f"The plugin {file} failed: {type(error).__name__}: {error}.") from error


def collect_as_usual() -> None:
    """Let the garbage collector work as Python has it, once a model is loaded: what lives for a while from then on,
    such as the cache of a method that nobody uses any more, may be large."""
    gc.set_threshold(*USUAL)


def main() -> None:
    """Run the command line."""
    gc.set_threshold(NEW_OBJECTS)
    with errors_in_one_sentence():
        app()
