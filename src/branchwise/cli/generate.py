"""`branchwise generate`: write the answer to a prompt."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from branchwise.cli.console import console, refuse_incomplete, summarise, write_answer
from branchwise.cli.options import (
    Compile,
    Device,
    Draft,
    DraftModel,
    Dtype,
    Index,
    MaxNewTokens,
    MethodName,
    Model,
    Seed,
    ShowDraft,
    State,
    Temperature,
    Threads,
    TopK,
    TopP,
    Tree,
    TrustRemoteCode,
    Verify,
    Warmup,
)
from branchwise.errors import UsageError
from branchwise.models import DEFAULT_MODEL

if TYPE_CHECKING:
    from branchwise.llm import LLM, Completion, Options
    from branchwise.methods import Method


def generate(
    prompt: Annotated[str | None, typer.Argument(help="The prompt; - or nothing reads standard input.")] = None,
    file: Annotated[Path | None, typer.Option("--file", "-f", help="Read the prompt from a file.")] = None,
    model: Model = DEFAULT_MODEL,
    method: MethodName = None,
    draft_model: DraftModel = None,
    index: Index = None,
    draft: Draft = None,
    tree: Tree = None,
    verify: Verify = None,
    state: State = None,
    max_new_tokens: MaxNewTokens = 256,
    temperature: Temperature = 0.0,
    top_k: TopK = 0,
    top_p: TopP = 1.0,
    seed: Seed = None,
    stop: Annotated[list[str] | None, typer.Option(help="Text that ends the answer; may be repeated.")] = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="Continue the prompt as it is, without the chat template.")
    ] = False,
    dtype: Dtype = "auto",
    device: Device = "auto",
    threads: Threads = None,
    compile: Compile = False,
    warmup: Warmup = True,
    trust_remote_code: TrustRemoteCode = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object with text, tokens and stats.")] = False,
    show_draft: ShowDraft = False,
) -> None:
    """Write the answer to a prompt.

    branchwise generate "Write a haiku about rivers." --show-draft
    """
    text = _read_prompt(prompt, file, raw)
    options = checked_options(
        max_new_tokens=max_new_tokens, temperature=temperature, top_k=top_k, top_p=top_p, seed=seed, stop=stop, raw=raw
    )
    chosen = checked_method(method, draft_model, index, draft, tree, verify)
    llm = load_llm(model, chosen, state, dtype, device, threads, compile, warmup, trust_remote_code)
    with saving_state(llm):
        if as_json:
            completion = llm.generate(text, **options)
            print(json.dumps(_as_dict(completion)))
            refuse_incomplete(completion)
        else:
            summarise(write_answer(console(), llm, text, options, show_draft), show_draft)


def checked_options(**given: Any) -> Options:
    """Options for `LLM.generate`, checked before a model is loaded."""
    from branchwise.core.sampling import SamplingParams
    from branchwise.engine import Request

    SamplingParams(temperature=given["temperature"], top_k=given["top_k"], top_p=given["top_p"])
    Request((0,), max_new_tokens=given["max_new_tokens"])
    options: Options = {name: value for name, value in given.items() if value is not None}  # type: ignore[assignment]
    return options


def checked_method(
    method: str | None,
    draft_model: str | None,
    index: str | None,
    draft: str | None,
    tree: str | None,
    verify: str | None,
) -> Method:
    """The method that the options name, built once so that a wrong pairing is refused before a model is loaded."""
    from branchwise.methods import choose_method

    chosen = choose_method(method, draft=draft, tree=tree, verify=verify, draft_model=draft_model, index=index)
    chosen.build()
    return chosen


def load_llm(
    model: str,
    method: Method,
    state: str | None,
    dtype: str,
    device: str,
    threads: int | None,
    compile: bool,
    warmup: bool,
    trust_remote_code: bool,
) -> LLM:
    """A model that writes one text at a time."""
    from branchwise.llm import load

    return load(
        model,
        method=method,
        state=state,
        dtype=dtype,
        device=device,
        threads=threads,
        compile=compile,
        warmup=warmup,
        max_batch=1,
        trust_remote_code=trust_remote_code,
    )


@contextlib.contextmanager
def saving_state(llm: LLM) -> Iterator[None]:
    """Save what the drafter learned if --state names a file, also after an error or Ctrl-C."""
    try:
        yield
    finally:
        if llm.state is not None:
            llm.save_state()


def checked_text(text: str) -> str:
    """Refuse lone surrogates, which stand for bytes of the shell that are not UTF-8: no tokenizer takes them."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise UsageError("The prompt is not UTF-8 text.") from None
    return text


def _read_prompt(prompt: str | None, file: Path | None, raw: bool) -> str:
    text = _find_prompt(prompt, file)
    text = text if raw else text.removesuffix("\n")  # the newline that ends a file is no part of a message
    if not text.strip():
        raise UsageError("The prompt is empty; there is nothing to continue.")
    return checked_text(text)


def _find_prompt(prompt: str | None, file: Path | None) -> str:
    if file is not None:
        if prompt is not None:
            raise UsageError("Give the prompt as an argument or with --file, not both.")
        try:
            return file.read_text(encoding="utf-8-sig")
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) and error.strerror else "it is not UTF-8 text"
            raise UsageError(f"The prompt file {file} cannot be read: {reason}.") from None
    if prompt is not None and prompt != "-":
        return prompt
    if prompt is None and sys.stdin.isatty():
        raise UsageError('There is no prompt; try: branchwise generate "Write a haiku about rivers."')
    return sys.stdin.read()


def _as_dict(completion: Completion) -> dict[str, Any]:
    return {
        "text": completion.text,
        "token_ids": completion.token_ids,
        "prompt_tokens": completion.prompt_tokens,
        "finish_reason": completion.finish_reason,
        "error": completion.error,
        "stats": completion.stats.as_dict(),
    }
