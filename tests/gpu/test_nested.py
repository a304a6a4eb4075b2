"""A nested model on a device: the exit that is best for its target drafts ahead of the host."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from branchwise.core.sampling import SamplingParams
from branchwise.draft import build_drafter, build_policy
from branchwise.draft.model.draft_model import Weights
from branchwise.draft.model.drafter import ModelDrafter
from branchwise.draft.nested.drafter import NestedDrafter
from branchwise.train.student.model import with_layers
from tests.gpu.test_model_ahead import target_of, texts_of, write
from tests.test_model_ahead import VOCABULARY
from tests.test_nested import EXITS, nested_model

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.parametrize("compile", [False, True])
def test_it_drafts_as_the_model_of_these_layers_does(monkeypatch: pytest.MonkeyPatch, compile: bool) -> None:
    monkeypatch.setattr(NestedDrafter, "_measured", lambda self: np.array([[[0.5] * 3, [0.1, 0.9, 0.9]]]))
    model = nested_model(vocabulary=VOCABULARY).cuda()
    nested = NestedDrafter(Weights("nested", model, None), tree=build_policy("chain:3"))
    shallow = with_layers(model, range(EXITS[1])).cuda()
    alone = ModelDrafter(Weights("alone", shallow, None), tree=build_policy("chain:3"))
    target = target_of(compile=compile)
    found = [texts_of(write(drafter, "match", [SamplingParams()], target)) for drafter in (nested, alone)]
    assert found[0] == found[1] == texts_of(write(build_drafter("none"), "match", [SamplingParams()], target))
    assert nested.only == EXITS[1]
    assert nested._ahead is not None
    assert nested.passes == alone.passes, "drafts that differ are accepted differently"
