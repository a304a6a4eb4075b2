"""`branchwise methods`: the published methods by name."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from branchwise.cli.console import console
from branchwise.cli.options import AsJson

if TYPE_CHECKING:
    from branchwise.methods import Method


def methods(
    name: Annotated[str | None, typer.Argument(help="Describe this method alone.", show_default="all methods")] = None,
    as_json: AsJson = False,
) -> None:
    """List the methods: paper, drafter, tree, verifier, lossless or lossy.

    A lossless method keeps the distribution of the target. Any drafter, tree and verifier that fit together are a
    method too, as in ngram/chain:4/match.

    branchwise methods cascade
    """
    from branchwise.methods import PRESETS, find_any

    chosen = list(PRESETS.values()) if name is None else [find_any(name)]
    if as_json:
        print(json.dumps({"methods": [as_dict(method) for method in chosen]}))
    elif name is None:
        _print_table(chosen)
    else:
        _print_one(chosen[0])


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


def _print_table(methods: list[Method]) -> None:
    from rich.table import Table

    shown = console()
    table = Table(
        "method", "drafter", "tree", "verifier", "distribution", "paper", box=None, header_style="bold", pad_edge=False
    )
    for column in table.columns[:5]:
        column.no_wrap = True
    for method in methods:
        kept = "lossless" if method.lossless else "lossy"
        table.add_row(method.name, method.draft, method.tree or "", method.verify, kept, method.paper)
    shown.print(table)
    shown.print(
        "\nThe drafter `model` is the model that --draft-model names; `retrieval` reads the --index. "
        "branchwise methods NAME describes a method.",
        style="dim",
    )


def _print_one(method: Method) -> None:
    kept = "the target's (lossless)" if method.lossless else "changed (lossy); branchwise audit methods measures it"
    parts = {
        "paper": method.paper,
        "drafter": method.draft,
        "tree": method.tree or "the drafter's own",
        "verifier": method.verify,
        "distribution": kept,
        "run it": method.command,
        "prove it": f"branchwise audit methods {method.name}",
    }
    print(f"{method.name}: {method.about}" if method.about else method.name)
    for title, text in parts.items():
        if text:
            print(f"  {title:9} {text}")
