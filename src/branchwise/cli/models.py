"""`branchwise models`: the names that --model takes."""

from __future__ import annotations

import json

from branchwise.cli.console import console
from branchwise.cli.options import AsJson


def models(as_json: AsJson = False) -> None:
    """List the model aliases and the models in the cache.

    A model is an alias, a hub id (org/name), a folder with safetensors, or a GGUF file. The cache is
    ~/.cache/branchwise, or the folder that BRANCHWISE_CACHE names.
    """
    from branchwise.models import ALIASES, cache_dir, cached

    here = cached()
    if as_json:
        entries = [{"name": m.name, "path": str(m.path), "bytes": m.bytes, "source": m.source} for m in here]
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
        table = Table("in the cache", "size", "place", box=None, header_style="bold")
        for entry in here:
            table.add_row(entry.name, f"{entry.bytes / 1e6:,.0f} MB", str(entry.path))
        shown.print(table)
    else:
        shown.print(f"The cache {cache_dir()} is empty; the first use of an alias fills it.", style="dim")
