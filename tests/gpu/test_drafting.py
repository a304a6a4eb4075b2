"""Drafting on a device: every preset with a draft model writes there what it writes on the host."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from branchwise.draft import build_growth
from branchwise.draft.model import ModelDrafter
from branchwise.draft.trim import save_counts
from branchwise.draft.weights import Weights
from branchwise.engine import Engine, Request
from branchwise.methods import PRESETS
from branchwise.registry import split_spec
from branchwise.sampling import SamplingParams
from branchwise.target.transformers import TransformersTarget
from branchwise.verify import VERIFIERS
from tests.conformance.architectures import VOCABULARY, build, served

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

DRAFTED = [name for name, method in PRESETS.items() if method.needs_draft_model]
PROMPTS = [(5, 6, 7, 5, 6), (9,), (4, 4, 4, 4)]


def texts(preset: str | None, temperature: float, device: str) -> list[list[int]]:
    """What a preset makes of the prompts, or plain decoding; its draft model is the target with other noise."""
    config = served()["llama"]
    target = TransformersTarget(build(config, device=device), slots=3)
    method = PRESETS[preset or "plain"]
    if preset is None:
        drafter, verifier = method.build()
    else:
        draft = build(config)
        for number, weight in enumerate(draft.parameters()):
            noise = torch.randn(weight.shape, generator=torch.Generator().manual_seed(number))
            weight.add_(0.2 * weight.std() * noise)
        options = split_spec(method.draft)[2]
        trim = {"trim": VOCABULARY - 8} if "trim" in options else {}
        save_counts(target, torch.arange(VOCABULARY), {})
        drafter = ModelDrafter(
            Weights("noisy", draft.to(device), None),
            tree=build_growth(method.tree or "chain"),
            recall=float(options["recall"]) if "recall" in options else None,
            **trim,
        )
        verifier = VERIFIERS.build(method.verify)
    engine = Engine(target, drafter, verifier)
    sampling = SamplingParams(temperature=temperature, seed=3)
    generations = [engine.submit(Request(prompt, sampling, max_new_tokens=24)) for prompt in PROMPTS]
    while engine.busy:
        engine.step()
    if preset is not None:
        assert sum(generation.stats.accepted_tokens for generation in generations) > 0
    return [generation.token_ids for generation in generations]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("preset", DRAFTED)
def test_a_preset_writes_on_a_device_what_it_writes_on_the_host(
    preset: str, temperature: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Catches tensors left on the host, and draws or laws that depend on where they are made.
    monkeypatch.setenv("BRANCHWISE_CACHE", str(tmp_path))
    found = texts(preset, temperature, "cuda")
    assert found == texts(preset, temperature, "cpu")
    if temperature == 0 and PRESETS[preset].lossless:
        assert found == texts(None, temperature, "cuda")
