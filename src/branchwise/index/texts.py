"""Where the texts of an index come from: files and folders, read in pieces, so that their size does not matter.

form            files                                       one document
JSON lines      .jsonl                                      a line: its field text, content, prompt, question or turns
text or code    any other that is named, and in folders     a file
                those with an ending that is known
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from io import StringIO
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from branchwise.errors import UsageError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FIELDS = ("text", "content", "prompt", "question", "turns")
"""the fields of a JSON line that may hold its text; the first that exists is taken, and a list of texts is joined by
empty lines"""

_PROSE = "txt md rst tex html jsonl"
_CODE = "py pyi js ts jsx tsx c h cc cpp hpp cu java kt go rs rb php cs swift scala lua r jl sh sql css toml yaml yml"
ENDINGS = frozenset(f".{ending}" for ending in f"{_PROSE} {_CODE}".split())
"""endings of the files that are read in a folder"""

PIECE = 1 << 16
"""how many characters are read at once; a piece ends at the end of a line if it has one"""
BATCH = 1 << 20
"""how many characters are tokenised together"""

Piece = tuple[str, bool]
"""a text, and whether it ends its document"""


def find_files(paths: Iterable[Path]) -> list[Path]:
    """The files to read: those named, and in folders those of known endings; every file once."""
    found: dict[Path, Path] = {}
    for path in paths:
        if path.is_dir():
            inside = sorted(file for file in path.rglob("*") if file.suffix.lower() in ENDINGS and file.is_file())
            visible = [file for file in inside if not any(p.startswith(".") for p in file.relative_to(path).parts)]
            if not visible:
                raise UsageError(f"The folder {path} holds no text that is known by its ending; name files themselves.")
        elif path.is_file():
            visible = [path]
        else:
            raise UsageError(f"There is no file or folder {path}; check the path.")
        for file in visible:
            found.setdefault(file.resolve(), file)
    if not found:
        raise UsageError("There is nothing to read; name files or folders.")
    return list(found.values())


def survey(files: Iterable[Path]) -> int:
    """The number of characters in all files; a file that cannot be read is an error before the work begins."""
    total = sum(len(text) for file in files for text, _ in pieces(file))
    if not total:
        raise UsageError("There is no text in these files; an index needs some.")
    return total


def pieces(path: Path) -> Iterator[Piece]:
    """The documents of a file, cut into pieces that are not much larger than `PIECE`."""
    try:
        with path.open(encoding="utf-8-sig") as file:
            yield from _lines_of_json(file, path) if path.suffix.lower() == ".jsonl" else _cut(file)
    except UnicodeDecodeError:
        raise UsageError(f"{path} is not UTF-8 text; save it as UTF-8, or leave it out.") from None
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}.") from None


def tokenised(files: Iterable[Path], tokenizer: PreTrainedTokenizerBase) -> Iterator[tuple[list[int], bool, int]]:
    """Tokens, whether they end their document, and how many characters they were."""
    call: Any = tokenizer
    for batch in _batches(files):
        found = call([text for text, _ in batch], add_special_tokens=False, return_attention_mask=False, verbose=False)
        for (text, last), tokens in zip(batch, found["input_ids"], strict=True):
            yield tokens, last, len(text)


def _batches(files: Iterable[Path]) -> Iterator[list[Piece]]:
    batch, size = [], 0
    for piece in chain.from_iterable(map(pieces, files)):
        batch.append(piece)
        size += len(piece[0])
        if size >= BATCH:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _cut(file: TextIO) -> Iterator[Piece]:
    rest = ""
    while len(chunk := file.read(PIECE)) == PIECE:
        text = rest + chunk
        # Cut after a line, or before a blank, since tokenizers join a blank to the word after it; else anywhere.
        end = text.rfind("\n") + 1 or max(text.rfind(" "), 0) or len(text)
        yield text[:end], False
        rest = text[end:]
    yield rest + chunk, True


def _lines_of_json(file: TextIO, path: Path) -> Iterator[Piece]:
    for number, line in enumerate(file, 1):
        if line.strip():
            yield from _cut(StringIO(_text_of(line, f"Line {number} of {path}")))


def _text_of(line: str, where: str) -> str:
    try:
        values = json.loads(line)
    except (ValueError, RecursionError):
        raise UsageError(f"{where} is not JSON; every line must be one JSON object.") from None
    fields = [field for field in FIELDS if isinstance(values, dict) and field in values]
    if not fields:
        raise UsageError(f"{where} has no text; it must be a JSON object with one of {', '.join(FIELDS)}.")
    value = values[fields[0]]
    texts = value if isinstance(value, list) else [value]
    if not all(isinstance(text, str) for text in texts):
        raise UsageError(f"{where} has something else than text in {fields[0]!r}.")
    text = "\n\n".join(texts)
    try:
        text.encode()
    except UnicodeEncodeError:
        raise UsageError(f"{where} has half of a surrogate pair in {fields[0]!r}, which no tokenizer reads.") from None
    return text
