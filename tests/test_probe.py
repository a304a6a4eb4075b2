"""What the probe refuses, one rule at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.masking_utils import (
    bidirectional_mask_function,
    causal_mask_function,
    chunked_causal_mask_function,
    sliding_window_causal_mask_function,
)

from branchwise.backends.transformers.attention import Window
from branchwise.backends.transformers.check import EXACT, MOST_ROUNDED, ROUNDED, check_against_own_forward, own_rounding
from branchwise.backends.transformers.kv_cache import batch_ancestors
from branchwise.backends.transformers.probe import Probe
from branchwise.backends.transformers.runner import ModelRunner
from branchwise.backends.transformers.target import TransformersTarget
from branchwise.core.batch import TreeBatch
from branchwise.errors import UnsupportedModel
from tests.conformance.architectures import build, served


@pytest.fixture
def probe() -> Probe:
    return Probe("Model", served()["llama"], torch.device("cpu"))


def test_a_causal_mask_and_a_sliding_window_are_known(probe: Probe) -> None:
    probe.see_mask(causal_mask_function, None, False)
    for window in (1, 2, 8, 4096):
        probe.see_mask(sliding_window_causal_mask_function(window), window, False)


@pytest.mark.parametrize(
    ("mask", "window"),
    [
        (bidirectional_mask_function, None),
        (chunked_causal_mask_function(8, torch.zeros(1, dtype=torch.long)), 8),
        (sliding_window_causal_mask_function(8), 9),  # a mask that is not what it says
        (sliding_window_causal_mask_function(8), None),
        (causal_mask_function, 8),
    ],
)
def test_any_other_mask_is_refused(probe: Probe, mask: Callable[..., Tensor], window: int | None) -> None:
    with pytest.raises(UnsupportedModel, match="neither causal nor a sliding window"):
        probe.see_mask(mask, window, False)


def test_a_mask_with_functions_of_its_own_is_refused(probe: Probe) -> None:
    with pytest.raises(UnsupportedModel, match="neither causal nor a sliding window"):
        probe.see_mask(causal_mask_function, None, True)


def test_a_mask_that_does_not_come_from_us_is_refused(probe: Probe) -> None:
    with pytest.raises(UnsupportedModel, match="mask of its own"):
        probe.see_attention(torch.zeros(1, 1, 4, 4), {})


def test_a_window_that_contradicts_the_mask_is_refused(probe: Probe) -> None:
    probe.see_attention(Window(8), {"sliding_window": 8})
    probe.see_attention(Window(8), {"sliding_window": None})
    with pytest.raises(UnsupportedModel, match="window of 8 and its mask one of None"):
        probe.see_attention(Window(None), {"sliding_window": 8})


def test_a_keyword_that_might_change_the_result_is_refused_unless_it_is_empty(probe: Probe) -> None:
    probe.see_attention(Window(None), {"s_aux": None, "dropout": 0.0, "use_cache": True})
    with pytest.raises(UnsupportedModel, match="takes alibi, s_aux, which"):
        probe.see_attention(Window(None), {"s_aux": torch.ones(1), "alibi": torch.ones(1)})


def test_a_model_on_several_devices_is_refused() -> None:
    model = build(served()["llama"])
    model.lm_head.to("meta")
    with pytest.raises(UnsupportedModel, match="several devices"):
        TransformersTarget(model, slots=1)


# Rounding


TEXTS = torch.tensor([[5, 16, 27, 8, 1, 6], [3, 10, 17, 24, 31, 2]])
PLACES = [(row, place) for row in range(2) for place in range(6)]


def target_of(family: str, dtype: torch.dtype) -> TransformersTarget:
    return TransformersTarget(build(served()[family], dtype), slots=2, context=64)


def rounding(target: TransformersTarget) -> float:
    return own_rounding(target, TEXTS, target.own_logits(TEXTS), PLACES)


@pytest.mark.parametrize("family", ["llama", "gemma2", "gemma3", "gpt2", "opt", "qwen2-moe"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_calm_model_is_held_to_the_strict_bound(family: str, dtype: torch.dtype) -> None:
    """Its own rounding is seen, and far too small to relax anything."""
    assert 0 < 2 * rounding(target_of(family, dtype)) < ROUNDED


def test_embeddings_in_place_of_tokens_are_the_same_to_the_model() -> None:
    target = target_of("gemma2", torch.float32)
    embeddings = target.model.get_input_embeddings()(TEXTS)
    assert torch.equal(target.own_logits(embeddings), target.own_logits(TEXTS))


class Misplacing(ModelRunner):
    """Takes places in a tree for positions, where they are depths."""

    def run(self, tokens: Tensor, positions: Tensor, cache: Any, keep: int = 0) -> tuple[Tensor, dict[str, Tensor]]:
        return super().run(tokens, positions + torch.arange(positions.shape[1]), cache, keep)


def wrong_target(model: PreTrainedModel) -> TransformersTarget:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("branchwise.backends.transformers.target.ModelRunner", Misplacing)
        return TransformersTarget(model, slots=2, context=64)


def everything(batch: TreeBatch, device: torch.device) -> Tensor:
    """A mask by which a node sees all that was drafted before it, in whatever branch."""
    return batch_ancestors(batch, device).new_ones(len(batch), batch.nodes, batch.nodes).tril()


def sharp(family: str, times: float) -> PreTrainedModel:
    """A model in bfloat16 for which places matter more than for those of the other tests, and so does rounding."""
    model = build(served()[family])
    for name, weight in model.named_parameters():
        if weight.ndim >= 2 and "embed" not in name and "lm_head" not in name:
            weight.mul_(times)
    return model.to(torch.bfloat16)


@pytest.mark.parametrize(("family", "times"), [("llama", 4.0), ("gemma2", 4.0), ("qwen2-moe", 8.0)])
def test_wrong_positions_and_masks_are_refused_in_low_precision(
    family: str, times: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = sharp(family, times)
    with pytest.raises(UnsupportedModel, match="differ from its own forward by"):
        wrong_target(model)
    with monkeypatch.context() as patch:
        patch.setattr("branchwise.backends.transformers.target.batch_ancestors", everything)
        with pytest.raises(UnsupportedModel, match="differ from its own forward by"):
            TransformersTarget(model, slots=2, context=64)
    target = TransformersTarget(model, slots=2, context=64)
    assert (2 * rounding(target) > ROUNDED) is (family == "qwen2-moe"), "one of them magnifies rounding"


def test_a_model_that_magnifies_rounding_is_held_to_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the bound were too strict for a model that is served."""
    target = target_of("llama", torch.bfloat16)
    monkeypatch.setattr("branchwise.backends.transformers.check.ROUNDED", 1e-3)
    check_against_own_forward(target, target.runner)
    monkeypatch.setattr("branchwise.backends.transformers.check.own_rounding", lambda *given: 0.0)
    with pytest.raises(UnsupportedModel, match="differ from its own forward"):
        check_against_own_forward(target, target.runner)


def test_no_rounding_excuses_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("branchwise.backends.transformers.check.own_rounding", lambda *given: 10.0)
    assert MOST_ROUNDED < 0.5
    with pytest.raises(UnsupportedModel, match="differ from its own forward"):
        wrong_target(sharp("llama", 4.0))


def test_float32_is_not_relaxed(monkeypatch: pytest.MonkeyPatch) -> None:
    def asked(*given: object) -> float:
        raise AssertionError("nobody asks for rounding in float32")

    monkeypatch.setattr("branchwise.backends.transformers.check.own_rounding", asked)
    with pytest.raises(UnsupportedModel, match="differ from its own forward"):
        wrong_target(build(served()["llama"]))
    assert EXACT <= 1e-3
