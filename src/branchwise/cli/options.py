"""Options that several commands have: said once, so that they mean and read the same everywhere."""

from __future__ import annotations

from typing import Annotated

import typer

Model = Annotated[
    str, typer.Option("--model", "-m", help="Alias, hub id, folder or GGUF file; see `branchwise models`.")
]
DraftModel = Annotated[
    str | None,
    typer.Option(help="Model that drafts, as --model takes it; options may follow: ID,temperature=0.8,top-k=20."),
]
Index = Annotated[str | None, typer.Option(help="Folder of an index to retrieve from; see `branchwise index build`.")]
State = Annotated[
    str | None,
    typer.Option(metavar="FILE", help="Go on with what the drafter learned there, and keep there what it learns."),
]
Temperature = Annotated[float, typer.Option("--temperature", "-t", help="0 is greedy.")]
TopK = Annotated[int, typer.Option(help="Sample from the k most probable tokens; 0 means all.")]
TopP = Annotated[float, typer.Option(help="Sample from the most probable tokens that reach this mass.")]
Dtype = Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")]
Device = Annotated[str, typer.Option(help="auto, cpu or cuda.")]
Threads = Annotated[int | None, typer.Option(help="CPU threads.", show_default="all cores")]
Compile = Annotated[
    bool, typer.Option("--compile", help="On a GPU, fuse what is recorded: faster, after seconds for every new size.")
]
TrustRemoteCode = Annotated[
    bool, typer.Option("--trust-remote-code", help="Run Python code that a model repository brings along.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
