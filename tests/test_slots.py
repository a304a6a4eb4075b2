"""Who has which slot of a KV cache: rows stay with their sequences, wherever these move, and go when room is needed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from branchwise.backends.transformers import slots as module
from branchwise.backends.transformers.slots import Slots
from branchwise.core.sequence import SequenceState

SLOTS, ROWS = 4, 9


class Books:
    """Slots of two tensors, and what should be in them: every row that is written is a number of its own."""

    def __init__(self) -> None:
        self.tensors = [torch.zeros(2, SLOTS, 1, ROWS, 2), torch.zeros(1, SLOTS, 3, ROWS, 1)]
        self.slots = Slots(self.tensors, SLOTS, ROWS)
        self.running: dict[SequenceState, list[int]] = {}
        self.retired: dict[SequenceState, list[int]] = {}  # the one used longest ago first
        self.written = 0

    def write(self, sequence: SequenceState, rows: int, beyond: int = 0) -> None:
        """Commit so many rows of a pass that wrote some more."""
        (slot,), (length,) = self.slots._seats([sequence])
        rows = min(rows, ROWS - length)
        end = min(length + rows + beyond, ROWS)
        self.slots._touch([slot], [end], length + rows)
        for row in range(length, end):
            self.written += 1
            for tensor in self.tensors:
                tensor[:, slot, :, row] = self.written
            if row < length + rows:
                self.running[sequence].append(self.written)
        self.slots.advance(sequence, rows)

    def make_room(self, spared: SequenceState | None = None) -> None:
        if len(self.running) + len(self.retired) == SLOTS:
            del self.retired[next(one for one in self.retired if one is not spared)]

    def check(self) -> None:
        assert self.slots.free_slots == SLOTS - len(self.running)
        places = {sequence: self.slots._slot(sequence) for sequence in (*self.running, *self.retired)}
        assert sorted(places[sequence] for sequence in self.running) == list(range(len(self.running)))
        assert len(set(places.values())) == len(places)
        for sequence, rows in (*self.running.items(), *self.retired.items()):
            assert self.slots.holds(sequence)
            assert self.slots.length(sequence) == len(rows)
            for tensor in self.tensors:
                wanted = torch.tensor(rows, dtype=torch.float)[:, None].expand(-1, tensor.shape[-1])
                for cells in tensor[:, places[sequence], :, : len(rows)].flatten(0, 1):
                    assert torch.equal(cells, wanted)
                if sequence in self.retired:
                    assert not tensor[:, places[sequence], :, len(rows) :].any()
        for slot in set(range(SLOTS)) - set(places.values()):
            assert not any(tensor[:, slot].any() for tensor in self.tensors)


def act(books: Books, choose: Callable[[int], int]) -> None:
    """Anything that a target may do; `choose(n)` is one of n numbers."""
    running, retired = list(books.running), list(books.retired)
    there, new = [*running, *retired], SequenceState([0])
    kind = choose(6)
    if kind == 0 and books.slots.free_slots:
        books.make_room()
        books.slots.open(new)
        books.running[new] = []
        books.write(new, choose(5), beyond=choose(3))
    elif kind == 1 and there and books.slots.free_slots:
        source = there[choose(len(there))]
        alone = source in books.retired and books.slots.free_slots == 1
        rows = choose(books.slots.length(source) + 1)
        if source in books.retired:
            books.retired[source] = books.retired.pop(source)
        if alone:
            books.slots.take_over(source, new, rows)
            books.running[new] = books.retired.pop(source)[:rows]
            return
        kept = (books.running | books.retired)[source][:rows]
        books.make_room(spared=source)
        books.slots.fork(source, new, rows)
        books.running[new] = kept
    elif kind == 2 and retired:
        source = retired[choose(len(retired))]
        rows = choose(books.slots.length(source) + 1)
        books.slots.take_over(source, new, rows)
        books.running[new] = books.retired.pop(source)[:rows]
    elif kind == 3 and running:
        one = running[choose(len(running))]
        rows = choose(books.slots.length(one) + 1)
        books.slots.retire(one, rows)
        books.retired[one] = books.running.pop(one)[:rows]
    elif kind == 4 and there:
        one = there[choose(len(there))]
        books.slots.close(one)
        (books.running if one in books.running else books.retired).pop(one)
        assert not books.slots.holds(one)
    elif kind == 5 and running:
        books.write(running[choose(len(running))], choose(4), beyond=choose(3))


@pytest.mark.parametrize("at_once", [2, 1024])
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_rows_stay_with_their_sequences_and_the_oldest_make_room(at_once: int, data: st.DataObject) -> None:
    books = Books()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "AT_ONCE", at_once)
        for _ in range(data.draw(st.integers(1, 25))):
            act(books, lambda n: data.draw(st.integers(0, n - 1)))
            books.check()


def test_without_memory_to_change_places_nothing_has_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    books = Books()
    for _ in range(2):
        one = SequenceState([0])
        books.slots.open(one)
        books.running[one] = []
        books.write(one, 3, beyond=2)
    first, second = books.running

    def none(tensor: Tensor) -> Tensor:
        raise torch.OutOfMemoryError

    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty_like", none)
        with pytest.raises(torch.OutOfMemoryError):
            books.slots.retire(first, 2)
    books.check()
    books.slots.retire(first, 2)
    books.retired[first] = books.running.pop(first)[:2]
    books.slots.take_over(first, third := SequenceState([0]), 1)
    books.running[third] = books.retired.pop(first)[:1]
    books.check()
    assert books.slots._slot(second) == 0
