"""`branchwise serve`: a model behind OpenAI's protocol."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Option

from branchwise.cli.console import print_notice
from branchwise.cli.options import Drafting, Guard, Loading, State, at_least, grouped, read_text
from branchwise.errors import UsageError
from branchwise.models import check_name

if TYPE_CHECKING:
    from branchwise.llm import LLM

KEY = "BRANCHWISE_API_KEY"


@grouped
def serve(
    *,
    loading: Loading,
    drafting: Drafting,
    state: State = None,
    guard: Guard = True,
    host: Annotated[str, Option(help="Address to listen at; 0.0.0.0 is every one of this machine.")] = "127.0.0.1",
    port: Annotated[int, Option(help="0 takes any that is free.")] = 8000,
    context: Annotated[
        int | None, Option(help="Tokens of a prompt and its answer at most.", show_default="the model's")
    ] = None,
    max_batch: Annotated[int, Option(help="Texts that are written together.")] = 8,
    prefix_cache: Annotated[
        int | None,
        Option(
            help="Texts whose keys and values stay when they end, for prompts that begin like them; 0 for none.",
            show_default="--max-batch",
        ),
    ] = None,
    share_prefixes: Annotated[bool, Option("--share-prefixes", help="Reuse them across API keys too.")] = False,
    served_model_name: Annotated[
        list[str] | None, Option(help="Name in requests and answers; may be repeated.", show_default="--model")
    ] = None,
    chat_template: Annotated[
        Path | None, Option(metavar="FILE", help="Jinja template of conversations.", show_default="the model's")
    ] = None,
    api_key_file: Annotated[
        Path | None, Option(help=f"File with API keys, one a line; {KEY} holds one too.", show_default="open to all")
    ] = None,
    allow_origin: Annotated[
        list[str] | None, Option(help="Origin whose pages may ask from a browser; may be repeated.")
    ] = None,
    max_queue: Annotated[int, Option(help="Texts that may wait for a slot.")] = 256,
    max_requests: Annotated[int, Option(help="Requests at once, those that wait included.")] = 256,
    max_body: Annotated[int, Option(help="Bytes of a request.")] = 4 << 20,
    max_prompt_tokens: Annotated[int | None, Option(help="Tokens of a prompt.", show_default="the context")] = None,
    max_new_tokens: Annotated[int | None, Option(help="Tokens of an answer.", show_default="the context")] = None,
    max_choices: Annotated[int, Option(help="The largest `n` of a request.")] = 128,
    playground: Annotated[bool, Option(help="Serve the page at / that shows how texts come about.")] = True,
    lanes: Annotated[int, Option(help="Methods besides the server's own that requests may name at a time.")] = 2,
    grace: Annotated[float, Option(help="Seconds that running texts have to end after SIGTERM.")] = 30.0,
) -> None:
    """Serve a model with OpenAI's protocol.

    branchwise serve --model smollm2 --port 8000
    """
    at_least(0, port=port, grace=int(grace), prefix_cache=prefix_cache, lanes=lanes)
    at_least(
        1,
        context=context,
        max_batch=max_batch,
        max_queue=max_queue,
        max_requests=max_requests,
        max_body=max_body,
        max_prompt_tokens=max_prompt_tokens,
        max_new_tokens=max_new_tokens,
        max_choices=max_choices,
    )
    keys = read_keys(api_key_file)
    template = None if chat_template is None else read_text(chat_template)
    method = drafting.choose()
    check_name(loading.model)  # before it says that it listens
    try:
        from branchwise.serve import journal
        from branchwise.serve.server import Server, listen, run
        from branchwise.serve.settings import Limits, Settings
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("branchwise"):
            raise
        raise UsageError(f"Serving needs {error.name}; install it with: pip install 'branchwise[serve]'.") from None

    limits = Limits(
        body_bytes=max_body,
        prompt_tokens=max_prompt_tokens,
        new_tokens=max_new_tokens,
        choices=max_choices,
        requests=max_requests,
        queue=max_queue,
    )
    names = tuple(served_model_name or [loading.model])
    settings = Settings(
        names,
        limits,
        keys,
        origins=tuple(allow_origin or ()),
        share_prefixes=share_prefixes,
        playground=playground,
        lanes=lanes,
        method=method,
        head=drafting.head,
        grace=grace,
    )
    cached: int | bool = True if prefix_cache is None else prefix_cache

    def load() -> LLM:
        sizes = {"context": context, "max_batch": max_batch, "prefix_cache": cached}
        llm = loading.load(method=method, state=state, guard=guard, **sizes)
        if template is not None:
            llm.tokenizer.chat_template = template
        return llm

    journal.to_stderr()
    listening = listen(host, port)
    server = Server(load, settings)
    address = f"http://{f'[{host}]' if ':' in host else host}:{listening.getsockname()[1]}"
    page = f" Open {address} to watch it write." if playground else ""
    server.on_loaded = lambda: print_notice(f"{names[0]} is ready at {address}/v1.{page}")
    print_notice(f"Listening at {address}; {names[0]} is loading, drafting with {method.name}.")
    ended = run(server, listening)
    llm = server.runner.llm
    if llm is not None and llm.state is not None and ended:
        llm.save_state()
    if not ended:  # the engine's thread is loading or stuck; do not wait for it
        sys.stderr.flush()
        os._exit(0)


def read_keys(file: Path | None) -> tuple[str, ...]:
    """The keys of a file, one a line, and the key of the environment. A file without keys would open the server."""
    keys = [os.environ.get(KEY, "").strip()]
    if file is not None:
        try:
            lines = file.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) and error.strerror else "it is not UTF-8 text"
            raise UsageError(f"The file of keys {file} cannot be read: {reason}.") from None
        found = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
        if not found:
            raise UsageError(f"The file {file} holds no key; write one a line.")
        keys += found
    return tuple(key for key in keys if key)
