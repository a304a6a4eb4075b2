"""Measures the rows that claims and figures need, one after another on one loaded model.

Tokens a pass do not depend on how many texts run together, so a method writes all prompts as one batch. Texts whose
numbers depend on the clock, or on what a drafter has learned from earlier texts, are written one at a time: all
contestants write a prompt before the next prompt begins, and the order of contestants rotates from prompt to prompt.
The clock of a text starts at the end of its prompt, because texts are short here, and on a CPU reading a long prompt
takes longer than writing its text.
"""

from __future__ import annotations

import gc
import time
import warnings
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from branchwise.bench.claims.rows import Key, Row, RowFile, Sample
from branchwise.bench.claims.table import HELD, PART, Claim, Stand, Sweep, needed
from branchwise.bench.contest import Answer, Asked, Ours
from branchwise.bench.prompts import Item
from branchwise.errors import BranchwiseError, LossyWarning, first_line
from branchwise.llm import LLM
from branchwise.methods import Method, find_any, find_method
from branchwise.progress import Progress, silent

WARM_UP = 16
"""tokens that a contestant of a race writes before its clock starts; on a device a whole text, which records graphs"""
TOLD = (0.9, 0.75, 0.5, 0.25)
"""the run says how long the rest will take when these shares of it are left"""


@dataclass(frozen=True)
class Parts:
    """The parts that the user named to draft with."""

    draft_model: str | None = None
    head: str | None = None
    index: str | None = None
    trained: Mapping[str, str] = field(default_factory=dict)
    """{name: path}, for the words in braces"""

    @property
    def stand(self) -> Stand:
        return Stand(bool(self.draft_model), bool(self.head), bool(self.index), frozenset(self.trained))

    def method(self, spec: str) -> Method:
        """The method of a row, ready to be built."""
        if spec == "plain":
            return find_any(spec)
        filled = PART.sub(lambda found: self.trained[found[1]], spec)
        assert not HELD.search(filled)
        return find_method(filled, self.draft_model, self.index, self.head)


@dataclass
class Measuring:
    """A run that fills a file of rows; rows that the file holds already are not measured again."""

    llm: LLM
    items: Sequence[Item]
    parts: Parts
    file: RowFile
    tokens: int
    seed: int = 0
    alone: int | None = None
    """the most prompts of a race; None: all prompts"""
    seconds: float | None = None
    """no row is begun after this many seconds; None: no limit"""
    progress: Progress = silent
    tell: Callable[[str], None] = field(default=lambda sentence: None)
    """called with sentences about the run, because the progress bar moves only on a terminal"""
    failed: dict[str, str] = field(default_factory=dict)
    """methods that could not be measured, and why"""

    def run(self, claims: Sequence[Claim], sweeps: Sequence[Sweep] = (), *, quick: bool) -> None:
        """Measure what claims need, then what only figures need."""
        stand = self.parts.stand
        wanted = list(dict.fromkeys(of_claims(claims, stand, quick=quick)))
        wanted = [key for key in wanted if self._items(key)]  # rows without any text are not measured
        drawn = [key for key in dict.fromkeys(of_sweeps(sweeps, stand)) if key not in wanted]
        self._begin([*wanted, *drawn])
        temperatures = dict.fromkeys(key.temperature for key in wanted if key.alone)
        done, total = 0, len(wanted) + len(drawn)
        for key in wanted:
            if not key.alone:
                done = self._together(key, done, total)
        for temperature in temperatures:
            keys = [key for key in wanted if key.alone and key.temperature == temperature]
            self._race(temperature, keys, done, total)
            done += len(keys)
        for key in drawn:
            done = self._together(key, done, total)
        self.progress("done", total, total)

    @property
    def over(self) -> bool:
        return self.seconds is not None and time.perf_counter() - self._begun > self.seconds

    def _begin(self, planned: Sequence[Key]) -> None:
        self._planned, self._begun = planned, time.perf_counter()
        missing = [key for key in planned if self._missing(key, self._items(key))]
        self._whole = self._left = self._work()
        raced = sum(key.alone for key in missing)
        if missing:
            self.tell(
                f"Rows to measure: {len(missing)}, of which {len(missing) - raced} on {len(self.items)} texts at once "
                f"and {raced} in turn on {len(self._raced)} texts. Ctrl-C stops, and the same command goes on."
            )

    def _work(self) -> float:
        """How much is left, in rows; a race counts by the texts that it still has to write."""
        whole = [self._items(key) for key in self._planned]
        return sum(len(self._missing(key, items)) / len(items) for key, items in zip(self._planned, whole, strict=True))

    def _tell_pace(self) -> None:
        before, self._left = self._left, self._work()
        shares = [left / self._whole for left in (self._left, before)]
        if self._left and any(shares[0] <= mark < shares[1] for mark in TOLD):
            spent, done = time.perf_counter() - self._begun, self._whole - self._left
            self.tell(
                f"{done:.0f} of {self._whole:.0f} rows after {spent / 60:.1f} minutes; "
                f"about {max(1, round(spent / done * self._left / 60))} more."
            )

    def _items(self, key: Key) -> Sequence[Item]:
        return self._raced if key.alone else self.items

    @property
    def _raced(self) -> Sequence[Item]:
        return spread(self.items)[: self.alone]

    def _together(self, key: Key, done: int, total: int) -> int:
        """Measure a row with all prompts as one batch, or several if slots are few; returns how many rows are done."""
        self.progress(shown(key), done, total)
        missing = self._missing(key, self._items(key))
        slots = self.llm.engine.target.info.slots
        for start in range(0, len(missing), slots):
            if self.over:
                break
            with self._kept(key):
                begin = time.perf_counter()
                contestant = self._contestant(key)
                items = missing[start : start + slots]
                answers = self._write(contestant, items, key.temperature)
                self._add(key, items, answers, time.perf_counter() - begin)
        gc.collect()  # engines and drafters refer to each other, and hold hundreds of megabytes
        return done + 1

    def _race(self, temperature: float, keys: Sequence[Key], done: int, total: int) -> None:
        """Let contestants write every prompt in turn."""
        items = self._raced
        entered: dict[Key, Ours] = {}
        for key in keys:
            if (missing := self._missing(key, items)) and not self.over:
                self.progress(f"{shown(key)}: warming up", done, total)
                with self._kept(key):
                    contestant = self._contestant(key)
                    contestant.warm_up(*self._asked(items[:1], temperature, warm_up=True))
                    # After an interruption, contestants have lost what they learned from earlier texts.
                    for item in items if contestant.learns else ():
                        if item not in missing:
                            self._write(contestant, [item], temperature)
                    entered[key] = contestant
        for number, item in enumerate(items):
            shift = number % max(1, len(entered))
            for key in [*entered][shift:] + [*entered][:shift]:
                if self.over or not self._missing(key, [item]):
                    continue
                self.progress(f"{shown(key)}: {item.id}", done + number * len(keys) // len(items), total)
                with self._kept(key):
                    begin = time.perf_counter()
                    answers = self._write(entered[key], [item], temperature)
                    self._add(key, [item], answers, time.perf_counter() - begin)

    def _missing(self, key: Key, items: Sequence[Item]) -> list[Item]:
        if key.method in self.failed:
            return []
        known = self.file.found.samples(key)
        return [item for item in items if item.id not in known]

    def _contestant(self, key: Key) -> Ours:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", LossyWarning)  # the page says which methods are lossy
            return Ours(self.llm, self.parts.method(key.method))

    def _kept(self, key: Key) -> _Kept:
        """A context in which a failure is noted for its row, while the other rows are still measured."""
        return _Kept(self.failed, key.method)

    def _write(self, contestant: Ours, items: Sequence[Item], temperature: float) -> list[Answer]:
        return contestant.write(*self._asked(items, temperature))

    def _asked(
        self, items: Sequence[Item], temperature: float, *, warm_up: bool = False
    ) -> tuple[list[list[int]], Asked]:
        prompts = [self.llm.encode(item.turns[0], raw=item.raw) for item in items]
        short = warm_up and self.llm.engine.target.device.type == "cpu"
        asked = Asked(
            max_new_tokens=min(WARM_UP, self.tokens) if short else self.tokens,
            temperature=temperature,
            stop_tokens=self.llm.stop_tokens,
            seeds=tuple(zlib.crc32(f"{self.seed}/{item.id}".encode()) for item in items),
        )
        return prompts, asked

    def _add(self, key: Key, items: Sequence[Item], answers: Sequence[Answer], wall: float) -> None:
        samples = tuple(sample_of(item, answer, alone=key.alone) for item, answer in zip(items, answers, strict=True))
        # One draft pass serves all texts of a batch, so the text that ran longest has counted all of them.
        steps = max((sample.steps for sample in samples), default=0)
        passes = (answers[0].draft_passes or 0) / steps if steps else 0.0
        self.file.add(Row(key, samples, passes, answers[0].draft_cost, wall))
        self._tell_pace()


def sample_of(item: Item, answer: Answer, *, alone: bool) -> Sample:
    return Sample(
        item.id,
        item.category,
        len(answer.ids),
        answer.steps or 0,
        answer.drafted or 0,
        answer.accepted or 0,
        round(answer.seconds - answer.phases.get("prefill", 0.0), 6) if alone else None,
    )


class _Kept:
    """Keeps an exception as the reason why a row is missing; only Ctrl-C and the like end the run."""

    def __init__(self, failed: dict[str, str], name: str) -> None:
        self._failed, self._name = failed, name

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        if not isinstance(error, Exception):
            return False
        known = isinstance(error, BranchwiseError)
        self._failed[self._name] = str(error) if known else f"{type(error).__name__}: {first_line(error)}"
        return True


def of_claims(claims: Sequence[Claim], stand: Stand, *, quick: bool) -> Iterator[Key]:
    """The rows that decide the claims; a comparison that needs a missing part is left out."""
    for point in needed(claims, quick=quick):
        specs = stand.specs(point)
        if not isinstance(specs, str):
            yield from (Key(spec, point.temperature, point.alone) for spec in specs)


def of_sweeps(sweeps: Sequence[Sweep], stand: Stand) -> Iterator[Key]:
    for sweep in sweeps:
        for line in sweep.lines:
            for _, method, temperature in line.points:
                if (spec := stand.spec(method)) is not None:
                    yield Key(spec, temperature, False)


def spread(items: Sequence[Item]) -> list[Item]:
    """The items in turn from every category, so that the first ones come from all of them."""
    seen: Counter[str] = Counter()
    turns = []
    for item in items:
        turns.append(seen[item.category])
        seen[item.category] += 1
    return [items[number] for number in sorted(range(len(items)), key=turns.__getitem__)]


def shown(key: Key) -> str:
    return f"{key.method} at {key.temperature:g}"
