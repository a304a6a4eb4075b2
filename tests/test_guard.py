"""When a guard lets nothing be drafted, against a machine and a drafter of which everything is known."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import mean

import pytest
import torch

from branchwise.backends.toy import ToyTarget
from branchwise.control.choice import SHORTEST_WAIT, Rest
from branchwise.control.costs import RECORDED
from branchwise.control.guard import PLAIN, TERMS, Guard

Tokens = Callable[[random.Random], float]
"""what a drafted step gives"""
ROWS = 9


def geometric(share: float, most: int = 8) -> Tokens:
    """Every drafted token is right with this probability, if those before it were."""

    def tokens(rng: random.Random) -> float:
        kept = 0
        while kept < most and rng.random() < share:
            kept += 1
        return 1.0 + kept

    return tokens


def bursts(share: float, kept: int) -> Tokens:
    """Now and then a whole chain is right, otherwise nothing."""
    return lambda rng: 1.0 + (kept if rng.random() < share else 0)


NOTHING = bursts(0, 0)


@dataclass
class World:
    """A machine on which a plain step takes a second."""

    cost: float
    """plain steps that a drafted one takes"""
    tokens: Tokens
    noise: float = 0.1
    batch: int = 1
    reading: float = 0.0
    """plain steps that the drafter takes to read what it has missed"""
    ahead: bool = False
    """whether the guard is asked about a step before the one in front of it is over, as where passes are enqueued"""
    rng: random.Random = field(default_factory=lambda: random.Random(0))
    pace: float = 1.0
    now: float = 0.0
    drafted: int = 0
    _behind: bool = True
    _decided: int | None = None

    def step(self, guard: Guard) -> float:
        """One step; how many tokens a text got."""
        chosen = guard.choose(self.batch) if self._decided is None else self._decided
        self._decided = guard.choose(self.batch) if self.ahead else None
        rested = chosen == PLAIN
        tokens, cost = (1.0, 1.0) if rested else (self.tokens(self.rng), self.cost)
        caught_up, self._behind = self._behind and not rested, rested
        self.drafted += not rested
        spent = (
            (cost + self.reading * caught_up) * self.pace * self.rng.lognormvariate(-(self.noise**2) / 2, self.noise)
        )
        self.now += spent
        guard.record(self.batch, chosen, 1 if rested else ROWS, tokens, spent, caught_up=caught_up)
        return tokens

    def speed(self, guard: Guard, steps: int) -> float:
        """In plain decoding."""
        start = self.now
        return sum(self.step(guard) for _ in range(steps)) * self.pace / (self.now - start)

    @property
    def own(self) -> float:
        """The speed of drafting on and on."""
        rng = random.Random(1)
        return mean(self.tokens(rng) for _ in range(20_000)) / self.cost


def speeds(cost: float, tokens: Tokens, steps: int = 1500, **about: float) -> list[float]:
    """After a trial, with several seeds."""
    found = []
    for seed in range(6):
        world, guard = World(cost, tokens, rng=random.Random(seed), **about), Guard()  # type: ignore[arg-type]
        world.speed(guard, 60)
        found.append(world.speed(guard, steps))
    return found


@pytest.mark.parametrize(
    ("cost", "tokens"),
    [
        (1.06, NOTHING),
        (1.4, NOTHING),
        (2.0, NOTHING),
        (20.0, bursts(0.5, 2)),
        (1.6, bursts(0.05, 6)),
        (2.0, geometric(0.4)),
        (1.2, geometric(0.1)),
    ],
    ids=["little", "some", "double", "draft model", "rare bursts", "half right", "nearly"],
)
def test_a_method_that_loses_costs_next_to_nothing_after_a_short_trial(cost: float, tokens: Tokens) -> None:
    assert World(cost, tokens).own < 0.96, "it does not lose"
    found = speeds(cost, tokens)
    assert mean(found) > 0.97
    assert min(found) > 0.95


@pytest.mark.parametrize(
    ("cost", "tokens"),
    [(1.5, geometric(0.5)), (2.0, geometric(0.7)), (1.5, geometric(0.65)), (3.0, geometric(0.8, 6))],
    ids=["1.3", "1.6", "1.9", "dear"],
)
def test_a_method_that_pays_keeps_its_speed(cost: float, tokens: Tokens) -> None:
    own = World(cost, tokens).own
    assert own > 1.2
    assert mean(speeds(cost, tokens)) > 0.97 * own


def test_a_method_that_pays_in_bursts_keeps_most_of_its_speed() -> None:
    """Long stretches without a gain look like a loss, until the next burst."""
    for cost, tokens in ((1.5, bursts(0.3, 4)), (1.4, bursts(0.15, 7))):
        assert mean(speeds(cost, tokens)) > 0.92 * World(cost, tokens).own > 1.3


@pytest.mark.parametrize("cost", [1.3, 1.5, 2.0])
def test_it_recovers_soon_where_nothing_was_accepted_and_then_much(cost: float) -> None:
    waits = []
    for seed in range(20):
        world, guard = World(cost, NOTHING, rng=random.Random(seed)), Guard()
        world.speed(guard, 400 + 7 * seed)
        world.tokens = lambda rng: 4.0
        before, steps = world.drafted, 0
        while world.drafted < before + 5:
            world.step(guard)
            steps += 1
        waits.append(steps - 5)
    assert max(waits) < (0.5 + cost) / TERMS.share, "no longer than one wait"
    assert mean(waits) < 50
    assert world.speed(guard, 200) > 0.97 * 4 / cost, "it drafts on"


def test_it_stands_aside_again_where_nothing_is_accepted_any_more() -> None:
    world, guard = World(1.5, geometric(0.7)), Guard()
    assert world.speed(guard, 300) > 1.5
    world.tokens = NOTHING
    world.speed(guard, 100)
    assert world.speed(guard, 500) > 0.96


def test_a_loss_is_bounded_from_the_first_step_on() -> None:
    for cost in (1.3, 2.0, 3.0):
        world, guard = World(cost, NOTHING, noise=0.02), Guard()
        steps = 60
        world.speed(guard, steps)
        assert world.now - steps < TERMS.first + 2 * (cost - 1) + TERMS.again + 1


def test_a_machine_that_turns_slower_is_not_blamed_on_the_drafter() -> None:
    world, guard = World(1.5, geometric(0.7), noise=0.05), Guard()
    world.speed(guard, 200)
    world.pace = 2.5
    before = world.drafted
    world.speed(guard, 200)
    assert world.drafted - before > 150


def test_what_is_read_after_a_rest_is_not_blamed_on_the_steps_but_must_be_earned() -> None:
    paying = [World(1.5, geometric(0.7), reading=8.0, rng=random.Random(seed)) for seed in range(6)]
    assert mean(world.speed(Guard(), 600) for world in paying) > 0.95 * paying[0].own
    assert mean(speeds(1.3, NOTHING, reading=8.0)) > 0.965, "each trial begins with it"
    assert mean(speeds(1.02, NOTHING, reading=30.0)) > 0.96


@pytest.mark.parametrize(("cost", "reading"), [(2.3, 4.0), (1.4, 0.0), (5.0, 0.0)])
def test_a_step_that_was_decided_before_the_trial_was_lost_counts_as_lost_too(cost: float, reading: float) -> None:
    assert mean(speeds(cost, NOTHING, reading=reading, ahead=True)) > 0.978
    own = World(1.5, geometric(0.7)).own
    assert mean(speeds(1.5, geometric(0.7), reading=reading, ahead=True)) > 0.97 * own


def test_one_accident_is_no_verdict() -> None:
    world, guard = World(1.5, geometric(0.7), noise=0.02), Guard()
    world.speed(guard, 100)
    guard.record(1, 0, ROWS, 1.0, 500.0, caught_up=False)
    before = world.drafted
    world.speed(guard, 40)
    assert world.drafted - before > 35


def test_what_pays_for_one_text_is_tried_for_many_and_may_rest_there() -> None:
    guard, world = Guard(), World(1.3, geometric(0.7))
    assert world.speed(guard, 100) > 1.5
    world.batch, world.cost = 8, 5.0
    world.speed(guard, 40)
    assert world.speed(guard, 1500) > 0.96
    world.batch, world.cost = 1, 1.3
    assert world.speed(guard, 100) > 1.5, "it still pays alone"


def test_a_batch_of_another_size_does_not_begin_with_a_whole_trial() -> None:
    guard, world = Guard(), World(2.0, NOTHING)
    world.speed(guard, 200)
    world.batch = 8
    before = world.drafted
    world.speed(guard, SHORTEST_WAIT)
    world.speed(guard, 100)
    assert world.drafted - before <= 4


def test_the_first_passes_of_a_size_are_not_judged_on_a_device() -> None:
    info = ToyTarget(4).info
    object.__setattr__(info, "device", torch.device("meta"))  # any that is no host
    guard = Guard(info)
    plain = 0
    while guard.choose(1) == PLAIN:
        guard.record(1, PLAIN, 1, 1.0, 60.0 if plain < RECORDED else 1.0, caught_up=False)
        plain += 1
    assert plain == RECORDED + 1
    for _ in range(RECORDED):  # recording takes a minute each
        assert guard.choose(1) == 0
        guard.record(1, 0, ROWS, 3.0, 60.0, caught_up=False)
        assert guard.speed is None
    for _ in range(100):
        if guard.choose(1) == 0:
            guard.record(1, 0, ROWS, 3.0, 1.5, caught_up=False)
        else:
            guard.record(1, PLAIN, 1, 1.0, 1.0, caught_up=False)
    assert guard.speed == pytest.approx(2.0, rel=0.02)


def test_a_rehearsal_makes_plain_steps_and_drafted_ones_and_leaves_no_verdict() -> None:
    world, guard = World(3.0, NOTHING), Guard()
    world.speed(guard, 100)
    for _ in range(2):
        guard.rehearse()
        assert [guard.choose(1) for _ in range(RECORDED + 1)] == [PLAIN] * (RECORDED + 1)
        before = world.drafted
        world.speed(guard, 12)
        assert world.drafted > before
    guard.forget()
    assert guard.speed is None
    assert guard.choose(1) == 0


def test_what_a_source_has_gained_it_may_lose_again_up_to_a_bound() -> None:
    rest = Rest(TERMS)
    for _ in range(200):
        assert not rest.advance()
        rest.record(3.0, 1.0)
    lost = 0
    while not rest.advance():
        rest.record(1.0, 2.0)
        lost += 1
    assert TERMS.credit <= lost <= TERMS.credit + TERMS.first + 4
    waited = 1
    while rest.advance():
        waited += 1
    assert waited == SHORTEST_WAIT, "it has paid, so it is tried again soon"
