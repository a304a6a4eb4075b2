"""`branchwise chat`: a conversation, line by line."""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING, Annotated

from typer import Option

from branchwise.cli.console import console, print_notice, summarise, write_answer
from branchwise.cli.generate import checked_options, checked_text, saving_state
from branchwise.cli.options import Drafting, Loading, MaxNewTokens, Sampling, Seed, ShowDraft, State, grouped
from branchwise.errors import UsageError

if TYPE_CHECKING:
    from rich.console import Console

    from branchwise.engine import Piece
    from branchwise.llm import LLM, Options


@grouped
def chat(
    *,
    loading: Loading,
    drafting: Drafting,
    state: State = None,
    max_new_tokens: MaxNewTokens = 512,
    sampling: Sampling,
    seed: Seed = None,
    system: Annotated[str | None, Option(help="Instructions that come before the conversation.")] = None,
    show_draft: ShowDraft = False,
) -> None:
    """Talk with a model.

    Ctrl-C stops an answer, Ctrl-D ends the conversation; /reset starts over, /exit ends.

    branchwise chat --system "Answer in one sentence." --show-draft
    """
    options = checked_options(sampling, max_new_tokens=max_new_tokens, seed=seed)
    chosen = drafting.choose()
    llm = loading.load(method=chosen, state=state, max_batch=1)
    if not llm.tokenizer.chat_template:
        raise UsageError(f"{llm.name} has no chat template to talk with; use branchwise generate.")
    shown = console()
    start = [{"role": "system", "content": system}] if system else []
    if sys.stdin.isatty():
        with contextlib.suppress(ImportError):  # gives input() arrow keys and a history; not on every system
            import readline  # noqa: F401
        shown.print(f"{llm.name}, drafting with {chosen.name}. /reset starts over, /exit ends.", style="dim")
    with saving_state(llm):
        _talk(shown, llm, start, options, show_draft)


def _talk(shown: Console, llm: LLM, start: list[dict[str, str]], options: Options, show_draft: bool) -> None:
    """Answer each line of standard input until it ends or the user leaves."""
    messages = list(start)
    while True:
        try:
            line = input("> " if sys.stdin.isatty() else "").strip()
        except (EOFError, KeyboardInterrupt):
            break
        if line in ("/exit", "/quit"):
            break
        if line == "/reset":
            messages = list(start)
            shown.print("A new conversation.", style="dim")
        elif line.startswith("/") and " " not in line:
            shown.print("The commands are /reset and /exit.", style="dim")
        elif line:
            printed: list[Piece] = []
            before = len(messages)
            try:
                messages.append({"role": "user", "content": checked_text(line)})
                summarise(write_answer(shown, llm, messages, options, show_draft, printed), show_draft)
            except UsageError as error:
                messages = messages[:before]
                print_notice(f"{error} /reset starts over.")
                continue
            except KeyboardInterrupt:
                shown.print()
            messages.append({"role": "assistant", "content": "".join(piece.text for piece in printed)})
