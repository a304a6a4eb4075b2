"""What the probe refuses, one rule at a time."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from transformers.masking_utils import (
    bidirectional_mask_function,
    causal_mask_function,
    chunked_causal_mask_function,
    sliding_window_causal_mask_function,
)

from branchwise.errors import UnsupportedModel
from branchwise.target.attention import Window
from branchwise.target.probe import Probe
from branchwise.target.transformers import TransformersTarget
from tests.conformance.architectures import build, served


@pytest.fixture
def probe() -> Probe:
    return Probe("Model", served()["llama"])


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
