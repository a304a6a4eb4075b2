"""The command line. Heavy imports wait until a command needs them, so that help is instant."""

from __future__ import annotations

import contextlib
import json
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from branchwise.cli.audit import app as audit
from branchwise.cli.bench import bench, report
from branchwise.cli.calibrate import app as calibrate
from branchwise.cli.index import app as index
from branchwise.cli.methods import methods
from branchwise.cli.options import (
    AsJson,
    Compile,
    Device,
    DraftModel,
    Dtype,
    Index,
    Model,
    State,
    Temperature,
    Threads,
    TopK,
    TopP,
    TrustRemoteCode,
)
from branchwise.cli.train import app as train
from branchwise.cli.tree import app as tree_app
from branchwise.cli.tune import tune
from branchwise.errors import BranchwiseError, LossyWarning, ModelError, UsageError
from branchwise.models import DEFAULT_MODEL

if TYPE_CHECKING:
    from rich.console import Console

    from branchwise.engine import Piece
    from branchwise.llm import LLM, Completion, Options
    from branchwise.methods import Method

app = typer.Typer(
    name="branchwise",
    help="Generate faster with any causal language model, without changing what it would have said.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

app.add_typer(audit)
app.add_typer(tree_app)
app.add_typer(train)
app.add_typer(calibrate)
app.add_typer(index)
for command in (bench, report, tune, methods):
    app.command()(command)

MethodName = Annotated[
    str | None,
    typer.Option(
        "--method",
        help="A published method by name, or draft/tree/verify; `branchwise methods`.",
        show_default="default",
    ),
]
Draft = Annotated[
    str | None,
    typer.Option(
        help="What proposes tokens: ngram (repeats of this text), none (plain decoding), and others; see docs.",
        show_default="the method's",
    ),
]
Tree = Annotated[str | None, typer.Option(help="Shape of the draft, such as chain:8.", show_default="the drafter's")]
Verify = Annotated[
    str | None,
    typer.Option(
        help="Rule that accepts drafted tokens; one that is not lossless has lossy in its name.", show_default="match"
    ),
]
MaxNewTokens = Annotated[int, typer.Option("--max-new-tokens", "-n", help="The most tokens to write.")]
Seed = Annotated[
    int | None, typer.Option(help="Same seed, same text, with or without drafting.", show_default="random")
]
ShowDraft = Annotated[bool, typer.Option("--show-draft", help="Colour drafted tokens that were accepted.")]


@app.command()
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
    trust_remote_code: TrustRemoteCode = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object with text, tokens and stats.")] = False,
    show_draft: ShowDraft = False,
) -> None:
    """Write the answer to a prompt.

    branchwise generate "Write a haiku about rivers."
    """
    text = _read_prompt(prompt, file, raw)
    options = _options(
        max_new_tokens=max_new_tokens, temperature=temperature, top_k=top_k, top_p=top_p, seed=seed, stop=stop, raw=raw
    )
    chosen = _choose(method, draft_model, index, draft, tree, verify)
    llm = _load(model, chosen, state, dtype, device, threads, compile, trust_remote_code)
    with _keeping_state(llm):
        if as_json:
            completion = llm.generate(text, **options)
            print(json.dumps(_as_json(completion)))
            _refuse_half(completion)
            return
        console = _console()
        _summarise(write(console, llm, text, options, show_draft), show_draft)


@app.command()
def chat(
    model: Model = DEFAULT_MODEL,
    method: MethodName = None,
    draft_model: DraftModel = None,
    index: Index = None,
    draft: Draft = None,
    tree: Tree = None,
    verify: Verify = None,
    state: State = None,
    max_new_tokens: MaxNewTokens = 512,
    temperature: Temperature = 0.0,
    top_k: TopK = 0,
    top_p: TopP = 1.0,
    seed: Seed = None,
    system: Annotated[str | None, typer.Option(help="Instructions that come before the conversation.")] = None,
    dtype: Dtype = "auto",
    device: Device = "auto",
    threads: Threads = None,
    compile: Compile = False,
    trust_remote_code: TrustRemoteCode = False,
    show_draft: ShowDraft = False,
) -> None:
    """Talk with a model. Ctrl-C stops an answer, Ctrl-D ends the conversation."""
    options = _options(max_new_tokens=max_new_tokens, temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
    chosen = _choose(method, draft_model, index, draft, tree, verify)
    llm = _load(model, chosen, state, dtype, device, threads, compile, trust_remote_code)
    if not llm.tokenizer.chat_template:
        raise UsageError(f"{llm.name} has no chat template to talk with; use branchwise generate.")
    console = _console()
    start = [{"role": "system", "content": system}] if system else []
    if sys.stdin.isatty():
        with contextlib.suppress(ImportError):  # arrows and history in input(), where the system has them
            import readline  # noqa: F401
        console.print(f"{llm.name}, drafting with {chosen.name}. /reset starts over, /exit ends.", style="dim")
    with _keeping_state(llm):
        _talk(console, llm, start, options, show_draft)


def _talk(console: Console, llm: LLM, start: list[dict[str, str]], options: Options, show_draft: bool) -> None:
    """Answer line by line until there are no more."""
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
            console.print("A new conversation.", style="dim")
        elif line.startswith("/") and " " not in line:
            console.print("There is /reset and /exit.", style="dim")
        elif line:
            shown: list[Piece] = []
            before = len(messages)
            try:
                messages.append({"role": "user", "content": _checked(line)})
                completion = write(console, llm, messages, options, show_draft, shown)
                _summarise(completion, show_draft)
            except UsageError as error:
                messages = messages[:before]
                print(f"branchwise: {error} /reset starts over.", file=sys.stderr)
                continue
            except KeyboardInterrupt:
                console.print()
            messages.append({"role": "assistant", "content": "".join(piece.text for piece in shown)})


@app.command()
def models(as_json: AsJson = False) -> None:
    """List the model aliases, and what lies in the cache."""
    from branchwise.models import ALIASES, cache_dir, cached

    here = cached()
    if as_json:
        entries = [{"name": m.name, "path": str(m.path), "bytes": m.bytes, "source": m.source} for m in here]
        known = [{"name": a.name, "description": a.description} for a in ALIASES.values()]
        print(json.dumps({"aliases": known, "cached": entries, "cache": str(cache_dir())}))
        return
    from rich.table import Table

    console = _console()
    table = Table("alias", "model", box=None, header_style="bold")
    for alias in ALIASES.values():
        table.add_row(alias.name, alias.description)
    console.print(table)
    console.print("\nAlso: a hub id (org/name), a folder with safetensors, a GGUF file.\n", style="dim")
    if here:
        table = Table("in the cache", "size", "place", box=None, header_style="bold")
        for entry in here:
            table.add_row(entry.name, f"{entry.bytes / 1e6:,.0f} MB", str(entry.path))
        console.print(table)
    else:
        console.print(f"The cache {cache_dir()} is empty; the first use of an alias fills it.", style="dim")


@app.command()
def demo(model: Model = DEFAULT_MODEL, max_new_tokens: MaxNewTokens = 160, threads: Threads = None) -> None:
    """Show plain and speculative decoding side by side: same tokens, measured speed."""
    from branchwise.cli.demo import run

    run(_console(), model=model, max_new_tokens=max_new_tokens, threads=threads)


@app.callback(invoke_without_command=True)
def common_options(
    version: Annotated[bool, typer.Option("--version", help="Print the version.", is_eager=True)] = False,
    plugin: Annotated[
        list[Path] | None,
        typer.Option(help="Python file that registers drafters or verifiers of your own; may be repeated."),
    ] = None,
) -> None:
    for file in plugin or []:
        _run_plugin(file)
    if version:
        from branchwise import __version__

        print(f"branchwise {__version__}")
        raise typer.Exit


def _run_plugin(file: Path) -> None:
    """Let a file register its parts, by the very statements that documentation shows."""
    import runpy

    if not file.is_file():
        raise UsageError(f"There is no plugin {file}.")
    try:
        runpy.run_path(str(file), run_name="plugin")
    except Exception as error:  # whatever the user's own code raises
        raise UsageError(f"The plugin {file} failed: {type(error).__name__}: {error}.") from error


def main() -> None:
    """Run the command line: a user's mistake is one sentence and exit code 2, and so is told what changes the
    distribution."""
    warnings.showwarning = _showing_sentences(warnings.showwarning)
    try:
        app()
    except BranchwiseError as error:
        print(f"branchwise: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None


def _showing_sentences(show: Callable[..., None]) -> Callable[..., None]:
    """How warnings are shown: our own as one line, without the place in the code that they come from."""

    def shown(message: Warning | str, category: type[Warning], *place: Any, **more: Any) -> None:
        if issubclass(category, LossyWarning):
            print(f"branchwise: {message}", file=sys.stderr)
        else:
            show(message, category, *place, **more)

    return shown


def _read_prompt(prompt: str | None, file: Path | None, raw: bool) -> str:
    text = _find_prompt(prompt, file)
    text = text if raw else text.removesuffix("\n")  # the newline that ends a file is no part of a message
    if not text.strip():
        raise UsageError("The prompt is empty; there is nothing to continue.")
    return _checked(text)


def _checked(text: str) -> str:
    """Bytes that are no UTF-8 arrive from the shell as lone surrogates, which no tokenizer takes."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise UsageError("The prompt is not UTF-8 text.") from None
    return text


def _find_prompt(prompt: str | None, file: Path | None) -> str:
    if file is not None:
        if prompt is not None:
            raise UsageError("Give the prompt as an argument or with --file, not both.")
        try:
            return file.read_text(encoding="utf-8-sig")
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"The prompt file {file} cannot be read: {_reason(error)}.") from None
    if prompt is not None and prompt != "-":
        return prompt
    if prompt is None and sys.stdin.isatty():
        raise UsageError('There is no prompt; try: branchwise generate "Write a haiku about rivers."')
    return sys.stdin.read()


def _reason(error: Exception) -> str:
    return error.strerror if isinstance(error, OSError) and error.strerror else "it is not UTF-8 text"


def _options(**given: Any) -> Options:
    """Options for `LLM.generate`, checked before a model is loaded for nothing."""
    from branchwise.core.sampling import SamplingParams
    from branchwise.engine import Request

    SamplingParams(temperature=given["temperature"], top_k=given["top_k"], top_p=given["top_p"])
    Request((0,), max_new_tokens=given["max_new_tokens"])
    options: Options = {name: value for name, value in given.items() if value is not None}  # type: ignore[assignment]
    return options


def _choose(
    method: str | None,
    draft_model: str | None,
    index: str | None,
    draft: str | None,
    tree: str | None,
    verify: str | None,
) -> Method:
    """What is asked for, found and paired before a model is loaded for nothing."""
    from branchwise.methods import choose_method

    chosen = choose_method(method, draft=draft, tree=tree, verify=verify, draft_model=draft_model, index=index)
    chosen.build()
    return chosen


def _load(
    model: str,
    method: Method,
    state: str | None,
    dtype: str,
    device: str,
    threads: int | None,
    compile: bool,
    trust_remote_code: bool,
) -> LLM:
    from branchwise.llm import load

    return load(
        model,
        method=method,
        state=state,
        dtype=dtype,
        device=device,
        threads=threads,
        compile=compile,
        max_batch=1,
        trust_remote_code=trust_remote_code,
    )


@contextlib.contextmanager
def _keeping_state(llm: LLM) -> Iterator[None]:
    """What the drafter has learned is written at the end, also where Ctrl-C is the end."""
    try:
        yield
    finally:
        if llm.state is not None:
            llm.save_state()


def _console() -> Console:
    from rich.console import Console

    return Console(highlight=False, soft_wrap=True)


def write(
    console: Console, llm: LLM, prompt: Any, options: Options, show_draft: bool, shown: list[Piece] | None = None
) -> Completion:
    """Print the answer as it comes; `shown` collects what was printed, also where Ctrl-C ends it."""
    for chunk in llm.stream(prompt, **options):
        show_pieces(console, chunk.pieces, show_draft)
        if shown is not None:
            shown += chunk.pieces
        if chunk.completion is not None:
            console.print()
            return chunk.completion
    raise AssertionError("a stream ends with its completion")


def show_pieces(console: Console, pieces: list[Piece], show_draft: bool) -> None:
    """Print text as it is; only drafted tokens, where they are to be seen, go through the console for their colour."""
    for piece in pieces:
        if show_draft and piece.drafted:
            console.print(piece.text, end="", style="bold green", markup=False, emoji=False)
        else:
            console.file.write(piece.text)
    console.file.flush()


def _summarise(completion: Completion, show_draft: bool) -> None:
    """A line of numbers for people; nothing where standard error is read by a program."""
    _refuse_half(completion)
    if not sys.stderr.isatty():
        return
    from rich.console import Console

    stats = completion.stats
    legend = "green: drafted and accepted · " if show_draft else ""
    Console(stderr=True, highlight=False).print(
        f"{legend}{len(completion.token_ids)} tokens in {stats.steps} steps, "
        f"mean acceptance length {stats.mean_acceptance_length:.2f}, {stats.tokens_per_second:.1f} tokens/s",
        style="dim",
    )


def _refuse_half(completion: Completion) -> None:
    if completion.error is not None:
        raise ModelError(completion.error)


def _as_json(completion: Completion) -> dict[str, Any]:
    return {
        "text": completion.text,
        "token_ids": completion.token_ids,
        "prompt_tokens": completion.prompt_tokens,
        "finish_reason": completion.finish_reason,
        "error": completion.error,
        "stats": completion.stats.as_dict(),
    }
