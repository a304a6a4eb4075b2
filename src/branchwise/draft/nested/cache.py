"""The KV cache of a nested model, in which rows may have keys and values of the first layers only.

A pass takes every new node through the first segment, evaluates its exit, and takes only the nodes that are not sure
enough through the next segment. If a deeper segment needs an earlier row that left early, it is computed then, from the
state of the row, which is stored beside the keys and values and moves with them; for each row the cache also stores how
many segments it has passed. So in the end a row is what a pass through all layers would have written, whenever that
happens.

The exit of a node depends only on the distributions at its exits, and these only on the tokens up to the node; not on
anything drawn later, nor on other nodes or texts. So q is the distribution of the exit taken.
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
    """Tensors that are stored beside the rows of a cache."""

    states: Tensor
    """(segments - 1, slots, rows, width): the state of each row after each segment but the last"""
    seen: Tensor
    """(slots, rows): how many segments each row has passed"""


class NestedKVCache(DraftKVCache):
    def __init__(
        self,
        weights: Weights,
        acquire: Callable[[], TransformersTarget],
        token_of: Callable[[int], int],
        segments: Segments,
        thresholds: Sequence[float],
    ) -> None:
        """At each exit but the last, a node leaves if the probability of its most probable token is at least the
        threshold of the exit; an exit with a threshold above 1 is not evaluated."""
        super().__init__(weights, acquire, token_of)
        self.segments, self.thresholds = segments, (*thresholds, 0.0)
        self.left: Counter[int] = Counter()
        """exit -> number of nodes that left at it"""
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
        """(nodes, width): states of the nodes (text, node) after segment `number`. All rows that they attend to are
        brought through this segment first."""
        slots, beside, device = self.slots, self.beside(), self.slots.device
        texts = sorted({text for text, _ in nodes})
        wanted = {text: [node for one, node in nodes if one == text] for text in texts}
        places = slots.store.places([keys[text] for text in texts])
        missing = []
        for place, text in zip(places, texts, strict=True):
            needed = torch.from_numpy(trees[text].needed(wanted[text])).to(device)
            missing.append(needed[beside.seen[place, needed] <= number].tolist())
        count, ends = max(map(len, missing)), [trees[text].end for text in texts]
        # Texts with fewer rows are padded with rows after their own, whose content does not matter.
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
    """The rows of one text: the committed ones, those of its tree so far, and those of the coming pass."""

    length: int
    """number of committed rows"""
    before: int
    """number of rows of the tree that earlier passes wrote"""
    depths: NDArray[np.int64]
    """(columns,): the depths of the rows after the committed ones"""
    ancestors: NDArray[np.bool_]
    """(nodes, columns): which of these rows each node of the pass attends to"""

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
        """(rows, keys): which keys each of `rows` attends to; and the positions of the rows (rows,) and the keys
        (keys,). Every row of the tree is on a path to one of `nodes`: what comes before it on this path are its
        ancestors."""
        positions = np.arange(keys)
        columns = min(len(self.depths), keys - self.length)
        positions[self.length : self.length + columns] = self.length + self.depths[:columns]
        seen = np.zeros((len(rows), keys), dtype=np.bool_)
        for place, row in enumerate(rows):
            if row < self.length:
                seen[place, : row + 1] = True
                continue
            seen[place, row] = True  # a row of padding attends to itself alone
            column = row - self.length
            if row < self.end:
                path = next((self.ancestors[node] for node in nodes if self.ancestors[node, column]), None)
                assert path is not None, "a row is brought deeper that no node needs"
                above = np.flatnonzero(path[: column + 1])
                seen[place, : self.length] = True
                seen[place, self.length + above] = True
        return seen, positions[list(rows)], positions
