"""`branchwise generate` and `branchwise chat`: the answer to a prompt, and a conversation, line by line."""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from branchwise.cli.console import console, print_notice, refuse_incomplete, summarise, write_answer
from branchwise.cli.options import (
    Constraining,
    Drafting,
    Guard,
    Loading,
    MaxNewTokens,
    Sampling,
    Seed,
    ShowDraft,
    State,
    grouped,
)
from branchwise.errors import UsageError

if TYPE_CHECKING:
    from rich.console import Console

    from branchwise.engine import Piece
    from branchwise.llm import LLM, Completion, Options


@grouped
def generate(
    prompt: Annotated[str | None, Argument(help="The prompt; - or nothing reads standard input.")] = None,
    file: Annotated[Path | None, Option("--file", "-f", help="Read the prompt from a file.")] = None,
    *,
    loading: Loading,
    drafting: Drafting,
    state: State = None,
    max_new_tokens: MaxNewTokens = 256,
    sampling: Sampling,
    seed: Seed = None,
    stop: Annotated[list[str] | None, Option(help="Text that ends the answer; may be repeated.")] = None,
    constraining: Constraining,
    task: Annotated[
        str | None, Option(help="What the text is about, for a draft model that is a pack of specialists.")
    ] = None,
    raw: Annotated[bool, Option("--raw", help="Continue the prompt as it is, without the chat template.")] = False,
    as_json: Annotated[bool, Option("--json", help="Print one JSON object with text, tokens and stats.")] = False,
    show_draft: ShowDraft = False,
    guard: Guard = True,
) -> None:
    """Write the answer to a prompt.

    branchwise generate "Write a haiku about rivers." --show-draft
    """
    text = read_prompt(prompt, file, raw)
    given = {"max_new_tokens": max_new_tokens, "seed": seed, "stop": stop, "raw": raw, "task": task}
    options = checked_options(sampling, **given, **constraining.read())
    llm = loading.load(method=drafting.choose(), state=state, max_batch=1, guard=guard)
    with _saving_state(llm):
        if as_json:
            completion = llm.generate(text, **options)
            print(json.dumps(_as_dict(completion)))
            refuse_incomplete(completion)
        else:
            summarise(llm, write_answer(console(), llm, text, options, show_draft), show_draft)


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
    guard: Guard = True,
) -> None:
    """Talk with a model.

    Ctrl-C stops an answer, Ctrl-D ends the conversation; /reset starts over, /exit ends.

    branchwise chat --system "Answer in one sentence." --show-draft
    """
    options = checked_options(sampling, max_new_tokens=max_new_tokens, seed=seed)
    chosen = drafting.choose()
    llm = loading.load(method=chosen, state=state, max_batch=1, guard=guard)
    if not llm.tokenizer.chat_template:
        raise UsageError(f"{llm.name} has no chat template to talk with; use branchwise generate.")
    shown = console()
    start = [{"role": "system", "content": system}] if system else []
    if sys.stdin.isatty():
        with contextlib.suppress(ImportError):  # gives input() arrow keys and a history; not on every system
            import readline  # noqa: F401
        shown.print(f"{llm.name}, drafting with {chosen.name}. /reset starts over, /exit ends.", style="dim")
    with _saving_state(llm):
        _talk(shown, llm, start, options, show_draft)


def checked_options(sampling: Sampling, **given: Any) -> Options:
    """Options for `LLM.generate`, checked before a model is loaded."""
    from branchwise.core.sampling import SamplingParams
    from branchwise.engine import Request

    Request((0,), SamplingParams(**vars(sampling)), given["max_new_tokens"])
    given |= vars(sampling)
    options: Options = {name: value for name, value in given.items() if value is not None}  # type: ignore[assignment]
    return options


def _saving_state(llm: LLM) -> contextlib.ExitStack:
    """A context that saves what the drafter learned if --state names a file, even after an error or Ctrl-C."""
    leaving = contextlib.ExitStack()
    if llm.state is not None:
        leaving.callback(llm.save_state)
    return leaving


def _checked_text(text: str) -> str:
    """Refuse lone surrogates, which stand for bytes of the shell that are not UTF-8: no tokenizer takes them."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise UsageError("The prompt is not UTF-8 text.") from None
    return text


def read_prompt(prompt: str | None, file: Path | None, raw: bool) -> str:
    if file is not None:
        if prompt is not None:
            raise UsageError("Give the prompt as an argument or with --file, not both.")
        try:
            text = file.read_text(encoding="utf-8-sig")
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) and error.strerror else "it is not UTF-8 text"
            raise UsageError(f"The prompt file {file} cannot be read: {reason}.") from None
    elif prompt is not None and prompt != "-":
        text = prompt
    elif prompt is None and sys.stdin.isatty():
        raise UsageError('There is no prompt; try: branchwise generate "Write a haiku about rivers."')
    else:
        text = sys.stdin.read()
    text = text if raw else text.removesuffix("\n")  # the newline that ends a file is not part of the message
    if not text.strip():
        raise UsageError("The prompt is empty; there is nothing to continue.")
    return _checked_text(text)


def _as_dict(completion: Completion) -> dict[str, Any]:
    return {
        "model": completion.model,
        "text": completion.text,
        "token_ids": completion.token_ids,
        "prompt_tokens": completion.prompt_tokens,
        "finish_reason": completion.finish_reason,
        "seed": completion.seed,
        "error": completion.error,
        "stats": completion.stats.as_dict(),
    }


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
                messages.append({"role": "user", "content": _checked_text(line)})
                summarise(llm, write_answer(shown, llm, messages, options, show_draft, printed), show_draft)
            except UsageError as error:
                messages = messages[:before]
                print_notice(f"{error} /reset starts over.")
                continue
            except KeyboardInterrupt:
                shown.print()
            messages.append({"role": "assistant", "content": "".join(piece.text for piece in printed)})
