"""The weights of a draft model, loaded once and shared by all drafters that use them, and its KV cache.

After a step the text has grown by the accepted nodes and one more token. If the draft model has computed the rows of
accepted nodes, they stay in its KV cache; the rest of the text is written in the pass that computes the distribution
after the new root. If a text has changed in another way, the rows of the longest common prefix stay.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass, field
from functools import cached_property
from itertools import takewhile
from operator import eq
from typing import TYPE_CHECKING, Any, ClassVar
from weakref import WeakKeyDictionary, WeakValueDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from branchwise.backends.base import Execution
from branchwise.backends.quantized import AUTO, FLOAT, QuantizedLinear
from branchwise.backends.transformers.kv_cache import PartialTree
from branchwise.core.sequence import SequenceState
from branchwise.draft.builder import TreeBuilder
from branchwise.draft.model.pack import load_specialist
from branchwise.draft.nested.parts import first_layers
from branchwise.errors import ModelError, UnsupportedModel, UsageError
from branchwise.models import load_model

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from branchwise.backends.transformers.target import TransformersTarget

TREE_ROWS = 1024
"""number of rows of a slot after its text: a policy may expand more nodes than it keeps"""
MOST_IDLE = 4
"""most idle KV caches that are kept for reuse, the most recently used"""


class Weights:
    """A draft model with its tokenizer."""

    _loaded: ClassVar[WeakValueDictionary[tuple[str, torch.dtype, str, str], Weights]] = WeakValueDictionary()

    def __init__(self, name: str, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None) -> None:
        self.name, self.model, self.tokenizer = name, model, tokenizer
        self.lock = threading.RLock()
        """held while the model runs with the head of a drafter"""
        self._idle: list[tuple[Any, TransformersTarget]] = []
        self._kinds: WeakKeyDictionary[TransformersTarget, Any] = WeakKeyDictionary()
        self._heads: dict[bytes | None, Head] = {}
        self._shallower: dict[int, Weights] = {}

    @classmethod
    def of(
        cls, name: str, dtype: torch.dtype, device: torch.device, task: str | None = None, weights: str = FLOAT
    ) -> Weights:
        """The loaded weights of a model. `task` names a specialist of a pack; each specialist is a copy of its own.
        `weights` are those of `--weights`; with `auto` a model that cannot be quantised stays as it is."""
        shown = name if task is None else f"{name},task={task}"
        key = shown, dtype, str(device), weights
        if (found := cls._loaded.get(key)) is None:
            found = cls._loaded[key] = cls(shown, *_load(name, dtype, str(device), task, weights))
        return found

    @cached_property
    def fingerprint(self) -> str:
        """The fingerprint of the weights."""
        from branchwise.backends.transformers.weights import weights_fingerprint  # takes seconds to import

        return weights_fingerprint(self.model)

    @property
    def vocabulary(self) -> int:
        return int(self.model.config.get_text_config().vocab_size)

    def acquire(
        self, count: int, context: int, head: Head | None = None, execution: Execution | None = None
    ) -> TransformersTarget:
        """A KV cache for this many texts of at most this length, for one drafter until it releases the cache: drafters
        that take turns share its memory and the CUDA graphs recorded with this head."""
        from branchwise.backends.transformers.target import TransformersTarget  # transformers takes seconds to import

        kind = count, context, head, execution
        with self.lock:
            for number, (found, slots) in enumerate(self._idle):
                if found == kind:
                    del self._idle[number]
                    return slots
            ways = {} if execution is None else asdict(execution)
            slots = TransformersTarget(self.model, slots=count, context=context, max_nodes=TREE_ROWS, **ways)
            self._kinds[slots] = kind
            return slots

    def release(self, slots: TransformersTarget) -> None:
        with self.lock:
            if slots.free_slots == slots.slots:
                self._idle.append((self._kinds[slots], slots))
                del self._idle[:-MOST_IDLE]

    def first_layers(self, count: int) -> Weights:
        """The model with its first `count` layers only; the same object for the same count."""
        if count not in self._shallower:
            model = first_layers(self.model, count)
            self._shallower[count] = Weights(f"{self.name} to layer {count}", model, self.tokenizer)
        return self._shallower[count]

    def own_head(self, rows: Tensor | None = None) -> Head:
        """The head of the model, or some rows of it; the same object for the same rows."""
        key = None if rows is None else rows.cpu().numpy().tobytes()
        if key not in self._heads:
            head = self.model.get_output_embeddings()
            if not isinstance(head, nn.Linear | QuantizedLinear):
                raise ModelError(f"The draft model {self.name} has no linear head that could be trimmed or observed.")
            self._heads[key] = Head(head, rows)
        return self._heads[key]


def _load(name: str, dtype: torch.dtype, device: str, task: str | None, weights: str) -> tuple[Any, Any]:
    if task is not None:
        if weights not in (FLOAT, AUTO):
            raise UsageError(f"Specialists of a pack stay in floating point; leave out weights={weights}.")
        return load_specialist(name, task=task, dtype=dtype, device=device)
    if weights != FLOAT:
        from branchwise.backends.transformers.converted import load_converted

        with suppress(UnsupportedModel) if weights == AUTO else nullcontext():
            return load_converted(name, weights, dtype=dtype)
    return load_model(name, dtype=dtype, device=device)


class Head(nn.Module):
    """The head of a draft model, or some rows of it; it keeps the hidden states of the last pass."""

    def __init__(self, head: nn.Linear | QuantizedLinear, rows: Tensor | None = None) -> None:
        super().__init__()
        assert head.weight is not None, "output embeddings keep their weights"
        self.weight = head.weight if rows is None else head.weight[rows]
        self.bias = head.bias if rows is None or head.bias is None else head.bias[rows]
        self.seen: Tensor | None = None
        # In a tuple, the quantised layer is no submodule: its weights would count twice.
        self._quantised = (head,) if rows is None and isinstance(head, QuantizedLinear) else None

    def forward(self, hidden: Tensor) -> Tensor:
        self.seen = hidden
        if self._quantised is not None:
            found: Tensor = self._quantised[0](hidden)
            return found
        return nn.functional.linear(hidden, self.weight, self.bias)


AT_ONCE = 16
"""most tokens of a text that are written together with its root, in the pass of the whole batch; more are prefilled
separately"""


@dataclass(eq=False)
class DraftSlot:
    """The cache of one text."""

    key: SequenceState = field(default_factory=lambda: SequenceState([0]))
    """the key of its slot in the cache of the draft model; the sequence itself is the key in the target's cache"""
    cached: list[int] = field(default_factory=list)
    """tokens of the draft model whose rows are committed: after a pass the whole text, root included"""
    tree: TreeBuilder = field(default_factory=lambda: TreeBuilder([0]))
    rows: dict[int, int] = field(default_factory=dict)
    """node of the tree -> its row after the committed rows; the root has none"""
    ended: bool = False
    """whether the text has ended, and only its rows are left"""


class DraftKVCache:
    """The KV cache of a draft model, a slot for each text."""

    def __init__(
        self, weights: Weights, acquire: Callable[[], TransformersTarget], token_of: Callable[[int], int]
    ) -> None:
        """Slots are acquired with the first text and released with the last. `token_of` maps a token of a tree to a
        token of the draft model."""
        self.token_of, self._weights, self._acquire = token_of, weights, acquire
        self._acquired: TransformersTarget | None = None
        self._texts: dict[SequenceState, DraftSlot] = {}

    @property
    def slots(self) -> TransformersTarget:
        assert self._acquired is not None, "there is no text"
        return self._acquired

    def close(self, sequence: SequenceState) -> None:
        if (followed := self._texts.pop(sequence, None)) is not None:
            if self.slots.holds(followed.key):
                self.slots.close(followed.key)
            if not self._texts:
                self._weights.release(self.slots)
                self._acquired = None

    def retire(self, sequence: SequenceState) -> None:
        """Called when a text has ended; its rows stay until it is closed, or its slot is needed."""
        if (followed := self._texts.get(sequence)) is not None and not followed.ended:
            self.slots.store.retire(followed.key, len(followed.cached))
            followed.ended = True

    def inherit(self, source: SequenceState, sequence: SequenceState, text: list[int], *, moved: bool) -> None:
        """Start a text (tokens of the draft model) with the rows of `source`, which it begins like. If the rows are
        `moved`, `source` is retired, and is closed here. Of several drafters that share the cache, only the first call
        has an effect."""
        if sequence in self._texts:
            return
        followed = self._texts.get(source)
        known = 0
        if followed is not None and self.slots.holds(followed.key):
            known = sum(1 for _ in takewhile(bool, map(eq, followed.cached, text[:-1])))
        if followed is not None and known:
            one = self._texts[sequence] = DraftSlot(cached=text[:known])
            take = self.slots.store.take_over if moved else self.slots.store.fork
            take(followed.key, one.key, known)
        if moved:
            self.close(source)

    def roots(
        self, sequences: Sequence[SequenceState], texts: Sequence[list[int]], trees: Sequence[TreeBuilder]
    ) -> tuple[Tensor, list[slice]]:
        """Write the new tokens of the texts (tokens of the draft model), and compute the logits after each root.

        Returns logits (batch, nodes, vocabulary), and the place of each root among the nodes. `trees`, bare roots so
        far, are those that will grow.
        """
        ahead = self.unwritten(sequences, texts)
        followed = [self._texts[sequence] for sequence in sequences]
        nodes = max(map(len, ahead))
        tokens = np.array([new + [0] * (nodes - len(new)) for new in ahead], dtype=np.int64)
        depths = np.tile(np.arange(nodes), (len(ahead), 1))
        chain = np.tile(np.tri(nodes, dtype=np.bool_), (len(ahead), 1, 1))
        places = [slice(len(new) - 1, len(new)) for new in ahead]
        logits = self._sprout(followed, tokens, depths, chain, places)
        self.count(sequences, ahead)
        for one, tree in zip(followed, trees, strict=True):
            one.tree = tree
        return logits, places

    def unwritten(
        self, sequences: Sequence[SequenceState], texts: Sequence[list[int]], most: int = AT_ONCE
    ) -> list[list[int]]:
        """The tokens of each text that are still to be written, at least its root and at most `most`. New texts get a
        slot; rows of the others that are no longer valid are dropped."""
        for sequence in sequences:
            if sequence not in self._texts:
                if self._acquired is None:
                    self._acquired = self._acquire()
                self._texts[sequence] = DraftSlot()
                self.slots.store.open(self._texts[sequence].key)
        return [self._catch_up(self._texts[one], text, most) for one, text in zip(sequences, texts, strict=True)]

    def count(self, sequences: Sequence[SequenceState], written: Sequence[list[int]]) -> None:
        """Count the rows of these tokens, written after the committed ones of each text, as committed."""
        for sequence, new in zip(sequences, written, strict=True):
            one = self._texts[sequence]
            self.slots.store.advance(one.key, len(new))
            one.cached += new

    def cached(self, sequence: SequenceState) -> list[int]:
        """The tokens of a text whose rows are committed; none if the text has no slot."""
        return self._texts[sequence].cached if sequence in self._texts else []

    def seats(self, sequences: Sequence[SequenceState], rows: int) -> list[int]:
        """The slots of these texts, for a pass that writes `rows` rows after their committed ones."""
        keys = [self._texts[sequence].key for sequence in sequences]
        return self.slots.store.seat(keys, [0] * len(keys), rows, rows)[0]

    def sprouts(self, sequences: Sequence[SequenceState], wanted: Sequence[list[int]]) -> tuple[Tensor, list[slice]]:
        """The logits (batch, nodes, vocabulary) after the `wanted` nodes of every tree, and the places of these nodes
        in each text's row."""
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
                # The root is committed, so its children follow the committed tokens directly.
                row_depths[b, row] = one.tree.depths[node] - 1
            for place, node in enumerate(new):
                tokens[b, place] = self.token_of(one.tree.tokens[node])
                depths[b, place] = one.tree.depths[node] - 1
                while node > 0:
                    ancestors[b, place, rows[node]] = True
                    node = one.tree.parents[node]
            for place in range(len(new), nodes):  # padding attends to the text and itself
                ancestors[b, place, before[b] + place] = True
            joined.append(rows)

        places = [slice(len(new)) for new in wanted]
        logits = self._sprout(followed, tokens, depths, ancestors, places, PartialTree(before, row_depths))
        for one, rows in zip(followed, joined, strict=True):
            one.rows = rows
        return logits, places

    def _sprout(
        self,
        followed: Sequence[DraftSlot],
        tokens: NDArray[np.int64],
        depths: NDArray[np.int64],
        ancestors: NDArray[np.bool_],
        places: Sequence[slice],
        written: PartialTree | None = None,
    ) -> Tensor:
        """One pass (`TransformersTarget.sprout`). Only the logits at `places` of each text are read from the result."""
        return self.slots.sprout([one.key for one in followed], tokens, depths, ancestors, written)

    def _extend(self, followed: DraftSlot, tokens: list[int]) -> None:
        """Write further tokens of a text, without computing logits."""
        self.slots.extend(followed.key, tokens)

    def _catch_up(self, followed: DraftSlot, text: list[int], most: int) -> list[int]:
        """Keep the rows that are still valid; returns the tokens that are still to be written, at least the root and at
        most `most`."""
        cached, store = followed.cached, self.slots.store
        known = len(cached)
        if cached != text[:known] or known == len(text):
            known = sum(1 for _ in takewhile(bool, map(eq, cached, text[:-1])))
            followed.rows = {}
        del cached[known:]
        store.cut(followed.key, known)  # also removes rows of an interrupted pass
        path = self._accepted(followed, text[known:-1])
        store.keep([followed.key], [tuple(followed.rows[node] for node in path)])
        cached += text[known : known + len(path)]
        followed.rows = {}
        ahead = text[len(cached) :]
        if len(ahead) > most:
            self._extend(followed, ahead[:-1])
            cached += ahead[:-1]
        return text[len(cached) :]

    def _accepted(self, followed: DraftSlot, tokens: list[int]) -> list[int]:
        """The path of the last tree along these tokens, as far as its nodes have rows."""
        tree, node, path = followed.tree, 0, []
        children = {(tree.parents[child], self.token_of(tree.tokens[child])): child for child in followed.rows}
        for token in tokens:
            if (child := children.get((node, token))) is None:
                break
            path.append(node := child)
        return path
