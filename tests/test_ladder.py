"""A ladder of sizes finds the one that gives most tokens a second, in every batch, and keeps up when texts change."""

from __future__ import annotations

import random

import pytest

from branchwise.control.costs import RECORDED
from branchwise.control.ladder import FEW, MOST_ROWS, PATIENCE, Ladder, worth

NODES = (7, 15, 31, 63)


class Machine:
    """Steps of a known length that give a known number of tokens, noise aside."""

    def __init__(self, free: float, row: float, level: float, gain: float, noise: float = 0.05) -> None:
        """A pass takes 1 and each row beyond `free` ones `row`, a drafted level `level`; each doubling of a tree gains
        so many tokens."""
        self.free, self.row, self.level, self.gain, self.noise = free, row, level, gain, noise
        self.rng = random.Random(0)

    def seconds(self, texts: int, nodes: int) -> float:
        drafting = self.level * (1 + nodes).bit_length() if nodes else 0.0
        return 1 + self.row * max(0.0, texts * (1 + nodes) - self.free) + drafting

    def tokens(self, nodes: int) -> float:
        return 1 + self.gain * ((1 + nodes).bit_length() - 1)

    def speed(self, texts: int, nodes: int) -> float:
        return self.tokens(nodes) / self.seconds(texts, nodes)

    def step(self, ladder: Ladder, texts: int) -> tuple[float, float]:
        """Tokens and seconds of one step of the ladder's choice."""
        rung = ladder.rung(texts)
        nodes = ladder.nodes[rung]
        seconds = self.seconds(texts, nodes) * self.rng.lognormvariate(0, self.noise)
        tokens = self.tokens(nodes) + self.rng.gauss(0, 0.3 if nodes else 0.0)  # of several texts, on average
        ladder.record(texts, rung, tokens, seconds)
        return tokens, seconds


def speed_of(machine: Machine, ladder: Ladder, texts: int, steps: int) -> float:
    made = [machine.step(ladder, texts) for _ in range(steps)]
    return sum(tokens for tokens, _ in made) / sum(seconds for _, seconds in made)


def warmed(machine: Machine, *batches: int) -> Ladder:
    ladder = Ladder(NODES)
    for texts in batches:
        speed_of(machine, ladder, texts, 3 * (RECORDED + FEW))
    ladder.forget()
    return ladder


@pytest.mark.parametrize("texts", [1, 4, 16, 64])
@pytest.mark.parametrize("gain", [0.0, 0.05, 0.2, 0.6])
@pytest.mark.parametrize("row", [0.0002, 0.002, 0.02])
def test_the_best_size_in_hindsight_is_found(texts: int, gain: float, row: float) -> None:
    machine = Machine(free=64, row=row, level=0.06, gain=gain)
    ladder = warmed(machine, texts)
    speed_of(machine, ladder, texts, 20)
    found = speed_of(machine, ladder, texts, 400)
    best, plain = max(machine.speed(texts, ladder.nodes[rung]) for rung in ladder.rungs(texts)), machine.speed(texts, 0)
    assert found > 0.97 * plain
    if best > 1.05 * worth(texts) * plain:
        assert found > 0.95 * best
    elif best < 0.95 * worth(texts) * plain:
        assert found < 1.02 * plain, "what steps gain is lost where a batch thins out"


def test_nothing_is_drafted_while_nothing_comes_true_and_drafting_comes_back() -> None:
    machine = Machine(free=64, row=0.002, level=0.06, gain=0.6)
    ladder = warmed(machine, 16)
    speed_of(machine, ladder, 16, 100)
    machine.gain = 0.0
    speed_of(machine, ladder, 16, 50)
    assert speed_of(machine, ladder, 16, 100) > 0.97 * machine.speed(16, 0)
    machine.gain = 0.6
    speed_of(machine, ladder, 16, 600)
    assert speed_of(machine, ladder, 16, 100) > 0.9 * max(machine.speed(16, nodes) for nodes in (0, 7, 15, 31))


def test_a_batch_of_another_size_has_its_own_choice_at_once() -> None:
    machine = Machine(free=64, row=0.02, level=0.06, gain=0.3)
    ladder = warmed(machine, 1, 64)
    for texts in (1, 64, 1, 64):
        found = speed_of(machine, ladder, texts, 20)
        best = max(machine.speed(texts, ladder.nodes[rung]) for rung in ladder.rungs(texts))
        assert found > 0.9 * best


@pytest.mark.parametrize("texts", range(1, 65, 3))
def test_passes_stay_small_and_plain_decoding_is_always_among_the_choices(texts: int) -> None:
    ladder = Ladder(NODES)
    rungs = ladder.rungs(texts)
    assert rungs[0] == 0
    assert 2 <= len(rungs) <= 3
    assert all(texts * (1 + ladder.nodes[rung]) <= MOST_ROWS for rung in rungs)
    assert list(rungs) == sorted(set(rungs))


def test_every_size_is_tried_before_one_is_chosen_and_plain_steps_last() -> None:
    ladder = Ladder(NODES)
    tried = []
    for _ in range(3 * (RECORDED + FEW)):
        tried.append(ladder.rung(1))
        ladder.record(1, tried[-1], 2.0, 1.0)
    assert tried == sorted(tried, reverse=True)
    assert set(tried) == set(ladder.rungs(1))


def test_a_size_that_was_slow_once_is_timed_again() -> None:
    """What other sizes take is taken to change along with the one that is made; that may be wrong, either way."""
    machine = Machine(free=64, row=0.0002, level=0.06, gain=0.6)
    own = machine.seconds
    ladder = warmed(machine, 4)
    best = max(ladder.rungs(4), key=lambda rung: machine.speed(4, ladder.nodes[rung]))
    machine.seconds = lambda texts, nodes: own(texts, nodes) * (1.3 if nodes == ladder.nodes[best] else 1.0)  # type: ignore[method-assign]
    speed_of(machine, ladder, 4, 400)
    assert speed_of(machine, ladder, 4, 200) > 0.97 * max(machine.speed(4, nodes) for nodes in (31, 63))
    machine.seconds = own  # type: ignore[method-assign]
    speed_of(machine, ladder, 4, 400)
    assert speed_of(machine, ladder, 4, 200) > 0.97 * machine.speed(4, ladder.nodes[best])


@pytest.mark.parametrize("late", range(FEW))
def test_one_slow_step_at_warm_up_does_not_decide(late: int) -> None:
    """A host that is busy for a moment makes one step longer, never shorter."""
    machine = Machine(free=64, row=0.0002, level=0.06, gain=0.6)
    ladder, largest = Ladder(NODES), len(NODES)
    own, made = machine.seconds, 0

    def hindered(texts: int, nodes: int) -> float:
        nonlocal made
        made += nodes == NODES[-1]
        return own(texts, nodes) * (8 if nodes == NODES[-1] and made == RECORDED + 1 + late else 1)

    machine.seconds = hindered  # type: ignore[method-assign]
    speed_of(machine, ladder, 1, 3 * (RECORDED + FEW))
    ladder.forget()
    made = RECORDED + FEW + 1
    assert [ladder.rung(1) for _ in range(20)] == [largest] * 20


def test_a_size_that_was_far_too_slow_when_it_was_timed_comes_back() -> None:
    machine = Machine(free=64, row=0.0002, level=0.06, gain=0.6)
    own = machine.seconds
    machine.seconds = lambda texts, nodes: own(texts, nodes) * (2.5 if nodes == NODES[-1] else 1.0)  # type: ignore[method-assign]
    ladder = warmed(machine, 1)
    assert ladder.rung(1) != len(NODES)
    machine.seconds = own  # type: ignore[method-assign]
    speed_of(machine, ladder, 1, 1500)
    assert speed_of(machine, ladder, 1, 200) > 0.97 * machine.speed(1, NODES[-1])


def test_what_is_far_slower_is_hardly_tried_again() -> None:
    machine = Machine(free=1, row=0.1, level=0.06, gain=0.6)
    ladder = warmed(machine, 1)
    tried = []
    for _ in range(3000):
        tried.append(ladder.rung(1))
        machine.step(ladder, 1)
    assert tried.count(len(NODES)) < 3 * PATIENCE
    assert speed_of(machine, ladder, 1, 1000) > 0.99 * max(machine.speed(1, nodes) for nodes in (0, 31, 63))


def test_a_size_that_cannot_be_timed_again_is_given_up() -> None:
    """Texts that come and go leave no two like steps; plain decoding must stay among the choices."""
    ladder = warmed(Machine(free=64, row=0.0002, level=0.06, gain=0.6, noise=0.0), 4)
    best, near = ladder.rungs(4)[-1], ladder.rungs(4)[-2]
    ladder._paces[4, near].doubt()
    made = []
    for _ in range(3 * PATIENCE):
        made.append(ladder.rung(4))
        ladder.record(4, made[-1], 1.0, None)
    assert made[0] == near
    assert made.count(near) < 2 * PATIENCE
    assert made[-1] == 0, "nothing came true"
    assert best != near


def test_one_long_step_changes_no_choice() -> None:
    machine = Machine(free=64, row=0.002, level=0.06, gain=0.6, noise=0.0)
    ladder = warmed(machine, 1)
    speed_of(machine, ladder, 1, 30)
    before = ladder.rung(1)
    ladder.record(1, before, 4.0, 100.0)
    assert {ladder.rung(1) for _ in range(20)} == {before}


def test_what_steps_cost_is_not_forgotten() -> None:
    ladder = warmed(Machine(free=64, row=0.002, level=0.06, gain=0.6), 1)
    assert all(ladder.speed(1, rung) > 0 for rung in ladder.rungs(1))


def test_what_is_chosen_can_be_told() -> None:
    ladder = warmed(Machine(free=64, row=0.002, level=0.06, gain=0.6, noise=0.0), 1)
    told = ladder.reasons(1)
    assert len(told) == len(ladder.rungs(1))
    assert told[0] == "For 1 text plain decoding: 1.00 tokens a step of 1000.00 ms, 1 tokens/s."
    assert told[-1].startswith("For 1 text trees of 63 nodes: ")
    assert ladder.reasons(64) == [], "never timed"


def test_a_batch_is_expected_to_gain_what_its_own_texts_do() -> None:
    machine = Machine(free=64, row=0.0002, level=0.06, gain=0.6, noise=0.0)
    ladder = warmed(machine, 16)
    easy, hard = [f"easy {number}" for number in range(8)], [f"hard {number}" for number in range(8)]
    for _ in range(40):
        rung = ladder.rung(16, [*easy, *hard])
        tokens = dict.fromkeys(easy, machine.tokens(ladder.nodes[rung])) | dict.fromkeys(hard, 1.0)
        mean = sum(tokens.values()) / 16
        ladder.record(16, rung, mean, machine.seconds(16, ladder.nodes[rung]), tokens)
    assert rung, "drafting pays for all of them together"
    assert ladder.tokens(rung, [*easy, *hard]) == pytest.approx(ladder.tokens(rung), rel=0.1)
    assert ladder.tokens(rung, easy) > 1.5 * ladder.tokens(rung, hard)
    assert ladder.tokens(rung, hard) < 1.4
    assert ladder.tokens(rung, ["a new one"]) == ladder.tokens(rung)
    ladder.record(8, rung, 1.0, None, dict.fromkeys(hard, 1.0))
    assert ladder.tokens(rung, easy) == ladder.tokens(rung), "those that left are forgotten"


def test_nothing_is_drafted_for_texts_that_gain_nothing_once_the_others_have_left() -> None:
    machine = Machine(free=64, row=0.0002, level=0.06, gain=0.6, noise=0.0)
    ladder = warmed(machine, 4, 8)
    easy, hard = [f"easy {number}" for number in range(4)], [f"hard {number}" for number in range(4)]

    def steps(texts: list[str], count: int) -> list[int]:
        chosen = []
        for _ in range(count):
            rung = ladder.rung(len(texts), texts)
            tokens = {text: machine.tokens(ladder.nodes[rung]) if text in easy else 1.0 for text in texts}
            seconds = machine.seconds(len(texts), ladder.nodes[rung])
            ladder.record(len(texts), rung, sum(tokens.values()) / len(texts), seconds, tokens)
            chosen.append(rung)
        return chosen

    assert steps([*easy, *hard], 40)[-1]
    assert steps(hard, 1) == [0]


def test_a_device_that_was_slow_at_warm_up_does_not_make_drafts_look_good() -> None:
    """Plain steps were timed then alone: drafts must not be compared with what these took."""
    machine = Machine(free=10_000, row=0.0, level=0.1, gain=0.08, noise=0.02)  # loses a little
    slow = Machine(free=10_000, row=0.0, level=0.1, gain=0.4, noise=0.02)
    ladder = Ladder(NODES)
    for _ in range(3 * (RECORDED + FEW)):
        rung = ladder.rung(1)
        nodes = ladder.nodes[rung]
        ladder.record(1, rung, slow.tokens(nodes), 1.5 * slow.seconds(1, nodes))
    assert ladder.nodes[ladder.rung(1)], "at first drafts seem to pay"
    plain = machine.seconds(1, 0)
    assert speed_of(machine, ladder, 1, 400) > 0.9 / plain
    made = [machine.step(ladder, 1) for _ in range(100)]
    assert sum(tokens for tokens, _ in made) / sum(seconds for _, seconds in made) > 0.97 / plain


def test_what_greedy_texts_gained_is_not_expected_of_texts_that_draw() -> None:
    easy = Machine(free=64, row=0.0002, level=0.06, gain=0.6, noise=0.0)
    hard = Machine(free=64, row=0.0002, level=0.06, gain=0.02, noise=0.0)
    ladder = warmed(easy, 16)
    for turn in range(3):
        ladder.drawn = False
        assert ladder.rung(16), "drafting pays for greedy texts, whatever the others did"
        speed_of(easy, ladder, 16, 100)
        ladder.drawn = True
        assert bool(ladder.rung(16)) is (turn == 0), "until some have been drafted for"
        speed_of(hard, ladder, 16, 100)


def test_less_is_hoped_for_where_tokens_are_drawn() -> None:
    ladder = warmed(Machine(free=64, row=0.0002, level=0.06, gain=0.6), 4)
    greedy = ladder.tokens(4)
    ladder.drawn = True
    assert 1 < ladder.tokens(4) < greedy
