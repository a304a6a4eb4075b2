"""The checks before a model may serve as a target, and the length of the context that it may serve.

A model class is served because of what it does, not because of its name. One small pass shows whether the attention of
every layer goes through our hook, and with which keywords and masks; then (`check.py`) trees are compared with the
model's own forward pass. A model that cannot be exact is refused with a sentence, before any text is generated.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, PreTrainedConfig

from branchwise.backends.transformers.attention import Window
from branchwise.backends.transformers.kv_cache import BlankCache, Layout, Pass, Shape
from branchwise.errors import ModelError, UnsupportedModel, first_line

SERVED_KEYWORDS = {"dropout", "sliding_window"}
INERT_KEYWORDS = {
    "cache_position",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "position_ids",
    "use_cache",
}
"""keywords that some model families pass to attention and that change nothing in it"""

PROBE_TOKENS = 4


def refusal(name: str, reason: str) -> UnsupportedModel:
    return UnsupportedModel(f"{name} cannot be served: {reason}.")


class Probe(BlankCache):
    """Stands in for the KV cache in one small pass, and records the layout of keys and values."""

    def __init__(self, name: str, config: PreTrainedConfig, device: torch.device) -> None:
        super().__init__()
        self.name = name
        self.config = config
        self.attended = 0
        self.shapes: dict[int, tuple[Shape, Shape]] = {}
        self.current = Pass([0], [0], torch.arange(PROBE_TOKENS, device=device)[None], None)

    def run(self, forward: Callable[[Tensor, Tensor, Cache], object]) -> Layout:
        if self.config.is_encoder_decoder:
            raise refusal(self.name, "it is an encoder-decoder, and Branchwise serves decoder-only models")
        try:
            forward(self.current.depths, self.current.depths, self)
        except UnsupportedModel:
            raise
        except Exception as error:
            raise refusal(
                self.name,
                "its attention is not routed through transformers' AttentionInterface and Cache (the probe pass ended "
                f"with: {first_line(error)})",
            ) from error
        layers = self.config.get_text_config().num_hidden_layers
        if self.attended == layers != len(self.shapes):
            raise refusal(self.name, "some of its layers share their keys and values")
        if self.attended != layers or len(self.shapes) != layers:
            raise refusal(
                self.name,
                f"{self.attended} of its {layers} layers attend through transformers' AttentionInterface; the others "
                "(state-space, linear attention, or attention of their own) keep a state that a tree cannot branch",
            )
        keys, values = zip(*(self.shapes[layer] for layer in range(layers)), strict=True)
        return Layout(keys, values)

    def see_mask(self, mask_function: Callable[..., Tensor], window: int | None, use_vmap: bool) -> None:
        """Evaluate the mask function around its borders, and refuse it unless it is causal, with or without a
        window."""
        size = window or PROBE_TOKENS
        queries = torch.tensor([0, 1, size - 1, size, size + 1, 3 * size + 1])[:, None]
        keys = (queries + torch.tensor([-2 * size, -size - 1, -size, -size + 1, -1, 0, 1, size])).clamp_min(0)
        zero = torch.zeros_like(keys)
        expected = (keys <= queries) & (keys > queries - (window or 1 << 40))
        if use_vmap or not torch.equal(mask_function(zero, zero, queries.expand_as(keys), keys), expected):
            raise refusal(self.name, "one of its attention masks is neither causal nor a sliding window")

    def see_attention(self, mask: object, keywords: dict[str, Any]) -> None:
        self.attended += 1
        if not isinstance(mask, Window):
            raise refusal(self.name, "it builds an attention mask of its own")
        present = {name for name, value in keywords.items() if value is not None}
        if unknown := ", ".join(sorted(present - SERVED_KEYWORDS - INERT_KEYWORDS)):
            raise refusal(
                self.name, f"its attention takes {unknown}, which Branchwise does not know and must not ignore"
            )
        stated = keywords.get("sliding_window")
        if stated is not None and stated != mask.size:
            raise refusal(self.name, f"a layer states a window of {stated} and its mask one of {mask.size}")

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        (_, heads, _, width), (_, value_heads, _, value_width) = key_states.shape, value_states.shape
        self.shapes[layer_idx] = (heads, width), (value_heads, value_width)
        return key_states, value_states

    def _refuse_state(self, *args: Any, **kwargs: Any) -> Any:
        raise refusal(self.name, "its state-space or linear-attention layers keep a state that a tree cannot branch")

    has_previous_state = get_conv_state = update_conv_state = _refuse_state
    get_recurrent_state = update_recurrent_state = _refuse_state


def context_limit(config: PreTrainedConfig) -> int:
    """The most positions for which every sequence of a batch gets the distribution it would get alone."""
    text = config.get_text_config()
    limit = int(getattr(text, "max_position_embeddings", None) or 4096)
    parameters = getattr(text, "rope_parameters", None) or {}
    for rope in (parameters, *(value for value in parameters.values() if isinstance(value, dict))):
        # These rescale all positions once the longest sequence of a batch passes the original length.
        if rope.get("rope_type") in ("dynamic", "longrope"):
            limit = min(limit, int(rope.get("original_max_position_embeddings") or limit))
    return limit


def fitting_context(context: int, bytes_per_token: int, max_nodes: int, device: torch.device, *, asked: bool) -> int:
    """Shorten the context to what the device can hold, or say with numbers why it cannot."""
    free = free_memory(device)
    room = int(free * 0.8) // bytes_per_token - max_nodes
    if context <= room:
        return context
    if asked or room < 512:
        raise ModelError(
            f"Keys and values of {context} tokens need {context * bytes_per_token / 2**30:.1f} GiB and "
            f"{free / 2**30:.1f} GiB are free; ask for a context of at most {max(room, 0)} or for fewer slots."
        )
    return room


def free_memory(device: torch.device) -> int:
    """Bytes that a cache may take; on a host half the machine, since rows cost nothing until they are used."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    except (AttributeError, ValueError, OSError):  # not every system has these names
        return 1 << 34
