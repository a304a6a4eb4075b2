"""The enumerator: every way that decisions can go, once, with its exact probability; and what it refuses."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from branchwise.audit.enumeration import Enumerator, outcomes
from branchwise.audit.instances import DRAWS, Drafts, ExactProbs, Instance
from branchwise.verify import VERIFIERS, Verdicts
from tests.strategies import worlds

Program = Callable[[Tensor, Enumerator], list[Tensor]]
"""takes rows and chance, gives columns (rows,) of what it found"""


def law_of(program: Program, rows: int = 1, most: int = 1 << 17) -> list[dict[tuple[int, ...], float]]:
    """By row, the probability of everything that a program can find."""
    found: list[dict[tuple[int, ...], float]] = [defaultdict(float) for _ in range(rows)]

    def verify(batch: Tensor, chance: Enumerator) -> Verdicts:
        return Verdicts(torch.stack(program(batch, chance), dim=1), torch.zeros_like(batch))

    for outcome in outcomes(verify, rows, most):
        for row, weight, way in zip(
            outcome.rows.tolist(), outcome.weights.tolist(), outcome.verdicts.paths.tolist(), strict=True
        ):
            found[row][tuple(way)] += weight
    return found


def even(batch: Tensor, ways: int) -> Tensor:
    return torch.full((len(batch), ways), 1 / ways)


ODDS = torch.tensor([[0.25, 0.5, 0.0], [1.0, 0.3, 0.2], [0.0, 0.0, 1.0], [0.125, 0.75, 0.5]], dtype=torch.float64)


# What is followed


def test_the_first_success_has_the_probability_that_all_before_it_fail() -> None:
    found = law_of(lambda rows, chance: [chance.first(ODDS[rows], 0)], rows=4)
    for odds, probs in zip(ODDS.tolist(), found, strict=True):
        failed, expected = 1.0, {}
        for turn, chance in enumerate([*odds, 1.0]):
            expected[turn,] = failed * chance
            failed *= 1 - chance
        assert probs == pytest.approx({way: weight for way, weight in expected.items() if weight})


def test_a_law_is_followed_where_it_has_mass_normalised_or_not() -> None:
    probs = torch.tensor([[1.0, 0.0, 3.0], [0.0, 2.0, 0.0]])
    found = law_of(lambda rows, chance: [chance.pick(probs[rows])], rows=2)
    assert found == [{(0,): 0.25, (2,): 0.75}, {(1,): 1.0}]


def test_what_is_decided_later_may_depend_on_what_was_decided_before() -> None:
    def program(rows: Tensor, chance: Enumerator) -> list[Tensor]:
        head = chance.first(torch.full((len(rows), 1), 0.25), 0)
        probs = torch.where(head[:, None] == 0, torch.tensor([0.5, 0.5, 0.0]), torch.tensor([0.0, 0.1, 0.9]))
        return [head, chance.pick(probs)]

    [found] = law_of(program)
    assert found == pytest.approx({(0, 0): 0.125, (0, 1): 0.125, (1, 1): 0.075, (1, 2): 0.675})


def test_every_way_is_followed_once() -> None:
    seen: list[tuple[int, ...]] = []

    def program(rows: Tensor, chance: Enumerator) -> Verdicts:
        columns = [chance.first(even(rows, 2), 0), chance.pick(even(rows, 3)), chance.token(even(rows, 2), 4)]
        seen.extend(map(tuple, torch.stack([rows, *columns], dim=1).tolist()))
        return Verdicts(torch.zeros_like(rows)[:, None], rows)

    assert sum(float(outcome.weights.sum()) for outcome in outcomes(program, 2)) == pytest.approx(2)
    assert len(seen) == len(set(seen)) == 2 * 3 * 3 * 2


def test_coins_tossed_in_several_calls_are_those_of_one() -> None:
    def one_by_one(rows: Tensor, chance: Enumerator) -> list[Tensor]:
        tossed = [chance.first(ODDS[rows, coin, None], coin) == 0 for coin in range(3)]
        return [torch.where(tossed[0], 0, torch.where(tossed[1], 1, torch.where(tossed[2], 2, 3)))]

    together = law_of(lambda rows, chance: [chance.first(ODDS[rows], 0)], rows=4)
    for one, other in zip(law_of(one_by_one, rows=4), together, strict=True):
        assert one == pytest.approx(other)


@pytest.mark.parametrize("most", [1, 2, 3, 100])
def test_the_size_of_a_run_changes_nothing(most: int) -> None:
    def program(rows: Tensor, chance: Enumerator) -> list[Tensor]:
        return [chance.first(ODDS[rows], 0), chance.pick(ODDS[rows] + 0.1), chance.first(ODDS[rows], 3)]

    for one, other in zip(law_of(program, 4, most), law_of(program, 4), strict=True):
        assert one == pytest.approx(other)


def test_a_row_does_not_depend_on_the_rows_beside_it() -> None:
    def program(rows: Tensor, chance: Enumerator) -> list[Tensor]:
        return [chance.first(ODDS[rows], 0), chance.first(ODDS[rows].flip(1), 7)]

    together = law_of(program, rows=4)
    for row in range(4):
        [alone] = law_of(lambda rows, chance, row=row: program(rows + row, chance))
        assert alone == pytest.approx(together[row])


def test_what_a_row_decides_only_because_another_needs_it_changes_nothing() -> None:
    # Catches replays that end early. A row whose walk is over draws along with the others; when its other draws are
    # replayed, no one is left to draw with, nothing is asked, and each of them used to count with the whole mass.
    def walk(rows: Tensor, chance: Enumerator) -> list[Tensor]:
        ended, length = torch.zeros_like(rows, dtype=torch.bool), torch.zeros_like(rows)
        for step in range(4):
            drawn = chance.token(even(rows, 2), step)
            ended |= drawn == 1
            if bool(ended.all()):
                break
            length += ~ended
        return [length]

    for probs in law_of(walk, rows=3):
        assert probs == pytest.approx({(0,): 1 / 2, (1,): 1 / 4, (2,): 1 / 8, (3,): 1 / 16, (4,): 1 / 16})


@settings(max_examples=15)
@given(worlds(max_paths=2))
@pytest.mark.parametrize("lazy", [True, False])
@pytest.mark.parametrize("name", list(VERIFIERS))
def test_the_weights_of_every_draft_sum_to_one(name: str, lazy: bool, instance: Instance) -> None:
    verifier = VERIFIERS.build(name)
    for kind, draw in DRAWS.items():
        if draw not in verifier.accepts:
            continue
        drafts = Drafts.of(kind, instance)

        def verify(rows: Tensor, chance: Enumerator, drafts: Drafts = drafts) -> Verdicts:
            found: Verdicts = verifier(drafts.batch.take(rows), ExactProbs(drafts.p[rows], lazy=lazy), chance)
            return found

        sums = torch.zeros(len(drafts.trees), dtype=torch.float64)
        for outcome in outcomes(verify, len(drafts.trees)):
            sums.index_add_(0, outcome.rows, outcome.weights)
        assert (sums - 1).abs().max() < 1e-12
        assert drafts.weights.sum() == pytest.approx(1, abs=1e-12)


# Hopes


@given(
    st.lists(st.tuples(st.sampled_from([0.0, 0.2, 0.5, 0.9, 1.0]), st.floats(0, 1)), min_size=1, max_size=4),
    st.booleans(),
)
def test_hopes_then_first_have_the_law_of_first_alone(coins: list[tuple[float, float]], skip: bool) -> None:
    bounds = torch.tensor([bound for bound, _ in coins], dtype=torch.float64)
    odds = bounds * torch.tensor([share for _, share in coins], dtype=torch.float64)

    def with_hopes(rows: Tensor, chance: Enumerator) -> list[Tensor]:
        found = torch.full_like(rows, len(coins))
        for coin in range(len(coins)):
            hope = chance.hopes(bounds[coin].expand(len(rows), 1), coin)
            if skip and not hope.any():
                continue  # the odds need not be known
            success = chance.first(odds[coin].expand(len(rows), 1), coin) == 0
            assert not (success & ~hope[:, 0]).any(), "a coin without hope has succeeded"
            found = torch.where((found == len(coins)) & success, coin, found)
        return [found]

    [alone] = law_of(lambda rows, chance: [chance.first(odds.expand(len(rows), -1), 0)])
    [found] = law_of(with_hopes)
    for way in {*alone, *found}:
        assert found.get(way, 0.0) == pytest.approx(alone.get(way, 0.0), abs=1e-12)


def test_the_odds_that_a_verifier_hands_over_stay_as_they_were() -> None:
    # A verifier may look at them again.
    def program(rows: Tensor, chance: Enumerator) -> list[Tensor]:
        odds = torch.full((len(rows), 1), 0.25, dtype=torch.float64)
        chance.hopes(torch.full((len(rows), 1), 0.5), 0)
        found = chance.first(odds, 0)
        assert (odds == 0.25).all()
        return [found]

    law_of(program, rows=2)


def test_hopes_of_one_row_say_nothing_of_another() -> None:
    bounds, odds = torch.tensor([[0.5], [0.0], [1.0]]), torch.tensor([[0.25], [0.0], [0.5]])

    def program(rows: Tensor, chance: Enumerator) -> list[Tensor]:
        return [chance.hopes(bounds[rows], 3)[:, 0].long(), chance.first(odds[rows], 3)]

    assert law_of(program, rows=3) == [
        pytest.approx({(0, 1): 0.5, (1, 0): 0.25, (1, 1): 0.25}),
        pytest.approx({(0, 1): 1.0}),
        pytest.approx({(1, 0): 0.5, (1, 1): 0.5}),
    ]


# What is refused


@pytest.mark.parametrize(
    "ask",
    [
        lambda chance: chance.first(torch.tensor([[0.5]]), 2),
        lambda chance: chance.hopes(torch.tensor([[0.5]]), 2),
        lambda chance: chance.pick(torch.tensor([[0.5, 0.5]]), 2),
        lambda chance: chance.token(torch.tensor([[0.5, 0.5]]), 2),
    ],
)
def test_the_same_decision_asked_for_twice_is_refused(ask: Callable[[Enumerator], Tensor]) -> None:
    # In production the second answer would be the first one again: two coins that always agree.
    with pytest.raises(AssertionError, match="twice"):
        law_of(lambda rows, chance: [ask(chance), ask(chance)])


def test_coins_that_overlap_are_refused() -> None:
    # first(…, 0) over two coins tosses coin 1 too.
    def program(rows: Tensor, chance: Enumerator) -> list[Tensor]:
        return [chance.first(even(rows, 2), 0), chance.first(even(rows, 2)[:, :1], 1)]

    with pytest.raises(AssertionError, match="twice"):
        law_of(program)


def test_a_coin_that_decides_nothing_may_be_tossed_again() -> None:
    # Rows of a batch share the numbers of their coins; where one has nothing to decide, its odds are 0.
    def program(rows: Tensor, chance: Enumerator) -> list[Tensor]:
        ended = (rows == 0)[:, None]
        both = torch.cat([torch.zeros(len(rows), 1), torch.where(ended, 0.5, 0.0)], dim=1)  # coins 2 and 3
        return [chance.first(torch.where(ended, 0.0, 0.5), 3), chance.first(both, 2) - 1]

    one, other = law_of(program, rows=2)
    assert one == pytest.approx({(1, 0): 0.5, (1, 1): 0.5})
    assert other == pytest.approx({(0, 1): 0.5, (1, 1): 0.5})


def test_a_verifier_that_tosses_one_coin_for_two_decisions_is_refused() -> None:
    class Twice(VERIFIERS.find("token")):  # type: ignore[misc]
        def __call__(self, batch, probs, chance):  # type: ignore[no-untyped-def]
            chance.first(torch.full((len(batch), 1), 0.5), 0)
            return super().__call__(batch, probs, chance)

    drafts = Drafts.of("paths", Instance.random(3, 1, 1, 1.0, [0]))
    with pytest.raises(AssertionError, match="twice"):
        list(outcomes(lambda rows, chance: Twice()(drafts.batch.take(rows), ExactProbs(drafts.p[rows]), chance), 3))


@pytest.mark.parametrize("row", [0, 1])
def test_odds_above_a_promised_bound_are_refused(row: int) -> None:
    # A coin that was given up for lost at the bound could have succeeded.
    bounds = torch.tensor([[0.5], [0.25]], dtype=torch.float64)

    def program(rows: Tensor, chance: Enumerator) -> list[Tensor]:
        chance.hopes(bounds[rows], 4)
        return [chance.first(bounds[rows] + 1e-6 * (rows == row)[:, None], 4)]

    with pytest.raises(AssertionError, match="odds of coin 4 pass their bound"):
        law_of(program, rows=2)


def test_hopes_are_one_coin_at_a_time() -> None:
    with pytest.raises(AssertionError, match="one coin at a time"):
        law_of(lambda rows, chance: [chance.hopes(even(rows, 2), 0)])
