"""`branchwise methods`: the published methods that run here, each by its name.

Heavy imports wait until the command runs, so that help is instant.
"""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from branchwise.methods import Method


def methods(
    name: Annotated[str | None, typer.Argument(help="Tell more of this one.", show_default="all of them")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """List the methods: paper, drafter, tree, verifier, and whether the distribution of the target is kept.

    branchwise methods cascade
    """
    from branchwise.methods import PRESETS, find_any

    chosen = list(PRESETS.values()) if name is None else [find_any(name)]
    if as_json:
        print(json.dumps({"methods": [as_dict(method) for method in chosen]}))
    elif name is None:
        _list(chosen)
    else:
        _update(chosen[0])


def as_dict(method: Method) -> dict[str, Any]:
    return {
        "name": method.name,
        "about": method.about,
        "paper": method.paper,
        "draft": method.draft,
        "tree": method.tree,
        "verify": method.verify,
        "lossless": method.lossless,
        "needs_draft_model": method.needs_draft_model,
        "needs_index": method.needs_index,
        "command": method.command,
    }


def _list(methods: list[Method]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False, markup=False, emoji=False, width=None if sys.stdout.isatty() else 160)
    table = Table(
        "method", "drafter", "tree", "verifier", "distribution", "paper", box=None, header_style="bold", pad_edge=False
    )
    for column in table.columns[:5]:
        column.no_wrap = True
    for method in methods:
        probs = "lossless" if method.lossless else "lossy"
        table.add_row(method.name, method.draft, method.tree or "", method.verify, probs, method.paper)
    console.print(table)
    console.print(
        "\nThe drafter model is the one that --draft-model names, and retrieval reads the --index; "
        "branchwise methods NAME tells more of a method.",
        style="dim",
    )


def _update(method: Method) -> None:
    probs = "the target's (lossless)" if method.lossless else "changed (lossy); branchwise audit methods measures it"
    parts = {
        "paper": method.paper,
        "drafter": method.draft,
        "tree": method.tree or "the drafter's own",
        "verifier": method.verify,
        "distribution": probs,
        "run it": method.command,
        "prove it": f"branchwise audit methods {method.name}",
    }
    print(f"{method.name}: {method.about}" if method.about else method.name)
    for title, text in parts.items():
        if text:
            print(f"  {title:9} {text}")
