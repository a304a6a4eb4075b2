"""What is checked before a model may serve as a target.

A model class is served because of what it does, not because of its name: one small pass shows whether every layer's
attention comes through us, with which keywords and which masks; then a small batch of trees is compared with the
model's own forward pass. What cannot be exact is refused here with a sentence, before any text is written.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import Cache, PreTrainedConfig

from branchwise.backends.transformers.attention import Window
from branchwise.backends.transformers.kv_cache import BlankCache, Layout, Pass
from branchwise.core.batch import TreeBatch
from branchwise.core.sequence import SequenceState
from branchwise.core.tree import DraftTree
from branchwise.errors import UnsupportedModel, first_line

if TYPE_CHECKING:
    from branchwise.backends.transformers.target import TransformersTarget

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

EXACT = 1e-3
"""the most that a tree may differ from the model's own forward in float32"""
ROUNDED = 0.1
"""the same for the median node in lower precision: a wrong mask or position meets most nodes, and changes them more"""
MOST_ROUNDED = 0.3
"""the same for a model that magnifies rounding so much that `ROUNDED` would be too strict; see `own_rounding`"""
NUDGES = 4


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


def check_against_own_forward(target: TransformersTarget) -> None:
    """Score two small trees in one pass and compare with the model's own forward along their longest paths.

    Catches what no keyword shows, such as positions that a model takes from the cache instead of from the call.
    """
    count = target.vocabulary
    first = SequenceState([(11 * i + 5) % count for i in range(3)])
    second = SequenceState([(7 * i + 3) % count for i in range(5)])
    comb = DraftTree(torch.tensor([first.root, 4 % count, 8 % count, 1, 6 % count]), (-1, 0, 0, 2, 3))
    fork = DraftTree(torch.tensor([second.root, 9 % count, 2 % count]), (-1, 0, 0))
    # Both longest paths have six tokens, so one reference batch needs no padding.
    cases = [(first, comb), (second, fork)][: target.free_slots]
    sequences = [sequence for sequence, _ in cases]
    opened: list[SequenceState] = []
    try:
        for sequence in sequences:
            target.open(sequence)
            opened.append(sequence)
        logits = target.score(sequences, TreeBatch([tree for _, tree in cases], target.device)).logits
    finally:
        for sequence in opened:
            target.close(sequence)
    paths = [tree.topology.path(len(tree) - 1) for _, tree in cases]
    tokens = [
        sequence.tokens + tree.tokens[path[1:]].tolist() for (sequence, tree), path in zip(cases, paths, strict=True)
    ]
    places = [
        (row, node, len(sequence.tokens) - 1 + depth)
        for row, ((sequence, _), path) in enumerate(zip(cases, paths, strict=True))
        for depth, node in enumerate(path)
    ]
    texts = torch.tensor(tokens, device=target.device)
    own = target.own_logits(texts)
    errors = [_relative_error(logits[row, node], own[row, place]) for row, node, place in places]
    if target.dtype == torch.float32:
        error, most = max(errors), EXACT
    else:
        error, most = median(errors), ROUNDED  # rounding may send single nodes to other experts
        if error >= most:
            rounding = own_rounding(target, texts, own, [(row, place) for row, _, place in places])
            most = max(most, min(MOST_ROUNDED, 2 * rounding))
    if not error < most:
        raise UnsupportedModel(
            f"{target.name} cannot be served: a tree scored in one pass differs from its own forward by {error:.1%}."
        )


def own_rounding(target: TransformersTarget, texts: Tensor, own: Tensor, places: list[tuple[int, int]]) -> float:
    """How far the model's own logits `own` (batch, length, vocabulary) move, in the median, when it reads its tokens'
    embeddings rounded to the next number up or down.

    Some models magnify such a step so much that any two ways to compute them are as far apart. Its eager attention is
    compared with itself: a faster one may leave something out, and a batch or a cache may change no bit.
    """
    if "inputs_embeds" not in inspect.signature(target.model.forward).parameters:
        return 0.0
    embeddings = target.model.get_input_embeddings()(texts).detach()
    moved = []
    for seed in range(NUDGES):
        signs = torch.randint(2, embeddings.shape, generator=torch.Generator().manual_seed(seed)) * 2.0 - 1.0
        steps = 1 + signs.to(embeddings.device) * torch.finfo(embeddings.dtype).eps / 2
        nudged = target.own_logits((embeddings.float() * steps).to(embeddings.dtype))
        moved += [_relative_error(nudged[row, place], own[row, place]) for row, place in places]
    return median(moved)


def _relative_error(found: Tensor, own: Tensor) -> float:
    """Between two rows of logits, whose common level means nothing."""
    found, own = (row.float() - row.float().mean() for row in (found, own))
    return float((found - own).norm() / own.norm().clamp_min(1e-9))
