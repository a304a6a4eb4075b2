"""As much of a tree of ranks as pays: places are judged by how often they were accepted, passes by what they took."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest
import torch

from branchwise.control.costs import FEW, STALE, PassCostModel
from branchwise.core.sampling import SamplingParams
from branchwise.core.sequence import SequenceState
from branchwise.core.tree import DraftTree
from branchwise.draft import build_drafter, build_policy
from branchwise.draft.base import Budget
from branchwise.draft.builder import Judged
from branchwise.draft.lookup.memories import DefaultDrafter
from branchwise.draft.policies.adaptive import EVERY, AdaptiveRanks
from branchwise.draft.policies.template import Ranks
from branchwise.engine import Engine, Request
from branchwise.testing import ToyTarget
from branchwise.verify import VERIFIERS, Verdict

AMPLE = Budget(128, 32)


def judged(tree: DraftTree, verdict: Verdict) -> Judged:
    return Judged(SequenceState([0]), tree, torch.zeros(len(tree), 1), verdict)


class Machine:
    """A clock that knows what passes cost."""

    def __init__(self, slope: float) -> None:
        self.slope = slope
        self.recorded: list[int] = []
        self.knows_plain = True

    def knows(self, rows: int) -> bool:
        return True

    def costs(self, wanted: list[int]) -> list[float]:
        return [1 + self.slope * rows for rows in wanted]

    def record(self, rows: int, seconds: float) -> None:
        self.recorded.append(rows)


def on(machine: Machine, monkeypatch: pytest.MonkeyPatch, policy: AdaptiveRanks) -> AdaptiveRanks:
    monkeypatch.setattr("branchwise.draft.policies.adaptive.cost_model_of", lambda target, batch: machine)
    return policy


def step(policy: AdaptiveRanks, deep: int, budget: Budget = AMPLE) -> int:
    """One step in which the first-born are accepted so many levels down; how many nodes were drafted."""
    policy.begin_batch(1, None)
    shape = policy.within(budget)
    policy.drafted()
    tree = DraftTree(torch.zeros(len(shape), dtype=torch.long), shape.parents)
    path = [0]
    while len(path) <= deep and shape.children[path[-1]]:
        path.append(shape.children[path[-1]][0])
    policy.update([judged(tree, Verdict(tuple(path), 0))])
    return len(shape) - 1


def test_over_a_draft_model_it_is_the_whole_shape() -> None:
    assert build_policy("paced-ranks:mcsd").within(AMPLE) is Ranks("mcsd").within(AMPLE)


def test_where_rows_cost_nothing_all_are_worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = on(Machine(1e-6), monkeypatch, AdaptiveRanks())
    assert [step(policy, 2) for _ in range(3 * EVERY)][-1] == 80


@pytest.mark.parametrize(("slope", "deep", "least", "most"), [(0.02, 6, 7, 31), (0.02, 0, 0, 0), (0.5, 1, 0, 0)])
def test_a_tree_is_as_large_as_pays(
    slope: float, deep: int, least: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = on(Machine(slope), monkeypatch, AdaptiveRanks())
    assert least <= [step(policy, deep) for _ in range(20 * EVERY)][-1] <= most


def test_what_has_forgotten_chooses_as_at_first(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = on(Machine(0.02), monkeypatch, AdaptiveRanks())
    first = [step(policy, 0) for _ in range(20 * EVERY)]
    assert first[0] != first[-1]
    policy.forget()
    assert [step(policy, 0) for _ in range(20 * EVERY)] == first


def test_what_is_accepted_is_booked_on_its_place_in_the_whole_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    """Caught here: nodes of a tree that was cut, counted as if they were those of the whole."""
    policy = on(Machine(1e-6), monkeypatch, AdaptiveRanks())
    for _ in range(EVERY):
        step(policy, 2, Budget(12, 2))
    whole = policy.shape
    kept = sorted([node for node in policy._promising if whole.depths[node] <= 2][:12])
    assert len(policy.within(Budget(12, 2))) == 12
    assert kept != list(range(12)), "the same places would prove nothing"
    assert policy._tries.nonzero()[0].tolist() == kept
    first = [0, whole.children[0][0], whole.children[whole.children[0][0]][0]]
    assert policy._hits.nonzero()[0].tolist() == first
    assert policy._hits[first[2]] == policy._tries[first[2]] > 0


def test_every_size_is_tried_at_the_beginning_and_once_in_a_while_a_plain_step_is_clocked() -> None:
    target, policy = ToyTarget(7), AdaptiveRanks()
    drafted = []
    for _ in range(2 * STALE):
        policy.begin_batch(1, target.info)
        shape = policy.within(AMPLE)
        tree = DraftTree(torch.zeros(len(shape), dtype=torch.long), shape.parents)
        drafted.append(len(tree) - 1)
        policy.drafted()
        policy._laid_at = time.perf_counter() - (1 + len(tree) / 1000)  # as long as if the pass had taken so long
        path = tuple(shape.path(len(tree) - 1))  # the deepest node of the largest tree is always right
        policy.update([judged(tree, Verdict(path, 0))])
    few = 1 + FEW
    assert drafted[: 4 * few] == [0] * few + [7] * few + [31] * few + [80] * few
    assert drafted[4 * few + EVERY : STALE] == [80] * (STALE - 4 * few - EVERY)
    assert drafted[STALE:].count(0) == 1


def test_a_clock_waits_until_all_is_recorded() -> None:
    clock, told = PassCostModel(settling=4), PassCostModel()
    for _ in range(4):
        clock.record(1, 50.0)
        assert not clock.knows_plain
    for one in (clock, told):
        for _ in range(6):
            for rows, seconds in ((1, 1.0), (8, 1.5)):
                one.record(rows, seconds)
    assert clock.knows_plain
    assert clock.costs([8])[0] > told.costs([8])[0] * 0.8


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("draft", ["recycle", "memories"])
def test_no_text_changes(draft: str, temperature: float) -> None:
    texts = []
    for spec, tree in (("none", None), (draft, "paced-ranks:recycling-80")):
        engine = Engine(ToyTarget(11), build_drafter(spec, tree), VERIFIERS.build("match"))
        sampling = SamplingParams(temperature, seed=3)
        generations = [engine.submit(Request((1, 2 + n), sampling, max_new_tokens=60)) for n in range(3)]
        while engine.busy:
            engine.step()
        texts.append([generation.token_ids for generation in generations])
    assert texts[0] == texts[1]
    assert sum(generation.stats.accepted_tokens for generation in generations) > 0


def test_a_budget_below_the_sizes_is_paced_too() -> None:
    drafter = build_drafter("recycle", "paced-ranks:recycling-80")
    engine = Engine(ToyTarget(11), drafter, VERIFIERS.build("match"), Budget(16, 64))
    text = engine.submit(Request((1, 2), max_new_tokens=200))
    tree: Any = drafter.tree
    wanted, turns = [], []
    while engine.busy:
        engine.step()
        wanted.append(tree._wanted)
        turns.append(tree._turn)  # 0 again in a step that is plain to be timed, which may be the last one
    assert set(wanted) <= {0, 7, 15}
    assert max(turns) > 0, "sizes that cannot come are waited for"
    assert text.finished


class There(ToyTarget):
    """A target that seems to lie on a device; tensors of it hold nothing."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__(vocabulary)
        self.info = replace(self.info, device=torch.device("meta"))


@pytest.mark.parametrize("tree", [None, "paths:2x3", "topk:5"])
def test_on_a_device_the_table_drafts_alone_unless_a_tree_is_asked_for(tree: str | None) -> None:
    drafter = build_drafter("memories", tree)
    assert isinstance(drafter, DefaultDrafter)
    drafter.bind(There(50).info)
    assert (drafter._alone is not None) is (tree is None)
    assert isinstance(drafter.members[0].tree, AdaptiveRanks) is (tree is None)
    shape = drafter.needs.pad_shape
    if tree == "topk:5":
        assert shape is None
    else:
        assert shape is not None
        assert shape.nodes == (81 if tree is None else 7)


def test_back_on_a_host_the_clock_of_the_device_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    drafter, host, there = DefaultDrafter(), ToyTarget(11), There(11)
    drafter.bind(there.info)
    drafter.members[0].tree.begin_batch(1, there.info)
    clock = drafter.members[0].tree._costs
    drafter.members[0]._table = None  # what holds nothing cannot be carried over
    engine = Engine(host, drafter, VERIFIERS.build("match"))
    engine.submit(Request((1, 2), max_new_tokens=20))
    while engine.busy:
        engine.step()
    assert not clock._counts


def test_a_step_counts_with_its_own_size_where_the_next_one_is_foreseen_before(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(1e-6)
    policy = on(machine, monkeypatch, AdaptiveRanks())
    policy.begin_batch(1, None)
    shape = policy.within(AMPLE)
    policy.drafted()
    tree = DraftTree(torch.zeros(len(shape), dtype=torch.long), shape.parents)
    policy._wanted = 7  # for the next step
    policy.update([judged(tree, Verdict((0,), 0))])
    assert machine.recorded == [len(shape)]


def test_pacing_begins_where_trees_on_a_host_stay_smaller_than_asked_for() -> None:
    target, drafter = ToyTarget(200), build_drafter("suffix", "paced-ranks")
    engine = Engine(target, drafter, VERIFIERS.build("match"))
    engine.submit(Request((1, 2, 3, 1, 2, 3), max_new_tokens=150))
    tree: Any = drafter.tree
    turns = []
    while engine.busy:
        engine.step()
        turns.append(tree._turn)
    assert max(turns) > 0
