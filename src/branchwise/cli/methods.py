"""`branchwise methods` and `branchwise models`: the names that --method and --model take."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument

from branchwise.cli.console import console
from branchwise.cli.options import AsJson

if TYPE_CHECKING:
    from branchwise.methods import Method


def methods(
    name: Annotated[str | None, Argument(help="Describe this method alone.", show_default="all methods")] = None,
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
        print(json.dumps({"methods": [_as_dict(method) for method in chosen]}))
    elif name is None:
        _print_table(chosen)
    else:
        _print_one(chosen[0])


def _as_dict(method: Method) -> dict[str, Any]:
    needs = {
        "needs_draft_model": method.needs_draft_model,
        "needs_index": method.needs_index,
        "needs_head": method.needs_head,
    }
    return {**asdict(method), "lossless": method.lossless, **needs, "command": method.command}


def _print_table(methods: list[Method]) -> None:
    from rich.table import Table

    shown = console()
    columns = ("method", "drafter", "tree", "verifier", "distribution", "paper")
    table = Table(*columns, box=None, header_style="bold", pad_edge=False)
    for column in table.columns[:5]:
        column.no_wrap = True
    for method in methods:
        kept = "lossless" if method.lossless else "lossy"
        table.add_row(method.name, method.draft, method.tree or "", method.verify, kept, method.paper)
    shown.print(table)
    shown.print(
        "\nThe drafter `model` is the model that --draft-model names; `retrieval` reads the --index, `head` "
        "runs the trained --head; `auto` chooses among the model, the head and memories. "
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
            print(f"  {title:12} {text}")


def models(as_json: AsJson = False) -> None:
    """List the model aliases and the models in the cache.

    A model is an alias, a hub id (org/name), a folder with safetensors, or a GGUF file. The cache is
    ~/.cache/branchwise, or the folder that BRANCHWISE_CACHE names.
    """
    from branchwise.models import ALIASES, cache_dir, cached

    here = cached()
    if as_json:
        entries = [{**asdict(model), "path": str(model.path)} for model in here]
        known = [{"name": a.name, "description": a.description} for a in ALIASES.values()]
        print(json.dumps({"aliases": known, "cached": entries, "cache": str(cache_dir())}))
        return
    from rich.table import Table

    shown = console()
    table = Table("alias", "model", box=None, header_style="bold")
    for alias in ALIASES.values():
        table.add_row(alias.name, alias.description)
    shown.print(table)
    shown.print("\nAlso: a hub id (org/name), a folder with safetensors, a GGUF file.\n", style="dim")
    if here:
        table = Table("in the cache", "size", "place", "distance from float32", box=None, header_style="bold")
        for entry in here:
            table.add_row(entry.name, f"{entry.bytes / 1e6:,.0f} MB", str(entry.path), entry.distance)
        shown.print(table)
    else:
        shown.print(f"The cache {cache_dir()} is empty; the first use of an alias fills it.", style="dim")
