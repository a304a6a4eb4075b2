"""The claims as data: for each claim the method, the paper's statement, and the comparisons that decide it.

A point is one comparison: a method against the baseline that the claim names, at one temperature, both written as
`draft/tree/verify` or as the name of a preset. Words in braces stand for trained parts that the user names, as in
`model:{student}`. Without a draft model, the trained head of the target drafts in its place. If a method needs
something of a draft model that no head can do, the target itself drafts, with noise on its logits.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from branchwise.bench.prompts import PACKAGE_DATA
from branchwise.errors import UnknownName
from branchwise.methods import FUSED, HEAD, MODEL, PLAIN, Method, find_any, members_of
from branchwise.registry import check_known, split_spec

TOKENS, SPEED, MBSU, ACCEPTANCE = "tokens", "speed", "mbsu", "acceptance"
MEASURES = {
    TOKENS: "tokens a pass",
    SPEED: "tokens a second",
    MBSU: "memory-bound speed-up",
    ACCEPTANCE: "share of drafted nodes that are kept",
}
"""the measures that a ratio can be about; for all of them more than 1 is better"""
NOISY = "disturbed"
"""the drafter that stands in for a draft model if a head cannot"""
OWN = "our own"


@dataclass(frozen=True)
class Point:
    """One comparison."""

    ours: str
    baseline: str
    label: str = ""
    temperature: float = 0.0
    measure: str = TOKENS
    claimed: float | None = None
    """the ratio that the paper reports; None if it only claims a gain"""
    bound: float = 1.0
    """the value that the ratio must exceed for the claim to hold"""
    alone: bool = False
    """whether texts are written one at a time, contestants in turn: for speed, and for drafters that learn"""
    category: str = ""
    """the category of the prompts that count; all by default"""
    beside: bool = False
    """whether the point is only shown, as no part of the paper's claim"""
    quick: bool = True
    """whether a quick run measures the point"""


@dataclass(frozen=True)
class Claim:
    name: str
    method: str
    """a name of `branchwise methods`, or a title"""
    paper: str
    """arXiv id"""
    says: str
    """the claim, with its number"""
    setting: str
    """the setting in which the paper measured it"""
    points: tuple[Point, ...]
    why: str = ""
    """an explanation in one sentence, by a person who has read the numbers"""


@dataclass(frozen=True)
class Line:
    """One line of a figure: methods at places along an axis."""

    label: str
    points: tuple[tuple[float, str, float], ...]
    """place on the axis, method, temperature"""


@dataclass(frozen=True)
class Sweep:
    """A figure: tokens a pass against the length of drafts, the nodes of trees or the temperature."""

    name: str
    title: str
    axis: str
    lines: tuple[Line, ...]


@cache
def claims() -> tuple[Claim, ...]:
    return tuple(_claim(values) for values in _read()["claim"])


@cache
def surprises() -> tuple[tuple[str, str], ...]:
    """The claims whose verdicts surprised most, and the reasons for these verdicts."""
    return tuple((one["claim"], one["says"]) for one in _read()["surprise"])


@cache
def sweeps() -> tuple[Sweep, ...]:
    return tuple(
        Sweep(
            values["name"],
            values["title"],
            values["axis"],
            tuple(Line(line["label"], tuple(map(tuple, line["points"]))) for line in values["line"]),
        )
        for values in _read()["sweep"]
    )


def _read() -> dict[str, Any]:
    return tomllib.loads((PACKAGE_DATA / "claims.toml").read_text(encoding="utf-8"))


def _claim(values: dict[str, Any]) -> Claim:
    """A claim of the file. Values that all its points share are written in the claim itself."""
    points = values.pop("point")
    shared = {
        name: values.pop(name) for name in ("measure", "claimed", "bound", "alone", "temperature") & values.keys()
    }
    made = [Point(**(shared | point)) for point in points]
    return Claim(**values, points=tuple(replace(one, alone=one.alone or one.measure == SPEED) for one in made))


def chosen(names: Sequence[str]) -> list[Claim]:
    """The claims with these names or methods; all if no name is given."""
    known = [*dict.fromkeys(word for claim in claims() for word in (claim.name, claim.method))]
    for name in names:
        check_known("claim", name, known)
    return [claim for claim in claims() if not names or claim.name in names or claim.method in names]


# ---- what drafts -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Stand:
    """The drafters that are available."""

    model: bool
    head: bool
    index: bool = False
    parts: frozenset[str] = frozenset()
    """trained parts that the user named"""

    def specs(self, point: Point) -> tuple[str, str] | str:
        """The two methods of a point as `draft/tree/verify`, with the available drafters; or why they cannot run."""
        found = []
        for spec in (point.ours, point.baseline):
            try:
                found.append(find_any(PART.sub(_held, spec)))
            except UnknownName:
                return f"there is no method `{spec}` yet"
        try:
            return self._specs(found)
        except LookupError as error:
            return str(error.args[0])

    def spec(self, method: str) -> str | None:
        """A method as `specs` gives it for a point; None if it cannot run here."""
        found = self.specs(Point(method, "plain"))
        return None if isinstance(found, str) else found[0]

    def _specs(self, methods: Sequence[Method]) -> tuple[str, str]:
        asked_for = sorted({part for method in methods for part in HELD.findall(method.draft)})
        if missing := [part for part in asked_for if part not in self.parts]:
            raise LookupError(f"needs {' and '.join(f'--part {part}=PATH' for part in missing)}")
        drafts = [method.blanks for method in methods]
        if not self.index and any("retrieval" in blanks for blanks in drafts):
            raise LookupError("needs --index DIR")
        if not self.head and any(HEAD in blanks for blanks in drafts):
            raise LookupError("needs --head FILE")
        stand = MODEL
        if not self.model and any(MODEL in blanks for blanks in drafts):
            asked = {option for method in methods for spec in _models(method) for option in split_spec(spec)[2]}
            stand = NOISY if asked or not self.head else HEAD
            if stand == NOISY and (asked - {"recall"} or any(FUSED in method.draft for method in methods)):
                raise LookupError("needs --draft-model ID")
        ours, baseline = (spec_of(method, stand) for method in methods)
        return ours, baseline


def _models(method: Method) -> list[str]:
    """The specs of draft models whose model the user has to name."""
    named = [(spec, split_spec(spec)) for spec in members_of(method.draft)]
    return [spec for spec, (name, positional, _) in named if name == MODEL and not positional]


def spec_of(method: Method, stand: str = MODEL) -> str:
    """A method as `draft/tree/verify`, with the drafter `stand` in place of a draft model that is not named."""
    if method == PLAIN:
        return PLAIN.name
    draft = method.draft
    if stand != MODEL and MODEL in method.blanks:
        draft = re.sub(rf"(?<![\w-]){MODEL}(?![\w-])", stand, draft)
    return "/".join((HELD.sub(r"{\1}", draft), method.tree or "", method.verify)).rstrip("/")


PART = re.compile(r"\{([\w-]+)\}")
HELD = re.compile(r"<([\w-]+)>")
"""a part in a spec that is being parsed; its braces would be refused there"""


def _held(found: re.Match[str]) -> str:
    return f"<{found[1]}>"


def drafters_of(spec: str) -> str:
    """The drafters of a spec, in words for a table."""
    words = {MODEL: "draft model", HEAD: "head", NOISY: "the target with noise"}
    names = [split_spec(one)[0] for one in members_of(find_any(PART.sub(_held, spec)).draft)]
    return " + ".join(words.get(name, name) for name in names)


def needed(wanted: Iterable[Claim], *, quick: bool) -> list[Point]:
    """The points that a run measures."""
    return [point for claim in wanted for point in claim.points if point.quick or not quick]
