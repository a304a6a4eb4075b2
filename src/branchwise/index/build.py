"""Writing an index: texts become shards, and a shard a suffix array.

The sorting is that of libdivsufsort (Yuta Mori), through the package pydivsufsort. It sorts bytes, so every token is
written with the same number of bytes, the most significant first. Then strings of tokens have the same order as the
strings of their bytes: the first byte in which two of them differ belongs to the first token in which they differ, and
decides both orders. So the suffixes that begin where a token does are in the order of the tokens; all others are
dropped. Without that package numpy sorts them, which takes several times as long.

Existing files are never written to. New files have new names, index.json is replaced when all of them are on the disk,
and only then files that the new index does not name are removed. Whatever interrupts this, the folder holds the old
index or the new one. Files of a killed process are removed by the next process that writes.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import secrets
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from branchwise.errors import UsageError
from branchwise.index import ABOUT, ENDS, About, File, Index, Part, damaged, ends_of, fingerprint, is_index, read_about
from branchwise.index.texts import find_files, survey, tokenised
from branchwise.progress import Progress, silent

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from transformers import PreTrainedTokenizerBase

SHARD = 1 << 24
"""the most tokens of a shard, separators included; building takes about 20 bytes for each, one shard at a time"""

_OURS = re.compile(r"[0-9a-f]{16}\.(tokens|suffixes|firsts)|index\.json\.[0-9a-f]{16}")
_AT_ONCE = 1 << 20
_MOST = 1 << 24
"""how many numbers three bytes can hold"""


def build_index(
    folder: Path,
    paths: Iterable[Path],
    tokenizer: PreTrainedTokenizerBase,
    *,
    model: str,
    force: bool = False,
    progress: Progress = silent,
) -> About:
    """Build an index of these texts in an empty or new folder; with `force`, replace an index that is in it."""
    require_free(folder, force)
    about = About(model, fingerprint(tokenizer), max(tokenizer.get_vocab().values()) + 1, (), ())
    return _write_texts(folder, about, paths, tokenizer, progress)


def add_texts(
    folder: Path, paths: Iterable[Path], tokenizer: PreTrainedTokenizerBase, *, progress: Progress = silent
) -> About:
    """Add texts to an index; the result is what building it from all texts would have given."""
    about = Index(folder).about
    if fingerprint(tokenizer) != about.fingerprint:
        raise UsageError(
            f"The index {folder} was built with the tokenizer of {about.model}, and this is another; "
            "name the same model, or build a second index."
        )
    return _write_texts(folder, about, paths, tokenizer, progress)


def _write_texts(
    folder: Path, about: About, paths: Iterable[Path], tokenizer: PreTrainedTokenizerBase, progress: Progress
) -> About:
    files = find_files(paths)
    total = survey(files)
    done = 0
    with Writer(folder, about, progress=progress) as writer:
        for tokens, last, characters in tokenised(files, tokenizer):
            writer.extend(tokens)
            if last:
                writer.end_document()
            done += characters
            progress("tokenising", done, total)
        return writer.finish([file.name for file in files])


def require_free(folder: Path, force: bool) -> None:
    """Refuse a folder that holds anything but an index, or an index without `force`."""
    if not folder.exists():
        return
    if not folder.is_dir():
        raise UsageError(f"{folder} is a file; name a folder for the index.")
    foreign = [file for file in folder.iterdir() if not _OURS.fullmatch(file.name) and file.name != ABOUT]
    if is_index(folder):
        if foreign:
            read_about(folder)  # only a folder that is surely an index is replaced, even a damaged one
        if not force:
            raise UsageError(f"{folder} holds an index; use branchwise index add, or replace it with --force.")
    elif foreign:
        raise UsageError(f"{folder} is there and is no index; name another folder.")


class Writer:
    """Takes tokens and writes shards; the index exists only after `finish`.

    When texts are added to an index, its last shard is taken back first if it has room. So the shards are those of one
    long build, however often texts were added.
    """

    def __init__(self, folder: Path, about: About, *, shard: int = SHARD, progress: Progress = silent) -> None:
        if about.vocabulary >= _MOST:
            raise UsageError(f"A vocabulary of {about.vocabulary} tokens is too large for an index.")
        assert shard >= 2
        self.folder, self.about, self.progress = folder, about, progress
        self._parts = list(about.parts)
        self._buffer: NDArray[Any] = np.empty(shard, dtype=f"<u{about.width}")
        self._filled = 0
        self._leaving = contextlib.ExitStack()

    def __enter__(self) -> Writer:
        with contextlib.ExitStack() as leaving:
            made = not self.folder.exists()
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise UsageError(f"The folder {self.folder} cannot be made: {error.strerror}.") from None
            if made:
                leaving.callback(_remove_empty, self.folder)
            leaving.enter_context(_alone(self.folder))
            if self.about.parts and read_about(self.folder) != self.about:
                raise UsageError(f"The index {self.folder} was changed by another process; run this again.")
            leaving.callback(self._sweep)
            self._resume()
            self._leaving = leaving.pop_all()
        return self

    def __exit__(self, *failure: object) -> None:
        self._leaving.close()

    def extend(self, tokens: Sequence[int] | NDArray[Any]) -> None:
        """Add tokens to the current document."""
        taken = np.asarray(tokens)
        assert not len(taken) or (taken.min() >= 0 and taken.max() < self.about.vocabulary)
        while len(taken):
            room = len(self._buffer) - 1 - self._filled  # the last place is kept for a separator
            if room <= 0:
                self._flush()
                continue
            self._buffer[self._filled : self._filled + min(room, len(taken))] = taken[:room]
            self._filled += min(room, len(taken))
            taken = taken[room:]

    def end_document(self) -> None:
        """End the current document; a document without tokens does not count."""
        if self._filled and self._buffer[self._filled - 1] != self.about.vocabulary:
            self._buffer[self._filled] = self.about.vocabulary
            self._filled += 1

    def finish(self, sources: Iterable[str]) -> About:
        """Make the written shards the index."""
        self._flush()
        if not self._parts:
            raise UsageError("There is no text in these files; an index needs some.")
        names = tuple(dict.fromkeys((*self.about.sources, *sources)))
        about = replace(self.about, sources=names, parts=tuple(self._parts))
        place = self.folder / f"{ABOUT}.{secrets.token_hex(8)}"
        with _writing(place) as file:
            file.write(json.dumps(about.as_dict(), indent=1).encode() + b"\n")
        _sync_folder(self.folder)
        os.replace(place, self.folder / ABOUT)  # from here on readers see the new index
        _sync_folder(self.folder)
        return about

    def _resume(self) -> None:
        """Take back the last shard of the index if it has room."""
        last = self._parts[-1].tokens if self._parts else None
        if last and (count := last.bytes // self.about.width) < len(self._buffer):
            raw = (self.folder / last.name).read_bytes()
            if hashlib.sha256(raw).hexdigest() != last.sha256:
                damaged(self.folder, f"{last.name} is not what was written")
            self._buffer[:count] = np.frombuffer(raw, dtype=self._buffer.dtype)
            self._filled = count
            self._parts.pop()

    def _flush(self) -> None:
        if not self._filled:
            return
        self.end_document()
        tokens = self._buffer[: self._filled]
        name = secrets.token_hex(8)
        self.progress(f"sorting shard {len(self._parts) + 1}", 0, 0)
        self._parts.append(
            Part(
                documents=int((tokens == self.about.vocabulary).sum()),
                tokens=self._write(f"{name}.tokens", _chunks(tokens)),
                suffixes=self._write(f"{name}.suffixes", _sorted_suffixes(tokens, self.about.vocabulary)),
                firsts=self._write(f"{name}.firsts", [_firsts(tokens, self.about.vocabulary)]),
            )
        )
        self._filled = 0

    def _write(self, name: str, chunks: Iterable[NDArray[Any]]) -> File:
        digest, size, first, last = hashlib.sha256(), 0, b"", b""
        with _writing(self.folder / name) as file:
            for chunk in chunks:
                raw = chunk.tobytes()
                file.write(raw)
                digest.update(raw)
                size += len(raw)
                first, last = (first + raw[:ENDS])[:ENDS], (last + raw[-ENDS:])[-ENDS:]
        return File(name, size, ends_of(first, last), digest.hexdigest())

    def _sweep(self) -> None:
        """Remove files of ours that the current index does not name."""
        named = set()
        if is_index(self.folder):
            try:
                named = {file.name for part in read_about(self.folder).parts for file in part.files}
            except UsageError:  # a damaged index is about to be replaced, until then its files stay
                return
        for file in list(self.folder.iterdir()):
            if _OURS.fullmatch(file.name) and file.name not in named:
                file.unlink(missing_ok=True)


def _sorted_suffixes(tokens: NDArray[Any], vocabulary: int) -> Iterator[NDArray[Any]]:
    """The places of all suffixes, in the order of the suffixes."""
    try:
        from pydivsufsort import divsufsort  # type: ignore[import-untyped]
    except ModuleNotFoundError:
        yield from _chunks(_doubled(tokens).astype("<u4"))
        return
    width = max(1, (vocabulary.bit_length() + 7) // 8)
    spelled = np.empty((len(tokens), width), dtype=np.uint8)
    for place in range(width):
        spelled[:, place] = tokens >> (8 * (width - 1 - place)) & 0xFF
    order: NDArray[np.int32] = divsufsort(spelled.reshape(-1))
    for part in _chunks(order):
        yield (part[part % width == 0] // width).astype("<u4")


def _doubled(tokens: NDArray[Any]) -> NDArray[np.int64]:
    """The same order by prefix doubling (Manber and Myers, 1990): suffixes sorted by their first k tokens are sorted by
    2k tokens with one more pass. So it takes as many passes as the longest repetition has binary digits."""
    ranks = np.unique(tokens, return_inverse=True)[1].astype(np.int64)
    known = 1
    while True:
        behind = np.zeros(len(ranks), dtype=np.int64)  # the end sorts before every token
        behind[:-known] = ranks[known:] + 1
        keys = ranks * (len(ranks) + 1) + behind
        order = np.argsort(keys, kind="stable")
        ranked = keys[order]
        ranks[order] = np.concatenate([[0], np.cumsum(ranked[1:] != ranked[:-1])])
        if known >= len(ranks) or ranks[order[-1]] == len(ranks) - 1:
            return order
        known *= 2


def _firsts(tokens: NDArray[Any], vocabulary: int) -> NDArray[Any]:
    """(vocabulary + 1,): for each token, how many tokens of the shard are smaller; the separator is the last."""
    counts = np.zeros(vocabulary + 1, dtype=np.int64)
    for part in _chunks(tokens):
        counts += np.bincount(part, minlength=vocabulary + 1)
    return (np.cumsum(counts) - counts).astype("<u4")


def _chunks(array: NDArray[Any]) -> Iterator[NDArray[Any]]:
    return (array[start : start + _AT_ONCE] for start in range(0, len(array), _AT_ONCE))


@contextlib.contextmanager
def _writing(place: Path) -> Iterator[Any]:
    """Write a new file; it is on the disk when the context ends."""
    try:
        with place.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise UsageError(f"The index cannot be written to {place.parent}: {error.strerror}.") from error


def _sync_folder(folder: Path) -> None:
    """Write the names of a folder's files to the disk too, if the system can."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _remove_empty(folder: Path) -> None:
    with contextlib.suppress(OSError):
        folder.rmdir()


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Refuse to write while another process does; the lock ends with the process that holds it."""
    try:
        import fcntl
    except ImportError:  # the system has no such locks
        yield
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError:
        raise UsageError(f"The index {folder} is being written by another process; wait until it is done.") from None
    finally:
        os.close(handle)
