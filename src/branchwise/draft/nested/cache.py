"""The KV cache of a nested model: rows that are not as deep as others yet.

A pass takes every new node through the first segment, looks at its exit, and takes on those that are not sure enough.
What a deeper segment needs of earlier rows that left early is computed then, from their states, which lie beside the
keys and values and move with them; each row also carries how many segments it has seen. So a row is in the end what a
pass through all layers would have written, whenever it got there.

Where a node leaves is decided by the distributions after it alone, each of which is decided by the tokens before it:
nothing that is drawn later, and nothing of other nodes or texts, has a say. So q is the distribution of the exit taken.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from branchwise.draft.model.draft_model import DraftKVCache, DraftSlot, Weights
from branchwise.draft.nested.segments import Segments

if TYPE_CHECKING:
    from branchwise.backends.transformers.kv_cache import PartialTree
    from branchwise.backends.transformers.target import TransformersTarget


@dataclass(frozen=True)
class Beside:
    """What lies beside the rows of a cache."""

    states: Tensor
    """(segments - 1, slots, rows, width): after each segment but the last"""
    seen: Tensor
    """(slots, rows): how many segments a row has seen"""


class NestedKVCache(DraftKVCache):
    def __init__(
        self,
        weights: Weights,
        acquire: Callable[[], TransformersTarget],
        token_of: Callable[[int], int],
        segments: Segments,
        thresholds: Sequence[float],
    ) -> None:
        """At each exit but the last a node leaves if its most probable token has at least the probability of the
        threshold there; where that is above 1 nobody looks."""
        super().__init__(weights, acquire, token_of)
        self.segments, self.thresholds = segments, (*thresholds, 0.0)
        self.left: Counter[int] = Counter()
        """nodes by the exit at which they left"""
        self._beside: WeakKeyDictionary[TransformersTarget, Beside] = WeakKeyDictionary()

    def beside(self) -> Beside:
        slots = self.slots
        if slots not in self._beside:
            width = slots.info.hidden_width
            states = slots.store.beside(len(self.thresholds) - 1, width)
            self._beside[slots] = Beside(states, slots.store.beside(1, 1)[0, :, :, 0])
        return self._beside[slots]

    def _extend(self, followed: DraftSlot, tokens: list[int]) -> None:
        store, first = self.slots.store, self.slots.store.length(followed.key)
        super()._extend(followed, tokens)
        [slot] = store.places([followed.key])
        self.beside().seen[slot, first : first + len(tokens)] = len(self.thresholds)

    def _sprout(
        self,
        followed: Sequence[DraftSlot],
        tokens: NDArray[np.int64],
        depths: NDArray[np.int64],
        ancestors: NDArray[np.bool_],
        places: Sequence[slice],
        written: PartialTree | None = None,
    ) -> Tensor:
        slots, keys, device = self.slots, [one.key for one in followed], self.slots.device
        beside = self.beside()
        steps = torch.from_numpy(depths).to(device)
        current = slots.store.begin(keys, steps, torch.from_numpy(ancestors).to(device), written)
        ids, positions = torch.from_numpy(tokens).to(device), current.lengths[:, None] + steps
        states = self.segments.run(0, ids, positions, slots)
        beside.states[0, current.slot_column, current.rows] = states.to(beside.states.dtype)
        beside.seen[current.slot_column, current.rows] = 1
        left = [(text, node) for text, place in enumerate(places) for node in range(*place.indices(tokens.shape[1]))]
        trees = [
            TextRows(
                slots.store.length(one.key),
                0 if written is None else written.rows[text],
                depths[text] if written is None else written.depths[text],
                ancestors[text],
            )
            for text, one in enumerate(followed)
        ]
        found: Tensor | None = None
        here = states[[text for text, _ in left], [node for _, node in left]]
        for number, threshold in enumerate(self.thresholds):
            if number:
                here = self._deeper(number, left, keys, trees)
            if threshold > 1:
                continue
            logits = self.segments.logits(here, slots)
            if found is None:
                found = logits.new_zeros(*tokens.shape, logits.shape[-1])
            sure = (logits.float().softmax(-1).amax(-1) >= threshold).tolist()
            for row, (text, node) in enumerate(left):
                if sure[row]:
                    found[text, node] = logits[row]
            self.left[self.segments.exits[number]] += sum(sure)
            left = [one for one, leaves in zip(left, sure, strict=True) if not leaves]
            if not left:
                break
        assert found is not None, "the last exit is always looked at"
        return found

    def _deeper(
        self, number: int, nodes: Sequence[tuple[int, int]], keys: Sequence[Any], trees: list[TextRows]
    ) -> Tensor:
        """(nodes, width): states of (text, node) after a segment, for which everything that they attend to is brought
        that far."""
        slots, beside, device = self.slots, self.beside(), self.slots.device
        texts = sorted({text for text, _ in nodes})
        wanted = {text: [node for one, node in nodes if one == text] for text in texts}
        places = slots.store.places([keys[text] for text in texts])
        missing = []
        for place, text in zip(places, texts, strict=True):
            needed = torch.from_numpy(trees[text].needed(wanted[text])).to(device)
            missing.append(needed[beside.seen[place, needed] <= number].tolist())
        count, ends = max(map(len, missing)), [trees[text].end for text in texts]
        # Texts with fewer rows are padded with rows behind their own, which mean nothing.
        filled = [[*rows, *range(end, end + count - len(rows))] for rows, end in zip(missing, ends, strict=True)]
        keys_read = max(max(rows) + 1 for rows in filled)
        laid = [trees[text].laid(rows, wanted[text], keys_read) for text, rows in zip(texts, filled, strict=True)]
        seen, positions, key_positions = (
            torch.from_numpy(np.stack(part)).to(device) for part in zip(*laid, strict=True)
        )
        rows = torch.tensor(filled, device=device)
        passed = slots.store.revisit([keys[text] for text in texts], rows, seen, positions, key_positions)
        before = beside.states[number - 1, passed.slot_column, rows].to(slots.info.dtype)
        states = self.segments.run(number, before, positions, slots)
        if number < len(self.thresholds) - 1:
            beside.states[number, passed.slot_column, rows] = states.to(beside.states.dtype)
        beside.seen[passed.slot_column, rows] = number + 1
        where = [(texts.index(text), filled[texts.index(text)].index(trees[text].row(node))) for text, node in nodes]
        return states[[text for text, _ in where], [row for _, row in where]]


@dataclass(frozen=True)
class TextRows:
    """The rows of one text: committed ones, those of its tree so far, and those of the coming pass."""

    length: int
    before: int
    """rows of the tree that earlier passes wrote"""
    depths: NDArray[np.int64]
    """(columns,): of the rows behind the committed ones"""
    ancestors: NDArray[np.bool_]
    """(nodes, columns): which of these each node of the pass sees"""

    @property
    def end(self) -> int:
        return self.length + self.before + len(self.ancestors)

    def row(self, node: int) -> int:
        return self.length + self.before + node

    def needed(self, nodes: Sequence[int]) -> NDArray[np.int64]:
        """All rows that these nodes attend to, in order."""
        columns = np.flatnonzero(self.ancestors[list(nodes)].any(axis=0))
        return np.concatenate([np.arange(self.length), self.length + columns])

    def laid(
        self, rows: Sequence[int], nodes: Sequence[int], keys: int
    ) -> tuple[NDArray[np.bool_], NDArray[np.int64], NDArray[np.int64]]:
        """(rows, keys): what each of these rows sees; and the positions (rows,) and (keys,) of both. Of the tree they
        are on paths to the nodes: whatever comes before a row on a path to it are its ancestors."""
        positions = np.arange(keys)
        columns = min(len(self.depths), keys - self.length)
        positions[self.length : self.length + columns] = self.length + self.depths[:columns]
        seen = np.zeros((len(rows), keys), dtype=np.bool_)
        for place, row in enumerate(rows):
            if row < self.length:
                seen[place, : row + 1] = True
                continue
            seen[place, row] = True  # all that a row of padding sees
            column = row - self.length
            if row < self.end:
                path = next((self.ancestors[node] for node in nodes if self.ancestors[node, column]), None)
                assert path is not None, "a row is brought deeper that no node needs"
                above = np.flatnonzero(path[: column + 1])
                seen[place, : self.length] = True
                seen[place, self.length + above] = True
        return seen, positions[list(rows)], positions
