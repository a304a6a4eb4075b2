"""Which of a few tree sizes (rungs) gives most tokens a second, for each bucket of batch sizes.

On a device every size of a pass is compiled and recorded, so the rungs are few. Each is tried when a batch of its
bucket first comes, which is at warm-up. After that, steps are timed as they go, and the tokens that drafts gain are
counted with decay. The model of a step with a tree of some nodes below the root:

    tokens gained ≈ g · log2(1 + nodes)

How the gain grows with the tree hardly depends on the texts, so g is shared by all rungs, and each rung has a
correction to it. g is kept apart for greedy and sampled texts. Each text has a correction to it, too, so the expected
gain of a batch changes at once when texts come and go.
"""

from __future__ import annotations

import math
import statistics
import sys
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from branchwise.control.costs import RECORDED, batch_size_class

MOST_ROWS = 512
"""the most rows of a pass over a whole batch: beyond it arithmetic limits a pass, and not memory"""
FEW = 4
"""timed steps of a rung that are enough to compare it with others"""
EVERY = 8
"""steps for which a choice stands"""
FADING, IDLE_FADING = 0.97, 0.998
"""the factor by which gains fade with a drafted step, and with a plain one: after hundreds of plain steps failures are
forgotten and drafting is tried again"""
PRIOR = 8.0
"""the weight of the prior: in doublings for the initial g, in steps for what g predicts for a rung"""
OWN_PRIOR = 24.0
"""the prior weight of the shared g in that of a text, in doublings; 8 steps of 7-node trees = 24"""
HOPED = {False: 0.6, True: 0.3}
"""the initial g, tokens gained for each doubling of a tree, for greedy texts (False) and sampled ones (True)"""
THINNING = 0.07
"""by how much a step must be faster than a plain one for each doubling of a batch. Drafted texts end at different
times, which leaves fewer texts to share a step, and prompts have to be read"""
STALE = 256
"""steps of a bucket after which a rung is timed again, if it should be about as fast as the best. A rung half as fast
waits four times as long: to try it costs more, and its estimate is less likely to be wrong enough to matter"""
PATIENCE = 24
"""the most steps for which a doubted rung is tried"""
SLOWLY = 1 / 16
"""the weight of the last step in the moving average of step times"""
CHANCE = 1.05
"""the factor by which a few timed steps may be off by chance"""


@dataclass(eq=False)
class Pace:
    """How long the steps of one rung take."""

    steps: int = 0
    seconds: float = 0.0
    first: Sequence[float] = ()
    """the seconds of the first timed steps"""
    drift: float = 1.0
    """the factor by which steps of other rungs have become slower since the last step of this rung"""
    age: int = 0
    """the number of steps of other rungs since then"""
    patience: int = sys.maxsize
    """the number of further steps for which this rung is tried until it is known"""

    def record(self, seconds: float) -> None:
        self.seconds, self.drift, self.age = self.now, 1.0, 0
        self.steps += 1
        timed = self.steps - RECORDED
        # A step that took much longer says little: the host was busy with something else.
        if timed > FEW:
            self.seconds += max(1 / timed, SLOWLY) * (min(seconds, 2 * self.seconds) - self.seconds)
        elif timed > 0:
            self.first = [*(self.first if timed > 1 else ()), seconds]
            self.seconds = statistics.median(self.first)

    @property
    def known(self) -> bool:
        return self.steps >= RECORDED + FEW

    def doubt(self) -> None:
        """Time the rung anew over a few steps; the first of them replaces what was known."""
        self.steps, self.age, self.patience = RECORDED, 0, PATIENCE

    def wait(self) -> None:
        """Count one more step that tries this rung. If texts come and go, hardly any step is timed; once the patience
        is over, what is known must do."""
        self.patience -= 1
        if not self.patience:
            self.steps = RECORDED + FEW

    @property
    def now(self) -> float:
        """The present seconds of a step: the last known ones, scaled by the drift as far as it exceeds chance."""
        return self.seconds * (max(1.0, self.drift / CHANCE) if self.drift > 1 else min(1.0, self.drift * CHANCE))


@dataclass(eq=False)
class Gain:
    """The tokens that drafts gained a text, and the number of steps that they come from; both fade."""

    tokens: float = 0.0
    steps: float = 0.0


def worth(texts: int) -> float:
    """How many times as fast as plain steps drafted ones must be to pay for this many texts."""
    return 1 + THINNING * math.log2(max(texts, 1))


class Ladder:
    """The choice among trees with `nodes` nodes below the root, in rising order. Rung 0 drafts nothing, rung i has
    nodes[i - 1] nodes."""

    def __init__(self, nodes: Sequence[int]) -> None:
        self.nodes = (0, *nodes)
        self._paces: defaultdict[tuple[int, int], Pace] = defaultdict(Pace)
        """(bucket of the batch size, rung) -> times"""
        self._chosen: tuple[tuple[int, bool], int] | None = None
        """the present choice: (bucket, whether texts are sampled), and the rung"""
        self._turn = 0
        self.drawn = False
        """whether most texts of the coming steps are sampled"""
        self.forget()

    def forget(self) -> None:
        """Forget what drafts gained, but not how long steps take."""
        self._gained = {drawn: [Gain() for _ in self.nodes] for drawn in HOPED}
        self._own: dict[Hashable, Gain] = {}
        """the gains of the texts of the last step; here a step counts once for each doubling of its tree"""
        self._chosen = None

    @property
    def _gains(self) -> list[Gain]:
        return self._gained[self.drawn]

    def rungs(self, batch: int) -> tuple[int, ...]:
        """The rungs of a batch: no draft, the largest tree whose pass has at most `MOST_ROWS` rows, and the next
        smaller tree."""
        size = batch_size_class(batch)
        fits = [rung for rung, nodes in enumerate(self.nodes) if size * (1 + nodes) <= MOST_ROWS]
        largest = max(1, fits[-1])
        return tuple(sorted({0, max(1, largest - 1), largest}))

    def rung(self, batch: int, texts: Sequence[Hashable] = ()) -> int:
        """The rung for the next step of this many texts. `texts` are those texts, if they are known."""
        size = batch_size_class(batch)
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
        """Count a step that gave `tokens` a text, and text by text what `each` maps it to. `seconds` is None unless the
        step followed right after another like it."""
        if seconds is not None:
            self._time(batch_size_class(batch), rung, seconds)
        # A large batch asks more of drafts: after a failure more must be forgotten before they are tried again.
        fading = FADING if rung else IDLE_FADING ** worth(batch) ** 2
        for gain in self._gains:
            gain.tokens, gain.steps = fading * gain.tokens, fading * gain.steps
        if rung:
            self._gains[rung].tokens += tokens - 1
            self._gains[rung].steps += 1
        self._own = {text: self._own.get(text, Gain()) for text in each or ()}  # texts outside this step are forgotten
        for text, own in self._own.items():
            own.tokens, own.steps = fading * own.tokens, fading * own.steps
            if rung and each:
                own.tokens += each[text] - 1
                own.steps += self._doublings(rung)

    def _time(self, size: int, rung: int, seconds: float) -> None:
        """Time a step of one rung, and let the known times of the other rungs follow it: steps of all rungs become
        slower together as texts grow, and faster together if the device was slow at warm-up."""
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
        """The shared g: tokens that a text gains for each doubling of its tree."""
        counted = sum(gain.tokens for gain in self._gains)
        due = sum(gain.steps * self._doublings(rung) for rung, gain in enumerate(self._gains))
        return (PRIOR * HOPED[self.drawn] + counted) / (PRIOR + due)

    def _of_these(self, texts: Sequence[Hashable], common: float) -> float:
        """The mean g of these texts as a multiple of the shared one; a text without a record counts as 1."""
        owns = [self._own[text] for text in texts if text in self._own]
        if not owns or common <= 0:
            return 1.0
        found = sum((OWN_PRIOR * common + own.tokens) / (OWN_PRIOR + own.steps) for own in owns)
        return (found / common + len(texts) - len(owns)) / len(texts)

    def tokens(self, rung: int, texts: Sequence[Hashable] = ()) -> float:
        """The tokens that a step of this rung is expected to give a text, or one of these `texts`."""
        if not rung:
            return 1.0
        common, gain = self._common(), self._gains[rung]
        usual = (PRIOR * common * self._doublings(rung) + gain.tokens) / (PRIOR + gain.steps)
        return 1 + usual * self._of_these(texts, common)

    def speed(self, batch: int, rung: int, texts: Sequence[Hashable] = ()) -> float:
        """The expected tokens a second of a text; 0 if steps of this rung were never timed."""
        pace = self._paces[batch_size_class(batch), rung]
        return self.tokens(rung, texts) / pace.now if pace.seconds else 0.0

    def reasons(self, batch: int) -> list[str]:
        """Sentences for a user: what the choice for this many texts is based on."""
        size, found = batch_size_class(batch), []
        for rung in self.rungs(size):
            pace, nodes = self._paces[size, rung], self.nodes[rung]
            if pace.seconds:
                what = f"trees of {nodes} nodes" if nodes else "plain decoding"
                found.append(
                    f"For {size} text{'s' * (size > 1)} {what}: {self.tokens(rung):.2f} tokens a step of "
                    f"{1e3 * pace.now:.2f} ms, {self.speed(size, rung):.0f} tokens/s."
                )
        return found
