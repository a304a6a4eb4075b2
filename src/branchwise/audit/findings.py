"""What an audit concludes from its tests: LOSSLESS, NOT LOSSLESS or UNDECIDED, and the sentences that say why."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from branchwise.audit.blocks import POWER, BlockTest, BlockTests
from branchwise.errors import UsageError

INTERRUPTED = "The audit was interrupted; what it had gathered is shown and decides nothing."
SUSPICIOUS = 10.0
"""a p-value up to this many times the false-alarm rate leaves an audit undecided: a correct decoder gets
there this many times as often as it raises a false alarm, and a decoder with a small bias gets there first"""


def check_demands(false_alarm: float, limit: float, **counts: int) -> None:
    """Refuse an audit that could find nothing, before anything runs."""
    if not 0 < false_alarm < 0.5:
        raise UsageError(f"The false-alarm rate must be above 0 and below 0.5, not {false_alarm}.")
    if not 0 < limit < 1:
        raise UsageError(f"The distance to detect must be above 0 and below 1, not {limit}.")
    for name, count in counts.items():
        if count < 1:
            raise UsageError(f"{name} must be at least 1, not {count}.")


@dataclass(frozen=True)
class Activity:
    """What speculation did while the blocks were sampled."""

    drafted: int
    """drafted levels of trees; those of a chain are its tokens"""
    accepted: int
    """drafted levels in which a node was accepted"""

    @property
    def rejected(self) -> int:
        return self.drafted - self.accepted


class Word(StrEnum):
    LOSSLESS = "LOSSLESS"
    NOT_LOSSLESS = "NOT LOSSLESS"
    UNDECIDED = "UNDECIDED"


@dataclass(frozen=True)
class Finding:
    """What an audit says, and the sentences that say why."""

    word: Word
    evidence: tuple[str, ...]

    @property
    def exit_code(self) -> int:
        return {Word.LOSSLESS: 0, Word.NOT_LOSSLESS: 1, Word.UNDECIDED: 3}[self.word]

    def as_dict(self) -> dict[str, Any]:
        return {"finding": self.word.value, "evidence": list(self.evidence)}


def judge(
    tests: BlockTests,
    *,
    activity: Activity | None,
    limit: float = 0.1,
    proofs: Sequence[str] = (),
    doubts: Sequence[str] = (),
    gaps: Sequence[str] = (),
    notes: Sequence[str] = (),
) -> Finding:
    """The finding of an audit.

    `proofs` are differences found by other means than the tests, `doubts` reasons why nothing can be decided, `gaps`
    what was not tested; `activity` is None if it was not counted. A doubt leaves the audit UNDECIDED. If no difference
    was found, so do a gap, a p-value that is suspicious without being decisive, tests that could not have found a
    distance of `limit`, and a rule that was not tested because nothing was accepted or nothing rejected.
    """
    failed = [
        _accuse(test, adjusted)
        for test, adjusted in zip(tests.family, tests.adjusted, strict=True)
        if adjusted <= tests.false_alarm
    ]
    if not doubts and (failed or proofs):
        return Finding(Word.NOT_LOSSLESS, (*proofs, *failed, *notes))
    reasons = [*doubts, *proofs, *failed, *gaps]
    if tests.detectable > limit:
        reasons.append(
            f"With {tests.samples:,} blocks a distance of {tests.detectable:.3f} would have been found with "
            f"probability {POWER}, and {limit} is asked for; take more samples."
            if tests.family
            else "No context could be tested: no block is expected often enough; take more samples."
        )
    lowest = min(tests.adjusted, default=1.0)
    if tests.false_alarm < lowest <= SUSPICIOUS * tests.false_alarm:
        reasons.append(
            f"The smallest p-value, {lowest:.2g}, is suspicious and not decisive at a false-alarm rate of "
            f"{tests.false_alarm:g}; run again with more samples and another seed."
        )
    if activity is not None and not (activity.accepted and activity.rejected):
        missing = "accepted" if not activity.accepted else "rejected"
        reasons.append(
            f"Of {activity.drafted:,} drafted levels none was {missing}, so the rule was not put to the test."
        )
    if reasons:
        return Finding(Word.UNDECIDED, (*reasons, *notes))
    tested = f"{len(tests.family)} test{'s' if len(tests.family) > 1 else ''} on {tests.samples:,} blocks"
    evidence = [
        f"{tested} found no difference at a false-alarm rate of {tests.false_alarm:g}; the smallest p is {lowest:.2g}.",
        f"A distance of {tests.detectable:.3f} in every context would have been found with probability {POWER}.",
    ]
    if activity is not None:
        evidence.append(f"Of {activity.drafted:,} drafted levels {activity.accepted:,} were accepted.")
    return Finding(Word.LOSSLESS, (*evidence, *notes))


def shorten(prompt: str, most: int = 40) -> str:
    """A prompt, shortened to the name of its context."""
    line = " ".join(prompt.split())
    return line if len(line) <= most else f"{line[: most - 1]}…"


def _accuse(test: BlockTest, adjusted: float) -> str:
    if test.impossible:
        return f"{test.context}: {test.impossible:,} of {test.samples:,} blocks hold a token that cannot stand there."
    return (
        f"{test.context}: G = {test.statistic:.1f} with {test.freedom} degrees of freedom, p = {adjusted:.1g} after "
        f"Holm; the frequencies are {test.distance:.3f} away where chance explains {test.expected_distance:.3f}."
    )
