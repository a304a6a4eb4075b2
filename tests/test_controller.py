"""How many nodes are drafted, against a machine and a text of which everything is known."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from statistics import mean

import pytest
import torch

from branchwise.backends.toy import ToyTarget
from branchwise.control.choice import LOSS, SHARE, SHORTEST_WAIT, TRIAL, WORTH, Rest, Terms, best
from branchwise.control.costs import PassCostModel, cost_model_of
from branchwise.control.trust import Kept, Trust
from branchwise.core.sequence import SequenceState
from branchwise.core.tree import Draw
from branchwise.draft.base import Budget
from branchwise.draft.builder import Candidate, Judged
from branchwise.draft.policies.adaptive import AdaptiveSize
from branchwise.testing import COSTS, ROOM, SOURCES, Cost, World
from branchwise.verify import Verdict

HONEST = {name: promised for name, (promised, true) in SOURCES.items() if promised == true}
FLAT, STEEP, SECOND_ROW = COSTS["flat"], COSTS["steep"], COSTS["second row"]


@pytest.fixture(name="policy")
def make_policy() -> AdaptiveSize:
    policy = AdaptiveSize()
    policy._costs = PassCostModel()
    return policy


@pytest.mark.parametrize("cost", COSTS.values(), ids=COSTS)
@pytest.mark.parametrize("masses", HONEST.values(), ids=HONEST)
def test_an_honest_source_is_used_about_as_well_as_in_hindsight(masses: Sequence[float], cost: Cost) -> None:
    shares = []
    for seed in range(3):
        world, policy = World(masses, masses, cost, rng=random.Random(seed)), AdaptiveSize()
        world.speed(policy, 20)
        shares.append(world.speed(policy, 800) / world.hindsight)
    assert mean(shares) > 0.97
    assert min(shares) > 0.93


@pytest.mark.parametrize("cost", COSTS.values(), ids=COSTS)
@pytest.mark.parametrize("true", [(0.0, 0.0), (0.05, 0.05), (0.3, 0.1)], ids=str)
def test_a_source_that_promises_too_much_never_makes_a_text_slower(
    true: Sequence[float], cost: Cost, policy: AdaptiveSize
) -> None:
    world = World((0.9, 0.08), true, cost)
    world.speed(policy, 20)
    assert world.speed(policy, 1000) > 0.97 * max(1 / cost(1), 0.95 * world.hindsight)


def test_a_source_that_promises_too_little_is_used_all_the_same(policy: AdaptiveSize) -> None:
    world = World((0.6, 0.05), (0.8, 0.05), FLAT)
    world.speed(policy, 200)
    assert world.speed(policy, 1000) > 0.95 * world.hindsight


def test_it_recovers_where_nothing_is_accepted_any_more(policy: AdaptiveSize) -> None:
    world = World((0.8, 0.1), (0.8, 0.1), SECOND_ROW)
    assert world.speed(policy, 300) > 1.3 / world.cost(1)
    world.true = (0.0, 0.0)
    world.speed(policy, 50)
    assert world.speed(policy, 500) > 0.97 / world.cost(1)
    world.true = (0.8, 0.1)
    world.speed(policy, 50)
    assert world.speed(policy, 300) > 0.9 * world.hindsight, "and where something is again"


def test_it_recovers_where_passes_become_dear(policy: AdaptiveSize) -> None:
    """As they do for a batch that grows, or in the middle of a text."""
    world = World((0.5, 0.2), (0.5, 0.2), FLAT)
    world.speed(policy, 300)
    world.cost = STEEP
    world.speed(policy, 50)
    assert world.speed(policy, 600) > 0.97 * world.hindsight


@pytest.mark.parametrize("masses", HONEST.values(), ids=HONEST)
def test_a_batch_that_grows_and_shrinks_has_the_size_that_pays_for_it(
    masses: Sequence[float], policy: AdaptiveSize
) -> None:
    """Rows cost little until there are many: what pays for one text is dear for 64."""
    target, world = ToyTarget(4).info, World(masses, masses, lambda rows: 1 + rows / 40)
    for batch in (1, 64, 4, 16, 64, 1):
        world.batch = batch
        policy.begin_batch(batch, target)
        world.speed(policy, 20)
        found = world.speed(policy, 100 if batch > 4 else 1000)
        assert found > max(0.97 * world.plain, 0.93 * world.hindsight), batch


@pytest.mark.parametrize("seed", range(4))
def test_where_times_are_noisy_plain_decoding_is_not_mistaken_for_slower(seed: int, policy: AdaptiveSize) -> None:
    """A size that seems a little faster is not drafted for ever because nobody looks at plain passes again."""
    world = World(HONEST["poor"], HONEST["poor"], lambda rows: 1 + rows / 3, noise=0.2, rng=random.Random(seed))
    world.speed(policy, 20)
    assert world.speed(policy, 1000) > 0.97 * world.plain


def test_texts_of_a_batch_have_one_size_and_none_beyond_its_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """What one text alone would not draft is drafted for it where the others pay for it, if it is worth anything."""
    known = {"sure": (0.9, 0.05), "poor": (0.2, 0.1), "mute": ()}
    monkeypatch.setattr(PassCostModel, "knows_plain", True)
    monkeypatch.setattr(PassCostModel, "costs", lambda model, wanted, hoped: [1 + (rows > 1) * 0.6 for rows in wanted])

    def sizes(texts: Sequence[str], budgets: Sequence[Budget]) -> list[int]:
        def candidates(cursor: str) -> list[Candidate]:
            return [Candidate(token, mass, cursor) for token, mass in enumerate(known[cursor])]

        return [len(tree) - 1 for tree in AdaptiveSize(15).lay_all([0] * len(texts), texts, candidates, budgets)]

    assert sizes(["poor"], [ROOM]) == [0]
    assert sizes(["sure"], [ROOM]) == [15]
    assert sizes(["poor", "sure", "mute", "sure"], [ROOM, ROOM, ROOM, Budget(4, 16)]) == [13, 15, 0, 3]
    assert sizes(["poor", "mute", "mute", "sure"], [ROOM] * 4) == [13, 0, 0, 15]
    assert sizes(["poor", "mute", "mute", "sure"], [ROOM, ROOM, ROOM, Budget(1, 16)]) == [0, 0, 0, 0]


def test_a_batch_of_another_size_begins_with_what_is_known_of_the_nearest() -> None:
    target, seconds = ToyTarget(4).info, lambda rows: 1.0 if rows <= 16 else 3.0
    alone = cost_model_of(target, 1)
    for _ in range(40):
        for rows in (1, 2, 4, 8, 16, 24, 32):
            alone.record(rows, seconds(rows))
    four = cost_model_of(target, 3)
    assert four is cost_model_of(target, 4)
    assert four is not alone
    assert not four.knows_plain, "its own plain pass is timed first"
    assert four.costs([1, 2, 4, 8]) == pytest.approx([1, 1, 1, 3], rel=0.05)
    for _ in range(4):
        four.record(1, 5.0)
    assert four.knows_plain
    assert four.plain_seconds == pytest.approx(5.0, rel=0.1)
    assert alone.plain_seconds == pytest.approx(1.0, rel=0.1)


def test_a_size_is_left_only_for_one_that_is_clearly_better() -> None:
    assert best([1.0, 1.5, 1.9], [1.0, 1.2, 1.8]) == 1
    assert best([1.0, 1.2], [1.0, 1.2 / WORTH + 0.001]) == 0
    assert best([1.0], [1.0]) == 0
    assert best([1.0, 2.0, 3.0], [2.0, 2.0, 2.5]) == 2


def rested(gains: Callable[[int], float], steps: int, texts: int = 1) -> list[int]:
    """The steps in which a source stood aside that gives so many tokens for each plain pass of time."""
    rest, found = Rest(Terms().for_texts(texts)), []
    for step in range(steps):
        if rest.advance():
            found.append(step)
        else:
            rest.record(gains(step), 1.0)
    return found


def test_a_source_that_pays_never_stands_aside_and_one_that_does_not_mostly_does() -> None:
    assert rested(lambda step: 1.2, 500) == []
    assert rested(lambda step: 3.0 if step % 4 == 0 else 0.5, 500) == [], "on average it pays"
    aside = rested(lambda step: 0.9, 2000)
    assert aside[:SHORTEST_WAIT] == [*range(TRIAL, TRIAL + SHORTEST_WAIT)]
    lost = 0.1 * (2000 - len(aside))
    assert lost < 1.2 * SHARE * 2000
    assert min(rested(lambda step: 1 - LOSS / 2.5, 100)) == 3 < TRIAL, "a trial that loses much is over at once"
    back = rested(lambda step: 0.9 if step < 1000 else 1.5, 2000)
    assert max(back) < 1000 + LOSS / SHARE, "it is tried again, and kept"
    gone = rested(lambda step: 1.5 if step < 1000 else 0.5, 1200)
    assert min(gone) < 1000 + 2 * TRIAL


@pytest.mark.parametrize("texts", [1, 4, 8, 64])
def test_trials_of_many_texts_cost_a_smaller_share_of_all_steps(texts: int) -> None:
    for gained in (0.9, 0.6):
        drafted = 4000 - len(rested(lambda step, gained=gained: gained, 4000, texts))
        assert 0 < (1 - gained) * drafted < 1.2 * SHARE / math.sqrt(texts) * 4000
    back = rested(lambda step: 0.9 if step < 1000 else 1.5, 2000, texts)
    assert max(back) < 1000 + LOSS / SHARE, "it is tried again, and kept"


def test_what_was_done_for_a_text_in_vain_is_spread_over_many_steps() -> None:
    rest, waits = Rest(), []
    for invested in (0.0, 5.0):
        rest.invest(invested)
        while not rest.advance():
            rest.record(0.9, 1.0)
        waits.append(1 + sum(rest.advance() for _ in range(1000)))
    assert waits[1] > 3 / SHARE > waits[0]


def test_promises_are_worth_what_such_promises_were_worth() -> None:
    trust = Trust()
    for step in range(400):
        trust.record([Kept(0.9, step % 3 > 0), Kept(0.3, step % 3 == 0), Kept(0.01, False)])
    assert trust.worth(0.9) == pytest.approx(2 / 3, abs=0.05)
    assert trust.worth(0.3) == pytest.approx(1 / 3, abs=0.05)
    assert trust.worth(0.12) == 0.12, "of which nothing was ever seen"
    assert trust.worth(0.01) < 0.005
    for _ in range(600):
        trust.record([Kept(0.9, True)])
    assert trust.worth(0.9) > 0.97, "what was long ago fades"
    assert trust.worth(0.01) > 0.005, "and what was not seen again is forgiven"
    assert trust.worth(1.0) <= 1.0
    assert trust.worth(0.0) == 0.0


def test_verdicts_are_counted_for_the_nodes_that_they_are_about(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tree is laid best first and scored level by level; and sources are trusted apart."""
    known = {(): [("a", 0.9), ("b", 0.05)], ("a",): [("c", 0.9)], ("a", "c"): [("d", 0.9)]}
    names = "rabcd"

    def candidates(cursor: tuple[str, ...]) -> list[Candidate]:
        below = known.get(cursor, [])
        return [Candidate(names.index(n), m, (*cursor, n), "memory" if n == "b" else "head") for n, m in below]

    policy = AdaptiveSize()
    policy._costs = PassCostModel()
    monkeypatch.setattr(PassCostModel, "knows_plain", True)
    tree = policy.lay(0, (), candidates, ROOM).finish(Draw.FIXED)
    assert [names[token] for token in tree.tokens.tolist()] == ["r", "a", "b", "c", "d"]
    [growth] = policy._grown
    for _ in range(50):
        policy.update([Judged(SequenceState([0]), tree, torch.zeros(5, 1), Verdict((0, 2), 0))])
    assert policy._trust["memory"].worth(0.05) > 0.9
    assert policy._trust["head"].worth(0.9) < 0.1
    assert growth.kept(Verdict((0, 1, 3), 0)) == {
        "head": [Kept(0.9, True), Kept(pytest.approx(0.9), True), Kept(pytest.approx(0.9), False)],
        "memory": [Kept(0.05, False)],
    }
    assert growth.kept(Verdict((0,), 0))["head"] == [Kept(0.9, False)], "nothing was learned of what lies deeper"
    growth.cut(0)
    assert growth.kept(Verdict((0,), names.index("b"))) == {"head": [Kept(0.9, False)], "memory": [Kept(0.05, True)]}, (
        "what was not drafted is compared with the text all the same"
    )
