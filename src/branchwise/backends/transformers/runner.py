"""Forward passes of a transformers model with our attention, over trees and over prompts.

The model class is not changed. Its attention and its masks go through our hook (`AttentionHook`), its keys and values
through `Cache`. Outside a pass the model is exactly as it was.
"""

from __future__ import annotations

import hashlib
import inspect
import itertools
import json
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface

from branchwise.backends.base import Chunk, Prefill
from branchwise.backends.packed import PackedLayers
from branchwise.backends.quantized import QuantizedLinear
from branchwise.backends.transformers.attention import Window
from branchwise.backends.transformers.experts import unread_bytes
from branchwise.backends.transformers.host_layers import HostLayers
from branchwise.backends.transformers.kv_cache import KVCache, Layout
from branchwise.backends.transformers.probe import Probe, context_limit
from branchwise.core.sequence import SequenceState
from branchwise.errors import UsageError
from branchwise.registry import nearest

SMALL = 8
"""the most positions of the small passes that check layers"""
PADDING_SHARE = 1.25  # prompts share a pass if padding makes it at most this many times as large

_turns: weakref.WeakKeyDictionary[PreTrainedModel, threading.RLock] = weakref.WeakKeyDictionary()
_forms: weakref.WeakKeyDictionary[PreTrainedModel, HostForm] = weakref.WeakKeyDictionary()
"""model -> its form on a host: packed weights are a copy, so targets that share a model share them too"""
_names = (f"branchwise-{number}" for number in itertools.count())


def _turn(model: PreTrainedModel) -> threading.RLock:
    """The lock of a model: targets that share it take turns."""
    return _turns.setdefault(model, threading.RLock())


class AttentionHook:
    """The attention and mask functions of one target, registered with transformers under a unique name. They cannot be
    arguments of the forward call, because some model families drop keywords that they do not know."""

    def __init__(self) -> None:
        self.name = next(_names)
        self.store: KVCache | Probe | None = None
        AttentionInterface.register(self.name, self.attend)
        AttentionMaskInterface.register(self.name, self.mask)

    def unregister(self) -> None:
        for interface in (AttentionInterface, AttentionMaskInterface):
            interface._global_mapping.pop(self.name, None)

    def mask(
        self,
        *,
        mask_function: Callable[..., Tensor],
        local_size: int | None = None,
        use_vmap: bool = False,
        **kwargs: Any,
    ) -> Window:
        """The object that the model passes to each layer as its mask: no tensor, just the layer's window."""
        if isinstance(self.store, Probe):
            self.store.see_mask(mask_function, local_size, use_vmap)
        return Window(local_size)

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Window,
        *,
        scaling: float | None = None,
        softcap: float | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        """Attention of one layer over the rows that the cache returned, (batch, heads, rows, width)."""
        if isinstance(self.store, Probe):
            self.store.see_attention(attention_mask, kwargs)
        assert self.store is not None
        assert self.store.current is not None, "a model was routed here outside a pass"
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        return self.store.current.attend(query, key, value, attention_mask.size, scale, softcap), None


@dataclass(frozen=True)
class HostForm:
    """How a model computes on a host during our passes."""

    layers: HostLayers
    packed: PackedLayers

    @contextmanager
    def __call__(self) -> Iterator[None]:
        with self.packed(), self.layers():
            yield


class ModelRunner:
    """A model, the hook into its attention, and the layers whose outputs its passes return."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.name = type(model).__name__
        self.hook = AttentionHook()
        weakref.finalize(self, self.hook.unregister)
        self.hidden_layers: tuple[str, ...] = ()
        self._forward_parameters = inspect.signature(model.forward).parameters
        configs: list[Any] = [module.config for module in model.modules() if hasattr(module, "config")]
        self._configs = list({id(config): config for config in configs}.values())
        self._form: HostForm | None = None

    @property
    def vocabulary(self) -> int:
        return int(self.model.config.get_text_config().vocab_size)

    def watch(self, layers: Sequence[str]) -> None:
        """Let passes return the outputs of these modules too."""
        modules: dict[str, nn.Module] = dict(self.model.named_modules())
        for layer in layers:
            if layer not in modules:
                raise UsageError(f"{self.name} has no layer {layer!r}.{nearest(layer, modules)}")
        self.hidden_layers = tuple(dict.fromkeys((*self.hidden_layers, *layers)))

    def run(self, tokens: Tensor, positions: Tensor, cache: Any, keep: int = 0) -> tuple[Tensor, dict[str, Tensor]]:
        """Logits (batch, rows, vocabulary), the last `keep` rows or all, and hidden states (batch, nodes, width)."""
        extra = {"logits_to_keep": keep} if "logits_to_keep" in self._forward_parameters else {}
        hidden: dict[str, Tensor] = {}
        with self._watching(hidden), self.passing():
            logits: Tensor = self.model(
                input_ids=tokens, position_ids=positions, past_key_values=cache, use_cache=True, **extra
            ).logits
        return logits, hidden

    def prefill(self, store: KVCache, chunks: Sequence[Chunk]) -> list[Prefill]:
        """Prefill the chunks of prompts, several of about the same length in one pass."""
        return [found for group in grouped(chunks, store) for found in self._prefill(store, group)]

    def _prefill(self, store: KVCache, chunks: Sequence[Chunk]) -> list[Prefill]:
        """One pass over all chunks, padded to the longest; the next rows overwrite those of the padding."""
        device, longest = self.model.device, max(len(chunk.tokens) for chunk in chunks)
        if not longest:
            return [self.nothing_written() for _ in chunks]
        steps = torch.arange(longest, device=device).expand(len(chunks), -1)
        current = store.begin([chunk.sequence for chunk in chunks], steps, None)
        ids = [[*chunk.tokens, *[0] * (longest - len(chunk.tokens))] for chunk in chunks]
        # Logits of a whole prompt are expensive, so compute them from the first needed row on.
        keep = max(longest - len(chunk.tokens) + max(chunk.keep, 1) for chunk in chunks)
        # Without cuDNN: for every new length of a prompt it makes a plan, which takes longer than the pass.
        ways = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
        with sdpa_kernel(ways) if device.type == "cuda" else nullcontext():
            positions = current.lengths[:, None] + steps
            logits, hidden = self.run(torch.tensor(ids, device=device), positions, store, keep)
        found = []
        for row, (sequence, tokens, keep) in enumerate(chunks):
            store.advance(sequence, len(tokens))
            end = logits.shape[1] - (longest - len(tokens))  # some models return all rows, whatever `keep` is
            states = {layer: layer_states[row, : len(tokens)] for layer, layer_states in hidden.items()}
            found.append(Prefill(logits[row, end - keep : end], states))
        return found

    def nothing_written(self) -> Prefill:
        """The prefill of a prompt of one token, which is the root."""
        logits = torch.zeros(0, self.vocabulary, device=self.model.device)
        state = logits.new_zeros(0, self.model.config.get_text_config().hidden_size, dtype=self.model.dtype)
        return Prefill(logits, dict.fromkeys(self.hidden_layers, state))

    def own_logits(self, tokens: Tensor) -> Tensor:
        """(batch, length, vocabulary): the logits of the model's own forward after every token, without any of our
        code. `tokens` are ids (batch, length), or embeddings (batch, length, width) instead. Eager attention is the
        reference, because faster implementations in transformers have silently dropped soft caps."""
        given = {"inputs_embeds" if tokens.is_floating_point() else "input_ids": tokens}
        with torch.inference_mode(), self.attending("eager"):
            logits: Tensor = self.model(**given, use_cache=False).logits
        return logits

    def probe(self) -> Layout:
        """Watch one small pass; refuses a model whose attention does not come through the hook."""
        self.hook.store = probe = Probe(self.name, self.model.config, self.model.device)
        try:
            return probe.run(self.run)
        finally:
            self.hook.store = None

    def settle(self, layout: Layout) -> None:
        """Let the model compute on a host in its fastest form, with packed weights and the layers of `host_layers.py`
        that agree with its own."""
        with _turn(self.model):
            known = _forms.get(self.model)
            if known is None or not known.layers.unchanged:
                layers = HostLayers(self.model)
                if layers:
                    layers.check(layout, self._small_passes)
                _forms[self.model] = known = HostForm(layers, PackedLayers(self.model, layers.stacks))
            self._form = known

    @property
    def settled_layers(self) -> bool:
        """Whether all layers are those of `host_layers.py`, which give the same bits in all passes without a cache of
        higher precision."""
        return self._form is not None and self._form.layers.complete

    def _small_passes(self, store: KVCache) -> None:
        """Passes over a chain and over small trees after it, at the first and at the last positions of the context."""
        texts = [SequenceState([number]) for number in range(2)]
        tree = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 1, 0, 1]], dtype=torch.bool)
        last = context_limit(self.model.config) - SMALL
        self.hook.store = store
        try:
            for text in texts:
                store.open(text)
            for depths, seen, first in (
                ([0, 1], None, 0),
                ([0, 1, 1, 2], tree[None], 0),
                ([0, 1, 1, 2], tree[None], last),
            ):
                steps = torch.tensor(depths).expand(2, -1)
                positions = store.begin(texts, steps, seen).lengths[:, None] + steps
                self.run((7 * positions + 3) % self.vocabulary, positions + max(first, 0), store)
                for number, text in enumerate(texts):
                    store.advance(text, 1 + number)
        finally:
            self.hook.store = None

    def fingerprint(self, tokenizer: Any) -> str:
        """A digest of the model's shape and the vocabulary of its tokenizer."""
        config = self.model.config.get_text_config()
        spelled = sorted(tokenizer.get_vocab().items()) if tokenizer is not None else []
        shape = [config.model_type, config.hidden_size, config.num_hidden_layers, self.vocabulary]
        return hashlib.sha256(json.dumps([shape, spelled]).encode()).hexdigest()[:16]

    def layer_names(self, count: int) -> tuple[str, ...]:
        """The names of the decoder layers, first layer first, and of the norms after them."""
        for name, module in self.model.named_modules():
            if isinstance(module, nn.ModuleList) and len(module) == count:
                prefix = name.rpartition(".")[0]
                siblings = self.model.get_submodule(prefix).named_children()
                norms = [f"{prefix}.{child}".lstrip(".") for child, _ in siblings if "norm" in child]
                return (*(f"{name}.{number}" for number in range(count)), *norms)
        return ()

    @contextmanager
    def attending(self, name: str) -> Iterator[None]:
        """Let the model use a registered attention implementation for one pass. The choice is a property of the model,
        so targets that share a model take turns."""
        with _turn(self.model):
            found = [config._attn_implementation_internal for config in self._configs]
            for config in self._configs:
                config._attn_implementation_internal = name
            try:
                yield
            finally:
                for config, implementation in zip(self._configs, found, strict=True):
                    config._attn_implementation_internal = implementation

    @contextmanager
    def passing(self) -> Iterator[None]:
        """A context for a pass of the model, or of parts of it, with our attention and its form on a host."""
        with torch.inference_mode(), self.attending(self.hook.name), self._form() if self._form else nullcontext():
            yield

    @contextmanager
    def _watching(self, hidden: dict[str, Tensor]) -> Iterator[None]:
        """Catch the outputs of the watched layers during one pass."""

        def catch(name: str, module: nn.Module, inputs: Any, output: Any) -> None:
            hidden[name] = output[0] if isinstance(output, tuple) else output

        with ExitStack() as undo:
            for name in self.hidden_layers:
                undo.callback(self.model.get_submodule(name).register_forward_hook(partial(catch, name)).remove)
            yield


def grouped(chunks: Sequence[Chunk], store: KVCache) -> list[list[Chunk]]:
    """The chunks in order, in groups of neighbours: a group has little padding and fits the cache."""
    groups: list[list[Chunk]] = []
    for chunk in chunks:
        group = [*groups[-1], chunk] if groups else [chunk]
        longest = max(len(member.tokens) for member in group)
        deepest = max(store.length(member.sequence) for member in group) + longest
        tokens = sum(len(member.tokens) for member in group)
        if groups and longest * len(group) <= PADDING_SHARE * tokens and deepest <= store.rows:
            groups[-1] = group
        else:
            groups.append([chunk])
    return groups


def bytes_read(model: PreTrainedModel, rows: int | None = None, nodes: int = 1) -> int:
    """The bytes that a pass over this many nodes reads: all weights except the input embeddings, of which it looks up a
    few rows, and the experts that no node is routed to. Of the output embeddings it reads `rows` rows, by default
    all."""
    head, embeddings = model.get_output_embeddings(), model.get_input_embeddings()
    apart = {id(embeddings.weight)} | ({id(head.weight)} if head is not None else set())
    body = sum(parameter.nbytes for parameter in model.parameters() if id(parameter) not in apart)
    body += sum(layer.nbytes for layer in model.modules() if isinstance(layer, QuantizedLinear) and layer is not head)
    body -= unread_bytes(model, model.config, nodes)
    if head is None:
        return body
    share = 1.0 if rows is None else rows / head.out_features
    return body + int(share * (head.nbytes if isinstance(head, QuantizedLinear) else head.weight.nbytes))


def embedding_rows(model: PreTrainedModel) -> tuple[Tensor, Tensor] | None:
    """The matrices of the input and of the output embeddings, if both are plain; else None."""
    layers = model.get_input_embeddings(), model.get_output_embeddings()
    plain = nn.Embedding | nn.Linear | QuantizedLinear
    given, found = (layer.weight if isinstance(layer, plain) else None for layer in layers)
    return None if given is None or found is None else (given, found)
