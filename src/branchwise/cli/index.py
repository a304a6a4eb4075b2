"""`branchwise index`: a corpus as an index for drafting by retrieval, or as a table of tri-grams."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from branchwise.cli import group
from branchwise.cli.options import AsJson, Model, TrustRemoteCode, at_least, check_out
from branchwise.models import DEFAULT_MODEL
from branchwise.progress import showing

if TYPE_CHECKING:
    from branchwise.index import About

app = group("Index texts for drafting by retrieval, or count their tri-grams.")

Files = Annotated[
    list[Path], Argument(help="Text, code, JSON lines with text or prompt, or folders of these.", show_default=False)
]
Folder = Annotated[Path, Argument(metavar="DIR", help="The index.", show_default=False)]


@app.command()
def build(
    files: Files,
    out: Annotated[Path, Option(help="The folder to write.", show_default=False)],
    model: Model = DEFAULT_MODEL,
    force: Annotated[bool, Option("--force", help="Replace an existing index.")] = False,
    trust_remote_code: TrustRemoteCode = False,
    as_json: AsJson = False,
) -> None:
    """Index texts for the tokenizer of a model.

    The folder then names a drafter: --draft retrieval:DIR

    branchwise index build docs src --model smollm2 --out my-index
    """
    from branchwise.index.build import build_index, require_free
    from branchwise.models import load_tokenizer

    require_free(out, force)
    tokenizer = load_tokenizer(model, trust_remote_code=trust_remote_code)
    with showing() as progress:
        about = build_index(out, files, tokenizer, model=model, force=force, progress=progress)
    _print(about, out, as_json)


@app.command()
def add(
    folder: Folder,
    files: Files,
    model: Annotated[
        str | None, Option("--model", "-m", help="Model with its tokenizer.", show_default="the one it was built for")
    ] = None,
    trust_remote_code: TrustRemoteCode = False,
    as_json: AsJson = False,
) -> None:
    """Add texts to an index; the result is the index of all texts together.

    branchwise index add my-index more.txt
    """
    from branchwise.index import read_about
    from branchwise.index.build import add_texts
    from branchwise.models import load_tokenizer

    tokenizer = load_tokenizer(model or read_about(folder).model, trust_remote_code=trust_remote_code)
    with showing() as progress:
        about = add_texts(folder, files, tokenizer, progress=progress)
    _print(about, folder, as_json)


@app.command()
def info(
    folder: Folder,
    check: Annotated[bool, Option("--check", help="Read all files and compare their checksums.")] = False,
    as_json: AsJson = False,
) -> None:
    """Print what an index holds.

    branchwise index info my-index --check
    """
    from branchwise.index import Index

    index = Index(folder)
    if check:
        with showing() as progress:
            index.check(progress)
    _print(index.about, folder, as_json)


@app.command()
def trigrams(
    files: Files,
    out: Annotated[Path, Option(help="The file to write.", show_default=False)],
    model: Model = DEFAULT_MODEL,
    size: Annotated[int, Option(help="Pairs of tokens that are kept, the most frequent.")] = 2_000_000,
    successors: Annotated[int, Option(help="Tokens after each pair that are kept, the most frequent.")] = 12,
    trust_remote_code: TrustRemoteCode = False,
    as_json: AsJson = False,
) -> None:
    """Count which tokens follow which two others, for the tokenizer of a model.

    The file then names a drafter, that of ADED: --draft trigram:table=FILE --tree puct:24

    branchwise index trigrams docs src --model smollm2 --out trigrams.safetensors
    """
    from branchwise.draft.lookup.table import Counting, TrigramTable
    from branchwise.index import fingerprint
    from branchwise.index.texts import find_files, survey, tokenised
    from branchwise.models import load_tokenizer

    at_least(1, size=size, successors=successors)
    check_out(out, TrigramTable.load, "tri-gram table")
    found = find_files(files)
    total, done = survey(found), 0
    tokenizer = load_tokenizer(model, trust_remote_code=trust_remote_code)
    counting = Counting(max(tokenizer.get_vocab().values()) + 1)
    with showing() as progress:
        for tokens, last, characters in tokenised(found, tokenizer):
            counting.extend(tokens)
            if last:
                counting.end_document()
            done += characters
            progress("counting", done, total)
    table = counting.table(model, fingerprint(tokenizer), successors, size)
    table.write(out)
    if as_json:
        print(json.dumps({"file": str(out), "tokens": table.read, "pairs": len(table), "trigrams": len(table.tokens)}))
        return
    print(
        f"{len(table.tokens):,} tri-grams of {len(table):,} pairs, counted in {table.read:,} tokens, "
        f"{out.stat().st_size / 1e6:,.1f} MB, for the tokenizer of {model}\n"
        f"Use it with --draft trigram:table={out} --tree puct:24"
    )


def _print(about: About, folder: Path, as_json: bool) -> None:
    if as_json:
        print(json.dumps({"index": str(folder), **about.as_dict()}))
        return
    first, more = about.sources[:5], len(about.sources) - 5
    print(
        f"{about.tokens:,} tokens of {about.documents:,} documents in {len(about.parts)} "
        f"{'shard' if len(about.parts) == 1 else 'shards'}, {about.bytes / 1e6:,.1f} MB, for the tokenizer of "
        f"{about.model}\nfrom {', '.join(first)}{f' and {more} more' if more > 0 else ''}\n"
        f"Use it with --draft retrieval:{folder}"
    )
