"""One forward pass of a transformers model with our attention, and hidden states of the layers that are asked for.

The model class stays as it is. Its attention and its masks are routed to us (`hooks.py`), its keys and values through
`Cache`. Outside a pass the model is left exactly as it was found.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import PreTrainedModel

from branchwise.backends.transformers.hooks import AttentionHook
from branchwise.backends.transformers.kv_cache import Layout
from branchwise.backends.transformers.probe import Probe, ProbeCache
from branchwise.errors import UsageError
from branchwise.registry import nearest

_turns: weakref.WeakKeyDictionary[PreTrainedModel, threading.RLock] = weakref.WeakKeyDictionary()


class ModelRunner:
    """A model, the hook into its attention, and the layers that are watched."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.name = type(model).__name__
        self.hook = AttentionHook()
        weakref.finalize(self, self.hook.unregister)
        self.hidden_layers: tuple[str, ...] = ()
        self._forward_parameters = inspect.signature(model.forward).parameters
        configs: list[Any] = [module.config for module in model.modules() if hasattr(module, "config")]
        self._configs = list({id(config): config for config in configs}.values())

    @property
    def vocabulary(self) -> int:
        return int(self.model.config.get_text_config().vocab_size)

    def watch(self, layers: Sequence[str]) -> bool:
        """Let passes return the outputs of these modules too; False if they did already."""
        modules: dict[str, nn.Module] = dict(self.model.named_modules())
        for layer in layers:
            if layer not in modules:
                raise UsageError(f"{self.name} has no layer {layer!r}.{nearest(layer, modules)}")
        wanted = tuple(dict.fromkeys((*self.hidden_layers, *layers)))
        changed = wanted != self.hidden_layers
        self.hidden_layers = wanted
        return changed

    def run(self, tokens: Tensor, positions: Tensor, cache: Any, keep: int = 0) -> tuple[Tensor, dict[str, Tensor]]:
        """Logits (batch, rows, vocabulary), the last `keep` rows or all, and hidden states (batch, nodes, width)."""
        extra = {"logits_to_keep": keep} if "logits_to_keep" in self._forward_parameters else {}
        hidden: dict[str, Tensor] = {}
        with torch.inference_mode(), self.attending(self.hook.name), self._watching(hidden):
            output = self.model(
                input_ids=tokens, position_ids=positions, past_key_values=cache, use_cache=True, **extra
            )
        logits: Tensor = output.logits
        return logits, hidden

    def own_logits(self, tokens: Tensor) -> Tensor:
        """(batch, length, vocabulary): what the model itself finds after every token, without anything of ours.

        Tokens are ids (batch, length), or in their place embeddings (batch, length, width). The model's eager attention
        is the reference, because faster ones of transformers have dropped soft caps in silence.
        """
        given = {"inputs_embeds" if tokens.is_floating_point() else "input_ids": tokens}
        with torch.inference_mode(), self.attending("eager"):
            logits: Tensor = self.model(**given, use_cache=False).logits
        return logits

    def probe(self) -> Layout:
        """Watch one small pass; refuses a model whose attention does not come through the hook."""
        probe, cache = Probe(self.name, self.model.config), ProbeCache(self.name, self.model.device)
        self.hook.probe, self.hook.store = probe, cache

        def forward(tokens: Tensor, positions: Tensor, cache: Any) -> Tensor:
            return self.run(tokens, positions, cache)[0]

        try:
            return probe.run(forward, cache)
        finally:
            self.hook.probe = self.hook.store = None

    def fingerprint(self, tokenizer: Any) -> str:
        """What a model with its tokenizer is known by: its shape and its vocabulary."""
        config = self.model.config.get_text_config()
        spelled = sorted(tokenizer.get_vocab().items()) if tokenizer is not None else []
        shape = [config.model_type, config.hidden_size, config.num_hidden_layers, self.vocabulary]
        return hashlib.sha256(json.dumps([shape, spelled]).encode()).hexdigest()[:16]

    def layer_names(self, count: int) -> tuple[str, ...]:
        """The modules of the decoder layers, first layer first, and of the norm that follows them."""
        for name, module in self.model.named_modules():
            if isinstance(module, nn.ModuleList) and len(module) == count:
                parent = self.model.get_submodule(name.rpartition(".")[0])
                prefix = name.rpartition(".")[0]
                norms = [f"{prefix}.{child}".lstrip(".") for child, _ in parent.named_children() if "norm" in child]
                return (*(f"{name}.{number}" for number in range(count)), *norms)
        return ()

    @contextmanager
    def attending(self, name: str) -> Iterator[None]:
        """Let the model's attention go through a registered implementation for one pass.

        Which one it uses is a property of the model, so targets that share a model take turns.
        """
        with _turns.setdefault(self.model, threading.RLock()):
            found = [config._attn_implementation_internal for config in self._configs]
            for config in self._configs:
                config._attn_implementation_internal = name
            try:
                yield
            finally:
                for config, implementation in zip(self._configs, found, strict=True):
                    config._attn_implementation_internal = implementation

    @contextmanager
    def _watching(self, hidden: dict[str, Tensor]) -> Iterator[None]:
        """Catch the outputs of the watched layers during one pass."""

        def catch(name: str) -> Callable[..., None]:
            def hook(module: nn.Module, inputs: Any, output: Any) -> None:
                hidden[name] = output[0] if isinstance(output, tuple) else output

            return hook

        with ExitStack() as undo:
            for name in self.hidden_layers:
                undo.callback(self.model.get_submodule(name).register_forward_hook(catch(name)).remove)
            yield


def bytes_read(model: nn.Module, rows: int | None = None) -> int:
    """The bytes that one pass reads: all weights but the embeddings, of which it looks up a few rows.

    `rows` counts the rows of the head that are computed; by default all.
    """
    head = model.get_output_embeddings()  # type: ignore[operator]
    embeddings = model.get_input_embeddings()  # type: ignore[operator]
    apart = {id(embeddings.weight)} | ({id(head.weight)} if head is not None else set())
    body = sum(p.numel() * p.element_size() for p in model.parameters() if id(p) not in apart)
    if head is None:
        return body
    share = 1.0 if rows is None else rows / len(head.weight)
    return body + int(share * head.weight.numel() * head.weight.element_size())


def without_plans(device: torch.device) -> AbstractContextManager[None]:
    """Attention without cuDNN, which makes a new plan, for longer than the pass takes, for every length of a prompt."""
    if device.type != "cuda":
        return nullcontext()
    ways = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    return sdpa_kernel(ways)


def embedding_rows(model: PreTrainedModel) -> tuple[Tensor, Tensor] | None:
    """The rows of the input and of the output embeddings, where both are plain matrices."""
    rows = [getattr(layer, "weight", None) for layer in (model.get_input_embeddings(), model.get_output_embeddings())]
    given, found = rows
    return (given, found) if isinstance(given, Tensor) and isinstance(found, Tensor) else None
