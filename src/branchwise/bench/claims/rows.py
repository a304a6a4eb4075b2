"""Records of claims: a line for what one method wrote at one temperature, prompt by prompt.

A file begins with a line {"run": …} that says where the rows below it come from: code, machine, models, prompts. A row
is on the disk before the next row is measured, so a run that was killed continues with the missing rows. Code may
change in between, and parts may be added: a new line {"run": …} then says so. Models, prompts and machine may not.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from branchwise.bench.claims.table import Stand
from branchwise.errors import UsageError

VERSION = 1
SETUP = ("model", "draft", "head", "index", "dtype", "device", "quick", "tokens", "seed", "questions")
"""fields that all rows of a file share"""
TOLD = ("command", "source", "commit", "versions", "index", "parts")
"""fields that may differ between runs, and are then written again"""


class Sample(NamedTuple):
    """A method's text after one prompt."""

    item: str
    category: str
    tokens: int
    steps: int
    drafted: int
    accepted: int
    seconds: float | None = None
    """seconds of a text that was written alone, from the end of its prompt on; None for other texts"""


class Key(NamedTuple):
    method: str
    """the method as `draft/tree/verify`"""
    temperature: float
    alone: bool


@dataclass(frozen=True)
class Row:
    """One method at one temperature on some prompts; a file may hold several for the same key."""

    key: Key
    samples: tuple[Sample, ...]
    draft_passes: float
    """draft passes per step"""
    draft_cost: float | None
    """bytes of a draft pass, divided by those of the target"""
    wall: float = 0.0
    """seconds that the measurement took, loading and prefill included"""

    def line(self) -> str:
        about = self.key._asdict() | {"draft_passes": round(self.draft_passes, 4), "draft_cost": self.draft_cost}
        return json.dumps(
            about | {"wall": round(self.wall, 2), "samples": [list(one) for one in self.samples]},
            separators=(",", ":"),
            ensure_ascii=False,
        )


@dataclass
class Rows:
    """The rows of one setup: one target, its drafters, and one machine."""

    run: dict[str, Any]
    """the run of the latest rows"""
    rows: list[Row] = field(default_factory=list)
    commands: list[str] = field(default_factory=list)
    """the commands that measured the rows, in order"""

    def begin(self, run: dict[str, Any]) -> None:
        """Begin a run; the rows that follow belong to it."""
        self.run = run
        if run["command"] not in self.commands:
            self.commands.append(run["command"])

    @property
    def stand(self) -> Stand:
        named = self.run
        parts = frozenset(named.get("parts") or ())
        return Stand(bool(named["draft"]), bool(named["head"]), bool(named["index"]), parts)

    @property
    def quick(self) -> bool:
        return bool(self.run["quick"])

    @property
    def title(self) -> str:
        """A short name of the setup."""
        drafts = [self.run["draft"], self.run["head"] and "its head"]
        device = str(self.run["device"]).removeprefix("NVIDIA ").replace("cpu", "CPU")
        return f"{self.run['model']} with {next(filter(None, drafts), 'no model')}, {device}"

    def samples(self, key: Key) -> dict[str, Sample]:
        """The samples of a row, by prompt."""
        return {sample.item: sample for row in self.rows if row.key == key for sample in row.samples}

    def cost(self, key: Key) -> float:
        """The cost of a step in target passes, if time is bytes read: the pass itself and the draft passes."""
        rows = [row for row in self.rows if row.key == key]
        weights = [len(row.samples) for row in rows]
        passes = sum(row.draft_passes * size for row, size in zip(rows, weights, strict=True)) / max(1, sum(weights))
        return 1 + passes * next((row.draft_cost for row in rows if row.draft_cost is not None), 0.0)


def read(path: Path) -> Rows:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"The records {path} cannot be read: {error}.") from None
    return parse(text.splitlines(), str(path))


def parse(lines: Iterable[str], name: str) -> Rows:
    found: Rows | None = None
    for number, line in enumerate(lines, 1):
        try:
            values = json.loads(line)
            if "run" in values:
                run = values["run"]
                if run["version"] != VERSION:
                    raise UsageError(f"{name} has version {run['version']}, and this Branchwise reads {VERSION}.")
                found = found or Rows(run)
                found.begin(run)
                continue
            key = Key(values["method"], float(values["temperature"]), bool(values["alone"]))
            samples = tuple(Sample(*sample) for sample in values["samples"])
            assert found is not None
            found.rows.append(Row(key, samples, values["draft_passes"], values["draft_cost"], values["wall"]))
        except (ValueError, KeyError, TypeError, AssertionError):
            raise UsageError(f"{name}, line {number}, is no record of branchwise reproduce.") from None
    if found is None:
        raise UsageError(f"{name} holds no records of branchwise reproduce.")
    return found


class RowFile:
    """A file that grows by whole lines."""

    def __init__(self, path: Path, run: dict[str, Any]) -> None:
        """Open or continue a file. An incomplete last line is dropped; records of another setup are refused."""
        self.path, self.found = path, Rows(run)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            text = path.read_text(encoding="utf-8") if path.exists() else ""
            whole = text[: text.rfind("\n") + 1]
            last = None
            if whole:
                self.found = parse(whole.splitlines(), str(path))
                last = self.found.run
                self._check(last, run)
            self.found.begin(run)
            if whole != text:
                path.write_text(whole, encoding="utf-8")
            self._file = path.open("a", encoding="utf-8")
        except OSError as error:
            raise UsageError(f"The records {path} cannot be written: {error.strerror}.") from None
        if last is None or any(last.get(name) != run.get(name) for name in TOLD):
            self._write(json.dumps({"run": run}, ensure_ascii=False))

    def _check(self, before: dict[str, Any], run: dict[str, Any]) -> None:
        for name in SETUP:
            added = name == "index" and before.get(name) is None  # no earlier row has needed an index
            if before.get(name) != run.get(name) and not added:
                raise UsageError(
                    f"{self.path} holds rows of another setup: its {name} is {before.get(name)!r}, now it is "
                    f"{run.get(name)!r}. Choose another --out, or remove the file."
                )

    def add(self, row: Row) -> None:
        self._write(row.line())
        self.found.rows.append(row)

    def _write(self, line: str) -> None:
        self._file.write(line + "\n")
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()
