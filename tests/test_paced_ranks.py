"""As much of a tree of ranks as pays: places are judged by how often they were accepted, passes by what they took."""

from __future__ import annotations

import time

import pytest
import torch

from branchwise.draft import Budget, build_drafter, build_growth
from branchwise.draft.memories import Memories
from branchwise.draft.pace import FEW, STALE, Clock
from branchwise.draft.paced_ranks import EVERY, PacedRanks
from branchwise.draft.ranks import Ranks
from branchwise.engine import Engine, Request
from branchwise.sampling import SamplingParams
from branchwise.sequence import Sequence
from branchwise.target import Scored
from branchwise.testing import ToyTarget
from branchwise.tree import DraftTree
from branchwise.verify import VERIFIERS, Verdict

AMPLE = Budget(128, 32)


def scored(tree: DraftTree) -> Scored:
    return Scored(torch.zeros(1, len(tree), 1))


class Machine:
    """A clock that knows what passes cost."""

    def __init__(self, slope: float) -> None:
        self.slope = slope
        self.seen: list[int] = []
        self.knows = True

    def has_seen(self, rows: int) -> bool:
        return True

    def costs(self, wanted: list[int]) -> list[float]:
        return [1 + self.slope * rows for rows in wanted]

    def saw(self, rows: int, seconds: float) -> None:
        self.seen.append(rows)


def on(machine: Machine, monkeypatch: pytest.MonkeyPatch, growth: PacedRanks) -> PacedRanks:
    monkeypatch.setattr("branchwise.draft.paced_ranks.clock_of", lambda target, batch: machine)
    return growth


def step(growth: PacedRanks, deep: int, budget: Budget = AMPLE) -> int:
    """One step in which the first-born are accepted so many levels down; how many nodes were drafted."""
    growth.begin(1, None)
    shape = growth.within(budget)
    growth.drafted()
    tree = DraftTree(torch.zeros(len(shape), dtype=torch.long), shape.parents)
    path = [0]
    while len(path) <= deep and shape.children[path[-1]]:
        path.append(shape.children[path[-1]][0])
    growth.observe([Sequence([0])], [tree], scored(tree), [Verdict(tuple(path), 0)])
    return len(shape) - 1


def test_over_a_draft_model_it_is_the_whole_shape() -> None:
    assert build_growth("paced-ranks:mcsd").within(AMPLE) is Ranks("mcsd").within(AMPLE)


def test_where_rows_cost_nothing_all_are_worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    growth = on(Machine(1e-6), monkeypatch, PacedRanks())
    assert [step(growth, 2) for _ in range(3 * EVERY)][-1] == 80


@pytest.mark.parametrize(("slope", "deep", "least", "most"), [(0.02, 6, 7, 31), (0.02, 0, 0, 0), (0.5, 1, 0, 0)])
def test_a_tree_is_as_large_as_pays(
    slope: float, deep: int, least: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    growth = on(Machine(slope), monkeypatch, PacedRanks())
    assert least <= [step(growth, deep) for _ in range(20 * EVERY)][-1] <= most


def test_what_is_accepted_is_booked_on_its_place_in_the_whole_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    """Caught here: nodes of a tree that was cut, counted as if they were those of the whole."""
    growth = on(Machine(1e-6), monkeypatch, PacedRanks())
    for _ in range(EVERY):
        step(growth, 2, Budget(12, 2))
    whole = growth.shape
    kept = sorted([node for node in growth._promising if whole.depths[node] <= 2][:12])
    assert len(growth.within(Budget(12, 2))) == 12
    assert kept != list(range(12)), "the same places would prove nothing"
    assert growth._tries.nonzero()[0].tolist() == kept
    first = [0, whole.children[0][0], whole.children[whole.children[0][0]][0]]
    assert growth._hits.nonzero()[0].tolist() == first
    assert growth._hits[first[2]] == growth._tries[first[2]] > 0


def test_every_size_is_tried_at_the_beginning_and_once_in_a_while_a_plain_step_is_clocked() -> None:
    target, growth = ToyTarget(7), PacedRanks()
    drafted = []
    for _ in range(2 * STALE):
        growth.begin(1, target)
        shape = growth.within(AMPLE)
        tree = DraftTree(torch.zeros(len(shape), dtype=torch.long), shape.parents)
        drafted.append(len(tree) - 1)
        growth.drafted()
        growth._ended = time.perf_counter() - (1 + len(tree) / 1000)  # as long as if the pass had taken so long
        path = tuple(shape.path(len(tree) - 1))  # the deepest node of the largest tree is always right
        growth.observe([Sequence([0])], [tree], scored(tree), [Verdict(path, 0)])
    few = 1 + FEW
    assert drafted[: 4 * few] == [0] * few + [7] * few + [31] * few + [80] * few
    assert drafted[4 * few + EVERY : STALE] == [80] * (STALE - 4 * few - EVERY)
    assert drafted[STALE:].count(0) == 1


def test_a_clock_waits_until_all_is_recorded() -> None:
    clock, told = Clock(settling=4), Clock()
    for _ in range(4):
        clock.saw(1, 50.0)
        assert not clock.knows
    for one in (clock, told):
        for _ in range(6):
            for rows, seconds in ((1, 1.0), (8, 1.5)):
                one.saw(rows, seconds)
    assert clock.knows
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
    wanted = []
    while engine.busy:
        engine.step()
        wanted.append(drafter.tree._wanted)  # type: ignore[attr-defined]
    assert set(wanted) <= {0, 7, 15}
    assert drafter.tree._turn > 0, "sizes that cannot come are waited for"  # type: ignore[attr-defined]
    assert text.finished


class There(ToyTarget):
    """A target that seems to lie on a device; tensors of it hold nothing."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__(vocabulary)
        self.device = torch.device("meta")


@pytest.mark.parametrize("tree", [None, "paths:2x3", "topk:5"])
def test_on_a_device_the_table_drafts_alone_unless_a_tree_is_asked_for(tree: str | None) -> None:
    drafter = build_drafter("memories", tree)
    assert isinstance(drafter, Memories)
    drafter.bind(There(50))
    assert (drafter._alone is not None) is (tree is None)
    assert isinstance(drafter.members[0].tree, PacedRanks) is (tree is None)
    assert drafter.room is None or drafter.room.nodes == (81 if tree is None else drafter.room.nodes)


def test_back_on_a_host_the_clock_of_the_device_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    drafter, host, there = Memories(), ToyTarget(11), There(11)
    drafter.bind(there)
    drafter.members[0].tree.begin(1, there)
    clock = drafter.members[0].tree._clock
    drafter.members[0]._table = None  # what holds nothing cannot be carried over
    engine = Engine(host, drafter, VERIFIERS.build("match"))
    engine.submit(Request((1, 2), max_new_tokens=20))
    while engine.busy:
        engine.step()
    assert not clock._seen


def test_a_step_counts_with_its_own_size_where_the_next_one_is_foreseen_before(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(1e-6)
    growth = on(machine, monkeypatch, PacedRanks())
    growth.begin(1, None)
    shape = growth.within(AMPLE)
    growth.drafted()
    tree = DraftTree(torch.zeros(len(shape), dtype=torch.long), shape.parents)
    growth._wanted = 7  # for the next step
    growth.observe([Sequence([0])], [tree], scored(tree), [Verdict((0,), 0)])
    assert machine.seen == [len(shape)]


def test_pacing_begins_where_trees_on_a_host_stay_smaller_than_asked_for() -> None:
    target, drafter = ToyTarget(200), build_drafter("suffix", "paced-ranks")
    engine = Engine(target, drafter, VERIFIERS.build("match"))
    engine.submit(Request((1, 2, 3, 1, 2, 3), max_new_tokens=150))
    while engine.busy:
        engine.step()
    assert drafter.tree._turn > 0  # type: ignore[attr-defined]
