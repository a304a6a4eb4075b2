"""What a request leaves behind: one JSON line, complete in itself.

A line is written whole or not at all, and is on the disk before the next request starts. After Ctrl-C, a crash or
`kill -9` the same command finds out which requests are done and goes on with the others.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import IO, Any, NamedTuple

from branchwise.errors import UsageError

VERSION = 1
"""of the schema: a reader refuses what it does not know"""

PLAIN, METHOD, PEER = "plain", "method", "peer"
KINDS = (PLAIN, METHOD, PEER)
STATES = ("cold", "warm")


class Key(NamedTuple):
    """Which request a record is of; no two records of a file share it."""

    contestant: str
    item: str
    turn: int
    round: int


@dataclass(frozen=True)
class Difference:
    """Where an answer parts from the baseline's."""

    place: int
    """index of the first token that differs"""
    token: int | None
    """what stands there; None where the answer ended"""
    expected: int | None
    """what the baseline has there"""
    gap: float | None
    """how far the target's logits of the two lie apart there; None where one of the two texts ended"""


@dataclass(frozen=True)
class Record:
    contestant: str
    """as it was asked for: `plain`, a method, a peer"""
    kind: str
    """plain, method or peer"""
    suite: str
    category: str
    item: str
    """id of the prompt, unique within a run"""
    turn: int
    """of a dialogue, from 0"""
    round: int
    """from 0"""
    group: str
    """shared by the requests of one batch in one round for one contestant"""
    state: str
    """cold: the drafter was fresh for the item; warm: it had seen all before"""

    prompt_tokens: int
    tokens: int
    """emitted, counted by ids"""
    ids: tuple[int, ...]
    ids_hash: str
    text: str
    finish_reason: str
    seconds: float
    """wall clock of the whole group, prefill included"""
    counted_by: str = "ids"
    """ids, or for a server that gives none: usage (its own count) or retokenised"""

    # What only speculation of our own engine, or a peer that tells, can say.
    steps: int | None = None
    drafted: int | None = None
    """nodes below the roots"""
    accepted: int | None = None
    drafted_per_depth: tuple[int, ...] = ()
    accepted_per_depth: tuple[int, ...] = ()
    by_source: dict[str, int] = field(default_factory=dict)
    """emitted tokens by who proposed them; `target` are the target's own"""
    target_passes: int | None = None
    """passes that scored trees; prefill is not counted"""
    draft_passes: int | None = None
    """passes of a draft model; 0 where drafting needs none"""
    phases: dict[str, float] = field(default_factory=dict)
    """seconds by phase: prefill, draft, score, verify, commit"""

    equal: bool | None = None
    """whether the ids are the baseline's; None where nothing was compared: the baseline itself, or free sampling"""
    difference: Difference | None = None
    correct: bool | None = None
    """whether the answer is right, where the item has a checker"""

    run: dict[str, Any] = field(default_factory=dict)
    """provenance; see provenance.py"""
    version: int = VERSION

    @property
    def key(self) -> Key:
        return Key(self.contestant, self.item, self.turn, self.round)

    def line(self) -> str:
        return json.dumps(dataclasses.asdict(self), ensure_ascii=False, separators=(",", ":"))


def hash_ids(ids: Iterable[int]) -> str:
    """Sixteen hexadecimal digits that stand for a list of token ids."""
    return hashlib.sha256(",".join(map(str, ids)).encode()).hexdigest()[:16]


FIELDS = {f.name: f for f in dataclasses.fields(Record)}
NEEDED = {n for n, f in FIELDS.items() if f.default is f.default_factory is dataclasses.MISSING}


def parse(line: str, where: str) -> Record:
    """A record from its line; `where` names the place in errors."""
    try:
        values = json.loads(line)
    except ValueError:
        raise UsageError(f"{where} is no JSON; is this a file of branchwise bench?") from None
    if not isinstance(values, dict) or "version" not in values or "contestant" not in values:
        raise UsageError(f"{where} is no record of branchwise bench.")
    if values["version"] != VERSION:
        raise UsageError(
            f"{where} has records of version {values['version']}, and this Branchwise reads version {VERSION}."
        )
    unknown, missing = set(values) - set(FIELDS), NEEDED - set(values)
    if unknown or missing:
        wrong = f"an unknown field {min(unknown)!r}" if unknown else f"no field {min(missing)!r}"
        raise UsageError(f"{where} is a damaged record: it has {wrong}.")
    for name in ("ids", "drafted_per_depth", "accepted_per_depth"):
        values[name] = tuple(values.get(name, ()))
    if values.get("difference") is not None:
        values["difference"] = Difference(**values["difference"])
    return Record(**values)


def read(path: Path) -> list[Record]:
    """All records of a file."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise UsageError(f"The records {path} cannot be read: {error.strerror}.") from None
    except UnicodeDecodeError:
        raise UsageError(f"The records {path} are not UTF-8 text.") from None
    return [parse(line, f"{path}, line {number}") for number, line in enumerate(lines, 1) if line.strip()]


class Ledger:
    """A file of records that grows by whole lines, and is only ever written by one process."""

    def __init__(self, path: Path) -> None:
        """Open a file to go on with; a last line that a crash cut short is dropped."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self._file: IO[bytes] = path.open("a+b")
        _lock(self._file, path)
        self._file.seek(0)
        whole = self._file.read()
        keep = whole.rfind(b"\n") + 1
        if keep < len(whole):
            self._file.truncate(keep)
        lines = whole[:keep].decode().splitlines()
        self.records = [parse(line, f"{path}, line {number}") for number, line in enumerate(lines, 1)]

    @property
    def done(self) -> set[Key]:
        return {record.key for record in self.records}

    def add(self, records: Sequence[Record]) -> None:
        """Write the records of a group, all or none of which count as done."""
        assert not {record.key for record in records} & self.done, "a request was done twice"
        self._file.write("".join(record.line() + "\n" for record in records).encode())
        self._file.flush()
        os.fsync(self._file.fileno())
        self.records += records

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Ledger:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _lock(file: IO[bytes], path: Path) -> None:
    try:
        import fcntl
    except ImportError:  # a system without it has no second terminal to fear
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        raise UsageError(f"Another run is writing {path}; wait for it, or choose another --out.") from None
