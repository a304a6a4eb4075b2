"""On a host a head drafts as many nodes as pay, and where none does, nothing."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

import branchwise.draft.head.prompt as prompt_module
from branchwise.backends.toy import ToyTarget
from branchwise.control.choice import SHORTEST_WAIT, TRIAL, Terms
from branchwise.core.sequence import SequenceState
from branchwise.draft.base import NoDrafter
from branchwise.draft.head.drafter import HeadDrafter
from branchwise.draft.head.following import Unread
from branchwise.draft.head.trees.paced import PacedDraft, Proposed
from branchwise.draft.head.usual import Usual
from branchwise.draft.policies.topk import TopK
from branchwise.engine import Engine, Request
from branchwise.verify import VERIFIERS
from tests.heads import random_head

TREE = TopK(6, depth=3, width=2)


class Costs:
    """What passes cost, as is said, and those that were timed."""

    def __init__(self, row: float, first: float = 0.0, *, knows_plain: bool = True) -> None:
        self.row, self.first, self.knows_plain = row, first, knows_plain
        self.recorded: list[int] = []
        self.plain_seconds = 1e9
        """so long that whatever is drafted pays"""

    def costs(self, rows: Sequence[int], *, hoped: bool) -> list[float]:
        return [1 + (self.first if count > 1 else 0) + self.row * (count - 1) for count in rows]

    def unclear(self, rows: int, speed: float) -> bool:
        assert speed >= 1, "no size is taken that seems slower than plain decoding"
        return False

    def record(self, rows: int, seconds: float) -> None:
        assert seconds > 0
        self.recorded.append(rows)


def sizes(
    monkeypatch: pytest.MonkeyPatch, costs: Costs, prompts: Sequence[Sequence[int]] = ((1, 2, 3),), tokens: int = 30
) -> list[int]:
    """Rows of the passes that are made for some texts, which are the target's own."""
    monkeypatch.setattr("branchwise.draft.head.trees.paced.cost_model_of", lambda target, batch: costs)
    monkeypatch.setattr("branchwise.draft.head.usual.HOST", Usual(TREE, table=11, copies=0))
    target, texts = ToyTarget(11), []
    for drafter in (HeadDrafter(random_head(target.info)), NoDrafter()):
        engine = Engine(target, drafter, VERIFIERS.build("match"))
        asked = [engine.submit(Request(tuple(prompt), max_new_tokens=tokens)) for prompt in prompts]
        while engine.busy:
            engine.step()
        texts.append([one.token_ids for one in asked])
    assert texts[0] == texts[1]
    return costs.recorded


def paced() -> PacedDraft:
    """What grows the trees of a head on a host."""
    target = ToyTarget(11)
    drafter = HeadDrafter(random_head(target.info))
    drafter.bind(target.info)
    assert drafter._ahead is not None
    assert isinstance(drafter._ahead._draft, PacedDraft)
    return drafter._ahead._draft


def test_where_rows_cost_nothing_the_tree_is_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("branchwise.draft.head.trees.paced.UNLIKELY", 0.0)
    assert max(sizes(monkeypatch, Costs(0.0))) == 7


@pytest.mark.parametrize("costs", [Costs(2.0), Costs(0.0, first=9.0), Costs(0.0, knows_plain=False)])
def test_where_nothing_pays_nothing_is_drafted(costs: Costs, monkeypatch: pytest.MonkeyPatch) -> None:
    assert set(sizes(monkeypatch, costs)) == {1}


def test_in_between_there_are_as_many_nodes_as_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("branchwise.draft.head.trees.paced.UNLIKELY", 0.0)
    few, many = (sizes(monkeypatch, Costs(row)) for row in (0.3, 0.05))
    assert 1 < max(few) <= max(many)
    assert sum(few) / len(few) < sum(many) / len(many)


def test_texts_of_a_batch_have_trees_of_one_size(monkeypatch: pytest.MonkeyPatch) -> None:
    assert set(sizes(monkeypatch, Costs(0.01), ((1, 2), (3, 4, 5), (6, 7)))) <= set(range(1, 8))


def test_padding_of_a_batch_does_not_count_as_texts_that_nothing_is_known_of() -> None:
    draft = paced()
    draft._costs = Costs(0.3, first=0.3)  # type: ignore[assignment]
    draft._texts = 5
    texts = [Proposed([0.0], [1], [-1])] * 8
    worth = [[0.8]] * 5 + [[0.0]] * 3
    assert draft._size(texts, worth) == 1
    draft._texts = 8
    assert draft._size(texts, worth) == 0


@given(st.integers(0, 2**20), st.integers(1, 2), st.integers(0, 40), st.integers(0, 3))
def test_a_host_lays_the_trees_of_a_device(seed: int, batch: int, nodes: int, copies: int) -> None:
    """With padding for those whose parents are left out, in words of bits, and with copies of the text."""
    draw, tree, target = torch.Generator().manual_seed(seed), TopK(nodes + 1, depth=4, width=3), ToyTarget(11)
    drafter = HeadDrafter(random_head(target.info), tree=tree, copies=copies)
    drafter.bind(target.info)
    assert drafter._ahead is not None
    device = drafter._ahead._draft
    parts = device.head, device.cache, device.embeddings, device._output, device._table, device._rows
    host = PacedDraft(target.info, 0.0, tree, *parts, copies=copies)
    host._costs = Costs(0.0)  # type: ignore[assignment]
    values: list[float] = []
    host._size = lambda texts, worth: [values.extend(text.values) for text in texts] and host.nodes - 1  # type: ignore
    for part in (device.cache.store, device.cache.predicted, device.cache.carried):
        part.normal_(generator=draw)
    device.cache.tokens.random_(0, 11, generator=draw)
    slots, lengths, roots = torch.arange(batch), torch.tensor([9, 4])[:batch], torch.tensor([3, 5])[:batch]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("branchwise.draft.head.trees.paced.UNLIKELY", 0.0)
        found, wanted = host.grow(slots, lengths, roots), device.grow(slots, lengths, roots)
    ordered = sorted(values)
    assume(all(after - before > 1e-5 for before, after in pairwise(ordered)))  # or rounding orders them
    for one, other in zip(found, wanted, strict=True):
        assert torch.equal(one, other)


def test_no_level_is_grown_below_what_is_unlikely(monkeypatch: pytest.MonkeyPatch) -> None:
    levels: list[int] = []
    own = PacedDraft._size

    def watched(self: PacedDraft, values, worth):  # type: ignore[no-untyped-def]
        levels.append(self._made)
        return own(self, values, worth)

    monkeypatch.setattr(PacedDraft, "_size", watched)
    for unlikely in (0.0, 1.1):
        monkeypatch.setattr("branchwise.draft.head.trees.paced.UNLIKELY", unlikely)
        sizes(monkeypatch, Costs(0.0))
        assert set(levels) == ({3} if unlikely == 0 else {1})
        levels.clear()


def test_a_tree_that_was_asked_for_is_not_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    target = ToyTarget(11)
    drafter = HeadDrafter(random_head(target.info), tree=TREE)
    drafter.bind(target.info)
    assert drafter._ahead is not None
    assert not isinstance(drafter._ahead._draft, PacedDraft)


def test_a_head_that_does_not_pay_stands_aside_and_reads_later_what_it_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    costs = Costs(0.0)
    costs.plain_seconds = 1e-9
    monkeypatch.setattr("branchwise.draft.head.trees.paced.Terms", partial(Terms, share=1e15))
    passes: list[int] = []
    own = HeadDrafter._catch_up

    def watched(self: HeadDrafter, sequences: Sequence[SequenceState]) -> None:
        passes.append(len(self._texts[sequences[0]].unread))
        own(self, sequences)

    monkeypatch.setattr(HeadDrafter, "_catch_up", watched)
    made = sizes(monkeypatch, costs, ((1, 2, 3),), tokens=120)
    assert made.count(1) > 60, "nothing is drafted in most steps"
    assert max(passes) >= SHORTEST_WAIT, "rows of many steps are read at once"
    assert len(passes) < 60


def test_a_prompt_is_not_read_by_a_head_that_stands_aside(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    own = prompt_module.read_prompts

    def watched(*given: Any) -> None:
        read.extend(given[5])
        own(*given)

    monkeypatch.setattr(prompt_module, "read_prompts", watched)
    sizes(monkeypatch, Costs(0.0), ((1, 2, 3), (4, 5, 6, 7)), tokens=6)
    assert sorted(read) == [2, 3], "all but the root, when something is drafted first"
    read.clear()
    monkeypatch.setattr(PacedDraft, "rests", lambda draft, batch: True)
    sizes(monkeypatch, Costs(0.0), ((1, 2, 3), (4, 5, 6, 7)), tokens=6)
    assert read == []


def test_a_trial_of_several_texts_may_lose_less() -> None:
    lost = []
    for texts in (1, 4, 16):
        draft = paced()
        while not draft.rests(texts):
            draft._rest.record(1.0, 2.0)
            lost.append(texts)
    assert [lost.count(texts) for texts in (1, 4, 16)] == [5, 3, 1], "passes: 4, 2 and 1, and what fades of them"


def test_a_head_stands_aside_for_batches_of_the_size_where_it_does_not_pay() -> None:
    draft = paced()
    assert not draft.rests(8)
    for _ in range(TRIAL):
        draft._rest.record(1.0, 2.0)
    assert draft.rests(7), "about the same size"
    assert not draft.rests(1)


def test_states_of_a_prompt_are_taken_as_they_are_and_take_little_memory_once_they_have_to_wait() -> None:
    found = torch.arange(60.0).view(2, 10, 3)  # of two taps, behind those of another prompt
    hidden = [part[4:7] for part in found]
    unread = Unread.of_prompt(hidden, 3, found.device)
    assert len(unread) == 3
    assert [part.data_ptr() for part in unread.by_tap(9)] == [part.data_ptr() for part in hidden]
    assert [len(part) for part in unread.by_tap(2)] == [2, 2]
    Unread.settle([unread])
    assert unread.first(9).untyped_storage().nbytes() == 4 * 18
    torch.testing.assert_close(list(unread.by_tap(9)), hidden)
    unread.add(torch.stack(hidden, dim=1), 1, 3)
    torch.testing.assert_close(list(unread.by_tap(9)), [torch.cat([part, part[1:]]) for part in hidden])
    unread.drop(4)
    torch.testing.assert_close(list(unread.by_tap(9)), [part[2:] for part in hidden])
    unread = Unread.of_prompt(hidden, 3, found.device)
    unread.cut(2)
    assert len(unread) == 2
    torch.testing.assert_close(list(unread.by_tap(9)), [part[:2] for part in hidden])
    bare = Unread.of_prompt([], 5, found.device)
    assert (len(bare), list(bare.by_tap(3))) == (5, [])


def test_states_are_read_in_their_order_and_forgotten_from_the_end() -> None:
    states = torch.arange(10.0)[:, None, None]
    unread = Unread(states[:4])
    unread.add(states, 4, 5)
    unread.add(states, 5, 8)
    assert len(unread) == 8
    assert unread.first(3).flatten().tolist() == [0, 1, 2]
    unread.drop(2)
    assert (len(unread), unread.first(99).flatten().tolist()) == (6, [2, 3, 4, 5, 6, 7])
    unread.cut(7)
    assert len(unread) == 6
    unread.cut(4)
    unread.add(states, 8, 10)
    assert unread.first(99).flatten().tolist() == [2, 3, 4, 5, 8, 9]
    unread.drop(6)
    assert len(unread) == len(unread.first(9)) == 0
    assert unread.first(9).untyped_storage().nbytes() == 0, "what was read takes no memory any more"
