"""The KV cache of a head: rows of texts, and of trees while they grow.

A row of a text reads hidden states of the target and stays. A row of a drafted node reads what its parent carried on;
it stands behind the rows of its text and is overwritten when the tree is done.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from branchwise.core.sequence import SequenceState
from branchwise.draft.head.network import Attend, HeadConfig

FIRST = 256
"""rows of a slot at first; they double as texts grow"""


class HeadCache:
    def __init__(self, config: HeadConfig, slots: int, device: torch.device, dtype: torch.dtype) -> None:
        self.lengths: dict[SequenceState, int] = {}
        """open text -> rows that stay"""
        self._slot: dict[SequenceState, int] = {}
        self._free = list(range(slots))
        self._store = torch.zeros(
            2, config.layers, slots, config.kv_heads, FIRST, config.head_width, device=device, dtype=dtype
        )

    def open(self, sequence: SequenceState) -> None:
        self._slot[sequence] = self._free.pop()
        self.lengths[sequence] = 0

    def close(self, sequence: SequenceState) -> None:
        if sequence in self._slot:
            self._free.append(self._slot.pop(sequence))
            del self.lengths[sequence]

    def attend(self, sequences: Sequence[SequenceState], cells: Tensor, seen: Tensor) -> Attend:
        """The attention of new rows of these texts.

        `cells` (batch, rows) says where each row is written, -1 for padding; `seen` (batch, rows, keys) which cells it
        attends to, its own included.
        """
        self._hold(int(cells.max()) + 2)
        device = self._store.device
        slots = [self._slot[sequence] for sequence in sequences]
        scratch = self._store.shape[4] - 1  # no text reaches it
        places = torch.where(cells < 0, scratch, cells).to(device)
        seen = seen.clone()
        seen[..., 0] |= cells < 0  # padding attends to something, so that it stays finite
        mask, rows = seen[:, None].to(device), torch.tensor(slots, device=device)
        keys_seen = seen.shape[-1]

        def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            keys, values = self._store[0, layer], self._store[1, layer]
            for kept, new in ((keys, key), (values, value)):
                kept[rows[:, None], :, places] = new.transpose(1, 2).to(kept.dtype)
            if len(slots) == 1:
                keys, values = keys[slots[0], None, :, :keys_seen], values[slots[0], None, :, :keys_seen]
            else:
                keys, values = keys[rows, :, :keys_seen], values[rows, :, :keys_seen]
            return functional.scaled_dot_product_attention(query, keys, values, mask, enable_gqa=True)

        return attend

    def _hold(self, cells: int) -> None:
        """Let every slot have so many cells, and one more for padding."""
        if cells >= self._store.shape[4]:
            wanted = 1 << cells.bit_length()
            self._store = functional.pad(self._store, (0, 0, 0, wanted - self._store.shape[4]))

    @property
    def bytes(self) -> int:
        return self._store.nbytes
