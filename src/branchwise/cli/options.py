"""Options that several commands share, so that they mean and read the same in every command."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

PLAIN_HELP: dict[str, Any] = {"add_completion": False, "pretty_exceptions_enable": False, "rich_markup_mode": None}
"""settings of every parser: help as plain text, because importing rich takes longer than everything else in help"""


def group(help: str) -> typer.Typer:
    """A command with commands of its own, such as `branchwise audit`."""
    return typer.Typer(help=help, no_args_is_help=True, **PLAIN_HELP)


# The model and the hardware
Model = Annotated[
    str, typer.Option("--model", "-m", help="Alias, hub id, folder or GGUF file; see `branchwise models`.")
]
Dtype = Annotated[
    str, typer.Option(help="auto (bfloat16 if the hardware computes in it), float32, bfloat16 or float16.")
]
Device = Annotated[str, typer.Option(help="auto (a GPU if one is found), cpu or cuda.")]
Threads = Annotated[int | None, typer.Option(help="CPU threads.", show_default="all cores")]
Compile = Annotated[
    bool,
    typer.Option("--compile", help="On a GPU, fuse the kernels of a pass: faster, after seconds for each new size."),
]
Warmup = Annotated[
    bool,
    typer.Option(
        "--warmup/--no-warmup",
        help="Compile and record at load what a request needs; without it, loading is faster and the first request "
        "is slower.",
    ),
]
TrustRemoteCode = Annotated[
    bool, typer.Option("--trust-remote-code", help="Run the Python code of a model's repository.")
]

# The method
MethodName = Annotated[
    str | None,
    typer.Option(
        "--method", help="Method by name, or as draft/tree/verify; see `branchwise methods`.", show_default="default"
    ),
]
DraftModel = Annotated[
    str | None,
    typer.Option(help="Model that drafts, named as for --model; options may follow: ID,temperature=0.8,top-k=20."),
]
Index = Annotated[str | None, typer.Option(help="Folder of an index to retrieve from; see `branchwise index build`.")]
Draft = Annotated[
    str | None,
    typer.Option(
        help="Drafter: ngram (repeats of the text so far), none (plain decoding) or another; see `branchwise methods`.",
        show_default="the method's",
    ),
]
Tree = Annotated[str | None, typer.Option(help="Shape of the draft, such as chain:8.", show_default="the drafter's")]
Verify = Annotated[
    str | None,
    typer.Option(
        help="Rule that accepts drafted tokens; every rule that changes the distribution has lossy in its name.",
        show_default="match",
    ),
]
State = Annotated[
    str | None,
    typer.Option(metavar="FILE", help="Start with what the drafter learned before, and save there what it learns now."),
]

# The text
MaxNewTokens = Annotated[int, typer.Option("--max-new-tokens", "-n", help="Write at most this many tokens.")]
Temperature = Annotated[float, typer.Option("--temperature", "-t", help="Randomness of sampling; 0 is greedy.")]
TopK = Annotated[int, typer.Option(help="Sample from the k most probable tokens; 0 means all.")]
TopP = Annotated[float, typer.Option(help="Sample from the most probable tokens that together have this probability.")]
Seed = Annotated[
    int | None,
    typer.Option(help="The same seed writes the same text, with or without drafting.", show_default="random"),
]
ShowDraft = Annotated[bool, typer.Option("--show-draft", help="Colour the tokens that were drafted and accepted.")]

# Prompts and results
PromptFile = Annotated[
    Path | None,
    typer.Option(
        help='Text with one prompt a line, or JSON lines with "prompt", "turns" or "question"; may end in .gz.',
        show_default="prompts of Branchwise",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
