"""An index of texts, which finds what follows given tokens wherever they occur.

Manber and Myers, "Suffix Arrays: A New Method for On-Line String Searches" (1993): all suffixes of a text in sorted
order, so that suffixes that begin with the same tokens are neighbours and two bisections find them. He et al., "REST:
Retrieval-Based Speculative Decoding" (arXiv 2311.08252), drafts from such an index.

    DIR/
      index.json          tokenizer, contents, sizes and checksums; written last, so all that it names exists
      NAME.tokens         the texts of a shard, a separator after each, 2 or 4 bytes a token
      NAME.suffixes       where each suffix begins, in their order, 4 bytes each
      NAME.firsts         how many suffixes begin with a smaller token, for every token, 4 bytes each

The arrays are raw, little-endian and mapped, not read: opening costs nothing, and processes share the memory. Shards
bound the memory that building needs; a look-up asks all of them. The separator is a number above all tokens, and no
look-up contains it, so nothing that is found crosses from one document into the next.

Reading needs only this file. Its results are only proposals, so undetected damage cannot change the generated text: it
returns no token outside the vocabulary and reads no place outside an array.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import sys
import zlib
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from branchwise.errors import UsageError
from branchwise.progress import Progress, silent

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FORMAT, VERSION = "branchwise-index", 1
ABOUT = "index.json"
KINDS = ("tokens", "suffixes", "firsts")
"""the kinds of files of a shard"""
ENDS = 4096
"""how many bytes at both ends of a file are checked whenever it is opened"""

HITS = 64
"""the most places that are read to say what comes next"""


@dataclass(frozen=True)
class File:
    """The description of a file of a shard."""

    name: str
    bytes: int
    ends: int
    """CRC-32 of its first and last bytes: cheap, and finds a file that was cut, overwritten or never written"""
    sha256: str


@dataclass(frozen=True)
class Part:
    """The description of a shard."""

    documents: int
    tokens: File
    suffixes: File
    firsts: File

    @property
    def files(self) -> tuple[File, ...]:
        return self.tokens, self.suffixes, self.firsts


@dataclass(frozen=True)
class About:
    """The contents of index.json."""

    model: str
    """the model whose tokenizer cut the texts"""
    fingerprint: str
    """the fingerprint of that tokenizer's vocabulary"""
    vocabulary: int
    """the number of tokens, all of which are below it; it is also the separator"""
    sources: tuple[str, ...]
    """names of the files that were read, without their folders"""
    parts: tuple[Part, ...]

    @property
    def width(self) -> int:
        """How many bytes a token takes."""
        return 2 if self.vocabulary <= 0xFFFF else 4

    @property
    def tokens(self) -> int:
        """How many tokens the index holds, without separators."""
        return sum(part.tokens.bytes // self.width - part.documents for part in self.parts)

    @property
    def documents(self) -> int:
        return sum(part.documents for part in self.parts)

    @property
    def bytes(self) -> int:
        return sum(file.bytes for part in self.parts for file in part.files)

    def as_dict(self) -> dict[str, Any]:
        known = asdict(self)
        totals = {"width": self.width, "tokens": self.tokens, "documents": self.documents, "bytes": self.bytes}
        return {"format": FORMAT, "version": VERSION, **totals, "shards": known.pop("parts"), **known}

    @classmethod
    def from_dict(cls, found: dict[str, Any]) -> About:
        """From what `as_dict` gave; inconsistent values raise a ValueError, LookupError or TypeError."""
        shards = found["shards"]
        parts = tuple(Part(int(shard["documents"]), *(File(**shard[kind]) for kind in KINDS)) for shard in shards)
        sources = tuple(map(str, found["sources"]))
        about = cls(str(found["model"]), str(found["fingerprint"]), int(found["vocabulary"]), sources, parts)
        for part in parts:
            count = part.tokens.bytes // about.width
            sizes = [count * about.width, count * 4, (about.vocabulary + 1) * 4]
            if count < 2 or [file.bytes for file in part.files] != sizes:
                raise ValueError("sizes do not fit together")
            if any(Path(file.name).name != file.name for file in part.files):
                raise ValueError("a file of an index lies in its folder")
        if not parts or (found["tokens"], found["width"]) != (about.tokens, about.width):
            raise ValueError("the totals are wrong")
        return about


def fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """A digest of the vocabulary: equal for tokenizers with the same tokens under the same ids, and for no others."""
    vocabulary = sorted(tokenizer.get_vocab().items(), key=lambda entry: (entry[1], entry[0]))
    return hashlib.sha256(json.dumps(vocabulary).encode()).hexdigest()


def is_index(folder: Path) -> bool:
    return (folder / ABOUT).is_file()


def read_about(folder: Path) -> About:
    """The description of an index; an index that cannot be used is refused."""
    if not folder.is_dir():
        raise UsageError(f"There is no index {folder}; build one with: branchwise index build FILES --out {folder}")
    if not is_index(folder):
        raise UsageError(f"{folder} is no index: there is no {ABOUT} in it; build one with: branchwise index build")
    try:
        found = json.loads((folder / ABOUT).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        damaged(folder, f"{ABOUT} cannot be read")
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise UsageError(f"{folder} is no index: its {ABOUT} is of something else; name another folder.")
    version = found.get("version")
    if isinstance(version, int) and version > VERSION:
        raise UsageError(
            f"The index {folder} has format {version}, and this Branchwise reads formats up to {VERSION}; "
            "update Branchwise, or build the index again."
        )
    try:
        return About.from_dict(found)
    except (ValueError, LookupError, TypeError, AttributeError):
        damaged(folder, f"{ABOUT} does not hold together")


def damaged(folder: Path, why: str) -> NoReturn:
    raise UsageError(f"The index {folder} is damaged: {why}; build it again with: branchwise index build --force")


def ends_of(first: bytes, last: bytes) -> int:
    """The checksum of a file by its first and last `ENDS` bytes."""
    return zlib.crc32(last, zlib.crc32(first))


class Span(NamedTuple):
    """Suffixes of a shard that begin with the same tokens, from `low` on."""

    shard: Shard
    low: int
    high: int
    """the place after the last of them"""


class Place(NamedTuple):
    """Where some tokens stand in an index."""

    spans: tuple[Span, ...]
    """at least one, none of them empty"""
    length: int
    """how many tokens the suffixes of the spans share"""
    token: int | None = None
    """the token after those, if any; the spans are narrowed to it only if its successors are asked for"""


class Seen(NamedTuple):
    """What follows at a place."""

    counts: list[tuple[int, int, Place]]
    """(token, how often it was seen, the place after it), the most frequent first, of equals the smallest token"""
    hits: int
    """how many places were read; at some of them a document may have ended"""
    length: int
    """how many tokens all these places share"""


@dataclass(frozen=True, eq=False)
class Shard:
    """The mapped arrays of a shard."""

    tokens: memoryview[int]
    suffixes: memoryview[int]
    firsts: memoryview[int]

    def find(self, pattern: list[int]) -> Span | None:
        """All suffixes that begin with a pattern, which has at least one token and no separator."""
        tokens, length = self.tokens, len(pattern)

        def beginning(suffix: int) -> list[int]:
            return tokens[suffix : suffix + length].tolist()

        first, last = self.firsts[pattern[0]], self.firsts[pattern[0] + 1]
        low = bisect_left(self.suffixes, pattern, first, last, key=beginning)
        if low == last or beginning(self.suffixes[low]) != pattern:
            return None
        return Span(self, low, bisect_right(self.suffixes, pattern, low, last, key=beginning))

    def narrow(self, span: Span, length: int, token: int) -> Span | None:
        """Those suffixes of a span that go on with `token`, after the `length` tokens that they share."""
        tokens = self.tokens

        def behind(suffix: int) -> int:
            return tokens[suffix + length]

        low = bisect_left(self.suffixes, token, span.low, span.high, key=behind)
        high = bisect_right(self.suffixes, token, low, span.high, key=behind)
        return Span(self, low, high) if low < high else None


class Index:
    """An index that is open for reading."""

    def __init__(self, folder: Path | str) -> None:
        self.folder = Path(folder).expanduser()
        self.about = read_about(self.folder)
        assert sys.byteorder == "little", "the arrays are mapped as they lie on the disk"
        kinds = ("H" if self.about.width == 2 else "I", "I", "I")
        self.shards = [Shard(*map(self._map, part.files, kinds)) for part in self.about.parts]

    def find(self, text: Sequence[int], most: int = 16, least: int = 2) -> Place | None:
        """The places of the longest end of a text that occurs in the index, of at most `most` and at least `least`
        tokens; None if none occurs.

        If an end of the text occurs in a shard, so does every shorter end. So a bisection finds the longest.
        """
        end = self._known(text[-most:])
        shards, found = self.shards, None
        shorter, longest = least - 1, len(end)
        try:
            while shorter < longest:
                length = (shorter + longest + 1) // 2
                spans = tuple(span for shard in shards if (span := shard.find(end[-length:])))
                if spans:
                    shorter, found = length, Place(spans, length)
                    shards = [span.shard for span in spans]
                else:
                    longest = length - 1
        except IndexError:
            damaged(self.folder, "its arrays point outside of themselves")
        return found

    def after(self, place: Place, hits: int = HITS, most: int | None = None) -> Seen:
        """What follows at a place: at most `most` tokens, counted over at most `hits` evenly spaced suffixes."""
        try:
            spans, length = self._narrowed(place)
            total = sum([span.high - span.low for span in spans])
            stride = -(-total // hits)
            skip, tokens = stride // 2, []
            for shard, low, high in spans:
                text = shard.tokens
                seen = [text[suffix + length] for suffix in shard.suffixes[low + skip : high : stride]]
                skip += len(seen) * stride - (high - low)
                tokens += seen
            alike = stride == 1 and tokens.count(tokens[0]) == total
        except IndexError:
            damaged(self.folder, "its arrays point outside of themselves")
        separator = self.about.vocabulary
        if alike:  # and all places were read, which is the most frequent case
            token = tokens[0]
            return Seen([(token, total, Place(spans, length + 1))] if token < separator else [], total, length)
        counts = Counter(tokens)
        best = sorted(sorted(counts), key=counts.__getitem__, reverse=True)[:most]  # of equals the smallest first
        return Seen([(t, counts[t], Place(spans, length, t)) for t in best if t < separator], len(tokens), length)

    def check(self, progress: Progress = silent) -> None:
        """Read all files once, and refuse an index of which a single bit has changed."""
        done = 0
        for part in self.about.parts:
            for file in part.files:
                with (self.folder / file.name).open("rb") as stream:
                    digest = hashlib.file_digest(stream, "sha256")
                done += file.bytes
                progress("checking", done, self.about.bytes)
                if digest.hexdigest() != file.sha256:
                    damaged(self.folder, f"{file.name} is not what was written")

    def _known(self, text: Sequence[int]) -> list[int]:
        """The end of a text after the last number that is no token of the index."""
        end = list(text)
        for back, token in enumerate(reversed(end)):
            if not 0 <= token < self.about.vocabulary:
                return end[len(end) - back :]
        return end

    def _narrowed(self, place: Place) -> tuple[tuple[Span, ...], int]:
        """The spans of a place, and how many tokens they share, the token of the place included."""
        if place.token is None:
            return place.spans, place.length
        narrowed = [span.shard.narrow(span, place.length, place.token) for span in place.spans]
        return tuple([span for span in narrowed if span]), place.length + 1

    def _map(self, file: File, kind: str) -> memoryview[int]:
        try:
            with (self.folder / file.name).open("rb") as stream:
                size = stream.seek(0, 2)
                if size != file.bytes:
                    damaged(self.folder, f"{file.name} has {size} bytes and not {file.bytes}")
                mapped = memoryview(mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ))
        except OSError as error:
            damaged(self.folder, f"{file.name} cannot be read ({error.strerror})")
        if ends_of(bytes(mapped[:ENDS]), bytes(mapped[-ENDS:])) != file.ends:
            damaged(self.folder, f"{file.name} is not what was written")
        return mapped.cast(kind)  # type: ignore[call-overload, no-any-return]
