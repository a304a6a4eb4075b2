"""Which of a few sizes of drafts gives most tokens a second, for each size of a batch.

On a device every size of a pass is compiled and recorded, so there are few of them, each tried when a batch of its size
first comes, which is at warm-up. From then on steps are timed as they go, and what a draft gains is counted with decay.
How much more a larger tree gains hardly depends on the texts, so one number, by how much drafting pays at all, is
learned for all sizes together, and how far each is off it besides. It does depend on how tokens are chosen, so it is
counted for texts that draw theirs and for greedy ones apart. And it depends on whose texts they are: so each text has
its own share in that number, and what is expected of a batch changes at once when texts come and go.
"""

from __future__ import annotations

import math
import statistics
import sys
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from branchwise.cuda.inputs import BATCHES, fitting

MOST_ROWS = 512
"""of the pass over a whole batch: beyond it arithmetic limits a pass, and not memory"""
SETTLING = 4
"""steps of a size before it is timed: by then all that they do is recorded"""
FEW = 4
"""timed steps of a size that are enough to compare it with others"""
EVERY = 8
"""steps for which a choice stands"""
FADING, IDLE_FADING = 0.97, 0.998
"""the factor of what was gained from one step to the next, and while nothing is drafted: then it is tried again after
hundreds of steps"""
PRIOR = 8.0
"""the weight, in steps, of what a size should gain by what others do"""
OWN_PRIOR = 24.0
"""the weight of what all texts gain in what one does, in doublings of its trees: those of eight steps of small ones"""
HOPED = {False: 0.6, True: 0.3}
"""tokens that a draft gains for each doubling of its nodes, before anything was counted: where a text takes the best
token, and where it draws one"""
THINNING = 0.07
"""by how much a step must be faster than a plain one for each doubling of a batch. Texts that are drafted end at
different times, and what is left of a batch has fewer texts to share its steps; and prompts have to be read"""
STALE = 256
"""steps of a batch after which a size that was not made since is timed again, if it should be about as fast as the best
one. What is a half as fast waits four times as long: trying it costs more, and it is less likely to have been wrong"""
PATIENCE = 24
"""steps in which it is tried at most"""
SLOWLY = 1 / 16
"""the share of the last step in how long steps take"""
CHANCE = 1.05
"""the factor by which a few timed steps may be off"""


@dataclass(eq=False)
class Pace:
    """How long the steps of one size take."""

    steps: int = 0
    seconds: float = 0.0
    first: Sequence[float] = ()
    """seconds of the first steps that were timed"""
    drift: float = 1.0
    """by how much steps of other rungs have become slower since"""
    age: int = 0
    """steps of other rungs since"""
    patience: int = sys.maxsize
    """further steps in which this size is tried until it is known"""

    def record(self, seconds: float) -> None:
        self.seconds, self.drift, self.age = self.now, 1.0, 0
        self.steps += 1
        timed = self.steps - SETTLING
        # A step that took much longer says little: the host was busy elsewhere.
        if timed > FEW:
            self.seconds += max(1 / timed, SLOWLY) * (min(seconds, 2 * self.seconds) - self.seconds)
        elif timed > 0:
            self.first = [*(self.first if timed > 1 else ()), seconds]
            self.seconds = statistics.median(self.first)

    @property
    def known(self) -> bool:
        return self.steps >= SETTLING + FEW

    def doubt(self) -> None:
        """Let a few more steps say how long they take; what they did before is forgotten then."""
        self.steps, self.age, self.patience = SETTLING, 0, PATIENCE

    def wait(self) -> None:
        """It is tried in one more step. Where texts come and go hardly any is timed; what is known must do then."""
        self.patience -= 1
        if not self.patience:
            self.steps = SETTLING + FEW

    @property
    def now(self) -> float:
        """The seconds of a step by what others take: as far as these changed by more than chance."""
        return self.seconds * (max(1.0, self.drift / CHANCE) if self.drift > 1 else min(1.0, self.drift * CHANCE))


@dataclass(eq=False)
class Gain:
    """Tokens that a size gained in a step of a text, and of how many steps that is known; both fade."""

    tokens: float = 0.0
    steps: float = 0.0


def worth(texts: int) -> float:
    """How many times as fast as plain ones steps must be to pay for so many texts."""
    return 1 + THINNING * math.log2(max(texts, 1))


class Ladder:
    """The choice among drafts of so many `nodes` below the root, in rising order. Rung 0 drafts nothing, rung i has
    nodes[i - 1] nodes."""

    def __init__(self, nodes: Sequence[int]) -> None:
        self.nodes = (0, *nodes)
        self._paces: defaultdict[tuple[int, int], Pace] = defaultdict(Pace)
        """by the size of a batch and the rung"""
        self._chosen: tuple[tuple[int, bool], int] | None = None
        """for which steps, and the rung"""
        self._turn = 0
        self.drawn = False
        """whether the texts of steps to come, or most of them, draw their tokens"""
        self.forget()

    def forget(self) -> None:
        """What drafts gained; not what steps cost."""
        self._gained = {drawn: [Gain() for _ in self.nodes] for drawn in HOPED}
        self._own: dict[Hashable, Gain] = {}
        """of the texts of the last step; steps count as many times as their trees doubled"""
        self._chosen = None

    @property
    def _gains(self) -> list[Gain]:
        return self._gained[self.drawn]

    def rungs(self, batch: int) -> tuple[int, ...]:
        """Those of a batch: nothing, the largest draft whose pass is not too large, and the next smaller one."""
        size = fitting(batch, BATCHES)
        fits = [rung for rung, nodes in enumerate(self.nodes) if size * (1 + nodes) <= MOST_ROWS]
        largest = max(1, fits[-1])
        return tuple(sorted({0, max(1, largest - 1), largest}))

    def rung(self, batch: int, texts: Sequence[Hashable] = ()) -> int:
        """For the next step of so many texts, which are these if they are known."""
        size = fitting(batch, BATCHES)
        untried = [rung for rung in reversed(self.rungs(size)) if not self._paces[size, rung].known]
        if untried:
            self._chosen = None
            self._paces[size, untried[0]].wait()
            return untried[0]
        self._turn += 1
        kind = size, self.drawn
        if self._chosen is None or self._chosen[0] != kind or self._turn >= EVERY:
            self._chosen, self._turn = (kind, self._best(size, texts)), 0
        return self._chosen[1]

    def _best(self, size: int, texts: Sequence[Hashable]) -> int:
        speeds = {rung: self.speed(size, rung, texts) for rung in self.rungs(size)}
        best = max(speeds, key=speeds.__getitem__)
        if not best or speeds[best] < worth(size) * speeds[0]:
            return 0
        for rung, speed in speeds.items():
            pace = self._paces[size, rung]
            if rung not in (0, best) and speed and pace.age > STALE * (speeds[best] / speed) ** 2:
                pace.doubt()
        return best

    def record(
        self, batch: int, rung: int, tokens: float, seconds: float | None, each: Mapping[Any, float] | None = None
    ) -> None:
        """A step gave so many tokens a text, `each` of them so many, and took so long, if it came right after another
        like it."""
        if seconds is not None:
            self._time(fitting(batch, BATCHES), rung, seconds)
        # The more a batch asks of drafts, the more of what failed must be forgotten before they are tried again.
        fading = FADING if rung else IDLE_FADING ** worth(batch) ** 2
        for gain in self._gains:
            gain.tokens, gain.steps = fading * gain.tokens, fading * gain.steps
        if rung:
            self._gains[rung].tokens += tokens - 1
            self._gains[rung].steps += 1
        self._own = {text: self._own.get(text, Gain()) for text in each or ()}  # of others nothing is expected any more
        for text, own in self._own.items():
            own.tokens, own.steps = fading * own.tokens, fading * own.steps
            if rung and each:
                own.tokens += each[text] - 1
                own.steps += self._doublings(rung)

    def _time(self, size: int, rung: int, seconds: float) -> None:
        """Steps of all rungs become slower together where texts are long, and faster where a device was slow when they
        were timed at warm-up. So what is known of the others goes along with those that are made."""
        pace = self._paces[size, rung]
        known, before = pace.known, pace.now
        pace.record(seconds)
        for other in self.rungs(size) if known else ():
            if other != rung:
                self._paces[size, other].drift *= pace.seconds / before
                self._paces[size, other].age += 1

    def _doublings(self, rung: int) -> float:
        return math.log2(1 + self.nodes[rung])

    def _common(self) -> float:
        """Tokens that a text gains for each doubling of its tree."""
        counted = sum(gain.tokens for gain in self._gains)
        due = sum(gain.steps * self._doublings(rung) for rung, gain in enumerate(self._gains))
        return (PRIOR * HOPED[self.drawn] + counted) / (PRIOR + due)

    def _of_these(self, texts: Sequence[Hashable], common: float) -> float:
        """The same of these texts, as a share of what it is for all that were drafted for lately."""
        owns = [self._own[text] for text in texts if text in self._own]
        if not owns or common <= 0:
            return 1.0
        found = sum((OWN_PRIOR * common + own.tokens) / (OWN_PRIOR + own.steps) for own in owns)
        return (found / common + len(texts) - len(owns)) / len(texts)

    def tokens(self, rung: int, texts: Sequence[Hashable] = ()) -> float:
        """That a step of this rung is expected to give a text, or one of these."""
        if not rung:
            return 1.0
        common, gain = self._common(), self._gains[rung]
        usual = (PRIOR * common * self._doublings(rung) + gain.tokens) / (PRIOR + gain.steps)
        return 1 + usual * self._of_these(texts, common)

    def speed(self, batch: int, rung: int, texts: Sequence[Hashable] = ()) -> float:
        """Tokens a second of a text, by what is known; 0 where steps of this rung were never timed."""
        pace = self._paces[fitting(batch, BATCHES), rung]
        return self.tokens(rung, texts) / pace.now if pace.seconds else 0.0

    def reasons(self, batch: int) -> list[str]:
        """What the choice for so many texts is made by."""
        size, found = fitting(batch, BATCHES), []
        for rung in self.rungs(size):
            pace, nodes = self._paces[size, rung], self.nodes[rung]
            if pace.seconds:
                what = f"trees of {nodes} nodes" if nodes else "plain decoding"
                found.append(
                    f"For {size} text{'s' * (size > 1)} {what}: {self.tokens(rung):.2f} tokens a step of "
                    f"{1e3 * pace.now:.2f} ms, {self.speed(size, rung):.0f} tokens/s."
                )
        return found
