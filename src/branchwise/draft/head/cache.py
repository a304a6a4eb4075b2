"""The KV cache of a head: rows of texts, and of trees while they grow.

A row of a text reads hidden states of the target, and stays. A row of a drafted node reads what its parent carried on;
it is written after the rows of its text, and overwritten when the tree is done.

If rows attend to a window, rows that have left the window are dropped, so that the cache does not grow with its texts:
from time to time the rows in the window move to the first cells. A cell is the place of a row, counted from the first
row that is kept.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from branchwise.core.sequence import SequenceState
from branchwise.draft.foresight import dice_of, temperature_of
from branchwise.draft.head.network import Attend, HeadConfig, Look

KERNELS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
"""attention kernels of torch, without cuDNN's, which make a new plan for every length"""
FIRST = 256
"""initial number of cells of a slot; it doubles as texts grow"""
MOST_EXTRA = 128
"""most tokens of a prompt outside the table that can be proposed in its text"""


class Draws(NamedTuple):
    """What a draft knows of the target's draws in every slot (`foresight`)."""

    dice: Tensor
    """(slots,): the number that the keys of the draws are derived from"""
    temperatures: Tensor
    """(slots,): the temperature; 0 if nothing is drawn, or if foresight is not allowed"""


class HeadCache:
    """Cells of every slot, and what the last row of every text predicted and carried on.

    One more slot, after those of texts, is for the padding of batches; one more cell of each slot is for the padding of
    rows.
    """

    def __init__(self, config: HeadConfig, slots: int, device: torch.device, dtype: torch.dtype) -> None:
        self.lengths: dict[SequenceState, int] = {}
        """open text -> number of its rows so far, dropped ones included"""
        self.first: dict[SequenceState, int] = {}
        """open text -> the row in its first cell"""
        self.window = config.window
        self.spare = max(1, config.window // 4)
        """in a window: most rows that have left it before they are dropped, and most that a pass over a text writes"""
        self.slot: dict[SequenceState, int] = {}
        self.padding = slots
        """the slot that no text has"""
        self._free = list(range(slots))
        width, kind = config.width, cast("dict[str, Any]", {"device": device, "dtype": dtype})
        self.store = torch.zeros(2, config.layers, slots + 1, config.kv_heads, FIRST, config.head_width, **kind)
        """(keys and values, layers, slots, heads, cells, width)"""
        self.tokens = torch.zeros(slots + 1, FIRST, dtype=torch.long, device=device)
        """(slots, cells): the token after the one whose hidden states a row of a text read; not kept in a window"""
        self.columns = torch.arange(FIRST - 1, device=device)
        self.last = torch.zeros(2, slots + 1, width, **kind)
        """(2, slots, width): what the last row of every text predicted, and what it carried on"""
        self.predicted, self.carried = self.last
        self.foreseen = torch.zeros(slots + 1, config.masks, width, **kind)
        """(slots, depths, width): what a parallel head predicted in the same pass for the levels below the root"""
        self.firsts = torch.zeros(slots + 1, dtype=torch.long, device=device)
        """(slots,): `first` on the device"""
        self.seats = torch.zeros(slots + 1, dtype=torch.long, device=device)
        """(slots,): the slots of the texts in the target's cache"""
        self._seated: dict[int, int] = {}
        """slot -> what `seats` holds for it"""
        self.extra_tokens = torch.full((slots + 1, MOST_EXTRA), -1, device=device)
        """(slots, tokens): tokens outside the table that can be proposed in each text, -1 for none"""
        self.extra_rows = torch.zeros(slots + 1, MOST_EXTRA, width, **kind)
        """(slots, tokens, width): their output rows times the weights of the norm"""
        self.draws = Draws(
            torch.zeros(slots + 1, dtype=torch.long, device=device), torch.zeros(slots + 1, device=device)
        )
        self._foreseen = [False] * (slots + 1)
        """whether foresight is used in each slot, on the host"""

    @property
    def scratch(self) -> int:
        """The cell for padding, which no text reaches."""
        return int(self.store.shape[4]) - 1

    def open(self, sequence: SequenceState, first: int = 0) -> None:
        """Give a text a slot. Its rows before row `first` are never written."""
        slot = self.slot[sequence] = self._free.pop()
        self.lengths[sequence] = first
        self._begin_at(sequence, first)
        if len(sequence.tokens) == 1:  # the text has no row before its first verdict
            self.predicted[slot], self.carried[slot], self.foreseen[slot] = 0, 0, 0

    def _begin_at(self, sequence: SequenceState, row: int) -> None:
        """Let this row be in the first cell."""
        self.first[sequence] = row
        if self.window:
            self.firsts[self.slot[sequence]] = row

    def ends(self, slots: Tensor, lengths: Tensor, room: int) -> Tensor:
        """(batch,): the first cells after texts of `lengths` rows. At least `room` cells are left after them, even if
        rows of a text are missing for good, so that its window is empty."""
        return (lengths - self.firsts[slots]).clamp(0, self.scratch - room) if self.window else lengths

    def seat(self, sequences: Sequence[SequenceState], places: Sequence[int]) -> None:
        """Note the slots (`places`) of these texts in the target's cache."""
        slots = [self.slot[sequence] for sequence in sequences]
        moved = {slot: place for slot, place in zip(slots, places, strict=True) if self._seated.get(slot) != place}
        if moved:
            uploaded = torch.tensor([*moved.items()]).to(self.seats.device, non_blocking=True)
            self.seats[uploaded[:, 0]] = uploaded[:, 1]
            self._seated |= moved

    def held(self, sequence: SequenceState) -> int:
        """The number of cells that a text takes; without a window, the most that it takes before its next verdict."""
        return self.lengths[sequence] - self.first[sequence] if self.window else len(sequence.tokens)

    def inherit(self, source: SequenceState, sequence: SequenceState, rows: int, *, moved: bool) -> None:
        """Open a text with the first `rows` rows of `source`; if they are `moved`, `source` is closed."""
        first, rows = self.first[source], min(rows, self.lengths[source])
        if moved:
            self.slot[sequence] = self.slot.pop(source)
            del self.lengths[source], self.first[source]
        else:
            self.slot[sequence] = self._free.pop()
            origin, slot, cells = self.slot[source], self.slot[sequence], rows - first
            self.store[:, :, slot, :, :cells] = self.store[:, :, origin, :, :cells]
            self.tokens[slot, :cells] = self.tokens[origin, :cells]
        self.lengths[sequence] = rows
        self._begin_at(sequence, first)

    def propose(
        self, extra: Mapping[SequenceState, Sequence[int]], output: Tensor, weight: Tensor, *, foresees: bool
    ) -> None:
        """Let the `extra` tokens of each text be proposed too. Their rows are those of `output` times the `weight` of
        the norm. `foresees`: foresight is allowed."""
        numbers = np.full((len(extra), 3 + MOST_EXTRA), -1)
        temperatures = numbers[:, 2].view(np.float64)
        for row, (sequence, tokens) in enumerate(extra.items()):
            numbers[row, :2], temperatures[row] = (self.slot[sequence], dice_of(sequence)), temperature_of(sequence)
            numbers[row, 3 : 3 + len(tokens)] = tokens
            self._foreseen[self.slot[sequence]] = foresees and temperatures[row] > 0
        uploaded = torch.from_numpy(numbers).to(output.device, non_blocking=True)
        slots, known = uploaded[:, 0], uploaded[:, 3:]
        self.extra_tokens[slots], self.extra_rows[slots] = known, output[known.clamp_min(0)] * weight
        self.draws.dice[slots] = uploaded[:, 1]
        self.draws.temperatures[slots] = foresees * uploaded[:, 2].contiguous().view(torch.float64).float()

    def foresees(self, slots: Tensor) -> bool:
        """Whether foresight is used in one of these slots; called on a host only."""
        return any(self._foreseen[slot] for slot in slots.tolist())

    def close(self, sequence: SequenceState) -> None:
        if sequence in self.slot:
            self._free.append(self.slot.pop(sequence))
            del self.lengths[sequence], self.first[sequence]

    def note(self, sequence: SequenceState, count: int) -> None:
        """Keep the tokens after the next `count` rows, which are written now."""
        start = self.lengths[sequence]
        after = torch.tensor(sequence.tokens[start + 1 : start + count + 1])
        self.tokens[self.slot[sequence], start : start + count] = after.to(self.tokens.device, non_blocking=True)

    def let_go(self, sequences: Sequence[SequenceState]) -> None:
        """Drop the rows of these texts that no further row attends to, if they are many."""
        for sequence in sequences if self.window else ():
            seen = self.window - 1
            gone = self.held(sequence) - seen
            if gone > self.spare:
                cells = self.store[:, :, self.slot[sequence]]
                cells[..., :seen, :] = cells[..., gone : gone + seen, :].clone()
                self._begin_at(sequence, self.first[sequence] + gone)

    def hold(self, cells: int) -> None:
        """Let every slot have at least `cells` cells, and one more for padding."""
        if cells > self.scratch:
            wanted = 1 << cells.bit_length()
            self.store = functional.pad(self.store, (0, 0, 0, wanted - self.store.shape[4]))
            self.tokens = functional.pad(self.tokens, (0, wanted - self.tokens.shape[1]))
            self.columns = torch.arange(wanted - 1, device=self.columns.device)

    def attend(self, sequences: Sequence[SequenceState], cells: Tensor, seen: Tensor) -> Attend:
        """The attention of new rows of these texts.

        `cells` (batch, rows) says where each row is written, -1 for padding; `seen` (batch, rows, keys) which cells it
        attends to, its own included.
        """
        self.hold(int(cells.max()) + 1)
        device = self.store.device
        slots = [self.slot[sequence] for sequence in sequences]
        places = torch.where(cells < 0, self.scratch, cells).to(device, non_blocking=True)
        seen = seen.clone()
        seen[..., 0] |= cells < 0  # padding attends to the first cell, so that it stays finite
        mask, rows = (part.to(device, non_blocking=True) for part in (seen[:, None], torch.tensor(slots)))
        keys_seen = seen.shape[-1]

        def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            keys, values = self.store[0, layer], self.store[1, layer]
            for kept, new in ((keys, key), (values, value)):
                kept[rows[:, None], :, places] = new.transpose(1, 2).to(kept.dtype)
            if len(slots) == 1:
                keys, values = keys[slots[0], None, :, :keys_seen], values[slots[0], None, :, :keys_seen]
            else:
                keys, values = keys[rows, :, :keys_seen], values[rows, :, :keys_seen]
            with sdpa_kernel(KERNELS):
                return functional.scaled_dot_product_attention(query, keys, values, mask, enable_gqa=True)

        return attend

    @property
    def bytes(self) -> int:
        return int(self.store.nbytes)


def seen_in(window: int, cells: Tensor) -> Tensor:
    """(batch, rows, cells): the cells that each row attends to, up to its own, in a window unless `window` is 0. Rows
    are written to `cells` (batch, rows) in the order of their text; padding, whose cell is -1, attends to none."""
    ages = cells[:, :, None] - torch.arange(int(cells.max()) + 1)
    return (ages >= 0) & (ages < window) if window else ages >= 0


def look_at(keys: Tensor, values: Tensor, anchors: Tensor) -> Look:
    """Attention to the keys and values (batch, heads, tokens, width) of the tokens up to `anchors`: (batch, rows), or
    (batch, 1) for all rows of a text. Padding, whose anchor is -1, attends to the first token, so that it stays
    finite."""
    seen = torch.arange(keys.shape[2]) <= anchors[..., None].clamp_min(0)
    mask = None if bool(seen.all()) else seen[:, None].to(keys.device, non_blocking=True)

    def look(query: Tensor) -> Tensor:
        with sdpa_kernel(KERNELS):
            return functional.scaled_dot_product_attention(query, keys, values, mask, enable_gqa=True)

    return look
