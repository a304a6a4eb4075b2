"""Which of several sources drafts, against a machine and sources of which everything is known."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import mean, median
from typing import NamedTuple

import pytest

from branchwise.control.choice import SHORTEST_WAIT, Rest
from branchwise.control.costs import RECORDED, PassCostModel
from branchwise.control.guard import LOOK, PLAIN, TERMS, Guard
from tests.test_guard import NOTHING, ROWS, Tokens, bursts, geometric

NAMES = ("head", "memories", "model")


class Skill(NamedTuple):
    cost: float
    """plain steps that a step of this source takes"""
    tokens: Tokens

    @property
    def speed(self) -> float:
        """Of drafting on and on, in plain decoding."""
        rng = random.Random(1)
        return mean(self.tokens(rng) for _ in range(20_000)) / self.cost


@dataclass
class World:
    """A machine on which a plain step takes a second."""

    skills: Sequence[Skill]
    noise: float = 0.1
    batch: int = 1
    reading: float = 0.3
    """plain steps that a source takes at most to read what it has missed, all of them after 50 steps"""
    rng: random.Random = field(default_factory=lambda: random.Random(0))
    pace: float = 1.0
    now: float = 0.0
    counts: Counter[int] = field(default_factory=Counter)
    _missed: dict[int, int] = field(default_factory=dict)

    def step(self, guard: Guard) -> float:
        """One step; how many tokens a text got."""
        chosen = guard.choose(self.batch)
        self.counts[chosen] += 1
        tokens, cost = 1.0, 1.0
        if chosen != PLAIN:
            tokens, cost = self.skills[chosen].tokens(self.rng), self.skills[chosen].cost
        missed = 0 if chosen == PLAIN else self._missed.get(chosen, 50)
        self._missed = {n: 0 if n == chosen else self._missed.get(n, 50) + 1 for n in range(len(self.skills))}
        spent = (cost + self.reading * min(missed, 50) / 50) * self.pace
        spent *= self.rng.lognormvariate(-(self.noise**2) / 2, self.noise)
        self.now += spent
        guard.record(self.batch, chosen, 1 if chosen == PLAIN else ROWS, tokens, spent, caught_up=missed > 0)
        return tokens

    def speed(self, guard: Guard, steps: int) -> float:
        """In plain decoding."""
        start = self.now
        return sum(self.step(guard) for _ in range(steps)) * self.pace / (self.now - start)

    @property
    def best(self) -> float:
        return max(1.0, *(skill.speed for skill in self.skills))


def worlds(skills: Sequence[Skill], count: int = 6) -> list[tuple[World, Guard]]:
    """Memories learn, so every bound here holds although these are looked at once more."""
    names = NAMES[: len(skills)]
    return [(World(skills, rng=random.Random(n)), Guard(sources=names, learning=["memories"])) for n in range(count)]


GOOD, FAIR, POOR = Skill(1.2, geometric(0.65)), Skill(1.1, geometric(0.3)), Skill(1.6, geometric(0.55))
LOSING = [Skill(1.4, geometric(0.2)), Skill(1.2, NOTHING), Skill(3.0, geometric(0.5))]


@pytest.mark.parametrize(
    "skills",
    [
        [GOOD, FAIR, POOR],
        [FAIR, POOR, GOOD],
        [POOR, Skill(1.1, bursts(0.3, 6)), FAIR],
        [Skill(3.0, NOTHING), Skill(1.5, NOTHING), GOOD],
        [GOOD, FAIR, Skill(20.0, geometric(0.8))],
        [GOOD, GOOD, GOOD],
        [GOOD, FAIR],
    ],
    ids=["first", "last", "bursts", "one pays", "one is dear", "all alike", "two"],
)
def test_the_fastest_source_drafts_within_a_few_percent(skills: list[Skill]) -> None:
    found = []
    for world, guard in worlds(skills):
        world.speed(guard, 200)
        found.append(world.speed(guard, 1000) / world.best)
    assert mean(found) > 0.96
    assert min(found) > 0.87


def test_where_none_pays_all_of_them_together_cost_next_to_nothing() -> None:
    for skills in (LOSING, LOSING[:2], [Skill(1.1, NOTHING)] * 3):
        found = []
        for world, guard in worlds(skills):
            world.speed(guard, 120)
            found.append(world.speed(guard, 1500))
        assert mean(found) > 0.97
        assert min(found) > 0.955


def test_a_loss_is_bounded_from_the_first_step_on() -> None:
    """Each may lose what a first trial may, and a step more."""
    for world, guard in worlds(LOSING):
        gained = sum(world.step(guard) for _ in range(100))
        assert world.now - gained < sum(TERMS.first + 2 * skill.cost for skill in LOSING)


def test_every_source_is_looked_at_and_soon_the_fastest_leads() -> None:
    leads = 0
    for world, guard in worlds([FAIR, POOR, GOOD], 12):
        world.speed(guard, 3 * LOOK + 6)
        assert min(world.counts[source] for source in range(3)) >= 4
        world.counts.clear()
        world.speed(guard, SHORTEST_WAIT)
        leads += world.counts[2] > SHORTEST_WAIT - 2
    assert leads >= 9


CHANGES: dict[str, tuple[list[Skill], list[Skill]]] = {
    "the leader turns bad": ([GOOD, FAIR, POOR], [LOSING[0], FAIR, POOR]),
    "another turns better than the leader": ([GOOD, FAIR, POOR], [GOOD, Skill(1.1, lambda rng: 5.5), POOR]),
    "one begins to pay": (LOSING, [*LOSING[:2], Skill(1.6, geometric(0.8))]),
}


@pytest.mark.parametrize(("before", "after"), CHANGES.values(), ids=list(CHANGES))
def test_it_recovers_where_another_source_becomes_the_best(before: list[Skill], after: list[Skill]) -> None:
    found = []
    for seed, (world, guard) in enumerate(worlds(before, 8)):
        world.speed(guard, 400 + 7 * seed)
        world.skills = after
        world.speed(guard, 400)
        found.append(world.speed(guard, 600) / world.best)
    assert mean(found) > 0.94


def test_nothing_is_lost_where_all_stop_paying() -> None:
    found = []
    for world, guard in worlds([GOOD, FAIR, POOR], 30):
        world.speed(guard, 400)
        world.skills = LOSING
        world.speed(guard, 150)
        found.append(world.speed(guard, 800))
    assert mean(found) > 0.96, "a leader that has gained much may lose as much"


def test_a_fallen_leader_is_followed_by_the_next_best_at_once() -> None:
    """And not after its whole wait."""
    waits = []
    for seed, (world, guard) in enumerate(worlds([GOOD, LOSING[1], POOR], 8)):
        world.speed(guard, 400 + 5 * seed)
        world.skills = [Skill(1.2, NOTHING), LOSING[1], POOR]
        world.counts.clear()
        while world.counts[2] < 5:
            world.step(guard)
        waits.append(world.counts.total())
    assert median(waits) < 50, "but for one that was unlucky when it was tried last"


def test_a_batch_that_grows_and_shrinks_has_the_source_that_pays_for_it() -> None:
    """For one text a deep tree of the model is best, for a few the head, for many memories, for most nothing."""

    def at(batch: int) -> list[Skill]:
        costs = 1.2 + 0.04 * batch, 1.15 + 0.01 * batch, 2.0 + 0.1 * batch
        skills = geometric(0.65), bursts(0.25, 3), geometric(0.85)
        return [Skill(cost, tokens) for cost, tokens in zip(costs, skills, strict=True)]

    sizes = [1, 2, 4, 8, 16, 32, 64]
    speeds = [[skill.speed for skill in at(size)] for size in sizes]
    assert {own.index(max(own)) for own in speeds} == {0, 1, 2}
    assert max(speeds[-1]) < 1
    found = []
    for world, guard in worlds(at(1)):
        for size in [*sizes, *reversed(sizes)]:
            world.batch, world.skills = size, at(size)
            world.speed(guard, 150)
            found.append(world.speed(guard, 250) / world.best)
    assert mean(found) > 0.95
    assert min(found) > 0.8


def test_a_machine_that_turns_slower_is_not_blamed_on_the_source_that_is_tried_then() -> None:
    """What a step takes is compared with plain ones of the same time, whoever drafted since."""
    slower = []
    for world, guard in worlds([POOR, GOOD]):
        world.noise = 0.02
        world.speed(guard, 300)
        before = guard.reasons(1)
        world.pace = 3.0
        world.speed(guard, 300)
        slower.append(world.counts[1] / world.counts.total())
        assert before
    assert min(slower) > 0.8


def test_costs_follow_the_pace_that_another_model_has_seen() -> None:
    one, other = PassCostModel(settling=0), PassCostModel(settling=0)
    for model in (one, other):
        for _ in range(5):
            model.record(1, 1.0)
            model.record(8, 1.5)
    for _ in range(20):
        other.record(8, 6.0)
    before = one.costs([8])
    one.keep_pace(other)
    assert one.plain_seconds == pytest.approx(other.plain_seconds)
    assert one.costs([8]) == before
    PassCostModel().keep_pace(other)  # one that knows nothing yet


class Pupil:
    """Gives more tokens with every step of the machine, whoever drafts it."""

    def __init__(self, last: float, after: int = 100) -> None:
        self.last, self.after, self.steps = last, after, 0

    def __call__(self, rng: random.Random) -> float:
        share = min(1.0, self.steps / self.after)
        return geometric(share * self.last)(rng)


def raced(skill: Skill, steps: int, learning: Sequence[str], seed: int) -> tuple[float, Counter[int]]:
    """Speed where memories learn beside a model that is a little faster than plain decoding; and who drafted."""
    pupil = Pupil(0.56)
    world = World([Skill(1.6, pupil), skill], rng=random.Random(seed))
    guard = Guard(sources=("memories", "model"), learning=learning)
    start, tokens = world.now, 0.0
    for pupil.steps in range(steps):
        tokens += world.step(guard)
    return tokens / (world.now - start), world.counts


def test_one_that_has_learned_is_found_before_long() -> None:
    """Caught here: memories that had been looked at while they were empty, and hardly ever after."""
    model = Skill(3.4, geometric(0.74))
    found = [raced(model, 500, learning=["memories"], seed=seed) for seed in range(24)]
    before = [raced(model, 500, learning=[], seed=seed) for seed in range(24)]
    assert mean(speed for speed, _ in found) > 1.04 * mean(speed for speed, _ in before)
    assert median(counts[0] for _, counts in found) > 300 > median(counts[0] for _, counts in before)


def test_a_source_that_is_not_known_yet_is_said_nothing_of() -> None:
    guard = Guard(sources=NAMES)
    assert guard.reasons(1) == []
    assert guard.drafting(1) == [0, 1, 2], "all of them, while they are looked at"
    world = World([GOOD, FAIR, LOSING[1]])
    world.speed(guard, 300)
    head, *others = guard.reasons(1)
    assert head.startswith("For 1 text head drafts: ")
    assert head.endswith(" times plain decoding.")
    assert [reason.split(":")[0] for reason in others] == [
        "For 1 text memories is tried now and then",
        "For 1 text model is tried now and then",
    ]
    assert guard.drafting(1) == [0]
    world.skills = LOSING
    world.speed(guard, 300)
    assert guard.reasons(1)[-1] == "For 1 text nothing is drafted otherwise: no source is faster than plain decoding."
    assert guard.drafting(1) == []


def test_in_a_rehearsal_all_sources_have_their_turns() -> None:
    guard = Guard(sources=NAMES)
    world = World([GOOD, FAIR, Skill(30.0, NOTHING)])
    world.speed(guard, 100)
    world.counts.clear()
    guard.rehearse(50)
    world.speed(guard, 50)
    assert world.counts == {PLAIN: RECORDED + 1, 0: 15, 1: 15, 2: 15}
    guard.forget()
    assert guard.reasons(1) == []


def test_one_that_stands_aside_for_another_is_tried_soon_and_not_sooner_than_it_would_have_been() -> None:
    def waits(rest: Rest) -> int:
        found = 0
        while rest.advance():
            found += 1
        return found

    paying, losing = Rest(TERMS), Rest(TERMS)
    for _ in range(10):
        assert not paying.record(3.0, 1.0)
    assert paying.proved
    paying.stand_aside()
    assert not paying.proved
    assert waits(paying) == SHORTEST_WAIT
    assert losing.record(1.0, 20.0)
    losing.stand_aside()
    assert waits(losing) > 100
    losing.stand_aside()
    losing.come_forward()
    assert waits(losing) == 0
