"""Which sequence has which slot of a KV cache, and how many rows of it.

Running sequences occupy the first slots, and the last of them moves into a gap, so that a pass over all of them reads
views and copies nothing. Retired sequences occupy later slots: their texts have ended, and their committed rows stay
until a slot is needed; the least recently used one goes first. A slot without a sequence holds zeros.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from branchwise.core.sequence import SequenceState

AT_ONCE = 1024
"""the number of rows that are swapped at once, which is the size of the temporary copy"""


class Slots:
    """The sequences in a cache."""

    def __init__(self, tensors: Sequence[Tensor], slots: int, rows: int) -> None:
        """`tensors` (layers, slots, heads, rows, width) hold keys and values."""
        self.slots = slots
        self.rows = rows
        self._cells = list(tensors)
        self._running: list[SequenceState] = []
        self._retired: dict[SequenceState, int] = {}  # sequence -> slot, least recently used first
        self._lengths: dict[SequenceState, int] = {}
        self._touched = [0] * slots  # rows of each slot that may hold something

    @property
    def free_slots(self) -> int:
        """How many more sequences can be opened; retired ones make room."""
        return self.slots - len(self._running)

    def length(self, sequence: SequenceState) -> int:
        """How many tokens of the sequence are in the cache."""
        return self._lengths[sequence]

    def holds(self, sequence: SequenceState) -> bool:
        """Whether rows of a sequence, running or retired, are in the cache."""
        return sequence in self._lengths

    def open(self, sequence: SequenceState) -> None:
        self._vacate()
        self._running.append(sequence)
        self._lengths[sequence] = 0

    def fork(self, source: SequenceState, sequence: SequenceState, rows: int | None = None) -> None:
        """Open a sequence with a copy of the first `rows` committed rows, by default all, of another sequence, running
        or retired."""
        self._vacate(spared=source)
        origin, slot = self._slot(source), len(self._running)
        if source in self._retired:
            self._retired[source] = self._retired.pop(source)  # used last
        rows = self._lengths[source] if rows is None else rows
        assert rows <= self._lengths[source], "a fork of more rows than there are"
        self._touched[slot] = max(self._touched[slot], rows)
        for tensor in self._cells:
            tensor[:, slot, :, :rows] = tensor[:, origin, :, :rows]
        self._running.append(sequence)
        self._lengths[sequence] = rows

    def take_over(self, source: SequenceState, sequence: SequenceState, rows: int) -> None:
        """Open a sequence in the slot of a retired one and keep the first `rows` rows."""
        assert rows <= self._lengths[source], "a sequence takes over more rows than there are"
        self._swap(self._retired[source], len(self._running))
        self._clear(self._retired.pop(source), rows)
        del self._lengths[source]
        self._running.append(sequence)
        self._lengths[sequence] = rows

    def close(self, sequence: SequenceState) -> None:
        del self._lengths[sequence]
        if sequence in self._retired:
            self._clear(self._retired.pop(sequence), 0)
            return
        gap, last = self._running.index(sequence), self._running.pop()
        free = len(self._running)
        # Move all rows that its passes wrote: a draft model comes back to rows that are not committed yet.
        used = 0 if last is sequence else self._touched[free]
        for tensor in self._cells:
            tensor[:, gap, :, :used] = tensor[:, free, :, :used]
        # Clear all rows of the text: an overflow in them would reach whatever reads these rows under a mask.
        self._clear(gap, used)
        self._clear(free, 0)
        if last is not sequence:
            self._running[gap], self._touched[gap] = last, used

    def retire(self, sequence: SequenceState, rows: int) -> None:
        """Give the slot back, and leave the first `rows` rows in it until the slot is needed."""
        assert rows <= self._lengths[sequence], "more rows are left than there are"
        gap, free = self._running.index(sequence), len(self._running) - 1
        self._swap(gap, free)
        self._clear(free, rows)
        self._running[gap] = self._running[free]
        self._running.pop()
        self._retired[sequence], self._lengths[sequence] = free, rows

    def cut(self, sequence: SequenceState, length: int) -> None:
        """Count only the first `length` tokens of a sequence as committed; the rows after them are free again."""
        assert length <= self._lengths[sequence], "a cut made a sequence longer"
        self._lengths[sequence] = length

    def advance(self, sequence: SequenceState, rows: int) -> None:
        """Count the first `rows` rows of the last pass as committed, as after a chunk of prefill."""
        self._lengths[sequence] += rows

    def _slot(self, sequence: SequenceState) -> int:
        return self._retired[sequence] if sequence in self._retired else self._running.index(sequence)

    def _seats(self, sequences: Sequence[SequenceState]) -> tuple[list[int], list[int]]:
        return [self._running.index(one) for one in sequences], [self._lengths[one] for one in sequences]

    def _touch(self, slots: list[int], ends: list[int], needed: int) -> None:
        assert needed <= self.rows, "a pass reaches beyond its slots"
        for slot, end in zip(slots, ends, strict=True):
            self._touched[slot] = max(self._touched[slot], min(end, self.rows))

    def _vacate(self, spared: SequenceState | None = None) -> None:
        """Empty the first slot after those of running sequences. A retired sequence in it moves to an empty slot. If no
        slot is empty, the least recently used retired sequence other than `spared` is closed."""
        assert self.free_slots > 0, "opened more sequences than there are slots"
        place = len(self._running)
        occupied = set(self._retired.values())
        if place not in occupied:
            return
        empty = next((slot for slot in range(place, self.slots) if slot not in occupied), None)
        if empty is None:
            oldest = next(one for one in self._retired if one is not spared)
            empty = self._retired[oldest]
            self.close(oldest)
        self._swap(place, empty)

    def _swap(self, one: int, other: int) -> None:
        """Swap the contents of two slots; retired sequences move with their rows."""
        used = max(self._touched[one], self._touched[other])
        if one == other:
            return
        # Allocated before anything is moved, because memory may run out.
        places_aside = [torch.empty_like(tensor[:, one, :, : min(used, AT_ONCE)]) for tensor in self._cells]
        for first in range(0, used, AT_ONCE):
            part = slice(first, min(first + AT_ONCE, used))
            for tensor, place in zip(self._cells, places_aside, strict=True):
                aside = place[:, :, : part.stop - first].copy_(tensor[:, one, :, part])
                tensor[:, one, :, part] = tensor[:, other, :, part]
                tensor[:, other, :, part] = aside
        self._touched[one], self._touched[other] = self._touched[other], self._touched[one]
        places = {one: other, other: one}
        for sequence, slot in self._retired.items():
            self._retired[sequence] = places.get(slot, slot)

    def _clear(self, slot: int, rows: int) -> None:
        """Zero all rows of a slot but the first `rows`."""
        for tensor in self._cells:
            tensor[:, slot, :, rows : self._touched[slot]] = 0
        self._touched[slot] = min(self._touched[slot], rows)
