"""Chooses the source that drafts a step: the one with the most tokens a second, or none if plain decoding is faster.

A source by itself drafts at any cost, and none of several is the best for every text. So the guard times whole steps,
drafted and plain ones, separately for each bucket of batch sizes. First it looks at each of several sources for a few
steps; the fastest becomes the leader. A source that learns from the drafts of others knows next to nothing by then, so
the guard looks at it a second time. After that the other sources get short trials; the more a trial may lose, the later
it comes.

A trial is compared with what the leader would have given in the same time. The leader, or a source that is alone, is
compared with plain decoding. If plain decoding is faster, nothing is drafted for a while.

The decision for a step depends on earlier steps only, so what a verifier guarantees for any tree still holds.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from branchwise.backends.base import TargetInfo
from branchwise.control.choice import WORTH, Rest, Terms
from branchwise.control.costs import DEVICE_SLOPE, RECORDED, PassCostModel, batch_size_class, nearest_size

PLAIN = -1
"""stands for no source: nothing is drafted"""
TERMS = Terms(first=4.0, again=0.5, trial=48, share=0.022, fading=0.98, credit=8.0, repaid=True, forgiving=True)
"""A later trial may be as short as one step, so that it can come soon. A source may lose its surplus again, because
many sources gain much now and then and nothing in between. All sources divide `share` between them."""
LOOK = 12
"""steps for which the guard looks at each of several sources first"""
LEARNED = 100
"""steps after which the guard looks again at a source that learns, unless it leads"""
ACCIDENT = 3.0
"""a bound on the time of a step, in usual times: a longer step tells of the machine, not of the source"""
FADING = 0.98
"""the factor by which tokens and times fade from one step of a source to the next"""


@dataclass
class Account:
    """What recent steps gave and took; older steps fade."""

    steps: float = 0.0
    tokens: float = 0.0
    passes: float = 0.0
    """the time of the steps, in plain steps"""

    def record(self, tokens: float, passes: float) -> None:
        self.steps = FADING * self.steps + 1
        self.tokens = FADING * self.tokens + tokens
        self.passes = FADING * self.passes + passes

    @property
    def speed(self) -> float:
        """The speed as a multiple of plain decoding; 0 if nothing is known."""
        return self.tokens / self.passes if self.passes else 0.0


@dataclass
class Source:
    """A source, in batches of one bucket."""

    costs: PassCostModel
    """the times of whole steps: of plain ones, and of those this source drafted by the rows of their pass"""
    rest: Rest
    looks: int
    """the number of steps for which the guard still looks at this source"""
    again: int = 0
    """the number of steps until the guard looks at it again; 0 if that is done or not wanted"""
    account: Account = field(default_factory=Account)

    def elsewhere(self, size: int) -> Source:
        """The same source to begin with in batches of another size."""
        costs, rest = self.costs.for_batch(size), self.rest.elsewhere()
        return Source(costs, rest, self.looks, self.again, replace(self.account))

    def look_again(self) -> None:
        """Forget what the source gave before it had learned, and look at it once more."""
        self.looks, self.account = LOOK, Account()
        self.rest.come_forward()


class Race:
    """Chooses among several sources, or one, in batches of one bucket."""

    def __init__(self, sources: Sequence[Source], leader: int = PLAIN) -> None:
        self.sources, self.leader = sources, leader
        self._tried = PLAIN
        """the source that is on trial"""
        self._begun = False
        """whether the guard has looked at all sources"""
        self._latest = sources[0].costs
        """the costs that were updated last: they know the present pace of the machine"""

    def elsewhere(self, size: int) -> Race:
        return Race([source.elsewhere(size) for source in self.sources], self.leader)

    def choose(self) -> int:
        """The source for the next step: one whose trial is due or goes on, else the leader."""
        for number, source in enumerate(self.sources):
            if source.again == 1 and number != self.leader:
                source.look_again()
            source.again = max(0, source.again - 1)
            source.rest.advance()
        due = [number for number, source in enumerate(self.sources) if not source.rest.is_resting]
        if self._tried not in due:
            others = [number for number in due if number != self.leader]
            self._tried = max(others, key=lambda number: self.sources[number].looks, default=PLAIN)
        chosen = self.leader if self._tried == PLAIN else self._tried
        known = chosen == PLAIN or self.sources[chosen].costs.knows_plain
        return chosen if known else PLAIN  # once in a while a plain step must be timed

    def rival(self, number: int) -> float:
        """The speed that a source must exceed, as a multiple of plain decoding."""
        led = self.leader not in (PLAIN, number)
        return max(1.0, self.sources[self.leader].account.speed) if led else 1.0

    def catch_up_with_pace(self, source: Source) -> PassCostModel:
        """The costs of a source, brought to the present pace: it may have drafted nothing for a while."""
        if source.costs is not self._latest:
            source.costs.keep_pace(self._latest)
        self._latest = source.costs
        return source.costs

    def record_plain(self, seconds: float) -> None:
        for costs in [self.catch_up_with_pace(source) for source in self.sources]:
            costs.record(1, seconds)

    def record(self, number: int, tokens: float, passes: float) -> None:
        """Count a step of a source, with its tokens a text and its time in plain steps."""
        source = self.sources[number]
        source.account.record(tokens, passes)
        lost = source.rest.record(tokens / self.rival(number), passes)
        if source.looks:
            source.looks = 0 if lost else source.looks - 1
            if not source.looks:
                self._looked(number)
        elif number == self.leader:
            if lost:
                self._fall()
        elif lost:
            self._tried = PLAIN
        elif source.rest.proved:
            self._lead(number)

    def _looked(self, number: int) -> None:
        """The guard has looked at this source. After the last first look, the fastest source becomes the leader, if it
        beats plain decoding. After a second look, this source does, if it beats the present leader as well."""
        self._tried = PLAIN
        if any(source.looks for source in self.sources):
            return
        if not self._begun:
            self._begun = True
            self._lead(self._fastest(range(len(self.sources))))
        elif self._fastest([number]) == number and self.sources[number].account.speed > self.rival(number):
            self._lead(number)
        else:
            self.sources[number].rest.stand_aside()

    def _lead(self, number: int) -> None:
        """Make this source the leader. The others wait, so that its speed is known well before they are compared with
        it."""
        self.leader, self._tried = number, PLAIN
        for other, source in enumerate(self.sources):
            if other != number:
                source.rest.stand_aside()
            else:
                source.rest.come_forward()

    def _fall(self) -> None:
        """Depose the leader: plain decoding is faster. The next fastest source gets a trial, as it may still beat plain
        decoding."""
        following = self._fastest([number for number in range(len(self.sources)) if number != self.leader])
        self.leader = PLAIN
        if following != PLAIN:
            self.sources[following].rest.come_forward()

    def _fastest(self, numbers: Sequence[int]) -> int:
        """The fastest of these sources, if it is clearly faster than plain decoding."""
        best = max(numbers, key=lambda number: self.sources[number].account.speed, default=PLAIN)
        return best if best != PLAIN and self.sources[best].account.speed > WORTH else PLAIN


class Guard:
    """Chooses among sources, or lets a single source stand aside while its steps do not pay."""

    def __init__(
        self, target: TargetInfo | None = None, sources: Sequence[str] = ("drafter",), learning: Sequence[str] = ()
    ) -> None:
        """`sources` are names. Those in `learning` know more later, and read texts that others drafted. On a device the
        first passes of a size are not timed, because they are recorded then. On a host every pass counts at once,
        because sizes are many and some are expensive."""
        self.sources, self._learning = tuple(sources), frozenset(learning)
        self._on_host = target is None or target.device.type == "cpu"
        self._terms = replace(TERMS, share=TERMS.share / len(self.sources))
        self._looks = LOOK if len(self.sources) > 1 else 0
        self._begun: set[int] = set()
        """the buckets that have had their first plain step, which on a host says little of later ones"""
        self._races: dict[int, Race] = {}
        """bucket of the batch size -> race"""
        self._all = Account()
        """the account of all drafted steps"""
        self._rehearsal: deque[int] = deque()
        """choices that were fixed in advance, for a warm-up"""

    def choose(self, batch: int) -> int:
        """The source that drafts the next step of this many texts, or `PLAIN`. Call it once for every step."""
        return self._rehearsal.popleft() if self._rehearsal else self._of(batch).choose()

    def record(self, batch: int, source: int, rows: int, tokens: float, seconds: float, *, caught_up: bool) -> None:
        """Count a step with a pass over `rows` rows of each text, which gave `tokens` a text. `caught_up`: in this step
        the source also read what it had missed of a text."""
        race = self._of(batch)
        if source == PLAIN:
            self._record_plain(race, batch_size_class(batch), seconds)
            return
        own = race.sources[source]
        costs = race.catch_up_with_pace(own)
        # These are about earlier steps, so they are read before this one is recorded.
        settled = costs.settled(rows)
        comparable = settled and costs.knows_plain
        usual = costs.costs([rows])[0] if costs.knows(rows) else math.inf
        if rows > 1 and not (caught_up and settled):  # catching up is no cost of this size
            costs.record(rows, seconds)
        if not comparable:
            return
        timed = seconds / costs.plain_seconds
        passes = self._without_reading(own.rest, timed, usual, tokens / race.rival(source)) if caught_up else timed
        if passes is None:
            return
        passes = min(passes, ACCIDENT * usual)
        race.record(source, tokens, passes)
        self._all.record(tokens, passes)

    def _record_plain(self, race: Race, size: int, seconds: float) -> None:
        if not self._on_host or size in self._begun:
            race.record_plain(seconds)
        self._begun.add(size)

    @staticmethod
    def _without_reading(rest: Rest, passes: float, usual: float, earned: float) -> float | None:
        """The time of a step that caught up, in plain steps and without the reading, which counts as an investment in
        the text. None if the `usual` time of such a step is not known: then all beyond what it `earned` is invested."""
        if usual == math.inf:
            rest.invest(max(0.0, passes - earned))
            return None
        rest.invest(max(0.0, passes - usual))
        return min(passes, usual)

    @property
    def speed(self) -> float | None:
        """The speed of recent drafted steps, as a multiple of plain decoding; None if none was timed."""
        return self._all.speed or None

    def drafting(self, batch: int) -> list[int]:
        """The sources that draft for this many texts, trials aside: a single source, the leader, and sources that the
        guard still looks at."""
        race = self._of(batch)
        alone = len(self.sources) == 1
        return [number for number, one in enumerate(race.sources) if alone or one.looks or number == race.leader]

    def reasons(self, batch: int) -> list[str]:
        """Sentences for a user: what sources gave for this many texts, and which of them drafts because of that."""
        race, size = self._of(batch), batch_size_class(batch)
        texts, found = f"For {size} text{'s' * (size > 1)}", []
        for number, (name, source) in enumerate(zip(self.sources, race.sources, strict=True)):
            account = source.account
            if account.steps:
                tokens, passes = account.tokens / account.steps, account.passes / account.steps
                word = "drafts" if number == race.leader else "is tried now and then"
                found.append(
                    f"{texts} {name} {word}: {tokens:.2f} tokens a step that takes {passes:.2f} plain ones, "
                    f"{account.speed:.2f} times plain decoding."
                )
        if found and race.leader == PLAIN and not any(source.looks for source in race.sources):
            found.append(f"{texts} nothing is drafted otherwise: no source is faster than plain decoding.")
        return found

    def forget(self) -> None:
        """Begin with trials again, because earlier drafts say nothing of the texts to come. Known times are kept."""
        self._races = {size: self._race([one.costs for one in race.sources]) for size, race in self._races.items()}
        self._all = Account()
        self._rehearsal.clear()

    def rehearse(self, steps: int = 0) -> None:
        """Begin again as `forget` does, but first take as many plain steps as a device needs to record them. Several
        sources then take turns, so that each has drafted before the first `steps` steps are over."""
        self.forget()
        self._rehearsal.extend([PLAIN] * (RECORDED + 1))
        count = len(self.sources)
        for number in range(count) if count > 1 else ():
            self._rehearsal.extend([number] * (max(0, steps - RECORDED - 1) // count))

    def _of(self, batch: int) -> Race:
        size = batch_size_class(batch)
        if size not in self._races:
            nearest = nearest_size(self._races, size)
            if nearest is not None:
                self._races[size] = self._races[nearest].elsewhere(size)
            else:
                first = PassCostModel(settling=0) if self._on_host else PassCostModel(RECORDED, DEVICE_SLOPE)
                self._races[size] = self._race([first.for_batch(size) for _ in self.sources])
        return self._races[size]

    def _race(self, costs: Sequence[PassCostModel]) -> Race:
        """A race that begins, given the known times of steps for every source."""
        again = [LEARNED if self._looks and name in self._learning else 0 for name in self.sources]
        known = zip(costs, again, strict=True)
        return Race([Source(cost, Rest(self._terms), self._looks, later) for cost, later in known])
