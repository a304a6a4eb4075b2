"""The cache of a draft model: it follows texts, and holds the rows of trees while they grow.

After a step the text has grown by accepted nodes and one token more. The rows of the nodes that the draft model has
seen are kept; what is left of the text is written in the pass that asks what follows the new root. Where a text is not
what it was, the longest common prefix stays.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from operator import eq
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from branchwise.backends.transformers.kv_cache import PartialTree
from branchwise.core.sequence import SequenceState
from branchwise.draft.builder import TreeBuilder

if TYPE_CHECKING:
    from branchwise.backends.transformers.target import TransformersTarget

AT_ONCE = 16
"""so many tokens of a text are written along with its root, in the pass that all texts share; more are a prefill"""


@dataclass(eq=False)
class DraftSlot:
    """What is in the cache of one text."""

    key: SequenceState = field(default_factory=lambda: SequenceState([0]))
    """its slot in the store; a text has a slot in the target's store under its own name"""
    cached: list[int] = field(default_factory=list)
    """tokens of the draft model whose rows are committed: after a pass all of the text, its root included"""
    tree: TreeBuilder = field(default_factory=lambda: TreeBuilder([0]))
    rows: dict[int, int] = field(default_factory=dict)
    """node of the tree -> its row behind the committed ones; the root has none"""


class DraftKVCache:
    """Texts in the slots of a draft model."""

    def __init__(
        self,
        acquire: Callable[[], TransformersTarget],
        release: Callable[[TransformersTarget], None],
        token_of: Callable[[int], int],
    ) -> None:
        """Slots are borrowed while there are texts. `token_of` says which token of the draft model one of a tree is."""
        self.token_of = token_of
        self._acquire, self._release = acquire, release
        self._acquired: TransformersTarget | None = None
        self._texts: dict[SequenceState, DraftSlot] = {}

    def __contains__(self, sequence: SequenceState) -> bool:
        return sequence in self._texts

    @property
    def slots(self) -> TransformersTarget:
        assert self._acquired is not None, "there is no text"
        return self._acquired

    def open(self, sequence: SequenceState) -> None:
        if sequence not in self._texts:
            if self._acquired is None:
                self._acquired = self._acquire()
            followed = DraftSlot()
            self.slots.store.open(followed.key)
            self._texts[sequence] = followed

    def close(self, sequence: SequenceState) -> None:
        if (followed := self._texts.pop(sequence, None)) is not None:
            self.slots.close(followed.key)
            if not self._texts:
                self._release(self.slots)
                self._acquired = None

    def roots(
        self, sequences: Sequence[SequenceState], texts: Sequence[list[int]], trees: Sequence[TreeBuilder]
    ) -> tuple[Tensor, Tensor]:
        """Write what is new in the texts (tokens of the draft model); the logits after each root.

        Returns logits (batch, nodes, vocabulary) and the row (batch,) in which the root of each text stands. The trees,
        of which nothing but the root is there, are those that will grow from here.
        """
        followed = [self._texts[sequence] for sequence in sequences]
        ahead = [self._catch_up(one, text) for one, text in zip(followed, texts, strict=True)]
        nodes = max(map(len, ahead))
        tokens = np.array([new + [0] * (nodes - len(new)) for new in ahead], dtype=np.int64)
        depths = np.tile(np.arange(nodes), (len(ahead), 1))
        chain = np.tile(np.tri(nodes, dtype=np.bool_), (len(ahead), 1, 1))
        logits = self.slots.sprout([one.key for one in followed], tokens, depths, chain)
        for one, new, tree in zip(followed, ahead, trees, strict=True):
            self.slots.store.advance(one.key, len(new))
            one.cached += new
            one.tree, one.rows = tree, {}
        return logits, torch.tensor([len(new) - 1 for new in ahead])

    def sprouts(self, sequences: Sequence[SequenceState], wanted: Sequence[list[int]]) -> Tensor:
        """(batch, nodes, vocabulary): the logits after the wanted nodes of every tree, in order."""
        followed = [self._texts[sequence] for sequence in sequences]
        before = [len(one.rows) for one in followed]
        nodes = max(map(len, wanted))
        shape = len(followed), nodes, max(before) + nodes
        tokens, depths = np.zeros(shape[:2], dtype=np.int64), np.zeros(shape[:2], dtype=np.int64)
        row_depths, ancestors = np.zeros((shape[0], shape[2]), dtype=np.int64), np.zeros(shape, dtype=np.bool_)
        joined: list[dict[int, int]] = []
        for b, (one, new) in enumerate(zip(followed, wanted, strict=True)):
            assert not one.rows.keys() & set(new), "a node was asked for twice"
            rows = one.rows | {node: before[b] + place for place, node in enumerate(new)}
            for node, row in rows.items():
                # The root is committed, so its children stand right behind the committed tokens.
                row_depths[b, row] = one.tree.depths[node] - 1
            for place, node in enumerate(new):
                tokens[b, place] = self.token_of(one.tree.tokens[node])
                depths[b, place] = one.tree.depths[node] - 1
                while node > 0:
                    ancestors[b, place, rows[node]] = True
                    node = one.tree.parents[node]
            for place in range(len(new), nodes):  # padding sees the text and itself
                ancestors[b, place, before[b] + place] = True
            joined.append(rows)

        keys = [one.key for one in followed]
        logits = self.slots.sprout(keys, tokens, depths, ancestors, PartialTree(before, row_depths))
        for one, rows in zip(followed, joined, strict=True):
            one.rows = rows
        return logits

    def _catch_up(self, followed: DraftSlot, text: list[int]) -> list[int]:
        """Keep the rows that are still true; returns the tokens that are not written yet, the root at least."""
        cached, store = followed.cached, self.slots.store
        known = len(cached)
        if cached != text[:known] or known == len(text):
            known = sum(1 for _ in takewhile(bool, map(eq, cached, text[:-1])))
            followed.rows = {}
        del cached[known:]
        store.cut(followed.key, known)  # also what a pass that was interrupted left behind
        path = self._accepted(followed, text[known:-1])
        store.keep([followed.key], [tuple(followed.rows[node] for node in path)])
        cached += text[known : known + len(path)]
        followed.rows = {}
        ahead = text[len(cached) :]
        if len(ahead) > AT_ONCE:
            self.slots.extend(followed.key, ahead[:-1])
            cached += ahead[:-1]
        return text[len(cached) :]

    def _accepted(self, followed: DraftSlot, tokens: list[int]) -> list[int]:
        """The nodes of the last tree that spell these tokens, as far as their rows go."""
        tree, node, path = followed.tree, 0, []
        children = {(tree.parents[child], self.token_of(tree.tokens[child])): child for child in followed.rows}
        for token in tokens:
            if (child := children.get((node, token))) is None:
                break
            path.append(node := child)
        return path
