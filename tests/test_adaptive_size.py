"""As large a tree as pays: what passes cost is clocked, and the size follows."""

from __future__ import annotations

import random
import time

import pytest
import torch

from branchwise.backends.base import Scored
from branchwise.control import costs as pace
from branchwise.control.costs import STALE, PassCostModel
from branchwise.core.batch import TreeBatch
from branchwise.core.sequence import SequenceState
from branchwise.core.tree import DraftTree
from branchwise.draft import build_policy
from branchwise.draft.base import Budget
from branchwise.draft.builder import Judged
from branchwise.draft.policies.adaptive import SIZES, AdaptiveSize
from branchwise.engine import Engine, Request
from branchwise.errors import UsageError
from branchwise.testing import ToyTarget
from branchwise.verify import VERIFIERS, Verdict
from tests.test_lookup import Given


def cost_model_of(times: dict[int, float], turns: int = 600) -> PassCostModel:
    """A clock that has seen passes of these sizes in any order."""
    clock, rng = PassCostModel(), random.Random(0)
    for _ in range(turns):
        for rows in rng.sample(list(times), len(times)):
            clock.record(rows, times[rows])
    return clock


def test_costs_are_those_of_the_passes_that_were_seen() -> None:
    times = {1: 0.010, 5: 0.014, 9: 0.020, 17: 0.022}
    assert cost_model_of(times).costs([1, 5, 9, 17]) == pytest.approx([1, 1.4, 2, 2.2], rel=0.02)
    assert cost_model_of({rows: 60 * t for rows, t in times.items()}).costs([5, 17]) == pytest.approx(
        [1.4, 2.2], rel=0.02
    )


def test_the_first_pass_of_a_size_is_not_counted() -> None:
    clock = PassCostModel()
    clock.record(1, 100.0)
    assert not clock.knows_plain
    for rows in (1, 5, 5):
        clock.record(rows, 1.0)
    assert clock.knows_plain
    other = PassCostModel()
    for rows, seconds in ((1, 1.0), (1, 1.0), (5, 100.0), (5, 1.0)):
        other.record(rows, seconds)
    assert other.costs([5]) == clock.costs([5])


def test_more_rows_never_cost_less_and_unknown_sizes_are_between() -> None:
    clock = cost_model_of({1: 1.0, 5: 1.6, 9: 1.3})
    costs = clock.costs([1, 2, 3, 4, 5, 7, 9, 17, 65])
    assert costs == sorted(costs)
    assert costs[4] == costs[6] == pytest.approx(1.45, rel=0.02), "in the wrong order, so what lies between"
    assert 1 < costs[2] < 1.6
    assert costs[-1] > costs[-2] > 1.3, "behind the largest it goes on as guessed"


def test_a_machine_that_gets_slower_is_not_taken_for_a_size_that_costs_more() -> None:
    """The drift of half an hour in two hundred steps; plain steps are rare."""
    clock = cost_model_of({1: 1.0, 9: 1.2})
    for step in range(200):
        slower = 1 + step / 100
        clock.record(1 if step % 20 == 0 else 9, slower * (1.0 if step % 20 == 0 else 1.2))
    assert clock.costs([9])[0] == pytest.approx(1.2, rel=0.08)


def test_an_outlier_moves_little_and_a_change_is_learnt() -> None:
    clock = cost_model_of({1: 1.0, 9: 1.2})
    clock.record(9, 60.0)
    assert clock.costs([9])[0] == pytest.approx(1.2, rel=0.03)
    for _ in range(300):
        clock.record(1, 1.0)
        clock.record(9, 2.0)
    assert clock.costs([9])[0] == pytest.approx(2.0, rel=0.03)


def test_a_plain_step_is_asked_for_once_in_a_while() -> None:
    clock = cost_model_of({1: 1.0})
    for _ in range(STALE - 1):
        clock.record(2, 1.0)
        assert clock.knows_plain
    clock.record(2, 1.0)
    assert not clock.knows_plain


def test_nothing_known_is_a_guess() -> None:
    few, many = PassCostModel().costs([1, 49])
    assert few == pytest.approx(1)
    assert 1 < many < 3


def sized(times: dict[int, float], chances: list[float], nodes: int = 64) -> int:
    """How many nodes are laid where every pass costs so much, and a chain of tokens has these chances."""
    policy = AdaptiveSize(nodes)
    policy._costs = cost_model_of(times)
    table = {token: {token + 1: chance} for token, chance in enumerate(chances)}
    return len(policy.lay(0, 0, Given(table).candidates, Budget(128, 99))) - 1


def test_nodes_that_cost_nothing_are_all_drafted() -> None:
    assert sized({1: 1.0, 65: 1.0}, [0.5] * 8) == 8


def test_a_tree_that_does_not_pay_is_not_drafted() -> None:
    assert sized({1 + size: 1.0 + size for size in SIZES if size <= 8}, [0.9] * 8) == 0, "each row costs a pass"
    assert sized({1: 1.0, 2: 1.1, 65: 2.0}, []) == 0, "there is nothing to draft"
    assert sized({1: 1.0, 2: 1.5, 65: 2.0}, [0.1, 0.1]) == 0


def test_the_size_is_the_one_with_most_tokens_a_second() -> None:
    times = {1 + size: 1 + 0.05 * size for size in SIZES if size <= 64}
    chances = [0.9] * 16
    rates = {size: sum(0.9**n for n in range(size + 1)) / times[1 + size] for size in SIZES if size <= 16}
    assert sized(times, chances) == max(rates, key=rates.__getitem__)
    assert 0 < sized(times, chances) < 16


def test_a_cliff_is_not_stepped_over() -> None:
    times = {1: 1.0, 8: 1.1, 9: 3.0, 64: 3.2}
    assert sized(times, [0.95] * 16) == 7


def wide(chance: float, tile: float) -> int:
    """How many nodes are laid where 63 tokens have this chance each, and every 16 rows cost so much of a pass."""
    policy = AdaptiveSize(width=64)
    policy._costs = cost_model_of({1 + size: 1 + tile * (size // 16) for size in SIZES if size < 64})
    policy._costs.record(1, 1.0)  # a size that is hardly better takes turns with plain decoding
    table = {0: dict.fromkeys(range(1, 64), chance)}
    return len(policy.lay(0, 0, Given(table).candidates, Budget(128, 99))) - 1


@pytest.mark.parametrize("chance", [0.015, 0.01, 0.0025])
def test_a_tile_of_sixteen_rows_is_filled_and_no_other_begun(chance: float) -> None:
    """The root is a row too. Many tokens pay together where each alone would not."""
    assert wide(chance, tile=0.3) == 15
    assert wide(chance, tile=0.0) == 63


def test_what_is_hardly_better_than_plain_decoding_is_not_drafted() -> None:
    assert wide(0.0021, tile=0.0) == 63
    assert wide(0.0021, tile=0.3) == 15, "which is 3.1 % better"
    assert sized({1: 1.0, 64: 1.0}, [0.029]) == 0


def test_plain_decoding_takes_turns_with_a_size_that_may_be_slower() -> None:
    """Until it is clear which of them is faster; a size of which hardly anything is known is tried first."""
    costs = cost_model_of({1: 1.0, 2: 1.2}, turns=6)
    assert costs.unclear(2, 1.01)
    assert not costs.unclear(2, 2.0)
    assert not costs.unclear(64, 1.01)
    costs.record(1, 1.0)
    assert not costs.unclear(2, 1.01), "a plain pass came last"
    known = cost_model_of({1: 1.0, 2: 1.2})
    known.record(2, 1.2)
    assert not known.unclear(2, 1.06)


def test_an_own_plain_step_is_clocked_before_anything_is_drafted() -> None:
    policy = AdaptiveSize()
    assert len(policy.lay(0, 0, Given({0: {1: 1.0}}).candidates, Budget(9, 9))) == 1


def test_what_passes_cost_is_known_to_all_who_draft_for_a_target(monkeypatch: pytest.MonkeyPatch) -> None:
    """And each size of a batch has costs of its own."""
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    target, table = ToyTarget(4), {t: {(t + 1) % 4: 0.9} for t in range(4)}
    sequence = SequenceState([0])
    for step in range(150):
        drafter = Given(table, AdaptiveSize(2))
        drafter.bind(target.info)
        [tree] = drafter.draft([sequence], [Budget(9, 9)])
        assert (len(tree) == 1) == (step < 2), "two plain steps: one warms up, one counts"
        now[0] += 1.0 if len(tree) == 1 else 1.5
        drafter.update([sequence], Scored(TreeBatch([tree]).tokens), [Verdict(tuple(range(len(tree))), 0)])
    [clock] = pace._cost_models[target.info].values()
    assert clock.costs([1, 3])[1] > 1.05, "one difference was seen, and believed a little"
    other = Given(table, AdaptiveSize(2))
    other.bind(target.info)
    assert [len(tree) for tree in other.draft([sequence, SequenceState([1])], [Budget(9, 9)] * 2)] == [1, 1]


def test_a_tree_that_ran_out_is_booked_as_the_size_it_was_meant_to_be(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = AdaptiveSize()
    tree = DraftTree.chain([0] * 7)
    policy.update([Judged(SequenceState([0]), tree, torch.zeros(len(tree), 1), Verdict((0,), 0))])
    assert list(policy._costs._counts) == [8]


def test_the_text_does_not_depend_on_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    def written(dear: float) -> tuple[list[int], int]:
        monkeypatch.setattr(PassCostModel, "costs", lambda clock, wanted, hoped: [1 + dear * rows for rows in wanted])
        drafter = Given({t: {(t + 1) % 4: 0.5, (t + 2) % 4: 0.3} for t in range(4)}, AdaptiveSize(12))
        engine = Engine(ToyTarget(4), drafter, VERIFIERS.build("match"))
        made = engine.submit(Request((0, 1), max_new_tokens=40))
        while engine.busy:
            engine.step()
        return made.token_ids, made.stats.drafted_tokens

    one, other = written(0.01), written(0.2)
    assert one[0] == other[0]
    assert one[1] != other[1], "the clocks made no difference, so this shows nothing"


def test_over_a_draft_model_it_is_topk() -> None:
    policy = build_policy("paced:4,depth=2,width=3")
    assert isinstance(policy, AdaptiveSize)
    assert (policy.nodes, policy.depth, policy.width) == (4, 2, 3)


def test_a_bad_size_is_one_sentence() -> None:
    with pytest.raises(UsageError, match="at least 1"):
        AdaptiveSize(0)
