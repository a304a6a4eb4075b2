"""Drafting on a device: what is drawn there is what is drawn on the host, and so are the texts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from branchwise.backends.transformers.target import TransformersTarget
from branchwise.core.sampling import SamplingParams
from branchwise.core.sequence import SequenceState
from branchwise.draft import build_drafter, build_policy
from branchwise.draft.base import Budget
from branchwise.draft.model.draft_model import Weights
from branchwise.draft.model.drafter import ModelDrafter
from branchwise.draft.model.vocabulary import save_counts
from branchwise.draft.sampler import DeviceSampler, SeededSampler
from branchwise.engine import Engine, Request
from branchwise.methods import PRESETS
from branchwise.registry import split_spec
from branchwise.verify import VERIFIERS
from tests import device_twins
from tests.conformance.architectures import VOCABULARY, build, served
from tests.test_device_paths import table_of

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
        save_counts(target.info, torch.arange(VOCABULARY), {})
        drafter = ModelDrafter(
            Weights("noisy", draft.to(device), None),
            tree=build_policy(method.tree or "chain"),
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
    # Catches tensors left on the host, and draws or distributions that depend on where they are made.
    monkeypatch.setenv("BRANCHWISE_CACHE", str(tmp_path))
    found = texts(preset, temperature, "cuda")
    assert found == texts(preset, temperature, "cpu")
    if temperature == 0 and PRESETS[preset].lossless:
        assert found == texts(None, temperature, "cuda")


def test_the_draws_of_a_level_are_those_of_the_host() -> None:
    here, there = SeededSampler(5, 3), SeededSampler(5, 3, DeviceSampler(torch.device("cuda")))
    for vocabulary in (200, 1024, 151_936):
        for count in (3, 1, 4, 2):
            logits = torch.randn(count, vocabulary, generator=torch.Generator().manual_seed(count))
            probs = (4 * logits).softmax(dim=-1)
            draws = [(turn % count, turn) for turn in range(2 * count)]
            sizes, numbers = [3] * count, range(count)
            for _ in range(2):  # recorded, then replayed
                assert there.picks_from(probs.cuda(), draws) == here.picks_from(probs, draws)
                assert there.orders(probs.cuda(), sizes, numbers) == here.orders(probs, sizes, numbers)
                opened = there.openings(probs.cuda(), 3, numbers)
                assert opened == [pytest.approx(row, rel=1e-6) for row in here.openings(probs, 3, numbers)]
                best = here.best(probs, 3)
                assert there.best(probs.cuda(), 3) == [[pytest.approx(pair, rel=1e-6) for pair in row] for row in best]


@pytest.mark.parametrize("tree", ["chain:6", "paths:4x6", "paths:4x6@2", "rsd-c:4,2,1", "rsd-s:3x3", "dynamic:12"])
def test_a_memory_draws_on_a_device_what_it_draws_on_the_host(tree: str) -> None:
    """In batches of two sizes, each recorded and replayed, where some rows of the table are empty."""
    config, found = served()["llama"], []
    for device in ("cuda", "cpu"):
        drafter = build_drafter("recycle", tree)
        drafter.bind(TransformersTarget(build(config, device=device), slots=1).info)
        drafter.restore(table_of(1, 8, VOCABULARY))  # type: ignore[attr-defined]
        found.append([])
        for turn in range(8):
            texts = [
                SequenceState([4] * turn + [7 * turn + row], SamplingParams((turn + row) % 3 / 2, seed=8 * turn + row))
                for row in range(1 + 2 * (turn % 2))
            ]
            for drawn in drafter.draft(texts, [Budget(32, 8)] * len(texts)):
                assert drawn.tokens.device.type == "cpu"
                assert drawn.q is None or drawn.q.device.type == device
                q = None if drawn.q is None else drawn.q.tolist()
                found[-1].append((drawn.tokens.tolist(), drawn.parents, drawn.draw, drawn.leaves, q))
    assert found[0] == found[1]
    assert {1} < {len(drawn[1]) for drawn in found[0]}


@pytest.mark.parametrize(("count", "length", "common"), [(1, 6, 0), (4, 6, 0), (3, 4, 2), (64, 2, 0)])
def test_the_kernel_draws_what_the_operations_of_torch_draw(count: int, length: int, common: int) -> None:
    pytest.importorskip("triton")
    from branchwise.draft.recycle import paths_kernel

    for width in (1, 3, 8, 64):
        table = {name: tensor.cuda() for name, tensor in table_of(width, width, 700).items()}
        numbers = [[7 * text, (1 << 62) + text, 3 * text, text % 2] for text in range(9)]
        inputs, found = torch.tensor(numbers, device="cuda"), []
        for way in (device_twins.draw_paths, paths_kernel.draw_paths):
            q = torch.full((9, count * (length - 1) + 1, 700), 7.0, device="cuda")
            rows = way(table["tokens"], table["masses"], inputs, q, count=count, length=length, common=common)
            found.append((rows.tolist(), q))
        assert found[0][0] == found[1][0]
        assert torch.equal(found[0][1], found[1][1])
