"""The weights of a draft model: loaded once, and shared by all drafters that use them."""

from __future__ import annotations

import threading
import weakref
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from branchwise.backends.base import Execution
from branchwise.errors import ModelError
from branchwise.models import load_model

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from branchwise.backends.transformers.target import TransformersTarget

TREE_ROWS = 1024
"""rows of a slot after its text: a policy may expand more nodes than it keeps"""
MOST_IDLE = 4
"""idle KV caches, kept for reuse, the most recently used"""


class Weights:
    """A draft model with its tokenizer."""

    _loaded: ClassVar[weakref.WeakValueDictionary[tuple[str, torch.dtype, str], Weights]] = (
        weakref.WeakValueDictionary()
    )

    def __init__(self, name: str, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None) -> None:
        self.name = name
        self.model = model
        self.tokenizer = tokenizer
        self.lock = threading.RLock()
        """held while the model runs with the head of a drafter"""
        self._idle: list[tuple[Any, TransformersTarget]] = []
        self._kinds: weakref.WeakKeyDictionary[TransformersTarget, Any] = weakref.WeakKeyDictionary()
        self._heads: dict[bytes | None, Head] = {}

    @classmethod
    def of(cls, name: str, dtype: torch.dtype, device: torch.device) -> Weights:
        key = name, dtype, str(device)
        found = cls._loaded.get(key)
        if found is None:
            found = cls._loaded[key] = cls(name, *load_model(name, dtype=dtype, device=str(device)))
        return found

    @property
    def vocabulary(self) -> int:
        return int(self.model.config.get_text_config().vocab_size)

    def acquire(
        self, count: int, context: int, head: Head | None = None, execution: Execution | None = None
    ) -> TransformersTarget:
        """A KV cache for this many texts of at most this length, for one drafter until it releases the cache.

        Drafters that take turns share it: its memory, and the CUDA graphs recorded with this head. Without an
        `execution` passes run as they do by default.
        """
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

    def context(self, wanted: int) -> int:
        """The wanted context, or the context of the model if that is shorter."""
        from branchwise.backends.transformers.probe import context_limit

        return min(wanted, context_limit(self.model.config))

    def bytes_read(self, rows: int | None = None) -> int:
        """The bytes that one pass reads, of the head so many rows; by default all."""
        from branchwise.backends.transformers.runner import bytes_read

        return bytes_read(self.model, rows)

    def own_head(self, rows: Tensor | None = None) -> Head:
        """The head of the model, or some rows of it; the same object for the same rows."""
        key = None if rows is None else rows.cpu().numpy().tobytes()
        if key not in self._heads:
            self._heads[key] = Head(self.head, rows)
        return self._heads[key]

    @property
    def head(self) -> nn.Linear:
        head = self.model.get_output_embeddings()
        if not isinstance(head, nn.Linear):
            raise ModelError(f"The draft model {self.name} has no linear head that could be trimmed or observed.")
        return head


class Head(nn.Module):
    """The head of a draft model, or some rows of it; it keeps the hidden states of the last pass."""

    def __init__(self, head: nn.Linear, rows: Tensor | None = None) -> None:
        super().__init__()
        self.weight = head.weight if rows is None else head.weight[rows]
        self.bias = head.bias if rows is None or head.bias is None else head.bias[rows]
        self.seen: Tensor | None = None

    def forward(self, hidden: Tensor) -> Tensor:
        self.seen = hidden
        return nn.functional.linear(hidden, self.weight, self.bias)
