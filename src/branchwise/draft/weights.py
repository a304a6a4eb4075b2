"""The weights of a draft model: loaded once, shared by all drafters that use them."""

from __future__ import annotations

import threading
import weakref
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from branchwise.errors import ModelError
from branchwise.models import load_model

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from branchwise.target.transformers import TransformersTarget

TREE_ROWS = 1024
"""rows of a slot behind its text: a policy may expand more nodes than it keeps"""


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
        """whoever runs the model with a head of its own holds it"""

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

    def slots(self, count: int, context: int, **ways: Any) -> TransformersTarget:
        """Room for so many texts of at most this length; each drafter has its own, so that none waits for another.

        `ways` are those in which passes are made: by kernels, from graphs, compiled.
        """
        from branchwise.target.probe import context_limit
        from branchwise.target.transformers import TransformersTarget  # transformers takes seconds to import

        room = min(context, context_limit(self.model.config))
        return TransformersTarget(self.model, slots=count, context=room, max_nodes=TREE_ROWS, **ways)

    @property
    def head(self) -> nn.Linear:
        head = self.model.get_output_embeddings()
        if not isinstance(head, nn.Linear):
            raise ModelError(f"The draft model {self.name} has no plain head that could be trimmed or looked into.")
        return head


class Head(nn.Module):
    """The head of a draft model, or some rows of it; it remembers what it saw."""

    def __init__(self, head: nn.Linear, rows: Tensor | None = None) -> None:
        super().__init__()
        self.weight = head.weight if rows is None else head.weight[rows]
        self.bias = head.bias if rows is None or head.bias is None else head.bias[rows]
        self.seen: Tensor | None = None

    def forward(self, hidden: Tensor) -> Tensor:
        self.seen = hidden
        return nn.functional.linear(hidden, self.weight, self.bias)


def bytes_read(model: nn.Module, rows: int | None = None) -> int:
    """The bytes that one pass reads: all weights but the embeddings, of which it looks up a few rows.

    `rows` counts the rows of the head that are computed; by default all.
    """
    head = model.get_output_embeddings()  # type: ignore[operator]
    embeddings = model.get_input_embeddings()  # type: ignore[operator]
    apart = {id(embeddings.weight), id(getattr(head, "weight", None))}
    body = sum(p.numel() * p.element_size() for p in model.parameters() if id(p) not in apart)
    if head is None:
        return body
    share = 1.0 if rows is None else rows / len(head.weight)
    return body + int(share * head.weight.numel() * head.weight.element_size())
