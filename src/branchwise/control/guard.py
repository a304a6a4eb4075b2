"""Who drafts a step, if anyone: the source that gives most tokens a second, and nobody where plain decoding is faster.

A source that a user names drafts as it was told, whatever it costs, and of several none is the best for every text. So
whole steps are timed, those with a draft and plain ones, batches of about one size together. Each of several sources is
looked at for a few steps, and the fastest leads. One that learns from what others draft knows next to nothing then, so
it is looked at once more. The others get short trials, each the later the more a trial may lose.
A trial is judged by what the leader would have given in the same time, and the leader by what plain decoding would: so
is a source that is alone. Where plain decoding is faster, nothing is drafted for a while.

The decision for a step looks at the steps before it alone, so what a verifier promises of any tree stays true.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from branchwise.backends.base import TargetInfo
from branchwise.control.choice import WORTH, Rest, Terms
from branchwise.control.costs import DEVICE_SLOPE, RECORDED, PassCostModel
from branchwise.cuda.inputs import BATCHES, fitting

PLAIN = -1
"""in place of a source: nothing is drafted"""
TERMS = Terms(first=4.0, again=0.5, trial=48, share=0.022, fading=0.98, credit=8.0, repaid=True, forgiving=True)
"""A later trial may be as short as one step, so that it can come soon; and what a source has gained it may lose again,
because many gain much now and then and nothing in between. All sources share the share."""
LOOK = 12
"""steps in which each of several sources is looked at first"""
LEARNED = 100
"""steps after which one that learns is looked at once more, unless it leads"""
ACCIDENT = 3.0
"""times the usual time of a step, beyond which it says something of the machine and nothing of the source"""
FADING = 0.98
"""the factor of what a source gave and took, from one of its steps to the next"""


@dataclass
class Account:
    """What steps gave and took lately."""

    steps: float = 0.0
    tokens: float = 0.0
    passes: float = 0.0
    """plain steps that they took as long as"""

    def record(self, tokens: float, passes: float) -> None:
        self.steps = FADING * self.steps + 1
        self.tokens = FADING * self.tokens + tokens
        self.passes = FADING * self.passes + passes

    @property
    def speed(self) -> float:
        """In plain decoding; 0 where nothing is known."""
        return self.tokens / self.passes if self.passes else 0.0


@dataclass
class Source:
    """A source, in batches of one size."""

    costs: PassCostModel
    """what whole steps take, those with a draft of this source by the rows of their pass"""
    rest: Rest
    looks: int
    """steps in which it is still to be looked at"""
    again: int = 0
    """steps after which it is to be looked at once more; 0 if that is over or not to be"""
    account: Account = field(default_factory=Account)

    def elsewhere(self, size: int) -> Source:
        """What is known of it, for batches of another size."""
        costs, rest = self.costs.for_batch(size), self.rest.elsewhere()
        return Source(costs, rest, self.looks, self.again, replace(self.account))

    def look_again(self) -> None:
        """What it gave when it knew little says nothing of it."""
        self.looks, self.account = LOOK, Account()
        self.rest.come_forward()


class Race:
    """Several sources, or one, in batches of one size."""

    def __init__(self, sources: Sequence[Source], leader: int = PLAIN) -> None:
        self.sources, self.leader = sources, leader
        self._tried = PLAIN
        """the source whose trial it is"""
        self._begun = False
        """whether all of them were looked at"""
        self._latest = sources[0].costs
        """of the source that drafted last: they know the pace of the machine best"""

    def elsewhere(self, size: int) -> Race:
        return Race([source.elsewhere(size) for source in self.sources], self.leader)

    def choose(self) -> int:
        """For the next step: the source whose trial is due or goes on, or else the leader."""
        for number, source in enumerate(self.sources):
            if source.again == 1 and number != self.leader:
                source.look_again()
            source.again = max(0, source.again - 1)
        due = [number for number, source in enumerate(self.sources) if not source.rest.resting()]
        if self._tried not in due:
            others = [number for number in due if number != self.leader]
            self._tried = max(others, key=lambda number: self.sources[number].looks, default=PLAIN)
        chosen = self.leader if self._tried == PLAIN else self._tried
        known = chosen == PLAIN or self.sources[chosen].costs.knows_plain
        return chosen if known else PLAIN  # once in a while a plain step must be timed

    def rival(self, number: int) -> float:
        """The speed by which a source is judged, in plain decoding."""
        led = self.leader not in (PLAIN, number)
        return max(1.0, self.sources[self.leader].account.speed) if led else 1.0

    def at_present_pace(self, source: Source) -> PassCostModel:
        """Its costs, whoever drafted meanwhile."""
        if source.costs is not self._latest:
            source.costs.keep_pace(self._latest)
        self._latest = source.costs
        return source.costs

    def record_plain(self, seconds: float) -> None:
        for costs in [self.at_present_pace(source) for source in self.sources]:
            costs.record(1, seconds)

    def record(self, number: int, tokens: float, passes: float) -> None:
        """A step of a source gave so many tokens a text, and took as long as so many plain ones."""
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
        """At one more of them; if it was the last, the race begins, unless it has begun before."""
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
        """This source leads from now on. How fast it is will be known better before the others are judged by it."""
        self.leader, self._tried = number, PLAIN
        for other, source in enumerate(self.sources):
            if other != number:
                source.rest.stand_aside()
            else:
                source.rest.come_forward()

    def _fall(self) -> None:
        """Plain decoding is faster than the leader, and maybe slower than one that was slower than the leader."""
        following = self._fastest([number for number in range(len(self.sources)) if number != self.leader])
        self.leader = PLAIN
        if following != PLAIN:
            self.sources[following].rest.come_forward()

    def _fastest(self, numbers: Sequence[int]) -> int:
        """Of these, if it is clearly faster than plain decoding."""
        best = max(numbers, key=lambda number: self.sources[number].account.speed, default=PLAIN)
        return best if best != PLAIN and self.sources[best].account.speed > WORTH else PLAIN


class Guard:
    """Chooses among sources, or lets the only one stand aside while its steps do not pay."""

    def __init__(
        self, target: TargetInfo | None = None, sources: Sequence[str] = ("drafter",), learning: Sequence[str] = ()
    ) -> None:
        """Sources have names; those that are `learning` do so in every step, whoever drafts it. On the device of a
        target the first passes of a size are not timed: they are recorded. On a host every tree counts at once, because
        sizes are many and some are dear."""
        self.sources, self._learning = tuple(sources), frozenset(learning)
        self._on_host = target is None or target.device.type == "cpu"
        self._terms = replace(TERMS, share=TERMS.share / len(self.sources))
        self._looks = LOOK if len(self.sources) > 1 else 0
        self._begun: set[int] = set()
        """sizes of batches whose first plain step is made, which on a host says little of the others"""
        self._races: dict[int, Race] = {}
        """by the size of a batch"""
        self._all = Account()
        """of all drafted steps"""
        self._rehearsal: deque[int] = deque()
        """choices that are made in any case"""

    def choose(self, batch: int) -> int:
        """Which source drafts the next step of so many texts, or `PLAIN`; asked once for every step."""
        return self._rehearsal.popleft() if self._rehearsal else self._of(batch).choose()

    def record(self, batch: int, source: int, rows: int, tokens: float, seconds: float, *, caught_up: bool) -> None:
        """A step with passes over so many rows of each text gave so many tokens a text. `caught_up`: the source also
        had to read what it had missed of a text."""
        race = self._of(batch)
        if source == PLAIN:
            size = fitting(batch, BATCHES)
            if not self._on_host or size in self._begun:
                race.record_plain(seconds)
            self._begun.add(size)
            return
        own, rival = race.sources[source], race.rival(source)
        costs = race.at_present_pace(own)
        settled, plain = costs.settled(rows), costs.knows_plain
        usual = costs.costs([rows])[0] if costs.knows(rows) else math.inf
        if rows > 1 and not (caught_up and settled):
            costs.record(rows, seconds)
        if not settled or not plain:
            return
        passes = seconds / costs.plain_seconds
        if caught_up and usual == math.inf:  # how much of it was reading will be seen
            own.rest.invest(max(0.0, passes - tokens / rival))
            return
        if caught_up and passes > usual:
            own.rest.invest(passes - usual)
            passes = usual
        passes = min(passes, ACCIDENT * usual)
        race.record(source, tokens, passes)
        self._all.record(tokens, passes)

    @property
    def speed(self) -> float | None:
        """That of drafted steps, in plain decoding, as far as they were timed lately."""
        return self._all.speed or None

    def drafting(self, batch: int) -> list[int]:
        """The sources that draft for so many texts, trials aside: the only one, the leader, or all while they are
        looked at."""
        race = self._of(batch)
        alone = len(self.sources) == 1
        return [number for number, one in enumerate(race.sources) if alone or one.looks or number == race.leader]

    def reasons(self, batch: int) -> list[str]:
        """What sources gave for so many texts, and which one drafts because of that."""
        race, size = self._of(batch), fitting(batch, BATCHES)
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
        """Begin with trials again: what was drafted so far says nothing of what is to come."""
        self._races = {size: self._race([one.costs for one in race.sources]) for size, race in self._races.items()}
        self._all = Account()
        self._rehearsal.clear()

    def rehearse(self, steps: int = 0) -> None:
        """The same, after as many plain steps as a device needs to record them. If there are several sources, all of
        them draft in the first so many `steps`."""
        self.forget()
        self._rehearsal.extend([PLAIN] * (RECORDED + 1))
        count = len(self.sources)
        for number in range(count) if count > 1 else ():
            self._rehearsal.extend([number] * (max(0, steps - RECORDED - 1) // count))

    def _of(self, batch: int) -> Race:
        size = fitting(batch, BATCHES)
        if size not in self._races:
            near = min(self._races, key=lambda other: abs(math.log(other / size)), default=None)
            if near is not None:
                self._races[size] = self._races[near].elsewhere(size)
            else:
                first = PassCostModel(settling=0) if self._on_host else PassCostModel(RECORDED, DEVICE_SLOPE)
                self._races[size] = self._race([first.for_batch(size) for _ in self.sources])
        return self._races[size]

    def _race(self, costs: Sequence[PassCostModel]) -> Race:
        """One that begins, given what steps are known to take."""
        again = [LEARNED if self._looks and name in self._learning else 0 for name in self.sources]
        known = zip(costs, again, strict=True)
        return Race([Source(cost, Rest(self._terms), self._looks, later) for cost, later in known])
