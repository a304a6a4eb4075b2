"""Records: every request is one complete JSON line.

A line is on the disk before the next request starts. After Ctrl-C, a crash or `kill -9` the same command continues with
the requests that have no record yet.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, NamedTuple

from branchwise.errors import UsageError

VERSION = 1
"""the version of the schema; other versions are refused"""

PLAIN, METHOD, PEER = "plain", "method", "peer"

STATES = ("cold", "warm")


class Key(NamedTuple):
    """Identifies a request; unique within a file."""

    contestant: str
    item: str
    turn: int
    round: int


@dataclass(frozen=True)
class Difference:
    """The first difference between an answer and the baseline's."""

    place: int
    """index of the first token that differs"""
    token: int | None
    """the token at that place; None if the answer ends there"""
    expected: int | None
    """the baseline's token at that place; None if the baseline ends there"""
    gap: float | None
    """the difference between the target's logits of the two tokens; None if one of the two texts ends there"""


@dataclass(frozen=True)
class Record:
    contestant: str
    """the name as given on the command line: `plain`, a method or a peer"""
    kind: str
    suite: str
    category: str
    item: str
    """the id of the prompt, unique within a run"""
    turn: int
    round: int
    group: str
    """the requests of one batch, in one round, for one contestant, share this name"""
    state: str
    """cold: the drafter was new for the item; warm: it had learned from the items before"""

    prompt_tokens: int
    prompt_hash: str
    """a hash of the prompt's ids, which in a dialogue include the contestant's earlier answers"""
    tokens: int
    """the number of emitted tokens"""
    ids: tuple[int, ...]
    ids_hash: str
    text: str
    finish_reason: str
    seconds: float
    """seconds of wall clock of the whole group, prefill included"""
    counted_by: str = "ids"
    """how `tokens` was counted: ids, or for a server that reports none usage (its own count) or retokenised"""

    # Known for our own engine, and for peers that report them
    steps: int | None = None
    drafted: int | None = None
    """how many nodes were drafted below the roots"""
    accepted: int | None = None
    drafted_per_depth: tuple[int, ...] = ()
    accepted_per_depth: tuple[int, ...] = ()
    tried_by_prob: tuple[int, ...] = ()
    """how many first draws below accepted nodes had a draft probability in each of the equal bins from 0 to 1"""
    accepted_by_prob: tuple[int, ...] = ()
    """how many of these were accepted"""
    by_source: dict[str, int] = field(default_factory=dict)
    """emitted tokens by drafter; `target` are the target's own"""
    target_passes: int | None = None
    """how many passes scored trees; prefill is not counted, except for peers whose first pass is both"""
    draft_passes: int | None = None
    """how many passes a draft model ran; 0 if the drafter has none"""
    draft_cost: float | None = None
    """bytes of the draft model, divided by those of the target"""
    target_cost: float | None = None
    """bytes that a pass over its trees reads over those of a pass over one token: above 1 for a mixture of experts"""
    phases: dict[str, float] = field(default_factory=dict)
    """seconds by phase: prefill, draft, score, verify, commit"""

    equal: bool | None = None
    """whether the ids are the baseline's; None if not compared: the baseline itself, or free sampling"""
    difference: Difference | None = None
    correct: bool | None = None
    """whether the answer is right; None if the item has no checker"""
    followed: bool | None = None
    """whether the answer has the form that was asked for; None if the item asks for none"""
    guessed: bool | None = None
    """whether the answer is given without any reasoning before it"""

    run: dict[str, Any] = field(default_factory=dict)
    """provenance; see provenance.py"""
    version: int = VERSION

    @property
    def key(self) -> Key:
        return Key(self.contestant, self.item, self.turn, self.round)

    def line(self) -> str:
        return json.dumps(dataclasses.asdict(self), ensure_ascii=False, separators=(",", ":"))


@dataclass(frozen=True)
class Comparison:
    """An answer compared with the baseline's. It is a separate line, since either of the two may be written first."""

    key: Key
    equal: bool
    difference: Difference | None

    def line(self) -> str:
        found = dataclasses.asdict(self)
        return json.dumps({"version": VERSION, "compares": found.pop("key"), **found}, separators=(",", ":"))


def hash_ids(ids: Iterable[int]) -> str:
    """Sixteen hexadecimal digits of a hash of token ids."""
    return hashlib.sha256(",".join(map(str, ids)).encode()).hexdigest()[:16]


def parse(line: str, where: str) -> Record | Comparison:
    """The record or comparison of a line; `where` names the line in errors."""
    try:
        values = json.loads(line)
    except ValueError:
        raise UsageError(f"{where} is no JSON; is this a file of branchwise bench?") from None
    if not isinstance(values, dict) or "version" not in values or not values.keys() & {"contestant", "compares"}:
        raise UsageError(f"{where} is no record of branchwise bench.")
    if values["version"] != VERSION:
        raise UsageError(f"{where} has version {values['version']}, and this Branchwise reads version {VERSION}.")
    try:
        if values.get("difference") is not None:
            values["difference"] = Difference(**values["difference"])
        if "compares" in values:
            return Comparison(Key(*values["compares"]), values["equal"], values["difference"])
        for name in ("ids", "drafted_per_depth", "accepted_per_depth", "tried_by_prob", "accepted_by_prob"):
            values[name] = tuple(values.get(name, ()))
        return Record(**values)
    except (TypeError, KeyError) as error:
        raise UsageError(f"{where} is a damaged record: {error}.") from None


def parse_lines(text: str, name: str) -> list[Record]:
    """The records of a file, each with the result of its comparison."""
    records: dict[Key, Record] = {}
    for number, line in enumerate(text.removesuffix("\n").split("\n") if text else [], 1):  # other ends are text
        where = f"{name}, line {number}"
        found = parse(line, where)
        if isinstance(found, Comparison):
            if found.key not in records:
                raise UsageError(f"{where} compares an answer that the file does not hold.")
            records[found.key] = compared(records[found.key], found)
        elif found.key in records:
            raise UsageError(f"{where} is the second record of one request: {', '.join(map(str, found.key))}.")
        else:
            records[found.key] = found
    return list(records.values())


def compared(record: Record, found: Comparison) -> Record:
    return dataclasses.replace(record, equal=found.equal, difference=found.difference)


def read(path: Path) -> list[Record]:
    """All records of a file."""
    try:
        return parse_lines(path.read_text(encoding="utf-8"), str(path))
    except OSError as error:
        raise UsageError(f"The records {path} cannot be read: {error.strerror}.") from None
    except UnicodeDecodeError:
        raise UsageError(f"The records {path} are not UTF-8 text.") from None


STARTS = (b'{"contestant":', b'{"version":')
"""the first bytes of the lines of a record and of a comparison"""


class Ledger:
    """A file of records that grows by whole lines and is written by one process at a time."""

    def __init__(self, path: Path) -> None:
        """Open a new file, or continue an existing one; an incomplete last line is dropped."""
        self.path = path
        self._new = not path.exists()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if not self._new and not path.is_file():
                raise UsageError(f"{path} is no file that records can be written to; choose another --out.")
            self._file: IO[bytes] = path.open("a+b")
        except OSError as error:
            raise UsageError(f"The records {path} cannot be written: {error.strerror}.") from None
        try:
            _lock(self._file, path)
            self._records = {record.key: record for record in self._whole_lines()}
        except BaseException:
            self._file.close()
            raise

    def _whole_lines(self) -> list[Record]:
        """The records of the file. Only an incomplete last line of a ledger is cut off, never text of another file."""
        self._file.seek(0)
        text = self._file.read()
        keep = text.rfind(b"\n") + 1
        try:
            records = parse_lines(text[:keep].decode(), str(self.path))
        except UnicodeDecodeError:
            raise UsageError(f"{self.path} is not UTF-8 text; choose another --out.") from None
        torn = text[keep:]
        if torn and not any(start.startswith(torn) or torn.startswith(start) for start in STARTS):
            raise UsageError(f"{self.path} is no file of branchwise bench; choose another --out.")
        if torn:
            self._file.truncate(keep)
        return records

    @property
    def records(self) -> list[Record]:
        return list(self._records.values())

    def get(self, key: Key) -> Record | None:
        return self._records.get(key)

    def add(self, record: Record) -> None:
        assert record.key not in self._records, "a request was done twice"
        self._write(record.line())
        self._records[record.key] = record

    def add_comparison(self, found: Comparison) -> None:
        self._write(found.line())
        self._records[found.key] = compared(self._records[found.key], found)

    def _write(self, line: str) -> None:
        """Write a whole line, and return after it is on the disk."""
        self._file.write(line.encode() + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()
        if self._new and not self._records:  # a run that was refused leaves no file
            self.path.unlink(missing_ok=True)

    def __enter__(self) -> Ledger:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _lock(file: IO[bytes], path: Path) -> None:
    try:
        import fcntl
    except ImportError:  # not a POSIX system
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        raise UsageError(f"Another run is writing {path}; wait for it, or choose another --out.") from None
