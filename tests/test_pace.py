"""As large a tree as pays: what passes cost is clocked, and the size follows."""

from __future__ import annotations

import pytest

from branchwise.draft import Budget, build_growth, pace
from branchwise.draft.pace import RECENT, SIZES, STALE, Clock, Paced
from branchwise.engine import Engine, Request
from branchwise.errors import UsageError
from branchwise.sequence import Sequence
from branchwise.target import Scored
from branchwise.testing import ToyTarget
from branchwise.tree import Forest
from branchwise.verify import VERIFIERS
from tests.test_memory import Given


def clock_of(times: dict[int, float], turns: int = 3) -> Clock:
    clock = Clock()
    for _ in range(turns):
        for rows, seconds in times.items():
            clock.saw(rows, seconds)
    return clock


def test_the_first_pass_of_a_size_is_not_counted() -> None:
    clock = Clock()
    clock.saw(1, 100.0)
    assert not clock.knows(1)
    clock.saw(1, 1.0)
    assert clock.knows(1)
    assert clock.seconds([1]) == [1.0]


def test_between_sizes_the_cost_is_in_proportion_and_more_rows_never_take_less() -> None:
    clock = clock_of({1: 10.0, 5: 14.0, 9: 12.0, 17: 22.0})
    assert clock.seconds([1, 3, 5, 7, 9, 13, 17]) == pytest.approx([10, 12, 14, 14, 14, 18, 22])
    assert clock.seconds([33])[0] == pytest.approx(22 + 16 * 12 / 16), "behind the last as steep as in the mean"


def test_a_median_of_recent_passes_counts_and_old_ones_are_forgotten() -> None:
    clock = clock_of({1: 1.0}, turns=4)
    clock.saw(1, 50.0)  # the machine did something else
    assert clock.seconds([1]) == [1.0]
    for _ in range(RECENT):
        clock.saw(1, 3.0)
    assert clock.seconds([1]) == [3.0]
    for _ in range(STALE):
        clock.saw(2, 4.0)
    assert not clock.knows(1)
    assert clock.knows(2)


def test_a_single_size_makes_a_guess_for_the_others() -> None:
    few, many = clock_of({1: 2.0}).seconds([1, 49])
    assert few == 2.0
    assert 2.0 < many < 6.0
    few, many = Clock().seconds([1, 49])
    assert few < many


def sized(times: dict[int, float], chances: list[float], nodes: int = 64) -> int:
    """How many nodes are laid where every pass costs so much, and a chain of tokens has these chances."""
    growth = Paced(nodes)
    growth._clock = clock_of(times)
    table = {token: {token + 1: chance} for token, chance in enumerate(chances)}
    return len(growth.lay(0, 0, Given(table).after, Budget(128, 99))) - 1


def test_nodes_that_cost_nothing_are_all_drafted() -> None:
    assert sized({1: 1.0, 65: 1.0}, [0.5] * 8) == 8


def test_a_tree_that_does_not_pay_is_not_drafted() -> None:
    assert sized({1: 1.0, 2: 2.0, 65: 66.0}, [0.9] * 8) == 0, "each row costs a pass"
    assert sized({1: 1.0, 2: 1.1, 65: 2.0}, []) == 0, "there is nothing to draft"
    assert sized({1: 1.0, 2: 1.5, 65: 2.0}, [0.1, 0.1]) == 0


def test_the_size_is_the_one_with_most_tokens_a_second() -> None:
    times = {1 + size: 1 + 0.05 * size for size in SIZES if size <= 64}
    chances = [0.9] * 16
    rates = {size: sum(0.9**n for n in range(size + 1)) / times[1 + size] for size in SIZES if size <= 16}
    assert sized(times, chances) == max(rates, key=rates.__getitem__)
    assert 0 < sized(times, chances) < 16


def test_a_cliff_is_not_stepped_over() -> None:
    times = {1: 1.0, 9: 1.1, 10: 3.0, 65: 3.2}
    assert sized(times, [0.95] * 16) == 8


def test_an_own_plain_step_is_clocked_before_anything_is_drafted() -> None:
    growth = Paced()
    assert len(growth.lay(0, 0, Given({0: {1: 1.0}}).after, Budget(9, 9))) == 1


def test_what_passes_cost_is_known_to_all_who_draft_for_a_target(monkeypatch: pytest.MonkeyPatch) -> None:
    """And each size of a batch has costs of its own."""
    now = [0.0]
    monkeypatch.setattr(pace.time, "perf_counter", lambda: now[0])
    target, table = ToyTarget(4), {t: {(t + 1) % 4: 0.9} for t in range(4)}
    sequence = Sequence([0])
    for step in range(4):
        drafter = Given(table, Paced(2))
        drafter.bind(target)
        [tree] = drafter.draft([sequence], [Budget(9, 9)])
        assert len(tree) == (1 if step < 2 else 3), "two plain steps: one warms up, one counts"
        now[0] += 1.0 + 0.01 * len(tree)
        drafter.observe([sequence], Scored(Forest([tree]).tokens), [None])  # type: ignore[list-item]
    [clock] = pace._clocks[target].values()
    assert clock.seconds([1, 3]) == pytest.approx([1.01, 1.03])
    other = Given(table, Paced(2))
    other.bind(target)
    assert [len(tree) for tree in other.draft([sequence, Sequence([1])], [Budget(9, 9)] * 2)] == [1, 1]


def test_the_text_does_not_depend_on_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    def written(dear: float) -> tuple[list[int], int]:
        monkeypatch.setattr(Clock, "seconds", lambda clock, wanted: [1 + dear * rows for rows in wanted])
        drafter = Given({t: {(t + 1) % 4: 0.5, (t + 2) % 4: 0.3} for t in range(4)}, Paced(12))
        engine = Engine(ToyTarget(4), drafter, VERIFIERS.build("match"))
        made = engine.submit(Request((0, 1), max_new_tokens=40))
        while engine.busy:
            engine.step()
        return made.token_ids, made.stats.drafted_tokens

    one, other = written(0.01), written(0.2)
    assert one[0] == other[0]
    assert one[1] != other[1], "the clocks made no difference, so this shows nothing"


def test_over_a_draft_model_it_is_topk() -> None:
    growth = build_growth("paced:4,depth=2,width=3")
    assert isinstance(growth, Paced)
    assert (growth.nodes, growth.depth, growth.width) == (4, 2, 3)


def test_a_bad_size_is_one_sentence() -> None:
    with pytest.raises(UsageError, match="at least 1"):
        Paced(0)
