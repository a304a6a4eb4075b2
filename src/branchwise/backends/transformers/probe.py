"""What is checked before a model may serve as a target.

A model class is served because of what it does, not because of its name: one small pass shows whether every layer's
attention comes through us, with which keywords and which masks; then a small batch of trees is compared with the
model's own forward pass. What cannot be exact is refused here with a sentence, before any text is written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, PreTrainedConfig

from branchwise.backends.transformers.attention import Window
from branchwise.backends.transformers.kv_cache import BlankCache, Layout, Pass
from branchwise.errors import UnsupportedModel, first_line

SERVED_KEYWORDS = {"dropout", "sliding_window"}
INERT_KEYWORDS = {
    "cache_position",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "position_ids",
    "use_cache",
}
"""keywords that some families pass along to attention and that change nothing there"""

PROBE_TOKENS = 4


class Probe:
    """Watches one small pass and learns the layout of keys and values from it."""

    def __init__(self, name: str, config: PreTrainedConfig) -> None:
        self.name = name
        self.config = config
        self.attended = 0

    def run(self, forward: Callable[[Tensor, Tensor, Cache], Tensor], cache: ProbeCache) -> Layout:
        if self.config.is_encoder_decoder:
            raise UnsupportedModel(f"{self.name} is an encoder-decoder; Branchwise serves decoder-only models.")
        steps = torch.arange(PROBE_TOKENS, device=cache.device)[None]
        try:
            forward(steps, steps, cache)
        except UnsupportedModel:
            raise
        except Exception as error:
            reason = first_line(error)
            raise UnsupportedModel(
                f"{self.name} cannot be served: its attention is not routed through transformers' "
                f"AttentionInterface and Cache (the probe pass ended with: {reason})."
            ) from error
        layers = self.config.get_text_config().num_hidden_layers
        if self.attended == layers != len(cache.shapes):
            raise UnsupportedModel(f"{self.name} cannot be served: some of its layers share their keys and values.")
        if self.attended != layers or len(cache.shapes) != layers:
            raise UnsupportedModel(
                f"{self.name} cannot be served: {self.attended} of its {layers} layers attend through transformers' "
                "AttentionInterface; the others (state-space, linear attention, or attention of their own) keep a "
                "state that a tree cannot branch."
            )
        ordered = [cache.shapes[layer] for layer in range(layers)]
        return Layout(tuple(key for key, _ in ordered), tuple(value for _, value in ordered))

    def see_mask(self, mask_function: Callable[..., Tensor], window: int | None, use_vmap: bool) -> None:
        """Ask the mask itself what it shows around its borders, and refuse any that is not causal with a window."""
        size = window or PROBE_TOKENS
        queries = torch.tensor([0, 1, size - 1, size, size + 1, 3 * size + 1])[:, None]
        keys = (queries + torch.tensor([-2 * size, -size - 1, -size, -size + 1, -1, 0, 1, size])).clamp_min(0)
        zero = torch.zeros_like(keys)
        expected = (keys <= queries) & (keys > queries - (window or 1 << 40))
        if use_vmap or not torch.equal(mask_function(zero, zero, queries.expand_as(keys), keys), expected):
            raise UnsupportedModel(
                f"{self.name} cannot be served: one of its attention masks is neither causal nor a sliding window."
            )

    def see_attention(self, mask: object, keywords: dict[str, Any]) -> None:
        self.attended += 1
        if not isinstance(mask, Window):
            raise UnsupportedModel(f"{self.name} cannot be served: it builds an attention mask of its own.")
        present = {name for name, value in keywords.items() if value is not None}
        if unknown := sorted(present - SERVED_KEYWORDS - INERT_KEYWORDS):
            raise UnsupportedModel(
                f"{self.name} cannot be served: its attention takes {', '.join(unknown)}, which Branchwise does not "
                "know and must not ignore."
            )
        stated = keywords.get("sliding_window")
        if stated is not None and stated != mask.size:
            raise UnsupportedModel(
                f"{self.name} cannot be served: a layer states a window of {stated} and its mask one of {mask.size}."
            )


class ProbeCache(BlankCache):
    """Keeps nothing but the shapes that pass through."""

    def __init__(self, name: str, device: torch.device) -> None:
        super().__init__()
        self.name = name
        self.device = device
        self.shapes: dict[int, tuple[tuple[int, int], tuple[int, int]]] = {}
        self.current = Pass([0], [0], torch.arange(PROBE_TOKENS, device=device)[None], None)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        self.shapes[layer_idx] = (_heads_and_width(key_states), _heads_and_width(value_states))
        return key_states, value_states

    def _refuse_state(self, *args: Any, **kwargs: Any) -> Any:
        raise UnsupportedModel(
            f"{self.name} cannot be served: its state-space or linear-attention layers keep a running state, which a "
            "tree cannot branch."
        )

    has_previous_state = get_conv_state = update_conv_state = _refuse_state
    get_recurrent_state = update_recurrent_state = _refuse_state


def _heads_and_width(states: Tensor) -> tuple[int, int]:
    return states.shape[1], states.shape[3]


def context_limit(config: PreTrainedConfig) -> int:
    """The most positions for which every sequence of a batch gets the distribution it would get alone."""
    text = config.get_text_config()
    limit = int(getattr(text, "max_position_embeddings", None) or 4096)
    for rope in _rope_parameters(text):
        # These rescale all positions once the longest sequence of a batch passes the original length.
        if rope.get("rope_type") in ("dynamic", "longrope"):
            limit = min(limit, int(rope.get("original_max_position_embeddings") or limit))
    return limit


def _rope_parameters(config: PreTrainedConfig) -> Iterator[dict[str, Any]]:
    parameters = getattr(config, "rope_parameters", None) or {}
    yield from (value for value in parameters.values() if isinstance(value, dict))
    yield parameters
